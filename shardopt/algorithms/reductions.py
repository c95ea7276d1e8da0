"""Sums over the cuts of tensors: one all-reduce per process group, for any number of tensors.

Backends promise the same bits to the ranks of one all-reduce, not to those of another one that adds up the same
numbers: NCCL may add them in another order. Two numbers have one sum in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.ranks import Ranks, ranks_of
from shardopt.sharding.reduced import ShardGroup

Term = tuple[Tensor, tuple[ShardGroup, ...]]
"""A tensor with this rank's share of a sum, and the groups of ranks that the sum runs over."""


def all_reduce_terms(terms: Iterable[Term], reduce: Callable[[Ranks, Tensor], Tensor] = Ranks.all_reduce_sum) -> None:
    """Adds up each tensor, in place, over the groups of its cuts: one all-reduce per group and dtype.

    All ranks of a group must pass tensors of the same shapes, in the same order.

    Args:
        terms: tensors and their cuts.
        reduce: `Ranks.all_reduce_max` takes the largest of each element in place of the sum; then none may be NaN.
    """
    _together(((tensor, cut.group) for tensor, cuts in terms for cut in cuts), reduce)


def equate_sums(terms: Collection[Term], counts: tuple[Tensor, ...] = ()) -> None:
    """Gives tensors that were added up over their cuts, in place, the same bits on all ranks that have the same sums.

    Replicas get those of the first, and the counts of all of them: in one all-reduce per group and dtype, to which the
    others give zeros and their counts. One broadcast for other cuts of one tensor. Neither where no sum is of more than
    two ranks. All ranks of a group must pass tensors of the same shapes, in the same order.

    Args:
        terms: as `all_reduce_terms` got them.
        counts: tensors among them, or views of theirs, with numbers whose sums are exact in any order.
    """
    exact = {id(each) for each in counts}
    order = {group: place for place, group in enumerate(dict.fromkeys(cut.group for _, cuts in terms for cut in cuts))}
    of_replicas: list[tuple[Tensor, dist.ProcessGroup]] = []
    of_cuts: list[tuple[Tensor, dist.ProcessGroup]] = []
    for tensor, cuts in terms:
        groups = sorted((cut.group for cut in cuts), key=order.__getitem__)  # as they were added up
        while groups and groups[-1].size() <= 2:
            groups.pop()
        of_replicas += [(tensor, group) for group in equated_replicas(cuts)]
        if id(tensor) not in exact:
            of_cuts += [(tensor, group) for group in groups[:-1]]  # the ranks of the last have the same bits
    others = [tensor for tensor, group in of_replicas if group.rank() != 0]
    if others:
        kept = torch._foreach_mul(counts, 1) if counts else ()  # in few kernels; NaN and infinite ones too
        torch._foreach_zero_(others)
        if counts:
            torch._foreach_copy_(counts, kept)
    _together(of_replicas, Ranks.all_reduce_sum)
    _together(of_cuts, Ranks.broadcast)


def equated_replicas(cuts: Sequence[ShardGroup]) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups of replicas over which `equate_sums` adds up counts of a tensor with these cuts."""
    return cuts[0].replicas if any(cut.group.size() > 2 for cut in cuts) else ()


def _together(pairs: Iterable[tuple[Tensor, dist.ProcessGroup]], collective: Callable[[Ranks, Tensor], Tensor]) -> None:
    """Makes one collective per group and dtype of each tensor, in place, with its groups in turn."""
    by_group: dict[Any, dict[Any, list[Tensor]]] = {}
    for tensor, group in pairs:
        by_group.setdefault(group, {}).setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group, kinds in by_group.items():
        ranks = ranks_of(group)
        for tensors in kinds.values():
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            # One copy, where ranks communicate elsewhere.
            flat = collective(ranks, flat.to(ranks.device_beside(flat.device))).to(flat.device)
            pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
            sums = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
            torch._foreach_copy_(tensors, sums)
