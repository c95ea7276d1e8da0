"""All-reduces over the cuts of tensors: one per process group, for any number of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
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
    by_group: dict[Any, dict[Any, list[Tensor]]] = {}
    for tensor, cuts in terms:
        for cut in cuts:
            by_group.setdefault(cut.group, {}).setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group, kinds in by_group.items():
        ranks = ranks_of(group)
        for tensors in kinds.values():
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            flat = reduce(ranks, flat.to(ranks.device)).to(flat.device)  # one copy, where ranks communicate elsewhere
            pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
            sums = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
            torch._foreach_copy_(tensors, sums)
