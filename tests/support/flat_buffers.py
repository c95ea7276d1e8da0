"""A framework's own sharded tensor, as one that keeps all parameters in one flat buffer dealt evenly to ranks has it.

Where a parameter is cut does not follow its rows. Gradients are in a buffer of their own, not in `.grad`.
"""

from itertools import pairwise
from math import prod

import torch
from torch.distributed.tensor import DTensor

import shardopt
from shardopt.sharding import TensorKind, cut_range, register_kind

SHAPES = {"w": (5, 3), "b": (4,), "e": (3, 2, 2), "s": ()}


class FlatShard(torch.Tensor):
    """A part of a parameter: a run of its elements in C order."""

    @staticmethod
    def __new__(cls, memory, gradients, shape, start):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=memory.dtype, requires_grad=True)
        made.parts = cut_range(memory, shape, start)
        made.gradient_parts = [part for _, part in cut_range(gradients, shape, start)]
        made.has_gradient = False
        return made

    def __repr__(self):
        return "FlatShard"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise AssertionError(f"{operation} on a shard of a flat buffer")


class FlatKind(TensorKind):
    def pieces(self, tensor):
        return tensor.parts

    def gradients(self, tensor):
        return tensor.gradient_parts if tensor.has_gradient else [None] * len(tensor.parts)

    def zero_gradients(self, tensor, set_to_none):
        tensor.has_gradient = False
        for part in tensor.gradient_parts:
            part.zero_()


register_kind(FlatShard, FlatKind())


class FlatBuffer:
    """The parameters of SHAPES one behind the other, of which this rank has what lies from `begin` to `end`."""

    def __init__(self, full, rank, ranks):
        ends = [0]
        for shape in SHAPES.values():
            ends.append(ends[-1] + prod(shape))
        cuts = [round(ends[-1] * i / ranks) for i in range(ranks + 1)]
        self.begin, self.end = cuts[rank], cuts[rank + 1]
        self.memory = torch.cat([value.flatten() for value in full.values()])[self.begin : self.end].clone()
        self.gradients = torch.zeros_like(self.memory)
        self.params = {}
        for (name, shape), (first, last) in zip(SHAPES.items(), pairwise(ends), strict=True):
            low, high = max(first, self.begin), min(last, self.end)
            if low >= high:
                low = high = max(self.begin, min(first, self.end))
            window = slice(low - self.begin, high - self.begin)
            self.params[name] = FlatShard(self.memory[window], self.gradients[window], shape, max(low - first, 0))

    def set_gradients(self, full):
        self.gradients.copy_(torch.cat([value.flatten() for value in full.values()])[self.begin : self.end])
        for param in self.params.values():
            param.has_gradient = True


def drawn(seed):
    """A full value for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}


def optimizer_of(params, algorithm, clip, **options):
    optimizer = shardopt.keyed(algorithm, params, lr=0.1, groups=[{"match": "^b$", "weight_decay": 0.0}], **options)
    return shardopt.GradientClippingOptimizer(optimizer, shardopt.GradientClipping.NORM, clip)


def full(tensor):
    """The whole of a plain tensor or DTensor."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
