"""One rank's plan of a load, with its reads; and the parts of it that ranks compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import xxhash
from torch import Tensor
from torch.optim import Optimizer

from shardopt.checkpoint.loading.compare import Match, compare
from shardopt.checkpoint.loading.growing import Growing, growing_in, with_places
from shardopt.checkpoint.loading.names import Names
from shardopt.checkpoint.loading.options import LoadOptions, Strictness
from shardopt.checkpoint.loading.reconcile import compare_differences, differences_of, is_met
from shardopt.checkpoint.loading.tied import refuse_overlapping, refuse_unequal
from shardopt.checkpoint.rearrange.row_state import MergedRows, other_row_state, with_remedy, with_shapes
from shardopt.checkpoint.saving.planning.tied import refuse_other_ties, refuse_untied, tied_in
from shardopt.checkpoint.sources.open import raise_for_other_checkpoint
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.broadcast import BroadcastReads, fingerprint, shared_among
from shardopt.checkpoint.sources.reading.fetch import casts_to_check
from shardopt.checkpoint.sources.reading.open_file import ReadRequest
from shardopt.errors import MismatchError, OptionError, Problem, StateError
from shardopt.ranks import Ranks
from shardopt.runtime.partial_loads import PartialLoad
from shardopt.sharding.pieces import Piece, View
from shardopt.sharding.swapped import LOAD_IN_SWAP, refuse_swapped
from shardopt.sharding.view import addresses_of, view_of
from shardopt.state.param_groups import PARAMS, refuse_unmatched
from shardopt.state.paths import Path, join, keys_below
from shardopt.state.state import FlatState


@dataclass(slots=True)
class RankPlan:
    """One rank's plan of a load. Made and changed within a round, so that its failures reach all ranks.

    At first it takes for granted that all ranks hold the same shared tensors, and has open the files of what this one
    then is to read. The round tells whether they do; where they do not, nothing is sent (`read_alone`).

    Args:
        into: the tensors to be filled by the app's keys, of tied ones the first.
        per_rank: the stored values of this rank, by stored key.
        unmatched: what is wrong with a regex of keys that may be missing.
        may_grow: the keys of plain containers of which other things are stored.
        growing: those that get what is stored.
        shared: those of `into` of which each box is read by one of the ranks that have it.
        broadcast: sends these; None where there are none.
        requests: this rank's reads.
    """

    reader: CheckpointReader
    flat: FlatState
    names: Names
    match: Match
    into: Mapping[str, View] = field(default_factory=dict)
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    unmatched: Sequence[Problem] = ()
    may_grow: Sequence[str] = ()
    growing: Sequence[Growing] = ()
    shared: Mapping[str, View] = field(default_factory=dict)
    broadcast: BroadcastReads | None = None
    requests: list[ReadRequest] = field(default_factory=list)

    @property
    def tensors(self) -> list[Tensor]:
        """The app's tensors that are loaded, on whatever rank."""
        return [self.flat.leaves[key].value for key in self.match.tensors]

    @property
    def bytes_wanted(self) -> int:
        """The stored bytes that fill `into`."""
        sizes = [(self.match.tensors[key][1].dtype.itemsize, view.pieces) for key, view in self.into.items()]
        return sum([itemsize * memory.numel() for itemsize, pieces in sizes for _, memory in pieces])

    @property
    def has_casts_to_check(self) -> bool:
        """Whether any tensor is cast to a dtype that cannot hold all numbers of the stored one."""
        return bool(self.match.cast and casts_to_check(self.requests))

    def request(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Makes the reads that fill these pieces of the app's tensors, and opens their files."""
        renamed = self.names.renamed
        wanted = [(renamed.get(key, key), each) for key, each in pieces.items()]
        self.requests = self.reader.requests(wanted, others_follow=False)

    def read_alone(self) -> None:
        """Makes this rank read everything that it holds, and send nothing."""
        self.reader.close()  # of open files only the entries of this rank's share were kept
        self.broadcast = None
        self.request({key: view.pieces for key, view in self.into.items()})

    def stored_keys(self) -> dict[str, str]:
        """Returns key of what is loaded → its key in the checkpoint."""
        return {key: self.names.renamed.get(key, key) for key in (*self.match.tensors, *self.match.values)}

    def report(self, url: str, is_alone: bool) -> list[Any]:
        """Returns what rank 0 needs of the plan, as JSON for `compare_plans`.

        Args:
            url: of the checkpoint, as it was given.
            is_alone: whether there is no other rank to compare with.
        """
        match = self.match
        return [
            url,
            self.reader.digest,
            fingerprint(self.shared) if self.shared else "",
            differences_of(match, self.names) if match.problems or match.unexpected or match.warnings else None,
            bool(match.cast) and self.has_casts_to_check,
            self.flat.unmatched_patterns(),
            dict(self.flat.tied),
            bool(match.tensors or match.values or match.per_rank) or is_met(self.flat, self.names),
            self.may_grow,
            [asdict(problem) for problem in self.unmatched],
            {} if is_alone else self._loaded_of_objects(),
        ]

    def changing(self, what: str) -> dict[str, PartialLoad]:
        """Returns the app's optimizers by their keys, each with what the load leaves out, or changes late.

        Also those of which nothing is selected: something else of the app is.
        """
        leaves, match = self.flat.leaves, self.match
        optimizers = {each.path: each.object for each in self.flat.targets if isinstance(each.object, Optimizer)}
        if not optimizers:
            return {}
        states = tuple(f"{join(path)}." for path in optimizers)

        @cache  # of all optimizers: there may be one for each parameter
        def not_read() -> set[int]:
            left = (leaves[key].value for key in leaves.keys() - match.tensors.keys() if not key.startswith(states))
            return addresses_of(value for value in left if isinstance(value, Tensor)) - written

        def kept(optimizer: Optimizer) -> set[int]:
            params = addresses_of(chain.from_iterable(group[PARAMS] for group in optimizer.param_groups))
            return not_read() | (params - written)

        read = [view for key, (view, _) in match.tensors.items() if not key.startswith(states)]
        # One set for all marks.
        written = frozenset([0, *(memory.data_ptr() for view in read for _, memory in view.pieces)] if read else ())

        def own_keys(keys: Iterable[str]) -> dict[Path, list[str]]:
            below = keys_below({key: leaves[key].path for key in keys}, list(optimizers))
            return {path: [join(leaves[key].path[len(path) :]) for key in own] for path, own in below.items()}

        left_out = own_keys((leaves.keys() - self.names.chosen) | {*match.missing})
        late = own_keys((*match.values, *match.per_rank))
        return {
            join(path): PartialLoad(
                each, what, left_out[path], late[path], written, kept=partial(kept, each) if read else None
            )
            for path, each in optimizers.items()
        }

    def _loaded_of_objects(self) -> dict[str, list[str]]:
        """Returns hashes of each object's keys, and of those that are loaded; nothing where that is not settled.

        State of optimizers is left out: which they have may follow from what is loaded (`init_state`).
        """
        if self.match.problems or self.may_grow:
            return {}
        targets, match = self.flat.targets, self.match
        states = tuple(f"{each.state_key}." for each in targets if each.groups is not None)
        paths = {key: leaf.path for key, leaf in self.flat.leaves.items() if not key.startswith(states)}
        own = keys_below(paths, [each.path for each in targets])
        loaded = match.tensors.keys() | match.values.keys() | {*match.per_rank}
        return {
            join(path): [_hash(sorted(keys)), _hash(sorted(loaded.intersection(keys)))] for path, keys in own.items()
        }


def _hash(keys: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(keys).encode())


def plan_rank(
    reader: CheckpointReader,
    flat: FlatState,
    names: Names,
    ranks: Ranks,
    options: LoadOptions,
    grow: Mapping[str, Any] | None = None,
) -> RankPlan:
    """Plans what this rank loads. Refuses what does not fit, or notes it, to be reconciled with other ranks.

    Args:
        grow: which containers are to get what is stored (`agreed_growth`); None where that is not agreed yet.
    """
    strictness, share_reads = options.strictness, options.share_reads
    growing: Sequence[Growing] = ()
    if grow is not None:
        flat, names, growing = with_places(flat, names, grow, strictness)
    members, leaves = ranks.job_numbers, flat.leaves
    views = {key: view_of(leaf.value, key) for key, leaf in leaves.items() if isinstance(leaf.value, Tensor)}
    if members is not None:
        views = {key: view.numbered_in(members) for key, view in views.items()}
    if flat.twins:
        refuse_untied(flat, views)
    compare_here = partial(
        compare, flat, views, strictness=strictness, world_size=ranks.size, needs_memory=options.reads
    )
    match = compare_here(names)
    match.problems += chain.from_iterable(each.problems for each in growing)
    if match.problems:
        reader, names, match = _with_row_state(reader, flat, views, names, strictness, match, compare_here)
    differs = match.problems or match.missing or match.unexpected
    may_grow = growing_in(flat, names, options.select) if differs and grow is None else []
    unmatched = strictness.unmatched(flat, names) if isinstance(strictness.missing, re.Pattern) else ()
    plan = RankPlan(reader, flat, names, match, growing=growing, may_grow=may_grow, unmatched=unmatched)
    if match.problems or may_grow:
        return plan
    old, into = names.renamed, {key: view for key, (view, _) in match.tensors.items()}
    if match.per_rank:
        plan.per_rank = _values_of_rank(reader, match.per_rank, old, ranks.rank)
        here = ((key, leaves[key].value, plan.per_rank[old.get(key, key)]) for key in match.per_rank)
        match.problems += filter(None, (value.check(key, stored) for key, value, stored in here))
        if match.problems:
            return plan
    if options.reads and (names.aliases or match.overlaps()):
        into = _without_ties(reader, into, names)
    refuse_swapped(LOAD_IN_SWAP, (leaves[key].value for key in into))
    plan.into = into
    if not options.reads:
        return plan
    if ranks.size > 1 and (share_reads == "always" or (share_reads == "auto" and reader.is_remote)):
        plan.shared = shared_among(into)
    pieces: dict[str, Sequence[Piece]] = {key: view.pieces for key, view in into.items() if key not in plan.shared}
    if plan.shared:
        plan.broadcast = BroadcastReads(plan.shared, ranks)
        pieces |= plan.broadcast.own_pieces()
    plan.request(pieces)
    return plan


def _with_row_state(
    reader: CheckpointReader,
    flat: FlatState,
    views: Mapping[str, View],
    names: Names,
    strictness: Strictness,
    match: Match,
    compare_with: Callable[[Names], Match],
) -> tuple[CheckpointReader, Names, Match]:
    """Compares again with state of rows merged, if that may be; else its problems get the remedy."""
    shapes = {key: view.shape for key, view in views.items() if key in names.chosen}
    states = other_row_state(reader, names.renamed, shapes)
    states = {key: state for key, state in states.items() if _rows_here(flat, views, key) == {state.rows}}
    known = {key: state for key, state in states.items() if state.widths}
    if strictness.row_state == "merge" and known:
        reader = MergedRows(reader, {names.renamed.get(key, key): state for key, state in known.items()})
        names = replace(names, manifest=with_shapes(names.manifest, known))
        match = compare_with(names)
        match.merged = {key: state for key, state in known.items() if key in match.tensors and state.is_merged}
    stored = names.manifest.tensors
    unlike = {key: stored[key].layout.shape for key, state in states.items() if stored[key].layout.shape != state.shape}
    match.problems = [
        with_remedy(each, states[each.key], unlike[each.key]) if each.key in unlike else each for each in match.problems
    ]
    return reader, names, match


def _rows_here(flat: FlatState, views: Mapping[str, View], key: str) -> set[int]:
    """Returns how many rows the app's tables have of which it has state under a key; none if there is no such table.

    With twice the rows state looks like that of two parts of the columns.
    """
    name = str(flat.leaves[key].path[-2])
    shapes = [view.shape for other, view in views.items() if f".{other}".endswith(f".{name}")]
    if not shapes:
        params = [getattr(each.object, "params", None) for each in flat.targets if key.startswith(f"{each.state_key}.")]
        shapes = [tuple(each[name].shape) for each in params if isinstance(each, Mapping) and name in each]
    return {shape[0] for shape in shapes if len(shape) == 2}


def _values_of_rank(
    reader: CheckpointReader, keys: Iterable[str], stored_key: Mapping[str, str], rank: int
) -> Mapping[str, Any]:
    """Returns the values that a rank stored for itself; raises if one of these keys is missing."""
    stored = reader.per_rank(rank)
    remedy = "pass it on the ranks that saved it"
    problems = [
        Problem(key, f"no value of rank {rank}", "one, as this rank passes it", remedy)
        for key in keys
        if stored_key.get(key, key) not in stored
    ]
    if problems:
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", problems)
    return stored


def _without_ties(reader: CheckpointReader, into: Mapping[str, View], names: Names) -> dict[str, View]:
    """Returns the first of the tensors that share one memory; raises if stored values for shared memory differ."""
    tied, tensors, old = tied_in(into), names.manifest.tensors, names.renamed
    aliases = {key: first for key, first in names.aliases.items() if key in tensors and first in into}
    refuse_unequal(reader, {**into, **{key: into[first] for key, first in aliases.items()}}, tied | aliases, old)
    first_ones = {key: view for key, view in into.items() if key not in tied}
    refuse_overlapping(reader, first_ones, old)
    return first_ones


def compare_plans(reports: list[list[Any]]) -> dict[str, Any]:
    """Finds, on rank 0, whether all ranks share the same tensors, and which have differences, or casts to check.

    Raises:
        CheckpointError: ranks would load from different checkpoints.
        StateError: a pattern of groups matches nothing on any rank, or they declare other parameters as tied.
            Or ranks that have the same keys of an object load others of them: its shards would not fit each other.
        OptionError: a regex of keys that may be missing is found in no key on any rank.
    """
    columns = zip(*reports, strict=True)
    urls, digests, fingerprints, differences, casts, unmatched, tied, met, may_grow, lacking, loaded = columns
    if all(unmatched):
        refuse_unmatched(unmatched)
    if all(lacking):
        problems = [Problem(**each) for each in lacking[0]]
        raise OptionError("a regex matches nothing", problems, code="nothing-selected")
    if any(tied):
        refuse_other_ties(tied)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise_for_other_checkpoint(urls, other)
    if any(loaded):
        _refuse_other_parts(loaded)
    return {
        "alike": len(set(fingerprints)) == 1,
        "with_differences": compare_differences(differences) if any(differences) else {},
        "with_casts": any(casts),
        "is_met": any(met),
        "may_grow": [*dict.fromkeys(chain.from_iterable(may_grow))],
    }


def _refuse_other_parts(loaded: Sequence[Mapping[str, Sequence[str]]]) -> None:
    """Raises StateError for objects of which some ranks would load other keys than others that have the same ones.

    Args:
        loaded: of each rank, key of each object → hashes of its keys, and of those that are loaded.
    """
    first: dict[tuple[str, str], tuple[int, str]] = {}
    problems: dict[str, Problem] = {}
    for rank, objects in enumerate(loaded):
        for key, (own, here) in objects.items():
            other, there = first.setdefault((key, own), (rank, here))
            if here != there:
                found = f"rank {rank} would load other keys of it than rank {other}, which has the same"
                remedy = "pass the same select, skip, rename, rearrange and strict on these ranks"
                problems.setdefault(key, Problem(key, found, "the same keys on both", remedy))
    if problems:
        raise StateError("ranks load different parts of an object", [*problems.values()], code="ranks-differ")
