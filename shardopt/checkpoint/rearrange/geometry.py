"""The geometry of rearranging: maps elements of one tensor to those of another. Integers only.

A section of a tensor is a set of axes, each with a name and a size. An index along a dimension is a number of mixed
radix, of which each axis is a digit; a section that stands behind others begins at an offset of its digit. Both tensors
that share a section have the same axes, as other digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from shardopt.sharding.box import Box, boxes_of_range

Ranges = Mapping[str, tuple[int, int]]
"""Axis → first index, and one past the last; together a box of a section."""


class Digit(NamedTuple):
    """A digit of an index.

    Args:
        radix: how many values it has in the tensor.
        offset, extent: the values that the section has.
        axis: the one that the digit is, if it is one; `offset` is then 0, and `extent` the radix.
        inner: the digits that the rest over `offset` is made of, where it is no axis.
    """

    radix: int
    offset: int
    extent: int
    axis: str | None
    inner: tuple[Digit, ...]


@dataclass(frozen=True)
class Place:
    """The place of a section in a tensor: the digits of each dimension's index."""

    digits: tuple[tuple[Digit, ...], ...]

    @cached_property
    def _forms(self) -> tuple[tuple[int, dict[str, int]], ...]:
        return tuple(_linear(digits) for digits in self.digits)

    @cached_property
    def bounds(self) -> Box:
        """The smallest box of the tensor that contains the section."""
        offsets = tuple(constant for constant, _ in self._forms)
        extents = {digit.axis: digit.radix for digits in self.digits for digit in _axes(digits)}
        sizes = [
            0 if any(extents[axis] == 0 for axis in steps) else 1 + sum(s * (extents[a] - 1) for a, s in steps.items())
            for _, steps in self._forms
        ]
        return Box(offsets, tuple(sizes))

    def ranges(self, box: Box) -> Iterator[dict[str, tuple[int, int]]]:
        """Yields the boxes of the section that together are its share of a box of the tensor."""
        each = [
            list(_ranges(digits, begin, end))
            for digits, begin, end in zip(self.digits, box.offsets, box.ends, strict=True)
        ]
        for chosen in product(*each):
            yield {axis: ends for ranges in chosen for axis, ends in ranges.items()}

    def first(self, ranges: Ranges) -> tuple[int, ...]:
        """Returns the index of the first element of a box of the section."""
        return tuple(
            constant + sum(step * ranges[axis][0] for axis, step in steps.items()) for constant, steps in self._forms
        )

    def steps(self, dim: int) -> Mapping[str, int]:
        """Returns the step of each axis along a dimension, the largest first."""
        return self._forms[dim][1]

    @cached_property
    def step_of(self) -> dict[str, tuple[int, int]]:
        """Axis → its dimension, and its step along it."""
        return {axis: (dim, step) for dim, (_, steps) in enumerate(self._forms) for axis, step in steps.items()}


def _axes(digits: Sequence[Digit]) -> Iterator[Digit]:
    for digit in digits:
        yield from (digit,) if digit.axis is not None else _axes(digit.inner)


def _linear(digits: Sequence[Digit], unit: int = 1) -> tuple[int, dict[str, int]]:
    """Returns an index as a constant, and a step for each axis."""
    constant, steps = 0, dict[str, int]()
    for i, digit in enumerate(digits):
        step = unit * prod(each.radix for each in digits[i + 1 :])
        if digit.axis is not None:
            steps[digit.axis] = step
        else:
            inner_constant, inner_steps = _linear(digit.inner, step)
            constant += step * digit.offset + inner_constant
            steps |= inner_steps
    return constant, steps


def _ranges(digits: Sequence[Digit], begin: int, end: int) -> Iterator[dict[str, tuple[int, int]]]:
    """Yields the boxes of axes whose index is in a range."""
    for box in boxes_of_range([digit.radix for digit in digits], begin, end):
        options: list[dict[str, tuple[int, int]]] = [{}]
        for digit, low, high in zip(digits, box.offsets, box.ends, strict=True):
            if digit.axis is not None:
                options = [option | {digit.axis: (low, high)} for option in options]
                continue
            low, high = max(low - digit.offset, 0), min(high - digit.offset, digit.extent)
            within = list(_ranges(digit.inner, low, high)) if low < high else []
            options = [option | inner for option in options for inner in within]
        yield from options


class Run(NamedTuple):
    """One axis, or several joined: its length, its step in the stored dimension, and its stride in memory."""

    step: int
    length: int
    stride: int


def joined_runs(runs: Sequence[Run]) -> list[Run]:
    """Joins neighbouring runs that are contiguous both in the stored dimension and in memory.

    Args:
        runs: the largest step first; those of one index are left out.
    """
    joined: list[Run] = []
    for run in runs:
        if run.length == 1:
            continue
        outer = joined[-1] if joined else None
        if outer is not None and (outer.step, outer.stride) == (run.step * run.length, run.stride * run.length):
            joined[-1] = Run(run.step, outer.length * run.length, run.stride)
        else:
            joined.append(run)
    return joined


def as_digits(size: int, first: int, runs: Sequence[Run]) -> tuple[list[int], list[int], list[int]] | None:
    """Splits a stored dimension into digits, so that runs of its indices are a box.

    Args:
        size: of the dimension.
        first: the least index.
        runs: see `joined_runs`.

    Returns:
        The radices, and offsets and counts of the box, one more than there are runs where the last one has a step
        beyond 1. None where there are no such digits, as where the dimension ends within a step.
    """
    steps = [run.step for run in runs]
    sizes, offsets, counts = [], [], []
    outer = size
    for step, run in zip(steps, runs, strict=True):
        if outer % step:
            return None
        digit = first // step
        first %= step
        if digit + run.length > outer // step:
            return None
        sizes.append(outer // step)
        offsets.append(digit)
        counts.append(run.length)
        outer = step
    if outer > 1 or not runs:
        sizes.append(outer)
        offsets.append(first)
        counts.append(1)
    return sizes, offsets, counts
