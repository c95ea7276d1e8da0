"""Views on real ranks, where other code than ours laid the tensors, and where a collective too many would hang."""

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardopt.sharding.gradients import local_gradients
from shardopt.sharding.pieces import View
from shardopt.sharding.view import assemble, local_tensors, view_of
from tests.harness.ranks import run_ranks
from tests.support.fake_rank import check_views, counting

RANKS_STAY = True


def fsdp_over_tensor_parallel() -> dict[str, View]:
    """A layer of 13 rows, first over 2 tensor parallel ranks, then over 3 data parallel ones: uneven both times."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    layers = torch.nn.Sequential(torch.nn.Linear(2, 13, bias=False), torch.nn.LayerNorm(13))
    with torch.no_grad():
        layers[0].weight.copy_(counting((13, 2)))
        layers[1].weight.copy_(counting((13,)))
    parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(layers, mesh=mesh["dp"])
    linear, norm = layers[0].weight, layers[1].weight
    assert "_StridedShard" in repr(linear.placements)
    assert torch.equal(linear.full_tensor(), counting((13, 2)))  # torch reads it as we do
    return {"linear": view_of(linear), "norm": view_of(norm)}


def test_fully_shard_over_tensor_parallel():
    views = run_ranks(6, fsdp_over_tensor_parallel)
    check_views(dict(enumerate(view["linear"] for view in views)), counting((13, 2)).float())
    assert not views[0]["linear"].layout.local
    # The tensor parallel plan leaves the norm out: it is sharded over the data parallel ranks, and each tensor parallel
    # rank has a copy.
    norm = dict(enumerate(view["norm"] for view in views))
    check_views(norm, counting((13,)).float())
    assert norm[0].layout.local


def uneven_sharded_tensor() -> View:
    rank = dist.get_rank()
    rows = {0: [(0, 2)], 1: [], 2: [(2, 1), (5, 4)], 3: [(3, 2)]}[rank]
    made = init_from_local_shards(
        [
            LocalShard.from_tensor_and_offsets(counting((9, 2))[start : start + size].clone(), [start, 0], rank)
            for start, size in rows
        ],
        9,
        2,
    )
    if rank == 2:  # on one rank only: nothing of it may wait for the others
        again = assemble(made, [torch.zeros_like(leaf) for leaf in local_tensors(made)])
        assert view_of(again).layout == view_of(made).layout
    return view_of(made)


def test_sharded_tensor_from_local_shards():
    check_views(dict(enumerate(run_ranks(4, uneven_sharded_tensor))), counting((9, 2)))


def redistributed_gradient() -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(7, 2), mesh, [Shard(0), Replicate()]))
    ours = distribute_tensor(counting((7, 2)).float(), mesh, [Shard(0), Replicate()])
    for dtype in (torch.float32, torch.bfloat16):  # one shares the parameter's spec, and the other must not
        made = assemble(param, [local.detach().to(dtype) for local in local_tensors(param)])
        assert (
            made.dtype == dtype and made.full_tensor().dtype == dtype and view_of(made).layout == view_of(param).layout
        )
    param.grad = distribute_tensor(counting((7, 2)).float(), mesh, [Shard(1), Shard(0)])
    (gradient,) = local_gradients(param)
    return gradient.flatten().tolist(), ours.to_local().flatten().tolist()


def test_gradient_with_another_placement_is_redistributed():
    for gradient, expected in run_ranks(4, redistributed_gradient):
        assert gradient == expected
