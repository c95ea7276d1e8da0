"""Who writes what: everything once, by a rank that holds it, and each about as much as the others."""

import itertools
import random
import time
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.checkpoint.format.assign import Member, assign, check_covers
from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.saving.planning.describe import Geometry
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan
from shardopt.errors import LayoutError
from shardopt.sharding.box import Box, cover_faults, whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from tests.support.drawn import examples

MIB = 1 << 20
KINDS = ["plain", "plain on some", "rows", "columns", "replicas of rows", "rows of replicas", "held"]


def layout_of(kind, shape, ranks, pick):
    """A layout as some way of training gives it, and the ranks that have the tensor."""
    everyone = tuple(range(ranks))
    line = Mesh((ranks,), everyone)
    if kind.startswith("plain"):
        some = tuple(sorted(pick.sample(everyone, pick.randint(1, ranks)))) if kind == "plain on some" else everyone
        return Layout.replicated(shape), some
    if kind == "held":  # as ShardedTensor and LocalShardsWrapper have them: uneven, several on one rank, some nowhere
        cuts = sorted({0, shape[0], *(pick.randint(0, shape[0]) for _ in range(4))})
        boxes = [Box((a, 0), (b - a, shape[1])) for a, b in itertools.pairwise(cuts)]
        return Layout.from_holders(shape, {box: [pick.randrange(ranks)] for box in boxes}), everyone
    if kind in ("rows", "columns"):
        return mesh_layout(shape, line, (Split(0, int(kind == "columns")),)), everyone
    replicas = pick.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    mesh = Mesh((replicas, ranks // replicas), everyone)
    return mesh_layout(shape, mesh, (Split(int(kind == "replicas of rows"), 0),)), everyone


def job(seed, kinds=KINDS, most=12):
    """Tensors of a job of some ranks, by key."""
    pick = random.Random(seed)
    ranks = pick.choice([1, 2, 3, 4, 6, 8])
    members = {}
    for i in range(pick.randint(1, most)):
        shape = (pick.choice([1, 2, 7, 64, 1000, 4096]), pick.choice([1, 100, 1024, 5000]))
        layout, having = layout_of(pick.choice(kinds), shape, ranks, pick)
        members[f"k{i}"] = Member((f"k{i}",), DTYPES[pick.choice(["float32", "bfloat16"])], layout, having)
    return ranks, members


def holders_of(member):
    return member.layout.holders or (member.ranks,) * len(member.layout.boxes)


def loads(ranks, members, assigned):
    load = [0] * ranks
    for key, member in members.items():
        for box, (rank, _) in zip(assigned[key].boxes, assigned[key].writers, strict=True):
            load[rank] += box.numel * member.dtype.itemsize
    return load


def least_possible(ranks, members):
    """The least that the fullest rank must write, if boxes could be cut anywhere: for each set of ranks, what only they
    hold, shared out evenly."""
    held_by = defaultdict(int)
    for member in members.values():
        for box, holders in zip(member.layout.boxes, holders_of(member), strict=True):
            held_by[frozenset(holders)] += box.numel * member.dtype.itemsize
    sets = (frozenset(some) for n in range(1, ranks + 1) for some in itertools.combinations(range(ranks), n))
    return max(sum(nbytes for holders, nbytes in held_by.items() if holders <= some) / len(some) for some in sets)


@settings(max_examples=examples(150))
@given(st.integers(0, 10**9), st.booleans())
def test_everything_is_written_once_by_a_rank_that_holds_it(seed, cut_plain):
    _, members = job(seed)
    check_covers(members)
    assigned = assign(members, cut_plain)
    assert list(assigned) == list(members)
    for key, member in members.items():
        boxes, writers = assigned[key].boxes, assigned[key].writers
        assert cover_faults(member.layout.shape, boxes) == []
        assert len(set(writers)) == len(writers) == len(boxes)  # one file has one box of a key
        for box, (rank, _) in zip(boxes, writers, strict=True):
            held_here = zip(member.layout.boxes, holders_of(member), strict=True)
            assert any(whole_box.contains(box) and rank in holders for whole_box, holders in held_here)
        slots = defaultdict(list)
        for rank, slot in writers:
            slots[rank].append(slot)
        assert all(sorted(numbers) == list(range(len(numbers))) for numbers in slots.values())  # no file is left out


@settings(max_examples=examples(150))
@given(st.integers(0, 10**9), st.booleans())
def test_every_rank_works_out_the_same(seed, cut_plain):
    """Whatever the order in which it knows the tensors, and whatever it has worked out before."""
    _, members = job(seed)
    turned = dict(reversed(members.items()))
    copied = {
        key: Member(m.path, m.dtype, Layout.from_json(m.layout.to_json()), (*m.ranks,)) for key, m in turned.items()
    }

    def plain(assigned):
        return {key: (each.shape, each.boxes, each.writers) for key, each in sorted(assigned.items())}

    first, *others = [plain(assign(each, cut_plain)) for each in (members, turned, copied)]
    assert others == [first, first]


@settings(max_examples=examples(300))
@given(st.integers(0, 10**9))
def test_no_rank_writes_much_more_than_it_must(seed):
    """The bound is the least possible, which is the mean where the holders allow it."""
    ranks, members = job(seed, [kind for kind in KINDS if kind != "plain on some"])
    load = loads(ranks, members, assign(members))
    assert max(load) <= 1.1 * least_possible(ranks, members) + MIB
    assert sum(load) == sum(member.nbytes for member in members.values())


@pytest.mark.parametrize("seed", range(40))
def test_irregular_replicas_are_shared_too(seed):
    ranks, members = job(seed)
    assert max(loads(ranks, members, assign(members))) <= 1.25 * least_possible(ranks, members) + MIB


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("mib", [0.5, 1.6, 8, 300])
def test_one_replicated_tensor_is_shared_evenly(ranks, mib):
    shape = (int(mib * MIB) // 4096, 1024)
    load = loads(
        ranks,
        members := {"x": Member(("x",), DTYPES["float32"], Layout.replicated(shape), tuple(range(ranks)))},
        assign(members),
    )
    assert max(load) <= 1.1 * sum(load) / ranks + MIB


@settings(max_examples=examples(150))
@given(st.integers(0, 10**9))
def test_plain_tensors_that_may_differ_are_written_whole(seed):
    """By the rank with the least to write, so that none has more than one of them beyond what it must."""
    ranks, members = job(seed)
    assigned = assign(members, cut_plain=False)
    plain = {key: member for key, member in members.items() if member.layout.holders is None}
    assert all(assigned[key].boxes == (whole(member.layout.shape),) for key, member in plain.items())
    slack = max((member.nbytes for member in plain.values()), default=0)
    assert max(loads(ranks, members, assigned)) <= 1.25 * least_possible(ranks, members) + slack + MIB


def test_large_plain_tensors_go_to_the_rank_with_least():
    rows = {"a": 4000, "b": 1000, "c": 1000, "d": 1000, "e": 1000}
    members = {key: Member((key,), DTYPES["float32"], Layout.replicated((n, 1024)), (0, 1)) for key, n in rows.items()}
    assigned = assign(members, cut_plain=False)
    assert [assigned[key].writers[0][0] for key in "abcde"] == [0, 1, 1, 1, 1]
    assert max(len(each.boxes) for each in assign(members, cut_plain=True).values()) == 1
    del members["e"]
    assert max(len(each.boxes) for each in assign(members, cut_plain=True).values()) == 2


def test_many_small_replicated_tensors_are_dealt_whole():
    everyone = tuple(range(4))
    members = {
        f"k{i:04d}": Member(("k",), DTYPES["float32"], Layout.replicated((100, 100)), everyone) for i in range(1000)
    }
    assigned = assign(members)
    assert all(len(each.boxes) == 1 for each in assigned.values())
    load = loads(4, members, assigned)
    assert max(load) <= 1.1 * sum(load) / 4 + MIB
    assert len(set(map(id, assigned.values()))) == 4  # as few layouts for the manifest as there are ranks


def test_empty_and_scalar_tensors_are_written_once():
    members = {
        "empty": Member(("empty",), DTYPES["float32"], Layout.replicated((0, 4)), (0, 1)),
        "scalar": Member(("scalar",), DTYPES["float32"], Layout.replicated(()), (1,)),
        "shards": Member(
            ("shards",), DTYPES["int8"], mesh_layout((0, 4), Mesh((3,), (0, 1, 2)), (Split(0, 0),)), (0, 1, 2)
        ),
    }
    assigned = assign(members)
    assert [assigned[key].boxes for key in members] == [(whole((0, 4)),), (whole(()),), (whole((0, 4)),)]
    assert assigned["scalar"].writers == ((1, 0),)
    assert assign({}) == {}


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([Box((0, 0), (2, 3))], r"no box holds offsets \(2, 0\) sizes \(2, 3\)"),
        ([Box((0, 0), (3, 3)), Box((2, 0), (2, 3))], r"boxes .* both hold offsets \(2, 0\) sizes \(1, 3\)"),
        ([Box((0, 0), (4, 3)), Box((4, 0), (1, 3))], "reaches beyond"),
        ([], "no box holds"),
    ],
    ids=["hole", "overlap", "beyond", "none"],
)
def test_holes_and_overlaps_are_named(boxes, said):
    layout = Layout((4, 3), tuple(boxes), tuple((i,) for i in range(len(boxes))))
    sound = Member(("y",), DTYPES["int8"], Layout.replicated((2,)), (0, 1))
    members = {
        "x": Member(("x",), DTYPES["int8"], layout, (0, 1)),
        "y": sound,
        "z": Member(("z",), DTYPES["int8"], layout, (0, 1)),
    }
    with pytest.raises(LayoutError, match=said) as caught:
        check_covers(members)
    assert {problem.key for problem in caught.value.problems} == {"x", "z"}


def test_a_rank_writes_what_it_was_assigned():
    ranks, members = job(5, most=30)
    plan = SavePlan(Geometry(members, {"rng": ("rng",)}), ranks)
    written = Counter()
    for rank in range(ranks):
        own = RankWrites(plan, rank)
        for slot, parts in own.slots.items():
            assert len({part.key for part in parts}) == len(parts)
            assert [part.dtype.itemsize for part in parts] == sorted(
                (part.dtype.itemsize for part in parts), reverse=True
            )
            written.update((part.key, part.box, rank, slot) for part in parts)
            assert (rank, slot) in plan.files
    expected = Counter(
        (key, box, *writer)
        for key, each in plan.assigned.items()
        for box, writer in zip(each.boxes, each.writers, strict=True)
    )
    assert written == expected
    assert {(rank, 0) for rank in range(ranks)} <= set(plan.files)  # each writes what it has for itself


def test_headers_are_kept_for_the_last_length_only():
    """Values per rank change their length with every save; what was made for them must not pile up."""
    own = RankWrites(SavePlan(Geometry({}, {"rng": ("rng",)}), 1), 0)
    assert own.header(0, 10) is own.header(0, 10)
    for nbytes in range(1, 50):
        own.header(0, nbytes)
    assert len(own._headers) == 1


def test_a_large_mesh_takes_little_time():
    """512 ranks, 64 shards of 8 replicas: 600 parameters and what Adam keeps of them."""
    mesh = Mesh((8, 64), tuple(range(512)))
    everyone = tuple(range(512))
    layouts = [mesh_layout((4096, 512 + 8 * i), mesh, (Split(1, 0),)) for i in range(20)]
    members = {
        f"{state}.{i}": Member(("x",), DTYPES["float32"], layouts[i % 20], everyone)
        for i in range(600)
        for state in "pmv"
    }
    members |= {f"n.{i}": Member(("x",), DTYPES["float32"], Layout.replicated((64,)), everyone) for i in range(600)}
    begin = time.process_time()
    plan = SavePlan(Geometry(members, {}), 512)
    RankWrites(plan, 77)
    assert time.process_time() - begin < 3
    load = loads(512, members, plan.assigned)
    assert max(load) <= 1.1 * sum(load) / 512 + MIB
