"""Sorts ids and writes rows of tables, as torch's own operations do, two to six times as fast on one core.

NumPy sorts numbers by the vector instructions of a processor, and copies a row as one piece of memory. It has only one
thread: with several, on other devices, and in what torch traces, torch's operations do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

_FEW_THREADS = 2
"""The largest number of torch's threads that NumPy's one was measured to be faster than."""

_FEW_IDS, _FEW_BYTES = 1 << 10, 1 << 17
"""Of so few, to get at their memory would take longer than is gained."""


def sort_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts ids, [n] int64; equal ones stay in their order. Waits for no device.

    Returns:
        The ids, ascending, and where each of them was: [n] int64 both.
    """
    bits = len(ids).bit_length()
    if len(ids) < _FEW_IDS or not _is_for_numpy(ids):
        return ids.sort(stable=True)
    numbers = ids.numpy()
    if max(int(numbers.max()), -int(numbers.min())) >> (63 - bits):
        return ids.sort(stable=True)
    # An id and its place in one number. These are all different, and in order so are ids and the places of equal ones.
    packed = numbers << bits
    packed |= np.arange(len(ids))
    packed.sort()
    return torch.from_numpy(packed >> bits), torch.from_numpy(packed & ((1 << bits) - 1))


def different_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the different ones among ids, [n] int64. Waits for a GPU, once.

    Returns:
        They, ascending, [m] int64; and for each id where it is among them, [n] int64.
    """
    if len(ids) < _FEW_IDS or not _is_for_numpy(ids):
        different, places = torch.unique(ids, return_inverse=True)
        return different, places
    ordered, order = (each.numpy() for each in sort_ids(ids))
    is_first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    found = np.empty_like(order)
    found[order] = is_first.cumsum() - 1
    return torch.from_numpy(ordered[is_first]), torch.from_numpy(found)


def runs_of_ids(ordered: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Finds the different ones among ids, [n] int64 and ascending, of each of several tensors on one device.

    Waits for a GPU once for all tensors together, as it has to know how many there are.

    Returns:
        For each tensor they, ascending, and how often each is in it: [m] int64 both.
    """
    if not ordered or ordered[0].is_cpu:
        return [torch.unique_consecutive(each, return_counts=True) for each in ordered]
    ids, starts = torch.cat([*ordered]), [0, *accumulate(map(len, ordered))]
    at = torch.tensor(starts, device="cpu").to(ids.device, non_blocking=True)
    is_first = torch.ones(len(ids) + 1, dtype=torch.bool, device=ids.device)  # the last one is the end of all runs
    torch.ne(ids[1:], ids[:-1], out=is_first[1:-1])
    runs = is_first.index_fill_(0, at, True).cumsum(0)
    counts = runs.index_select(0, at).diff().tolist()
    begins = torch.searchsorted(runs, torch.arange(1, sum(counts) + 2, device=ids.device))
    different, repeats = ids.index_select(0, begins[:-1]), begins.diff()
    return [*zip(torch.split(different, counts), torch.split(repeats, counts), strict=True)]


def write_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Writes rows of a table, in place.

    Args:
        table: [N, ...].
        index: [k] int64, each row at most once.
        rows: [k, ...], of the table's dtype.
    """
    if rows.nbytes < _FEW_BYTES or not all(map(_is_for_numpy, (table, index, rows))):
        table.index_copy_(0, index, rows)
        return
    row = np.dtype((np.void, rows[:1].nbytes))
    _memory(table).view(row)[index.numpy()] = _memory(rows).view(row)
    increment_version(table)  # as torch would, so that backward refuses what was saved of the table before


def _is_for_numpy(tensor: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and torch.get_num_threads() <= _FEW_THREADS
    )


def _memory(tensor: Tensor) -> Any:
    """Returns the bytes of a contiguous tensor, as an array of NumPy over its memory."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
