"""Parameters in every layout, and what torch does to them: one after the other, as boxes, and whole.

R ranks, N layouts. A layout is a global shape, the shape of the mesh for R ranks, and placements on it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

import shardopt
from shardopt.sharding.view import view_of
from tests.support.cases import plain_class
from tests.support.fake_rank import shard

STEPS = 8
RANKS = (1, 2, 4)
Options = Mapping[str, Any]
LaysOut = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True)
class LaidOut:
    """The layout of a parameter; without placements it is plain."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...] = ()

    def mesh_shape(self, ranks: int) -> tuple[int, ...]:
        """Of as many dimensions as there are placements; the last is never the larger one."""
        return (ranks,) if len(self.placements) == 1 else {1: (1, 1), 2: (2, 1), 4: (2, 2)}[ranks]

    def placed(self, ranks: int) -> tuple[Placement, ...]:
        """The placements; that of FSDP over tensor parallel says over how many ranks the latter goes."""
        inner = self.mesh_shape(ranks)[-1]
        strided = self.placements == (_STRIDED, Shard(0))
        return (_StridedShard(0, split_factor=inner), Shard(0)) if strided else self.placements


_STRIDED = _StridedShard(0, split_factor=2)
LAYOUTS = {
    "even": LaidOut((8, 16), (Shard(0),)),  # on four ranks 32 elements each, a multiple of every vector's length
    "uneven": LaidOut((9, 5), (Shard(0),)),
    "empty": LaidOut((1, 3), (Shard(0),)),
    "columns": LaidOut((3, 10), (Shard(1),)),
    "replicated": LaidOut((5, 3), (Replicate(),)),
    "no dimensions": LaidOut((), (Replicate(),)),
    "grid": LaidOut((7, 6), (Shard(0), Shard(1))),
    "hybrid": LaidOut((5, 4), (Replicate(), Shard(0))),
    "strided": LaidOut((13, 4), (_STRIDED, Shard(0))),
    "plain": LaidOut((7, 2)),
}
MIXED = tuple(LAYOUTS)
"""All of them under one optimizer: plain and sharded parameters, on meshes of one and of two dimensions."""


def absent(name: str, step: int, alone: bool) -> bool:
    """Whether a parameter has no gradient at a step: one of several at 3, all but one at 5; a lonely one at 3."""
    return (step == 3 and (alone or name in ("even", "plain"))) or (step == 5 and not alone and name != "uneven")


@cache
def values(dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """Whole parameters, then whole gradients of every step; the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(7)
    return tuple(
        {
            name: torch.randn(layout.shape, generator=generator, dtype=torch.complex128).to(dtype)
            if dtype.is_complex
            else torch.randn(layout.shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, layout in LAYOUTS.items()
        }
        for _ in range(STEPS + 1)
    )


class Place:
    """Lays whole tensors out as they lie on one rank, as copies; for the time of its `fake_rank`."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}

    def __call__(self, full: Tensor, name: str) -> Tensor:
        layout = LAYOUTS[name]
        if not layout.placements:
            return full.clone()
        mesh_shape, placements = layout.mesh_shape(self.ranks), layout.placed(self.ranks)
        mesh = self._meshes.get(mesh_shape) or self._meshes.setdefault(mesh_shape, init_device_mesh("cpu", mesh_shape))
        return shard(full, mesh, *placements)


class Run:
    """Parameters by name, some of which get no gradient at some step, and an optimizer that steps on them."""

    def __init__(
        self,
        names: Iterable[str],
        dtype: torch.dtype,
        make: Callable[[dict[str, Parameter]], Any],
        laid_out: LaysOut,
        without_gradient: Callable[[str, int, bool], bool] = absent,
    ) -> None:
        start, *self._gradients = values(dtype)
        self.names = tuple(names)
        self.parameters = {name: Parameter(laid_out(start[name], name)) for name in self.names}
        self._laid_out = laid_out
        self._without_gradient = without_gradient
        self.optimizer = make(self.parameters)

    def steps(self, first: int = 0, last: int = STEPS, before: Callable[[int], None] = lambda step: None) -> "Run":
        """Takes the steps, calling `before` with the gradients of each in place."""
        for step in range(first, last):
            for name, parameter in self.parameters.items():
                here = not self._without_gradient(name, step, len(self.names) == 1)
                parameter.grad = self._laid_out(self._gradients[step][name], name) if here else None
            before(step)
            self.optimizer.step()
        return self

    def state(self, name: str) -> dict[str, Any]:
        """Returns the optimizer's state of a parameter."""
        return dict(self.optimizer.state.get(self.parameters[name], {}))


def torch_run(algorithm: str, options: Options, names: Iterable[str], dtype: torch.dtype, laid_out: LaysOut) -> Run:
    """The plain optimizer over plain parameters: the whole ones, or boxes of them. Eight steps."""
    make: Any = plain_class(algorithm)
    return Run(names, dtype, lambda parameters: make(parameters.values(), **options), laid_out).steps()


def our_run(algorithm: str, options: Options, names: Iterable[str], dtype: torch.dtype, place: Place) -> Run:
    """Ours over parameters as they lie on a rank, not stepped yet."""
    return Run(names, dtype, lambda parameters: shardopt.keyed(algorithm, parameters, **options), place)


def whole(full: Tensor, name: str) -> Tensor:
    """A copy."""
    return full.clone()


def same(actual: Any, expected: Any) -> bool:
    """Every bit, dtype and shape."""
    return actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(actual, expected)


def whole_vectors(parameter: Tensor) -> bool:
    """Whether every box that this rank holds, and the whole, ends where a vector of the CPU does."""
    sizes = [parameter.numel(), *(piece.box.numel for piece in view_of(parameter).pieces)]
    return all(size % 32 == 0 for size in sizes)
