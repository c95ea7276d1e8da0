"""Routes ids to the ranks that hold their rows, and vectors and gradients back along the same way.

G ranks, T tables; table t has N_t rows of D_t elements, cut into pieces as `cuts.py` says. A rank wants V_t vectors of
table t: U_t different rows, or the sums of B_t bags. It asks each rank that has a piece of the rows for its columns,
and answers what it is asked of its own pieces. Who holds a replica that the rank does not fetch from hears of the rows
too, as it is sent their gradients. Everything travels sorted by rank, then by table, then by part and row, or bag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import add

import torch
from torch import Tensor

from shardopt.nn.bags import Bags
from shardopt.nn.cuts import Pieces
from shardopt.nn.directory import Directory, Order
from shardopt.nn.served import Served, gradients_of_rows
from shardopt.nn.wanted import Wanted, find_wanted, sent_to
from shardopt.ranks import Ranks

Blocks = Sequence[Sequence[Tensor]]
"""For each table what travels of it, one block for each rank that takes part, ascending."""


@dataclass(frozen=True, slots=True)
class Route:
    """The exchanges of vectors of one lookup.

    Args:
        ranks: that look up together.
        directory: of the tables.
        device: of ids, and of what travels.
        bags: for each table, how many sums of bags this rank wants; 0 where it wants rows.
        parts: for each table, how many vectors it wants of each part of the rows.
        in_use: for each table, whether any rank passed ids for it, maybe none at all.
        positions: for each table, where among its U_t rows each id's is: the shape of the ids, int64. That of a
            padding id is U_t. None where this rank passed no ids, or wants sums.
        served: for each table what all ranks want of this rank's piece; None without a piece.
    """

    ranks: Ranks
    directory: Directory
    device: torch.device
    bags: Sequence[int]
    parts: list[list[int]]
    in_use: tuple[bool, ...]
    positions: tuple[Tensor | None, ...]
    served: tuple[Served | None, ...]

    def fetch(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Fetches the vectors that this rank wants, [V_t, D_t], from this rank's piece of each table. Collective."""
        known = self.directory
        sent = [
            [] if served is None else served.vectors(table, to)
            for table, served, to in zip(tables, self.served, known.served, strict=True)
        ]
        sizes = [
            [counts[piece.part[0]] * piece.shape[1] for piece in pieces]
            for counts, pieces in zip(self.parts, known.sources, strict=True)
        ]
        dtypes = [table.dtype for table in tables]
        got = _travel(self.ranks, known.serving, sent, known.fetched, sizes, dtypes, self.device)
        return [
            _put_together(blocks, counts, each.widths, bags).to(table.dtype)
            for blocks, counts, each, bags, table in zip(got, self.parts, known.tables, self.bags, tables, strict=True)
        ]

    def return_gradients(self, gradients: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """Sends back gradients of fetched vectors, [V_t, D_t]. Collective.

        Returns:
            For each table of which this rank has a piece, the rows that ranks asked for, each once, ascending, [M_t];
            and their gradients, [M_t, W_t].
        """
        known = self.directory
        sent = [
            _taken_apart(gradient, counts, each, bags)
            for gradient, counts, each, bags in zip(gradients, self.parts, known.tables, self.bags, strict=True)
        ]
        widths = [0 if piece is None else piece.shape[1] for piece in known.mine]
        sizes = [
            [] if served is None else [count * width for count in served.counts]
            for served, width in zip(self.served, widths, strict=True)
        ]
        dtypes = [gradient.dtype for gradient in gradients]
        got = _travel(self.ranks, known.asked, sent, known.asking, sizes, dtypes, self.device)
        served = {t: each for t, each in enumerate(self.served) if each is not None}
        return gradients_of_rows(
            served, lambda t: torch.cat(got[t]).view(sum(served[t].counts), widths[t]).to(gradients[t].dtype)
        )


def find_route(ranks: Ranks, directory: Directory, bags: Mapping[int, Bags], faulty: Tensor) -> Route | None:
    """Finds what every rank is asked for. Collective: two exchanges, of counts and of ids.

    The counts have to be known here to the program, not only to the device: it waits for them, once; and for how many
    different rows it wants.

    Args:
        ranks: that look up together.
        directory: of the tables.
        bags: index of a table → its ids, ascending. Tables may be absent.
        faulty: whether something about this rank's ids is wrong; a bool without dimensions, on their device.

    Returns:
        None on every rank where some rank is faulty, or ranks have different tables.
    """
    tables = range(len(directory.tables))
    wanted = find_wanted(directory, bags, faulty.device)
    asked = directory.by_rank(wanted.counts)
    for t in set(tables) - bags.keys():
        asked[:, t] = -1
    kinds = sent_to(faulty.device, [*wanted.bags, *wanted.weighted]).expand(ranks.size, -1)
    each = [1 + 3 * len(tables)] * ranks.size
    outgoing = torch.cat([directory.marked(faulty).expand(ranks.size, 1), asked, kinds], dim=1).flatten()
    incoming = ranks.all_to_all(outgoing, each, each).wait()
    on_host = torch.cat([incoming.view(ranks.size, -1).T.flatten(), wanted.counts]).tolist()
    marks, *numbers = (on_host[at * ranks.size : (at + 1) * ranks.size] for at in range(each[0]))
    if not directory.are_ready(marks):
        return None
    counts, bags_of, weighted = (numbers[at : at + len(tables)] for at in range(0, 3 * len(tables), len(tables)))
    parts = directory.by_part(on_host[ranks.size * each[0] :])
    asked_of = [[*zip(*of, strict=True)] for of in zip(counts, bags_of, weighted, strict=True)]
    served = _ask(ranks, directory, wanted, parts, asked_of)
    begin, positions = 0, dict(wanted.positions)
    for t in positions:
        end = begin + sum(parts[t])
        positions[t] = (positions[t] - begin).clamp(max=end - begin).view(bags[t].ids.shape)
        begin = end
    return Route(
        ranks,
        directory,
        faulty.device,
        wanted.bags,
        [[n if n and count else count for count in of] for of, n in zip(parts, wanted.bags, strict=True)],
        tuple(any(count >= 0 for count in of_ranks) for of_ranks in counts),
        tuple(positions.get(t) for t in tables),
        served,
    )


def _ask(
    ranks: Ranks,
    directory: Directory,
    wanted: Wanted,
    parts: Sequence[Sequence[int]],
    asked: Sequence[Sequence[tuple[int, int, int]]],
) -> tuple[Served | None, ...]:
    """Sends the ids that this rank wants, and returns what all want of its pieces. Collective.

    Args:
        parts: how many ids this rank sends for each part of the rows of each table.
        asked: for each table, of each rank: how many ids it has of this rank's piece; of how many bags, or 0; whether
            they have weights.
    """
    sent = [
        [blocks[piece.part[0]] for piece in holders]
        for blocks, holders in zip(wanted.blocks(parts), directory.holders, strict=True)
    ]
    sizes = [[n + count * (1 + has) if count > 0 else 0 for count, n, has in of_ranks] for of_ranks in asked]
    dtypes = [torch.int64] * len(sent)
    got = _travel(ranks, directory.asked, sent, directory.asking, sizes, dtypes, wanted.counts.device)
    return tuple(
        None if piece is None else _served(blocks, of_ranks, first + piece.rows[0])
        for blocks, of_ranks, first, piece in zip(got, asked, directory.bases, directory.mine, strict=False)
    )


def _served(blocks: Sequence[Tensor], asked: Sequence[tuple[int, int, int]], first: int) -> Served:
    """Returns what all ranks want of a piece, from the block of each and what it asks for.

    Args:
        first: key of the piece's rows.
    """
    keys: list[Tensor] = []
    lengths: list[Tensor | None] = []
    weights: list[Tensor | None] = []
    for block, (count, n, has) in zip(blocks, asked, strict=True):
        of_bags, of_rank, bits = torch.split(block, [n, count, count * has]) if n and count > 0 else (None, block, None)
        keys.append(of_rank)
        # Copies: backward needs them, and views would keep all that arrived.
        lengths.append(None if of_bags is None else of_bags.clone())
        weights.append(bits.view(torch.float64).clone() if bits is not None and has else None)
    return Served(torch.split(torch.cat(keys) - first, [len(each) for each in keys]), lengths, weights)


def _taken_apart(vectors: Tensor, counts: Sequence[int], pieces: Pieces, bags: int) -> Sequence[Tensor]:
    """Cuts vectors of a table, [V, D], into a block for each of its pieces; each part of the rows gets that of a bag.

    Args:
        counts: how many vectors are of each part of the rows.
    """
    blocks = [
        [columns[:count] for count in counts] if bags else torch.split(columns, [*counts])
        for columns in torch.split(vectors, [*pieces.widths], dim=1)
    ]
    return [blocks[piece.part[1]][piece.part[0]] for piece in pieces.on if piece is not None]


def _put_together(blocks: list[Tensor], counts: Sequence[int], widths: Sequence[int], bags: int) -> Tensor:
    """Puts vectors of a table, [V, D], together from blocks of so many vectors and columns, all columns of a part in
    turn: one after the other, or the sums of bags.
    """
    if len(widths) == 1 and not bags:
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).view(sum(counts), widths[0])
    # `cat` copies also one block: autograd lets nobody change in place what it has as a view of a buffer.
    parts = [blocks[at : at + len(widths)] for at in range(0, len(blocks), len(widths))]
    rows = [
        torch.cat([block.view(count, width) for block, width in zip(part, widths, strict=True)], dim=1)
        for part, count in zip(parts, counts, strict=True)
        if count
    ]
    if not rows:
        return blocks[0].new_zeros(bags, sum(widths))
    return reduce(add, rows) if bags else torch.cat(rows)


def _travel(
    ranks: Ranks,
    to: Order,
    sent: Blocks,
    come_from: Order,
    sizes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[list[Tensor]]:
    """Sends blocks of rows to the ranks, and returns those received, flat. One exchange for all dtypes.

    Args:
        ranks: to exchange with.
        to, sent: who gets blocks of which tables, and the blocks.
        come_from, sizes: who sends blocks of which tables, and how many elements each has.
        dtypes: of the rows of each table.
        device: of all of them.
    """
    # Types travel as the narrowest that holds them all, to which `cat` converts: nothing is rounded on the way.
    buffers = [torch.empty(0, dtype=reduce(torch.promote_types, dtypes), device=device)]
    sent_counts, got_counts, flat_sizes = [], [], []
    next_blocks, next_sizes = [iter(blocks) for blocks in sent], [iter(each) for each in sizes]
    for tables in to:
        blocks = [next(next_blocks[t]) for t in tables]
        sent_counts.append(sum(block.numel() for block in blocks))
        buffers += [block.reshape(-1) for block in blocks]
    for tables in come_from:
        own = [next(next_sizes[t]) for t in tables]
        got_counts.append(sum(own))
        flat_sizes += own
    arrived = ranks.all_to_all(torch.cat(buffers), sent_counts, got_counts).wait()
    got: list[list[Tensor]] = [[] for _ in dtypes]
    for t, block in zip(chain.from_iterable(come_from), torch.split(arrived, flat_sizes), strict=True):
        got[t].append(block)
    return got
