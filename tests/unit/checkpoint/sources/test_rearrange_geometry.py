"""Rearranging, against an oracle that moves each element by itself: any rule, any stored cuts, any box, any strides."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Rule, inverse, rearranged
from shardopt.checkpoint.rearrange.geometry import Run, as_digits
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.sharding.box import Box, whole
from shardopt.sharding.pieces import Piece
from tests.support.boxes import partitions
from tests.unit.checkpoint.sources.test_read import at, store

# An item is the name of an axis, ("(", items) for a product, ("+", items) for sections; ("(", []) is an axis of size 1.


def text(item):
    if isinstance(item, str):
        return item
    kind, items = item
    if kind == "+":
        return "+".join(map(text, items))
    return f"({' '.join(map(text, items))})" if items else "1"


def size(item, sizes):
    if isinstance(item, str):
        return sizes[item]
    return (sum if item[0] == "+" else prod)(size(each, sizes) for each in item[1])


def index(item, section, sizes, values):
    """The index along an item at which an element of a section stands."""
    if isinstance(item, str):
        return values[item]
    kind, items = item
    if kind == "+":
        before = sum(size(each, sizes) for each in items[:section])
        return before + index(items[section], section, sizes, values)
    i = 0
    for each in items:
        i = i * size(each, sizes) + index(each, section, sizes, values)
    return i


def elements(axes, sizes):
    names = sorted(axes)
    for values in itertools.product(*(range(sizes[name]) for name in names)):
        yield dict(zip(names, values, strict=True))


@st.composite
def sides(draw, common, own, pad):
    """Tensors of which each has some of the sections, in their order: a list of (dimensions, sections, with a pad)."""
    tensors, at = [], 0
    while at < len(own):
        count = draw(st.integers(1, len(own) - at))
        sections = list(range(at, at + count))
        with_pad = pad is not None and draw(st.booleans())
        if count == 1 and not with_pad:
            items = [*common, *own[at]]
        else:
            inner = [("(", draw(st.permutations(own[i]))) for i in sections]
            items = [*common, ("+", [*inner, *([pad] if with_pad else [])])]
        items = draw(st.permutations(items))
        dims = []
        while items:
            length = draw(st.integers(1, len(items)))
            dims.append(("(", items[:length]) if length > 1 or draw(st.booleans()) else items[0])
            items = items[length:]
        tensors.append((dims, sections, with_pad))
        at += count
    return tensors


@st.composite
def rules(draw):
    """A rule, its structure, and the sizes of all axes."""
    common = draw(st.lists(st.sampled_from("abc"), max_size=2, unique=True))
    own = [
        [f"{name}{i}" for name in draw(st.lists(st.sampled_from("xy"), max_size=2, unique=True))]
        for i in range(draw(st.integers(1, 3)))
    ]
    axes = [*common, *itertools.chain(*own)]
    sizes = {axis: draw(st.integers(1, 4)) for axis in axes} | {"_old": draw(st.integers(0, 2)), "_new": 2}
    stacked = draw(st.sampled_from([None, "old", "new"])) if common else None
    by_name = common[:1] if stacked else []
    old = draw(sides([each for each in common if stacked != "old" or each not in by_name], own, "_old"))
    new = draw(sides([each for each in common if stacked != "new" or each not in by_name], own, "_new"))
    in_name = {side: by_name if stacked == side else [] for side in ("old", "new")}

    def names(side, tensors):
        return tuple(f"{side}{i}" + "".join(f".{{{axis}}}" for axis in in_name[side]) for i in range(len(tensors)))

    both = [", ".join(" ".join(map(text, dims)) for dims, _, _ in tensors) for tensors in (old, new)]
    return Rule(names("old", old), names("new", new), " -> ".join(both), sizes), (common, own, old, new, in_name), sizes


def names_of(side, tensor, axes, values):
    return ".".join([f"{side}{tensor}", *(str(values[axis]) for axis in axes)])


def blank(side, tensors, axes, sizes):
    return {
        names_of(side, i, axes, values): torch.zeros([size(dim, sizes) for dim in dims], dtype=torch.int64)
        for i, (dims, _, _) in enumerate(tensors)
        for values in elements(axes, sizes)
    }


def by_hand(stored, structure, sizes):
    """The new tensors, each element moved by itself."""
    common, own, old, new, in_name = structure
    made = blank("new", new, in_name["new"], sizes)
    for section, axes in enumerate(own):
        (i, (old_dims, in_old, _)), (j, (new_dims, in_new, _)) = (
            next((k, each) for k, each in enumerate(side) if section in each[1]) for side in (old, new)
        )
        for values in elements([*common, *axes], sizes):
            source = tuple(index(dim, in_old.index(section), sizes, values) for dim in old_dims)
            target = tuple(index(dim, in_new.index(section), sizes, values) for dim in new_dims)
            element = stored[names_of("old", i, in_name["old"], values)][source]
            made[names_of("new", j, in_name["new"], values)][target] = element
    return made


FEW = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@FEW
@given(rule=rules(), data=st.data())
def test_any_box_of_any_rearranged_tensor(tmp_path_factory, rule, data):
    check_any_box(tmp_path_factory, rule, data)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@settings(FEW, max_examples=600)
@given(rule=rules(), data=st.data())
def test_any_box_of_very_many_rearranged_tensors(tmp_path_factory, rule, data):
    check_any_box(tmp_path_factory, rule, data)


def check_any_box(tmp_path_factory, rule, data):
    rule, structure, sizes = rule
    stored = blank("old", structure[2], structure[4]["old"], sizes)
    for i, tensor in enumerate(stored.values()):
        tensor.copy_(torch.arange(1, tensor.numel() + 1).reshape(tensor.shape) + 1000 * i)
    boxes = {key: data.draw(partitions(tuple(tensor.shape)))[1] for key, tensor in stored.items()}
    path = str(tmp_path_factory.mktemp("stored") / "it")
    store(path, stored, boxes)
    expected = by_hand(stored, structure, sizes)
    with rearranged(checkpoint.open(path), [rule]) as reader:
        assert reader.keys() == sorted(expected)
        for key, full in expected.items():
            assert torch.equal(reader.read(key), full), key
            ends = [sorted([data.draw(st.integers(0, n)), data.draw(st.integers(0, n))]) for n in full.shape]
            box = Box(tuple(begin for begin, _ in ends), tuple(end - begin for begin, end in ends))
            # Memory of other strides than C order, in the middle of more.
            order = data.draw(st.permutations(range(full.ndim)))
            larger = torch.full([box.sizes[dim] + 2 for dim in order] or [1], -1)
            view = larger[tuple(slice(1, 1 + box.sizes[dim]) for dim in order)] if order else larger.reshape(())
            target = view.permute([order.index(dim) for dim in range(full.ndim)])
            fetch(reader.requests([(key, [Piece(box, target)])]))
            assert torch.equal(target, full[at(box)]), (key, box)
            assert (larger == -1).sum() == larger.numel() - box.numel or not order


@settings(FEW, max_examples=15)
@given(rule=rules())
def test_a_rule_and_its_inverse_give_back_what_was_stored(tmp_path_factory, rule):
    rule, structure, sizes = rule
    stored = blank("old", structure[2], structure[4]["old"], sizes)
    for i, tensor in enumerate(stored.values()):
        tensor.copy_(torch.arange(1, tensor.numel() + 1).reshape(tensor.shape) + 1000 * i)
    path = str(tmp_path_factory.mktemp("stored") / "it")
    store(path, stored, {key: [whole(tensor.shape)] for key, tensor in stored.items()})
    kept = {number for tensor in by_hand(stored, structure, sizes).values() for number in tensor.unique().tolist()}
    with rearranged(rearranged(checkpoint.open(path), [rule]), inverse([rule])) as reader:
        assert reader.keys() == sorted(stored)
        for key, tensor in stored.items():  # what was left out is zeros by now
            expected = tensor.clone().apply_(lambda number: number if number in kept else 0)
            target = torch.full_like(expected, -1)  # read() has memory that may hold the right numbers by chance
            fetch(reader.requests([(key, [Piece(whole(tensor.shape), target)])]))
            assert torch.equal(target, expected)


def test_dimensions_of_one_stride_are_told_apart_by_where_they_end(tmp_path):
    sizes = {"a": 1, "b": 2, "x0": 1, "y0": 1, "x1": 2, "y1": 3}
    rule = Rule("old.{a}", "new", "(x0 y0)+(x1 y1) b -> ((x0 y0)+(y1 x1) b) a", sizes)
    stored = torch.arange(14).reshape(7, 2)
    store(tmp_path / "it", {"old.0": stored}, {"old.0": [whole((7, 2))]})
    with rearranged(rearranged(checkpoint.open(tmp_path / "it"), [rule]), inverse([rule])) as reader:
        target = torch.full_like(stored, -1)
        fetch(reader.requests([("old.0", [Piece(whole((7, 2)), target)])]))
    assert torch.equal(target, stored)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_digits_of_a_stored_dimension_name_just_the_wanted_indices(factors, data):
    """Or there are none: where a cut of the dimension, or the first index, is within a step."""
    runs, step = [], 1
    for factor in factors:
        step *= factor
        runs.insert(0, Run(step, data.draw(st.integers(2, 3)), 0))
        step *= data.draw(st.integers(1, 3))
    first = data.draw(st.integers(0, 7))
    reach = 1 + first + sum(run.step * (run.length - 1) for run in runs)
    size = reach + data.draw(st.integers(0, 5))
    digits = as_digits(size, first, runs)
    if digits is None:
        return
    radices, offsets, lengths = digits
    assert prod(radices) == size
    indices = []
    for index in itertools.product(*map(range, offsets, map(sum, zip(offsets, lengths, strict=True)))):
        number = 0
        for radix, digit in zip(radices, index, strict=True):
            assert digit < radix
            number = number * radix + digit
        indices.append(number)
    steps = itertools.product(*([run.step * i for i in range(run.length)] for run in runs))
    assert indices == [first + sum(each) for each in steps]


@pytest.mark.parametrize("cuts", [[0, 16], [0, 8, 16], [0, 5, 9, 16], [0, 1, 15, 16]], ids=str)
def test_stored_cuts_through_heads_and_pairs(tmp_path, cuts):
    stored = torch.arange(48).reshape(16, 3)
    boxes = [Box((begin, 0), (end - begin, 3)) for begin, end in itertools.pairwise(cuts)]
    store(str(tmp_path / "it"), {"w": stored}, {"w": boxes})
    for axes, shape, order in (
        ("(h two d) i -> (h d two) i", (2, 2, 4), (0, 2, 1)),
        ("a+a i -> (a 1+1) i", (2, 8), (1, 0)),
    ):
        expected = stored.reshape(*shape, 3).permute(*order, len(order)).reshape(16, 3)
        with rearranged(checkpoint.open(tmp_path / "it"), [Rule("w", "w", axes, {"two": 2, "h": 2})]) as reader:
            assert torch.equal(reader.read("w"), expected)
        with rearranged(
            checkpoint.open(tmp_path / "it"), [Rule("w", "w", axes, {"two": 2, "h": 2}).inverse()]
        ) as reader:
            back = stored.reshape(*(shape[i] for i in order), 3).permute(
                *map(order.index, range(len(order))), len(order)
            )
            assert torch.equal(reader.read("w"), back.reshape(16, 3))
