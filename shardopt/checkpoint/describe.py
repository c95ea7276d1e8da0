"""What the job's state is, as all ranks see it: described by each, compared, and merged where they differ."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from shardopt.checkpoint.format import DTYPES, Dtype
from shardopt.checkpoint.manifest import decode_path, encode_path
from shardopt.checkpoint.memory import stored_dtype
from shardopt.checkpoint.plan import Member
from shardopt.errors import Problem, StateError
from shardopt.sharding.layout import Layout, joined
from shardopt.sharding.view import View, view_of
from shardopt.state import FlatState, Path
from shardopt.values import canonical, decode_value, encode_value


@dataclass(frozen=True, slots=True)
class Description:
    """The state of one rank, without a byte of it. `values` are in their typed JSON form."""

    views: Mapping[str, View]
    tensors: Mapping[str, tuple[Path, Dtype, Layout]]
    values: Mapping[str, tuple[Path, Any]]
    per_rank: Mapping[str, Path]

    @property
    def is_partial(self) -> bool:
        """Whether some tensor is known only as far as this rank holds it."""
        return any(layout.local for _, _, layout in self.tensors.values())

    def fingerprint(self) -> str:
        """Equal on two ranks if they describe the same state; unequal ones are exchanged and compared in full."""
        running = xxhash.xxh3_128()
        for key in sorted(self.tensors):
            path, dtype, layout = self.tensors[key]
            running.update(f"{key}\0{path}\0{dtype.name}\0{layout.fingerprint}\n".encode())
        running.update(json.dumps([self.values, self.per_rank], sort_keys=True).encode())
        return running.hexdigest()

    def to_json(self) -> dict[str, Any]:
        layouts: dict[Layout, int] = {}
        holding = {key for key, view in self.views.items() if view.pieces}
        tensors = {
            key: [encode_path(key, path), dtype.name, layouts.setdefault(layout, len(layouts)), key in holding]
            for key, (path, dtype, layout) in self.tensors.items()
        }
        return {
            "layouts": [layout.to_json() for layout in layouts],
            "tensors": tensors,
            "values": {key: [encode_path(key, path), value] for key, (path, value) in self.values.items()},
            "per_rank": {key: encode_path(key, path) for key, path in self.per_rank.items()},
        }


@dataclass(frozen=True, slots=True)
class Agreed:
    """The state of the whole job: every tensor with its whole layout, values decoded."""

    members: Mapping[str, Member]
    values: Mapping[str, tuple[Path, Any]]
    per_rank: Mapping[str, Path]


def describe(flat: FlatState) -> Description:
    """Describes this rank's state.

    Raises:
        StateError, LayoutError: something in it cannot be stored; all such tensors and values are named.
    """
    views = {key: view_of(tensor, key) for key, tensor in flat.tensors().items()}
    return Description(
        views=views,
        tensors={
            key: (flat.leaves[key].path, stored_dtype(view.dtype, key), view.layout) for key, view in views.items()
        },
        values={key: (flat.leaves[key].path, encode_value(value, key)) for key, value in flat.values().items()},
        per_rank={key: flat.leaves[key].path for key in flat.per_rank()},
    )


def agreed_by_all(description: Description, world_size: int) -> Agreed:
    """The job's state where every rank has described the same."""
    ranks = tuple(range(world_size))
    return Agreed(
        members={key: Member(path, dtype, layout, ranks) for key, (path, dtype, layout) in description.tensors.items()},
        values={key: (path, decode_value(value)) for key, (path, value) in description.values.items()},
        per_rank=description.per_rank,
    )


def merge(descriptions: Sequence[Mapping[str, Any]]) -> Agreed:
    """The job's state from what each rank has described (`Description.to_json`), by rank.

    Raises:
        StateError: ranks have different things under one key; each such key is named with what which rank has.
    """
    problems: list[Problem] = []
    tensors: defaultdict[str, dict[int, tuple[Any, ...]]] = defaultdict(dict)
    values: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    per_rank: dict[str, Path] = {}
    for rank, wire in enumerate(descriptions):
        layouts = [Layout.from_json(layout) for layout in wire["layouts"]]
        for key, (path, dtype, index, holds) in wire["tensors"].items():
            tensors[key][rank] = (decode_path(key, path), dtype, layouts[index], holds)
        for key, (path, value) in wire["values"].items():
            values[key][rank] = (decode_path(key, path), value)
        for key, path in wire["per_rank"].items():
            per_rank[key] = decode_path(key, path)
    for key in (tensors.keys() & values.keys()) | (per_rank.keys() & (tensors.keys() | values.keys())):
        problems.append(_differs(key, "tensors on some ranks, plain values on others"))
    members = {}
    for key, by_rank in tensors.items():
        try:
            members[key] = _merge_tensor(key, by_rank)
        except StateError as error:
            problems += error.problems
    merged_values = {}
    for key, value_by_rank in values.items():
        first_rank, (path, first) = next(iter(value_by_rank.items()))
        for rank, (_, value) in value_by_rank.items():
            if canonical(value) != canonical(first):
                found = f"{_short(first)} on rank {first_rank}, {_short(value)} on rank {rank}"
                problems.append(_differs(key, found))
                break
        merged_values[key] = (path, decode_value(first))
    if problems:
        raise StateError("ranks have different things under one key", problems)
    return Agreed(members, merged_values, per_rank)


def _merge_tensor(key: str, by_rank: Mapping[int, tuple[Any, ...]]) -> Member:
    # A rank that holds nothing of a tensor may not even know its dtype.
    knowing = {rank: each for rank, each in by_rank.items() if each[3]} or dict(by_rank)
    first_rank, (path, dtype, layout, _) = next(iter(knowing.items()))
    for rank, (_, other_dtype, other, _) in knowing.items():
        if other_dtype != dtype:
            raise StateError("", [_differs(key, f"{dtype} on rank {first_rank}, {other_dtype} on rank {rank}")])
        if other.shape != layout.shape or (other != layout and not (other.local and layout.local)):
            found = f"{_place(layout)} on rank {first_rank}, {_place(other)} on rank {rank}"
            raise StateError("", [_differs(key, found)])
    whole_layout = joined({rank: each[2] for rank, each in knowing.items()}, key) if layout.local else layout
    return Member(path, DTYPES[dtype], whole_layout, tuple(sorted(by_rank)))


def _place(layout: Layout) -> str:
    holders = sorted({rank for ranks in layout.holders or () for rank in ranks})
    where = f"sharded over ranks {holders}" if holders else "whole on each rank"
    return f"shape {list(layout.shape)} {where}"


def _differs(key: str, found: str) -> Problem:
    remedy = "make it the same, give it another key on each rank, or wrap what is meant to differ in PerRank"
    return Problem(key, found, "the same on every rank that has the key", remedy)


def _short(wire: Any) -> str:
    text = repr(decode_value(wire))
    return text if len(text) <= 80 else text[:77] + "..."
