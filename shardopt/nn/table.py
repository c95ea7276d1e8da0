"""A named embedding table, and the sharded parameter that holds its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardopt.errors import LayoutError, Problem, StateError
from shardopt.sharding.view import local_tensors

Mode = Literal["sum", "mean", "none"]


@dataclass(frozen=True, slots=True)
class Grid:
    """A cut of a table into `rows` times `columns` pieces, one on each of as many ranks.

    Args:
        rows, columns: into how many parts each is cut, as torch.chunk cuts; at least 1.
        ranks: of the pieces, as positions in the mesh dimension over which tables are cut: those of the first part of
            rows first, each at most once. None is the first `rows * columns` of them.
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

    def rows_each(self, ranks: int) -> int:
        """Returns the rows per rank, as torch.chunk cuts; the last ranks may have fewer, or none."""
        return -(-self.num_embeddings // ranks)

    def first_row(self, rank: int, ranks: int) -> int:
        """Returns the first row of a rank; N for a rank without rows."""
        return min(rank * self.rows_each(ranks), self.num_embeddings)


class Rows(nn.Module):
    """The rows of one table.

    Args:
        table: their name, size and options.
        mesh: one dimension, over which they are cut.
        device: for this rank's rows.
    """

    weight: nn.Parameter

    def __init__(self, table: Table, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__()
        rank, ranks = mesh.get_local_rank(), mesh.size()
        self._table, self._start = table, table.first_row(rank, ranks)
        dtype = table.dtype or torch.get_default_dtype()
        height = table.first_row(rank + 1, ranks) - self._start
        here = torch.empty(height, table.embedding_dim, dtype=dtype, device=device)
        shape = torch.Size((table.num_embeddings, table.embedding_dim))
        stride = (table.embedding_dim, 1)
        whole = DTensor.from_local(here, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        self.weight = nn.Parameter(whole)
        self.draw()

    def draw(self) -> None:
        """Fills this rank's rows again, unless they are on the meta device."""
        (rows,) = local_tensors(self.weight)
        if not rows.is_meta:
            _draw(self._table, self._start, rows.detach())

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {self.weight.dtype}, sharded by rows"


def refuse_bad_tables(tables: Sequence[Table], mesh: DeviceMesh, taken: Collection[str]) -> None:
    """Checks the tables and the mesh of a module.

    Args:
        tables: that it is to hold.
        mesh: over which they are to be cut.
        taken: names that a table cannot have.

    Raises:
        StateError: there are no tables, or some are not as they have to be.
        LayoutError: the mesh has several dimensions, has its ranks in another order, or this rank is not in it.
    """
    problems = [problem for table in tables for problem in _wrong(table, tables, taken)]
    if not tables:
        problems = [Problem("tables", "none", "at least one", "pass the tables that the module is to hold")]
    if problems:
        raise StateError("tables cannot be made", problems, code="embedding-tables")
    members = mesh.mesh.flatten().tolist()
    if mesh.ndim != 1 or members != sorted(members) or mesh.get_coordinate() is None:
        actual = f"a mesh of shape {tuple(mesh.mesh.shape)} over ranks {members}"
        required = "one dimension, ascending ranks, this rank among them"
        remedy = 'pass one dimension of the mesh, mesh["dp"], on its ranks'
        raise LayoutError(
            "tables cannot be sharded over this mesh",
            [Problem("mesh", actual, required, remedy)],
            code="embedding-tables",
        )


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


def _draw(table: Table, start: int, rows: Tensor) -> None:
    """Fills rows [start, start + len(rows)) of a table with numbers that depend on neither ranks nor device.

    Each block of rows has a seed of its own, which follows from one draw of torch's default generator. So a rank needs
    memory for one block besides its rows, and ranks with equal generators get the rows of one table.
    """
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
            rows[low - start : high - start] = block[low - first : high - first]
    torch.set_rng_state(after)
