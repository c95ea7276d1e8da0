"""Layouts as data: compared, sent, joined."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.errors import LayoutError
from shardopt.sharding.box import Box, whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from tests.support.boxes import partitions


@st.composite
def layouts(draw):
    shape, parts = draw(partitions())
    ranks = st.sets(st.integers(0, 9), min_size=1)
    chosen = draw(st.lists(st.sampled_from(parts), unique=True))
    return draw(
        st.one_of(
            st.just(Layout.replicated(shape)),
            st.builds(
                lambda local: Layout.from_holders(shape, {part: draw(ranks) for part in parts}, local), st.booleans()
            ),
            st.just(Layout.from_holders(shape, {part: draw(ranks) for part in chosen}, local=True)),
        )
    )


@given(layouts())
def test_layout_comes_back_from_the_wire_as_it_was(layout):
    back = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert back == layout
    assert back.fingerprint == layout.fingerprint
    assert hash(back) == hash(layout)


@given(layouts(), layouts())
def test_fingerprints_are_equal_for_equal_layouts_only(a, b):
    assert (a.fingerprint == b.fingerprint) == (a == b)


def test_every_part_of_a_layout_is_in_its_fingerprint():
    shape, box = (4, 2), Box((0, 0), (2, 2))
    same = Layout.from_holders(shape, {box: [1, 0]})
    others = [
        Layout.from_holders((4, 3), {box: [0, 1]}),
        Layout.from_holders(shape, {Box((2, 0), (2, 2)): [0, 1]}),
        Layout.from_holders(shape, {box: [0, 2]}),
        Layout.from_holders(shape, {box: [0, 1]}, local=True),
        Layout(shape, (box,)),
    ]
    assert same.fingerprint == Layout.from_holders(shape, {box: (0, 1)}).fingerprint
    assert len({same.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


def test_fingerprint_does_not_depend_on_the_process():
    # Ranks compare them, so no seed of this process may be in them.
    assert Layout.from_holders((4, 2), {Box((0, 0), (2, 2)): [1, 0], Box((2, 0), (2, 2)): [2]}).fingerprint == (
        "e871d98b6ff1fffe0471dff838289065"
    )


def test_boxes_and_holders_are_in_ascending_order():
    layout = Layout.from_holders(
        (4, 4), {Box((2, 0), (2, 4)): [3, 1, 3], Box((0, 2), (2, 2)): [2], Box((0, 0), (2, 2)): {9, 0}}
    )
    assert layout.boxes == (Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (2, 4)))
    assert layout.holders == ((0, 9), (2,), (1, 3))


def test_a_grid_is_sent_as_its_edges():
    shards = mesh_layout((1 << 20, 512), Mesh((512, 32), tuple(range(512 * 32))), (Split(0, 0), Split(1, 1)))
    assert shards.grid is not None and list(map(len, shards.grid)) == [513, 33]
    wire = shards.to_json()
    assert "boxes" not in wire and len(json.dumps(wire["grid"])) < 6_000


def test_joined_puts_together_what_ranks_know():
    a, b, c = Box((0, 0), (2, 3)), Box((0, 3), (2, 1)), Box((2, 0), (2, 4))
    parts = {
        0: Layout.from_holders((4, 4), {a: [0], b: [0]}, local=True),
        1: Layout.from_holders((4, 4), {c: [1]}, local=True),
        2: Layout.from_holders((4, 4), {}, local=True),
        5: Layout.from_holders((4, 4), {a: [5]}, local=True),
    }
    assert Layout.merge(parts) == Layout.from_holders((4, 4), {a: [0, 5], b: [0], c: [1]})


def test_joined_is_whole_even_of_one_rank():
    alone = Layout.from_holders((4,), {whole((4,)): [3]}, local=True)
    assert Layout.merge({3: alone}) == Layout.from_holders((4,), {whole((4,)): [3]})


def test_joined_counts_the_ranks_that_hold_all_of_it():
    plain, split = Layout.replicated((4,)), Layout.from_holders((4,), {Box((0,), (2,)): [1], Box((2,), (2,)): [2]})
    assert Layout.merge({3: plain, 4: plain}) is plain
    assert Layout.merge({1: split, 2: split, 7: split}) is split
    assert Layout.merge({0: plain, 1: split, 2: split, 6: plain}) == Layout.from_holders(
        (4,), {whole((4,)): [0, 6], Box((0,), (2,)): [1], Box((2,), (2,)): [2]}
    )


def test_joined_cuts_through_a_mesh_hold_copies():
    cuts = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    known = {rank: mesh_layout((5,), Mesh((2,), ranks, cut=True), (Split(0, 0),)) for rank, ranks in cuts.items()}
    assert all(layout.local for layout in known.values())
    assert Layout.merge(known) == Layout.from_holders((5,), {Box((0,), (3,)): [0, 1], Box((3,), (2,)): [2, 3]})


def test_joined_refuses_another_shape_by_name():
    with pytest.raises(LayoutError) as caught:
        Layout.merge(
            {0: Layout.replicated((4,)), 1: Layout.replicated((4,)), 6: Layout.replicated((5,))}, "layers.0.weight"
        )
    (problem,) = caught.value.problems
    assert problem.key == "layers.0.weight"
    assert "(5,) on rank 6" in problem.found and "(4,), as on rank 0" in problem.required
