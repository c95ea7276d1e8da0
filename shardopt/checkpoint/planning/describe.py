"""Descriptions of the job's state: made by each rank, compared, and merged where they differ."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from torch import Tensor

from shardopt.checkpoint.format.constants import DTYPES, Dtype
from shardopt.checkpoint.format.manifest import decode_path, encode_path
from shardopt.checkpoint.format.tensor_bytes import GIVEN_BACK, has_no_memory, stored_dtype
from shardopt.checkpoint.planning.assign import Member
from shardopt.checkpoint.planning.ownership import refuse_strange_parameters
from shardopt.checkpoint.planning.replica_check import CheckReplicas, Contents, contents_of, summary_of
from shardopt.checkpoint.planning.tied import tied_in
from shardopt.errors import LayoutError, Problem, ShardoptError, StateError
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import View
from shardopt.sharding.view import view_of
from shardopt.state import FlatState, Path, PerRank, kinds_differ, tell_path
from shardopt.values import canonical, decode_value, encode_value, united

_DIFFER = "ranks have different things under one key"


@dataclass(frozen=True, slots=True)
class Description:
    """The state of one rank, without a byte of its tensors. Plain values are in their typed JSON form."""

    views: Mapping[str, View]
    tensors: Mapping[str, tuple[Path, Dtype, Layout]]
    values: Mapping[str, tuple[Path, Any]]
    per_rank: Mapping[str, Path]
    contents: Contents  # hashes of the boxes that other ranks hold too
    own_values: Mapping[str, Any]  # those that are per rank
    check_replicas: CheckReplicas  # of which replicas `contents` has hashes
    tied: Mapping[str, str]  # key → the first key with the same memory on this rank

    @property
    def is_partial(self) -> bool:
        """Whether some tensor is known only as far as this rank holds it."""
        return any(layout.local for _, _, layout in self.tensors.values())

    def geometry_fingerprint(self) -> str:
        """Returns a hash, equal on two ranks, and in two saves, that describe the same tensors in the same places."""
        words = [str(len(self.tied))]
        for key, first in sorted(self.tied.items()):
            words += (key, first)
        for key, path in self.per_rank.items():
            words += (key, *_path_words(key, path))
        words.append("")
        for key in sorted(self.tensors):
            path, dtype, layout = self.tensors[key]
            words += (key, dtype.name, layout.fingerprint, *_path_words(key, path))
        return xxhash.xxh3_128_hexdigest("\0".join(words).encode())

    def values_fingerprint(self) -> str:
        """Returns a hash that is equal on two ranks if they have the same plain values."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.values_json(), sort_keys=True).encode())

    def contents_summary(self, members: Mapping[str, Member]) -> dict[str, str]:
        """Returns a few hashes that are equal on ranks whose replicas are; `members` as for `summary_of`."""
        return summary_of(self.contents, self.views, members)

    def geometry_json(self) -> dict[str, Any]:
        """Encodes tensors, ties and the keys of values per rank, for `merge_geometry`."""
        layouts: dict[Layout, int] = {}
        holding = {key for key, view in self.views.items() if view.pieces}
        tensors = {
            key: [encode_path(key, path), dtype.name, layouts.setdefault(layout, len(layouts)), key in holding]
            for key, (path, dtype, layout) in self.tensors.items()
        }
        return {
            "layouts": [layout.to_json() for layout in layouts],
            "tensors": tensors,
            "tied": dict(self.tied),
            "per_rank": {key: encode_path(key, path) for key, path in self.per_rank.items()},
        }

    def values_json(self) -> dict[str, Any]:
        """Encodes the plain values, for `merge_values`."""
        return {key: [encode_path(key, path), value] for key, (path, value) in self.values.items()}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The state of the whole job without its values: every tensor with its whole layout.

    `tied` has the keys of tensors that are, on every rank, one memory with the member that each is mapped to.
    """

    members: Mapping[str, Member]
    per_rank: Mapping[str, Path]
    tied: Mapping[str, tuple[str, Path]] = field(default_factory=dict)


Values = Mapping[str, tuple[Path, Any]]
"""Plain values in their typed JSON form, by key, with their paths."""


def describe(flat: FlatState, check_replicas: CheckReplicas) -> Description:
    """Describes this rank's state.

    Args:
        check_replicas: which bytes of replicas are hashed.

    Raises:
        StateError, LayoutError: something in it cannot be stored; names all of it.
    """
    refuse_strange_parameters(flat)
    views: dict[str, View] = {}
    tensors: dict[str, tuple[Path, Dtype, Layout]] = {}
    values: dict[str, tuple[Path, Any]] = {}
    per_rank: dict[str, Path] = {}
    own_values: dict[str, Any] = {}
    addresses: dict[str, int] = {}
    refused: list[ShardoptError] = []
    for key, leaf in flat.leaves.items():
        try:
            if isinstance(leaf.value, Tensor):
                view = views[key] = view_of(leaf.value, key)
                tensors[key] = leaf.path, stored_dtype(view.dtype, key), view.layout
                at = [piece.tensor.data_ptr() for piece in view.pieces]
                addresses[key] = at[0] if at else 0
                if 0 in at and any(has_no_memory(piece.tensor) for piece in view.pieces):
                    problem = (
                        Problem(key, "a tensor on the meta device", "a tensor with values", "initialize it first")
                        if view.pieces[0].tensor.is_meta
                        else Problem(key, GIVEN_BACK, "a tensor with values", "save while its parameter is there")
                    )
                    raise StateError("a tensor cannot be stored", [problem])
            elif isinstance(leaf.value, PerRank):
                per_rank[key] = leaf.path
                own_values[key] = encode_value(leaf.value.value, key)
            else:
                values[key] = leaf.path, encode_value(leaf.value, key)
        except (StateError, LayoutError) as error:
            refused.append(error)
    if refused:
        kind, message = type(refused[0]), refused[0].message
        raise kind(message, [problem for error in refused for problem in error.problems])
    contents = contents_of(views, check_replicas)
    tied = {key: first for key, first in tied_in(views, addresses).items() if views[key].layout == views[first].layout}
    return Description(views, tensors, values, per_rank, contents, own_values, check_replicas, tied)


def geometry_of(description: Description, world_size: int) -> Geometry:
    """Returns the job's geometry where every rank has described the same."""
    ranks = tuple(range(world_size))
    tied = {key: (first, description.tensors[key][0]) for key, first in description.tied.items()}
    members = {
        key: Member(path, dtype, layout, ranks)
        for key, (path, dtype, layout) in description.tensors.items()
        if key not in tied
    }
    return Geometry(members, description.per_rank, tied)


def merge_geometry(descriptions: Sequence[Mapping[str, Any]]) -> Geometry:
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
        raise StateError(_DIFFER, problems)
    tied = {key: (first, members[key].path) for key, first in _tied_on_all(descriptions, members).items()}
    return Geometry({key: member for key, member in members.items() if key not in tied}, per_rank, tied)


def merge_values(descriptions: Sequence[Mapping[str, Any]], geometry: Geometry) -> Values:
    """Merges the plain values of all ranks (`Description.values_json`, by rank) into the job's.

    Raises:
        StateError: as for `merge_geometry`.
    """
    values: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for rank, wire in enumerate(descriptions):
        for key, (path, value) in wire.items():
            values[key][rank] = (decode_path(key, path), value)
    merged: dict[str, tuple[Path, Any]] = {}
    problems: list[Problem] = []
    for key, by_rank in values.items():
        first_rank, (path, first) = next(iter(by_rank.items()))
        other = next((rank for rank, (_, value) in by_rank.items() if canonical(value) != canonical(first)), None)
        problems += _other_kinds(key, {rank: each[0] for rank, each in by_rank.items()})
        if key in geometry.members or key in geometry.per_rank:
            problems.append(_differs(key, "tensors on some ranks, plain values on others"))
        elif other is not None:
            difference = f"{_short(first)} on rank {first_rank}, {_short(by_rank[other][1])} on rank {other}"
            problems.append(_differs(key, difference))
        wires = [value for _, value in by_rank.values()]
        merged[key] = (path, first if other is not None or all(wire == first for wire in wires) else united(wires))
    if problems:
        raise StateError(_DIFFER, problems)
    return merged


def _merge_tensor(key: str, by_rank: Mapping[int, tuple[Any, ...]], ranks: tuple[int, ...]) -> Member:
    problems = _other_kinds(key, {rank: each[0] for rank, each in by_rank.items()})
    if problems:
        raise StateError("", problems)
    # A rank that holds nothing of a tensor may not even know its dtype.
    knowing = {rank: each for rank, each in by_rank.items() if each[3]} or dict(by_rank)
    first_rank, (path, dtype, layout, _) = next(iter(knowing.items()))
    for rank, (_, other_dtype, other, _) in knowing.items():
        if other_dtype != dtype:
            raise StateError("", [_differs(key, f"{dtype} on rank {first_rank}, {other_dtype} on rank {rank}")])
        if other.shape != layout.shape or (other != layout and not (other.local and layout.local)):
            difference = f"{_place(layout)} on rank {first_rank}, {_place(other)} on rank {rank}"
            raise StateError("", [_differs(key, difference)])
    whole_layout = Layout.merge({rank: each[2] for rank, each in knowing.items()}, key) if layout.local else layout
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


def _path_words(key: str, path: Path) -> tuple[str, str]:
    """Returns two texts that, with the key, identify a path: where its parts end, and of what kind they are.

    A position in a list is no key of a dict, and the key 0 is not "0".
    """
    try:
        return "\1".join(path), ""  # type: ignore[arg-type]  # of what is no str the lines below make another form
    except TypeError:
        return "", json.dumps(encode_path(key, path))


def _differs(key: str, difference: str) -> Problem:
    remedy = "make it the same, give it another key on each rank, or wrap what is meant to differ in PerRank"
    return Problem(key, difference, "the same on every rank that has the key", remedy)


def _short(wire: Any) -> str:
    text = repr(decode_value(wire))
    return text if len(text) <= 80 else text[:77] + "..."
