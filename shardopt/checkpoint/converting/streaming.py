"""Streams tensors of a source through a bounded window of memory, reading one window ahead of the writer.

windows   one after the other of at most 8 MiB: as many pieces of tensors as go in, read with one call
memory    a window that is read, one that is being taken, what storage holds back, and scratch of the reading
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.converting.choosing import ChosenTensor
from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.tensor_bytes import dtype_name, tensor_over
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.errors import CheckpointError, Problem
from shardopt.sharding.box import Box, cut_in_order, whole
from shardopt.sharding.pieces import Piece
from shardopt.state.casts import lost_in_cast
from shardopt.world import Future, world

WINDOW_BYTES = 8 << 20
_ALIGNMENT_BYTES = 64
_MOST_PIECES = 4096  # of a window
_CAST_AT_ONCE = 128 * 1024  # elements


class Part(NamedTuple):
    """A box of a tensor whose bytes are written to a file in C order.

    Args:
        key: under which it is written.
        stored: its key in the source.
        dtype: in which it is written; it is cast where another is stored.
    """

    key: str
    stored: str
    dtype: Dtype
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


class _PiecePlace(NamedTuple):
    number: int  # of the part
    box: Box
    begin: int  # in the window


def read_parts(reader: CheckpointReader, parts: Sequence[Part]) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of parts one after the other, in C order, as (number of the part, chunk).

    Chunks stay as they are; but who keeps many keeps their windows. Not to be used beside other reads of this reader.

    Raises:
        CorruptionError: stored bytes are not what was written.
        CheckpointError: a number cannot be cast.
    """
    ahead: deque[Future[list[tuple[int, memoryview]]]] = deque()
    free = list[mmap.mmap]()
    with world().thread_pool(1, "shardopt-convert") as pool:
        for window in _windows(reader, parts):
            ahead.append(pool.submit(_read_window, reader, parts, window, free))
            if len(ahead) > 1:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()


def _windows(reader: CheckpointReader, parts: Sequence[Part]) -> Iterator[list[_PiecePlace]]:
    window: list[_PiecePlace] = []
    used = 0
    for number, part in enumerate(parts):
        itemsize = max(part.dtype.itemsize, reader.manifest.tensors[part.stored].dtype.itemsize)
        for box in cut_in_order(part.box, WINDOW_BYTES // itemsize):
            nbytes = box.numel * itemsize
            if window and (used + nbytes > WINDOW_BYTES or len(window) >= _MOST_PIECES):
                yield window
                window, used = [], 0
            window.append(_PiecePlace(number, box, used))
            used += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if window:
        yield window


_Block = ctypes.Array[ctypes.c_ubyte]
_BLOCK_TYPE: Any = type("Block", (ctypes.c_ubyte * WINDOW_BYTES,), {})
"""Memory of a window; a class of its own, so that a weak reference tells when nobody uses it any more."""


def _take_block(free: list[mmap.mmap]) -> _Block:
    """Returns memory for a window, which is free again once all views of it are gone.

    Not the allocator's: what passes through that from thread to thread stays with it, several times over.
    """
    try:
        memory = free.pop()
    except IndexError:
        memory = mmap.mmap(-1, WINDOW_BYTES)
    block: _Block = _BLOCK_TYPE.from_buffer(memory)
    weakref.finalize(block, free.append, memory)
    return block


def _read_window(
    reader: CheckpointReader, parts: Sequence[Part], window: Sequence[_PiecePlace], free: list[mmap.mmap]
) -> list[tuple[int, memoryview]]:
    block = _take_block(free)
    before_casts: _Block | None = None  # a tensor to cast is read as stored, to the same offsets of a block beside
    wanted: list[tuple[str, list[Piece]]] = []
    casts: list[tuple[str, Tensor, Tensor]] = []
    chunks = []
    view = memoryview(block).cast("B")
    for number, box, begin in window:
        part, stored = parts[number], reader.manifest.tensors[parts[number].stored].dtype
        target = source = _tensor_over(block, begin, part.dtype, box)
        if stored.name != part.dtype.name:
            before_casts = before_casts or _take_block(free)
            source = _tensor_over(before_casts, begin, stored, box)
            casts.append((part.stored, target, source))
        wanted.append((part.stored, [Piece(box, source)]))
        chunks.append((number, view[begin : begin + box.numel * part.dtype.itemsize]))
    fetch(reader.requests(wanted))
    with torch.no_grad():  # a thread has a grad mode of its own
        for key, target, source in casts:
            _cast(key, target, source)
    return chunks


def _tensor_over(block: _Block, begin: int, dtype: Dtype, box: Box) -> Tensor:
    return tensor_over(memoryview(block).cast("B"), begin, dtype, box.sizes)


def _cast(key: str, target: Tensor, source: Tensor) -> None:
    """Casts contiguous elements, a few at a time, so that they are still in the cache when they are copied."""
    sources, targets = (torch.split(tensor.reshape(-1), _CAST_AT_ONCE) for tensor in (source, target))
    for some, into in zip(sources, targets, strict=True):
        lost = lost_in_cast(some, target.dtype)
        if lost is not None:
            required = f"numbers that {dtype_name(target.dtype)} can hold, of at most {torch.finfo(target.dtype).max}"
            problem = Problem(key, f"{lost} in {dtype_name(source.dtype)}", required, "take another dtype")
            raise CheckpointError("a number cannot be cast", [problem], code="cast-overflow")
        into.copy_(some)


class PartReader:
    """Yields parts one after the other, and computes the digests of tensors on the way.

    Args:
        shapes: by key; a tensor has a digest where its parts follow one another and make up the whole in C order.
    """

    def __init__(self, reader: CheckpointReader, parts: Sequence[Part], shapes: dict[str, tuple[int, ...]]) -> None:
        self._chunks = read_parts(reader, parts)
        self._waiting: tuple[int, memoryview] | None = None
        self._parts, self._number = parts, -1
        self._hashes = {key: xxhash.xxh3_128() for key in keys_in_order(parts, shapes)}

    def take(self) -> Iterator[memoryview]:
        """Yields the bytes of the next part."""
        self._number += 1
        digest = self._hashes.get(self._parts[self._number].key)
        if self._waiting is None:
            self._waiting = next(self._chunks, None)
        while self._waiting is not None and self._waiting[0] == self._number:
            chunk = self._waiting[1]
            if digest is not None:
                digest.update(chunk)
            yield chunk
            self._waiting = next(self._chunks, None)

    def digests(self) -> dict[str, str]:
        """Returns the digests of tensors by key; valid once all parts were taken."""
        return {key: digest.hexdigest() for key, digest in self._hashes.items()}


def keys_in_order(parts: Sequence[Part], shapes: dict[str, tuple[int, ...]]) -> set[str]:
    """Returns the keys of tensors whose parts, in their order, are the whole tensor in C order."""
    rows: dict[str, int] = {}  # that have come, of the first dimension; all of a tensor without dimensions is one
    broken: set[str] = set()
    for i, (key, _, _, box) in enumerate(parts):
        follows = key not in rows or parts[i - 1].key == key
        offsets, sizes = (box.offsets, box.sizes) if box.sizes else ((0,), (1,))
        shape = shapes[key] or (1,)
        if not follows or offsets[0] != rows.get(key, 0) or sizes[1:] != shape[1:]:
            broken.add(key)
        rows[key] = offsets[0] + sizes[0]
    return {key for key, count in rows.items() if key not in broken and count == (shapes[key] or (1,))[0]}


def digests_of(reader: CheckpointReader, tensors: Sequence[ChosenTensor], stored: bool) -> dict[str, str]:
    """Reads whole tensors; returns each one's xxh3-128 over its bytes in C order, in hexadecimal, by new key.

    Args:
        stored: whether the reader has them under the keys of the source, and not under the new ones.
    """
    parts = [Part(each.key, each.stored if stored else each.key, each.dtype, whole(each.shape)) for each in tensors]
    taking = PartReader(reader, parts, {each.key: each.shape for each in tensors})
    for _ in parts:
        for _ in taking.take():
            pass
    return taking.digests()
