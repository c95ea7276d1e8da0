"""What a rank wants of one lookup: of each table either different rows, or the sums of bags, made where the rows are.

Sums are wanted where they are fewer vectors to send (`Bags.are_summed_afar`). Each rank decides for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardopt.nn.bags import Bags
from shardopt.nn.directory import Directory
from shardopt.runtime.rows import different_ids, sort_ids


@dataclass(frozen=True, slots=True)
class Wanted:
    """The keys, as `Directory.parts_of` has them, that a rank sends; by table, and by part of its rows.

    Args:
        bags: for each table how many sums are wanted; 0 where rows are.
        weighted: whether weights are sent for the table's keys.
        counts: how many keys there are in each part of each table, [sum of R_t + T] int64.
        keys: of tables whose rows are wanted, and of those whose sums are, [n] int64 each; others stand at the end.
        lengths: for each part of tables whose sums are wanted, of how many keys each bag's is, [sum of R_t B_t] int64.
        weights: of the keys for sums, as the bits of fp64; None if no table has any.
        positions: for each table whose rows are wanted where its ids' are, among all of these tables' keys.
    """

    bags: list[int]
    weighted: list[bool]
    counts: Tensor
    keys: tuple[Tensor, Tensor]
    lengths: Tensor
    weights: Tensor | None
    positions: Mapping[int, Tensor]

    def blocks(self, parts: Sequence[Sequence[int]]) -> list[Sequence[Tensor]]:
        """Returns for each table, and each part of its rows, the keys that are sent. For sums lengths come before them,
        and weights after them, where there are any.

        Args:
            parts: how many keys are in each part of each table, R_t numbers.
        """
        begins, slot, found = [0, 0], 0, []
        for counts, bags, weighted in zip(parts, self.bags, self.weighted, strict=True):
            begin = begins[bags > 0]
            begins[bags > 0] = end = begin + sum(counts)
            blocks: Sequence[Tensor] = torch.split(self.keys[bags > 0][begin:end], [*counts])
            if bags:
                first, slot = slot, slot + bags * len(counts)
                joined = [torch.split(self.lengths[first:slot], bags), blocks]
                if weighted and self.weights is not None:
                    joined.append(torch.split(self.weights[begin:end], [*counts]))
                of_parts = zip(*joined, strict=True)
                blocks = [torch.cat(of_part) if len(of_part[1]) else of_part[1] for of_part in of_parts]
            found.append(blocks)
        return found


def find_wanted(directory: Directory, bags: Mapping[int, Bags], device: torch.device) -> Wanted:
    """Finds what a rank wants; what is faulty gives keys without meaning.

    Waits for its device once where rows are wanted, for how many different ones there are; for sums it does not.
    """
    tables = range(len(directory.tables))
    summed = {t: each for t, each in bags.items() if each.are_summed_afar(directory.row_parts[t])}
    rows, positions = _different(directory, {t: each for t, each in bags.items() if t not in summed}, device)
    keys, counts, lengths, weights = _summed(directory, summed, device)
    return Wanted(
        [summed[t].count if t in summed else 0 for t in tables],
        [t in summed and summed[t].weights is not None for t in tables],
        directory.counted(rows) + counts,
        (rows, keys),
        lengths,
        weights,
        positions,
    )


def _keys(directory: Directory, bags: Iterable[tuple[int, Bags]], device: torch.device) -> list[Tensor]:
    """Returns the keys of the ids of each table, after nothing. Those of padding are past the end: nobody has them."""
    keys = [torch.empty(0, dtype=torch.int64, device=device)]
    for t, each in bags:
        ids, padding = each.ids.flatten(), each.table.padding_idx
        key = ids + directory.bases[t]
        keys.append(key if padding is None else key.masked_fill(ids == padding, directory.bases[-1]))
    return keys


def _different(
    directory: Directory, bags: Mapping[int, Bags], device: torch.device
) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Returns the different keys, ascending, and for each table where those of its ids are."""
    keys = _keys(directory, bags.items(), device)
    if not bags:
        return keys[0], {}
    different, inverse = different_ids(torch.cat(keys))
    return different, dict(zip(bags, torch.split(inverse, [len(each) for each in keys])[1:], strict=True))


def _summed(
    directory: Directory, bags: Mapping[int, Bags], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns keys by part and bag, how many are in each part, and in each bag of each part, and their weights."""
    given = _keys(directory, bags.items(), device)
    keys, sizes = torch.cat(given), [len(each) for each in given[1:]]
    begins = [each.begins + first for each, first in zip(bags.values(), accumulate([0, *sizes]), strict=False)]
    # A slot is a bag in a part. In the order of the parts, each has the bags of its table.
    firsts, slots, past = _slots(directory, bags)
    slot_of = keys
    if begins:
        # How many bags begin up to each key: by counts, in an eighth of the time that a search takes.
        at = torch.cat(begins).clamp(0, len(keys))  # which is needed where offsets are faulty
        bag = _counted(at, len(keys) + 1)[:-1].cumsum(0) - 1
        shift = sent_to(device, [first - before for first, before in zip(firsts, past, strict=True)])
        slot_of = (shift.index_select(0, directory.parts_of(keys)) + bag).clamp(0, slots)  # padding is in the last
    order = None
    if any(directory.row_parts[t] > 1 or each.table.padding_idx is not None for t, each in bags.items()):
        slot_of, order = sort_ids(slot_of)
        keys = keys.index_select(0, order)
    lengths = _counted(slot_of, slots + 1)[:-1]
    edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    counts = edges.index_select(0, sent_to(device, [*firsts, slots])).diff()
    weights = None
    if any(each.weights is not None for each in bags.values()):
        bits = [
            ids.new_zeros(len(ids)) if each.weights is None else each.weights.detach().double().view(torch.int64)
            for ids, each in zip(given[1:], bags.values(), strict=True)
        ]
        weights = torch.cat(bits)
        weights = weights if order is None else weights.index_select(0, order)
    return keys, counts, lengths, weights


def sent_to(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Returns numbers on a device, int64, without waiting for it, as `torch.tensor` of them would."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _counted(numbers: Tensor, below: int) -> Tensor:
    """Returns how many numbers, [n] int64, have each value from 0 on and below a limit: [limit] int64."""
    return numbers.new_zeros(below).index_add_(0, numbers, torch.ones_like(numbers))


def _slots(directory: Directory, bags: Mapping[int, Bags]) -> tuple[list[int], int, list[int]]:
    """Returns for each part of each table its first slot, how many slots there are, and the bags of earlier tables."""
    firsts, past = [], []
    slots = before = 0
    for t, parts in enumerate(directory.row_parts):
        count = bags[t].count if t in bags else 0
        for _ in range(parts):
            firsts.append(slots)
            past.append(before)
            slots += count
        firsts.append(slots)  # of none; but keys of padding are behind all slots so
        past.append(0)
        before += count
    return firsts, slots, past
