"""Finds boxes, rows of boxes and elements whose bytes an earlier save already has. No communication.

    row: an index of the first dimension; a box's rows follow one another in its bytes
    unit: the fewest rows whose bytes are whole segments; only between units a box is cut

Each rank looks for itself, for what it is to write: at checksums that the earlier save's data files have, whose header
and checksums are verified, and that of its own memory. What is equal is referred to, in the file that holds it: so a
save never refers to a reference, however many there are.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any, Literal, TypeVar

from shardopt.checkpoint.format.constants import SEGMENT_BYTES, patch_prefix, segment_count
from shardopt.checkpoint.format.manifest import StoredEntry, StoredLayout
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, WriteRequest
from shardopt.checkpoint.saving.writing.base import Base, Part, columns_of, rows_of
from shardopt.checkpoint.saving.writing.deltas import BuiltDelta, delta_of
from shardopt.checkpoint.saving.writing.earlier import TensorBytes
from shardopt.checkpoint.saving.writing.row_prints import row_bytes
from shardopt.checkpoint.saving.writing.write import memory_of
from shardopt.runtime.accelerator import CallersStreams
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import View
from shardopt.world import world

T = TypeVar("T")

_SAMPLED_SEGMENTS = 16  # of a box: where all of them have changed, the others are not looked at
_LEAST_SHARE = 16  # of a box's bytes, one in so many: fewer in a row are not worth a cut
_MOST_PARTS = 64  # of a box, or it is written whole again: manifests are not to grow with the number of saves

_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))  # that compare; ranks share a host's cores

_LEAST_USE = 4  # of a file's bytes, one in so many: else all of it is kept for the sake of a few


def compared_with(
    base: Base, writes: RankWrites, views: Mapping[str, View], chain: Chain
) -> tuple[RankWrites, dict[str, list[list[Any]]], int]:
    """Compares what a rank is to write with the base, and drops what that has.

    Args:
        chain: as in `SaveTerms`. Only of a "bounded" one a box is written whole again before its deltas make restores
            much slower. For an "anchor" nothing is dropped, and deltas are written too.

    Returns:
        What is left to write; the parts of boxes that are written otherwise, as JSON; the bytes of tensors that the
        base has.
    """
    is_bounded = chain == "bounded"
    # Deltas have files of their own, as the others may soon be of no more use: one for each slot, whose keys differ.
    first_delta_slot = 1 + max(writes.slots, default=0)

    def look(request: WriteRequest) -> tuple[list[Part], BuiltDelta | None]:
        memory = _bytes_of(base, request, views)
        of_box = _parts_of(base, request, memory)
        changed_bytes = request.nbytes - sum(part.end - part.begin for part in of_box) * row_bytes(request)
        # Followers know a box again only if it is not cut.
        is_kept = chain != "anchor" and (is_bounded or not changed_bytes)
        return of_box if is_kept else [], _delta_of(base, request, memory, changed_bytes, is_bounded)

    found: _Found = {}
    deltas: dict[tuple[int, int], BuiltDelta] = {}
    for (slot, position), (of_box, delta) in _looked_up(look, writes, views).items():
        found[slot, position] = of_box
        if delta is not None:
            rows, number = rows_of(writes.slots[slot][position].box), None if chain == "anchor" else delta.number
            found[slot, position] = [Part(*rows, number, first_delta_slot + slot)]
            deltas[slot, position] = delta
    if is_bounded:
        found = _worth_keeping(base, writes, found)
    left: defaultdict[int, list[WriteRequest]] = defaultdict(list)
    parts: defaultdict[int, dict[int, list[Part]]] = defaultdict(dict)
    unchanged_bytes = 0
    for slot, requests in writes.slots.items():
        for position, request in enumerate(requests):
            of_box = _with_changed(found[slot, position], *rows_of(request.box)) if found[slot, position] else []
            if of_box:
                parts[slot][position] = of_box
            if not of_box or chain == "anchor":
                left[slot].append(request)
            for part in of_box:
                if part.delta_slot is not None:
                    delta = deltas[slot, position]
                    left[part.delta_slot] += delta.requests
                    unchanged_bytes += 0 if chain == "anchor" else request.nbytes - delta.nbytes
                elif part.unchanged_in is None:
                    left[slot].append(_patch(request, part))
                else:
                    unchanged_bytes += (part.end - part.begin) * row_bytes(request)
    return writes.only(left), pack_parts(parts), unchanged_bytes


def _looked_up(
    look: Callable[[WriteRequest], T], writes: RankWrites, views: Mapping[str, View]
) -> dict[tuple[int, int], T]:
    """Returns the result of `look` for each request, by slot and position; in threads where there are many cores."""
    places = {(slot, i): each for slot, requests in writes.slots.items() for i, each in enumerate(requests)}
    if _THREADS == 1 or len(places) == 1:
        return {place: look(request) for place, request in places.items()}
    streams = CallersStreams(memory_of(request, views) for request in places.values())

    def look_there(request: WriteRequest) -> T:
        with streams.entered():
            return look(request)

    with world().thread_pool(_THREADS, "shardopt-compare") as pool:
        return dict(zip(places, pool.map(look_there, places.values()), strict=True))


_Found = dict[tuple[int, int], list[Part]]
"""The unchanged parts of each box, by slot and position."""


def _worth_keeping(base: Base, writes: RankWrites, found: _Found) -> _Found:
    """Returns the parts whose files are still used enough to refer to.

    Of the file with a part, much must be in use. Files with deltas on it may be as large as the part, all together; of
    one that several parts use, each has its share. Where one part is dropped, the others' shares grow.
    """
    used_by = [
        (place, part, *base.bytes_used(writes.slots[place[0]][place[1]], part))
        for place, of_box in found.items()
        for part in of_box
    ]
    sizes = {number: base.bytes_in(number) for number in {each for *_, of_part in used_by for each in of_part}}
    while True:
        used: defaultdict[int, int] = defaultdict(int)
        for *_, of_part in used_by:
            for number, nbytes in of_part.items():
                used[number] += nbytes

        def is_worth(number: int, of_part: Mapping[int, int], used: Mapping[int, int] = used) -> bool:
            held = sum(sizes[each] * of_part[each] // used[each] for each in of_part if each != number)
            return used[number] * _LEAST_USE >= sizes[number] and held <= of_part[number]

        worth = [each for each in used_by if is_worth(*each[2:])]
        if len(worth) == len(used_by):
            break
        used_by = worth
    kept: _Found = {place: [] for place in found}
    for place, part, *_ in used_by:
        kept[place].append(part)
    return kept


Chain = Literal["bounded", "link", "anchor"]

PartsBySlot = Mapping[int, Mapping[int, Sequence[Part]]]
"""The parts of each box, by slot and by the box's position in that file's plan."""


def pack_parts(parts: PartsBySlot) -> dict[str, list[list[Any]]]:
    """Encodes parts as JSON for rank 0; unchanged boxes as runs, since there may be many."""
    wire: dict[str, list[list[Any]]] = {}
    for slot, of_slot in parts.items():
        items: list[list[Any]] = []
        for position, of_box in sorted(of_slot.items()):
            number = of_box[0].unchanged_in if len(of_box) == 1 and of_box[0].delta_slot is None else None
            if number is None:
                items.append([position, [list(part) for part in of_box]])
            elif items and len(items[-1]) == 3 and items[-1][2] == number and sum(items[-1][:2]) == position:
                items[-1][1] += 1
            else:
                items.append([position, 1, number])
        wire[str(slot)] = items
    return wire


def unpack_parts(wire: Mapping[str, Any]) -> dict[int, dict[int, list[Part] | int]]:
    """Decodes what `pack_parts` made; gives only the base's number for a box whose rows are all unchanged."""
    parts: dict[int, dict[int, list[Part] | int]] = {}
    for slot, items in wire.items():
        of_slot: dict[int, list[Part] | int] = {}
        for position, *item in items:
            if len(item) == 2:
                of_slot |= dict.fromkeys(range(position, position + item[0]), item[1])
            else:
                of_slot[position] = [Part(*part) for part in item[0]]
        parts[int(slot)] = of_slot
    return parts


def _parts_of(base: Base, request: WriteRequest, memory: TensorBytes) -> list[Part]:
    """Returns the unchanged parts of a box, in order; none if all of it must be written."""
    layout = base.layout_of(request)
    if layout is None:
        return []
    first, last = rows_of(request.box)
    same: list[Part] = []
    for begin, end, number in base.rows_like(layout, request.box):
        entry = layout.entry(number)
        if request.box.numel and min(end, last) <= max(begin, first):
            continue
        if not request.box.numel and layout.boxes[number] != request.box:
            continue
        if columns_of(entry.box) != columns_of(request.box):
            continue
        stored = base.stored(layout.files[number], request, entry)
        if stored is None:
            continue
        if not request.box.numel:
            return [Part(first, last, number)]
        rows = max(begin, first), min(end, last)
        for unchanged in _unchanged_rows(request, entry, rows, stored.checksums, memory):
            # A part that was cut before stays as it is, however short: it would be written again and again.
            if unchanged == rows or (unchanged[1] - unchanged[0]) * _LEAST_SHARE >= last - first:
                same.append(Part(*unchanged, number))
    same = _joined(same, layout)
    return same if len(same) <= _MOST_PARTS else []


def _with_changed(same: Sequence[Part], first: int, last: int) -> list[Part]:
    """Returns the unchanged parts with the changed ones between them, which together are all rows of a box."""
    parts: list[Part] = []
    row = first
    for part in same:
        if part.begin > row:
            parts.append(Part(row, part.begin, None))
        parts.append(part)
        row = part.end
    if row < last:
        parts.append(Part(row, last, None))
    return parts


def _unchanged_rows(
    request: WriteRequest, entry: StoredEntry, rows: tuple[int, int], sums: bytes, memory: TensorBytes
) -> Iterator[tuple[int, int]]:
    """Yields the ranges of rows of a box in an entry whose segments have the entry's checksums."""
    size = row_bytes(request)
    unit = SEGMENT_BYTES // gcd(SEGMENT_BYTES, size)
    box_begin, _ = rows_of(request.box)
    entry_begin, entry_end = rows_of(entry.box)
    begin = entry_begin + -(-(rows[0] - entry_begin) // unit) * unit
    end = rows[1] if rows[1] == entry_end else entry_begin + (rows[1] - entry_begin) // unit * unit
    if begin >= end:
        return
    at, first_segment = (begin - box_begin) * size, (begin - entry_begin) * size // SEGMENT_BYTES
    nbytes = (end - begin) * size
    count = segment_count(nbytes)

    def is_unchanged(segment: int) -> bool:
        offset = segment * SEGMENT_BYTES
        place = 8 * (first_segment + segment)
        return memory.digest(at + offset, at + min(offset + SEGMENT_BYTES, nbytes)) == sums[place : place + 8]

    sampled = {count * i // _SAMPLED_SEGMENTS for i in range(_SAMPLED_SEGMENTS)} | {count - 1}
    known = {segment: is_unchanged(segment) for segment in sorted(sampled)}
    if not any(known.values()):
        return
    segments_in_unit = unit * size // SEGMENT_BYTES
    run: int | None = None
    for row in range(begin, end, unit):
        segment = (row - begin) // unit * segments_in_unit
        stop = min(segment + segments_in_unit, count)
        if all(known[each] if each in known else is_unchanged(each) for each in range(segment, stop)):
            run = row if run is None else run
        elif run is not None:
            yield run, row
            run = None
    if run is not None:
        yield run, end


def _joined(parts: Sequence[Part], layout: StoredLayout) -> list[Part]:
    """Joins adjacent parts in one entry of a file."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.end == part.begin and _entry_of(last, layout) == _entry_of(part, layout):
            joined[-1] = Part(last.begin, part.end, last.unchanged_in)
        else:
            joined.append(part)
    return joined


def _entry_of(part: Part, layout: StoredLayout) -> tuple[int, StoredEntry]:
    assert part.unchanged_in is not None
    return layout.files[part.unchanged_in], layout.entry(part.unchanged_in)


def _patch(request: WriteRequest, part: Part) -> WriteRequest:
    """Returns the request for some rows of a box."""
    first, _ = rows_of(request.box)
    begin, rows = part.begin - first, part.end - part.begin
    box, inner = request.box, request.inner or Box((0,) * len(request.box.sizes), request.box.sizes)
    return request._replace(
        box=Box((part.begin, *box.offsets[1:]), (rows, *box.sizes[1:])),
        inner=Box((inner.offsets[0] + begin, *inner.offsets[1:]), (rows, *inner.sizes[1:])),
        prefix=patch_prefix(part.begin),
    )


def _delta_of(
    base: Base, request: WriteRequest, memory: TensorBytes, changed_bytes: int, is_bounded: bool
) -> BuiltDelta | None:
    """Returns a delta as `delta_of` does, and None of a box that is as it was."""
    if changed_bytes:
        return delta_of(base, request, memory, changed_bytes, is_bounded)
    if base.prints is not None:
        base.prints.keep(request)
    return None


def _bytes_of(base: Base, request: WriteRequest, views: Mapping[str, View]) -> TensorBytes:
    tensor = memory_of(request, views)
    return TensorBytes(tensor) if base.kept is None else base.kept.add(request, tensor)
