"""Merging by kinds of ranks: what a merge rank by rank makes of the same descriptions, to the byte; and components."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.checkpoint.format.assign import check_covers
from shardopt.checkpoint.format.constants import DTYPES, file_name
from shardopt.checkpoint.saving.commit import make_manifest
from shardopt.checkpoint.saving.planning.describe import Description
from shardopt.checkpoint.saving.planning.merge import (
    merge_geometry,
    merge_values,
    read_section,
    sections_of,
    value_differs,
)
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan
from shardopt.errors import LayoutError, StateError
from shardopt.ranks.kinds import compress, decompress, kind_by_rank, kinds_of, pack_kinds, unpack_kinds
from shardopt.sharding.box import Box
from shardopt.sharding.layout import Layout
from shardopt.sharding.layout_merge import components_of
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from shardopt.state.paths import Index
from shardopt.state.values import encode_value
from tests.support.drawn import examples
from tests.support.merged_by_rank import description_of, geometry_by_rank, layouts_by_rank, values_by_rank

PLACES = ["plain", "flat", "replicas", "cut", "strips", "own shards", "own shards and replicas"]


class Cluster:
    """Ranks in stages, each a grid of ranks; tensors are placed on some of them in one of many ways."""

    def __init__(self, pick):
        self.pick = pick
        self.stages, self.rows, self.columns = pick.choice([1, 1, 2, 3]), pick.choice([1, 2, 3]), pick.choice([1, 2])
        self.size = self.stages * self.rows * self.columns
        self.tensors = [{} for _ in range(self.size)]
        self.meshes = {}

    def mesh(self, shape, ranks, cut=False):
        return self.meshes.setdefault((shape, ranks, cut), Mesh(shape, ranks, cut))

    def grid(self, stage):
        first = stage * self.rows * self.columns
        return [[first + row * self.columns + column for column in range(self.columns)] for row in range(self.rows)]

    def add(self, key, place):
        """One tensor, on the ranks of a stage or, if it is plain, on any; or on copies of it in every stage."""
        pick = self.pick
        shape = pick.choice([(8, 3), (7,), (1, 4), (0, 2), (), *[(600 * n, 1000) for n in (1, 2, 3, 5, 7)]])
        dtype = DTYPES[pick.choice(["float32", "bfloat16"])]
        stage = pick.randrange(self.stages)
        grid = self.grid(stage)
        everyone = tuple(rank for row in grid for rank in row)
        dim = pick.randrange(len(shape)) if shape else 0
        path = pick.choice([tuple(key.split(".")), (key,)])
        if place == "plain" or not shape:
            some = pick.choice([range(self.size), everyone, pick.sample(range(self.size), pick.randint(1, self.size))])
            layouts = dict.fromkeys(some, Layout.replicated(shape))
        elif place == "flat":
            mesh = self.mesh((len(everyone),), everyone)
            layouts = dict.fromkeys(everyone, mesh_layout(shape, mesh, (Split(0, dim),)))
        elif place == "replicas":
            mesh = self.mesh((self.rows, self.columns), everyone)
            layouts = dict.fromkeys(everyone, mesh_layout(shape, mesh, (Split(pick.randrange(2), dim),)))
        elif place in ("cut", "strips"):
            lines = grid if place == "cut" else [list(line) for line in zip(*grid, strict=True)]
            if pick.random() < 0.3:
                lines = lines[: pick.randint(1, len(lines))]
            layouts = {}
            for line in lines:
                mesh = self.mesh((len(line),), tuple(line), True)
                layouts |= dict.fromkeys(line, mesh_layout(shape, mesh, (Split(0, dim),)))
        elif 0 in shape:  # shards would not make it up
            return
        else:
            cuts = sorted({0, shape[0], *(pick.randint(0, shape[0]) for _ in everyone)})
            own = {rank: {} for rank in everyone}
            for start, end in itertools.pairwise(cuts):
                for rank in pick.sample(everyone, 1 if place == "own shards" else pick.randint(1, len(everyone))):
                    own[rank][Box((start, *[0] * (len(shape) - 1)), (end - start, *shape[1:]))] = (rank,)
            layouts = {rank: Layout.from_holders(shape, boxes, local=True) for rank, boxes in own.items()}
            if pick.random() < 0.3:  # what holds nothing may not know the dtype
                for rank, layout in layouts.items():
                    if not layout.boxes and pick.random() < 0.5:
                        self.tensors[rank][key] = path, DTYPES["int8"], layout
        for rank, layout in layouts.items():
            if pick.random() > 0.02:
                self.tensors[rank].setdefault(key, (path, dtype, layout))
        if pick.random() < 0.02:  # somebody disagrees
            rank = pick.randrange(self.size)
            other = pick.choice(
                [
                    (("x", Index(0)), dtype, Layout.replicated(shape)),
                    (path, DTYPES["float64"], Layout.replicated(shape)),
                    (path, dtype, Layout.replicated((*shape, 2))),
                ]
            )
            self.tensors[rank][key] = (tuple(key.split(".")) if other[0] != path else path, *other[1:])

    def describe(self):
        descriptions = []
        for rank, tensors in enumerate(self.tensors):
            tied = {}
            for first, (_, dtype, layout) in tensors.items():
                key = f"tied.{first}"
                if key in tensors and tensors[key][1:] == (dtype, layout):
                    holds = layout.holders is None or any(rank in ranks for ranks in layout.holders)
                    if holds:
                        tied[key] = first
            per_rank = {"rng": ("rng",)} if self.pick.random() < 0.9 else {}
            descriptions.append(Description({}, tensors, {}, per_rank, {}, {}, "none", tied))
        return descriptions


def cluster(seed, most=6):
    pick = random.Random(seed)
    made = Cluster(pick)
    for i in range(pick.randint(1, most)):
        made.add(f"k.{i}", pick.choice(PLACES))
    for tensors in made.tensors:
        for key in [*tensors]:
            if key in ("k.1", "k.2") and seed % 2:
                tensors[f"tied.{key}"] = (("tied", *key.split(".")), *tensors[key][1:])
    if seed % 3 == 0:  # ranks need not list their tensors in one order
        made.tensors = [dict(sorted(tensors.items(), key=lambda _: pick.random())) for tensors in made.tensors]
    return made


def over_the_wire(wire):
    return json.loads(json.dumps(wire))


def both(descriptions):
    """The geometry, or the problems, by kinds and by ranks; and the merged geometry by kinds with the kinds."""
    kinds = kinds_of([each.geometry_fingerprint() for each in descriptions])
    kinds = unpack_kinds(over_the_wire(pack_kinds(kinds)))
    by_kind = by_rank = merged = None
    try:
        wires = [over_the_wire(descriptions[ranks[0]].geometry_json()) for ranks in kinds]
        merged = merge_geometry(kinds, wires)
        by_kind = merged.geometry
    except (StateError, LayoutError) as error:
        by_kind = sorted(map(str, error.problems))
    try:
        by_rank = geometry_by_rank(
            [over_the_wire(description_of(each, rank)) for rank, each in enumerate(descriptions)]
        )
    except (StateError, LayoutError) as error:
        by_rank = sorted(map(str, error.problems))
    return by_kind, by_rank, merged, kinds


def listed(geometry):
    return [*geometry.members.items()], [*geometry.per_rank.items()], [*geometry.tied.items()]


def covers(geometry):
    try:
        check_covers(geometry.members)
    except LayoutError:  # of a rank that has not passed what it holds
        return False
    return True


def manifest_bytes(geometry, size, cut_plain):
    plan = SavePlan(geometry, size, cut_plain)
    reports = [[[file_name("0" * 12, *file), 1, "0" * 16]] for file in plan.files]
    return make_manifest("0" * 12, plan, {}, reports, saved_at=0.0)[1]


@settings(max_examples=examples(150))
@given(st.integers(0, 10**9))
def test_kinds_merge_to_what_ranks_merge_to(seed):
    made = cluster(seed)
    by_kind, by_rank, _, _ = both(made.describe())
    if isinstance(by_rank, list):
        assert by_kind == by_rank
        return
    assert listed(by_kind) == listed(by_rank)
    if not covers(by_kind):
        return
    for cut_plain in (True, False):
        assert manifest_bytes(by_kind, made.size, cut_plain) == manifest_bytes(by_rank, made.size, cut_plain)


@settings(max_examples=examples(100))
@given(st.integers(0, 10**9), st.booleans())
def test_a_rank_plans_its_component_as_it_would_all(seed, cut_plain):
    made = cluster(seed, most=10)
    _, geometry, merged, kinds = both(made.describe())
    if merged is None or not covers(geometry):
        return
    whole = SavePlan(geometry, made.size, cut_plain)
    section_of, sections = sections_of(merged, len(kinds), whole.assigned)
    for rank in range(made.size):
        section = sections[section_of[kind_by_rank(kinds)[rank]]]
        own, known = read_section(decompress(compress(section)))
        assert {key for key in (geometry.members | geometry.tied) if key in made.tensors[rank]} <= {
            *own.members,
            *own.tied,
        }
        assert own.per_rank == geometry.per_rank
        assert all(geometry.members[key] == member for key, member in own.members.items())
        assert all(geometry.tied[key] == first for key, first in own.tied.items())
        plan = SavePlan(own, made.size, cut_plain, known)
        assert RankWrites(plan, rank).slots == RankWrites(whole, rank).slots


def test_examples_are_of_all_sorts():
    """The seeds of the tests above make jobs that merge and jobs that do not, of one component and of several."""
    outcomes = [both(cluster(seed).describe()) for seed in range(150)]
    sections = [
        sections_of(merged, len(kinds), SavePlan(merged.geometry, 20).assigned)[1]
        for _, _, merged, kinds in outcomes
        if merged is not None and covers(merged.geometry)
    ]
    assert any(len(each) > 1 and each[0]["known"]["of"] for each in sections)
    assert 15 < len(sections) < 150
    assert sum(len(each) > 1 for each in sections) > 15
    assert any(merged is not None and merged.geometry.tied for *_, merged, _ in outcomes)
    assert any(len(kinds) < cluster(seed).size for seed, (*_, kinds) in enumerate(outcomes))


values = st.recursive(
    st.one_of(st.integers(0, 1), st.booleans(), st.sampled_from([0.0, -0.0, 1.0, float("nan")]), st.text(max_size=1)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=3,
)


@settings(max_examples=examples(100))
@given(st.lists(st.dictionaries(st.sampled_from(["v", "w.0"]), values, max_size=2), min_size=1, max_size=3), st.data())
def test_values_merge_as_those_of_all_ranks(distinct, data):
    order = data.draw(st.lists(st.integers(0, len(distinct) - 1), min_size=1, max_size=6))
    apps = [distinct[number] for number in order]
    encoded = [{key: ((*key.split("."),), encode_value(each, key)) for key, each in app.items()} for app in apps]
    of_ranks = [Description({}, {}, each, {}, {}, {}, "none", {}) for each in encoded]
    wires = [over_the_wire(each.values_json()) for each in of_ranks]
    kinds = kinds_of([each.values_fingerprint() for each in of_ranks])
    nothing = merge_geometry([tuple(range(len(order)))], [of_ranks[0].geometry_json()]).geometry
    results = []
    for merge in (
        lambda: values_by_rank(wires, nothing),
        lambda: merge_values({ranks[0]: wires[ranks[0]] for ranks in kinds}, nothing),
    ):
        try:
            results.append(json.dumps([*merge().items()]))
        except StateError as error:
            results.append(str(error))
    assert results[0] == results[1]


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ([0], [False])], ids=repr)
def test_values_that_python_calls_equal_are_not(one, other):
    wires = {rank: {"values": {"v": [None, encode_value(value, "v")]}} for rank, value in enumerate([one, other])}
    nothing = merge_geometry([(0, 1)], [Description({}, {}, {}, {}, {}, {}, "none", {}).geometry_json()]).geometry
    with pytest.raises(StateError, match=r"on rank 0, .* on rank 1"):
        merge_values(wires, nothing)


LONG = {f"option{number}": number for number in range(20)}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({**LONG, "lr_scale": 1.0}, {**LONG, "lr_scale": 2.0}, "v.lr_scale: found 1.0 on rank 0, 2.0 on rank 1"),
        (LONG, {**LONG, "own": 1}, "v.own: found nothing on rank 0, 1 on rank 1"),
        ({"a": [1, (2, {3: 4})]}, {"a": [1, (2, {3: 5})]}, "v.a.1.1.3: found 4 on rank 0, 5 on rank 1"),
        ([1, 2], [1], "v.1: found 2 on rank 0, nothing on rank 1"),
        ([1, 2], [1, {}], "v.1: found 2 on rank 0, {} on rank 1"),
        ([1], (1,), r"v: found [1] on rank 0, (1,) on rank 1"),
        ({}, LONG, "v: found {} on rank 0, {'option0'"),
        ({"best": 1.0, "num_bad_epochs": 0}, {"best": 2.0, "num_bad_epochs": 0}, "optim.ReduceLROnPlateau"),
        ({"__semi_sync": {"steps": 2}}, {"__semi_sync": {"steps": 1}}, "every island must take every step"),
    ],
)
def test_the_entry_that_differs_is_named(one, other, told):
    problem = value_differs("v", {rank: encode_value(value) for rank, value in enumerate([one, other])})
    assert "named_parameters" not in problem.remedy
    assert told in str(problem)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (("stages.0", "state", 3, "step"), True),
        (("optimizer", "param_groups", "1"), True),
        (("model", "state.0.weight"), False),
        (("model", "state", "0", "weight"), False),
        (("meters", "state", 1), False),
    ],
)
def test_the_error_of_state_by_number_says_how_it_gets_names(path, told):
    problem = value_differs(".".join(map(str, path)), {0: 1, 1: 2}, path)
    assert ("make the optimizer of model.named_parameters()" in problem.remedy) == told


@pytest.mark.parametrize(("number", "told"), [(0, True), ("0", False)])
def test_the_error_of_tensors_under_numbers_says_how_they_get_names(number, told):
    path, key = ("optimizer", "state", number, "exp_avg"), "optimizer.state.0.exp_avg"
    tensors = [{key: (path, DTYPES["float32"], Layout.replicated(shape))} for shape in ((2,), (3,))]
    wires = [Description({}, each, {}, {}, {}, {}, "none", {}).geometry_json() for each in tensors]
    with pytest.raises(StateError, match="exp_avg: found shape") as refused:
        merge_geometry([(0,), (1,)], wires)
    assert ("model.named_parameters()" in str(refused.value)) == told


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_kinds_come_back_from_the_wire(numbers):
    kinds = kinds_of(list(map(str, numbers)))
    assert unpack_kinds(over_the_wire(pack_kinds(kinds))) == kinds
    assert sorted(rank for ranks in kinds for rank in ranks) == list(range(len(numbers)))
    assert all(numbers[rank] == numbers[ranks[0]] for ranks in kinds for rank in ranks)
    assert [kind_by_rank(kinds)[rank] for rank in range(len(numbers))] == [
        [numbers[ranks[0]] for ranks in kinds].index(number) for number in numbers
    ]


def test_regular_kinds_take_three_numbers_each():
    grid = [str(rank % 32) for rank in range(1024)]
    assert pack_kinds(kinds_of(grid)) == [[number, 32, 32] for number in range(32)]


@pytest.mark.parametrize(
    ("groups", "components"),
    [
        ([], [0, 1, 2, 3]),
        ([(0, 2)], [0, 1, 0, 2]),
        ([(2, 3), (1, 2)], [0, 1, 1, 1]),
        ([(1, 3), (0, 2), (2, 3)], [0, 0, 0, 0]),
    ],
)
def test_components(groups, components):
    assert components_of(groups, 4) == components


@settings(max_examples=examples(100))
@given(st.integers(0, 10**9))
def test_layouts_merge_as_those_of_all_ranks(seed):
    made = cluster(seed, most=1)
    layouts = {rank: tensors["k.0"][2] for rank, tensors in enumerate(made.tensors) if "k.0" in tensors}
    if not layouts:
        return
    results = []
    for merge in (Layout.merge, layouts_by_rank):
        try:
            results.append(merge(layouts, "k.0"))
        except LayoutError as error:
            results.append(str(error))
    assert results[0] == results[1]
    if isinstance(results[0], Layout):
        assert results[0].grid == Layout(results[1].shape, results[1].boxes, results[1].holders).grid
        assert results[0].fingerprint == results[1].fingerprint


def described_by(path, dtype, holder):
    """A tensor of which one rank holds all, as a kind of ranks describes it."""
    layout = Layout.from_holders((4,), {Box((0,), (4,)): [holder]}, local=True)
    return Description({}, {"x.y": (path, DTYPES[dtype], layout)}, {}, {}, {}, {}, "none", {}).geometry_json()


def test_the_first_rank_that_holds_a_tensor_speaks_for_it():
    """Not the first kind: its first rank may hold nothing, and its holder come after that of another kind."""
    kinds = [(0, 3), (1, 2)]
    wires = [described_by(("x", "y"), "float32", 3), described_by(("x.y",), "float32", 1)]
    assert merge_geometry(kinds, wires).geometry.members["x.y"].path == ("x.y",)
    wires = [described_by(("x.y",), "float32", 3), described_by(("x.y",), "bfloat16", 1)]
    with pytest.raises(StateError, match="found bfloat16 on rank 1, float32 on rank 3; required the same"):
        merge_geometry(kinds, wires)


def test_a_hole_between_kinds_is_named():
    half = Layout.from_holders((4,), {Box((0,), (2,)): [0]}, local=True)
    description = Description({}, {"x": (("x",), DTYPES["int8"], half)}, {}, {}, {}, {}, "none", {})
    merged = merge_geometry([(0,)], [description.geometry_json()])
    with pytest.raises(LayoutError, match="no box holds"):
        check_covers(merged.geometry.members)
