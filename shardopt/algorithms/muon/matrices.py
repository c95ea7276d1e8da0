"""The matrices in a parameter, each of which is orthogonalised by itself.

[M, N]                 one matrix
[E, M, N]              E of them, such as the experts of a layer
split=3                three of equal height in each of these, such as a fused query, key and value; or the heads
split=(8, 2, 2)        of so many rows
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, product
from typing import Any

from shardopt.errors import AlgorithmError, Problem
from shardopt.sharding.box import Box

Split = int | tuple[int, ...] | None


def split_of(option: Any) -> Split:
    """Returns the option `split` in a form that can be compared. Raises ValueError if it is invalid."""
    split = tuple(option) if isinstance(option, list | tuple) else option
    numbers = split if isinstance(split, tuple) else (split,)
    if split is None or (numbers and all(type(number) is int and number >= 1 for number in numbers)):
        return split
    raise ValueError(f"Muon's split is {option!r}; required None, a number of parts, or the rows of each")


def matrices_in(name: str, shape: tuple[int, ...], split: Split) -> tuple[Box, ...]:
    """Returns the boxes of a parameter's matrices, in ascending order, without empty ones.

    Raises:
        AlgorithmError: its rows cannot be split so.
    """
    boxes = _boxes(shape, split)
    if boxes is None:
        parts = f"parts of {split} rows" if isinstance(split, tuple) else f"{split} parts of equal height"
        remedy = "give it to a group of its own, with the split that it has"
        problem = Problem(name, f"{shape[-2]} rows", parts, remedy)
        raise AlgorithmError("a parameter cannot be split into matrices", [problem])
    return boxes


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], split: Split) -> tuple[Box, ...] | None:
    *outer, rows, columns = shape
    heights = split if isinstance(split, tuple) else (rows // (split or 1),) * (split or 1)
    if sum(heights) != rows:
        return None
    begins = accumulate(heights[:-1], initial=0)
    parts_of_one = list(zip(begins, heights, strict=True))
    return tuple(
        Box((*index, begin, 0), (*[1] * len(outer), height, columns))
        for index in product(*map(range, outer))
        for begin, height in parts_of_one
        if height * columns
    )


def cost_of(sizes: tuple[int, ...], steps: int) -> int:
    """Returns the cost of a matrix, or a stack of matrices, for so many steps of the Newton-Schulz iteration."""
    short, long = sorted(sizes[-2:])
    # Two products of [short, long] matrices and one of [short, short] in each step.
    return steps * (4 * short * short * long + 2 * short**3) + short * long
