"""Tied tensors: keys of one state that share one memory, such as tied weights, and names that are declared as tied.

The memory is stored once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from shardopt.errors import Problem, StateError
from shardopt.ranks.failures import names_of
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece, View
from shardopt.state import Tied


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


def refuse_different_ties(reports: Sequence[Tied]) -> None:
    """Raises StateError where ranks declare other parameters as tied.

    Args:
        reports: what each rank declares, by rank.
    """
    if all(tied == reports[0] for tied in reports):
        return
    remedy = "pass the same tied={...} on every rank, also where neither of the two is"
    problems = []
    for alias in dict.fromkeys(alias for tied in reports for alias in tied):
        ranks_with: dict[str, list[int]] = {}
        for rank, tied in enumerate(reports):
            ranks_with.setdefault(repr(tied[alias]) if alias in tied else "nothing", []).append(rank)
        if len(ranks_with) > 1:
            names = "; ".join(f"{name} on {names_of(ranks)}" for name, ranks in ranks_with.items())
            problems.append(Problem(f"tied[{alias!r}]", names, "the same on every rank", remedy))
    raise StateError("ranks declare other parameters as tied", problems)


def _is_same(one: View, other: View) -> bool:
    return one.dtype == other.dtype and [_place(piece) for piece in one.pieces] == [
        _place(piece) for piece in other.pieces
    ]


def _place(piece: Piece) -> tuple[Box, torch.device, int, tuple[int, ...]]:
    return piece.box, piece.tensor.device, piece.tensor.data_ptr(), piece.tensor.stride()
