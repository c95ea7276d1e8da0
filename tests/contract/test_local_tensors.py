"""Local tensors, tensors made of them again, and their gradients; for every kind of tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.errors import GradientError, LayoutError
from shardopt.sharding.box import Box
from shardopt.sharding.gradients import GradientReader, local_gradients
from shardopt.sharding.view import assemble, local_tensors, view_of
from tests.contract.test_view_shards import ChunkShardingSpec, enumerable, sharded, wrapped
from tests.support.drawn import examples
from tests.support.fake_rank import as_rank, counting, redistributed

# torch says once that it does not check sparse tensors; the ones here are right.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

RANKS = 4
PARTS = [Box((0, 0), (5, 1)), Box((0, 1), (2, 2)), Box((2, 1), (3, 2))]


def dtensor(world, placements, mesh_shape=(RANKS,)):
    return distribute_tensor(world, init_device_mesh("cpu", mesh_shape), placements, src_data_rank=None)


def some_shards(world, rank):
    """Rank 1 has two of the parts, rank 2 one, the others none."""
    mine = {1: PARTS[:2], 2: PARTS[2:]}.get(rank, [])
    return wrapped(world, mine, init_device_mesh("cpu", (RANKS,)), [Shard(0)])


KINDS = {
    "plain": lambda world, rank: world.clone(),
    "parameter": lambda world, rank: torch.nn.Parameter(world.clone()),
    "Shard(0)": lambda world, rank: dtensor(world, [Shard(0)]),
    "Shard(1)": lambda world, rank: dtensor(world, [Shard(1)]),
    "Replicate": lambda world, rank: dtensor(world, [Replicate()]),
    "DTensor parameter": lambda world, rank: torch.nn.Parameter(dtensor(world, [Shard(0)])),
    "two dimensions": lambda world, rank: dtensor(world, [Shard(0), Shard(1)], (2, 2)),
    "strided": lambda world, rank: dtensor(world, [_StridedShard(0, split_factor=2), Shard(0)], (2, 2)),
    "several boxes": lambda world, rank: dtensor(world, [Shard(0), _StridedShard(0, split_factor=2)], (2, 2)),
    "ShardedTensor": lambda world, rank: sharded(world, enumerable(PARTS, [1, 1, 2])),
    "chunks": lambda world, rank: sharded(world, ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(RANKS)])),
    "wrapper": some_shards,
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
each_rank = pytest.mark.parametrize("rank", range(RANKS))


def world():
    return counting((5, 3)).to(torch.float32)


@each_kind
@each_rank
def test_local_tensors_are_the_tensors_themselves(make, rank):
    with as_rank(rank, RANKS):
        tensor = make(world(), rank)
        tensors, again = local_tensors(tensor), local_tensors(tensor)
        assert len(tensors) == len(again) and all(a is b for a, b in zip(tensors, again, strict=True))
        assert all(type(local) in (torch.Tensor, torch.nn.Parameter) and local.grad_fn is None for local in tensors)
        assert sum(local.numel() for local in tensors) == sum(piece.box.numel for piece in view_of(tensor).pieces)


@each_kind
@each_rank
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_assemble_is_the_reverse_of_local_tensors(make, rank, dtype):
    with as_rank(rank, RANKS):
        like = make(world(), rank)
        tensors = [torch.ones_like(local, dtype=dtype, requires_grad=False) for local in local_tensors(like)]
        with CommDebugMode() as communication:
            made = assemble(like, tensors)
        assert communication.get_total_counts() == 0
        assert all(a is b for a, b in zip(local_tensors(made), tensors, strict=True))
        have, want = view_of(made), view_of(like)
        assert have.layout == want.layout and have.shape == want.shape
        assert [piece.box for piece in have.pieces] == [piece.box for piece in want.pieces]
        assert all(piece.tensor.eq(1).all() for piece in have.pieces)
        if tensors:
            assert have.dtype == dtype
        if isinstance(like, DTensor):
            assert not made.requires_grad
            assert type(made) is DTensor
            assert made.shape == like.shape and made.stride() == like.stride()
            assert made.device_mesh == like.device_mesh and made.placements == like.placements
        else:
            assert type(made) is (torch.Tensor if isinstance(like, torch.nn.Parameter) else type(like))


@each_kind
@each_rank
def test_assembled_tensors_leave_like_untouched(make, rank):
    with as_rank(rank, RANKS):
        like = make(world(), rank)
        before = [(local, local.clone()) for local in local_tensors(like)]
        dtype = view_of(like).dtype
        assemble(like, [torch.zeros_like(local, dtype=torch.float64) for local in local_tensors(like)])
        assert view_of(like).dtype == dtype
        if isinstance(like, DTensor):
            assert like._spec.tensor_meta.dtype == like.dtype
        assert all(
            now is local and now.equal(copy) for now, (local, copy) in zip(local_tensors(like), before, strict=True)
        )


@each_kind
def test_assemble_refuses_other_shapes(make):
    with as_rank(1, RANKS):
        like = make(world(), 1)
        tensors = [torch.zeros(local.numel() + 1) for local in local_tensors(like)]
        for wrong in (tensors, [], [*local_tensors(like), torch.zeros(1)]):
            with pytest.raises(LayoutError, match="local tensors of shapes"):
                assemble(like, wrong)


def test_an_assembled_dtensor_works_in_torch():
    with as_rank(3, RANKS):
        param = torch.nn.Parameter(dtensor(world(), [Shard(0)]))
        moment = assemble(param, [torch.zeros_like(local_tensors(param)[0])])
        assert moment.shape == (5, 3) and moment._local_tensor.shape == (0, 3)  # 5 rows in chunks of 2
        with torch.no_grad():
            moment.add_(param)
            assert (moment * 2).shape == (5, 3)


def test_wrapper_alone_has_local_tensors_too():
    wrapper = LocalShardsWrapper([torch.zeros(2, 2), torch.zeros(2, 1)], [(0, 0), (0, 2)])
    tensors = [torch.ones(2, 2), torch.ones(2, 1)]
    made = assemble(wrapper, tensors)
    assert all(a is b for a, b in zip(local_tensors(made), tensors, strict=True))
    assert made.local_offsets() == wrapper.local_offsets()


@each_kind
@each_rank
def test_no_gradient_is_none_for_each_local_tensor(make, rank):
    with as_rank(rank, RANKS):
        param = make(world(), rank)
        assert local_gradients(param) == (None,) * len(local_tensors(param))


@settings(max_examples=examples(60))
@given(st.data())
def test_gradient_is_read_as_the_parameter_is_placed(data):
    """Whatever local placement the gradient has, each local tensor gets the gradient of its own elements."""
    rank = data.draw(st.integers(0, RANKS - 1))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2))
    choices = st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])
    as_fsdp = [_StridedShard(0, split_factor=2), Shard(0)]
    wanted = data.draw(st.one_of(st.lists(choices, min_size=2, max_size=2), st.just(as_fsdp)))
    with as_rank(rank, RANKS):
        mesh = init_device_mesh("cpu", (2, 2))
        param = torch.nn.Parameter(redistributed(counting(shape).float(), mesh, *wanted))
        # From replicas every placement is made locally, so that the made-up communication of these ranks is enough.
        same = data.draw(st.booleans())
        param.grad = redistributed(3 * counting(shape).float(), mesh, *(wanted if same else [Replicate()] * 2))
        with CommDebugMode() as communication:
            (local,) = local_gradients(param)
        assert communication.get_total_counts() == 0
        assert torch.equal(local, local_tensors(param)[0] * 3)
        if same or param.grad.placements == param.placements:
            assert local is param.grad._local_tensor
        assert not local.requires_grad


def test_partial_gradient_is_reduced():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None))
        param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with CommDebugMode() as communication:
            (gradient,) = local_gradients(param)
        assert communication.get_total_counts() == 1
        assert type(gradient) is torch.Tensor  # no unfinished collective


def test_gradient_that_is_still_on_its_way_is_waited_for():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None))
        param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()]).redistribute(
            placements=[Replicate()], async_op=True
        )
        assert type(param.grad._local_tensor) is AsyncCollectiveTensor
        (gradient,) = local_gradients(param)
        assert type(gradient) is torch.Tensor


def grad_of(param, gradient):
    param.grad = gradient
    return param


@pytest.fixture
def rank_0():
    with as_rank(0, RANKS):
        yield init_device_mesh("cpu", (RANKS,))


def test_gradients_that_do_not_fit_are_refused(rank_0):
    mesh = rank_0
    param = torch.nn.Parameter(distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)], src_data_rank=None))
    other_mesh = DeviceMesh("cpu", [0, 1])
    uneven = DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)], shape=torch.Size([6, 2]), stride=(2, 1))
    sparse = torch.sparse_coo_tensor([[0], [1]], [1.0], (6, 2))
    refused = {
        "wrap it": torch.ones(6, 2),
        "parameter's mesh": distribute_tensor(torch.ones(6, 2), other_mesh, [Shard(0)], src_data_rank=None),
        "shape and stride": uneven,
        "sparse": DTensor(sparse, distribute_tensor(torch.ones(6, 2), mesh, [Replicate()])._spec, requires_grad=False),
    }
    for remedy, gradient in refused.items():
        with pytest.raises(GradientError) as caught:
            local_gradients(grad_of(param, gradient))
        (problem,) = caught.value.problems
        assert remedy in problem.remedy
        assert "(6, 2)" in problem.found and "Shard(dim=0)" in problem.required


def test_gradient_of_another_global_shape_is_refused(rank_0):
    param = torch.nn.Parameter(distribute_tensor(torch.ones(6, 2), rank_0, [Shard(0)], src_data_rank=None))
    param.grad = distribute_tensor(torch.ones(6, 2), rank_0, [Shard(0)], src_data_rank=None)
    param.data = distribute_tensor(torch.ones(8, 2), rank_0, [Shard(0)], src_data_rank=None)
    with pytest.raises(GradientError, match="global shape"):
        local_gradients(param)


def test_dtensor_gradient_of_a_plain_parameter_is_refused(rank_0):
    param = torch.nn.Parameter(torch.ones(6))
    param.grad = distribute_tensor(torch.ones(6), rank_0, [Replicate()], src_data_rank=None)
    with pytest.raises(GradientError, match="plain gradient"):
        local_gradients(param)


def test_sparse_gradients_are_handed_through(rank_0):
    sparse = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (2, 2))
    plain = grad_of(torch.nn.Parameter(torch.ones(2, 2)), sparse)
    assert local_gradients(plain)[0] is sparse
    rows = torch.nn.Parameter(distribute_tensor(torch.ones(8, 2), rank_0, [Shard(0)], src_data_rank=None))
    rows.grad = DTensor(sparse, rows._spec, requires_grad=False)
    (gradient,) = local_gradients(rows)
    assert gradient.is_sparse and gradient.shape == local_tensors(rows)[0].shape


def test_a_reader_gives_what_plainly_lies_there_and_nothing_else(rank_0):
    def placed(tensor, placement=None):
        return distribute_tensor(tensor, rank_0, [placement or Shard(0)], src_data_rank=None)

    rows, plain = torch.nn.Parameter(placed(torch.ones(8, 2))), torch.nn.Parameter(torch.ones(2, 2))
    read_rows, read_plain = GradientReader(rows), GradientReader(plain)
    assert read_rows() is None and read_plain() is None
    for _ in range(2):  # a new gradient in every step
        rows.grad, plain.grad = placed(torch.rand(8, 2)), torch.rand(2, 2)
        for _ in range(2):
            assert read_rows() is local_gradients(rows)[0]
            assert read_plain() is plain.grad
    sparse = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (2, 2))
    plain.grad, rows.grad = sparse, DTensor(sparse, rows._spec, requires_grad=False)
    assert read_rows() is None and read_plain() is None
    for other in (placed(torch.ones(8, 2), Shard(1)), placed(torch.ones(8, 2), Replicate())):
        rows.grad = None
        rows.grad = other
        assert read_rows() is None


def test_a_reader_notices_a_parameter_that_is_placed_in_another_way(rank_0):
    """Even where the local shapes are the same."""
    placed = [distribute_tensor(torch.ones(1, 1), rank_0, [Shard(dim)], src_data_rank=None) for dim in (0, 1)]
    param, gradient = torch.nn.Parameter(placed[0]), placed[0].detach()
    read = GradientReader(param)
    param.grad = gradient
    assert read() is not None
    torch.utils.swap_tensors(param, torch.nn.Parameter(placed[1]))
    param.grad = gradient
    assert read() is None


@pytest.mark.parametrize("kind", ["ShardedTensor", "wrapper"])
def test_a_reader_leaves_shards_to_others(kind):
    with as_rank(1, RANKS):
        param = KINDS[kind](world(), 1)
        for local in local_tensors(param):
            local.grad = torch.ones_like(local)
        assert GradientReader(param)() is None
        assert all(gradient is not None for gradient in local_gradients(param))


@pytest.mark.parametrize("kind", ["ShardedTensor", "wrapper"])
def test_shards_carry_their_own_gradients(kind):
    with as_rank(1, RANKS):
        param = KINDS[kind](world(), 1)
        first, second = local_tensors(param)
        first.requires_grad_()
        first.sum().backward()
        assert local_gradients(param) == (first.grad, None)
        assert second.grad is None and first.grad is not None


def test_dense_gradient_around_a_wrapper_is_taken_apart():
    with as_rank(1, RANKS):
        param = some_shards(world(), 1)
        param.grad = assemble(param, [torch.ones_like(local) for local in local_tensors(param)])
        assert [local.shape for local in local_gradients(param)] == [local.shape for local in local_tensors(param)]
