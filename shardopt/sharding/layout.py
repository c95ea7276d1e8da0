"""Layouts: the boxes of a tensor, and the ranks that hold each. Has no tensors.

A layout is plain data that ranks can compare (`fingerprint`), send (`to_json`, `from_json`) and merge (`merge`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, grid_boxes, grid_cuts, whole


@dataclass(frozen=True)
class Layout:
    """The boxes of one tensor, and the ranks that hold each.

    Args:
        shape: the global shape.
        boxes: distinct boxes in ascending order of offsets. They are non-empty, except for a tensor without elements,
            whose one box is the whole of it.
        holders: for each box the global ranks that hold it, ascending. None if every rank that has the tensor holds all
            of it, as with a plain tensor.
        local: whether other ranks may know of more boxes, or of more holders. The layout of the tensor is then known
            only after the ranks have exchanged theirs (`merge`). That is so for LocalShardsWrapper, which knows the
            rank's own shards only, and for a mesh that is a cut through a larger one.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    holders: tuple[tuple[int, ...], ...] | None = None
    local: bool = False

    @cached_property
    def grid(self) -> tuple[tuple[int, ...], ...] | None:
        """The cut points of each dimension, if the boxes are all cells of a grid; else None."""
        return grid_cuts(self.shape, self.boxes)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """The number of elements of each box."""
        return tuple(box.numel for box in self.boxes)

    @cached_property
    def shared(self) -> Mapping[Box, tuple[int, ...]]:
        """The boxes that several ranks are known to hold, with these ranks."""
        pairs = () if self.holders is None else zip(self.boxes, self.holders, strict=True)
        return {box: holders for box, holders in pairs if len(holders) > 1}

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that are equal for equal layouts, on every rank and in every version of Python."""
        text = json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __hash__(self) -> int:
        # The generated hash walks through every box at every look-up; this one is computed once.
        return hash(self.fingerprint)

    def to_json(self) -> dict[str, Any]:
        """Returns the layout in JSON's own types; equal layouts give equal documents.

        A grid is written as its cut points, `{"grid": [[0, 4, 8], [0, 16]]}`, so that its size is that of its edges.
        """
        where: dict[str, Any] = (
            {"grid": [list(points) for points in self.grid]}
            if self.grid is not None
            else {"boxes": [[list(box.offsets), list(box.sizes)] for box in self.boxes]}
        )
        holders = None if self.holders is None else [list(ranks) for ranks in self.holders]
        return {"shape": list(self.shape), **where, "holders": holders, "local": self.local}

    @staticmethod
    def from_json(wire: Mapping[str, Any]) -> Layout:
        """Reads the layout that `to_json` wrote. Does not check it, so it must come from a rank of this job."""
        holders = None if wire["holders"] is None else tuple(map(tuple, wire["holders"]))
        if "grid" in wire:
            return Layout.of_grid(tuple(wire["shape"]), tuple(map(tuple, wire["grid"])), holders, bool(wire["local"]))
        boxes = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in wire["boxes"])
        return Layout(tuple(wire["shape"]), boxes, holders, bool(wire["local"]))

    @staticmethod
    def of_grid(
        shape: tuple[int, ...],
        cuts: tuple[tuple[int, ...], ...],
        holders: tuple[tuple[int, ...], ...] | None,
        local: bool = False,
    ) -> Layout:
        """Makes a layout whose boxes are the cells of a grid, from the holders of each cell, ascending by offsets.

        Args:
            cuts: of each dimension the cut points, strictly ascending from 0 to the size of the dimension. What they
                make covers the tensor by construction; it is not looked for in the boxes again.
        """
        layout = Layout(shape, _cells(cuts), holders, local)
        layout.__dict__["grid"] = cuts  # where `cached_property` keeps it
        return layout

    @staticmethod
    @lru_cache(maxsize=4096)
    def replicated(shape: tuple[int, ...]) -> Layout:
        """Returns the layout of a plain tensor: one box, held by every rank that has the tensor."""
        box = whole(shape)
        return Layout(box.sizes, (box,))

    @staticmethod
    def from_holders(shape: tuple[int, ...], holders: Mapping[Box, Iterable[int]], local: bool = False) -> Layout:
        """Makes a layout from box → the ranks that hold it, given in any order."""
        boxes = tuple(sorted(holders, key=lambda box: (box.offsets, box.sizes)))
        return Layout(shape, boxes, tuple(tuple(sorted(set(holders[box]))) for box in boxes), local)

    def numbered_in(self, members: tuple[int, ...]) -> Layout:
        """Returns the layout with ranks renumbered by their positions in `members`, without others and their boxes."""
        return self if self.holders is None else _numbered_in(self, members)

    @staticmethod
    def merge(layouts: Mapping[int, Layout], key: str = "tensor") -> Layout:
        """Merges the layouts that ranks have of one tensor into one; each rank may know only its own boxes.

        Args:
            layouts: the layout that each rank (global number) has for the tensor; ranks without the tensor are absent.
            key: the tensor's name in errors.

        Returns:
            All boxes of all ranks, each with every rank that holds it. Whether the boxes cover the tensor is not asked.

        Raises:
            LayoutError: the ranks disagree on the global shape.
        """
        kinds: dict[Layout, list[int]] = {}
        for rank, layout in layouts.items():
            kinds.setdefault(layout, []).append(rank)
        return Layout.merge_kinds([(layout, tuple(ranks)) for layout, ranks in kinds.items()], key)

    @staticmethod
    def merge_kinds(kinds: Sequence[tuple[Layout, tuple[int, ...]]], key: str = "tensor") -> Layout:
        """Merges layouts as `merge` does, each given once with all ranks that have it (at least one).

        Takes time by kinds and boxes, not by ranks, but where ranks hold all of a tensor.
        """
        first, first_ranks = kinds[0]
        for layout, ranks in kinds:
            if layout.shape != first.shape:
                problem = Problem(
                    key=key,
                    found=f"global shape {layout.shape} on rank {ranks[0]}",
                    required=f"{first.shape}, as on rank {first_ranks[0]}",
                    remedy="give every rank the same global tensor under this key",
                )
                raise LayoutError("ranks disagree on the shape of a tensor", [problem], code="ranks-differ")
        distinct = dict.fromkeys(layout for layout, _ in kinds)
        if len(distinct) == 1 and not first.local:
            return first
        if first.grid is not None and all(each.holders and each.boxes == first.boxes for each in distinct):
            # Copies of one grid on several meshes, as where FSDP runs over one dimension of a mesh: it stays a grid.
            of_boxes = zip(*(each.holders or () for each in distinct), strict=True)
            return Layout.of_grid(first.shape, first.grid, tuple(map(_union, of_boxes)))
        holders: dict[Box, set[int]] = {}
        for layout, ranks in kinds:
            if layout.holders is None:
                for box in layout.boxes:
                    holders.setdefault(box, set()).update(ranks)
        for layout in distinct:
            for box, of_box in zip(layout.boxes, layout.holders or (), strict=layout.holders is not None):
                holders.setdefault(box, set()).update(of_box)
        return Layout.from_holders(first.shape, holders)


@lru_cache(maxsize=32)
def _cells(cuts: tuple[tuple[int, ...], ...]) -> tuple[Box, ...]:
    """Returns the cells of a grid; layouts of one grid share them, so that they compare fast."""
    return grid_boxes(cuts)


@lru_cache(maxsize=4096)
def _numbered_in(layout: Layout, members: tuple[int, ...]) -> Layout:
    place_of = {rank: place for place, rank in enumerate(members)}
    holders = [sorted(place_of[rank] for rank in ranks if rank in place_of) for ranks in layout.holders or ()]
    if layout.grid is not None and all(holders):
        return Layout.of_grid(layout.shape, layout.grid, tuple(map(tuple, holders)), layout.local)
    of_boxes = zip(layout.boxes, holders, strict=True)
    return Layout.from_holders(layout.shape, {box: ranks for box, ranks in of_boxes if ranks}, layout.local)


def _union(holders: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return holders[0] if len(holders) == 1 else tuple(sorted(set().union(*holders)))
