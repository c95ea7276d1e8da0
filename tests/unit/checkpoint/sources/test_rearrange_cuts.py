"""Cuts of local memory, against the oracle that moves each element by itself: any rule, any pieces, any strides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.checkpoint.rearrange import Rule, inverse
from shardopt.checkpoint.rearrange.cuts import boxes_of_zeros, cuts_of
from shardopt.checkpoint.stream.made import made
from shardopt.sharding.box import Box, cover_faults, whole
from tests.support.boxes import partitions
from tests.unit.checkpoint.sources.test_read import at
from tests.unit.checkpoint.sources.test_rearrange_geometry import FEW, blank, by_hand, rules


def strided(full, box, order):
    """A piece of a tensor in memory whose dimensions are in another order."""
    larger = torch.full([box.sizes[dim] + 2 for dim in order] or [1], -1)
    view = larger[tuple(slice(1, 1 + box.sizes[dim]) for dim in order)] if order else larger.reshape(())
    piece = view.permute([order.index(dim) for dim in range(full.ndim)])
    piece.copy_(full[at(box)])
    return piece


def published(stored, pieces, rule):
    """The new tensors as cuts of pieces have them, each of whose elements is in one box."""
    told = {name: [[*each.shape], "int64", name] for name, each in stored.items()}
    of_job = made(told, [rule])
    boxes = {new: [] for new in of_job.tensors}
    for name, of_name in pieces.items():
        for new, component in of_job.parts.get(name, ()):
            for box, piece in of_name:
                boxes[new] += [(cut.box, cut.of(piece).reshape(cut.box.sizes)) for cut in cuts_of(component, box)]
    for new, tensor in of_job.tensors.items():
        for component in tensor.components:
            if component.key is None:
                boxes[new] += [(box, torch.zeros(box.sizes)) for box in boxes_of_zeros(component, tensor.shape)]
    found = {}
    for new, of_new in boxes.items():
        shape = of_job.tensors[new].shape
        assert not cover_faults(shape, [box for box, _ in of_new])
        found[new] = torch.full(shape, -1)
        for box, memory in of_new:
            found[new][at(box)] = memory
    return found


def numbered(structure, sizes):
    stored = blank("old", structure[2], structure[4]["old"], sizes)
    for i, tensor in enumerate(stored.values()):
        tensor.copy_(torch.arange(1, tensor.numel() + 1).reshape(tensor.shape) + 1000 * i)
    return stored


@FEW
@given(rule=rules(), data=st.data())
def test_pieces_of_any_tensor_are_boxes_of_the_new_ones(rule, data):
    check_any_pieces(rule, data)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@settings(FEW, max_examples=2000)
@given(rule=rules(), data=st.data())
def test_pieces_of_very_many_tensors_are_boxes_of_the_new_ones(rule, data):
    check_any_pieces(rule, data)


def check_any_pieces(rule, data):
    rule, structure, sizes = rule
    stored = numbered(structure, sizes)
    pieces = {}
    for name, full in stored.items():
        boxes = data.draw(partitions(tuple(full.shape)))[1]
        orders = [data.draw(st.permutations(range(full.ndim))) for _ in boxes]
        pieces[name] = [(box, strided(full, box, order)) for box, order in zip(boxes, orders, strict=True)]
    expected = by_hand(stored, structure, sizes)
    found = published(stored, pieces, rule)
    assert found.keys() == expected.keys()
    for new, full in expected.items():
        assert torch.equal(found[new], full), new


@pytest.mark.parametrize(
    ("axes", "sizes", "rows", "count", "is_view"),
    [
        ("i o -> o i", {}, (0, 12), 1, True),
        ("(h d) i -> h d i", {"h": 3}, (0, 12), 1, True),
        ("a i -> (a i)", {}, (0, 12), 1, True),
        ("a i -> (i a)", {}, (0, 12), 1, False),
        ("(h two d) i -> (h d two) i", {"h": 2, "two": 2}, (0, 12), 1, False),
        ("(h two d) i -> (h d two) i", {"h": 2, "two": 2}, (0, 6), 1, False),  # a head
        (
            "(h two d) i -> (h d two) i",
            {"h": 2, "two": 2},
            (6, 9),
            3,
            True,
        ),  # a half of one, of which each row is apart
        ("(h two d) i -> (two h d) i", {"h": 2, "two": 2}, (0, 6), 2, True),
        ("(g _a+r+_b) i -> (g r) i", {"g": 3, "_a": 1, "r": 2, "_b": 1}, (0, 12), 1, False),
    ],
)
def test_a_piece_is_cut_where_the_new_tensor_has_its_elements_apart(axes, sizes, rows, count, is_view):
    begin, end = rows
    full = torch.arange(60.0).reshape(12, 5)[begin:end].clone()
    ((_, component),) = made({"w": [[12, 5], "float32", "w"]}, [Rule("w", "w", axes, sizes)]).parts["w"]
    cuts = list(cuts_of(component, Box((begin, 0), (end - begin, 5))))
    assert len(cuts) == count and sum(cut.box.numel for cut in cuts) in (full.numel(), 30)
    assert all((cut.of(full).shape == cut.box.sizes) == is_view for cut in cuts)
    assert {cut.of(full).untyped_storage().data_ptr() for cut in cuts} == {full.untyped_storage().data_ptr()}


def test_replicas_in_memory_of_other_strides_are_cut_into_the_same_boxes():
    """Else ranks with the same piece would have boxes that overlap, which a save refuses."""
    full = torch.arange(24.0).reshape(4, 6)
    ((_, component),) = made({"w": [[4, 6], "float32", "w"]}, [Rule("w", "w", "a b -> (a b)")]).parts["w"]
    (cut,) = cuts_of(component, whole((4, 6)))
    other = full.t().contiguous().t()
    assert cut.box == Box((0,), (24,))
    assert cut.of(full).shape == (24,) and cut.of(other).shape == (4, 6)
    assert torch.equal(cut.of(other).reshape(24), cut.of(full))


def test_zeros_are_left_out_on_the_way_back():
    rule = Rule("w", "w", "v i -> v+_more i", {"_more": 2})
    padded = torch.cat([torch.arange(6.0).reshape(3, 2), torch.zeros(2, 2)])
    (back,) = inverse([rule])
    found = published({"w": padded.long()}, {"w": [(whole((5, 2)), padded.long())]}, back)
    assert torch.equal(found["w"], padded[:3].long())
