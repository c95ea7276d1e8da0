"""Describes the job's state: each rank describes its own, ranks compare, and `merge` merges what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from torch import Tensor

from shardopt.checkpoint.format.assign import Member
from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.tensor_bytes import (
    GIVEN_BACK,
    STORED_DTYPES,
    address_of,
    has_no_memory,
    stored_dtype,
)
from shardopt.checkpoint.format.values import encode_path, pack
from shardopt.checkpoint.saving.planning.app_tensors import buffers_in, check_optimizers
from shardopt.checkpoint.saving.planning.frozen import frozen_in
from shardopt.checkpoint.saving.planning.replica_check import CheckReplicas, Contents, contents_of
from shardopt.checkpoint.saving.planning.tied import refuse_untied, tied_in
from shardopt.errors import LayoutError, Problem, ShardoptError, StateError
from shardopt.sharding.layout import Layout
from shardopt.sharding.layout_merge import LayoutWriter
from shardopt.sharding.pieces import View, overlap_problem
from shardopt.sharding.pieces_tensor import PiecesTensor
from shardopt.sharding.view import view_of
from shardopt.state.paths import Path
from shardopt.state.state import FlatState, PerRank
from shardopt.state.values import encode_value
from shardopt.state.versions import Versions, versions_in


@dataclass(frozen=True, slots=True)
class Description:
    """The state of one rank without its tensors' bytes; plain values are in typed JSON."""

    views: Mapping[str, View]
    tensors: Mapping[str, tuple[Path, Dtype, Layout]]
    values: Mapping[str, tuple[Path, Any]]
    per_rank: Mapping[str, Path]
    contents: Contents  # hashes of the boxes that other ranks hold too
    own_values: Mapping[str, Any]  # those that are per rank
    check_replicas: CheckReplicas  # of which replicas `contents` has hashes
    tied: Mapping[str, str]  # key → the first key with the same memory on this rank
    unmatched: Sequence[dict[str, Any]] = ()  # `FlatState.unmatched_patterns`
    aliases: Mapping[str, tuple[str, Path]] = field(default_factory=dict)  # of tensors, as `FlatState.aliases`
    declared: Mapping[str, str] = field(default_factory=dict)  # as `FlatState.tied`
    buffers: frozenset[str] = frozenset()  # keys of tensors of which each rank may have other values
    versions: Versions = field(default_factory=dict)  # of modules
    contents_come_later: bool = False  # with what is written; until then there are none
    frozen: Sequence[str] = ()  # as `frozen_in`

    def geometry_fingerprint(self) -> str:
        """Returns a hash that is equal for equal tensors in equal places, on two ranks or in two saves."""
        aliases = sorted((key, first) for key, (first, _) in self.aliases.items())
        words = [str(len(self.tied)), json.dumps(aliases)]
        for key, first in sorted(self.tied.items()):
            words += (key, first)
        words += ("buffers", *sorted(self.buffers)) if self.buffers else ()
        words += ("versions", json.dumps(self.versions, sort_keys=True)) if self.versions else ()
        words += (json.dumps({key: encode_path(key, path) for key, path in self.per_rank.items()}), "")
        for key in sorted(self.tensors):
            path, dtype, layout = self.tensors[key]
            try:
                parts = "\1".join(path)  # type: ignore[arg-type]  # a path with parts that are no str is written below
            except TypeError:  # a position in a list is no key of a dict, and the key 0 is not "0"
                parts = json.dumps(encode_path(key, path))
            words += (key, parts, dtype.name, layout.fingerprint)
        return xxhash.xxh3_128_hexdigest("\0".join(words).encode())

    def values_fingerprint(self) -> str:
        """Returns a hash that is equal on two ranks with equal plain values."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.values_json(), sort_keys=True).encode())

    def geometry_json(self) -> dict[str, Any]:
        """Encodes tensors, ties and the keys of values per rank, for `merge_geometry`."""
        writer = LayoutWriter()
        tensors = {
            key: [encode_path(key, path), dtype.name, writer.number(layout)]
            for key, (path, dtype, layout) in self.tensors.items()
        }
        return {
            "layouts": writer.texts,
            "tensors": tensors,
            "tied": dict(self.tied),
            "aliases": {key: [first, encode_path(key, path)] for key, (first, path) in self.aliases.items()},
            "per_rank": {key: encode_path(key, path) for key, path in self.per_rank.items()},
            "buffers": sorted(self.buffers),
            "versions": self.versions,
        }

    def values_json(self) -> dict[str, Any]:
        """Encodes the plain values, for `merge_values`."""
        return pack(self.values)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The state of the whole job without values: every tensor with its whole layout.

    `tied` has the keys of tensors that are, on every rank, one memory with the member that each is mapped to, or were
    declared as tied to it. `versions` are of modules; of a rank's component there are none.
    """

    members: Mapping[str, Member]
    per_rank: Mapping[str, Path]
    tied: Mapping[str, tuple[str, Path]] = field(default_factory=dict)
    versions: Versions = field(default_factory=dict)


def describe(
    flat: FlatState,
    check_replicas: CheckReplicas,
    members: tuple[int, ...] | None = None,
    is_alone: bool = False,
    needs_bytes: bool = True,
) -> Description:
    """Describes this rank's state.

    Args:
        check_replicas: which bytes of replicas are hashed.
        members: the numbers in the job of those ranks that save, where these are not numbered so themselves.
        is_alone: whether no other rank saves, so that nothing can differ between ranks.
        needs_bytes: whether a tensor without memory is an error. Otherwise it may be on the meta device.

    Raises:
        StateError, LayoutError: something in it cannot be stored; names all of it.
    """
    check_optimizers(flat)
    views: dict[str, View] = {}
    tensors: dict[str, tuple[Path, Dtype, Layout]] = {}
    values: dict[str, tuple[Path, Any]] = {}
    per_rank: dict[str, Path] = {}
    own_values: dict[str, Any] = {}
    addresses: dict[str, int] = {}
    refused: list[ShardoptError] = []
    shared: dict[int, Any] = {}  # options of a group, by identity: each of its parameters has the same
    stand_for_others = set(flat.tied.values())
    address = Tensor.data_ptr if needs_bytes else address_of
    for key, leaf in flat.leaves.items():
        path, value = leaf.path, leaf.value
        try:
            if isinstance(value, Tensor):
                view = view_of(value, key)
                if members is not None:
                    view = view.numbered_in(members, all_of=key)
                if stand_for_others and not stand_for_others.isdisjoint(path):
                    view = view.known_in_part()  # others may lie on other meshes
                views[key] = view
                tensors[key] = path, STORED_DTYPES.get(view.dtype) or stored_dtype(view.dtype, key), view.layout
                pointers = [address(piece.tensor) for piece in view.pieces]
                addresses[key] = pointers[0] if pointers else 0
                if 0 in pointers and needs_bytes:
                    _refuse_without_memory(key, view)
            elif isinstance(value, PerRank):
                per_rank[key] = path
                own_values[key] = encode_value(value.value, key)
            elif type(value) is dict:
                values[key] = path, shared.get(id(value)) or shared.setdefault(id(value), encode_value(value, key))
            else:
                values[key] = path, encode_value(value, key)
        except (StateError, LayoutError) as error:
            refused.append(error)
    if refused:
        kind, message = type(refused[0]), refused[0].message
        problems = [problem for error in refused for problem in error.problems]
        raise kind(message, problems, code=refused[0].code)
    _refuse_shared_memory(flat, views)
    tied: dict[str, str] = {}
    if len({*addresses.values()}) < len(addresses):
        same = tied_in(views, addresses)
        tied = {key: first for key, first in same.items() if views[key].layout == views[first].layout}
    if flat.twins:
        refuse_untied(flat, views)
    return Description(
        views=views,
        tensors=tensors,
        values=values,
        per_rank=per_rank,
        contents={} if is_alone or check_replicas == "none" else contents_of(views, check_replicas),
        own_values=own_values,
        check_replicas=check_replicas,
        tied=tied,
        unmatched=flat.unmatched_patterns(),
        aliases={key: (first, path) for key, (first, path) in flat.aliases.items() if first in tensors},
        declared=flat.tied,
        buffers=frozenset() if is_alone else buffers_in(flat, views),
        versions=versions_in(flat.noted),
        frozen=frozen_in(flat),
    )


def _refuse_without_memory(key: str, view: View) -> None:
    """Raises StateError for a tensor with elements but without memory."""
    if any(has_no_memory(piece.tensor) for piece in view.pieces):
        found, remedy = GIVEN_BACK, "save while its parameter is there"
        if view.pieces[0].tensor.is_meta:
            found, remedy = "a tensor on the meta device", "initialize it first"
        raise StateError("a tensor cannot be stored", [Problem(key, found, "a tensor with values", remedy)])


def _refuse_shared_memory(flat: FlatState, views: Mapping[str, View]) -> None:
    """Raises StateError for tensors of expanded memory and the like, as a load could not write each element."""
    strided = [(key, piece) for key, view in views.items() for piece in view.pieces if not piece.tensor.is_contiguous()]
    problems = {
        key: problem
        for key, piece in strided
        if not isinstance(flat.leaves[key].value, PiecesTensor)  # as of a publication, whose zeros are one
        and (problem := overlap_problem(key, piece.tensor))
    }
    if problems:
        raise StateError("a tensor cannot be stored", [*problems.values()])


def geometry_of(description: Description, world_size: int) -> Geometry:
    """Returns the job's geometry if every rank has described the same."""
    ranks = tuple(range(world_size))
    tied = {key: (first, description.tensors[key][0]) for key, first in description.tied.items()}
    members = {
        key: Member(path, dtype, layout, ranks, key in description.buffers)
        for key, (path, dtype, layout) in description.tensors.items()
        if key not in tied
    }
    aliases = with_aliases(tied, description.aliases)
    return Geometry(members, description.per_rank, aliases, description.versions)


def with_aliases(
    tied: Mapping[str, tuple[str, Path]], aliases: Mapping[str, tuple[str, Path]]
) -> dict[str, tuple[str, Path]]:
    """Returns the keys that share a member's memory, including declared ones.

    Args:
        tied: those that were found.
        aliases: those that were declared.
    """
    return {**tied, **{key: (tied.get(first, (first,))[0], path) for key, (first, path) in aliases.items()}}
