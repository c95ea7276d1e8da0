"""Matrices that lie over the same ranks, and whether all of these have a gradient of each.

They must, as what is sharded is put together from all shards. A ShardedTensor has its gradients with the shards: one on
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
_WHAT = "gradients are absent on some ranks, or refused there"


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
        self.asks = ranks.device.type == "cpu" or ranks.size == 1 or sharded_gradients
        """Whether ranks ask each other before the step; an accelerator is waited for only where one has to know."""

    def agree(self) -> list[Problem]:
        """Finds where some ranks have a gradient and others do not, or one refuses its own. Collective: one all-reduce.

        To be called where the team `asks`. Gives the same on all ranks.
        """
        size = self.ranks.size
        if size == 1:
            return []
        own = [size + 1 if matrix.fault else int(matrix.gradients is not None) for matrix in self.matrices]
        told = self.ranks.all_reduce_sum(torch.tensor(own, dtype=torch.int64, device=self.ranks.device)).tolist()
        problems = []
        for matrix, count in zip(self.matrices, told, strict=True):
            if count > size:
                problems.append(_problem(matrix.name, "one that another of its ranks refuses"))
            elif not takes_gradient(matrix.parameter):
                if count and matrix.gradients is None:
                    matrix.gradients = [torch.zeros_like(leaf) for leaf in local_tensors(matrix.parameter)]
            elif 0 < count < size:
                problems.append(_problem(matrix.name, f"a gradient on {count} of its {size} ranks"))
        return problems

    def moving(self) -> list[M]:
        """The matrices that take part in the step: those with a gradient; all that may have one where nobody asks."""
        return [
            matrix
            for matrix in self.matrices
            if matrix.gradients is not None
            or (not self.asks and (matrix.fault is not None or requires_gradient(matrix.parameter)))
        ]

    def word(self, moving: Sequence[M]) -> list[float]:
        """What this rank tells the others of its gradients where the team does not ask; else nothing."""
        if self.asks:
            return []
        return [_REFUSES if matrix.fault else _HAS if matrix.gradients is not None else _LACKS for matrix in moving]


def judge_words(ranks: Sequence[int], names: Sequence[str], told: Tensor) -> None:
    """Looks at what ranks have told each other in a step.

    Args:
        ranks: R global numbers.
        names: of the N matrices that took part in it.
        told: [R, N], the `word` of each, on the CPU.

    Raises:
        GradientError: they do not have the same gradients; all ranks find it in the same numbers.
    """
    problems = []
    for name, of_ranks in zip(names, told.T.tolist(), strict=True):
        by_word: dict[float, list[int]] = {_HAS: [], _LACKS: [], _REFUSES: []}
        for rank, word in zip(ranks, of_ranks, strict=True):
            by_word[word].append(rank)
        have, lack, refuse = by_word.values()
        if refuse:
            problems.append(_problem(name, f"one that ranks {refuse} refuse"))
        elif have and lack:
            problems.append(_problem(name, f"a gradient on ranks {have}, none on {lack}"))
    if problems:
        raise GradientError(f"{_WHAT}: an earlier step took zeros in their place; load a checkpoint", problems)


def refusal(problems: Sequence[Problem]) -> GradientError:
    """What to raise where ranks do not have the same gradients."""
    return GradientError(_WHAT, problems)


def _problem(name: str, found: str) -> Problem:
    remedy = "give it zeros where a rank has nothing to do with it"
    return Problem(f"{name}.grad", found, "one on all of its ranks, or on none", remedy)
