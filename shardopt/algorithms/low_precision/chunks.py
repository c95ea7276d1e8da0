"""Chunks of bounded size of this rank's elements of a parameter, with their places in the global tensor.

A box of a tensor is a matrix of its rows and of what it has of each row, which is a run of the row where at most the
first of the dimensions within it is cut, and else several runs. A chunk is some rows of a run, and some of its columns.
Where elements have scales by block, it begins and ends with a block, but for the ends of the run.

Blocks of elements that share a scale follow from the global shape alone: N rows (indices of the first dimension), D
elements in a row, B = ⌈D / 256⌉ blocks of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from shardopt.algorithms.low_precision.codes import decode
from shardopt.algorithms.low_precision.noise import Noise, NoiseKey, Positions
from shardopt.sharding.box import Box

VECTOR = 64
"""The multiple of elements to which scratch memory is padded: several vectors of any CPU."""

ALIGNMENT_BYTES = 16
"""That of the vectors in torch's kernels for accelerators."""

_MOST_ON_CPU = 32_768  # torch gives more to several threads, whose shares may end anywhere
_MOST_ELSEWHERE = 1 << 25  # with a quarter of it, steps on an H200 waited for the host's launches

T = TypeVar("T")

MOST_OF_BLOCK = 256
_LEAST_OF_BLOCK = 64
_LEAST_OF_TENSOR = 4096


def row_width(shape: tuple[int, ...]) -> int:
    """Returns D."""
    return prod(shape[1:])


def suits_blocks(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this global shape is stored in codes: it needs 4,096 elements, and 64 in a row."""
    return prod(shape) >= _LEAST_OF_TENSOR and row_width(shape) >= _LEAST_OF_BLOCK and len(shape) > 1


def block_size(shape: tuple[int, ...]) -> int:
    """Returns the number of elements in a block; the last of a row may have fewer."""
    return min(row_width(shape), MOST_OF_BLOCK)


def blocks_of_row(shape: tuple[int, ...]) -> int:
    """Returns B."""
    return -(-row_width(shape) // block_size(shape))


class Chunk(NamedTuple):
    """Some rows and columns of a box's matrix.

    Args:
        rows, columns: of the matrix.
        row, column: the global row, and the place in it, of the first element.
        block: the elements of a block; 0 where there are none.
        width: the elements in a row of the whole tensor.
    """

    rows: slice
    columns: slice
    row: int
    column: int
    block: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def blocks(self) -> slice:
        """The blocks of a row that the chunk has elements of."""
        return slice(self.column // self.block, -(-(self.column + self.shape[1]) // self.block))

    @property
    def inside(self) -> slice:
        """The chunk's own columns of scratch memory; the others belong to blocks that it has only in part."""
        before = self.column % self.block if self.block else 0
        return slice(before, before + self.shape[1])

    @property
    def scratch_shape(self) -> tuple[int, int]:
        """The numbers of rows and columns of scratch memory, which holds whole blocks if there are blocks."""
        rows, columns = self.shape
        return (rows, (self.blocks.stop - self.blocks.start) * self.block) if self.block else (rows, columns)

    @property
    def fits_others(self) -> bool:
        """Whether others may lie behind it in scratch memory: its rows and blocks are whole vectors."""
        rows, columns = self.scratch_shape
        return self.block % VECTOR == 0 and (rows == 1 or columns % VECTOR == 0)

    def of(self, matrix: Tensor) -> Tensor:
        """Returns the chunk's elements of a box's matrix, as a view."""
        return matrix if matrix.shape == self.shape else matrix[self.rows, self.columns]

    def clear_outside(self, scratch: Tensor) -> None:
        """Sets scratch memory to 0 except in the chunk's own elements."""
        inside = self.inside
        if inside.start:
            scratch[:, : inside.start] = 0
        if inside.stop < scratch.shape[1]:
            scratch[:, inside.stop :] = 0

    @property
    def first_position(self) -> int:
        """That of the first element of scratch memory in the flattened global tensor."""
        start: int = self.inside.start
        return self.row * self.width + self.column - start

    def positions(self, device: torch.device) -> Positions:
        """Returns the positions of the elements of scratch memory in the flattened global tensor; rows are runs."""
        (rows, columns), first = self.scratch_shape, self.first_position
        starts = torch.arange(first, first + rows * self.width, self.width, device=device)
        return Positions(starts, columns, self.most_position)

    @property
    def most_position(self) -> int:
        """A bound of its positions."""
        rows, columns = self.scratch_shape
        return (self.row + rows) * self.width + self.column + columns


class Scratch:
    """Scratch memory of some chunks, one behind the other; flat tensors, each chunk padded to whole vectors.

    Args:
        chunks: at least one, of blocks of one size; all but one alone `fits_others`.
        device: of the memory.
    """

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.chunks, self._device = chunks, device
        self._shapes = [chunk.scratch_shape for chunk in chunks]
        self._whole = all(chunk.shape == chunk.scratch_shape for chunk in chunks)  # nothing is outside
        self._vectors = [-(-rows * columns // VECTOR) for rows, columns in self._shapes]
        self._sizes = [vectors * VECTOR for vectors in self._vectors]
        self._used = sum(self._sizes) if len(chunks) > 1 else prod(self._shapes[0])
        self._padded = not self._whole or sum(self._sizes) > sum(map(prod, self._shapes))

    def memory(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Makes flat memory: zeros, or of any content if every element of it is a chunk's own."""
        make = torch.zeros if self._padded else torch.empty
        return make(sum(self._sizes), dtype=dtype, device=self._device)

    def in_place(self, matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
        """Returns a chunk's own memory, flat, if it may serve as scratch memory; None if it has another form.

        On the CPU it may not: nothing pads it there, and a vector that is not whole is computed by other instructions.
        Elsewhere it is aligned, so that torch's fused kernels take the same way through it as through scratch memory.
        """
        if len(self.chunks) > 1 or self._padded or self._device.type == "cpu":
            return None
        own = self.chunks[0].of(matrices[0])
        serves = own.dtype is dtype and own.is_contiguous() and own.data_ptr() % ALIGNMENT_BYTES == 0
        return own.view(-1) if serves else None

    def used(self, flat: Tensor) -> Tensor:
        """Returns flat memory without the end that belongs to no chunk."""
        return flat[: self._used]

    def blocks(self, flat: Tensor) -> Tensor:
        """Returns flat memory as blocks, [all blocks, elements of one]."""
        return self.used(flat).view(-1, self.chunks[0].block)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Returns for each chunk the view of flat memory that has its `scratch_shape`."""
        if len(self._shapes) == 1:
            return [flat[: self._used].view(self._shapes[0])]
        pieces = torch.split(flat, self._sizes)
        return [each[: prod(shape)].view(shape) for each, shape in zip(pieces, self._shapes, strict=True)]

    def own(self, flat: Tensor) -> list[Tensor]:
        """Returns for each chunk the view of its own elements in flat memory."""
        parts = self.parts(flat)
        if self._whole:
            return parts
        return [part[:, chunk.inside] for chunk, part in zip(self.chunks, parts, strict=True)]

    def of(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Returns each chunk's elements of the matrix of its box."""
        return [chunk.of(matrix) for chunk, matrix in zip(self.chunks, matrices, strict=True)]

    def scales_of(self, scales: Sequence[Tensor]) -> list[Tensor]:
        """Returns each chunk's share of the scales of its box, [rows, blocks]."""
        return [each[chunk.rows, chunk.blocks] for chunk, each in zip(self.chunks, scales, strict=True)]

    def put(self, flat: Tensor, matrices: Sequence[Tensor]) -> None:
        """Stores flat memory to the matrices of the boxes, converted to their dtype."""
        into = self.of(matrices)
        if into[0].data_ptr() != flat.data_ptr():  # else it is the chunk's own
            torch._foreach_copy_(into, self.own(flat))

    def put_scales(self, flat: Tensor, scales: Sequence[Tensor]) -> None:
        """Stores the scales of all blocks."""
        torch._foreach_copy_(self.scales_of(scales), self.split_scales(flat, scales))

    def split_scales(self, flat: Tensor, scales: Sequence[Tensor]) -> list[Tensor]:
        """Returns the scales of all blocks by chunks, [rows, blocks], as in `scales`."""
        shapes = [each.shape for each in self.scales_of(scales)]
        pieces = torch.split(flat, [shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def clear_outside(self, flat: Tensor) -> None:
        """Sets flat memory to 0 outside of the chunks' own elements."""
        if not self._whole:
            for chunk, part in zip(self.chunks, self.parts(flat), strict=True):
                chunk.clear_outside(part)

    @cached_property
    def _positions(self) -> Positions:
        """The positions of elements in the flattened global tensors; vectors of several chunks are runs."""
        if len(self.chunks) == 1:
            return self.chunks[0].positions(self._device)
        of_chunks, begin = [], 0
        for chunk, (rows, columns), vectors in zip(self.chunks, self._shapes, self._vectors, strict=True):
            of_row = -(-columns // VECTOR)
            skipped = 0 if rows == 1 else chunk.width - of_row * VECTOR
            of_chunks.append((chunk.first_position - begin * VECTOR, begin, of_row, skipped))
            begin += vectors
        firsts, begins, of_rows, skips = self._for_vectors(torch.tensor(of_chunks, device="cpu").t())
        every = torch.arange(begin, device=self._device)
        positions = firsts + every * VECTOR
        if any(skipped for *_, skipped in of_chunks):
            positions += (every - begins) // of_rows * skips
        return Positions(positions, VECTOR, max(chunk.most_position for chunk in self.chunks))

    @cached_property
    def _owners(self) -> Tensor:
        """The place of each vector's chunk: int64."""
        ends = torch.tensor(list(accumulate(self._vectors)), device="cpu").to(self._device, non_blocking=True)
        return torch.bucketize(torch.arange(sum(self._vectors), device=self._device), ends, right=True)

    def _for_vectors(self, of_chunks: Tensor) -> Tensor:
        """Returns columns for the vectors of all chunks, of a column on the CPU for each chunk.

        They are repeated on the device: for a copy of much memory that is not pinned, the host waits for the device.
        """
        return of_chunks.to(self._device, non_blocking=True).index_select(1, self._owners)

    def noise(self, keys: Sequence[NoiseKey]) -> Noise:
        """Returns 32 random bits for each element of `used`, from a key for each chunk."""
        if len(keys) == 1:
            return Noise(self._positions, keys[0])
        of_vectors = self._for_vectors(torch.tensor(keys, dtype=torch.int32, device="cpu").t())
        return Noise(self._positions, NoiseKey(*of_vectors))


def together(chunks: Iterable[tuple[Chunk, T]], on_cpu: bool) -> Iterator[list[tuple[Chunk, T]]]:
    """Groups chunks, with what belongs to them, to lists for scratch memory of bounded size."""
    most = _MOST_ON_CPU if on_cpu else _MOST_ELSEWHERE
    batch: list[tuple[Chunk, T]] = []
    size = 0
    for chunk, thing in chunks:
        elements = prod(chunk.scratch_shape)
        if batch and not (chunk.fits_others and batch[0][0].fits_others and size + elements <= most):
            yield batch
            batch, size = [], 0
        batch.append((chunk, thing))
        size += -(-elements // VECTOR) * VECTOR
    if batch:
        yield batch


def load(
    scratch: Scratch,
    matrices: Sequence[Tensor],
    scales: Sequence[Tensor] | None = None,
    signed: bool = True,
    in_place: bool = False,
) -> Tensor:
    """Returns the numbers of chunks as fp32 scratch memory, flat.

    Args:
        scratch: of the chunks.
        matrices: of their boxes; of codes where there are scales.
        scales: of all blocks of the boxes, [rows, blocks].
        signed: whether codes are of numbers that may be negative.
        in_place: whether the numbers may be those of the matrices themselves.
    """
    dtype = torch.float32 if scales is None else torch.uint8
    flat = scratch.in_place(matrices, dtype) if in_place or scales is not None else None
    if flat is None:
        flat = scratch.memory(dtype)
        torch._foreach_copy_(scratch.own(flat), scratch.of(matrices))
    if scales is None:
        return flat
    parts = [each.reshape(-1) for each in scratch.scales_of(scales)]
    here = torch.cat(parts) if len(parts) > 1 else parts[0]
    return decode(flat, here, signed, scratch.chunks[0].block)


def as_matrix(tensor: Tensor, box: Box, shape: tuple[int, ...], block: int) -> Tensor:
    """Returns a box's elements as the matrix that `chunks_of` cuts: a view if the memory allows, else a copy."""
    rows, columns = _matrix_shape(box, shape, block)
    return tensor.reshape(rows, columns)


def chunks_of(box: Box, shape: tuple[int, ...], block: int, on_cpu: bool) -> Iterator[Chunk]:
    """Cuts a box into chunks.

    Args:
        box: not empty.
        shape: of the whole tensor.
        block: the elements of a block of a row; 0 where elements have no scales.
        on_cpu: whether chunks are to be small.
    """
    most = _MOST_ON_CPU if on_cpu else _MOST_ELSEWHERE
    rows, _ = _matrix_shape(box, shape, block)
    width = prod(shape[1:])
    first_row, runs = box.offsets[0] if box.sizes else 0, _runs(box, shape)
    if _is_linear(box, shape, block):
        first_row, runs = 0, iter([(0, first_row * width, box.numel)])
    for at, column, length in runs:
        for begin, end in _stretches(column, length, most // block * block if block else most):
            padded = (-(-end // block) - begin // block) * block if block else end - begin
            most_rows = max(1, most // padded)
            columns = slice(at + begin - column, at + end - column)
            for row in range(0, rows, most_rows):
                yield Chunk(slice(row, min(row + most_rows, rows)), columns, first_row + row, begin, block, width)


def _is_linear(box: Box, shape: tuple[int, ...], block: int) -> bool:
    """Whether a box is one run of the flattened tensor, and may be treated as such."""
    return not block and box.sizes[1:] == shape[1:]


def _matrix_shape(box: Box, shape: tuple[int, ...], block: int) -> tuple[int, int]:
    if _is_linear(box, shape, block):
        return 1, box.numel
    return box.sizes[0], prod(box.sizes[1:])


def _runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yields a box's runs of a row: column in the box's matrix, column in the row, and length."""
    offsets, sizes, whole = box.offsets[1:], box.sizes[1:], shape[1:]
    last = max((dim for dim, size in enumerate(sizes) if size != whole[dim]), default=0)
    inner = prod(whole[last + 1 :])
    length = sizes[last] * inner
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    for number, indices in enumerate(product(*(range(size) for size in sizes[:last]))):
        column = sum((offsets[dim] + index) * strides[dim] for dim, index in enumerate(indices))
        yield number * length, column + offsets[last] * inner, length


def _stretches(column: int, length: int, step: int) -> Iterator[tuple[int, int]]:
    """Cuts columns into stretches that end at multiples of `step`."""
    begin, end = column, column + length
    while begin < end:
        stop = min(end, (begin // step + 1) * step)
        yield begin, stop
        begin = stop
