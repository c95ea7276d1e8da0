"""Makes the layouts of a save that refers to an earlier one, from what its ranks found unchanged. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.checkpoint.format.assign import Assignment
from shardopt.checkpoint.format.manifest import DataFile, StoredEntry, StoredLayout, StoredTensor, StoredTensors
from shardopt.checkpoint.saving.planning.save_plan import SavePlan
from shardopt.checkpoint.saving.writing.base import Base, Part
from shardopt.checkpoint.saving.writing.unchanged import unpack_parts
from shardopt.sharding.box import Box


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The parts that the ranks of a save found unchanged, by rank, as `pack_parts` encodes them."""

    base: Base
    by_rank: Sequence[Mapping[str, Any]]


_Found = tuple[Part, ...] | int | None
"""The result for a box: its parts; the number of the base's box if it is unchanged; None if all of it has changed."""


def refer(plan: SavePlan, unchanged: Unchanged) -> tuple[list[tuple[int, int]], tuple[DataFile, ...], StoredTensors]:
    """Returns rank and slot of each written file, the files that are referred to, and all tensors."""
    found: dict[str, list[_Found]] = {key: [None] * len(each.boxes) for key, each in plan.assigned.items()}
    written = set[tuple[int, int]]()
    for rank, slot in plan.files:
        boxes = plan.boxes_in_order.get((rank, slot), ())
        parts = unpack_parts(unchanged.by_rank[rank]).get(slot, {})
        for position, of_box in parts.items():
            key, number = boxes[position]
            found[key][number] = of_box if isinstance(of_box, int) else (*of_box,)
        some = [part for of_box in parts.values() if not isinstance(of_box, int) for part in of_box]
        is_written = len(parts) < len(boxes) or any(part.unchanged_in is None for part in some)
        if is_written or (plan.geometry.per_rank and slot == 0):
            written.add((rank, slot))
        written |= {(rank, part.delta_slot) for part in some if part.delta_slot is not None}
    writers = sorted(written)
    files = _Files(unchanged.base, writers)
    layouts: dict[tuple[Assignment, StoredLayout | None, tuple[_Found, ...]], StoredLayout] = {}
    stored = StoredTensors()
    for key, member in plan.geometry.members.items():
        assignment, of_boxes = plan.assigned[key], (*found[key],)
        tensor = unchanged.base.manifest.tensors.get(key)
        base_layout = tensor.layout if tensor is not None and any(each is not None for each in of_boxes) else None
        known = assignment, base_layout, of_boxes
        if known not in layouts:
            layouts[known] = _layout(assignment, base_layout, of_boxes, files)
        stored[key] = StoredTensor(member.path, member.dtype, layouts[known])
    for key, (tied_to, path) in plan.geometry.tied.items():
        stored[key] = stored[tied_to]._replace(path=path, tied_to=tied_to)
    return writers, tuple(files.referred), stored


class _Files:
    """The numbered files of a manifest: first the written ones, then those that are referred to."""

    def __init__(self, base: Base, writers: Sequence[tuple[int, int]]) -> None:
        self._base, self._written = base, {writer: number for number, writer in enumerate(writers)}
        self._numbers: dict[int, int] = {}  # by those in the base
        self.referred: list[DataFile] = []

    def written(self, writer: tuple[int, int]) -> int:
        return self._written[writer]

    def in_base(self, number: int) -> int:
        if number not in self._numbers:
            self._numbers[number] = len(self._written) + len(self.referred)
            self.referred.append(self._base.data_file(number))
        return self._numbers[number]

    def entry_in_base(self, entry: StoredEntry) -> StoredEntry:
        """Returns an entry of the base with this manifest's numbers of the files with its deltas."""
        if not entry.delta_files:
            return entry
        # The bridge stays, for followers that have the step before the anchor, and missed the anchor.
        bridge = None if entry.bridge is None else self.in_base(entry.bridge)
        return entry._replace(deltas=(*map(self.in_base, entry.deltas),), bridge=bridge)


def _layout(assignment: Assignment, base: StoredLayout | None, found: Sequence[_Found], files: _Files) -> StoredLayout:
    boxes: list[Box] = []
    numbers: list[int] = []
    entries: list[StoredEntry] = []

    def add(box: Box, number: int, entry: StoredEntry) -> None:
        boxes.append(box)
        numbers.append(number)
        entries.append(entry)

    for box, writer, of_box in zip(assignment.boxes, assignment.writers, found, strict=True):
        if of_box is None:
            add(box, files.written(writer), StoredEntry(box, False))
        elif isinstance(of_box, int):
            assert base is not None
            add(box, files.in_base(base.files[of_box]), files.entry_in_base(base.entry(of_box)))
        else:
            for begin, end, number, delta_slot in of_box:
                part = Box((begin, *box.offsets[1:]), (end - begin, *box.sizes[1:]))
                if number is None and delta_slot is not None:
                    add(box, files.written(writer), StoredEntry(box, False, (), files.written((writer[0], delta_slot))))
                elif number is None:
                    add(part, files.written(writer), StoredEntry(part, True))
                else:
                    assert base is not None
                    entry = files.entry_in_base(base.entry(number))
                    if delta_slot is not None:
                        entry = entry._replace(deltas=(*entry.deltas, files.written((writer[0], delta_slot))))
                    add(part, files.in_base(base.files[number]), entry)
    as_they_are = all(entry == StoredEntry(box, False) for box, entry in zip(boxes, entries, strict=True))
    return StoredLayout(assignment.shape, (*boxes,), (*numbers,), () if as_they_are else (*entries,))
