"""Descriptions of the job's state: made by each rank, compared, and merged (`merge`) where they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.paths import encode_path
from shardopt.checkpoint.format.shared_values import pack
from shardopt.checkpoint.format.tensor_bytes import GIVEN_BACK, has_no_memory, stored_dtype
from shardopt.checkpoint.planning.assign import Member
from shardopt.checkpoint.planning.buffers import buffers_in
from shardopt.checkpoint.planning.drift import Groups
from shardopt.checkpoint.planning.ownership import refuse_strange_parameters, refuse_unshared
from shardopt.checkpoint.planning.replica_check import (
    CheckReplicas,
    Contents,
    contents_of,
    groups_of,
    summary_of,
)
from shardopt.checkpoint.planning.tied import refuse_untied, tied_in
from shardopt.errors import LayoutError, Problem, ShardoptError, StateError
from shardopt.sharding.layout import Layout
from shardopt.sharding.layout_merge import LayoutWriter
from shardopt.sharding.pieces import View
from shardopt.sharding.view import view_of
from shardopt.state import FlatState, Path, PerRank
from shardopt.values import encode_value


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
    unmatched: Sequence[dict[str, Any]] = ()  # `FlatState.unmatched_patterns`
    aliases: Mapping[str, tuple[str, Path]] = field(default_factory=dict)  # of tensors, as `FlatState.aliases`
    declared: Mapping[str, str] = field(default_factory=dict)  # as `FlatState.tied`
    buffers: frozenset[str] = frozenset()  # keys of tensors of which each rank may have other values
    contents_come_later: bool = False  # with what is written; until then there are none

    @property
    def is_partial(self) -> bool:
        """Whether some tensor is known only as far as this rank holds it."""
        return any(layout.local for _, _, layout in self.tensors.values())

    def geometry_fingerprint(self) -> str:
        """Returns a hash, equal on two ranks, and in two saves, that describe the same tensors in the same places."""
        aliases = sorted((key, first) for key, (first, _) in self.aliases.items())
        words = [str(len(self.tied)), json.dumps(aliases)]
        for key, first in sorted(self.tied.items()):
            words += (key, first)
        words += ("buffers", *sorted(self.buffers)) if self.buffers else ()
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
        return summary_of(self.contents, self.views, members, self.buffers)

    def contents_in_groups(self, members: Mapping[str, Member]) -> Groups:
        """Returns the hashes that a summary with these members is of."""
        return groups_of(self.contents, self.views, members, self.buffers)

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
        }

    def values_json(self) -> dict[str, Any]:
        """Encodes the plain values, for `merge_values`."""
        return pack(self.values)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The state of the whole job without its values: every tensor with its whole layout.

    `tied` has the keys of tensors that are, on every rank, one memory with the member that each is mapped to, or were
    declared as tied to it.
    """

    members: Mapping[str, Member]
    per_rank: Mapping[str, Path]
    tied: Mapping[str, tuple[str, Path]] = field(default_factory=dict)


def describe(flat: FlatState, check_replicas: CheckReplicas, members: tuple[int, ...] | None = None) -> Description:
    """Describes this rank's state.

    Args:
        check_replicas: which bytes of replicas are hashed.
        members: the numbers in the job of those ranks that save, where these are not numbered so themselves.

    Raises:
        StateError, LayoutError: something in it cannot be stored; names all of it.
    """
    refuse_strange_parameters(flat)
    refuse_unshared(flat)
    views: dict[str, View] = {}
    tensors: dict[str, tuple[Path, Dtype, Layout]] = {}
    values: dict[str, tuple[Path, Any]] = {}
    per_rank: dict[str, Path] = {}
    own_values: dict[str, Any] = {}
    addresses: dict[str, int] = {}
    refused: list[ShardoptError] = []
    shared: dict[int, Any] = {}  # options of a group, by identity: each of its parameters has the same
    stand_for_others = set(flat.tied.values())
    for key, leaf in flat.leaves.items():
        try:
            if isinstance(leaf.value, Tensor):
                view = view_of(leaf.value, key).numbered_in(members, all_of=key)
                if stand_for_others and not stand_for_others.isdisjoint(leaf.path):
                    view = view.known_in_part()  # others may lie on other meshes
                views[key] = view
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
            elif type(leaf.value) is dict:
                if id(leaf.value) not in shared:
                    shared[id(leaf.value)] = encode_value(leaf.value, key)
                values[key] = leaf.path, shared[id(leaf.value)]
            else:
                values[key] = leaf.path, encode_value(leaf.value, key)
        except (StateError, LayoutError) as error:
            refused.append(error)
    if refused:
        kind, message = type(refused[0]), refused[0].message
        raise kind(message, [problem for error in refused for problem in error.problems])
    refuse_untied(flat, views)
    contents = contents_of(views, check_replicas)
    tied = {key: first for key, first in tied_in(views, addresses).items() if views[key].layout == views[first].layout}
    unmatched = flat.unmatched_patterns()
    aliases = {key: (first, path) for key, (first, path) in flat.aliases.items() if first in tensors}
    return Description(
        views,
        tensors,
        values,
        per_rank,
        contents,
        own_values,
        check_replicas,
        tied,
        unmatched,
        aliases,
        flat.tied,
        buffers_in(flat, views),
    )


def geometry_of(description: Description, world_size: int) -> Geometry:
    """Returns the job's geometry where every rank has described the same."""
    ranks = tuple(range(world_size))
    tied = {key: (first, description.tensors[key][0]) for key, first in description.tied.items()}
    members = {
        key: Member(path, dtype, layout, ranks, key in description.buffers)
        for key, (path, dtype, layout) in description.tensors.items()
        if key not in tied
    }
    return Geometry(members, description.per_rank, with_aliases(tied, description.aliases))


def with_aliases(
    tied: Mapping[str, tuple[str, Path]], aliases: Mapping[str, tuple[str, Path]]
) -> dict[str, tuple[str, Path]]:
    """Returns the keys that share a member's memory, those that were declared to among them.

    Args:
        tied: those that were found.
        aliases: those that were declared.
    """
    return {**tied, **{key: (tied.get(first, (first,))[0], path) for key, (first, path) in aliases.items()}}


def _path_words(key: str, path: Path) -> tuple[str, str]:
    """Returns two texts that, with the key, identify a path: where its parts end, and of what kind they are.

    A position in a list is no key of a dict, and the key 0 is not "0".
    """
    try:
        return "\1".join(path), ""  # type: ignore[arg-type]  # of what is no str the lines below make another form
    except TypeError:
        return "", json.dumps(encode_path(key, path))
