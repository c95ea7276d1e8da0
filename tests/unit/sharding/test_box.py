"""Boxes against sets of indices, and covers against counting every element."""

import ast
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardopt.sharding.box as box_module
from shardopt.sharding.box import (
    MOST_FAULTS,
    Box,
    boxes_of_range,
    cover_faults,
    grid_boxes,
    grid_cuts,
    overlap_faults,
    whole,
)
from tests.support.boxes import elements, partitions

SIZES = st.integers(0, 5)


def named(fault):
    """The boxes that a fault names, in its order."""
    pairs = re.findall(r"offsets (\([^)]*\)) sizes (\([^)]*\))", fault)
    return [Box(ast.literal_eval(offsets), ast.literal_eval(sizes)) for offsets, sizes in pairs]


def boxes(ndim):
    numbers = st.lists(SIZES, min_size=ndim, max_size=ndim).map(tuple)
    return st.builds(Box, numbers, numbers)


@given(st.integers(0, 3).flatmap(lambda ndim: st.tuples(boxes(ndim), boxes(ndim))))
def test_box_is_the_set_of_its_indices(pair):
    a, b = pair
    shared = a.intersect(b)
    assert (set() if shared is None else elements(shared)) == elements(a) & elements(b)
    assert shared is None or shared.numel > 0
    assert a.numel == len(elements(a))
    if elements(b):
        assert a.contains(b) == (elements(b) <= elements(a))
    if a.contains(b):
        shifted = {tuple(i + o for i, o in zip(index, a.offsets, strict=True)) for index in elements(b.within(a))}
        assert shifted == elements(b)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape, data):
    indices = list(itertools.product(*map(range, shape)))
    begin, end = sorted([data.draw(st.integers(0, len(indices))), data.draw(st.integers(0, len(indices)))])
    found = list(boxes_of_range(shape, begin, end))
    assert [index for box in found for index in itertools.product(*map(range, box.offsets, box.ends))] == indices[
        begin:end
    ]
    assert len(found) <= max(2 * len(shape) - 1, 1)


def test_box_without_dimensions_holds_one_element():
    scalar = Box((), ())
    assert scalar.numel == 1 and scalar.ends == () and whole(()) == scalar
    assert scalar.intersect(scalar) == scalar and scalar.contains(scalar) and scalar.within(scalar) == scalar
    assert cover_faults((), [scalar]) == []
    assert cover_faults((), []) == ["no box holds offsets () sizes ()"]
    assert cover_faults((), [scalar, scalar]) == [
        "boxes with offsets () sizes () and offsets () sizes () both hold offsets () sizes ()"
    ]


@given(st.lists(st.sets(st.integers(1, 9), max_size=4).map(sorted), max_size=3))
def test_grid_and_its_cells_are_each_others_reverse(inner):
    cuts = tuple((0, *points, 10) for points in inner)
    cells = grid_boxes(cuts)
    assert list(cells) == sorted(cells, key=lambda box: box.offsets)
    assert grid_cuts((10,) * len(cuts), cells) == cuts
    assert cover_faults((10,) * len(cuts), cells) == []
    if len(cells) > 1:
        assert grid_cuts((10,) * len(cuts), cells[::-1]) is None
        assert cover_faults((10,) * len(cuts), cells[::-1]) == []
        assert grid_cuts((10,) * len(cuts), cells[1:]) is None
        assert grid_cuts((10,) * len(cuts), (*cells[1:], cells[-1])) is None


@given(
    st.lists(st.integers(0, 5), max_size=3).flatmap(
        lambda s: st.tuples(st.just(s), st.lists(boxes(len(s)), max_size=8))
    )
)
def test_cover_says_what_counting_every_element_says(case):
    shape, given_boxes = case
    space = elements(whole(shape))
    held = [element for box in given_boxes for element in elements(box)]
    exact = sorted(held) == sorted(space)
    faults = cover_faults(shape, given_boxes)
    assert (faults == []) == exact
    assert (overlap_faults(shape, given_boxes) == []) == (len(set(held)) == len(held) and set(held) <= space)
    beyond = [box for box in given_boxes if not elements(box) <= space]
    if beyond:  # what else is wrong may follow from it, and is not told
        assert [named(fault)[0] for fault in faults] == beyond
        return
    holes = [named(fault)[0] for fault in faults if fault.startswith("no box")]
    for a, b, shared in (named(fault) for fault in faults if "both hold" in fault):
        assert elements(a) & elements(b) == elements(shared) != set()
        assert a in given_boxes and b in given_boxes
    assert all(elements(hole) and not elements(hole) & set(held) for hole in holes)
    if len(faults) <= MOST_FAULTS:
        assert set().union(*map(elements, holes)) == space - set(held)


@given(partitions(), st.data())
def test_exact_cover_and_what_breaks_it(partition, data):
    shape, parts = partition
    assert cover_faults(shape, parts) == []
    victim = data.draw(st.sampled_from(parts))
    rest = [part for part in parts if part != victim]
    assert [named(fault) for fault in cover_faults(shape, rest)] == ([[victim]] if victim.numel else [])
    assert overlap_faults(shape, rest) == []
    assert [named(fault) for fault in cover_faults(shape, [*parts, victim])] == [[victim, victim, victim]]


def test_overlaps_are_told_even_where_the_search_for_holes_is_given_up(monkeypatch):
    boxes = [Box((i, 0), (1, 3)) for i in range(8)] + [Box((0, 0), (1, 1))]
    overlap = (
        "boxes with offsets (0, 0) sizes (1, 3) and offsets (0, 0) sizes (1, 1) both hold offsets (0, 0) sizes (1, 1)"
    )
    assert cover_faults((9, 3), boxes) == [overlap, "no box holds offsets (8, 0) sizes (1, 3)"]
    monkeypatch.setattr(box_module, "_MOST_HOLE_VISITS", 12)
    monkeypatch.setattr(box_module, "_VISITS_PER_BOX", 1)
    assert cover_faults((9, 3), boxes) == [overlap]


def test_pinwheel_cannot_be_cut_through_and_is_still_seen_whole():
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert cover_faults((3, 3), pinwheel) == []
    assert cover_faults((3, 3), pinwheel[:-1]) == ["no box holds offsets (1, 1) sizes (1, 1)"]


@pytest.mark.parametrize(
    ("box", "fault"),
    [
        (Box((3, 0), (2, 2)), "box with offsets (3, 0) sizes (2, 2) reaches beyond shape (4, 2)"),
        (Box((-1, 0), (1, 2)), "box with offsets (-1, 0) sizes (1, 2) reaches beyond shape (4, 2)"),
        (Box((0, 0), (-4, -2)), "box with offsets (0, 0) sizes (-4, -2) has a negative size"),
        (Box((0,), (4,)), "box with offsets (0,) sizes (4,) has not the 2 dimensions of shape (4, 2)"),
        (Box((0, 0, 0), (4, 2)), "box with offsets (0, 0, 0) sizes (4, 2) has not the 2 dimensions of shape (4, 2)"),
    ],
)
def test_boxes_that_fit_nowhere_are_named(box, fault):
    assert cover_faults((4, 2), [whole((4, 2)), box]) == [fault]
    assert overlap_faults((4, 2), [box]) == [fault]


def test_empty_boxes_hold_nothing_wherever_they_are():
    assert cover_faults((4,), [Box((0,), (4,)), Box((9,), (0,)), Box((2,), (0,))]) == []
    assert cover_faults((4, 0), []) == []
    assert cover_faults((4, 0), [Box((7, 0), (3, 0))]) == []


@pytest.mark.parametrize(
    "many",
    [
        [Box((0, 0), (9, 9))] * 3000,
        [Box((i % 9, 0), (1, 9)) for i in range(3000)] + [Box((0, i % 9), (9, 1)) for i in range(3000)],
        [Box((9, 9), (9, 9))] * 3000,
        [Box((i, 2 * j + i % 2), (1, 1)) for i in range(9) for j in range(4)],
    ],
)
def test_number_of_faults_is_bounded_and_that_there_may_be_more_is_said(many):
    faults = cover_faults((9, 9), many)
    assert len(faults) == MOST_FAULTS + 1
    assert "may be more" in faults[-1]


@pytest.fixture
def intersections(monkeypatch):
    """Counts the intersections that are worked out."""
    calls = []
    intersect = Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda a, b: calls.append(1) or intersect(a, b))
    return calls


def test_a_grid_compares_no_boxes(intersections):
    cells = grid_boxes([range(0, 1025, 8), range(0, 1025, 8)])
    assert len(cells) == 16_384
    assert cover_faults((1024, 1024), cells) == []
    assert len(intersections) == 0


def test_one_hole_in_many_boxes_costs_little_more(intersections):
    # 128 rows, each cut at other columns: no grid. A pair by pair comparison would be 134 million intersections.
    bricks = [box for row in range(128) for box in _row(row)]
    assert cover_faults((128, 1280), bricks) == []
    assert cover_faults((128, 1280), bricks[1:]) == [
        f"no box holds offsets {bricks[0].offsets} sizes {bricks[0].sizes}"
    ]
    assert len(intersections) < 40 * len(bricks)


def _row(row):
    points = [0, *range(10 - row % 9, 1280, 10), 1280]
    return [Box((row, start), (1, end - start)) for start, end in itertools.pairwise(points) if end > start]


@pytest.mark.parametrize("ndim", [6, 20, 60])
def test_many_dimensions_do_not_multiply_the_work(ndim, intersections):
    # Slabs of one dimension each, that all cross: every pair overlaps.
    slabs = [Box((0,) * d + (1,) + (0,) * (ndim - d - 1), (3,) * d + (1,) + (3,) * (ndim - d - 1)) for d in range(ndim)]
    assert len(cover_faults((3,) * ndim, slabs)) >= min(15, MOST_FAULTS)
    # And a partition whose cuts go through all dimensions in turn, with its last box left out.
    parts, rest = [], whole((2,) * ndim)
    for dim in range(ndim):
        sizes = (*rest.sizes[:dim], 1, *rest.sizes[dim + 1 :])
        parts.append(Box(rest.offsets, sizes))
        rest = Box((*rest.offsets[:dim], 1, *rest.offsets[dim + 1 :]), sizes)
    assert cover_faults((2,) * ndim, [*parts, rest]) == []
    assert [named(fault) for fault in cover_faults((2,) * ndim, parts)] == [[rest]]
    assert len(intersections) < 100_000
