"""Tied tensors: keys of one state that share one memory, such as tied weights. Each memory is stored once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from shardopt.checkpoint.format.tensor_bytes import address_of
from shardopt.errors import Problem, StateError
from shardopt.ranks.failures import names_of
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece, View
from shardopt.sharding.view import view_of
from shardopt.state.state import FlatState


def tied_in(views: Mapping[str, View], addresses: Mapping[str, int] | None = None) -> dict[str, str]:
    """Returns, for each key that is not the first, the first key with the same boxes in the same memory.

    Args:
        addresses: of the first piece of each view, 0 for none or an empty one; None where they are not known.
    """
    if addresses is None:
        addresses = {key: address_of(view.pieces[0].tensor) if view.pieces else 0 for key, view in views.items()}
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


def refuse_untied(flat: FlatState, views: Mapping[str, View]) -> None:
    """Raises StateError if tensors that are declared as tied have two memories on this rank.

    Args:
        views: by key; those that are not there are not asked about.
    """
    remedy = "let the modules share one parameter, or do not declare them as tied"
    problems = [
        Problem(key, f"another tensor on this rank than {first}", "one tensor", remedy)
        for key, (first, tensor) in flat.twins.items()
        if first in views and not _is_same(view_of(tensor, key), views[first])
    ]
    if problems:
        raise StateError("tied parameters", problems, code="tied-parameters")


def refuse_other_ties(declared: Sequence[Mapping[str, str]]) -> None:
    """Raises StateError if ranks declare different parameters as tied.

    Args:
        declared: by rank, name → the name that stands for it.
    """
    if all(ties == declared[0] for ties in declared):
        return
    remedy = "pass the same tied={...} on every rank, also where neither of the two is"
    problems = []
    for alias in dict.fromkeys(alias for ties in declared for alias in ties):
        ranks_with: dict[str, list[int]] = {}
        for rank, ties in enumerate(declared):
            ranks_with.setdefault(repr(ties[alias]) if alias in ties else "nothing", []).append(rank)
        if len(ranks_with) > 1:
            names = "; ".join(f"{name} on {names_of(ranks)}" for name, ranks in ranks_with.items())
            problems.append(Problem(f"tied[{alias!r}]", names, "the same on every rank", remedy))
    raise StateError("ranks declare other parameters as tied", problems, code="tied-parameters")


def _is_same(one: View, other: View) -> bool:
    return one.dtype == other.dtype and [_place(piece) for piece in one.pieces] == [
        _place(piece) for piece in other.pieces
    ]


def _place(piece: Piece) -> tuple[Box, torch.device, int, tuple[int, ...]]:
    return piece.box, piece.tensor.device, address_of(piece.tensor), piece.tensor.stride()
