"""Who works on which matrix: every rank makes the same plan, and each box travels to its owner once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.algorithms.gathering.assignment import Job, plan
from shardopt.sharding.box import Box, whole
from shardopt.sharding.layout import Layout


def rows(shape, holders):
    """A matrix cut into as many runs of rows as there are tuples of holders."""
    count = -(-shape[0] // len(holders))
    boxes = {}
    for i, own in enumerate(holders):
        start, end = min(i * count, shape[0]), min((i + 1) * count, shape[0])
        if start < end:
            boxes[Box((start, 0), (end - start, shape[1]))] = own
    return Layout.from_holders(shape, boxes)


@st.composite
def jobs(draw):
    """Some matrices over the same ranks: sharded, replicated, or sharded with replicas."""
    replicas, shards = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks = draw(st.permutations(range(3, 3 + 2 * replicas * shards, 2)))  # any numbers, in any order
    layouts = [
        [tuple(ranks[r * shards + s] for r in range(replicas)) for s in range(shards)],
        [tuple(ranks)],
        [(rank,) for rank in ranks],
    ]
    made = []
    for _ in range(draw(st.integers(1, 12))):
        shape = draw(st.integers(1, 9)), draw(st.integers(1, 5))
        made.append(Job(rows(shape, draw(st.sampled_from(layouts))), draw(st.integers(0, 100))))
    return tuple(made), tuple(ranks)


@given(jobs(), st.integers(1, 60))
def test_ranks_agree_and_every_box_goes_where_it_belongs(given, most):
    them, ranks = given
    plans = {rank: plan(them, ranks, rank, most) for rank in ranks}
    assert len({len(rounds) for rounds in plans.values()}) == 1
    owners = [rank for job in range(len(them)) for rank in ranks for here in plans[rank] if job in here.owned]
    assert len(owners) == len(them)  # each has one
    gathered, returned = Counter(), Counter()
    for number in range(len(plans[ranks[0]])):
        here = {rank: plans[rank][number] for rank in ranks}
        assert any(each.owned for each in here.values())
        for i, one in enumerate(ranks):
            for k, other in enumerate(ranks):
                for sent, got in (("send_to_owner", "recv_from_holders"), ("send_to_holders", "recv_from_owner")):
                    assert between(getattr(here[one], sent), k) == between(getattr(here[other], got), i)
        for rank, each in here.items():
            gathered.update((rank, *part) for part in each.recv_from_holders.boxes)
            returned.update((rank, *part) for part in each.recv_from_owner.boxes)
    assert gathered == Counter((owners[j], j, box) for j, job in enumerate(them) for box in job.layout.boxes)
    assert returned == Counter(
        (holder, j, box)
        for j, job in enumerate(them)
        for box, holders in zip(job.layout.boxes, job.layout.holders, strict=True)
        for holder in holders
    )


def between(route, peer):
    """The boxes of a route that go to, or come from, one peer, in order."""
    begin, end = sum(route.counts[:peer]), sum(route.counts[: peer + 1])
    boxes, at = [], 0
    for number, box in route.boxes:
        if begin <= at < end:
            boxes.append((number, box))
        at += box.numel
    assert sum(box.numel for _, box in boxes) == end - begin
    return boxes


@given(jobs())
def test_work_is_balanced(given):
    them, ranks = given
    loads = [sum(them[job].cost for job in plan(them, ranks, rank, 1 << 40)[0].owned) for rank in ranks]
    average, largest = sum(loads) / len(ranks), max(job.cost for job in them)
    assert max(loads) <= average + largest


def test_the_largest_are_dealt_first():
    layout = Layout.from_holders((4, 2), {whole((4, 2)): (0, 1)})
    them = tuple(Job(layout, cost) for cost in (1, 1, 1, 1, 1, 1, 6))
    for rank in (0, 1):
        assert sum(them[job].cost for job in plan(them, (0, 1), rank, 1 << 40)[0].owned) == 6


@given(jobs(), st.integers(1, 60))
def test_a_round_is_not_larger_than_asked_unless_it_has_one_matrix(given, most):
    them, ranks = given
    for rank in ranks:
        for here in plan(them, ranks, rank, most):
            assert len(here.owned) == 1 or sum(them[job].elements for job in here.owned) <= most
            assert sum(here.send_to_holders.counts) == sum(them[job].elements for job in here.owned)


def test_a_replica_nearby_gives():
    """Two hosts of four ranks with a replica each: no box has to cross to reach its owner."""
    layout = rows((8, 2), [(rank, rank + 4) for rank in range(4)])
    ranks = tuple(range(8))
    rounds = {rank: plan((Job(layout, 1),) * 8, ranks, rank, 1 << 40)[0] for rank in ranks}
    for rank, here in rounds.items():
        assert len(here.owned) == 1
        for peer, count in enumerate(here.recv_from_holders.counts):
            assert count == (4 if peer // 4 == rank // 4 else 0)


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_whole_on_its_owner_is_not_sent_to_it(count):
    layout = Layout.from_holders((4, 2), {whole((4, 2)): tuple(range(count))})
    for rank in range(count):
        (here,) = plan((Job(layout, 5),), tuple(range(count)), rank, 100)
        others = [n for peer, n in enumerate(here.send_to_owner.counts) if peer != rank]
        assert not any(others)
