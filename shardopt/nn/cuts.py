"""Where the pieces of tables are: which rank has which rows and columns, and in which replica.

G ranks look up together, by their positions in the mesh, counted along its last dimension first. A table is cut into
pieces, R parts of rows times C parts of columns, each part as torch.chunk cuts; and there are K replicas of it, each
whole on ranks of its own. Of one table a rank has one piece, or none. It fetches vectors from the replica that is
nearest, and sends gradients to all replicas, so that they stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardopt.nn.table import Grid, Table, draw
from shardopt.ranks import process_group_among
from shardopt.sharding.view import local_tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a table.

    Args:
        part: of the rows, 0 to R - 1, and of the columns, 0 to C - 1.
        rows, columns: first and last + 1.
        replica: that it is part of, 0 to K - 1.
    """

    part: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    replica: int

    @property
    def shape(self) -> tuple[int, int]:
        """Its rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of one table.

    Args:
        table: that is cut.
        row_starts: the first row of each part, and N: R + 1 numbers.
        widths: the number of columns of each part: C numbers.
        on: the piece of each of the G positions; None where there is none.
        nearest: the replica from which each position fetches.
    """

    table: Table
    row_starts: tuple[int, ...]
    widths: tuple[int, ...]
    on: tuple[Piece | None, ...]
    nearest: tuple[int, ...]

    def serves(self, owner: int, asker: int) -> bool:
        """Whether a position with a piece sends vectors to another."""
        piece = self.on[owner]
        return piece is not None and piece.replica == self.nearest[asker]


class CutTable(nn.Module):
    """This rank's piece of one table.

    Args:
        pieces: of the table.
        position: of this rank.
        mesh, placements: of the parameter.
        device: for this rank's piece.
    """

    weight: nn.Parameter

    def __init__(
        self, pieces: Pieces, position: int, mesh: DeviceMesh, placements: Sequence[Placement], device: torch.device
    ) -> None:
        super().__init__()
        self.pieces, self.piece = pieces, pieces.on[position]
        table = pieces.table
        size = 0 if self.piece is None else self.piece.shape  # torch gives 0 to ranks outside of a mesh
        here = torch.empty(size, dtype=table.dtype or torch.get_default_dtype(), device=device)
        shape, stride = torch.Size(_shape(table)), (table.embedding_dim, 1)
        whole = DTensor.from_local(here, mesh, placements, run_check=False, shape=shape, stride=stride)
        self.weight = nn.Parameter(whole)
        self.draw()

    def draw(self) -> None:
        """Fills this rank's piece again, unless it is on the meta device. Draws from the generator on all ranks."""
        (here,) = local_tensors(self.weight)
        if not here.is_meta:
            begin = (0, 0) if self.piece is None else (self.piece.rows[0], self.piece.columns[0])
            draw(self.pieces.table, begin, here.detach() if here.dim() == 2 else here.new_empty(0, 0))

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {self.weight.dtype}, cut={self.pieces.table.cut!r}"


def cut_tables(tables: Sequence[Table], mesh: DeviceMesh) -> list[tuple[Pieces, DeviceMesh, list[Placement]]]:
    """Returns the pieces of tables, and the mesh and placements of their parameters.

    Collective where a table is cut into a grid of several columns, the first time: its ranks get process groups.

    Args:
        tables: that `refuse_bad_tables` has let pass.
        mesh: of one dimension, over which tables are cut; or of two, over the first of which they are replicated.
    """
    groups, ranks = mesh.mesh.view(-1, mesh.shape[-1]).shape
    held = [0] * ranks  # bytes of tables that are whole on one rank
    made = []
    for table in tables:
        positions, parts = _positions(table, groups, ranks, held)
        on: list[Piece | None] = [None] * (groups * ranks)
        rows, columns = (_starts(size, count) for size, count in zip(_shape(table), parts, strict=True))
        for replica, (r, c) in product(range(len(positions)), product(*map(range, parts))):
            piece = Piece((r, c), (rows[r], rows[r + 1]), (columns[c], columns[c + 1]), replica)
            on[positions[replica][r * parts[1] + c]] = piece
        nearest = _nearest(on, len(positions), groups, ranks)
        widths = tuple(end - begin for begin, end in pairwise(columns))
        pieces = Pieces(table, rows, widths, tuple(on), nearest)
        made.append((pieces, *_placed(table, positions, parts, mesh)))
    return made


def _shape(table: Table) -> tuple[int, int]:
    return table.num_embeddings, table.embedding_dim


def _starts(size: int, count: int) -> tuple[int, ...]:
    """Returns where each of so many parts of a dimension begins, and its end; parts at the end may be empty."""
    return tuple(min(i * -(-size // count), size) for i in range(count + 1))


def _positions(table: Table, groups: int, ranks: int, held: list[int]) -> tuple[list[list[int]], tuple[int, int]]:
    """Returns the positions of each replica's pieces, and how many parts of rows and columns there are."""
    firsts = [group * ranks for group in range(groups)]
    if table.cut == "replicated":
        return [[first + rank] for first in firsts for rank in range(ranks)], (1, 1)
    if isinstance(table.cut, Grid):
        parts = table.cut.rows, table.cut.columns
        on = list(range(parts[0] * parts[1]) if table.cut.ranks is None else table.cut.ranks)
    elif table.cut == "whole":
        parts, on = (1, 1), [held.index(min(held))]
        dtype = table.dtype or torch.get_default_dtype()
        held[on[0]] += table.num_embeddings * table.embedding_dim * dtype.itemsize
    else:
        parts, on = ((ranks, 1) if table.cut == "rows" else (1, ranks)), list(range(ranks))
    return [[first + rank for rank in on] for first in firsts], parts


def _nearest(on: Sequence[Piece | None], replicas: int, groups: int, ranks: int) -> tuple[int, ...]:
    """Returns the replica of each position: its own, or that of its group."""
    if replicas == groups:
        return tuple(position // ranks for position in range(groups * ranks))
    return tuple(0 if piece is None else piece.replica for piece in on)


def _placed(
    table: Table, positions: list[list[int]], parts: tuple[int, int], mesh: DeviceMesh
) -> tuple[DeviceMesh, list[Placement]]:
    """Returns the mesh of a table's parameter, and its placements there."""
    if not isinstance(table.cut, Grid) and table.cut != "whole":
        last: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
        return mesh, [*[Replicate()] * (mesh.ndim - 1), last[table.cut]]
    kinds: tuple[Placement, ...] = Replicate(), Shard(0), Shard(1)
    sizes = len(positions), *parts
    kept = [dim for dim, size in enumerate(sizes) if size > 1] or [0]
    ranks = mesh.mesh.flatten()[torch.tensor(positions, device="cpu")].view([sizes[dim] for dim in kept])
    return _mesh_of(ranks, mesh), [kinds[dim] for dim in kept]


def _mesh_of(ranks: torch.Tensor, mesh: DeviceMesh) -> DeviceMesh:
    """Returns a mesh of some of the ranks of another. Collective over each of its dimensions, the first time."""
    if torch.equal(ranks, mesh.mesh):
        return mesh
    names = tuple(f"dim_{dim}" for dim in range(ranks.ndim))
    here = (ranks == dist.get_rank()).nonzero()
    if not len(here) or ranks.numel() == 1:  # without groups, of which torch makes none for those outside, either
        return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names, _init_backend=False)
    groups = []
    for dim in range(ranks.ndim):
        at = [slice(None) if other == dim else int(here[0, other]) for other in range(ranks.ndim)]
        group = process_group_among(tuple(ranks[tuple(at)].tolist()), mesh.get_all_groups())
        assert group is not None
        groups.append(group)
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=names)
