"""Keys of one state that are one and the same memory, such as tied weights: the memory is stored once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece, View


def tied_in(views: Mapping[str, View]) -> dict[str, str]:
    """Key → the first key with the very same boxes in the very same memory, for each key that is not the first."""
    addresses = {key: view.pieces[0].tensor.data_ptr() for key, view in views.items() if view.pieces}
    if len(set(addresses.values())) == len(addresses):
        return {}
    first_at: defaultdict[int, list[str]] = defaultdict(list)
    tied: dict[str, str] = {}
    for key, address in addresses.items():
        if not address:  # a tensor without elements
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
