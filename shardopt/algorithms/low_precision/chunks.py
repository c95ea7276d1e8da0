"""Chunks of bounded size of this rank's elements of a parameter, with their places in the global tensor.

A box of a tensor is a matrix of its rows and of what it has of each row, which is a run of the row where at most the
first of the dimensions within it is cut, and else several runs. A chunk is some rows of a run, and some of its columns.
Where elements have scales by block, it begins and ends with a block, but for the ends of the run.

Blocks of elements that share a scale follow from the global shape alone: N rows (indices of the first dimension), D
elements in a row, B = ⌈D / 256⌉ blocks of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.algorithms.low_precision.codes import decode
from shardopt.sharding.box import Box

VECTOR = 64
"""The multiple of elements to which scratch memory is padded: several vectors of any CPU."""

_MOST_ON_CPU = 32_768  # torch gives more to several threads, whose shares may end anywhere
_MOST_ELSEWHERE = 1 << 22

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

    def scratch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Makes fp32 zeros: a flat tensor, padded to whole vectors, and its view of shape `scratch_shape`."""
        rows, columns = self.scratch_shape
        flat = torch.zeros(-(-rows * columns // VECTOR) * VECTOR, dtype=torch.float32, device=device)
        return flat, self.of_scratch(flat)

    def of_scratch(self, flat: Tensor) -> Tensor:
        """Returns flat memory as a view of shape `scratch_shape`."""
        rows, columns = self.scratch_shape
        return flat[: rows * columns].view(rows, columns)

    def of(self, matrix: Tensor) -> Tensor:
        """Returns the chunk's elements of a box's matrix, as a view."""
        return matrix[self.rows, self.columns]

    def clear_outside(self, scratch: Tensor) -> None:
        """Sets scratch memory to 0 except in the chunk's own elements."""
        inside = self.inside
        if inside.start:
            scratch[:, : inside.start] = 0
        if inside.stop < scratch.shape[1]:
            scratch[:, inside.stop :] = 0

    def positions(self, device: torch.device) -> tuple[Tensor, int]:
        """Returns the int64 positions of scratch memory's elements in the flattened global tensor, and their bound."""
        rows, columns = self.scratch_shape
        first = self.row * self.width + self.column - self.inside.start
        index = torch.arange(first, first + columns, device=device)
        if rows > 1:
            index = (torch.arange(0, rows * self.width, self.width, device=device)[:, None] + index).view(-1)
        return index, first + rows * self.width + columns


def load(chunk: Chunk, matrix: Tensor, scales: Tensor | None = None, signed: bool = True) -> Tensor:
    """Returns a chunk's numbers as fp32 scratch memory, flat.

    Args:
        chunk: of a box.
        matrix: of the box; of codes where there are scales.
        scales: of all blocks of the box, [rows, blocks].
        signed: whether codes are of numbers that may be negative.
    """
    flat, scratch = chunk.scratch(matrix.device)
    inside = scratch[:, chunk.inside]
    if scales is None:
        inside.copy_(chunk.of(matrix))
        return flat
    decode(chunk.of(matrix), signed, inside)
    here = scales[chunk.rows, chunk.blocks]
    scratch.view(*here.shape, chunk.block).mul_(here.unsqueeze(-1))
    return flat


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
