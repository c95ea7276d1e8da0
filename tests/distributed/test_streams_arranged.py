"""Weights published as those who serve them have them, by trainers in any layout: like rules on whole tensors."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Rule
from shardopt.checkpoint.saving.writing import staging
from shardopt.errors import ShardoptError
from tests.harness import run_ranks
from tests.support.arranged import RULES, SHAPES, by_hand, module_of
from tests.support.streams import same_bits, train

RANKS_STAY = True

DEADLINE_SECONDS = 20.0
STEPS = (1, 2, 3)


def values(step):
    """The weights of a step, whole, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for each in range(1, step + 1):
        train(whole, each)
    return whole


def on_mesh(whole, shape, *placements):
    mesh = init_device_mesh("cpu", shape)
    return {
        name: distribute_tensor(each, mesh, [place(each) for place in placements], src_data_rank=None)
        for name, each in whole.items()
    }


def rows(_):
    return Shard(0)


def columns(tensor):
    return Shard(tensor.ndim - 1)


def either(tensor):
    """As tensor parallelism has them: some by rows, some by columns, vectors whole."""
    return Replicate() if tensor.ndim == 1 else Shard(0 if tensor.shape[0] > tensor.shape[1] else 1)


def sharded(whole, mesh):
    module = module_of(whole)
    for layer in module.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def staged(whole):
    """Layers by pipeline stage, and the experts that are apart by rank: each tensor is on one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    owner = {name: (int(name.split(".")[3]) if ".apart." in name else len(name)) % size for name in whole}
    return {name: each.clone() for name, each in whole.items() if owner[name] == rank}


def hybrid():
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))


LAYOUTS = {
    "fully_shard": lambda whole: sharded(whole, init_device_mesh("cpu", (dist.get_world_size(),))),
    "hybrid": lambda whole: sharded(whole, hybrid()),
    "tensor parallel": lambda whole: on_mesh(whole, (dist.get_world_size(),), either),
    "columns": lambda whole: on_mesh(whole, (dist.get_world_size(),), columns),
    "both": lambda whole: on_mesh(whole, (2, dist.get_world_size() // 2), rows, either),
    "stages": staged,
    "replicas": lambda whole: {name: each.clone() for name, each in whole.items()},
}
IN_TURN = {  # by the number of ranks; all others are exhaustive
    2: ["fully_shard", "columns", "stages"],
    4: ["fully_shard", "hybrid", "tensor parallel", "both", "stages", "replicas"],
}


def publish(root, layouts, least_shared_bytes=0, **options):
    staging._LEAST_SHARED_BYTES = least_shared_bytes  # as for many weights: ranks copy only what they write
    for layout in layouts:
        place = os.path.join(root, layout)
        with checkpoint.Publisher(
            place, rearrange=RULES, keep=None, durable=False, deadline_seconds=DEADLINE_SECONDS, **options
        ) as publisher:
            for step in STEPS:
                publisher.publish(step, LAYOUTS[layout](values(step))).result()


def check(root, ranks, layouts, least_shared_bytes=0, most=0.25):
    run_ranks(ranks, publish, str(root), layouts, least_shared_bytes)
    for layout in layouts:
        assert is_followed(root / layout, [by_hand(values(step)) for step in STEPS], most)


@pytest.mark.parametrize("ranks", IN_TURN)
def test_any_layout_is_published_as_the_rules_rearrange_whole_tensors(tmp_path, ranks):
    check(tmp_path, ranks, IN_TURN[ranks])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_every_layout_on_other_ranks_is_published_as_the_rules_rearrange_whole_tensors(tmp_path, ranks):
    layouts = [each for each in LAYOUTS if ranks % 2 == 0 or each not in ("hybrid", "both")]
    # Boxes below 1 KB are written whole, and six ranks have many of them.
    check(tmp_path, ranks, layouts, least_shared_bytes=16 << 20, most=0.25 if ranks < 6 else 1)


def is_followed(root, expected, most):
    """By loads of each step, and by a follower that has no rules and reads deltas."""
    app = {name: torch.full_like(each, -1) for name, each in expected[0].items()}
    follower = checkpoint.Follower(root, app)
    for step, of_step in zip(STEPS, expected, strict=True):
        target = {name: torch.full_like(each, -1) for name, each in of_step.items()}
        report = checkpoint.load(root / f"step-{step:08d}", target)
        assert not report.missing and not report.unexpected and same_bits(target, of_step)
        update = follower.update(step)
        assert same_bits(app, of_step)
        if step > 1:
            assert update.bytes_read < most * sum(each.nbytes for each in app.values()), (root, update)
    return True


def refused(root, rules, weights):
    """What each rank is told, though only one of them is at fault."""
    with checkpoint.Publisher(root, rearrange=rules, deadline_seconds=DEADLINE_SECONDS) as publisher:
        with pytest.raises(ShardoptError) as raised:
            publisher.publish(1, weights)
        return str(raised.value)


def refusals(root):
    rank = dist.get_rank()
    own = {f"layers.{rank}.w": torch.ones(4, 6), f"experts.{rank}": torch.ones(4, 6 + rank), "both": torch.ones(3)}
    return [
        refused(root, [Rule("layers.{n}.w", "h.{n}", "(a two) i -> (two a) i", {"two": 3})], own),
        refused(root, [Rule("experts.{e}", "stacked", "o i -> e o i")], own),
        refused(root, [Rule("layers.1.w", "layers.0.w")], own),
        refused(root, [Rule("nothing.{n}.w", "h.{n}")], own),
        refused(root, [Rule("both", f"both{rank}")], own),
        refused(root, [Rule("layers.{n}.w", "h.{n}")], {"layers.0.w": torch.ones(4 + rank, 6)}),
        refused(
            root, [Rule("layers.{n}.w", "h.{n}")], {"layers.0.w": torch.ones(4, 6).to_sparse() if rank else own["both"]}
        ),
    ]


def test_what_does_not_fit_is_refused_on_all_ranks(tmp_path):
    told = run_ranks(2, refusals, str(tmp_path))
    assert told[0] == told[1]
    division, stack, twice, nothing, others, shapes, sparse = told[0]
    assert "layers.0.w" in division and "layers.1.w" in division and "the shape [4, 6]" in division
    assert "experts.1: found the shape [4, 7]" in stack
    assert "layers.0.w" in twice and "one for each name" in twice
    assert "the rule nothing.{n}.w -> h.{n}: found no weight of that name" in nothing
    assert "rearrange: found other rules on rank 1" in others
    assert "[5, 6] float32 on rank 1" in shapes
    assert "sparse" in sparse and "rank 1" in sparse
    assert not list(tmp_path.iterdir())


def publish_among_two(root):
    """Ranks 1 and 2 of three publish, each an expert of its own, and halves of what is fused."""
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    mesh = DeviceMesh("cpu", [1, 2])
    if rank == 0:
        return
    torch.manual_seed(0)
    fused = distribute_tensor(torch.randn(30, 40), mesh, [Shard(0)], src_data_rank=None)
    rules = [Rule("fused", ("up", "down"), "i+i o -> o i, o i"), Rule("experts.{e}", "experts", "o i -> e o i")]
    with checkpoint.Publisher(root, rearrange=rules, process_group=group, durable=False) as publisher:
        publisher.publish(1, {"fused": fused, f"experts.{rank - 1}": torch.full((4, 5), float(rank))}).result()


def test_some_ranks_of_a_job_publish_by_rules(tmp_path):
    run_ranks(3, publish_among_two, str(tmp_path))
    torch.manual_seed(0)
    fused = torch.randn(30, 40)
    experts = torch.stack([torch.full((4, 5), 1.0), torch.full((4, 5), 2.0)])
    expected = {"up": fused[:15].t(), "down": fused[15:].t(), "experts": experts}
    target = {name: torch.full(each.shape, -1.0) for name, each in expected.items()}
    checkpoint.load(tmp_path / "step-00000001", target)
    assert same_bits(target, expected)
