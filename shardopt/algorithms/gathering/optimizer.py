"""The base of algorithms that compute on whole matrices or blocks of parameters.

Each part is gathered at one rank, its owner, which computes on the whole part. The result is scattered to the ranks
that hold the part.

So a result is the same bits on any mesh. Everything that is sent goes in one all-to-all to the owners and one back, or
a few where there is much (`redistribute.py`, `assignment.py`).

Ranks must have gradients of the same parameters, as a part is assembled from all shards. A ShardedTensor has its
gradients with the shards: one on any rank is one for the whole, zero elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardopt.algorithms.absent_gradients import ABSENT, LATE, absent, refuse_absent, refused_with_another
from shardopt.algorithms.communicating import CommunicatingOptimizer, raise_fault
from shardopt.algorithms.gathering.redistribute import MatrixRedistributor
from shardopt.algorithms.gathering.step import GatheredStep
from shardopt.errors import GradientError, ShardoptError
from shardopt.ranks import Ranks, ranks_among, ranks_of
from shardopt.sharding.view import groups_of, members_of

_HAS, _LACKS, _REFUSES, _REFUSES_ANOTHER = 1.0, 0.0, -1.0, -2.0


class GatheringOptimizer(CommunicatingOptimizer):
    """A torch optimizer over parameters that may be sharded, on one or several meshes.

    Every rank of every mesh must call `step` with the same parameters in the same order, and the same of them must have
    gradients. For each set of ranks over which parameters lie, a step makes one all-to-all to the owners and one back
    for every `round_bytes` that an owner works on; before them, on the CPU or where there are ShardedTensors, one small
    all-reduce that finds absent gradients. Where nothing is waited for (on accelerators), the first exchange also
    carries which ranks have which gradients, and parameters of which nobody has one take part in it; differences are
    raised in a later step.
    """

    round_bytes: ClassVar[int] = 128 << 20
    """The size of an owner's parts beyond which its next part waits for the next round.

    Up to four such buffers exist at a time. The same on every rank.
    """

    def _take(self, steps: Sequence[Any]) -> None:
        steps = sorted(steps, key=lambda step: step.key)
        teams = _teams(steps)
        counted = [each for team in teams if team.checks_first for each in team.count()]
        late = [team for team in teams if not team.checks_first]
        stepped, refusal = steps, None
        try:
            if counted or not late:
                raise_fault(steps)
            refuse_absent([(step.name, step.all_or_none) for step, _ in counted], [counts for _, counts in counted])
        except ShardoptError as error:
            if not late:
                raise
            refusal = error
        if refusal is not None or any(step.refuses for step in steps):  # only what the others wait for
            teams, stepped = late, [step for team in late for step in team.steps]
        for step in stepped:
            if step.gradients is not None and step.is_held:
                step.ready()
        for team in teams:
            stepping = team.stepping()
            if stepping:
                device = team.ranks.device_beside(stepping[0].device)  # on which they exchange
                redistributor = MatrixRedistributor(team.ranks, stepping[0].dtype, device, self.round_bytes)
                parts = [(step, number) for step in stepping for number in range(len(step.parts))]
                flags = redistributor.run(parts, [] if team.checks_first else list(map(_flag, stepping)))
                if not team.checks_first:
                    names = [step.name for step in stepping]
                    self.deferred.defer(flags, partial(_refuse_differing, team.ranks.members, names))
        if refusal is not None:  # now that the others do not wait for this rank
            raise refusal
        raise_fault(steps)


class Team:
    """The ranks that hold some parameters, and the steps of these parameters, in the same order on all these ranks."""

    def __init__(self, ranks: Ranks, steps: Sequence[GatheredStep]) -> None:
        self.ranks, self.steps = ranks, steps
        self.checks_first = ranks.size == 1 or ranks.device.type == "cpu" or not all(step.all_or_none for step in steps)
        """Whether ranks compare gradients before the step; on an accelerator only if they must, since that waits."""

    def count(self) -> list[tuple[GatheredStep, list[float]]]:
        """Returns, for each parameter, on how many ranks it has a gradient, and on how many it has none.

        The second is NaN if a rank refuses its gradient, infinite if one refuses another. Collective: one all-reduce.
        """
        if self.ranks.size == 1:
            return []
        own = [
            [float(step.gradients is not None), step.refusal or float(step.gradients is None)] for step in self.steps
        ]
        counts = self.ranks.all_reduce_sum(torch.tensor(own, dtype=torch.float64, device=self.ranks.device)).cpu()
        for step, here in zip(self.steps, counts, strict=True):
            step.counts = here
            step.is_due()  # which makes the zeros of ShardedTensors
        return list(zip(self.steps, counts.tolist(), strict=True))

    def stepping(self) -> list[GatheredStep]:
        """Returns the steps that take part: with a gradient or, unless `checks_first`, possibly with one."""
        return [
            step
            for step in self.steps
            if step.gradients is not None or (not self.checks_first and step.may_have_gradient)
        ]


def _teams(steps: Iterable[GatheredStep]) -> list[Team]:
    """Groups the steps by the ranks that hold their parameters, in the same order on all these ranks."""
    rank = ranks_of().rank
    teams: dict[tuple[tuple[int, ...], str, str], list[GatheredStep]] = {}
    for step in steps:
        members = members_of(step.parameter)
        if rank in members and step.parts:  # one without elements has nothing to work on
            # The numbers of devices differ among ranks.
            device = str(step.device) if len(members) == 1 else step.device.type
            teams.setdefault((members, str(step.dtype), device), []).append(step)
    return [Team(ranks_among(key[0], groups_of(teams[key][0].parameter)), teams[key]) for key in sorted(teams)]


def _flag(step: GatheredStep) -> float:
    """Returns, as a number that any dtype can hold, whether this rank has, lacks or refuses a gradient, or another."""
    if step.refuses:
        return _REFUSES if step.fault else _REFUSES_ANOTHER
    return _HAS if step.gradients is not None else _LACKS


def _refuse_differing(ranks: Sequence[int], names: Sequence[str], flags: Tensor) -> None:
    """Raises if ranks had gradients of different parameters in a step.

    Args:
        ranks: R global numbers.
        names: of the N parameters that took part in it.
        flags: [R, N], the `_flag` of each, on the CPU.

    Raises:
        GradientError: they do not have the same gradients; all ranks find it in the same numbers.
    """
    problems, of_others, refusing = [], list[str](), set[int]()
    for name, of_ranks in zip(names, flags.T.tolist(), strict=True):
        have, lack, refuse, refuse_another = (
            [rank for rank, flag in zip(ranks, of_ranks, strict=True) if flag == kind]
            for kind in (_HAS, _LACKS, _REFUSES, _REFUSES_ANOTHER)
        )
        if refuse:
            problems.append(absent(name, f"one that ranks {refuse} refuse"))
        elif have and lack:
            problems.append(absent(name, f"a gradient on ranks {have}, none on {lack}"))
        elif refuse_another:
            of_others.append(name)
            refusing.update(refuse_another)
    late = "an earlier step took zeros in their place; load a checkpoint"
    if not problems and of_others:
        late = LATE
        problems = [refused_with_another(of_others, f"ranks {sorted(refusing)} refuse another parameter's")]
    if problems:
        raise GradientError(f"{ABSENT}: {late}", problems, code="missing-gradient")
