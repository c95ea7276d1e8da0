"""Converts a save plan of torch.distributed.checkpoint (DCP) to one of shardopt."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan as DcpSavePlan
from torch.distributed.checkpoint.planner import WriteItem

from shardopt.checkpoint.format.assign import Assignment, Member
from shardopt.checkpoint.format.tensor_bytes import stored_dtype
from shardopt.checkpoint.saving.planning.describe import Geometry
from shardopt.checkpoint.saving.planning.save_plan import SavePlan
from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, cover_faults
from shardopt.sharding.layout import Layout


def box_of(item: WriteItem) -> Box:
    """Returns the box of a tensor that an item covers."""
    data = item.tensor_data
    assert data is not None
    return Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def without_nothing(plans: Iterable[DcpSavePlan]) -> list[DcpSavePlan]:
    """Returns plans without empty boxes; the first rank that has a tensor without elements stores it."""
    seen: set[str] = set()

    def is_something(item: WriteItem) -> bool:
        if item.tensor_data is None or box_of(item).numel:
            return True
        is_new = not item.tensor_data.size.numel() and item.index.fqn not in seen
        seen.add(item.index.fqn)
        return is_new

    return [dataclasses.replace(plan, items=[item for item in plan.items if is_something(item)]) for plan in plans]


def plan_of(plans: Sequence[DcpSavePlan], first_rank: int | None = None) -> SavePlan:
    """Returns the plan of a save from the plans of its ranks.

    Args:
        plans: by rank; or that of one rank, whose number is `first_rank`: then it is the plan of what that rank writes.

    Raises:
        LayoutError: the boxes of a tensor do not make up the whole of it.
    """
    boxes: defaultdict[str, list[tuple[Box, tuple[int, int]]]] = defaultdict(list)
    data: dict[str, Any] = {}
    for rank, plan in enumerate(plans, first_rank or 0):
        slots: defaultdict[str, int] = defaultdict(int)
        for item in plan.items:
            if item.tensor_data is not None:
                key = item.index.fqn
                boxes[key].append((box_of(item), (rank, slots[key])))
                slots[key] += 1
                data.setdefault(key, item.tensor_data)
    known: dict[Any, Assignment] = {}
    assigned: dict[str, Assignment] = {}
    members: dict[str, Member] = {}
    problems = []
    for key, of_key in boxes.items():
        of_key.sort()
        shape = tuple(data[key].size)
        split, writers = zip(*of_key, strict=True)
        if first_rank is None and (shape, split, writers) not in known:
            remedy = "pass every shard of the tensor, once"
            faults = cover_faults(shape, split)
            problems += [Problem(key, fault, "each element in exactly one box", remedy) for fault in faults]
        assigned[key] = known.setdefault((shape, split, writers), Assignment(shape, split, writers))
        dtype = stored_dtype(data[key].properties.dtype, key)
        members[key] = Member((key,), dtype, Layout.replicated(shape), tuple(sorted({rank for rank, _ in writers})))
    if problems:
        raise LayoutError("the shards of a tensor do not make up the tensor", problems)
    return SavePlan(Geometry(members, {}), len(plans), known=assigned)
