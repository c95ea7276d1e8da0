"""A named embedding table: its size, how it is cut, and its first values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardopt.errors import LayoutError, Problem, StateError

Mode = Literal["sum", "mean", "none"]


@dataclass(frozen=True, slots=True)
class Grid:
    """A cut of a table into `rows` times `columns` pieces, one on each of as many ranks.

    Args:
        rows, columns: into how many parts each is cut, as torch.chunk cuts; at least 1.
        ranks: of the pieces, as positions in the mesh dimension over which tables are cut, ascending: those of the
            first part of rows come first. None is the first `rows * columns` of them.
    """

    rows: int = 1
    columns: int = 1
    ranks: tuple[int, ...] | None = None


Cut = Literal["rows", "columns", "whole", "replicated"] | Grid
"""How a table is cut: by rows or by columns over all ranks, not at all, with a replica on each rank, or as a grid.

"whole" is on the rank whose whole tables have the fewest bytes so far, in the order of the tables.
"""

_BLOCK_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class Table:
    """The name, size and options of an embedding table.

    Args:
        name: its parameter is `<name>.weight` in the module. An identifier that no attribute of a module has.
        num_embeddings: rows, N; its ids are 0 to N - 1.
        embedding_dim: elements of a row, D.
        mode: how `ShardedEmbeddingBag` pools the vectors of a bag; with "none" it gives a vector for each id.
            `ShardedEmbedding` never pools.
        dtype: of the rows; None is torch's default at the time when the module is made.
        init: fills a new block of rows, [rows, D] on the CPU in the table's dtype, in place; it may draw from torch's
            default generator. None draws from the standard normal distribution, as nn.EmbeddingBag does.
        padding_idx: an id that adds nothing to a bag, and does not count in a mean. Without pooling it reads as zeros.
            It never gets a gradient; its row begins as zeros.
        cut: over the ranks.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    mode: Mode = "mean"
    dtype: torch.dtype | None = None
    init: Callable[[Tensor], object] | None = None
    padding_idx: int | None = None
    cut: Cut = "rows"


def refuse_bad_tables(tables: Sequence[Table], mesh: DeviceMesh, taken: Collection[str]) -> None:
    """Checks the tables and the mesh of a module.

    Args:
        tables: that it is to hold.
        mesh: over which they are to be cut.
        taken: names that a table cannot have.

    Raises:
        StateError: there are no tables, or some are not as they have to be.
        LayoutError: the mesh has more than two dimensions, has its ranks in another order, or this rank is not in it.
    """
    problems = [problem for table in tables for problem in _wrong(table, tables, taken)]
    problems += [problem for table in tables for problem in cut_problems(table, mesh.shape[-1])]
    if not tables:
        problems = [Problem("tables", "none", "at least one", "pass the tables that the module is to hold")]
    if problems:
        raise StateError("tables cannot be made", problems, code="embedding-tables")
    members = mesh.mesh.flatten().tolist()
    if mesh.ndim > 2 or members != sorted(members) or mesh.get_coordinate() is None:
        actual = f"a mesh of shape {tuple(mesh.mesh.shape)} over ranks {members}"
        required = "one dimension, or two with replicas over the first; ascending ranks, this rank among them"
        remedy = 'pass one dimension of the mesh, mesh["dp"], on its ranks'
        problem = Problem("mesh", actual, required, remedy)
        raise LayoutError("tables cannot be sharded over this mesh", [problem], code="embedding-tables")


def _wrong(table: Table, tables: Sequence[Table], taken: Collection[str]) -> Iterator[Problem]:
    name, padding = table.name, table.padding_idx
    if not name.isidentifier() or name in taken or sum(other.name == name for other in tables) > 1:
        remedy = "give each table a name of its own, without dots"
        yield Problem(repr(name), "a name that cannot be used, or comes twice", "an identifier of its own", remedy)
    if table.num_embeddings < 1 or table.embedding_dim < 1:
        shape = f"{table.num_embeddings} rows of {table.embedding_dim} elements"
        yield Problem(name, shape, "at least one of each", "mend num_embeddings and embedding_dim")
    if table.mode not in ("sum", "mean", "none"):
        yield Problem(name, f"mode {table.mode!r}", "'sum', 'mean' or 'none'", "choose one of them")
    if padding is not None and not 0 <= padding < table.num_embeddings:
        required = f"one of the ids, 0 to {table.num_embeddings - 1}"
        yield Problem(name, f"padding_idx {padding}", required, "count it from the front")


def cut_problems(table: Table, ranks: int) -> Iterator[Problem]:
    """Yields what is wrong with the cut of a table over so many ranks."""
    grid, name = table.cut, table.name
    if not isinstance(grid, Grid):
        if grid not in ("rows", "columns", "whole", "replicated"):
            required = "'rows', 'columns', 'whole', 'replicated' or a Grid"
            yield Problem(name, f"cut {grid!r}", required, "choose one of them")
        return
    count = grid.rows * grid.columns
    on = list(range(count) if grid.ranks is None else grid.ranks)
    if min(grid.rows, grid.columns) < 1 or len(on) != count or on != sorted({*on} & {*range(ranks)}):
        present = f"{grid.rows} x {grid.columns} pieces on ranks {on}"
        required = f"at least one piece, and as many ranks, of 0 to {ranks - 1}, ascending"
        yield Problem(name, present, required, "mend the Grid, or cut over more ranks")


def draw(table: Table, begin: tuple[int, int], here: Tensor) -> None:
    """Fills a piece of a table with numbers that depend on neither ranks nor device.

    Each block of rows has a seed of its own, which follows from one draw of torch's default generator. So a rank needs
    memory for one block besides its piece, and ranks with equal generators get the pieces of one table.

    Args:
        begin: the first row and column of the piece.
        here: the piece, in place.
    """
    start, rows = begin[0], here
    columns = slice(begin[1], begin[1] + here.shape[1])
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    after = torch.get_rng_state()
    end = start + len(rows)
    for number in range(start // _BLOCK_ROWS, math.ceil(end / _BLOCK_ROWS) if end > start else 0):
        first = number * _BLOCK_ROWS
        shape = min(_BLOCK_ROWS, table.num_embeddings - first), table.embedding_dim
        block = torch.empty(shape, dtype=rows.dtype, device="cpu")
        torch.default_generator.manual_seed(seed + number)
        with torch.no_grad():
            (table.init or nn.init.normal_)(block)
            if table.padding_idx is not None and first <= table.padding_idx < first + len(block):
                block[table.padding_idx - first] = 0
            low, high = max(start, first), min(end, first + len(block))
            rows[low - start : high - start] = block[low - first : high - first, columns]
    torch.set_rng_state(after)
