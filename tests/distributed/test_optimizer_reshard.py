"""A wrapped optimizer saved by some ranks, loaded by others, whatever the placements: the same full tensors."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardopt
from shardopt import (
    GradientClipping,
    GradientClippingOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    checkpoint,
)
from shardopt.sharding.view import local_tensors, view_of
from tests.harness import run_ranks

RANKS_STAY = True

SHAPES = {"even": (8, 12), "uneven": (7, 5), "short": (2, 3), "vector": (9,)}
STYLES = ("rows", "columns", "replicated", "sharded tensor")


def known(fqn, entry):
    """The global value of an entry of state, which no other entry has."""
    shape = SHAPES[fqn]
    start = 1000 * sorted(SHAPES).index(fqn) + 100_000 * ("exp_avg", "exp_avg_sq").index(entry)
    return (start + torch.arange(torch.Size(shape).numel(), dtype=torch.float32)).reshape(shape)


def parameter(fqn, style):
    shape = SHAPES[fqn]
    size, rank = dist.get_world_size(), dist.get_rank()
    if style == "sharded tensor":
        cuts = [0, *sorted({shape[0] * (i + 1) ** 2 // size**2 for i in range(size)})]
        mine = [(a, b) for i, (a, b) in enumerate(itertools.pairwise(cuts)) if i % size == rank and b > a]
        shards = [
            sharded_tensor.Shard(
                torch.zeros(b - a, *shape[1:], requires_grad=True),
                ShardMetadata([a, *[0] * (len(shape) - 1)], [b - a, *shape[1:]], f"rank:{rank}/cpu"),
            )
            for a, b in mine
        ]
        return sharded_tensor.init_from_local_shards(shards, *shape)
    placement = {"rows": Shard(0), "columns": Shard(len(shape) - 1), "replicated": Replicate()}[style]
    mesh = init_device_mesh("cpu", (size,))
    return torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None))


def optimizer(style):
    inner = shardopt.keyed("adamw", {fqn: parameter(fqn, style) for fqn in SHAPES}, lr=0.5)
    clipped = GradientClippingOptimizer(inner, clipping=GradientClipping.NORM, max_gradient=1.0)
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=10, value=0.1)]
    made = WarmupOptimizer(clipped, stages, lr=0.5)
    made.save_param_groups(True)
    made.init_state()
    return made


def pieces(made):
    for fqn, entries in made.state_dict()["state"].items():
        for entry in ("exp_avg", "exp_avg_sq"):
            if entry in entries:
                for piece in view_of(entries[entry], fqn).pieces:
                    expected = known(fqn, entry)
                    for dim, (offset, size) in enumerate(zip(piece.box.offsets, piece.box.sizes, strict=True)):
                        expected = expected.narrow(dim, offset, size)
                    yield piece.tensor, expected


def save(path, style):
    made = optimizer(style)
    for each in made.params.values():
        for holder in local_tensors(each) if style == "sharded tensor" else [each]:
            holder.grad = torch.zeros_like(holder)
    for _ in range(4):
        made.step()
    for tensor, value in pieces(made):
        tensor.copy_(value)
    checkpoint.save(path, {"optimizer": made})
    return made.param_groups[0]["lr"]


def load(path, style):
    made = optimizer(style)
    before = [tensor.data_ptr() for tensor, _ in pieces(made)]
    checkpoint.load(path, {"optimizer": made})
    assert [tensor.data_ptr() for tensor, _ in pieces(made)] == before
    assert all(torch.equal(tensor, value) for tensor, value in pieces(made))
    return made.param_groups[0]["lr"]


def check(tmp_path, source, targets):
    path = str(tmp_path / f"{source[0]}-{source[1]}".replace(" ", "-"))
    (rate,) = set(run_ranks(source[0], save, path, source[1]))
    assert rate != 0.5
    for size, style in targets:
        assert set(run_ranks(size, load, path, style)) == {rate}, (source, size, style)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((4, "rows"), (3, "columns")),
        ((2, "columns"), (4, "replicated")),
        ((1, "replicated"), (3, "sharded tensor")),
        ((4, "sharded tensor"), (2, "rows")),
        ((2, "rows"), (1, "rows")),
    ],
    ids=str,
)
def test_a_covering_few(tmp_path, source, target):
    check(tmp_path, source, [target])


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", [*itertools.product((1, 2, 4), STYLES)], ids=str)
def test_all(tmp_path, source):
    check(tmp_path, source, list(itertools.product((1, 2, 3, 4), STYLES)))


OPTIONS = {"rest": {"lr": 0.25, "weight_decay": 0.5}, "short": {"lr": 0.75, "weight_decay": 0.0}}


def grouped(style, prefix, lr):
    """Two groups, of which one goes by another name under another prefix; nothing is as it was saved."""
    named = {f"{prefix}{fqn}" if fqn != "even" else fqn: parameter(fqn, style) for fqn in SHAPES}
    made = shardopt.keyed("adamw", named, lr=lr, groups=[{"match": "short", "lr": lr, "weight_decay": 9.0}])
    made.init_state()
    return made


def options_of(made):
    short, rest = made.param_groups
    return {
        name: {option: group[option] for option in ("lr", "weight_decay")}
        for name, group in (("rest", rest), ("short", short))
    }


def step_by_numbers(made):
    """One step, whose gradients are those of the whole tensors, however they are cut."""
    for fqn, tensor in made.params.items():
        whole = known(fqn.split(".")[-1], "exp_avg") / 1e5
        tensor.grad = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    made.step()


def save_grouped(path):
    made = grouped("rows", "layers.", 0.1)
    for name, group in zip(("short", "rest"), made.param_groups, strict=True):
        group.update(OPTIONS[name])
    step_by_numbers(made)
    checkpoint.save(path, {"params": dict(made.params), "optimizer": made})


def load_under(path, prefix, rename):
    """The full tensors after another step, by the last part of the name."""
    made = grouped("columns", prefix, 0.3)
    checkpoint.load(path, {"params": dict(made.params), "optimizer": made}, rename=rename)
    assert options_of(made) == OPTIONS
    step_by_numbers(made)
    return {name.split(".")[-1]: tensor.full_tensor().detach() for name, tensor in made.params.items()}


def test_saved_by_two_ranks_and_loaded_by_one_under_other_names(tmp_path):
    path = str(tmp_path / "c")
    run_ranks(2, save_grouped, path)
    (as_saved,) = run_ranks(1, load_under, path, "layers.", None)
    (renamed,) = run_ranks(1, load_under, path, "blocks.", {r"\.layers\.": ".blocks."})
    assert as_saved.keys() == renamed.keys() == SHAPES.keys()
    assert all(torch.equal(as_saved[name], renamed[name]) for name in SHAPES)
