"""The merge of descriptions rank by rank: slow and plain, what merging by kinds of ranks has to agree with."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardopt.checkpoint.format.assign import Member
from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.format.values import Values, decode_path, encode_path, unpack
from shardopt.checkpoint.saving.planning.describe import Description, Geometry
from shardopt.checkpoint.saving.planning.merge import value_differs
from shardopt.errors import LayoutError, Problem, StateError
from shardopt.sharding.box import Box
from shardopt.sharding.layout import Layout
from shardopt.state.paths import Path, kinds_differ, tell_path
from shardopt.state.values import canonical, decode_value, united

_DIFFER = "ranks have different things under one key"


def description_of(description: Description, rank: int) -> dict[str, Any]:
    """What a rank tells of its state, with a mark at each tensor of which it holds some."""
    layouts: dict[Layout, int] = {}
    tensors = {}
    for key, (path, dtype, layout) in description.tensors.items():
        holds = layout.holders is None or any(rank in ranks for ranks in layout.holders)
        tensors[key] = [encode_path(key, path), dtype.name, layouts.setdefault(layout, len(layouts)), holds]
    return {
        "layouts": [layout.to_json() for layout in layouts],
        "tensors": tensors,
        "tied": dict(description.tied),
        "per_rank": {key: encode_path(key, path) for key, path in description.per_rank.items()},
    }


def layouts_by_rank(layouts: Mapping[int, Layout], key: str) -> Layout:
    """Merges the layouts that ranks have of one tensor."""
    distinct = set(layouts.values())
    first = next(iter(layouts.values()))
    if any(layout.shape != first.shape for layout in distinct):
        rank, other = next((rank, layout) for rank, layout in layouts.items() if layout.shape != first.shape)
        problem = Problem(
            key=key,
            found=f"global shape {other.shape} on rank {rank}",
            required=f"{first.shape}, as on rank {next(iter(layouts))}",
            remedy="give every rank the same global tensor under this key",
        )
        raise LayoutError("ranks disagree on the shape of a tensor", [problem], code="ranks-differ")
    if len(distinct) == 1 and not first.local:
        return first
    holders: dict[Box, set[int]] = {}
    merged: set[Layout] = set()
    for rank, layout in layouts.items():
        if layout.holders is None:
            for box in layout.boxes:
                holders.setdefault(box, set()).add(rank)
        elif layout not in merged:
            merged.add(layout)
            for box, ranks in zip(layout.boxes, layout.holders, strict=True):
                holders.setdefault(box, set()).update(ranks)
    return Layout.from_holders(first.shape, holders)


def geometry_by_rank(descriptions: Sequence[Mapping[str, Any]]) -> Geometry:
    """Merges the descriptions of all ranks (`Description.geometry_json`, by rank) into the job's geometry.

    Raises:
        StateError: ranks have different things under one key; names each such key, and what two of the ranks have.
    """
    tensors: defaultdict[str, dict[int, tuple[Any, ...]]] = defaultdict(dict)
    paths: defaultdict[str, dict[int, Path]] = defaultdict(dict)
    for rank, wire in enumerate(descriptions):
        layouts = [Layout.from_json(layout) for layout in wire["layouts"]]
        for key, (path, dtype, index, holds) in wire["tensors"].items():
            tensors[key][rank] = (decode_path(key, path), dtype, layouts[index], holds)
        for key, path in wire["per_rank"].items():
            paths[key][rank] = decode_path(key, path)
    per_rank = {key: next(iter(by_rank.values())) for key, by_rank in paths.items()}
    members: dict[str, Member] = {}
    same: dict[tuple[int, ...], tuple[int, ...]] = {}  # one tuple of ranks for all tensors that they have
    problems = [problem for key, by_rank in paths.items() for problem in _other_kinds(key, by_rank)]
    for key, by_rank in tensors.items():
        try:
            ranks = tuple(sorted(by_rank))
            members[key] = _merge_tensor(key, by_rank, same.setdefault(ranks, ranks))
        except StateError as error:
            problems += error.problems
    problems += [_differs(key, "tensors on some ranks, values per rank on others") for key in members.keys() & per_rank]
    if problems:
        raise StateError(_DIFFER, problems, code="ranks-differ")
    tied = {key: (first, members[key].path) for key, first in _tied_on_all(descriptions, members).items()}
    return Geometry({key: member for key, member in members.items() if key not in tied}, per_rank, tied)


def values_by_rank(descriptions: Sequence[Mapping[str, Any]], geometry: Geometry) -> Values:
    """Merges the plain values of all ranks (`Description.values_json`, by rank) into the job's.

    Raises:
        StateError: as for `geometry_by_rank`.
    """
    values: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for rank, wire in enumerate(descriptions):
        for key, path_and_value in unpack(wire).items():
            values[key][rank] = path_and_value
    merged: dict[str, tuple[Path, Any]] = {}
    problems: list[Problem] = []
    for key, by_rank in values.items():
        first_rank, (path, first) = next(iter(by_rank.items()))
        other = next((rank for rank, (_, value) in by_rank.items() if canonical(value) != canonical(first)), None)
        problems += _other_kinds(key, {rank: each[0] for rank, each in by_rank.items()})
        if key in geometry.members or key in geometry.per_rank:
            problems.append(_differs(key, "tensors on some ranks, plain values on others"))
        elif other is not None:
            problems.append(value_differs(key, {first_rank: first, other: by_rank[other][1]}))
        wires = [value for _, value in by_rank.values()]
        merged[key] = (path, first if other is not None or all(wire == first for wire in wires) else united(wires))
    if problems:
        raise StateError(_DIFFER, problems, code="ranks-differ")
    return merged


def _merge_tensor(key: str, by_rank: Mapping[int, tuple[Any, ...]], ranks: tuple[int, ...]) -> Member:
    problems = _other_kinds(key, {rank: each[0] for rank, each in by_rank.items()})
    if problems:
        raise StateError("", problems, code="ranks-differ")
    # A rank that holds nothing of a tensor may not even know its dtype.
    knowing = {rank: each for rank, each in by_rank.items() if each[3]} or dict(by_rank)
    first_rank, (path, dtype, layout, _) = next(iter(knowing.items()))
    for rank, (_, other_dtype, other, _) in knowing.items():
        if other_dtype != dtype:
            raise StateError(
                "", [_differs(key, f"{dtype} on rank {first_rank}, {other_dtype} on rank {rank}")], code="ranks-differ"
            )
        if other.shape != layout.shape or (other != layout and not (other.local and layout.local)):
            difference = f"{_place(layout)} on rank {first_rank}, {_place(other)} on rank {rank}"
            raise StateError("", [_differs(key, difference)], code="ranks-differ")
    whole_layout = layouts_by_rank({rank: each[2] for rank, each in knowing.items()}, key) if layout.local else layout
    return Member(path, DTYPES[dtype], _held_by(whole_layout, by_rank), ranks)


def _tied_on_all(descriptions: Sequence[Mapping[str, Any]], members: Mapping[str, Member]) -> dict[str, str]:
    """Returns key → the key whose memory it shares, where that is so on all ranks that hold some of either of them."""
    tied: dict[str, str] = {}
    for key, first in dict(pair for wire in descriptions for pair in wire["tied"].items()).items():
        one, other = members[key], members[first]
        if one.ranks != other.ranks or one.layout != other.layout:
            continue
        of_ranks = [descriptions[rank] for rank in one.ranks]
        # The last entry of a tensor is whether the rank holds any of it.
        if all(
            wire["tied"].get(key) == first or not (wire["tensors"][key][3] or wire["tensors"][first][3])
            for wire in of_ranks
        ):
            tied[key] = first
    return tied


def _held_by(layout: Layout, ranks: Collection[int]) -> Layout:
    """Returns the layout without holders that have not passed the tensor, and without boxes that only these hold."""
    if layout.holders is None or all(rank in ranks for by in layout.holders for rank in by):
        return layout
    holders = {
        box: [rank for rank in by if rank in ranks] for box, by in zip(layout.boxes, layout.holders, strict=True)
    }
    return Layout.from_holders(layout.shape, {box: by for box, by in holders.items() if by})


def _place(layout: Layout) -> str:
    holders = sorted({rank for ranks in layout.holders or () for rank in ranks})
    where = f"sharded over ranks {holders}" if holders else "whole on each rank"
    return f"shape {list(layout.shape)} {where}"


def _other_kinds(key: str, paths: Mapping[int, Path]) -> list[Problem]:
    """Returns a problem where a key stands in a list on one rank and in a dict on another."""
    first_rank, first = next(iter(paths.items()))
    for rank, path in paths.items():
        if kinds_differ(first, path):
            return [_differs(key, f"{tell_path(first)} on rank {first_rank}, {tell_path(path)} on rank {rank}")]
    return []


def _differs(key: str, difference: str) -> Problem:
    remedy = "wrap what is meant to differ in PerRank; or make it the same, or give it another key on each rank"
    return Problem(key, difference, "the same on every rank that has the key", remedy)


def _short(wire: Any) -> str:
    text = repr(decode_value(wire))
    return text if len(text) <= 80 else text[:77] + "..."
