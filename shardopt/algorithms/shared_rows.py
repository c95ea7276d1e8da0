"""The base of algorithms whose ranks share rows of parameters.

A rank without a gradient has zeros. One that cannot step tells the others in the exchange of the rows, so that no rank
steps what they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from math import inf, isinf
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardopt.algorithms.absent_gradients import absent, told_late
from shardopt.algorithms.communicating import CommunicatingOptimizer, ParameterStep, is_on_host, raise_fault
from shardopt.algorithms.reductions import Term
from shardopt.errors import GradientError, Problem
from shardopt.sharding.reduced import ShardGroup, shard_groups_of
from shardopt.sharding.view import device_of

MIXED = "one on some of the ranks that share its rows, none on others"


def cuts_of_rows(parameter: Tensor) -> tuple[ShardGroup, ...]:
    """Returns the groups of ranks that hold parts of the same rows of a parameter."""
    return tuple(cut for cut in shard_groups_of(parameter) if any(cut.dims))


class SharedRows:
    """The exchange, in a step, of the ranks that share rows of one parameter: a flag, and who lacks a gradient.

    Args:
        parameter: whose rows are cut.
        cuts: `cuts_of_rows`.
        dtype: of the flag.

    Attributes:
        flag: one element: above 0 where a rank has a gradient, infinite where one cannot step; of this rank, and once
            it was exchanged, as a sum or a maximum, of all.
        lacks: one element: above 0 where a rank with elements has no gradient. Exchanged where nobody waits for `flag`,
            so that all ranks find alike what is raised late.
        refuses: whether this rank cannot step.
        on_host: the numbers that `asked` names, once they were exchanged and read; not where nobody waits for them.
    """

    on_host: Sequence[float] = ()

    def __init__(self, parameter: Tensor, cuts: tuple[ShardGroup, ...], dtype: torch.dtype) -> None:
        self.parameter, self.cuts, self.refuses = parameter, cuts, False
        self.flag: Tensor = torch.zeros(1, dtype=dtype, device=device_of(parameter))
        self.lacks: Tensor = torch.zeros_like(self.flag)

    def refuse(self) -> None:
        """Notes that this rank cannot step; must be called before the exchange."""
        self.refuses = True
        self.flag.fill_(inf)

    def asked(self) -> tuple[Tensor, ...]:
        """Returns what the host has to know of the first exchange: `flag`, and what else there is."""
        return (self.flag,)


class RowSharingStep(ParameterStep):
    """The step of one parameter whose rows several ranks may share.

    Attributes:
        shared: of those rows; None where each is whole on one rank, or no rank can have a gradient.
    """

    shared: SharedRows | None = None
    waits: ClassVar[bool] = False
    """Whether the step waits for an accelerator to learn of other ranks' refusals; if not, a later step raises them."""

    @property
    def knows(self) -> bool:
        """Whether the flag of all ranks may be read without waiting."""
        return self.shared is None or self.waits or is_on_host(self.shared.flag)

    def is_due(self) -> bool:
        """Whether the parameter has a gradient and this rank holds a share of it; valid after the exchange."""
        if not self.is_held:
            return False
        if self.shared is None or not self.knows:
            return self.gradients is not None
        return self.shared.on_host[0] > 0


class RowSharingOptimizer(CommunicatingOptimizer):
    """The base of algorithms whose ranks exchange only numbers of the rows that they share."""

    def _terms(self, step: Any) -> Iterable[Term]:
        """Returns the flag and this rank's numbers of the rows that it shares."""
        raise NotImplementedError

    def _update(self, step: Any) -> None:
        """Updates state and parameter."""
        raise NotImplementedError

    def _take(self, steps: Sequence[Any]) -> None:
        if any(step.fault is not None for step in steps):
            for step in steps:
                if step.shared is not None:
                    step.shared.refuse()
        super()._take(steps)

    def equations(self, step: Any) -> Iterator[Iterable[Term]]:
        yield () if step.shared is None else self._terms(step)
        if step.is_due():
            self._update(step)

    def _counts(self, steps: Sequence[Any]) -> tuple[Tensor, ...]:
        return tuple(each for step in steps if step.shared is not None for each in step.shared.asked())

    def _agree(self, steps: Sequence[Any]) -> None:
        """Raises on all ranks that share rows with one that cannot step; a step later if it would wait for a device."""
        shared = [step for step in steps if step.shared is not None]
        for device in {step.device for step in shared if not step.knows}:
            here = [step for step in shared if step.device == device]
            numbers = torch.cat([each for step in here for each in (step.shared.flag, step.shared.lacks)])
            self.deferred.defer(numbers, partial(_refuse_late, [step.name for step in here]))
        raise_fault(steps)
        known = [step for step in shared if step.knows]
        _read([step.shared for step in known])
        _refuse([step.name for step in known if isinf(step.shared.on_host[0])])


def _read(shared: Sequence[SharedRows]) -> None:
    """Reads what the host has to know, of all parameters together: waits once for each device that they are on."""
    for device in {each.flag.device for each in shared}:
        here = [each for each in shared if each.flag.device == device]
        numbers = iter(torch.cat([number for each in here for number in each.asked()]).tolist())
        for each in here:
            each.on_host = [*islice(numbers, sum(map(len, each.asked())))]


def _refuse_late(names: Sequence[str], numbers: Tensor) -> None:
    """Raises if, in an earlier step, a rank refused its gradients, or lacked one that others had.

    Args:
        names: of the N parameters that took part in it.
        numbers: [2 N], flag and `lacks` of each, of all ranks.
    """
    flags = list(zip(names, *numbers.view(-1, 2).T.tolist(), strict=True))
    missing = [absent(name, MIXED) for name, flag, lacks in flags if 0 < flag < inf and lacks]
    with told_late():
        _refuse([name for name, flag, _ in flags if isinf(flag)], missing)


def _refuse(names: Sequence[str], missing: Sequence[Problem] = ()) -> None:
    """Raises if another rank refused its gradients; the error there says why."""
    problems = [
        Problem(name, "a gradient, of it or of another, that another rank refuses", "good ones on all", "see its error")
        for name in names
    ]
    if problems or missing:
        message = "a rank that shares rows cannot step"
        raise GradientError(message, [*problems, *missing], code="missing-gradient")
