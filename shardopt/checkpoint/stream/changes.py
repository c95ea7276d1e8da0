"""Changes of one tensor's memory: read and checked beside the program that uses it, then applied at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.format.tensor_bytes import bytes_of, flat_bytes, is_plain_memory, torch_dtype
from shardopt.checkpoint.loading.tied import extent
from shardopt.checkpoint.saving.writing.device_stream import to_host
from shardopt.checkpoint.sources.reading.open_file import ReadRequest
from shardopt.checkpoint.sources.reading.read_plan import position_of
from shardopt.checkpoint.sources.reading.scratch import check_cast
from shardopt.checkpoint.stream.chains import WINDOW_SEGMENTS, Link, box_of
from shardopt.runtime.accelerator import has_streams
from shardopt.sharding.box import cut_in_order, whole
from shardopt.sharding.pieces import narrowed

_WINDOW_BYTES = WINDOW_SEGMENTS * SEGMENT_BYTES
_HASHED_BYTES = 4 << 20  # of an accelerator's memory at a time
_LEAST_BYTES = 1 << 20  # that an accelerator hashes; fewer are sooner copied than its kernels are launched

# Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators (2014), as numbers with signs.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIXING = (30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1)


def digest_of_memory(tensor: Tensor) -> bytes:
    """Returns a hash of a tensor's elements, by which it is known again.

    An accelerator computes it of large memory, in some MiB of its own: 8 bytes for each 4 MiB are copied to the host.
    """
    running, pieces = xxhash.xxh3_64(), [tensor.detach()]
    if tensor.dim() and not is_plain_memory(tensor):
        boxes = cut_in_order(whole(tensor.shape), _HASHED_BYTES // tensor.itemsize)
        pieces = [narrowed(pieces[0], box) for box in boxes]
        if tensor.nbytes >= _LEAST_BYTES and has_streams(tensor.device):
            pieces = [torch.stack([*map(print_of, pieces)])]
    for piece in pieces:
        running.update(bytes_of(piece if is_plain_memory(piece) else to_host(piece)))
    return running.digest()


def print_of(piece: Tensor) -> Tensor:
    """Returns 64 bits of a tensor of any dtype, int64 on its device: the sum of its words of 8 bytes, each mixed.

    SplitMix64 mixes a word with its place. That is one to one: another word at a place gives another sum.
    """
    flat = flat_bytes(piece)
    words = torch.zeros(-(-len(flat) // 8), dtype=torch.int64, device=piece.device)
    words.view(torch.uint8)[: len(flat)].copy_(flat)
    other = torch.arange(len(words), device=piece.device)
    words += other.mul_(_GOLDEN)
    for shift, factor in _MIXING:
        torch.bitwise_right_shift(words, shift, out=other)  # which shifts the sign in
        words ^= other.bitwise_and_((1 << 64 - shift) - 1)
        words *= factor
    return words.sum()


class Scatter(NamedTuple):
    """Elements to be set: their positions in the memory of a target, from one of its elements on, and their values."""

    target: Tensor
    first: int
    positions: Any  # an array of NumPy, or a tensor on the target's device
    values: Any

    @property
    def nbytes(self) -> int:
        return int(self.positions.nbytes + self.values.nbytes)

    def apply(self) -> None:
        """Sets the elements."""
        if not len(self.positions):
            return
        if isinstance(self.positions, np.ndarray):
            memory = (ctypes.c_ubyte * extent(self.target)).from_address(self.target.data_ptr())
            words = np.frombuffer(memoryview(memory), np.dtype(self.values.dtype))
            words[self.first :][self.positions] = self.values
            return
        elements = extent(self.target) // self.target.element_size()
        flat = self.target.detach().as_strided((elements,), (1,))
        if flat.dtype != self.values.dtype:
            flat = flat.view(self.values.dtype)
        flat.index_copy_(0, self.positions, self.values)


def is_scattered(request: ReadRequest) -> bool:
    """Whether deltas can be applied to the target of a request: its elements are words."""
    return request.dtype.safetensors is not None


def scatters(request: ReadRequest, links: Sequence[Link]) -> Iterator[Scatter]:
    """Yields what deltas change of a target, in order; reads them a window at a time.

    Raises:
        CorruptionError: a delta is not what was written.
        CheckpointError: the target's dtype cannot hold one of the numbers.
    """
    _, entry, dtype, sizes, wanted, target = request
    if not target.numel():
        return
    box = box_of(entry)
    dims = _merged(sizes, wanted.offsets, wanted.sizes, target.stride())
    begin = position_of(wanted.offsets, sizes) * dtype.itemsize
    end = (position_of([last - 1 for last in wanted.ends], sizes) + 1) * dtype.itemsize
    for link in links:
        for at in range(begin - begin % _WINDOW_BYTES, end, _WINDOW_BYTES):
            delta = link.file.delta(box, link.index, at // SEGMENT_BYTES)
            low, high = max(begin, at), min(end, at + _WINDOW_BYTES)
            positions, values = delta.changes(low - at, high - at)
            first = low // dtype.itemsize
            if len(dims) == 1 and dims[0].stride == 1:  # all of them, as they are
                first -= dims[0].offset
            else:
                positions, values = _in_target(positions.astype(np.int64) + first, values, dims)
                first = 0
            yield _on_device(request, first, positions, values)


class _Dimension(NamedTuple):
    """A dimension of a stored box: its size there, what is wanted of it, and the stride in the target."""

    size: int
    offset: int
    wanted: int
    stride: int


def _merged(
    sizes: Sequence[int], offsets: Sequence[int], wanted: Sequence[int], strides: Sequence[int]
) -> list[_Dimension]:
    """Returns as few dimensions as there can be: one is joined to that before it where all of it is wanted in order."""
    dims: list[_Dimension] = []
    for each in map(_Dimension, sizes, offsets, wanted, strides):
        last = dims[-1] if dims else None
        if last is not None and each.wanted == each.size and last.stride == each.stride * each.size:
            joined = (last.size * each.size, last.offset * each.size, last.wanted * each.size, each.stride)
            dims[-1] = _Dimension(*joined)
        else:
            dims.append(each)
    return dims


def _in_target(positions: Any, values: Any, dims: Sequence[_Dimension]) -> tuple[Any, Any]:
    """Returns the positions in a target's memory of those elements of a box that are wanted, and their values."""
    places, is_inside = np.zeros_like(positions), np.ones(len(positions), bool)
    for size, offset, wanted, stride in reversed(dims):
        positions, index = np.divmod(positions, size)
        index -= offset
        is_inside &= (index >= 0) & (index < wanted)
        places += index * stride
    return places[is_inside], values[is_inside]


def _on_device(request: ReadRequest, first: int, positions: Any, values: Any) -> Scatter:
    target, stored = request.target, torch_dtype(request.dtype)
    if target.is_cpu and target.dtype == stored:
        return Scatter(target, first, positions, values.copy())
    bits = torch.from_numpy(values.view(f"<i{values.itemsize}").copy())
    elements = bits
    if target.dtype != stored:
        check_cast(request.entry, target, bits.view(stored))
        elements = bits.view(stored).to(target.dtype)
    places = torch.from_numpy(positions.astype(np.int64) + first)
    return Scatter(target, 0, places.to(target.device), elements.to(target.device))
