"""Layouts: which boxes a tensor lies in, and which ranks hold each of them. No tensors here.

A layout is plain data that ranks can compare (`fingerprint`), send (`to_json`, `from_json`) and merge (`merge`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, grid_boxes, grid_cuts, whole


@dataclass(frozen=True)
class Layout:
    """The boxes of one tensor, and the ranks that hold each of them.

    Args:
        shape: the global shape.
        boxes: distinct boxes in ascending order of offsets. They are non-empty, except for a tensor without elements,
            whose one box is the whole of it.
        holders: for each box the global ranks that hold it, ascending; None where every rank that has the tensor
            holds all of it, as with a plain tensor.
        local: whether other ranks may know of more boxes, or of more holders, so that the layout of the tensor is known
            only after the ranks exchanged theirs (`merge`). So it is for LocalShardsWrapper, which tells of the rank's
            own shards only, and for a mesh that is a cut through a larger one.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    holders: tuple[tuple[int, ...], ...] | None = None
    local: bool = False

    @cached_property
    def grid(self) -> tuple[tuple[int, ...], ...] | None:
        """The cut points of each dimension where the boxes are all cells of a grid; else None."""
        return grid_cuts(self.shape, self.boxes)

    @cached_property
    def shared(self) -> Mapping[Box, tuple[int, ...]]:
        """The boxes that several ranks are known to hold, and which."""
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
        """Reads the layout that `to_json` wrote. The document must come from a rank of this job: it is not checked."""
        if "grid" in wire:
            boxes = grid_boxes([tuple(points) for points in wire["grid"]])
        else:
            boxes = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in wire["boxes"])
        holders = None if wire["holders"] is None else tuple(tuple(ranks) for ranks in wire["holders"])
        return Layout(tuple(wire["shape"]), boxes, holders, bool(wire["local"]))

    @staticmethod
    @lru_cache(maxsize=4096)
    def replicated(shape: tuple[int, ...]) -> Layout:
        """Returns the layout of a plain tensor: one box, which every rank that has the tensor holds."""
        return Layout(shape, (whole(shape),))

    @staticmethod
    def from_holders(shape: tuple[int, ...], holders: Mapping[Box, Iterable[int]], local: bool = False) -> Layout:
        """Makes a layout from box → the ranks that hold it, given in any order."""
        boxes = tuple(sorted(holders, key=lambda box: (box.offsets, box.sizes)))
        return Layout(shape, boxes, tuple(tuple(sorted(set(holders[box]))) for box in boxes), local)

    @staticmethod
    def merge(layouts: Mapping[int, Layout], key: str = "tensor") -> Layout:
        """Merges the layouts that ranks have of one tensor, of which each may know its own boxes only, into one.

        Args:
            layouts: the layout that each rank (global number) has for the tensor; ranks without the tensor are absent.
            key: the tensor's name in errors.

        Returns:
            All boxes of all ranks, each with every rank that holds it. Whether the boxes cover the tensor is not asked.

        Raises:
            LayoutError: the ranks disagree on the global shape.
        """
        distinct = set(layouts.values())
        first = next(iter(layouts.values()))
        if any(layout.shape != first.shape for layout in distinct):
            rank, other = next((rank, layout) for rank, layout in layouts.items() if layout.shape != first.shape)
            problem = Problem(
                key=key,
                found=f"global shape {other.shape} on rank {rank}",
                required=f"{first.shape}, as on rank {next(iter(layouts))}",
                remedy="give every rank the same global tensor under this key",
            )
            raise LayoutError("ranks disagree on the shape of a tensor", [problem])
        if len(distinct) == 1 and not first.local:
            return first
        holders: dict[Box, set[int]] = {}
        merged: set[Layout] = set()
        for rank, layout in layouts.items():
            if layout.holders is None:
                for box in layout.boxes:
                    holders.setdefault(box, set()).add(rank)
            elif layout not in merged:
                merged.add(layout)
                for box, ranks in zip(layout.boxes, layout.holders, strict=True):
                    holders.setdefault(box, set()).update(ranks)
        return Layout.from_holders(first.shape, holders)
