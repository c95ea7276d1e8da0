"""Sums over the cuts of tensors: one all-reduce per process group, for any number of tensors.

Backends promise the same bits to the ranks of one all-reduce, not to those of another one that adds up the same
numbers: NCCL may add them in another order. Two numbers have one sum in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
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


def equate_sums(terms: Collection[Term]) -> None:
    """Gives tensors that were added up over their cuts, in place, the same bits on all ranks that have the same sums.

    One broadcast per group and dtype, of groups of replicas, and of other cuts of one tensor; none where no sum is of
    more than two ranks. All ranks of a group must pass tensors of the same shapes, in the same order.

    Args:
        terms: as `all_reduce_terms` got them.
    """
    order = {group: place for place, group in enumerate(dict.fromkeys(cut.group for _, cuts in terms for cut in cuts))}
    pairs: list[tuple[Tensor, dist.ProcessGroup]] = []
    for tensor, cuts in terms:
        groups = sorted((cut.group for cut in cuts), key=order.__getitem__)  # as they were added up
        while groups and groups[-1].size() <= 2:
            groups.pop()
        if groups:  # the ranks of the last have the same bits
            pairs += [(tensor, group) for group in (*cuts[0].replicas, *groups[:-1])]
    _together(pairs, Ranks.broadcast)


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
