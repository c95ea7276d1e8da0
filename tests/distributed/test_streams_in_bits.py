"""Tables published in fewer bits, by trainers with any cut: what one process makes of the whole rows."""

import os
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from shardopt import checkpoint
from shardopt.errors import ShardoptError
from shardopt.nn import Grid, ShardedEmbeddingBag, Table
from shardopt.sharding import Box, PiecesTensor, view_of
from shardopt.sharding.view import local_tensors
from tests.harness import run_ranks
from tests.support.in_bits import by_hand
from tests.support.placement import at
from tests.support.streams import same_bits
from tests.support.tables import COLUMNS, ROWS, place

RANKS_STAY = True

DEADLINE_SECONDS = 20.0
STEPS = (1, 2, 3)
HALVES = ("copies", "uneven", "few columns", "cut.halves.weight", "pieces.half", "wrapped.half")
FORMS = {f"^({'|'.join(HALVES)})$": torch.float16, r"^(?!vector|cube)": "int8_rows"}
PLACED = ROWS | COLUMNS
PIECES = {"pieces.int8": (12, 7), "pieces.half": (12, 7)}
WRAPPED = {"wrapped.int8": (5, 8), "wrapped.half": (5, 8)}


def cuts(ranks):
    """Tables of one module, each with another cut."""
    last = tuple(range(ranks))[-2:]
    made = {"rows": "rows", "columns": "columns", "whole": "whole", "replicated": "replicated", "halves": "columns"}
    return made | {"last": Grid(1, len(last), last)} | ({"grid": Grid(ranks // 2, 2)} if ranks % 2 == 0 else {})


def values(step, ranks):
    """The weights of a step, whole, the same on every rank: each step changes a row of each tensor."""
    made = {}
    shapes = PLACED | PIECES | WRAPPED | {f"cut.{name}.weight": (37, 6) for name in cuts(ranks)}
    for number, (name, shape) in enumerate(shapes.items()):
        made[name] = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        for each in range(1, step + 1):
            made[name][each % shape[0]] *= 1 + each
    return made


def served(step, ranks):
    """What is published of them, by name."""
    made = {}
    for name, each in values(step, ranks).items():
        if name in HALVES:
            made[name] = each.half()
        else:
            made |= by_hand(name, each) if each.dim() == 2 else {name: each}
    return made


def pieces_of(whole):
    """A tensor of a kind that knows of no other rank, with other cuts of rows in each part of the columns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    boxes = [Box((0, 3), (4, 4)), Box((4, 3), (8, 4)), Box((0, 0), (9, 3)), Box((9, 0), (3, 3))]
    own = [box for number, box in enumerate(boxes) if number % max(ranks - 1, 1) == rank]  # none on the last
    return PiecesTensor((12, 7), [(box, whole[at(box)].clone()) for box in own], torch.float32)


def wrapped(whole, mesh):
    """As torchrec cuts a table by columns: local shards in a DTensor, two of them on rank 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ends = [2, *(min(3 + other, 8) for other in range(ranks - 1)), 8]
    boxes = [Box((0, begin), (5, end - begin)) for begin, end in pairwise([0, *ends])]
    own = [box for number, box in enumerate(boxes) if max(number - 1, 0) == rank and box.numel]
    local = LocalShardsWrapper([whole[at(box)].clone() for box in own], [box.offsets for box in own])
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride())


def trainers(whole):
    ranks = dist.get_world_size()
    row = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2) if ranks % 2 == 0 else (1, ranks))
    made = {name: place(whole[name], name, row, square) for name in PLACED}
    module = ShardedEmbeddingBag([Table(name, 37, 6, cut=cut) for name, cut in cuts(ranks).items()], row)
    made |= {f"cut.{name}": each for name, each in module.named_parameters()}
    made |= {name: wrapped(whole[name], row) for name in WRAPPED}
    return made | {name: pieces_of(whole[name]) for name in PIECES}


def publish(root, steps=STEPS):
    """Publishes each step, and saves the checkpoint that resumes beside it, whose bits must be those of training."""
    ranks = dist.get_world_size()
    weights = trainers(values(0, ranks))
    with checkpoint.Publisher(
        f"{root}/stream", dtype=FORMS, keep=None, anchor_every=3, durable=False, deadline_seconds=DEADLINE_SECONDS
    ) as publisher:
        for step in steps:
            whole = values(step, ranks)
            for name, each in weights.items():
                for piece in view_of(each).pieces:
                    piece.tensor.copy_(whole[name][at(piece.box)])
            publisher.publish(step, weights)
            checkpoint.save(f"{root}/run-{step}", weights)


def follow(root, trained_on, layout):
    """Follows in another layout."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def placed(each):
        where = Replicate() if layout == "replicas" or (layout == "columns" and each.dim() < 2) else Shard(0)
        where = Shard(each.dim() - 1) if layout == "columns" and each.dim() > 1 else where
        return distribute_tensor(each, mesh, [where], src_data_rank=None)

    app = {name: placed(torch.zeros_like(each)) for name, each in served(0, trained_on).items()}
    follower = checkpoint.Follower(f"{root}/stream", app, deadline_seconds=DEADLINE_SECONDS)
    for step in STEPS:
        assert follower.update(step).step == step
        expected = {name: placed(each) for name, each in served(step, trained_on).items()}
        assert same_bits(local(app), local(expected))


def local(tensors):
    return {name: local_tensors(each)[0] for name, each in tensors.items()}


RANKS = [2, 4, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (1, 3, 6))]


@pytest.mark.parametrize("ranks", RANKS)
def test_tables_of_any_cut_are_published_in_the_bits_of_whole_rows(tmp_path, ranks):
    run_ranks(ranks, publish, str(tmp_path))
    app = {name: torch.full_like(each, 1) for name, each in served(0, ranks).items()}
    follower = checkpoint.Follower(tmp_path / "stream", app)
    for step in STEPS:
        report = follower.update(step)
        assert report.step == step and same_bits(app, served(step, ranks))
        checkpoint.verify(report.url).raise_if_damaged()
        whole = values(step, ranks)
        resumed = {name: torch.zeros_like(each) for name, each in whole.items()}
        checkpoint.load(tmp_path / f"run-{step}", resumed)
        assert same_bits(resumed, whole)
    followers = [(3, "rows")] if ranks == 4 else [(2, "columns"), (3, "replicas")] if ranks == 2 else []
    for others, layout in followers:
        run_ranks(others, follow, str(tmp_path), ranks, layout)


def refused(root, dtype, weights):
    """What each rank is told, though only one of them is at fault."""
    with checkpoint.Publisher(root, dtype=dtype, deadline_seconds=DEADLINE_SECONDS) as publisher:
        with pytest.raises(ShardoptError) as raised:
            publisher.publish(1, weights)
        return f"{raised.value.code}: {raised.value}"


def refusals(root):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    int8 = {"table": "int8_rows"}

    def cut(dim, number):
        whole = torch.ones(6, 4)
        whole[4, 3] = number
        return {"table": distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None), "other": torch.ones(3)}

    told = [
        refused(root, int8, cut(0, torch.nan)),
        refused(root, int8, cut(1, torch.nan)),
        refused(root, int8, cut(1, -torch.inf)),
        refused(root, torch.float16, cut(0, 1e5)),
        refused(root, int8, {"table": torch.ones(4 + rank, 3)}),
        refused(root, int8 if rank else {"tab": "int8_rows"}, cut(0, 1)),
        refused(root, int8 | {"nothing": torch.half}, cut(0, 1)),
        refused(root, int8, cut(0, 1) | ({"table_scale": torch.ones(2)} if rank else {})),
    ]
    assert os.listdir(root) == []
    with checkpoint.Publisher(
        root, dtype=int8 | {"stage.0": torch.half}, deadline_seconds=DEADLINE_SECONDS
    ) as publisher:
        publisher.publish(1, cut(1, 2) | {f"stage.{rank}": torch.ones(3)})  # a pattern may be for another rank
    return told


def test_what_does_not_fit_on_one_rank_is_refused_on_all(tmp_path):
    told = run_ranks(2, refusals, str(tmp_path))
    assert told[0] == told[1]
    rows, columns, infinite, halves, shapes, patterns, idle, taken = told[0]
    assert rows.startswith("cast-overflow") and "table: found NaN or infinity in row 4" in rows and "rank 1" in rows
    for each in (columns, infinite):
        assert each.startswith("cast-overflow") and "table: found NaN or infinity in row 4" in each
    assert halves.startswith("cast-overflow") and "table: found 100000.0 in float32" in halves
    assert shapes.startswith("ranks-differ") and "table: found [5, 3] on rank 1" in shapes
    assert patterns.startswith("ranks-differ") and "dtype: found other rules on rank 1" in patterns
    assert idle.startswith("bad-rules") and "'nothing': found no weight of that name" in idle
    assert taken.startswith("bad-rules") and "table_scale: found a weight" in taken and "rank 1" in taken
    expected = by_hand("table", torch.ones(6, 4).index_put((torch.tensor(4), torch.tensor(3)), torch.tensor(2.0)))
    target = {name: torch.zeros_like(each) for name, each in expected.items()}
    checkpoint.load(tmp_path / "step-00000001", target, strict=checkpoint.Strictness(unexpected="ignore"))
    assert same_bits(target, expected)


def publish_among_two(root):
    """Ranks 1 and 2 of three publish a table that they cut by columns. Then one of them alone, which cannot."""
    rank, both, one = dist.get_rank(), dist.new_group([1, 2]), dist.new_group([1])
    mesh = DeviceMesh("cpu", [1, 2])
    if rank == 0:
        return None
    whole = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    table = {"table": distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)}
    with checkpoint.Publisher(f"{root}/both", dtype={"": "int8_rows"}, process_group=both) as publisher:
        publisher.publish(1, table)
    if rank == 2:
        return None
    with pytest.raises(ShardoptError) as raised:  # noqa: SIM117  # the block may raise at its end alone
        with checkpoint.Publisher(f"{root}/one", dtype={"": "int8_rows"}, process_group=one) as publisher:
            publisher.publish(1, table).result()
    return str(raised.value)


def test_some_ranks_of_a_job_publish_in_fewer_bits_if_they_have_all_of_a_table(tmp_path):
    _, told, _ = run_ranks(3, publish_among_two, str(tmp_path))
    assert "table" in told and not list(tmp_path.glob("one/step-*/manifest.json"))
    expected = by_hand("table", torch.randn(50, 6, generator=torch.Generator().manual_seed(0)))
    target = {name: torch.zeros_like(each) for name, each in expected.items()}
    checkpoint.load(tmp_path / "both/step-00000001", target)
    assert same_bits(target, expected)
