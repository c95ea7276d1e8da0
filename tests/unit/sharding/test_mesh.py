"""Splits over a mesh, against lists of indices that are chunked one after the other."""

import tracemalloc
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.sharding.box import Box, cover_faults, whole
from shardopt.sharding.mesh import Mesh, Split, boxes_of, in_order, mesh_layout, runs_of


def chunk(indices, count):
    """torch.chunk, with empty chunks for those that get none."""
    size = -(-len(indices) // count)
    return [indices[i * size : (i + 1) * size] for i in range(count)]


def share(indices, count, factor, index):
    return [element for part in chunk(indices, factor) for element in chunk(part, count)[index]]


def held_by(shape, mesh_shape, splits, coordinate):
    """The slow, obvious meaning: for each dimension all indices that the rank at this coordinate gets."""
    dims = [list(range(size)) for size in shape]
    for split in splits:
        count, index = mesh_shape[split.mesh_dim], coordinate[split.mesh_dim]
        dims[split.tensor_dim] = share(dims[split.tensor_dim], count, split.factor, index)
    return dims


@st.composite
def cases(draw):
    factors = st.sampled_from([1, 1, 1, 2, 3, 4, 6])
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    shape = draw(st.lists(st.integers(0, 13), max_size=3).map(tuple))
    order = draw(st.permutations(range(len(mesh_shape))))
    chosen = order[: draw(st.integers(0, len(order)))] if shape else []
    splits = tuple(Split(mesh_dim, draw(st.integers(0, len(shape) - 1)), draw(factors)) for mesh_dim in chosen)
    return shape, mesh_shape, splits


@given(cases(), st.randoms())
def test_every_rank_holds_what_chunking_lists_gives_it(case, random):
    shape, mesh_shape, splits = case
    ranks = random.sample(range(100), prod(mesh_shape))
    layout = mesh_layout(shape, Mesh(mesh_shape, tuple(ranks)), splits)
    holders = {}
    for rank, coordinate in zip(ranks, product(*map(range, mesh_shape)), strict=True):
        runs = runs_of(shape, mesh_shape, splits, coordinate)
        dims = held_by(shape, mesh_shape, splits, coordinate)
        assert [[i for start, end in dim for i in range(start, end)] for dim in runs] == dims
        assert all(a_end < b_start for dim in runs for (_, a_end), (b_start, _) in pairwise(dim))
        local_shape = [len(dim) for dim in dims]
        slots = boxes_of(runs)
        assert prod(shape) == 0 or cover_faults(local_shape, [slot for _, slot in slots]) == []
        for box, slot in slots:
            assert box.sizes == slot.sizes
            for index in product(*(range(start, end) for start, end in zip(slot.offsets, slot.ends, strict=True))):
                here = tuple(i - at + offset for i, at, offset in zip(index, slot.offsets, box.offsets, strict=True))
                assert here == tuple(dim[i] for dim, i in zip(dims, index, strict=True))
            if box.numel:
                holders.setdefault(box, []).append(rank)
    assert cover_faults(shape, layout.boxes) == []
    if prod(shape):
        assert dict(zip(layout.boxes, layout.holders, strict=True)) == {b: tuple(sorted(r)) for b, r in holders.items()}
        assert list(layout.boxes) == sorted(holders, key=lambda box: box.offsets)
    else:
        assert layout.boxes == (whole(shape),) and layout.holders == (tuple(sorted(ranks)),)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
        lambda mesh: st.tuples(st.just(tuple(mesh)), st.permutations(range(len(mesh))), st.integers(1, 3))
    )
)
def test_factors_stand_for_an_order(case):
    mesh_shape, order, times = case
    # A factor is the number of parts that later mesh dimensions had made when this one was split.
    made = {dim: prod(mesh_shape[d] for d in order[: order.index(dim)] if d > dim) for dim in order}
    splits = tuple(Split(dim, 0, made[dim]) for dim in range(len(mesh_shape)))
    ordered = in_order(splits, mesh_shape)
    assert ordered is not None
    assert all(split.factor == 1 for split in ordered)
    size = times * prod(mesh_shape)  # divides evenly: both readings are one
    for coordinate in product(*map(range, mesh_shape)):
        expected = runs_of((size,), mesh_shape, tuple(Split(dim, 0) for dim in order), coordinate)
        assert runs_of((size,), mesh_shape, ordered, coordinate) == expected
        assert runs_of((size,), mesh_shape, splits, coordinate) == expected


def test_plain_splits_are_in_order_as_they_stand():
    assert in_order((Split(0, 0), Split(1, 1), Split(2, 0)), (2, 3, 4)) == (Split(0, 0), Split(2, 0), Split(1, 1))
    assert in_order((Split(0, 0, 4), Split(1, 0)), (3, 4)) == (Split(1, 0), Split(0, 0))
    assert in_order((Split(0, 0), Split(1, 0, 2)), (2, 2)) is None
    assert in_order((Split(0, 0, 3), Split(1, 0)), (2, 2)) is None
    assert in_order((), (2, 2)) == ()


def test_runs_that_touch_are_one():
    assert runs_of((8,), (1,), (Split(0, 0, 4),), (0,)) == (((0, 8),),)
    assert runs_of((3,), (2,), (Split(0, 0, 3),), (0,)) == (((0, 3),),)
    assert runs_of((8,), (2,), (Split(0, 0, 2),), (1,)) == (((2, 4), (6, 8)),)


def test_a_rank_in_several_runs_of_several_dimensions_holds_their_product():
    runs = runs_of((8, 8), (2, 2), (Split(0, 0, 2), Split(1, 1, 2)), (0, 1))
    assert boxes_of(runs) == (
        (Box((0, 2), (2, 2)), Box((0, 0), (2, 2))),
        (Box((0, 6), (2, 2)), Box((0, 2), (2, 2))),
        (Box((4, 2), (2, 2)), Box((2, 0), (2, 2))),
        (Box((4, 6), (2, 2)), Box((2, 2), (2, 2))),
    )


def test_same_question_same_layout():
    mesh = Mesh((2, 3), tuple(range(6)))
    splits = (Split(0, 0), Split(1, 1))
    first = mesh_layout((40, 7), mesh, splits)
    assert mesh_layout((40, 7), mesh, splits) is first
    assert mesh_layout((40, 7), Mesh((2, 3), tuple(range(6, 12))), splits) != first


@pytest.mark.parametrize("splits", [(Split(0, 0),), (Split(0, 0, 8),), (Split(0, 1),), (Split(0, 0, 8), Split(1, 0))])
def test_nothing_is_as_large_as_the_tensor(splits):
    mesh = Mesh((4, 8), tuple(range(32)))
    tracemalloc.start()
    try:
        mesh_layout.__wrapped__((5_000_011, 128), mesh, splits)
        runs_of.__wrapped__((5_000_011, 128), mesh.shape, splits, (3, 7))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_large_meshes_cost_their_boxes_and_holders():
    mesh = Mesh((512, 32), tuple(range(512 * 32)))
    replicated = mesh_layout((4096, 4096), mesh, (Split(0, 0),))
    assert len(replicated.boxes) == 512 and {len(ranks) for ranks in replicated.holders} == {32}
    split_twice = mesh_layout((4096, 4096), mesh, (Split(0, 0), Split(1, 1)))
    assert len(split_twice.boxes) == len(split_twice.holders) == 512 * 32
    assert cover_faults((4096, 4096), split_twice.boxes) == []
