"""Tied tensors: keys of one state that share one memory, such as tied weights. The memory is stored once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece, View


def tied_in(views: Mapping[str, View], addresses: Mapping[str, int] | None = None) -> dict[str, str]:
    """Returns key → the first key with the same boxes in the same memory, for each key that is not the first.

    Args:
        addresses: of the first piece of each view, 0 for none or an empty one; None where they are not known.
    """
    if addresses is None:
        addresses = {key: view.pieces[0].tensor.data_ptr() if view.pieces else 0 for key, view in views.items()}
    if len(set(addresses.values())) == len(addresses):
        return {}
    first_at: defaultdict[int, list[str]] = defaultdict(list)
    tied: dict[str, str] = {}
    for key, address in addresses.items():
        if not address:
            continue
        first = next((other for other in first_at[address] if _is_same(views[other], views[key])), None)
        if first is None:
            first_at[address].append(key)
        else:
            tied[key] = first
    return tied


def _is_same(one: View, other: View) -> bool:
    return one.dtype == other.dtype and [_place(piece) for piece in one.pieces] == [
        _place(piece) for piece in other.pieces
    ]


def _place(piece: Piece) -> tuple[Box, torch.device, int, tuple[int, ...]]:
    return piece.box, piece.tensor.device, piece.tensor.data_ptr(), piece.tensor.stride()
