"""DTensors as torch itself makes them, on every rank: what a rank holds is what the boxes say.

torch makes a DTensor of one global tensor in two ways. `redistribute` from replicas makes every placement here, and is
the oracle. `distribute_tensor(..., src_data_rank=None)` goes through the placements from left to right, and differs
from it where `_StridedShard` stands for an order of splits and sizes do not divide evenly; then `full_tensor` does not
give back what was distributed. The last tests pin this down.
"""

import gc
import weakref
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from shardopt.errors import LayoutError
from shardopt.sharding.box import Box
from shardopt.sharding.mesh import Split, differ_unseen, in_order, runs_of
from shardopt.sharding.view import view_of
from tests.support.drawn import examples
from tests.support.fake_rank import as_rank, check_views, counting, redistributed
from tests.support.placement import at


@st.composite
def cases(draw, mesh_dims=3, most_ranks=12):
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=mesh_dims).map(tuple))
    assume(prod(mesh_shape) <= most_ranks)
    shape = draw(st.lists(st.integers(0, 11), max_size=3).map(tuple))
    dims = st.integers(-len(shape), len(shape) - 1)
    one = st.just(Replicate())
    if shape:
        factors = st.sampled_from(sorted({2, 3, *(prod(mesh_shape[i:]) for i in range(len(mesh_shape)))}))
        strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, factors)
        one = st.one_of(one, st.builds(Shard, dims), st.builds(Shard, dims), strided)
    placements = draw(st.lists(one, min_size=len(mesh_shape), max_size=len(mesh_shape)).map(tuple))
    return shape, mesh_shape, placements


def views_on_all_ranks(make, mesh_shape, world_size=None, ranks=None):
    world_size = world_size or prod(mesh_shape)
    views = {}
    for rank in range(world_size):
        with as_rank(rank, world_size):
            mesh = init_device_mesh("cpu", mesh_shape) if ranks is None else DeviceMesh("cpu", ranks)
            views[rank] = view_of(make(mesh))
    return views


@settings(max_examples=examples(150))
@given(cases())
def test_every_placement_that_torch_redistributes_to(case):
    shape, mesh_shape, placements = case
    assume(not cannot_be_told(shape, mesh_shape, placements))
    world = counting(shape)
    views = views_on_all_ranks(lambda mesh: redistributed(world, mesh, *placements), mesh_shape)
    check_views(views, world)
    assert len({view.layout for view in views.values()}) == 1 and not views[0].layout.local


@settings(max_examples=examples(100))
@given(cases())
def test_every_placement_with_one_meaning_that_torch_distributes(case):
    shape, mesh_shape, placements = case
    assume(not has_two_readings(shape, mesh_shape, placements))
    world = counting(shape)
    views = views_on_all_ranks(lambda m: distribute_tensor(world, m, placements, src_data_rank=None), mesh_shape)
    check_views(views, world)


def splits_of(shape, placements):
    return tuple(
        Split(mesh_dim, placement.dim % len(shape), getattr(placement, "split_factor", 1))
        for mesh_dim, placement in enumerate(placements)
        if not isinstance(placement, Replicate)
    )


def cannot_be_told(shape, mesh_shape, placements):
    """Whether splits in the order that a _StridedShard stands for lie otherwise than from left to right, and no size
    of a local tensor shows it."""
    splits = splits_of(shape, placements)
    ordered = in_order(splits, mesh_shape) or splits
    both = [
        tuple(runs_of(shape, mesh_shape, each, coordinate) for coordinate in product(*map(range, mesh_shape)))
        for each in (splits, ordered)
    ]
    sizes = [[[sum(end - start for start, end in dim) for dim in runs] for runs in each] for each in both]
    return prod(shape) > 0 and both[0] != both[1] and sizes[0] == sizes[1]


def has_two_readings(shape, mesh_shape, placements):
    """Whether a _StridedShard stands for an order of splits, and those do not divide evenly."""
    splits = splits_of(shape, placements)
    ordered = in_order(splits, mesh_shape)
    uneven = any(
        size % prod(mesh_shape[split.mesh_dim] for split in splits if split.tensor_dim == dim)
        for dim, size in enumerate(shape)
    )
    return any(split.factor > 1 for split in splits) and ordered is not None and uneven


@settings(max_examples=examples(30))
@given(cases(mesh_dims=2, most_ranks=6), st.randoms())
def test_ranks_outside_of_the_mesh_hold_nothing_and_know_the_layout(case, random):
    shape, mesh_shape, placements = case
    ranks = torch.tensor(sorted(random.sample(range(8), prod(mesh_shape)))).reshape(mesh_shape)
    world = counting(shape)
    views = views_on_all_ranks(lambda mesh: redistributed(world, mesh, *placements), mesh_shape, 8, ranks)
    check_views(views, world)
    outside = [views[rank] for rank in range(8) if rank not in ranks]
    assert outside and all(view.pieces == () for view in outside)
    assert len({view.layout for view in views.values()}) == 1


@settings(max_examples=20)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(2, 3), st.sampled_from([Shard(0), Replicate()]))
def test_meshes_cut_out_of_a_larger_one_are_joined(size, dp, tp, placement):
    world = counting((size, 2))
    views = {}
    for rank in range(dp * tp):
        with as_rank(rank, dp * tp):
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))["dp"]
            views[rank] = view_of(distribute_tensor(world, mesh, [placement], src_data_rank=None))
    # A rank knows its own cut only. Whether the other cuts have the tensor too, each rank can but ask.
    assert all(view.layout.local for view in views.values())
    assert {tp * i for i in range(dp)} >= {rank for ranks in views[0].layout.holders for rank in ranks}
    check_views(views, world)


def test_fsdp_over_tensor_parallel_is_one_box_a_rank_not_in_mesh_order():
    views = views_on_all_ranks(
        lambda m: redistributed(counting((8, 2)), m, _StridedShard(0, split_factor=2), Shard(0)),
        (2, 2),
    )
    assert [view.pieces[0].box.offsets for view in views.values()] == [(0, 0), (4, 0), (2, 0), (6, 0)]
    assert views[0].layout.holders == ((0,), (2,), (1,), (3,))


def test_a_strided_shard_inside_a_shard_is_several_boxes_a_rank():
    # DCP saves and loads wrong rows here: it takes the local tensor for one box.
    views = views_on_all_ranks(
        lambda m: distribute_tensor(
            counting((8,)), m, [Shard(0), _StridedShard(0, split_factor=2)], src_data_rank=None
        ),
        (2, 2),
    )
    assert [piece.box for piece in views[1].pieces] == [Box((1,), (1,)), Box((3,), (1,))]
    assert [piece.tensor.tolist() for piece in views[1].pieces] == [[1], [3]]
    local = views[1].pieces[0].tensor
    assert local.untyped_storage().data_ptr() == views[1].pieces[1].tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("rank", range(8))
def test_uneven_fsdp_over_tensor_parallel_as_fully_shard_lays_it(rank):
    # 17 rows, first over 2 tensor parallel ranks and then over 4 data parallel ones, as fully_shard does. From left to
    # right the last data parallel rank would hold (1, 1) rows of what is really (0, 2).
    with as_rank(rank, 8):
        mesh = init_device_mesh("cpu", (4, 2))
        dp, tp = mesh.get_coordinate()
        mine = counting((17,)).tensor_split([9])[tp]
        mine = [*mine.chunk(4), mine[:0]][dp] if tp == 0 else mine.chunk(4)[dp]
        made = DTensor.from_local(
            mine, mesh, [_StridedShard(0, split_factor=2), Shard(0)], shape=torch.Size([17]), stride=(1,)
        )
        view = view_of(made)
    assert [piece.tensor.tolist() for piece in view.pieces] == [mine.tolist()] * bool(mine.numel())
    assert [counting((17,))[at(piece.box)].tolist() for piece in view.pieces] == [mine.tolist()] * bool(mine.numel())


@pytest.mark.parametrize("shape", [(5, 1), (2, 1), (1, 1), (5, 3)])
def test_fully_shard_over_ranks_that_hold_no_columns(shape):
    """Their local tensors have no elements, in a shape of torch's choosing."""

    def make(mesh):
        layer = torch.nn.Linear(shape[1], shape[0], bias=False)
        whole = distribute_tensor(counting(shape).float(), mesh["tp"], [Shard(1)], src_data_rank=None)
        layer.weight = torch.nn.Parameter(whole)
        return fully_shard(layer, mesh=mesh["dp"]).weight

    views = {}
    for rank in range(4):
        with as_rank(rank, 4):
            views[rank] = view_of(make(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))))
    check_views(views, counting(shape).float())


def test_the_other_reading_is_refused_where_its_sizes_show():
    views, refused = {}, {}
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (4, 2))
            placements = [_StridedShard(0, split_factor=2), Shard(0)]
            made = distribute_tensor(counting((17, 3)), mesh, placements, src_data_rank=None)
            try:
                views[rank] = view_of(made, "embedding.weight")
            except LayoutError as error:
                (refused[rank],) = error.problems
    assert list(refused) == [6, 7]
    assert refused[6].key == "embedding.weight"
    assert "(1, 3) on rank 6" in refused[6].found
    assert refused[6].required.startswith("(0, 3)")
    for view in views.values():
        assert all(torch.equal(piece.tensor, counting((17, 3))[at(piece.box)]) for piece in view.pieces)


THREE_SPLITS = [
    ((2, 3, 2), (6, 2, 1)),  # fully_shard over the first dimension of a mesh, and others over the next two
    ((2, 2, 3), (6, 1, 1)),
    ((3, 2, 2), (4, 1, 1)),
]


@pytest.mark.parametrize("columns", [None, 4])
@pytest.mark.parametrize(("mesh_shape", "factors"), THREE_SPLITS, ids=str)
@pytest.mark.parametrize("size", [8, 9, pytest.param(22, marks=pytest.mark.exhaustive)])
def test_what_lies_there_is_never_told_wrongly(mesh_shape, factors, size, columns):
    """Of 9 rows on 2 × 3 × 2 ranks distribute_tensor and redistribute give four ranks others, but all as many."""
    shape = (size,) if columns is None else (size, columns)
    world = counting(shape)
    placements = [_StridedShard(0, split_factor=factor) if factor > 1 else Shard(0) for factor in factors]
    undecided = cannot_be_told(shape, mesh_shape, placements)
    splits = splits_of(shape, placements)
    assert differ_unseen(shape, mesh_shape, splits, in_order(splits, mesh_shape)) == undecided
    for make in (lambda mesh: distribute_tensor(world, mesh, placements, src_data_rank=None), None):
        views, refused = {}, 0
        for rank in range(prod(mesh_shape)):
            with as_rank(rank, prod(mesh_shape)):
                mesh = init_device_mesh("cpu", mesh_shape)
                try:
                    views[rank] = view_of((make or (lambda mesh: redistributed(world, mesh, *placements)))(mesh), "w")
                except LayoutError as error:
                    refused += 1
                    assert error.problems[0].key == "w"
        if undecided:
            assert refused == prod(mesh_shape)
        elif make is None:
            check_views(views, world)
        elif not refused:  # where a rank refuses, nothing is done with what the others see
            assert all(torch.equal(p.tensor, world[at(p.box)]) for view in views.values() for p in view.pieces)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2), (2, 3), (2, 2, 2), (2, 3, 2), (2, 2, 3), (3, 2, 2)], ids=str)
def test_no_tensor_that_torch_distributes_is_told_wrongly(mesh_shape):
    """Every placement of a dimension, by the indices that it gives to each rank."""
    factors = sorted({0, 1, 2, 3, 4, 6, *(prod(mesh_shape[i:]) for i in range(len(mesh_shape)))})
    for chosen in product(factors, repeat=len(mesh_shape)):
        splits = tuple(Split(mesh_dim, 0, factor) for mesh_dim, factor in enumerate(chosen) if factor)
        ordered = in_order(splits, mesh_shape) or splits
        for size in range(1, 30):
            both = [
                [runs_of((size,), mesh_shape, each, coordinate)[0] for coordinate in product(*map(range, mesh_shape))]
                for each in (splits, ordered)
            ]
            lengths = [[sum(end - start for start, end in runs) for runs in each] for each in both]
            unseen = both[0] != both[1] and lengths[0] == lengths[1]
            assert differ_unseen((size,), mesh_shape, splits, ordered) == unseen, (chosen, size)


@pytest.mark.parametrize(
    ("local", "placements", "shape", "rank"),
    [
        ((3,), [Shard(0)], (8,), 0),  # what from_local makes of uneven shards that it is not told the shape of
        ((5,), [Shard(0)], (8,), 1),
        ((4,), [Replicate()], (8,), 0),
        ((2, 2), [Shard(0)], (4, 4), 0),
        ((1, 4), [Shard(0)], (1, 4), 1),
    ],
)
def test_local_sizes_that_do_not_follow_the_placements_are_refused(local, placements, shape, rank):
    with as_rank(rank, 2):
        mesh = init_device_mesh("cpu", (2,))
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(torch.zeros(local), mesh, placements, shape=torch.Size(shape), stride=stride)
        with pytest.raises(LayoutError) as caught:
            view_of(made, "w")
    (problem,) = caught.value.problems
    assert problem.key == "w" and f"{local} on rank {rank}" in problem.found and "from_local" in problem.remedy


class Reversed(Shard):
    """A placement of somebody else's, that torch takes for a Shard."""


@pytest.mark.parametrize(
    "placements",
    [
        [Partial(), Replicate()],
        [Shard(0), Partial("avg")],
        [Partial("max"), Partial("max")],
        [Replicate(), Reversed(0)],
        [Replicate(), Placement()],
        [Replicate(), Shard(1)],
    ],
)
def test_placements_that_do_not_say_who_holds_what_are_refused(placements):
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        made = redistributed(torch.zeros(4), mesh, Replicate(), Replicate())
        made._spec.placements = tuple(placements)
        with pytest.raises(LayoutError, match=r"w\.x") as caught:
            view_of(made, "w.x")
    (problem,) = caught.value.problems
    assert problem.key == "w.x" and str(tuple(placements)) in problem.found


def test_zero_dimensional_tensors_cannot_be_sharded_and_are_replicated():
    views = views_on_all_ranks(lambda mesh: redistributed(torch.tensor(7), mesh, Replicate(), Replicate()), (2, 2))
    check_views(views, torch.tensor(7))
    with as_rank(0, 2):
        made = redistributed(torch.tensor(7), init_device_mesh("cpu", (2,)), Replicate())
        made._spec.placements = (Shard(0),)
        with pytest.raises(LayoutError):
            view_of(made)


def test_pieces_share_memory_and_version_with_the_parameter():
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        param = torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None))
        (piece,) = view_of(param).pieces
        assert piece.tensor.data_ptr() == param._local_tensor.data_ptr()
        before = param._local_tensor._version
        piece.tensor.fill_(3.0)
        assert param._local_tensor._version == before + 1  # who watches the version sees writes through the view
        assert param._local_tensor.eq(3.0).all()


def test_the_type_in_memory_is_told():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        made = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        made._local_tensor = made._local_tensor.to(torch.bfloat16)
        assert view_of(made).dtype == torch.bfloat16


class Recorder(TorchDispatchMode):
    """Records which operations run on tensors of more than a few elements."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() > 100:
            self.ran.add(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), _StridedShard(0, split_factor=3)],
        [Replicate(), Shard(0)],
    ],
)
def test_nothing_is_computed_with_tensors(placements):
    with as_rank(3, 8):
        mesh = init_device_mesh("cpu", (4, 2))
        world = torch.empty(5_000_008, 2, device="meta")
        made = distribute_tensor(world, mesh, placements, src_data_rank=None)
        with Recorder() as recorder:
            view = view_of(made.requires_grad_())
        assert sum(piece.box.numel for piece in view.pieces) == made._local_tensor.numel()
        assert recorder.ran <= {"detach", "slice"}


def test_equal_placements_and_shapes_share_one_layout():
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        placements = [Shard(0), Replicate()]
        views = [view_of(distribute_tensor(torch.zeros(6, 2), mesh, placements, src_data_rank=None)) for _ in range(3)]
        assert len({id(view.layout) for view in views}) == 1
        other = view_of(distribute_tensor(torch.zeros(6, 2), mesh, [Replicate(), Shard(0)], src_data_rank=None))
        assert other.layout != views[0].layout


def test_shards_over_ranks_that_do_not_ascend_are_refused():
    """As torch's collectives take them in another order than what a rank cuts by itself."""
    whole = torch.zeros(8, 8)
    for ranks, shards, replicas in (
        ([1, 0], [[Shard(0)]], [[Replicate()]]),
        ([[2, 0], [3, 1]], [[Replicate(), Shard(0)], [Shard(1), Shard(0)]], [[Shard(0), Replicate()]]),
        ([[0, 3], [2, 1]], [[Shard(0), Replicate()], [Replicate(), Shard(0)]], [[Replicate(), Replicate()]]),
    ):
        with as_rank(0, 4):
            mesh = DeviceMesh("cpu", ranks)
            for placements in replicas:
                view_of(distribute_tensor(whole, mesh, placements, src_data_rank=None))
            for placements in shards:
                with pytest.raises(
                    LayoutError, match=r"follows rank \d along dimension [01]; required ranks that ascend"
                ):
                    view_of(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def test_a_mesh_is_not_kept_alive():
    with as_rank(0, 7):
        mesh = DeviceMesh("cpu", [0, 3, 5])  # equal to no mesh of another test, which might be known already
        view = view_of(distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None))
        gone = weakref.ref(mesh)
        del mesh
        gc.collect()
    # Its process groups would outlive destroy_process_group, and some backends abort the process over that.
    assert gone() is None and view.layout.holders == ((0,), (3,))


def test_meshes_that_compare_equal_are_told_apart_by_rank():
    meshes, views = [], []
    for rank in range(4):
        with as_rank(rank, 4):
            # torch compares cuts through one mesh by what was cut, not by which cut it is.
            meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])
            views.append(view_of(distribute_tensor(torch.zeros(4), meshes[-1], [Shard(0)], src_data_rank=None)))
    assert len(set(meshes)) == 1
    assert [view.layout.holders for view in views] == [((0,), (2,)), ((1,), (3,))] * 2


def test_a_local_tensor_that_is_still_on_its_way_is_waited_for():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        made = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        made = made.redistribute(placements=[Replicate()], async_op=True)
        assert type(made._local_tensor) is AsyncCollectiveTensor
        (piece,) = view_of(made).pieces
        assert type(piece.tensor) is torch.Tensor


def test_all_two_dimensional_orders_on_a_small_mesh():
    """Not left to chance: every pair of placements on a 3 × 2 mesh, for sizes below, at and above the mesh's."""
    choices = [Replicate(), Shard(0), Shard(1), *(_StridedShard(0, split_factor=f) for f in (2, 3))]
    for shape in [(0, 3), (1, 5), (5, 1), (7, 3), (12, 2)]:
        world = counting(shape)
        views = {placements: {} for placements in product(choices, choices)}
        for rank in range(6):
            with as_rank(rank, 6):
                mesh = init_device_mesh("cpu", (3, 2))
                for placements, by_rank in views.items():
                    by_rank[rank] = view_of(redistributed(world, mesh, *placements))
        for by_rank in views.values():
            check_views(by_rank, world)
