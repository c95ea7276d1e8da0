"""Host memory for copies of a rank's state: allocated and populated once, and not inherited by forked children.

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
from functools import cached_property

import torch
from torch import Tensor

from shardopt.errors import CheckpointError
from shardopt.runtime.accelerator import await_copies, copies_from_pinned, pin, unpin

LARGE_BYTES = 16 * mmap.PAGESIZE  # from here on a tensor is worth having the place within a page that it has in a file
ALIGNMENT_BYTES = 64  # of tensors, so that each may be viewed in its dtype
_MOST_SPARE_BYTES = 64 << 20  # that are kept beside what is used, and as much as that
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_DONT_NEED = 4
_madvise = getattr(ctypes.CDLL(None), "madvise", None)  # mmap.madvise of Python holds the interpreter's lock
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Wanted = tuple[torch.dtype, torch.Size, torch.device]
"""The dtype, shape and device of a tensor to be copied to the host."""


class HostMemory:
    """Host memory for the tensors of one save at a time: allocated at the first save, reused by the next ones.

    It is one block for what comes from the CPU, and a pinned one for what comes from accelerators; both grow if a later
    state is larger, and are given back if it is much smaller. They are separate, since pinned memory is scarce and of
    no use where the CPU copies.
    """

    def __init__(self) -> None:
        self._plain, self._pinned = Block(0), Block(0)
        self._wanted: list[Wanted] = []
        self._offsets: list[int | None] | None = None
        self._tensors: list[Tensor] = []
        _memories.add(self)

    def tensors_like(self, tensors: Sequence[Tensor], offsets: Sequence[int | None] = ()) -> list[Tensor]:
        """Returns an uninitialized contiguous host tensor for each of `tensors`; the same ones for the same arguments.

        Args:
            offsets: where the bytes of each go in a file, if that is known and they are many. They get the same place
                within a page here, so that the disk can take them without a copy. Empty: of none.
        """
        wanted = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
        return self.tensors_of(wanted, [*offsets] or [None] * len(wanted))

    def tensors_of(self, wanted: list[Wanted], offsets: list[int | None] | None = None) -> list[Tensor]:
        """Returns such tensors for given dtypes, shapes and source devices.

        With `offsets`, even unknown ones, blocks have room for places that are known only next time.
        """
        if wanted != self._wanted or offsets != self._offsets:
            places: list[tuple[bool, int, int]] = []
            totals, spare = {False: 0, True: 0}, {False: 0, True: 0}
            devices: dict[bool, torch.device] = {}
            for (dtype, shape, device), offset in zip(wanted, offsets or [None] * len(wanted), strict=True):
                nbytes, pinned = shape.numel() * dtype.itemsize, copies_from_pinned(device)
                begin = -(-totals[pinned] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                if offset is not None and offset % dtype.itemsize == 0:  # else it was of another dtype
                    begin += (offset - begin) % mmap.PAGESIZE
                elif offsets is not None and nbytes >= LARGE_BYTES:
                    spare[pinned] += mmap.PAGESIZE
                places.append((pinned, begin, begin + nbytes))
                totals[pinned] = begin + nbytes
                devices.setdefault(pinned, device)
            self._wanted, self._tensors = [], []
            self._plain = self._plain.at_least(totals[False] + spare[False])
            self._pinned = self._pinned.at_least(totals[True] + spare[True], devices.get(True))
            self._tensors = [
                (self._pinned if pinned else self._plain).memory[begin:end].view(dtype).view(shape)
                for (dtype, shape, _), (pinned, begin, end) in zip(wanted, places, strict=True)
            ]
            self._wanted, self._offsets = wanted, offsets
        return self._tensors

    @cached_property
    def later(self) -> HostMemory:
        """Memory for what is copied later, apart from this one: so that a call need not pin what a thread copies."""
        return HostMemory()

    def populate(self) -> None:
        """Populates and pins all pages that are not so yet; other threads keep running.

        To be called before what comes from accelerators is copied.
        """
        self._plain.populate()
        self._pinned.populate()

    def free(self) -> None:
        """Frees the memory once its last tensor is gone: a save may still write from it, as after an interrupt."""
        self._wanted, self._tensors = [], []
        for block in (self._plain, self._pinned):
            block.free()
        if "later" in vars(self):
            self.later.free()

    def give_back(self) -> None:
        """Frees the memory, which must no longer be in use. Its pages go at once, though an error may refer to it."""
        self._wanted, self._tensors = [], []
        for block in (self._plain, self._pinned):
            block.give_back()

    def forget_in_child(self) -> None:
        """Drops the memory in a forked child, which has not inherited it."""
        for block in (self._plain, self._pinned):
            block.forget_in_child()
        self.__init__()  # type: ignore[misc]  # as new


class Block:
    """A block of host memory whose pages are populated on first touch, or by `populate`.

    Args:
        pinned_for: a device in use for which `populate` pins it, where it can be.

    Raises:
        CheckpointError: it cannot be allocated.
    """

    def __init__(self, nbytes: int, pinned_for: torch.device | None = None) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._unpopulated = False
        self._unpin: weakref.finalize[[Tensor, torch.device], Block] | None = None
        if nbytes:
            try:
                mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise CheckpointError(
                    f"cannot allocate {nbytes} bytes of host memory: {error}", code="no-space"
                ) from error
            for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):  # advice that this system may not know
                with suppress(AttributeError, OSError):
                    mapped.madvise(getattr(mmap, advice))
            _mapped.add(mapped)
            self.memory = torch.frombuffer(mapped, dtype=torch.uint8)  # which holds on to it
            self._unpopulated = True
        self._pinned_for = pinned_for if nbytes else None

    def at_least(self, nbytes: int, pinned_for: torch.device | None = None) -> Block:
        """Returns this block if it is large enough, but not far too large; otherwise frees it and returns a new one."""
        if nbytes <= self.memory.numel() <= 2 * nbytes + _MOST_SPARE_BYTES:
            return self
        self.free()  # before the new one: never both
        return Block(nbytes, pinned_for)

    def populate(self) -> None:
        """Populates all pages, if the system can; otherwise the first touch populates each. Then pins them."""
        if self._unpopulated and _madvise is not None:
            self._unpopulated = False
            _madvise(self.memory.data_ptr(), self.memory.numel(), _POPULATE_WRITE)
        device, self._pinned_for = self._pinned_for, None
        if device is not None and pin(self.memory, device):
            self._unpin = weakref.finalize(self, _unpin, self.memory, device)
            self._unpin.atexit = False  # the driver may be gone by then, and the process frees all anyway

    def free(self) -> None:
        """Frees the memory once its last tensor is gone."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._pinned_for = None
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def give_back(self) -> None:
        """Frees the memory, and gives its pages back at once: whoever still has a tensor of it finds zeros."""
        memory = self.memory
        self.free()
        if memory.numel() and _madvise is not None:
            _madvise(memory.data_ptr(), memory.numel(), _DONT_NEED)

    def forget_in_child(self) -> None:
        """Drops the memory in a forked child, which has not inherited it."""
        if self._unpin is not None:
            self._unpin.detach()
            self._unpin = None


def _unpin(memory: Tensor, device: torch.device) -> None:
    """Unpins memory, to which a save that has failed may have left copies under way."""
    with suppress(RuntimeError):  # of a device that has failed, and so copies nothing more
        await_copies()
    unpin(memory, device)


_memories: weakref.WeakSet[HostMemory] = weakref.WeakSet()
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _forget_in_child() -> None:
    for mapped in tuple(_mapped):
        # Never unmapped here, not even at the end: by then something else may be at its address.
        ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(id(mapped)))
    for memory in tuple(_memories):
        memory.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
