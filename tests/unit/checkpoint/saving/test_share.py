"""Rounds in which boxes are sent: everything once, and no rank sends or gets more than the bound in any of them."""

import random
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from shardopt.checkpoint.sources.reading import broadcast as share
from shardopt.checkpoint.sources.reading.broadcast import BroadcastReads
from shardopt.sharding.box import Box, cover_faults, whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from shardopt.sharding.pieces import View

MIB = 1 << 20


def views_of(layouts, dtype=torch.float32):
    return {f"k{i}": View(layout.shape, dtype, (), layout) for i, layout in enumerate(layouts)}


def reads_of(views, size):
    return BroadcastReads(views, SimpleNamespace(rank=0, size=size, device=torch.device("cpu")))


REGULAR = ["on all", "in two replicas", "in halves"]


def check(views, size, bound, most_rounds=64):
    """Every box is sent once to each of its holders but the reader, in not many more rounds than there must be."""
    reads = reads_of(views, size)
    rounds = list(reads._rounds())
    all_sent, all_got = Counter(), Counter()
    sent_boxes = defaultdict(list)
    for parts in rounds:
        sends, gets = Counter(), Counter()
        for part in parts:
            nbytes = part.box.numel * views[part.key].dtype.itemsize
            others = [rank for rank in part.holders if rank != part.reader]
            assert part.reader in part.holders and others
            sends[part.reader] += nbytes * len(others)
            gets.update(dict.fromkeys(others, nbytes))
            sent_boxes[part.key, part.holders].append(part.box)
        assert max([*sends.values(), *gets.values()]) <= bound
        all_sent.update(sends)
        all_got.update(gets)
    needed = -(-max([0, *all_sent.values(), *all_got.values()]) // bound)
    assert needed <= len(rounds) <= most_rounds * needed + 1
    for key, view in views.items():
        layout = view.layout
        if layout.holders is None:
            assert cover_faults(layout.shape, sent_boxes[key, tuple(range(size))]) == []
        else:
            for box, holders in zip(layout.boxes, layout.holders, strict=True):
                inside = [each for each in sent_boxes[key, holders] if box.contains(each)]
                if len(holders) > 1:
                    assert cover_faults(box.sizes, [each.within(box) for each in inside]) == []
                else:
                    assert not inside


def layouts_of(kind, size):
    line = tuple(range(size))
    shape = (6144, 1024)  # 24 MiB
    if kind == "on all":
        return [
            Layout.replicated(shape),
            mesh_layout(shape, Mesh((size,), line), ()),
            Layout.replicated((3, 5)),
            Layout.replicated(()),
        ]
    if kind == "in two replicas":
        return [mesh_layout(shape, Mesh((2, size // 2), line), (Split(1, 0),))] * 2
    if kind == "in halves":
        return [mesh_layout(shape, Mesh((size // 2, 2), line), (Split(1, 0),))] * 2
    if kind == "with the first":  # each rank has something in common with rank 0, which gets from all or sends to all
        boxes = {Box((96 * i, 0), (96, 1024)): (0, 1 + i % (size - 1)) for i in range(64)}
        return [Layout.from_holders(shape, boxes)]
    if kind == "by chance":
        pick = random.Random(size)
        boxes = {Box((96 * i, 0), (96, 1024)): pick.sample(line, pick.randint(1, min(size, 9))) for i in range(64)}
        return [Layout.from_holders(shape, boxes), Layout.replicated(shape)]
    raise AssertionError(kind)


@pytest.mark.parametrize("size", [2, 4, 64])
@pytest.mark.parametrize("kind", [*REGULAR, "with the first", "by chance"])
def test_no_rank_sends_or_gets_more_than_the_bound(kind, size):
    check(views_of(layouts_of(kind, size)), size, share._ROUND_BYTES, 4 if kind in REGULAR else 64)


def test_the_bound_holds_for_whatever_it_is(monkeypatch):
    for bound in (1 << 20, 3 << 18, 100_000):
        monkeypatch.setattr(share, "_ROUND_BYTES", bound)
        check(views_of(layouts_of("by chance", 8), torch.float64), 8, bound)


def test_thousands_of_ranks_send_pieces_of_a_few_kib():
    size = 8192
    views = views_of([Layout.replicated((4096, 1024))])
    reads = reads_of(views, size)
    first = next(reads._rounds())
    assert max(part.box.numel * 4 for part in first) == share._LEAST_BYTES


def test_every_rank_works_out_the_same_rounds():
    views = views_of(layouts_of("by chance", 6))
    rounds = [
        [
            [tuple(part) for part in parts]
            for parts in BroadcastReads(views, SimpleNamespace(rank=rank, size=6))._rounds()
        ]
        for rank in range(6)
    ]
    assert all(each == rounds[0] for each in rounds)


def test_nothing_is_sent_where_nothing_is_shared():
    line = Mesh((4,), (0, 1, 2, 3))
    assert list(reads_of(views_of([mesh_layout((8, 2), line, (Split(0, 0),))]), 4)._rounds()) == []
    assert list(reads_of({}, 4)._rounds()) == []
    assert whole((0, 3)).numel == 0
    assert list(reads_of(views_of([Layout.replicated((0, 3))]), 4)._rounds()) == []
