"""ShardedTensor and LocalShardsWrapper on every rank: shards of any size and number, also none."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from shardopt.errors import LayoutError
from shardopt.sharding.box import Box
from shardopt.sharding.view import view_of
from tests.support.boxes import partitions
from tests.support.drawn import examples
from tests.support.fake_rank import as_rank, check_views, counting
from tests.support.placement import at

RANKS = 4


def sharded(world, spec):
    """A ShardedTensor of `world`, filled without communication."""
    made = sharded_tensor.empty(spec, *world.shape, dtype=world.dtype)
    for shard in made.local_shards():
        box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        if box.numel:
            shard.tensor.copy_(world[at(box)])
    return made


def enumerable(parts, holders):
    return EnumerableShardingSpec(
        [
            ShardMetadata(list(part.offsets), list(part.sizes), f"rank:{rank}/cpu")
            for part, rank in zip(parts, holders, strict=True)
        ]
    )


def wrapped(world, shards, mesh, placements):
    """A DTensor around the local shards (boxes of `world`) of this rank."""
    wrapper = LocalShardsWrapper([world[at(box)].clone() for box in shards], [box.offsets for box in shards])
    return DTensor.from_local(wrapper, mesh, placements, shape=world.shape, stride=world.stride())


def on_all_ranks(make, world_size=RANKS):
    views = {}
    for rank in range(world_size):
        with as_rank(rank, world_size):
            views[rank] = view_of(make(rank))
    return views


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple).flatmap(partitions), st.data())
def test_sharded_tensor_with_any_shards_on_any_ranks(partition, data):
    shape, parts = partition
    holders = data.draw(st.lists(st.integers(0, RANKS - 1), min_size=len(parts), max_size=len(parts)))
    world = counting(shape)
    views = on_all_ranks(lambda rank: sharded(world, enumerable(parts, holders)))
    check_views(views, world)
    assert len({view.layout for view in views.values()}) == 1 and not views[0].layout.local


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.data())
def test_sharded_tensor_in_chunks(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    ranks = data.draw(st.permutations(range(RANKS)))
    world = counting(shape)
    spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])
    check_views(on_all_ranks(lambda rank: sharded(world, copy.deepcopy(spec))), world)


def test_an_empty_chunk_past_the_end_is_no_box():
    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
    with as_rank(3, 4):
        made = sharded(counting((5, 2)), spec)
        assert made.local_shards()[0].metadata.shard_offsets == [6, 0]  # of 5 rows
        view = view_of(made)
    assert view.pieces == ()
    assert view.layout.holders == ((0,), (1,), (2,))


@pytest.fixture
def table():
    """Rank 1 of 2: a table of 4 × 4, of which the rank has the right half and the first two columns of row 3."""
    parts = [Box((0, 0), (3, 2)), Box((3, 0), (1, 2)), Box((0, 2), (4, 2))]
    with as_rank(1, 2):
        yield sharded(counting((4, 4)), enumerable(parts, [0, 1, 1]))


def problem_of(tensor, key="table.weight"):
    with pytest.raises(LayoutError) as caught:
        view_of(tensor, key)
    (problem,) = caught.value.problems
    assert problem.key == key
    return problem


def test_sharded_tensor_without_a_shard_that_its_metadata_gives_it(table):
    del table.local_shards()[0]
    problem = problem_of(table)
    assert "[0:4, 2:4]" in problem.found and "[3:4, 0:2]" in problem.required


def test_sharded_tensor_with_a_shard_that_is_not_in_its_metadata(table):
    shard = table.local_shards()[0]
    shard.metadata = ShardMetadata([0, 0], [1, 2], "rank:1/cpu")
    shard.tensor = shard.tensor.clone()
    assert "[0:1, 0:2]" in problem_of(table).found


def test_sharded_tensor_with_a_shard_of_another_size(table):
    table.local_shards()[1].tensor = torch.zeros(4, 1, dtype=torch.int64)
    problem = problem_of(table)
    assert "(4, 1)" in problem.found and "(4, 2)" in problem.required


def test_sharded_tensor_with_a_shard_of_another_type(table):
    table.local_shards()[1].tensor = table.local_shards()[1].tensor.float()
    problem = problem_of(table)
    assert "float32" in problem.found and "int64" in problem.required


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda metadata: metadata.shards_metadata.pop(0), "no box holds offsets (0, 0) sizes (3, 2)"),
        (lambda metadata: metadata.shards_metadata[0].shard_sizes.__setitem__(0, 4), "both hold"),
        (lambda metadata: metadata.shards_metadata[0].shard_offsets.__setitem__(0, 3), "beyond"),
    ],
)
def test_sharded_tensor_whose_metadata_does_not_cover_it(table, change, fragment):
    change(table.metadata())
    assert fragment in problem_of(table).found


@pytest.mark.parametrize("placement", ["cpu", "trainer0/cpu", None])
def test_sharded_tensor_on_ranks_that_are_not_named(table, placement):
    table.metadata().shards_metadata[0].placement = ShardMetadata([0], [1], placement).placement
    assert "rank" in problem_of(table).remedy


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple).flatmap(partitions), st.data())
def test_wrapper_with_any_shards_on_any_ranks(partition, data):
    shape, parts = partition
    holders = data.draw(st.lists(st.integers(0, RANKS - 1), min_size=len(parts), max_size=len(parts)))
    world = counting(shape)

    def make(rank):
        mine = [part for part, holder in zip(parts, holders, strict=True) if holder == rank]
        return wrapped(world, mine, init_device_mesh("cpu", (RANKS,)), [Shard(0)])

    views = {}
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            tensor = make(rank)
            if tensor._local_tensor.local_shards():
                views[rank] = view_of(tensor)
            else:
                view = view_of(tensor)
                assert view.pieces == view.layout.boxes == () and view.layout.local
    assert all(view.layout.local for view in views.values())
    assert all(view.layout.boxes == tuple(piece.box for piece in view.pieces) for view in views.values())
    check_views(views, world)


def test_wrapper_replicated_over_one_mesh_dimension():
    world = counting((4, 6))
    columns = [Box((0, 0), (4, 2)), Box((0, 2), (4, 4))]

    def make(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        return wrapped(world, [columns[mesh.get_coordinate()[1]]], mesh, [Replicate(), Shard(1)])

    check_views(on_all_ranks(make), world)


def test_wrapper_around_a_tensor_without_elements():
    world = counting((0, 4))
    views = on_all_ranks(
        lambda rank: wrapped(world, [Box((0, 0), (0, 4))], init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    )
    check_views(views, world)


def a_wrapper(offsets=((0, 0),), sizes=((2, 2),), placement=None):
    mesh = init_device_mesh("cpu", (1,))
    local = LocalShardsWrapper([torch.zeros(size) for size in sizes], list(offsets))
    return DTensor.from_local(local, mesh, [placement or Shard(0)], shape=torch.Size([4, 4]), stride=(4, 1))


@pytest.mark.parametrize(
    ("made", "fragment"),
    [
        ({"offsets": [(0, 0), (1, 1)], "sizes": [(2, 2), (2, 2)]}, "both hold offsets (1, 1) sizes (1, 1)"),
        ({"offsets": [(0, 0), (0, 0)], "sizes": [(2, 2), (2, 2)]}, "both hold offsets (0, 0) sizes (2, 2)"),
        ({"offsets": [(3, 0)], "sizes": [(2, 2)]}, "beyond shape (4, 4)"),
        ({"placement": Partial()}, "Partial"),
    ],
)
def test_wrapper_that_cannot_be_right(made, fragment):
    with as_rank(0, 1):
        assert fragment in problem_of(a_wrapper(**made)).found


def test_wrapper_whose_shard_was_replaced():
    with as_rank(0, 1):
        made = a_wrapper()
        made._local_tensor.local_shards()[0] = torch.zeros(3, 2)
        problem = problem_of(made)
        assert "(3, 2)" in problem.found and "(2, 2)" in problem.required


def test_wrapper_outside_of_a_dtensor_has_no_global_shape():
    assert "LocalShardsWrapper" in problem_of(LocalShardsWrapper([torch.zeros(2, 2)], [(0, 0)])).found


class TheirWrapper(torch.Tensor):
    """A class with the methods of LocalShardsWrapper that does not descend from it, as torchrec's."""

    @staticmethod
    def __new__(cls, local_shards, local_offsets):
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size([0]))
        self.shards, self.offsets = local_shards, local_offsets
        return self

    def local_shards(self):
        return self.shards

    def local_offsets(self):
        return self.offsets

    def local_sizes(self):
        return [shard.shape for shard in self.shards]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_a_copy_of_the_wrapper_is_one_too():
    with as_rank(0, 1):
        made = a_wrapper()
        made._local_tensor = TheirWrapper([torch.ones(2, 2), torch.ones(2, 1)], [(0, 0), (0, 2)])
        view = view_of(made)
    assert [piece.box for piece in view.pieces] == [Box((0, 0), (2, 2)), Box((0, 2), (2, 1))]
