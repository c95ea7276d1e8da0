"""Routes ids to the ranks that hold their rows, and vectors and gradients back along the same way.

R ranks, T tables; table t has N_t rows of D_t elements, cut over the ranks as torch.chunk cuts.
A rank asks for U_t different rows of table t, and is asked for M_t of those that it holds (counted once for each rank
that asks). Everything travels sorted by rank, then by table, then by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardopt.nn.table import Table
from shardopt.ranks import Ranks

Counts = list[list[int]]
"""[R][T]: the number of rows of each table sent to, or received from, each rank."""


def boundaries(tables: Sequence[Table], ranks: int) -> Tensor:
    """Returns the first row of each rank, for all tables in turn: [T * R + 1], int64, on the CPU."""
    starts = [0, *accumulate(table.num_embeddings for table in tables)]
    cuts = [start + t.first_row(r, ranks) for start, t in zip(starts, tables, strict=False) for r in range(ranks)]
    return torch.tensor([*cuts, starts[-1]], dtype=torch.int64, device="cpu")


@dataclass(frozen=True, slots=True)
class Route:
    """The exchanges of rows of one lookup.

    Args:
        ranks: that look up together.
        sent: how many rows this rank asks each rank for.
        got: how many rows each rank asks this one for.
        in_use: for each table, whether any rank passed ids for it, maybe none at all.
        positions: for each table, where among its U_t rows each id's is: the shape of the ids, int64. That of a
            padding id is U_t. None where this rank passed no ids.
        rows: for each table, which of this rank's rows are asked for: [M_t], int64.
    """

    ranks: Ranks
    sent: Counts
    got: Counts
    in_use: tuple[bool, ...]
    positions: tuple[Tensor | None, ...]
    rows: tuple[Tensor, ...]

    def fetch(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Fetches the rows that this rank requested, [U_t, D_t], from tables of [n_t, D_t] on each rank. Collective."""
        rows_here = [table.index_select(0, rows) for table, rows in zip(tables, self.rows, strict=True)]
        return _travel(self.ranks, rows_here, self.got, self.sent)

    def return_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Sends back gradients of fetched rows, [U_t, D_t]; returns those of this rank's rows, [M_t, D_t].
        Collective.
        """
        return _travel(self.ranks, gradients, self.sent, self.got)


def find_route(
    ranks: Ranks,
    tables: Sequence[Table],
    starts: Tensor,
    ids: Mapping[int, Tensor],
    faulty: Tensor,
) -> Route | None:
    """Finds the rows that every rank is asked for. Collective: two exchanges, of counts and of ids.

    The counts have to be known here to the program, not only to the device: it waits for them, once. Each row is asked
    for once, however often its id comes.

    Args:
        ranks: that look up together.
        tables: T of them, the same on every rank.
        starts: `boundaries`, on the device of the ids.
        ids: index of a table → its ids, of any shape, int64. Tables may be absent.
        faulty: whether something about this rank's ids is wrong; a bool without dimensions, on their device.

    Returns:
        None on every rank where some rank is faulty.
    """
    keys, inverse = _distinct(tables, ids, starts)
    asked = torch.searchsorted(keys, starts).diff().view(len(tables), ranks.size).T
    for number in set(range(len(tables))) - ids.keys():
        asked[:, number] = -1
    outgoing = torch.cat([faulty.expand(ranks.size, 1), asked], dim=1).flatten()
    each = [1 + len(tables)] * ranks.size
    incoming = ranks.all_to_all(outgoing, each, each).wait()
    outgoing_counts, incoming_counts = torch.stack([outgoing, incoming]).view(2, ranks.size, -1).tolist()
    if any(fault for fault, *_ in incoming_counts):
        return None
    sent, got = (
        [[max(count, 0) for count in counts] for _, *counts in all_] for all_ in (outgoing_counts, incoming_counts)
    )

    totals = [sum(counts) for counts in zip(*sent, strict=True)]
    begins = [0, *accumulate(totals)]
    bases = [0, *accumulate(table.num_embeddings for table in tables)]
    wanted = [keys[begin:end].unsqueeze(1) for begin, end in pairwise(begins)]
    firsts = [base + t.first_row(ranks.rank, ranks.size) for base, t in zip(bases, tables, strict=False)]
    rows = [
        keys_here.squeeze(1) - first for keys_here, first in zip(_travel(ranks, wanted, sent, got), firsts, strict=True)
    ]
    positions = {
        number: (places - begins[number]).clamp(max=totals[number]).view(ids[number].shape)
        for number, places in zip(ids, inverse, strict=True)
    }
    return Route(
        ranks,
        sent,
        got,
        tuple(any(counts[1 + number] >= 0 for counts in incoming_counts) for number in range(len(tables))),
        tuple(positions.get(number) for number in range(len(tables))),
        tuple(rows),
    )


def _distinct(tables: Sequence[Table], ids: Mapping[int, Tensor], starts: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns the distinct keys, ascending, and for each of `ids` the position of its key among them.

    A key is a row's place in all tables one after the other. That of padding is past the end, so that nobody is asked.
    """
    bases = [0, *accumulate(table.num_embeddings for table in tables)]
    keys = [starts.new_empty(0)]
    for number, table_ids in ids.items():
        key = table_ids.flatten() + bases[number]
        padding = tables[number].padding_idx
        keys.append(key if padding is None else key.masked_fill(table_ids.flatten() == padding, bases[-1]))
    distinct, inverse = torch.unique(torch.cat(keys), return_inverse=True)
    return distinct, torch.split(inverse, [len(each) for each in keys])[1:]


def _travel(ranks: Ranks, rows_of_tables: Sequence[Tensor], sent: Counts, got: Counts) -> list[Tensor]:
    """Sends rows of tables to the ranks, and returns the rows received. One exchange for all dtypes.

    Args:
        ranks: to exchange with.
        rows_of_tables: for each table the rows to send, [sum of its counts in `sent`, W_t], those for rank 0 first.
        sent, got: how many rows go to and come from each rank.
    """
    # Types travel as the narrowest that holds them all, so that nothing is rounded on the way.
    dtype = reduce(torch.promote_types, [rows.dtype for rows in rows_of_tables])
    widths = [rows.shape[1] for rows in rows_of_tables]
    cut = [torch.split(rows.to(dtype), [counts[t] for counts in sent]) for t, rows in enumerate(rows_of_tables)]
    buffer = torch.cat([cut[t][rank].reshape(-1) for rank in range(ranks.size) for t in range(len(rows_of_tables))])
    sizes = [[[n * width for n, width in zip(row, widths, strict=True)] for row in counts] for counts in (sent, got)]
    sent_counts, got_counts = ([sum(row) for row in counts] for counts in sizes)
    arrived = ranks.all_to_all(buffer, sent_counts, got_counts).wait()
    pieces = torch.split(arrived, [size for row in sizes[1] for size in row])
    return [
        torch.cat(pieces[t :: len(rows_of_tables)]).view(-1, width).to(rows.dtype)
        for t, (rows, width) in enumerate(zip(rows_of_tables, widths, strict=True))
    ]
