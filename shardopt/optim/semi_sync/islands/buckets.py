"""Flat buffers for the values of several tensors, which islands add up or compare.

buckets = Buckets(tensors)          # a view of a buffer for each, to be filled
buckets.begin_mean(ranks)           # one sum for each buffer, in the background
buckets.end_mean()                  # the views have the means
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from shardopt.ranks import Exchange, Ranks

BUCKET_BYTES = 64 << 20


class Buckets:
    """Views for several tensors, with their shapes, dtypes and devices, in few contiguous buffers.

    A buffer has tensors of one dtype, device and replicas in their order, at most `bucket_bytes` of them or one that is
    larger. Ranks whose tensors have equal shapes, dtypes and replicas, in one order, have equal buffers.

    Args:
        like: floating-point tensors, in an order that all ranks share; not changed.
        replicas: of each tensor, the ranks of this island that have it; None if unknown, as by default.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        replicas: Sequence[tuple[int, ...] | None] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        replicas = replicas or [None] * len(like)
        self.flats: list[Tensor] = []
        self.views: list[Tensor] = [*like]
        self._places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(like)  # buffer, begin and end of each view
        self._in_order: list[bool] = []  # of each buffer: whether others of the island add up the same
        self._sums: list[tuple[Tensor, Exchange]] = []  # each of a buffer, or of what it is elsewhere
        self._ranks = 1
        for run in _runs(like, replicas, bucket_bytes):
            first = like[run[0]]
            flat = torch.empty(sum(like[i].numel() for i in run), dtype=first.dtype, device=first.device)
            begin = 0
            for i in run:
                end = begin + like[i].numel()
                self.views[i], self._places[i] = flat[begin:end].view(like[i].shape), (len(self.flats), begin, end)
                begin = end
            self.flats.append(flat)
            holders = replicas[run[0]]
            self._in_order.append(holders is None or len(holders) > 1)

    def begin_mean(self, ranks: Ranks) -> None:
        """Begins to average the values of the views over ranks, in place. Collective.

        The views are not to be touched before `end_mean`.
        """
        flats = [(flat, in_order) for flat, in_order in zip(self.flats, self._in_order, strict=True) if flat.numel()]
        there = [(flat, flat.to(ranks.device_for(flat.device)), in_order) for flat, in_order in flats]
        self._sums = [(flat, ranks.begin_all_reduce_sum(each, in_order=in_order)) for flat, each, in_order in there]
        self._ranks = ranks.size

    def wait(self) -> None:
        """Waits for what the means are made of. On an accelerator only the current stream waits."""
        for _, each in self._sums:
            each.wait()

    def end_mean(self) -> None:
        """Waits, and makes the means; every rank gets the same bits."""
        self.wait()
        while self._sums:
            flat, exchange = self._sums[0]
            total = exchange.wait()
            if total is not flat:
                flat.copy_(total)
            flat.div_(self._ranks)
            del self._sums[0]  # one by one, so that it can be called again after an error

    def unlike_first(self, ranks: Ranks) -> list[bool]:
        """Finds views that differ from the first rank's in any bit, and overwrites them with its values. Collective.

        Waits for the device.
        """
        own = [flat.clone() for flat in self.flats]
        for flat in self.flats:
            if flat.numel():
                flat.copy_(ranks.broadcast(flat.to(ranks.device_for(flat.device))))
        unlike = [
            (own[k][begin:end].view(torch.uint8) != self.flats[k][begin:end].view(torch.uint8)).any()
            for k, begin, end in self._places
        ]
        return [bool(each) for each in unlike]


def _runs(like: Sequence[Tensor], replicas: Sequence[tuple[int, ...] | None], bucket_bytes: int) -> list[list[int]]:
    """Returns the tensors of each buffer, by index."""
    runs: list[list[int]] = []
    open_runs: dict[Hashable, tuple[list[int], int]] = {}
    for i, tensor in enumerate(like):
        key, size = (tensor.dtype, tensor.device, replicas[i]), tensor.numel() * tensor.element_size()
        run, full = open_runs.get(key, ([], 0))
        if not run or full + size > bucket_bytes:
            run, full = [], 0
            runs.append(run)
        run.append(i)
        open_runs[key] = run, full + size
    return runs
