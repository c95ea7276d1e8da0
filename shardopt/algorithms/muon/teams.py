"""Groups matrices that lie over the same ranks, and checks that all of these have a gradient of each.

They must, as a sharded matrix is assembled from all shards. A ShardedTensor has its gradients with the shards: one on
any rank is one for the whole matrix, zero elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from shardopt.errors import GradientError, Problem
from shardopt.ranks import Ranks
from shardopt.sharding.gradients import requires_gradient, takes_gradient
from shardopt.sharding.view import local_tensors

_HAS, _LACKS, _REFUSES = 1.0, 0.0, -1.0
_MESSAGE = "gradients are absent on some ranks, or refused there"


class Member(Protocol):
    """A matrix in one step."""

    parameter: Tensor
    name: str
    gradients: list[Tensor] | None
    fault: GradientError | None


M = TypeVar("M", bound=Member)


class Team(Generic[M]):
    """The ranks over which some matrices lie, and these, in the same order on all of them."""

    def __init__(self, ranks: Ranks, matrices: Sequence[M]) -> None:
        self.ranks, self.matrices = ranks, matrices
        sharded_gradients = any(not takes_gradient(matrix.parameter) for matrix in matrices)
        self.checks_first = ranks.device.type == "cpu" or ranks.size == 1 or sharded_gradients
        """Whether ranks compare gradients before the step; an accelerator is waited for only where one has to know."""

    def agree(self) -> list[Problem]:
        """Finds where some ranks have a gradient and others do not, or one refuses its own. Collective: one all-reduce.

        To be called where the team `checks_first`. Returns the same on all ranks.
        """
        size = self.ranks.size
        if size == 1:
            return []
        own = [size + 1 if matrix.fault else int(matrix.gradients is not None) for matrix in self.matrices]
        counts = self.ranks.all_reduce_sum(torch.tensor(own, dtype=torch.int64, device=self.ranks.device)).tolist()
        problems = []
        for matrix, count in zip(self.matrices, counts, strict=True):
            if count > size:
                problems.append(_problem(matrix.name, "one that another of its ranks refuses"))
            elif not takes_gradient(matrix.parameter):
                if count and matrix.gradients is None:
                    matrix.gradients = [torch.zeros_like(local) for local in local_tensors(matrix.parameter)]
            elif 0 < count < size:
                problems.append(_problem(matrix.name, f"a gradient on {count} of its {size} ranks"))
        return problems

    def stepping(self) -> list[M]:
        """Returns the matrices that take part in the step: those with a gradient, and unless it `checks_first` all that
        may have one."""
        return [
            matrix
            for matrix in self.matrices
            if matrix.gradients is not None
            or (not self.checks_first and (matrix.fault is not None or requires_gradient(matrix.parameter)))
        ]

    def gradient_flags(self, stepping: Sequence[M]) -> list[float]:
        """Returns for each matrix whether this rank has, lacks or refuses a gradient; nothing if it `checks_first`."""
        if self.checks_first:
            return []
        return [_REFUSES if matrix.fault else _HAS if matrix.gradients is not None else _LACKS for matrix in stepping]


def refuse_differing_gradients(ranks: Sequence[int], names: Sequence[str], flags: Tensor) -> None:
    """Raises where ranks did not have gradients of the same matrices in a step.

    Args:
        ranks: R global numbers.
        names: of the N matrices that took part in it.
        flags: [R, N], the `gradient_flags` of each, on the CPU.

    Raises:
        GradientError: they do not have the same gradients; all ranks find it in the same numbers.
    """
    problems = []
    for name, of_ranks in zip(names, flags.T.tolist(), strict=True):
        by_flag: dict[float, list[int]] = {_HAS: [], _LACKS: [], _REFUSES: []}
        for rank, flag in zip(ranks, of_ranks, strict=True):
            by_flag[flag].append(rank)
        have, lack, refuse = by_flag.values()
        if refuse:
            problems.append(_problem(name, f"one that ranks {refuse} refuse"))
        elif have and lack:
            problems.append(_problem(name, f"a gradient on ranks {have}, none on {lack}"))
    if problems:
        raise GradientError(f"{_MESSAGE}: an earlier step took zeros in their place; load a checkpoint", problems)


def refusal(problems: Sequence[Problem]) -> GradientError:
    """Makes the error of ranks that do not have gradients of the same matrices."""
    return GradientError(_MESSAGE, problems)


def _problem(name: str, present: str) -> Problem:
    remedy = "give it zeros where a rank has nothing to do with it"
    return Problem(f"{name}.grad", present, "one on all of its ranks, or on none", remedy)
