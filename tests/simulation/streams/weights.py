"""Weights of a simulated stream: what each step has, and the part of it that a rank holds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from shardopt.sharding import Box, PiecesTensor

_SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((16, 60), torch.float32),
    "vector": ((700,), torch.bfloat16),
    "other": ((400,), torch.float32),
    "bias": ((3,), torch.float32),
    "fixed": ((300,), torch.float32),  # never changes
}
"""The first three are large enough for deltas, the matrix also as the part of a rank; all fit into one small read."""

Weights = Mapping[str, Tensor]


def begun(seed: int) -> Weights:
    """Returns the weights before the first step."""
    generator = _generator(f"begin {seed}")
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in _SHAPES.items()}


def trained(before: Weights, changes: str, key: str) -> Weights:
    """Returns the weights after a step; those that do not change are the same objects.

    Args:
        changes: as in `Publishing`.
        key: of the step; others have other values.
    """
    generator = _generator(key)
    after = dict(before)
    if changes == "one":
        after["matrix"] = before["matrix"].clone()
        after["matrix"].view(-1)[_draw(generator, 960)] = torch.randn((), generator=generator)
    elif changes == "few":
        for name in ("matrix", "vector", "other"):
            if name == "matrix" or _draw(generator, 4):
                after[name] = before[name].clone()
                count = 1 + _draw(generator, 12)
                places = torch.randint(before[name].numel(), (count,), generator=generator)
                after[name].view(-1)[places] = torch.randn(count, generator=generator).to(before[name].dtype)
        after["bias"] = torch.randn(3, generator=generator)
    elif changes == "all":
        for name in ("matrix", "vector", "other", "bias"):
            after[name] = torch.randn(before[name].shape, generator=generator).to(before[name].dtype)
    return after


def _generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


def _draw(generator: torch.Generator, below: int) -> int:
    return int(torch.randint(below, (1,), generator=generator))


class App:
    """The weights in the memory of a rank.

    Attributes:
        tensors: by name, as a publisher or follower takes them.
    """

    def __init__(self, ranks: int, rank: int, layout: str, stages: bool, strided: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._parts: dict[str, tuple[tuple[slice, ...], Tensor]] = {}  # which part of all, and its memory
        for i, (name, (shape, dtype)) in enumerate(_SHAPES.items()):
            if name == "matrix" and layout != "whole":
                of = 0 if layout == "rows" else 1
                begin, end = shape[of] * rank // ranks, shape[of] * (rank + 1) // ranks
                part = tuple(slice(begin, end) if dim == of else slice(0, size) for dim, size in enumerate(shape))
                memory = torch.zeros([each.stop - each.start for each in part], dtype=dtype)
                box = Box(tuple(each.start for each in part), tuple(memory.shape))
                self.tensors[name] = PiecesTensor(shape, [(box, memory)])
            elif stages and i % ranks != rank:
                continue
            else:
                part = tuple(slice(0, size) for size in shape)
                twice = torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype)
                memory = twice[..., ::2] if strided and name == "other" else twice[..., : shape[-1]].contiguous()
                self.tensors[name] = memory
            self._parts[name] = part, memory

    def fill(self, weights: Weights) -> None:
        """Has the values of a step."""
        for name, (part, memory) in self._parts.items():
            memory.copy_(weights[name][part])

    def spoil(self) -> None:
        """Changes one element of each tensor."""
        for _, memory in self._parts.values():
            memory[(-1,) * memory.dim()] += 1.0

    def other_than(self, weights: Weights) -> list[str]:
        """Returns the names of the tensors that do not have the values of a step."""
        return [name for name, (part, memory) in self._parts.items() if not torch.equal(memory, weights[name][part])]
