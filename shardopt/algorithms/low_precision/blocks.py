"""Blocks of elements that share a scale: cut by the global shape alone.

N rows (indices of the first dimension), D elements in a row, B = ⌈D / 256⌉ blocks of it.
"""

from __future__ import annotations

from math import prod

MOST_OF_BLOCK = 256
_LEAST_OF_BLOCK = 64
_LEAST_OF_TENSOR = 4096


def row_width(shape: tuple[int, ...]) -> int:
    """Returns D."""
    return prod(shape[1:])


def suits_blocks(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this global shape is stored in codes: it has 4,096 elements, and 64 in a row."""
    return prod(shape) >= _LEAST_OF_TENSOR and row_width(shape) >= _LEAST_OF_BLOCK and len(shape) > 1


def block_size(shape: tuple[int, ...]) -> int:
    """Returns the number of elements in a block; the last of a row may have fewer."""
    return min(row_width(shape), MOST_OF_BLOCK)


def blocks_of_row(shape: tuple[int, ...]) -> int:
    """Returns B."""
    return -(-row_width(shape) // block_size(shape))
