"""A plan for embedding tables: `plan_tables` and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.optim import Optimizer

from shardopt.algorithms.registry import AlgorithmSpec, Kind, spec_of
from shardopt.errors import AlgorithmError, Problem
from shardopt.nn.plan.costs import (
    EXCHANGE_BANDWIDTH,
    MEMORY_BANDWIDTH,
    NARROWEST,
    PIECE_SECONDS,
    Shape,
    TableSize,
)
from shardopt.nn.plan.solution import DTYPE_BYTES, Solution, by_table, checked_job, refuse, solve, travel_bytes
from shardopt.nn.table import Cut, Grid, Table, cut_problems
from shardopt.runtime.signatures import signature


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The cuts of tables, with what they cost. `print` it to see a table.

    Args:
        tables: those that were given, in their order, with `cut` set: for `ShardedEmbeddingBag`.
        bytes_per_rank: that each rank holds, weights and optimizer state.
        seconds_per_rank: of a step, by the cost model.
        why: name of a table → one line with its cut, its bytes and its share of the load.
        bound: of `seconds`, from below, for plans of the cuts that `plan_tables` tries; maybe none comes so low.
    """

    tables: tuple[Table, ...]
    bytes_per_rank: tuple[int, ...]
    seconds_per_rank: tuple[float, ...]
    why: Mapping[str, str]
    bound: float

    @property
    def seconds(self) -> float:
        """The cost of the plan: the seconds of the busiest rank."""
        return max(self.seconds_per_rank)

    def __str__(self) -> str:
        shapes = tuple(Shape(1, 1) for _ in self.tables)
        lines = Solution(shapes, self.bytes_per_rank, self.seconds_per_rank, self.bound, dict(self.why)).lines()
        width = max(len(line[0]) for line in lines)
        return "\n".join("  ".join([line[0].ljust(width), *line[1:]]).rstrip() for line in lines)


def plan_tables(
    tables: Sequence[Table],
    ranks: int,
    memory_bytes: int | Sequence[int],
    *,
    batch: float,
    pooling: float | Mapping[str, float],
    algorithm: type[Optimizer] | str,
    skew: float | Mapping[str, float] = 0.0,
    keep: Collection[str] = (),
    exchange_bandwidth: float = EXCHANGE_BANDWIDTH,
    memory_bandwidth: float = MEMORY_BANDWIDTH,
    piece_seconds: float = PIECE_SECONDS,
    narrowest: int = NARROWEST,
) -> TablePlan:
    """Plans the cuts of tables so that the busiest rank has as little to do as possible, within the memory given.

    A pure function: no rank is needed to call it, and equal arguments give equal plans on every rank. The docstring of
    `shardopt.nn.plan.costs` has the cost model. Weights of a table and its optimizer state count as memory; buffers of
    a step do not, so pass what the rest of the job leaves. Nothing is mutated.

    Args:
        tables: to be planned. Their dtype counts; None is torch's default dtype now.
        ranks: over which they are cut, the size of the mesh.
        memory_bytes: of each rank for tables and state: one number for all, or one for each rank.
        batch: samples of a rank in a step.
        pooling: mean ids per sample: one number for all tables, or by name.
        algorithm: as for `fuse`, by name or class, with its default options; underscores in names do not count.
        skew: exponent of Zipf's law for ids, one for all tables or by name. 0 is uniform, 1 usual for items of a shop.
        keep: names of tables whose `cut` stays. A kept "whole" gets a rank. All others are cut anew.
        exchange_bandwidth: bytes/s that a rank sends and receives. The default, 25e9, is a 200 Gbit/s link per rank.
        memory_bandwidth: bytes/s that a rank reads and writes. The default, 2e12, is that of a GPU with 2 TB/s.
        piece_seconds: that each piece costs its rank in a step, however small. The default, 20e-6, is that of some four
            kernel launches.
        narrowest: the fewest columns of a piece, 16 by default: a cache line of fp32.

    Returns:
        The plan. Its cuts are "rows", "columns", "replicated", or a `Grid` with ranks: `Grid(1, 1, (3,))` is whole on
        rank 3.

    Raises:
        OptionError: arguments are wrong; lists all of them.
        AlgorithmError: the algorithm is not known, or its state is not one of elements and rows.
        InputError: no plan was found that fits the memory; says how much is needed.
    """
    spec = spec_of(algorithm)
    problems = list(_wrong_tables(tables, ranks, keep))
    names = [table.name for table in tables]
    dtypes = [str(table.dtype or torch.get_default_dtype()).removeprefix("torch.") for table in tables]
    travel = travel_bytes([dtype for dtype in dtypes if dtype in DTYPE_BYTES])
    figures = exchange_bandwidth, memory_bandwidth, piece_seconds, narrowest
    job = checked_job(ranks, memory_bytes, batch, travel, *figures, problems)
    ids = by_table("pooling", pooling, names, 0, problems)
    skews = by_table("skew", skew, names, 0, problems)
    refuse(problems)
    assert job is not None
    sizes = [
        TableSize(
            table.name,
            *(table.num_embeddings, table.embedding_dim, DTYPE_BYTES[dtype]),
            *(float(ids[table.name]), float(skews[table.name])),
            *_state(spec, getattr(torch, dtype)),
            _kept(table.cut, ranks) if table.name in keep else None,
            table.mode != "none" and DTYPE_BYTES[dtype] >= 4,
        )
        for table, dtype in zip(tables, dtypes, strict=True)
    ]
    found = solve(sizes, job)
    cuts = [
        # A kept "whole" becomes a grid that names the rank.
        table.cut if table.name in keep and table.cut != "whole" else _cut(shape)
        for table, shape in zip(tables, found.shapes, strict=True)
    ]
    planned = tuple(replace(table, cut=cut) for table, cut in zip(tables, cuts, strict=True))
    return TablePlan(planned, found.bytes_per_rank, found.seconds_per_rank, found.why, found.bound)


@cache  # there may be a thousand tables of one algorithm
def _state(spec: AlgorithmSpec, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes of state for each element and for each row of a table; counters are left out.

    Raises:
        AlgorithmError: there is state of another form.
    """
    parameters = signature(spec.optimizer).parameters.values()
    options = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    element = row = 0
    for entry in spec.entries(options):
        held = entry.dtype.of(dtype, options).itemsize
        if entry.kind is Kind.PARAMETER:
            element += held
        elif entry.kind in (Kind.TABLE_ROWS, Kind.ROWS):
            row += held
        elif entry.kind is not Kind.SCALAR:
            required = "state of elements and rows alone"
            problem = Problem(spec.name, f"state {entry.name!r} of {entry.kind.value}", required, "choose another")
            raise AlgorithmError("tables cannot be planned for this algorithm", [problem], code="embedding-tables")
    return element, row


def _wrong_tables(tables: Sequence[Table], ranks: object, keep: Collection[str]) -> Iterator[Problem]:
    if not tables:
        yield Problem("tables", "none", "at least one", "pass the tables that are to be planned")
    names = [table.name for table in tables]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(name, "a name that comes twice", "a name of its own", "rename one of the tables")
    for name in sorted(set(keep) - {*names}):
        yield Problem(f"keep[{name!r}]", "an unknown table", f"one of {sorted(names)}", "mend the name")
    for table in tables:
        if table.num_embeddings < 1 or table.embedding_dim < 1:
            shape = f"{table.num_embeddings} rows of {table.embedding_dim} elements"
            yield Problem(table.name, shape, "at least one of each", "mend num_embeddings and embedding_dim")
        if table.dtype is not None and str(table.dtype).removeprefix("torch.") not in DTYPE_BYTES:
            yield Problem(table.name, str(table.dtype), f"one of {', '.join(DTYPE_BYTES)}", "choose one of them")
        if table.name in keep and isinstance(ranks, int):
            yield from cut_problems(table, ranks)


def _kept(cut: Cut, ranks: int) -> Shape:
    if isinstance(cut, Grid):
        held_by = tuple(range(cut.rows * cut.columns)) if cut.ranks is None else tuple(cut.ranks)
        return Shape(cut.rows, cut.columns, held_by)
    if cut == "whole":
        return Shape(1, 1)
    return Shape(*{"rows": (ranks, 1), "columns": (1, ranks), "replicated": (1, 1)}[cut], None, cut)


def _cut(shape: Shape) -> Cut:
    return shape.name or Grid(shape.rows, shape.columns, shape.ranks)
