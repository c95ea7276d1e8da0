"""Sums over a dimension, and stacks, of every tensor that can be cut, added up by hand over the ranks that share it."""

from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardopt.sharding.reduced import local_views, shard_groups_of, stack_like, sum_like, sum_memory
from shardopt.sharding.view import local_tensors, view_of
from tests.contract.test_view_dtensor import cases
from tests.contract.test_view_shards import enumerable, sharded
from tests.support.boxes import partitions
from tests.support.drawn import examples
from tests.support.fake_rank import as_rank, check_views, counting, redistributed
from tests.support.placement import at

COUNT = 3


def check(make, world, ranks):
    """Every rank sums its local tensors, then adds up with the ranks of each cut through the dimensions summed over.

    Over each dimension by itself, and over all but the first.

    Args:
        make: gives the tensor on a rank.
    """
    for dims in [*([dim] for dim in range(world.ndim)), range(1, world.ndim)]:
        memory, groups, boxes = {}, {}, {}
        wanted = world.sum(list(dims), keepdim=True) if dims else world
        for rank in range(ranks):
            with as_rank(rank, ranks):
                tensor = make(rank)
                cuts = [cut for cut in shard_groups_of(tensor) if not cut.dims.isdisjoint(dims)]
                groups[rank] = [dist.get_process_group_ranks(cut.group) for cut in cuts]
                memory[rank] = sum_memory(tensor, dims, torch.float64)
                for local, part in zip(local_tensors(tensor), local_views(tensor, dims, memory[rank]), strict=True):
                    part.add_(local.sum(list(dims), keepdim=True) if dims else local)
                like = sum_like(tensor, *dims, dtype=torch.int16)
                assert view_of(like).dtype == torch.int16 and view_of(sum_like(tensor, *dims)).dtype == world.dtype
                assert [local.shape for local in local_tensors(like)] == [sums.shape for sums in memory[rank]]
                for number, local in enumerate(local_tensors(like)):
                    local.fill_(number)  # so that a piece shows which local tensor it is of
                view = view_of(like)
                assert view.shape == tuple(wanted.shape)
                boxes[rank] = [(piece.box, int(piece.tensor.flatten()[0]), piece.tensor) for piece in view.pieces]
        for step in range(max(map(len, groups.values()))):
            memory = {
                rank: tuple(sum(memory[other][i] for other in groups[rank][step]) for i in range(len(memory[rank])))
                if step < len(groups[rank])
                else memory[rank]
                for rank in memory
            }
        for rank in range(ranks):
            for box, local, piece in boxes[rank]:
                mine = memory[rank][local].as_strided(piece.shape, piece.stride(), piece.storage_offset())
                assert torch.equal(mine, wanted[at(box)].double()), (rank, dims, box)


@settings(max_examples=examples(80))
@given(cases(mesh_dims=2, most_ranks=6))
def test_sums_of_dtensors(case):
    shape, mesh_shape, placements = case
    assume(shape and prod(shape))
    world = counting(shape)
    check(lambda rank: redistributed(world, init_device_mesh("cpu", mesh_shape), *placements), world, prod(mesh_shape))


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple).flatmap(partitions), st.data())
def test_sums_of_sharded_tensors(partition, data):
    shape, parts = partition
    holders = data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts)))
    world = counting(shape)
    check(lambda rank: sharded(world, enumerable(parts, holders)), world, 3)


@pytest.mark.parametrize("dim", [0, 1])
def test_sums_of_chunks_of_which_the_last_are_empty(dim):
    world = counting((3, 3))
    spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in range(4)])
    check(lambda rank: sharded(world, spec), world, 4)


def test_sums_of_plain_tensors():
    check(lambda rank: counting((3, 4)), counting((3, 4)), 1)


def stacked(make, world, ranks):
    views = {}
    for rank in range(ranks):
        with as_rank(rank, ranks):
            tensor = make(rank)
            stack = stack_like(tensor, COUNT)
            for local, rows in zip(local_tensors(tensor), local_tensors(stack), strict=True):
                assert rows.is_contiguous() and not rows.any()
                for number in range(COUNT):
                    rows[number] = local + 1000 * number
            views[rank] = view_of(stack)
    check_views(views, torch.stack([world + 1000 * number for number in range(COUNT)]))


@settings(max_examples=examples(80))
@given(cases(mesh_dims=2, most_ranks=6))
def test_stacks_of_dtensors(case):
    shape, mesh_shape, placements = case
    assume(prod(shape))
    world = counting(shape)
    stacked(
        lambda rank: redistributed(world, init_device_mesh("cpu", mesh_shape), *placements), world, prod(mesh_shape)
    )


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple).flatmap(partitions), st.data())
def test_stacks_of_sharded_tensors(partition, data):
    shape, parts = partition
    holders = data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts)))
    world = counting(shape)
    stacked(lambda rank: sharded(world, enumerable(parts, holders)), world, 3)


@pytest.mark.parametrize("dim", [0, 1])
def test_stacks_of_chunks_of_which_the_last_are_empty(dim):
    world = counting((3, 3))
    spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in range(4)])
    stacked(lambda rank: sharded(world, spec), world, 4)


def test_ranks_outside_of_the_mesh_have_neither():
    with as_rank(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
        assert shard_groups_of(tensor) == ()
        for made in (sum_like(tensor, 0), sum_like(tensor, 1), stack_like(tensor, COUNT)):
            assert view_of(made).pieces == ()
        assert view_of(sum_like(tensor, 0)).shape == (1, 3)
        assert view_of(stack_like(tensor, COUNT)).shape == (COUNT, 4, 3)
