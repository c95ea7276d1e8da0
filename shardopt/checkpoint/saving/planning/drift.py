"""Names the replicas that have drifted, after summaries have shown that some have.

A summary is a hash of thousands of replicas. Ranks send hashes of parts of it, then of parts of the parts that differ,
until those are single replicas: a few rounds of a few KiB, where all hashes of all ranks would be gigabytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import xxhash

from shardopt.errors import Problem, StateError
from shardopt.ranks import Call, Ranks

_told: set[str] = set()  # keys of buffers that differ, on rank 0
_log = logging.getLogger("shardopt.checkpoint")

_REMEDY = (
    "make them the same, or say that they are not: wrap the value in PerRank, make the tensor a DTensor of its shards, "
    "or give each rank a key of its own; buffers of a module may differ where it is in the app itself, and not its "
    'state_dict(); check_replicas="none" does not ask'
)
_OF_COUNTER = (
    "it counts steps with a gradient: in some step a rank had none, or did not step; give the parameter one on all "
    "ranks, zeros where it is not used, and load the last checkpoint that they agreed on"
)
_OF_STATE = (
    "where only one rank steps each parameter and sends it to the others, these lack the state until a load gives it "
    "to all: call optimizer.state.pop(p, None) after each on the ranks that do not step p; otherwise "
)

_PARTS = 16  # that a range is cut into
_MOST_RANGES = 1 << 16  # that are followed, over all ranks
_LEAST_RANGES = 32

Groups = Mapping[str, Sequence[tuple[str, str, str]]]
"""Name of a group → key, box and hash of its replicas, sorted (`replica_check.groups_of`)."""


class _Range(NamedTuple):
    """Replicas of a group from `begin` to `end`; `end` is -1 for the last."""

    group: str
    begin: int
    end: int


def refuse_drifted(ranks: Ranks, call: Call, groups: Groups, drifted: Sequence[str]) -> None:
    """Raises StateError that names the replicas that differ, or the first ones of very many. Collective.

    Args:
        groups: this rank's.
        drifted: names of groups for which ranks do not have the same hash.
    """
    _meet(ranks, call, groups, drifted, _refuse)
    raise AssertionError("replicas that differed do not differ")


def tell_buffers(ranks: Ranks, call: Call, groups: Groups, differing: Sequence[str]) -> None:
    """Logs on rank 0 which buffers differ between ranks; the first holder's values are stored. Collective.

    Args:
        groups, differing: as for `refuse_drifted`.
    """
    _meet(ranks, call, groups, differing, _tell)


def _meet(
    ranks: Ranks,
    call: Call,
    groups: Groups,
    drifted: Sequence[str],
    decide: Callable[[Sequence[Any]], None],
) -> None:
    """Narrows groups down to the single replicas that differ.

    Passes these to `decide` on rank 0: number, key, box and hash of each, by rank.
    """
    most = max(_MOST_RANGES // ranks.size, _LEAST_RANGES)
    ranges = [_Range(group, 0, -1) for group in drifted[:most]]
    while not all(each.end - each.begin == 1 for each in ranges):
        _, found = ranks.agree(
            call,
            work=partial(_hashes_of_parts, groups, ranges),
            report=lambda hashes: hashes,
            decide=lambda reports: _that_differ(reports)[:most],
        )
        ranges = [_Range(*each) for each in found]
    ranks.agree(
        call,
        work=lambda: [[i, *groups[each.group][each.begin]] for i, each in enumerate(ranges) if each.group in groups],
        report=lambda named: named,
        decide=decide,
    )


def _hashes_of_parts(groups: Groups, ranges: Sequence[_Range]) -> list[list[Any]]:
    """Returns group, begin, end and hash of each part of those ranges that this rank holds."""
    parts = []
    for group, begin, end in ranges:
        replicas = groups.get(group)
        if replicas is not None:
            end = len(replicas) if end < 0 else end
            step = -(-(end - begin) // _PARTS)
            for first in range(begin, end, step):
                last = min(first + step, end)
                digests = "".join(digest for _, _, digest in replicas[first:last])
                parts.append([group, first, last, xxhash.xxh3_64_hexdigest(digests.encode())])
    return parts


def _that_differ(reports: Sequence[Sequence[Sequence[Any]]]) -> list[_Range]:
    """Returns the parts whose hashes differ between ranks, in order."""
    first: dict[_Range, str] = {}
    differ: set[_Range] = set()
    for report in {id(report): report for report in reports}.values():  # many ranks may share one
        for *place, digest in report:
            part = _Range(*place)
            if first.setdefault(part, digest) != digest:
                differ.add(part)
    return [part for part in first if part in differ]


def _tell(reports: Sequence[Sequence[Sequence[Any]]]) -> None:
    keys = {key for named in reports for _, key, _, _ in named} - _told
    if keys:
        _told.update(keys)
        _log.warning(
            "buffers differ between ranks, as running statistics do; those of the first rank that holds each are "
            "saved, and restored on all: %s [replicas-differ]",
            ", ".join(sorted(keys)),
        )


def _refuse(reports: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raises StateError for replicas that differ, given number, key, box and hash of each, by rank."""
    first: dict[int, tuple[int, str]] = {}
    problems: dict[int, Problem] = {}
    for rank, named in enumerate(reports):
        for number, key, box, digest in named:
            other, expected = first.setdefault(number, (rank, digest))
            if digest != expected and number not in problems:
                difference = f"other bytes of {box or 'it'} on rank {rank} than on rank {other}"
                problems[number] = Problem(key, difference, "the same on every rank that holds it", _remedy(key))
    if problems:
        raise StateError(
            "replicas have drifted apart",
            sorted(problems.values(), key=lambda each: (each.key, each.found)),
            code="replicas-differ",
        )


def _remedy(key: str) -> str:
    if ".state." not in key:
        return _REMEDY
    return _OF_STATE + (_OF_COUNTER if key.endswith(".step") else _REMEDY)
