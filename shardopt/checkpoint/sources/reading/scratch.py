"""Scratch for what is not read in place: whole rows, and small boxes, which are verified there and copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.tensor_bytes import dtype_name
from shardopt.errors import CheckpointError, Problem
from shardopt.runtime.torch_private import changeable
from shardopt.state.casts import lost_in_cast

ALIGNMENT_BYTES = 64
"""The alignment of memory from scratch, so that tensors of any dtype can lie over it."""


class ScratchCopy(NamedTuple):
    """A piece that lies in scratch: its entry, and the target of its elements, of the same shape."""

    entry: Entry
    target: Tensor
    source: Tensor


Use = Callable[[Entry, Tensor, Tensor], None]
"""Called with an entry, a target, and its elements in the same shape, read into scratch and verified."""


class Scratch(Protocol):
    """Buffers of `nbytes` for batches: as many as are under way at a time.

    Attributes:
        grows: whether a batch may take memory beside its buffer.
    """

    nbytes: int
    grows: bool

    def take(self) -> bytearray | memoryview:
        """Takes a buffer."""

    def use(self, memory: bytearray | memoryview, copies: Sequence[ScratchCopy]) -> None:
        """Uses what was read into a buffer, and gives it back."""


@dataclass(slots=True, eq=False)
class HostScratch:
    """Buffers that are used in the thread that has read: fresh memory costs more than to read into it.

    Args:
        nbytes: of a buffer.
        used_by: called for each piece.
        grows: as for `Scratch`.
    """

    nbytes: int
    used_by: Use
    grows: bool = True
    _spare: list[bytearray] = field(default_factory=list)

    def take(self) -> bytearray:
        try:
            return self._spare.pop()
        except IndexError:
            return bytearray(self.nbytes)

    def use(self, memory: bytearray | memoryview, copies: Sequence[ScratchCopy]) -> None:
        for copy in copies:
            self.used_by(*copy)
        assert isinstance(memory, bytearray)
        self._spare.append(memory)


def copy_into(entry: Entry, target: Tensor, source: Tensor) -> None:
    """Copies elements from scratch to their target; errors as `check_cast`."""
    check_cast(entry, target, source)
    with changeable([target]):
        target.copy_(source)


def check_cast(entry: Entry, target: Tensor, source: Tensor) -> None:
    """Refuses a number that a cast would change.

    Raises:
        CheckpointError: the target's dtype cannot hold one of the numbers. Others may have been copied by then.
    """
    lost = None if source.dtype == target.dtype else lost_in_cast(source, target.dtype)
    if lost is not None:
        problem = lost_problem(entry.key, lost, source.dtype, target.dtype)
        raise CheckpointError("a number cannot be cast, and the load is not whole", [problem], code="cast-overflow")


def lost_problem(key: str, lost: float, source: torch.dtype, target: torch.dtype) -> Problem:
    """Returns the problem of a number that a cast would change."""
    number = f"{lost} in {dtype_name(source)}"
    required = f"numbers that {dtype_name(target)} can hold, of at most {torch.finfo(target).max}"
    return Problem(key, number, required, "load it into a wider dtype")


def room_for(nbytes: int) -> int:
    """Returns how many bytes of scratch so many bytes take."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
