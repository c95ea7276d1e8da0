"""Merges the descriptions of differing ranks into the job's, by kinds of ranks, and cuts it into components.

    K kinds of ranks, each of equal descriptions; a component: kinds that share keys, directly or by way of others

Which ranks write the tensors of a component does not depend on other components, as these have other ranks. So a rank
reads and plans its own component only. Plain tensors that all ranks have (a counter, a table of positions) would make
all one component. They are assigned last of all, so that nothing depends on them: rank 0 sends who writes them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from shardopt.checkpoint.format.assign import Assignment, Member
from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.format.values import Values, decode_path, encode_path, unpack
from shardopt.checkpoint.saving.planning.describe import Geometry, with_aliases
from shardopt.errors import Problem, StateError
from shardopt.ranks.kinds import pack_kinds, unpack_kinds
from shardopt.sharding.box import Box
from shardopt.sharding.layout import Layout
from shardopt.sharding.layout_merge import KindMerger, LayoutReader, LayoutWriter, components_of
from shardopt.state.paths import STATE, Path, kinds_differ, tell_path
from shardopt.state.values import canonical, decode_value, encode_value, united
from shardopt.state.versions import merged as merged_versions

_DIFFER = "ranks have different things under one key"
_MAKE_ALIKE = "wrap what is meant to differ in PerRank; or make it the same, or give it another key on each rank"
_BY_NUMBER = (
    "state of an optimizer is under numbers of parameters here, which are others on each rank: put the modules with "
    "these parameters into the app, or make the optimizer of model.named_parameters(); otherwise "
)
_NUMBERED = re.compile(r"(^|\.)param_groups\.\d+(\.|$)")
_STEP_ALIKE = (
    "use shardopt.optim.ReduceLROnPlateau, which takes the mean of all ranks, or pass each rank the same metric"
)
_ISLANDS_ALIKE = "every island must take every step: skip one on all islands or on none; then resume all from one save"
_ABSENT = {"absent": None}
_EMPTY: list[Any] = [encode_value({}), encode_value([]), encode_value(())]


class MergedGeometry(NamedTuple):
    """The geometry of the job, and the numbers of the kinds that have each tensor."""

    geometry: Geometry
    kinds_of_key: Mapping[str, tuple[int, ...]]


class _Entry(NamedTuple):
    """A tensor as a kind of ranks describes it, with its path as sent."""

    path: Any
    dtype: str
    layout: Layout


def merge_geometry(kinds: Sequence[tuple[int, ...]], descriptions: Sequence[Mapping[str, Any]]) -> MergedGeometry:
    """Merges descriptions (`Description.geometry_json`) into the job's geometry.

    Args:
        kinds: the ranks of each kind, ascending, in the order of their first ranks.
        descriptions: of each kind.

    Raises:
        StateError: ranks have different things under one key; names each such key, and what two of the ranks have.
    """
    reader, merger = LayoutReader(), KindMerger(kinds)
    tensors: defaultdict[str, dict[int, _Entry]] = defaultdict(dict)
    paths: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for number, wire in enumerate(descriptions):
        layouts = reader.read(wire["layouts"])
        for key, (path, dtype, index) in wire["tensors"].items():
            tensors[key][number] = _Entry(path, dtype, layouts[index])
        for key, path in wire["per_rank"].items():
            paths[key][number] = path
    per_rank = {key: decode_path(key, next(iter(by_kind.values()))) for key, by_kind in paths.items()}
    members: dict[str, Member] = {}
    kinds_of_key: dict[str, tuple[int, ...]] = {}
    problems = [
        problem
        for key, by_kind in paths.items()
        for problem in _other_kinds(key, _decoded(key, {kinds[number][0]: path for number, path in by_kind.items()}))
    ]
    buffers = {key for wire in descriptions for key in wire["buffers"]}
    for key, by_kind in tensors.items():
        kinds_of_key[key] = (*by_kind,)
        try:
            members[key] = _merge_tensor(key, by_kind, merger, key in buffers)
        except StateError as error:
            problems += error.problems
    problems += [_differs(key, "tensors on some ranks, values per rank on others") for key in members.keys() & per_rank]
    if problems:
        raise StateError(_DIFFER, problems, code="ranks-differ")
    tied_to = _tied_on_all(descriptions, members, tensors, merger)
    tied = {key: (first, members[key].path) for key, first in tied_to.items()}
    declared = chain.from_iterable(wire["aliases"].items() for wire in descriptions)
    aliases = {key: (first, decode_path(key, path)) for key, (first, path) in declared}
    _refuse_undeclared(aliases, tensors, kinds)
    own = {key: member for key, member in members.items() if key not in tied}
    versions = merged_versions(wire["versions"] for wire in descriptions)
    return MergedGeometry(Geometry(own, per_rank, with_aliases(tied, aliases), versions), kinds_of_key)


def sections_of(
    merged: MergedGeometry, kind_count: int, assigned: Mapping[str, Assignment]
) -> tuple[list[int], list[dict[str, Any]]]:
    """Cuts a geometry into components.

    Args:
        assigned: who writes what, of all of the job.

    Returns:
        The number of the section that each kind is in, and the sections, as JSON for `read_section`.
    """
    geometry, kinds_of_key = merged.geometry, merged.kinds_of_key
    # With several components, only these have all ranks for holders; `assign` takes what has the most holders last.
    on_all = {
        key
        for key, member in geometry.members.items()
        if member.layout.holders is None and len(kinds_of_key[key]) == kind_count
    }
    component_of = components_of(
        dict.fromkeys(kinds_of_key[key] for key in geometry.members if key not in on_all), kind_count
    )
    if max(component_of) == 0:
        on_all = set()
    keys: list[list[str]] = [[] for _ in range(1 + max(component_of))]
    tied: list[dict[str, Any]] = [{} for _ in keys]
    for key in geometry.members:
        for own in keys if key in on_all else [keys[component_of[kinds_of_key[key][0]]]]:
            own.append(key)
    for key, (first, path) in geometry.tied.items():
        for own_tied in tied if first in on_all else [tied[component_of[kinds_of_key[first][0]]]]:
            own_tied[key] = [first, encode_path(key, path)]
    per_rank = {key: encode_path(key, path) for key, path in geometry.per_rank.items()}
    known = _encode_assignments({key: assigned[key] for key in geometry.members if key in on_all})
    sections = [
        {
            **_encode_members({key: geometry.members[key] for key in own}),
            "tied": own_tied,
            "per_rank": per_rank,
            "known": known,
        }
        for own, own_tied in zip(keys, tied, strict=True)
    ]
    return component_of, sections


def read_section(wire: Mapping[str, Any]) -> tuple[Geometry, dict[str, Assignment]]:
    """Decodes a section from `sections_of`.

    Returns:
        The tensors of a component, and all keys of values per rank; and the assignments that do not follow from these.
    """
    layouts = LayoutReader().read(wire["layouts"])
    ranks, buffers = unpack_kinds(wire["ranks"]), frozenset(wire["buffers"])
    members = {
        key: Member(decode_path(key, path), DTYPES[dtype], layouts[layout], ranks[number], key in buffers)
        for key, (path, dtype, layout, number) in wire["tensors"].items()
    }
    tied = {key: (first, decode_path(key, path)) for key, (first, path) in wire["tied"].items()}
    geometry = Geometry(members, {key: decode_path(key, path) for key, path in wire["per_rank"].items()}, tied)
    assignments = [
        Assignment(
            tuple(shape),
            tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes),
            tuple((rank, slot) for rank, slot in writers),
        )
        for shape, boxes, writers in wire["known"]["assignments"]
    ]
    return geometry, {key: assignments[number] for key, number in wire["known"]["of"].items()}


def merge_values(descriptions: Mapping[int, Mapping[str, Any]], geometry: Geometry) -> Values:
    """Merges the plain values of all kinds into those of the job.

    Args:
        descriptions: `Description.values_json` by rank, ascending; of ranks that have the same, the first is enough.

    Raises:
        StateError: as for `merge_geometry`.
    """
    values: defaultdict[str, dict[int, tuple[Path, Any]]] = defaultdict(dict)
    for rank, wire in descriptions.items():
        for key, path_and_value in unpack(wire).items():
            values[key][rank] = path_and_value
    text_of = _by_identity(lambda value: json.dumps(value))  # by texts, since True is not 1 here
    canonical_of = _by_identity(canonical)
    merged: dict[str, tuple[Path, Any]] = {}
    united_of: dict[tuple[str, ...], Any] = {}  # one object for all keys that share one on every rank
    problems: list[Problem] = []
    for key, by_rank in values.items():
        first_rank, (path, first) = next(iter(by_rank.items()))
        text = text_of(first)
        unlike = {rank: value for rank, (_, value) in by_rank.items() if text_of(value) != text}
        other = next((rank for rank, value in unlike.items() if canonical_of(value) != canonical_of(first)), None)
        problems += _other_kinds(key, {rank: each for rank, (each, _) in by_rank.items()})
        if key in geometry.members or key in geometry.per_rank or key in geometry.tied:
            problems.append(_differs(key, "tensors on some ranks, plain values on others", path=path))
        elif other is not None:
            problems.append(value_differs(key, {first_rank: first, other: unlike[other]}, path))
        else:
            texts = tuple(dict.fromkeys([text, *map(text_of, unlike.values())]))
            if texts not in united_of:
                united_of[texts] = united([first, *unlike.values()])
            merged[key] = path, united_of[texts]
    if problems:
        raise StateError(_DIFFER, problems, code="ranks-differ")
    return _without_filled(merged, geometry)


def _without_filled(values: Values, geometry: Geometry) -> Values:
    """Drops empty containers that other ranks have filled, such as a model without parameters here."""
    empty = {path: key for key, (path, wire) in values.items() if wire in _EMPTY}
    if not empty:
        return values
    members = (member.path for member in geometry.members.values())
    tied = (path for _, path in geometry.tied.values())
    others = chain(members, tied, geometry.per_rank.values(), (path for path, _ in values.values()))
    filled = {empty.get(path[:length]) for path in others for length in range(1, len(path))}
    return {key: value for key, value in values.items() if key not in filled}


def _by_identity(function: Callable[[Any], str]) -> Callable[[Any], str]:
    """Returns the function, memoized by object identity, as many keys share one value."""
    done: dict[int, tuple[Any, str]] = {}

    def run(value: Any) -> str:
        if id(value) not in done:
            done[id(value)] = value, function(value)
        return done[id(value)][1]

    return run


def _merge_tensor(key: str, by_kind: Mapping[int, _Entry], merger: KindMerger, is_buffer: bool) -> Member:
    numbers = (*by_kind,)
    entries = iter(by_kind.values())
    first = next(entries)
    if any(each.layout is not first.layout or each.dtype != first.dtype or each.path != first.path for each in entries):
        by_kind, first = _knowing(key, by_kind, merger)
    layout = first.layout
    if layout.local:
        layout = merger.merge({number: each.layout for number, each in by_kind.items()}, key)
    layout = merger.held_by(layout, numbers)
    return Member(decode_path(key, first.path), DTYPES[first.dtype], layout, merger.ranks_of(numbers), is_buffer)


def _knowing(key: str, by_kind: Mapping[int, _Entry], merger: KindMerger) -> tuple[dict[int, _Entry], _Entry]:
    """Returns the kinds that have a tensor, and the first one's entry. Raises StateError if they differ.

    A rank that holds nothing of a tensor may not even know its dtype.
    """
    problems = _other_kinds(key, _decoded(key, {merger.kinds[at][0]: each.path for at, each in by_kind.items()}))
    if problems:
        raise StateError("", problems, code="ranks-differ")
    holders = {number: merger.first_holder(each.layout, number) for number, each in by_kind.items()}
    ranks = {number: rank for number, rank in holders.items() if rank is not None}
    if not ranks:
        ranks = {number: merger.kinds[number][0] for number in by_kind}
    order = sorted(ranks, key=ranks.__getitem__)
    first_rank, first = ranks[order[0]], by_kind[order[0]]
    path = decode_path(key, first.path)
    for number in order:
        rank, other = ranks[number], by_kind[number]
        if other.dtype != first.dtype:
            difference = f"{first.dtype} on rank {first_rank}, {other.dtype} on rank {rank}"
            raise StateError("", [_differs(key, difference, path=path)], code="ranks-differ")
        if other.layout.shape != first.layout.shape or (
            other.layout is not first.layout and not (other.layout.local and first.layout.local)
        ):
            difference = f"{_place(first.layout)} on rank {first_rank}, {_place(other.layout)} on rank {rank}"
            raise StateError("", [_differs(key, difference, path=path)], code="ranks-differ")
    return {number: by_kind[number] for number in order}, first


def _tied_on_all(
    descriptions: Sequence[Mapping[str, Any]],
    members: Mapping[str, Member],
    tensors: Mapping[str, Mapping[int, _Entry]],
    merger: KindMerger,
) -> dict[str, str]:
    """Returns key → the key whose memory it shares, if it does on all ranks that hold parts of either."""

    def is_held(key: str, number: int) -> bool:
        return merger.first_holder(tensors[key][number].layout, number) is not None

    tied: dict[str, str] = {}
    for key, first in dict(pair for wire in descriptions for pair in wire["tied"].items()).items():
        one, other = members[key], members[first]
        if one.ranks != other.ranks or one.layout != other.layout:
            continue
        if all(
            descriptions[number]["tied"].get(key) == first or not (is_held(key, number) or is_held(first, number))
            for number in tensors[key]
        ):
            tied[key] = first
    return tied


def _refuse_undeclared(
    aliases: Mapping[str, tuple[str, Path]],
    tensors: Mapping[str, Mapping[int, _Entry]],
    kinds: Sequence[tuple[int, ...]],
) -> None:
    """Raises StateError if some ranks declare a tensor as tied, and others have it separately."""
    remedy = "pass the same tied={...} on every rank"
    problems = [
        Problem(key, f"a tensor of its own on rank {kinds[next(iter(tensors[key]))][0]}", f"{first}, as tied", remedy)
        for key, (first, _) in aliases.items()
        if key in tensors
    ]
    if problems:
        raise StateError("ranks declare other parameters as tied", problems, code="tied-parameters")


def _encode_members(members: Mapping[str, Member]) -> dict[str, Any]:
    writer = LayoutWriter()
    ranks: dict[tuple[int, ...], int] = {}
    tensors = {
        key: [
            encode_path(key, member.path),
            member.dtype.name,
            writer.number(member.layout),
            ranks.setdefault(member.ranks, len(ranks)),
        ]
        for key, member in members.items()
    }
    buffers = [key for key, member in members.items() if member.is_buffer]
    return {"layouts": writer.texts, "ranks": pack_kinds(list(ranks)), "tensors": tensors, "buffers": buffers}


def _encode_assignments(assigned: Mapping[str, Assignment]) -> dict[str, Any]:
    number_of = {each: number for number, each in enumerate(dict.fromkeys(assigned.values()))}
    return {
        "assignments": [[each.shape, each.boxes, each.writers] for each in number_of],
        "of": {key: number_of[each] for key, each in assigned.items()},
    }


def _place(layout: Layout) -> str:
    holders = sorted({rank for ranks in layout.holders or () for rank in ranks})
    where = f"sharded over ranks {holders}" if holders else "whole on each rank"
    return f"shape {list(layout.shape)} {where}"


def _decoded(key: str, paths: Mapping[int, Any]) -> dict[int, Path]:
    return {rank: decode_path(key, path) for rank, path in paths.items()}


def _other_kinds(key: str, paths: Mapping[int, Path]) -> list[Problem]:
    """Returns a problem if a key is in a list on one rank and in a dict on another."""
    first_rank, first = next(iter(paths.items()))
    for rank, path in paths.items():
        if kinds_differ(first, path):
            return [_differs(key, f"{tell_path(first)} on rank {first_rank}, {tell_path(path)} on rank {rank}")]
    return []


def value_differs(key: str, by_rank: Mapping[int, Any], path: Path = ()) -> Problem:
    """Describes the first entry in which the values of two ranks, as encoded, differ."""
    one, other = by_rank.values()
    remedy = _STEP_ALIKE if "num_bad_epochs" in _entries(one)[1] else _MAKE_ALIKE
    while True:
        (kind, first), (other_kind, second) = _entries(one), _entries(other)
        if kind != other_kind or not first or not second:
            break
        at = next(
            at for at in {**first, **second} if canonical(first.get(at, _ABSENT)) != canonical(second.get(at, _ABSENT))
        )
        key, one, other = f"{key}.{at}", first.get(at, _ABSENT), second.get(at, _ABSENT)
    if "__semi_sync" in key.split("."):  # the position of islands (`optim/semi_sync`)
        remedy = _ISLANDS_ALIKE
    difference = ", ".join(f"{_short(wire)} on rank {rank}" for rank, wire in zip(by_rank, (one, other), strict=True))
    return _differs(key, difference, remedy, path)


def _entries(wire: Any) -> tuple[str, dict[Any, Any]]:
    """Returns the kind of an encoded value, and its entries by key or position; none of what is no container."""
    ((kind, body),) = wire.items() if isinstance(wire, dict) else [(type(wire).__name__, wire)]
    if kind in ("dict", "counter"):
        return kind, {decode_value(key): value for key, value in body}
    return kind, dict(enumerate(body)) if kind in ("list", "tuple") else {}


def _differs(key: str, difference: str, remedy: str = _MAKE_ALIKE, path: Path = ()) -> Problem:
    # Names of modules, as "state.0.weight", have no numbers.
    by_number = any(name == STATE and type(number) is int for name, number in pairwise(path[:-1]))
    remedy = _BY_NUMBER + remedy if (by_number or _NUMBERED.search(key)) and remedy is _MAKE_ALIKE else remedy
    return Problem(key, difference, "the same on every rank that has the key", remedy)


def _short(wire: Any) -> str:
    text = "nothing" if wire is _ABSENT else repr(decode_value(wire))
    return text if len(text) <= 80 else text[:77] + "..."
