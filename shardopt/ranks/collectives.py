"""Collectives through the process group's own backend, and the device that they work on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """An all-to-all under way; it keeps what was sent until it is done."""

    def __init__(self, got: Tensor, sent: Tensor, work: dist.Work | None) -> None:
        self._got = got
        self._sent: Tensor | None = sent
        self._work = work

    def wait(self) -> Tensor:
        """Waits for the vector that was received; on an accelerator only the current stream waits, not this process."""
        if self._work is not None:
            self._work.wait()
        self._sent = None
        return self._got


class Sum:
    """An all-reduce under way, in place; it keeps the numbers until it is done."""

    def __init__(self, numbers: Tensor, work: dist.Work | None) -> None:
        self._numbers = numbers
        self._work = work

    def wait(self) -> Tensor:
        """Waits for the sums; on an accelerator only the current stream waits, not this process."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._numbers


def begin_sum(group: dist.ProcessGroup | None, numbers: Tensor) -> Sum:
    """Begins `Ranks.all_reduce_sum`; without a group there is nothing to add."""
    if group is None or group.size() == 1:
        return Sum(numbers, None)
    return Sum(numbers, dist.all_reduce(numbers, group=group, async_op=True))


def begin_exchange(
    group: dist.ProcessGroup | None, sent: Tensor, sent_counts: Sequence[int], got_counts: Sequence[int]
) -> Exchange:
    """Begins `Ranks.all_to_all`; without a group, what is sent is received."""
    if group is None or group.size() == 1:
        return Exchange(sent, sent, None)
    got = sent.new_empty(sum(got_counts))
    # As bytes: gloo knows fewer dtypes than there are.
    got_bytes, sent_bytes = ([n * sent.element_size() for n in counts] for counts in (got_counts, sent_counts))
    outputs, inputs = got.view(torch.uint8), sent.view(torch.uint8)
    work = dist.all_to_all_single(outputs, inputs, got_bytes, sent_bytes, group=group, async_op=True)
    return Exchange(got, sent, work)


def accelerator_of(group: dist.ProcessGroup) -> str | None:
    """Returns the type of device that the group's backend for accelerators (NCCL, not gloo) works on, if it has one.

    Backends may have any name ("cpu:ucc,cuda:ucc"): it is the device that says whether it is one for accelerators.
    """
    for pair in dist.get_backend_config(group).split(","):
        kind, _, backend = pair.partition(":")
        if kind != "cpu" and backend not in ("gloo", "mpi", "fake"):
            return kind
    return None
