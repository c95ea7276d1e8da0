"""Host memory for copies of a rank's state: allocated once, populated at once, and not inherited by children.

The first touch of a page costs ten times as much as the copy into it, and more where other threads fault too; the first
save would wait for that. So the pages are large ones where the system has them, and are populated by one call, beside
which other threads run.

A child that is forked would have the pages too. Then the parent would copy each page that it writes to while the child
lives, and a GPU, which addresses pinned pages by their physical place, might write to one that the parent has no
longer. So children do not get them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import CheckpointError

_ALIGNMENT_BYTES = 64
_MOST_SPARE_BYTES = 64 << 20  # that are kept beside what is used, and as much as that
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_madvise = getattr(ctypes.CDLL(None), "madvise", None)  # mmap.madvise of Python holds the interpreter's lock
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostMemory:
    """Host memory for the tensors of one save at a time: allocated at the first, reused by those that follow.

    It is one block for what comes from the CPU, and a pinned one for what comes from GPUs; both grow if a later state
    is larger, and are given back if it is much smaller. They are separate, since pinned memory is scarce and of no use
    where the CPU copies.
    """

    def __init__(self) -> None:
        self._plain, self._pinned = Block(0), Block(0)
        self._shapes: list[tuple[torch.dtype, torch.Size, bool]] = []
        self._tensors: list[Tensor] = []
        self._streams: dict[torch.device, Any] = {}
        _memories.add(self)

    def tensors_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns an uninitialized contiguous host tensor for each of `tensors`; the same ones for the same shapes."""
        return self.tensors_of([(tensor.dtype, tensor.shape, tensor.is_cuda) for tensor in tensors])

    def tensors_of(self, wanted: list[tuple[torch.dtype, torch.Size, bool]]) -> list[Tensor]:
        """Returns such tensors for dtypes, shapes, and whether what is copied there comes from a GPU."""
        if wanted != self._shapes:
            places: list[tuple[int, int]] = []
            totals = {False: 0, True: 0}
            for dtype, shape, is_cuda in wanted:
                nbytes, begin = shape.numel() * dtype.itemsize, totals[is_cuda]
                places.append((begin, begin + nbytes))
                totals[is_cuda] += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._shapes, self._tensors = [], []
            self._plain = self._plain.at_least(totals[False], pinned=False)
            self._pinned = self._pinned.at_least(totals[True], pinned=True)
            self._tensors = [
                (self._pinned if is_cuda else self._plain).memory[begin:end].view(dtype).view(shape)
                for (dtype, shape, is_cuda), (begin, end) in zip(wanted, places, strict=True)
            ]
            self._shapes = wanted
        return self._tensors

    def populate(self) -> None:
        """Populates all pages, if they are not yet; other threads run meanwhile."""
        self._plain.populate()

    def stream(self, device: torch.device) -> Any:
        """Returns the stream on which an accelerator's tensors are copied."""
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]

    def free(self) -> None:
        """Frees the memory; nobody may still use it."""
        self._shapes, self._tensors = [], []
        for block in (self._plain, self._pinned):
            block.free()

    def forget_in_child(self) -> None:
        """Drops the memory in a forked child, which has not inherited it."""
        for block in (self._plain, self._pinned):
            block.forget_in_child()
        self.__init__()  # type: ignore[misc]  # as new


class Block:
    """A block of host memory, whose pages are populated when they are touched, or by `populate`.

    Raises:
        CheckpointError: it cannot be allocated, or not be pinned.
    """

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._unpopulated = False
        self._unpin: weakref.finalize[[Tensor], Block] | None = None
        if nbytes:
            try:
                mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise CheckpointError(f"cannot allocate {nbytes} bytes of host memory: {error}") from error
            for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):  # advice that this system may not know
                with suppress(AttributeError, OSError):
                    mapped.madvise(getattr(mmap, advice))
            _mapped.add(mapped)
            self.memory = torch.frombuffer(mapped, dtype=torch.uint8)  # which holds on to it
            self._unpopulated = True
        if pinned and nbytes:
            self.populate()
            # Not by torch's own allocator of pinned memory, which takes the next power of two.
            code = int(_cuda_runtime().cudaHostRegister(self.memory.data_ptr(), nbytes, _PORTABLE))
            if code != 0:
                raise CheckpointError(f"cannot pin {nbytes} bytes of host memory: CUDA error {code}")
            self._unpin = weakref.finalize(self, _unpin, self.memory)
            self._unpin.atexit = False  # the driver may be gone by then, and the process frees all anyway

    def at_least(self, nbytes: int, pinned: bool) -> Block:
        """Returns this block if it is large enough, and not far too large; otherwise frees it and returns a new one."""
        if nbytes <= self.memory.numel() <= 2 * nbytes + _MOST_SPARE_BYTES:
            return self
        self.free()  # before the new one: never both
        return Block(nbytes, pinned)

    def populate(self) -> None:
        """Populates all pages, where the system can; otherwise each is populated when it is touched."""
        if self._unpopulated and _madvise is not None:
            self._unpopulated = False
            _madvise(self.memory.data_ptr(), self.memory.numel(), _POPULATE_WRITE)

    def free(self) -> None:
        """Frees the memory, once its last tensor is gone."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def forget_in_child(self) -> None:
        """Drops the memory in a forked child, which has not inherited it."""
        if self._unpin is not None:
            self._unpin.detach()
            self._unpin = None


_memories: weakref.WeakSet[HostMemory] = weakref.WeakSet()
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _forget_in_child() -> None:
    for mapped in tuple(_mapped):
        # Never unmapped here, not even at the end: by then something else may be at its address.
        ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(id(mapped)))
    for memory in tuple(_memories):
        memory.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


def _unpin(block: Tensor) -> None:
    _cuda_runtime().cudaHostUnregister(block.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no hints for it
