"""Collectives over the process group's own backend, and the device that they work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.errors import Problem, RankError
from shardopt.ranks.failures import names_of
from shardopt.runtime.accelerator import on_stream, side_stream

_BYTES_IN_ORDER = 64 << 20  # that are added up at a time


class Exchange:
    """A running collective; keeps the sent memory alive until it is done."""

    def __init__(self, got: Tensor, sent: Tensor, work: dist.Work | _OnStream | None) -> None:
        self._got = got
        self._sent: Tensor | None = sent
        self._work = work

    def wait(self) -> Tensor:
        """Waits for the numbers; on an accelerator only the current stream waits, not the process."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._sent = None
        return self._got


class _OnStream:
    """Work that has been queued on a stream of its own until now."""

    def __init__(self, stream: Any) -> None:
        self._device = stream.device
        self._event = stream.record_event()

    def wait(self) -> None:
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)


class Collectives:
    """The collectives of a process group's ranks, or of this process alone."""

    size: int
    members: tuple[int, ...]
    _group: Callable[[], dist.ProcessGroup | None] | None
    _accelerator: str | None

    @property
    def has_group(self) -> bool:
        """Whether there is a process group; one process without torch.distributed has none."""
        return self._group is not None

    @property
    def is_gone(self) -> bool:
        """Whether the process group was destroyed."""
        return self._group is not None and self._group() is None

    @property
    def device(self) -> torch.device:
        """The device for `all_reduce_sum`: the accelerator in use, if the group communicates there.

        That is the one to which the group is bound; of a group without one, the current one.
        """
        if self._accelerator is None:
            return torch.device("cpu")
        module = torch.get_device_module(self._accelerator)
        return self._bound_device or torch.device(self._accelerator, module.current_device())

    @property
    def _bound_device(self) -> torch.device | None:
        bound: torch.device | None = None if self._group is None else getattr(self._group(), "bound_device_id", None)
        return bound if bound is not None and bound.type == self._accelerator else None

    def device_beside(self, device: torch.device) -> torch.device:
        """Returns the device to which numbers computed on `device` must go, so that all ranks have them on one type.

        It is the same one without other ranks, and where a group that is bound to none communicates there: the current
        one may be another where nobody has set it.
        """
        is_here = device.type == self._accelerator and self._bound_device is None
        return device if self.size == 1 or is_here else self.device

    def device_for(self, device: torch.device) -> torch.device:
        """Returns the device to which memory on `device`, of the same type on all ranks, must go: most often that.

        NCCL alone has none of the host's.
        """
        group = self._process_group()
        if group is None or self.size == 1:
            return device
        kinds = (pair.partition(":")[0] for pair in dist.get_backend_config(group).split(","))
        return device if device.type in kinds else self.device_beside(device)

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Sums each number over the ranks, in place; every rank gets the same bits. Collective: one all-reduce.

        Args:
            numbers: on `device`, or `device_beside` another, of the same shape and dtype on every rank.
        """
        group = self._process_group()
        if group is not None and self.size > 1:
            dist.all_reduce(numbers, group=group)
        return numbers

    def begin_all_reduce_sum(self, numbers: Tensor, *, in_order: bool = True) -> Exchange:
        """Begins to sum each number over the ranks, in place; every rank gets the same bits. Collective.

        It is only begun here: the numbers are not to be touched before `wait` of what this returns.

        Args:
            numbers: contiguous, on a device that the group communicates on, of one shape and dtype on every rank.
            in_order: whether other groups that sum the same numbers get these bits too: an accelerator's backend, which
                promises no order, then only moves numbers. Takes up to 64 MiB of memory; the same on every rank.
        """
        group = self._process_group()
        if group is None or group.size() == 1:
            return Exchange(numbers, numbers, None)
        if not in_order or group.size() == 2 or numbers.device.type != self._accelerator:
            return Exchange(numbers, numbers, dist.all_reduce(numbers, group=group, async_op=True))
        stream = side_stream(numbers.device)
        stream.wait_stream(torch.get_device_module(numbers.device).current_stream(numbers.device))
        with on_stream(stream):
            for part in torch.split(numbers.view(-1), _BYTES_IN_ORDER // numbers.element_size()):
                _add_in_order(part, group)
        numbers.record_stream(stream)
        return Exchange(numbers, numbers, _OnStream(stream))

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Gives every rank the first rank's numbers, in place. Collective: one broadcast.

        Args:
            numbers: contiguous, on a device that the group communicates on, of one shape and dtype on every rank.
        """
        group = self._process_group()
        if group is not None and group.size() > 1:
            dist.broadcast(numbers, group=group, group_src=0)
        return numbers

    def all_reduce_max(self, numbers: Tensor) -> Tensor:
        """Takes the largest of each number over the ranks, in place. Collective: one all-reduce.

        Args:
            numbers: on `device`, of the same shape and dtype on every rank; none may be NaN, which has no order.
        """
        group = self._process_group()
        if group is not None and self.size > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        return numbers

    def all_to_all(self, sent: Tensor, sent_counts: Sequence[int], got_counts: Sequence[int]) -> Exchange:
        """Sends a section of a vector to each of the ranks, and receives theirs. Collective: one all-to-all.

        It is only begun here: `wait` of what this returns gives the vector that was got.

        Args:
            sent: contiguous, on a device that the group communicates on; not to be changed before `wait`. The
                sections stand in it in the order of the ranks.
            sent_counts, got_counts: how many elements go to and come from each of them.
        """
        group = self._process_group()
        if group is None or group.size() == 1:
            return Exchange(sent, sent, None)
        got = sent.new_empty(sum(got_counts))
        # As bytes: gloo knows fewer dtypes than there are.
        got_bytes, sent_bytes = ([n * sent.element_size() for n in counts] for counts in (got_counts, sent_counts))
        outputs, inputs = got.view(torch.uint8), sent.view(torch.uint8)
        work = dist.all_to_all_single(outputs, inputs, got_bytes, sent_bytes, group=group, async_op=True)
        return Exchange(got, sent, work)

    def _process_group(self) -> dist.ProcessGroup | None:
        """Returns the process group; None for a single process.

        Raises:
            RankError: it was destroyed.
        """
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            problem = Problem(
                f"the process group of {names_of(self.members)}",
                "destroyed",
                "one that is in use",
                "make new optimizers, and all else that communicates, after destroy_process_group",
            )
            raise RankError("ranks cannot communicate", [problem], code="process-group")
        return group


def _add_in_order(numbers: Tensor, group: dist.ProcessGroup) -> None:
    """Adds up a vector over ranks, in place, in their order: each rank one part of it, which it sends to the others.

    Sends as much as an all-reduce. Takes as much memory as the vector.
    """
    counts = [len(part) for part in numbers.tensor_split(group.size())]
    own = [counts[group.rank()]] * group.size()
    parts = numbers.new_empty(len(own), own[0])
    dist.all_to_all_single(parts.view(-1), numbers, own, counts, group=group)
    total, *others = parts
    for part in others:
        total += part
    for part in others:
        part.copy_(total)
    dist.all_to_all_single(numbers, parts.view(-1), counts, own, group=group)


def accelerator_of(group: dist.ProcessGroup) -> str | None:
    """Returns the device type of the group's accelerator backend (NCCL, not gloo), if it has one.

    Backends may have any name ("cpu:ucc,cuda:ucc"): it is the device that says whether it is one for accelerators.
    """
    for pair in dist.get_backend_config(group).split(","):
        kind, _, backend = pair.partition(":")
        if kind != "cpu" and backend not in ("gloo", "mpi", "fake"):
            return kind
    return None
