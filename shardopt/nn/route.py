"""The way of ids to the ranks that hold their rows, and of vectors and gradients along it.

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
"""[R][T]: rows of each table that go to, or come from, each rank."""


def boundaries(tables: Sequence[Table], ranks: int) -> Tensor:
    """Where the part of each rank begins, in the rows of all tables in turn: [T * R + 1], int64, on the CPU."""
    starts = [0, *accumulate(table.num_embeddings for table in tables)]
    cuts = [start + t.first_row(r, ranks) for start, t in zip(starts, tables, strict=False) for r in range(ranks)]
    return torch.tensor([*cuts, starts[-1]], dtype=torch.int64, device="cpu")


@dataclass(frozen=True, slots=True)
class Route:
    """How the rows of one lookup travel.

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
        """From the rows that each rank has, [n_t, D_t], those that this rank asked for, [U_t, D_t]. Collective."""
        found = [table.index_select(0, rows) for table, rows in zip(tables, self.rows, strict=True)]
        return _travel(self.ranks, found, self.got, self.sent)

    def return_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """From the gradients of what `fetch` gave, [U_t, D_t], those of the rows asked for, [M_t, D_t]. Collective."""
        return _travel(self.ranks, gradients, self.sent, self.got)


def find_route(
    ranks: Ranks,
    tables: Sequence[Table],
    starts: Tensor,
    ids: Mapping[int, Tensor],
    faulty: Tensor,
) -> Route | None:
    """Tells every rank which of its rows are wanted. Collective: two exchanges, of counts and of ids.

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
    told = torch.cat([faulty.expand(ranks.size, 1), asked], dim=1).flatten()
    each = [1 + len(tables)] * ranks.size
    heard = ranks.all_to_all(told, each, each).wait()
    told_here, heard_here = torch.stack([told, heard]).view(2, ranks.size, -1).tolist()
    if any(fault for fault, *_ in heard_here):
        return None
    sent, got = ([[max(count, 0) for count in counts] for _, *counts in all_] for all_ in (told_here, heard_here))

    totals = [sum(counts) for counts in zip(*sent, strict=True)]
    begins = [0, *accumulate(totals)]
    bases = [0, *accumulate(table.num_embeddings for table in tables)]
    wanted = [keys[begin:end].unsqueeze(1) for begin, end in pairwise(begins)]
    firsts = [base + t.first_row(ranks.rank, ranks.size) for base, t in zip(bases, tables, strict=False)]
    rows = [part.squeeze(1) - first for part, first in zip(_travel(ranks, wanted, sent, got), firsts, strict=True)]
    positions = {
        number: (found - begins[number]).clamp(max=totals[number]).view(ids[number].shape)
        for number, found in zip(ids, inverse, strict=True)
    }
    return Route(
        ranks,
        sent,
        got,
        tuple(any(counts[1 + number] >= 0 for counts in heard_here) for number in range(len(tables))),
        tuple(positions.get(number) for number in range(len(tables))),
        tuple(rows),
    )


def _distinct(tables: Sequence[Table], ids: Mapping[int, Tensor], starts: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Different keys, ascending, and where each id's is among them, for each of `ids`.

    A key is a row's place in all tables one after the other. That of padding is past the end, so that nobody is asked.
    """
    bases = [0, *accumulate(table.num_embeddings for table in tables)]
    keys = [starts.new_empty(0)]
    for number, its in ids.items():
        key = its.flatten() + bases[number]
        padding = tables[number].padding_idx
        keys.append(key if padding is None else key.masked_fill(its.flatten() == padding, bases[-1]))
    distinct, inverse = torch.unique(torch.cat(keys), return_inverse=True)
    return distinct, torch.split(inverse, [len(part) for part in keys])[1:]


def _travel(ranks: Ranks, parts: Sequence[Tensor], sent: Counts, got: Counts) -> list[Tensor]:
    """Sends rows of tables to the ranks, and gives those that come from them. One exchange, whatever the dtypes.

    Args:
        ranks: to exchange with.
        parts: for each table the rows to send, [sum of its counts in `sent`, W_t], those for the first rank first.
        sent, got: how many rows go to and come from each rank.
    """
    # Types travel as the narrowest that holds them all, so that nothing is rounded on the way.
    dtype = reduce(torch.promote_types, [part.dtype for part in parts])
    widths = [part.shape[1] for part in parts]
    cut = [torch.split(part.to(dtype), [counts[t] for counts in sent]) for t, part in enumerate(parts)]
    buffer = torch.cat([cut[t][rank].reshape(-1) for rank in range(ranks.size) for t in range(len(parts))])
    sizes = [[[n * width for n, width in zip(row, widths, strict=True)] for row in counts] for counts in (sent, got)]
    sent_counts, got_counts = ([sum(row) for row in counts] for counts in sizes)
    arrived = ranks.all_to_all(buffer, sent_counts, got_counts).wait()
    pieces = torch.split(arrived, [size for row in sizes[1] for size in row])
    return [
        torch.cat(pieces[t :: len(parts)]).view(-1, width).to(part.dtype)
        for t, (part, width) in enumerate(zip(parts, widths, strict=True))
    ]
