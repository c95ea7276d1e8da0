"""Jobs to clip: parameters of every layout with known gradients, and the one-process result for each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from shardopt import GradientClipping, GradientClippingOptimizer, KeyedOptimizer
from shardopt.sharding.gradients import local_gradients, takes_gradient
from shardopt.sharding.view import assemble, local_tensors, view_of
from tests.support.placement import runs, sharded_tensor_of, two_on_first_none_on_last

Place = Callable[[Tensor, "Meshes"], Tensor | None]


class Meshes:
    """The meshes of one job; making one is collective, so every rank makes all of them."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        rows = 2 if self.size % 2 == 0 else 1
        self.line = init_device_mesh("cpu", (self.size,))
        self.grid = init_device_mesh("cpu", (rows, self.size // rows), mesh_dim_names=("outer", "inner"))
        self.halves = [DeviceMesh("cpu", list(half)) for half in torch.arange(self.size).tensor_split(rows)]
        self.half = int(self.rank >= self.size // rows) if rows == 2 else 0


def whole(full, meshes):
    return full.clone()


def on(name, *placements):
    """Placed on the mesh of that name: "line", "grid", or a dimension of the grid."""

    def place(full, meshes):
        mesh = getattr(meshes, name, None) or meshes.grid[name]
        return distribute_tensor(full, mesh, placements, src_data_rank=None)

    return place


def on_each_half(full, meshes):
    """The same parameter on two meshes that know nothing of each other."""
    return distribute_tensor(full, meshes.halves[meshes.half], [Shard(0)], src_data_rank=None)


def on_first_half(full, meshes):
    return on_each_half(full, meshes) if meshes.half == 0 else None


def on_last_half(full, meshes):
    return on_each_half(full, meshes) if meshes.half == len(meshes.halves) - 1 else None


def first_stage(full, meshes):
    return full.clone() if meshes.rank == 0 else None


def last_stage(full, meshes):
    return full.clone() if meshes.rank == meshes.size - 1 else None


def both_ends(full, meshes):
    """As tied embeddings on the first and the last stage of a pipeline."""
    return full.clone() if meshes.rank in (0, meshes.size - 1) else None


def table(full, meshes):
    """A ShardedTensor in uneven shards; rank 0 has two, the last of several ranks none."""
    holders = two_on_first_none_on_last(meshes.size)
    ends = [*(min(1 + 2 * i, len(full)) for i in range(len(holders) - 1)), len(full)]
    return sharded_tensor_of(full, runs(full.shape, 0, ends), holders, requires_grad=True)


def wrapper(full, meshes):
    """Columns on the inner dimension, every second one on the same rank, alike on both outer ranks."""
    inner = meshes.grid["inner"]
    columns = range(inner.get_local_rank(), full.shape[1], inner.size())
    local = LocalShardsWrapper([full[:, i : i + 1].clone() for i in columns], [(0, i) for i in columns])
    return DTensor.from_local(local, inner, [Shard(1)], shape=full.shape, stride=full.stride())


@dataclass(frozen=True)
class Case:
    """A parameter.

    Args:
        shape, dtype: of the whole of it.
        place: how it is placed; None on ranks that do not have it.
    """

    shape: tuple[int, ...]
    place: Place
    dtype: torch.dtype = torch.float32


LAYOUTS = {
    "plain": {"w": Case((5, 4), whole), "b": Case((), whole), "none": Case((0, 3), whole)},
    "rows": {"w": Case((8, 4), on("line", Shard(0))), "b": Case((12,), on("line", Shard(0)))},
    "uneven": {"w": Case((7, 3), on("line", Shard(0))), "c": Case((3, 5), on("line", Shard(1)))},
    "empty shards": {"w": Case((2, 3), on("line", Shard(0))), "b": Case((1,), on("line", Shard(0)))},
    "replicated": {"w": Case((5, 4), on("line", Replicate())), "b": Case((), on("line", Replicate()))},
    "hybrid": {"w": Case((7, 4), on("grid", Replicate(), Shard(0))), "v": Case((6,), on("grid", Shard(0), Shard(0)))},
    "two meshes": {"w": Case((6, 4), on("line", Shard(0))), "v": Case((6, 4), on("grid", Shard(1), Shard(0)))},
    "cut mesh": {"w": Case((7, 4), on("inner", Shard(0))), "v": Case((5, 2), on("outer", Shard(0)))},
    "each half": {"w": Case((7, 4), on_each_half)},
    "table": {"w": Case((11, 4), table)},
    "wrapper": {"w": Case((3, 7), wrapper)},
    "pipeline": {
        "first.w": Case((4, 3), first_stage),
        "last.w": Case((2, 3), last_stage),
        "tied": Case((3,), both_ends),
        "first.d": Case((5, 2), on_first_half),
        "last.d": Case((3, 4), on_last_half),
    },
    "mixed dtypes": {
        "w": Case((7, 4), on("line", Shard(0)), torch.bfloat16),
        "v": Case((5,), whole, torch.float64),
        "u": Case((5, 2), on("line", Shard(0)), torch.float16),
        "c": Case((3, 4), on("line", Shard(0)), torch.complex64),
        "x": Case((6,), whole),
    },
}
LAYOUTS["all"] = {f"{layout}.{name}": case for layout, cases in LAYOUTS.items() for name, case in cases.items()}


def full_gradient(name: str, case: Case) -> Tensor:
    """Known values, exact in every dtype; equal names of one job never get equal ones."""
    count = torch.Size(case.shape).numel()
    numbers = (torch.arange(count) * 7 + sum(map(ord, name))) % 61 - 30
    return (numbers / 8).to(case.dtype).reshape(case.shape)


def make_job(cases: dict[str, Case], meshes: Meshes) -> dict[str, Tensor]:
    """The parameters of this rank by name, each with its gradient."""
    params = {}
    for name, case in cases.items():
        placed = case.place(full_gradient(name, case), meshes)
        if placed is None:
            continue
        if case.place in (table, wrapper):  # their shards carry the gradients
            params[name] = placed
            for local_tensor in local_tensors(placed):
                local_tensor.grad = local_tensor.detach().clone()
        else:
            params[name] = torch.nn.Parameter(torch.zeros_like(placed))
            params[name].grad = placed
    return params


def drop_gradient(param: Tensor) -> None:
    """Takes the gradient away on this rank."""
    for holder in (param, *local_tensors(param)) if takes_gradient(param) else local_tensors(param):
        holder.grad = None


def clipping(params: dict[str, Tensor], **options: Any) -> GradientClippingOptimizer:
    """The norm clipped, around an optimizer that has nothing but parameters."""
    inner = KeyedOptimizer(params, {}, [{"params": list(params.values())}])
    return GradientClippingOptimizer(inner, GradientClipping.NORM, **options)


def one_process_norm(gradients: Iterable[Tensor], order: float) -> float:
    """‖g‖_p of whole gradients, as written."""
    wide = [g.to(torch.complex128 if g.is_complex() else torch.float64).abs().flatten() for g in gradients]
    elements = torch.cat(wide)
    return float(elements.max()) if order == float("inf") else float((elements**order).sum() ** (1 / order))


def check_scaled(name: str, param: Tensor, full: Tensor, factor: float) -> None:
    """The gradient on this rank is the whole one times the factor, rounded once."""
    gradients = local_gradients(param)
    assert all(gradient is not None for gradient in gradients), name
    wide = torch.complex128 if full.is_complex() else torch.float64
    expected = (full.to(wide) * factor).to(full.dtype)
    for piece in view_of(assemble(param, gradients), name).pieces:
        part = expected[tuple(map(slice, piece.box.offsets, piece.box.ends))]
        torch.testing.assert_close(piece.tensor, part, rtol=max(torch.finfo(full.dtype).eps, 1e-14), atol=0, msg=name)
