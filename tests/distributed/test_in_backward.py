"""Optimizers in backward on real ranks: `fully_shard`, replicas, tensor parallel, both; and their checkpoints."""

import copy
import gc
from contextlib import nullcontext
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as checkpointed

import shardopt
from shardopt import checkpoint
from shardopt.errors import PartialLoadError, StateError
from shardopt.runtime.partial_loads import PartialLoad
from tests.harness import run_ranks
from tests.support.optimizers import same

RANKS_STAY = True

GROUPS = [{"match": "bias|norm", "weight_decay": 0.0}]
OPTIONS = {"adamw": {"lr": 0.05}, "sgd": {"lr": 0.05, "momentum": 0.9}}
STEPS = 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, batch):
        return batch + self.down(self.up(self.norm(batch)).relu())


class Net(nn.Module):
    """Two blocks of which one runs twice, activation checkpoints, tied ends, and a part that only some steps use."""

    def __init__(self, width=10):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.sometimes = nn.Linear(width, width)
        self.again = (self.blocks[0],)  # a tuple: no module of a second name

    def forward(self, batch, sometimes):
        batch = self.first(batch)
        for block in (*self.blocks, *self.again):
            batch = checkpointed(block, batch, use_reentrant=False)
        return self.last(self.sometimes(batch) if sometimes else batch)


def fully_sharded(net, mesh, **options):
    for part in (*net.blocks, net.sometimes):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def tensor_parallel(net, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    return net


LAYOUTS = {
    "fully_shard": lambda net, n: fully_sharded(net, init_device_mesh("cpu", (n,))),
    "fully_shard, kept": lambda net, n: fully_sharded(net, init_device_mesh("cpu", (n,)), reshard_after_forward=False),
    "mixed precision": lambda net, n: fully_sharded(
        net, init_device_mesh("cpu", (n,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "replicas": lambda net, n: fully_sharded(net, init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "fs"))),
    "tensor parallel": lambda net, n: tensor_parallel(net, init_device_mesh("cpu", (n,))),
    "both": lambda net, n: (lambda mesh: fully_sharded(tensor_parallel(net, mesh["tp"]), mesh["fs"]))(
        init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("fs", "tp"))
    ),
}


# Leaves out the search of all objects for a DistributedDataParallel, which takes longer than the steps.
without_a_search = mock.patch("shardopt.optim.backward.reduced_by_ddp", lambda parameters: False)


def built(make, layout, algorithm):
    net = LAYOUTS[layout](Net(), dist.get_world_size())
    options = {"groups": GROUPS, **OPTIONS[algorithm]}
    if make == "in backward":
        return net, shardopt.in_backward(net, algorithm, **options)
    return net, shardopt.keyed(algorithm, net.named_parameters(), **options)


def backward(net, layout, step, sometimes=True):
    """Each rank's own batch, but where all must have the same."""
    rank = 0 if "parallel" in layout or layout == "both" else dist.get_rank()
    batch = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + rank))
    net(batch, sometimes).square().mean().backward()


def train(net, optimizer, layout, accumulation, steps=range(STEPS)):
    fused = isinstance(optimizer, shardopt.optim.FusedOptimizer)
    for step in steps:
        if accumulation == "within fully_shard":
            net.again = ()  # with it, `fully_shard` hands gradients over in parts
            net.set_requires_gradient_sync(False)
            backward(net, layout, 50 + step)
            net.set_requires_gradient_sync(True)
        elif accumulation == "accumulate":
            with optimizer.accumulate() if fused else torch.enable_grad():
                backward(net, layout, 50 + step)
        backward(net, layout, step, sometimes=step % 2 == 0)
        if fused and accumulation is None:
            assert all(parameter.grad is None for parameter in net.parameters())
        optimizer.step()
        optimizer.zero_grad()


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def now(net, optimizer):
    """Copies of everything that training changes, as this rank holds it."""
    state = optimizer.state_dict()["state"]
    return copy.deepcopy(
        {
            **{name: local(parameter.detach()) for name, parameter in optimizer.params.items()},
            **{(name, key): local(value) for name, own in state.items() for key, value in own.items()},
        }
    )


@without_a_search
def trained_both_ways(cases):
    for layout, algorithm, accumulation in cases:
        results = []
        for make in ("in backward", "after backward"):
            net, optimizer = built(make, layout, algorithm)
            start = now(net, optimizer)
            train(net, optimizer, layout, accumulation)
            results.append(now(net, optimizer))
            assert not any(torch.equal(value, results[-1][name]) for name, value in start.items() if value.numel())
        assert same(*results), (layout, algorithm, accumulation)
    return len(cases)


COVERING = {  # by ranks: no more of them than a layout has dimensions for
    2: [
        ("fully_shard", "adamw", "within fully_shard"),
        ("fully_shard, kept", "sgd", "accumulate"),
        ("mixed precision", "adamw", None),
        ("tensor parallel", "sgd", "accumulate"),
    ],
    4: [("replicas", "adamw", "within fully_shard"), ("both", "adamw", None)],
}


@pytest.mark.parametrize("ranks", COVERING)
def test_sharded_modules_are_trained_as_by_a_step_after_backward_bit_for_bit(ranks):
    assert run_ranks(ranks, trained_both_ways, COVERING[ranks]) == [len(COVERING[ranks])] * ranks


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_algorithms_and_ways_to_accumulate(layout):
    ways = (None, "accumulate", *(() if layout == "tensor parallel" else ("within fully_shard",)))
    cases = [(layout, algorithm, way) for algorithm in OPTIONS for way in ways]
    assert run_ranks(4, trained_both_ways, cases, deadline_seconds=300) == [len(cases)] * 4


def trained_with_partial_gradients():
    results = []
    for make in (shardopt.in_backward, lambda net, *args, **kw: shardopt.keyed(args[0], net.named_parameters(), **kw)):
        torch.manual_seed(5)
        norm = parallelize_module(nn.LayerNorm(4), init_device_mesh("cpu", (2,)), SequenceParallel(sequence_dim=0))
        optimizer = make(norm, "sgd", lr=0.1)
        batch = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        norm(batch).to_local().square().sum().backward()
        optimizer.step()
        results.append(norm.weight.to_local().detach().clone())
    assert torch.equal(*results)
    return results[0]


def test_gradients_that_are_still_to_be_summed_are():
    one, other = run_ranks(2, trained_with_partial_gradients)
    assert torch.equal(one, other) and not torch.equal(one, torch.ones(4))


# --- checkpoints -----------------------------------------------------------------------------------------------------


KINDS = ("in backward", "after backward")


@without_a_search
def save(path):
    saved = []
    for make in KINDS:
        net, optimizer = built(make, "replicas", "adamw")
        train(net, optimizer, "replicas", None)
        checkpoint.save(path / make, {"model": net, "optimizer": optimizer})
        saved.append(whole(net, optimizer))
    assert same(*saved)
    return saved[0]


def whole(net, optimizer):
    full = {name: each for name, each in net.named_parameters()}
    state = optimizer.state_dict()["state"]
    full.update({(name, key): value for name, own in state.items() for key, value in own.items()})
    return {
        name: (each.detach().full_tensor() if isinstance(each, DTensor) else each.detach()).clone()
        for name, each in full.items()
    }


@without_a_search
def load(path, saved):
    """Into both kinds, what both have saved; what one more step makes of it."""
    continued = []
    for saved_by, loaded_by in product(KINDS, KINDS):
        net, optimizer = built(loaded_by, "fully_shard", "adamw")
        optimizer.init_state()
        checkpoint.load(path / saved_by, {"model": net, "optimizer": optimizer})
        assert same(whole(net, optimizer), saved)
        backward(net, "fully_shard", STEPS)
        optimizer.step()
        continued.append(now(net, optimizer))
    assert all(same(continued[0], other) for other in continued)
    return continued[0]


def test_saved_on_four_ranks_it_loads_on_two_and_into_the_other_kind(tmp_path):
    saved = run_ranks(4, save, tmp_path)[0]
    one, other = run_ranks(2, load, tmp_path, saved)
    assert not same(one, other)


# --- refusals --------------------------------------------------------------------------------------------------------


@without_a_search
def refused():
    # A module that runs twice, and whose gradients `fully_shard` has held back.
    net, optimizer = built("in backward", "fully_shard", "adamw")
    net.set_requires_gradient_sync(False)
    backward(net, "fully_shard", 0)
    net.set_requires_gradient_sync(True)
    with pytest.raises(StateError, match=r"in parts(.|\n)*blocks\.0\.(.|\n)*accumulate"):
        backward(net, "fully_shard", 1)

    # What was torn by a load refuses in backward.
    net, optimizer = built("in backward", "fully_shard", "adamw")
    before = now(net, optimizer)
    PartialLoad(optimizer, "loading x").begin()
    with pytest.raises(PartialLoadError, match="loading x"):
        backward(net, "fully_shard", 0)
    assert same(now(net, optimizer), before)
    PartialLoad(optimizer, "").end(mends=True)
    return True


def among_what_is_made_here():
    """The search for a DistributedDataParallel leaves out what there is already, all that a rank has imported."""
    gc.freeze()
    return mock.patch.multiple(gc, freeze=lambda: None, unfreeze=lambda: None)


def refused_under_ddp():
    # DistributedDataParallel averages later, whether it is there first or not.
    with among_what_is_made_here():
        with pytest.raises(StateError, match="DistributedDataParallel averages gradients after"):
            shardopt.in_backward(DistributedDataParallel(nn.Linear(4, 4)), "sgd", lr=0.1)
        later = nn.Linear(4, 4)
        shardopt.in_backward(later, "sgd", lr=0.1)
        later(torch.ones(4))
        with pytest.raises(StateError, match="DistributedDataParallel averages gradients after"):
            DistributedDataParallel(later)(torch.ones(4))

    # Also where only parameters are given, whose names do not tell.
    there = DistributedDataParallel(nn.Linear(4, 4))
    gc.freeze()  # which takes it out of what the garbage collector lists
    for given in (there.module, dict(there.module.named_parameters()), {"w": there.module.weight}):
        with pytest.raises(StateError, match="DistributedDataParallel averages gradients after"):
            shardopt.in_backward(given, "sgd", lr=0.1)
    del there, given
    with among_what_is_made_here():
        refused_where_it_comes_later()
    return True


def refused_where_it_comes_later():
    for wrap in (DistributedDataParallel, replicate):
        later = nn.Linear(4, 4)
        shardopt.in_backward({"w": later.weight}, "sgd", lr=0.1)
        before, wrapped = later.weight.detach().clone(), wrap(later)
        with pytest.raises(StateError, match="DistributedDataParallel averages gradients after"):
            wrapped(torch.ones(4)).sum().backward()
        assert torch.equal(later.weight, before)
    other = nn.Linear(4, 4)  # DistributedDataParallel elsewhere in the process, or gone, is nobody's concern
    gone = DistributedDataParallel(other)
    gone.itself = gone
    del gone
    shardopt.in_backward(other, "sgd", lr=0.1)
    other(torch.ones(4)).sum().backward()


def test_what_would_be_wrong_is_refused():
    assert all(run_ranks(2, refused))
    assert run_ranks(1, refused_under_ddp) == [True]  # each rank asks for itself


# --- memory ----------------------------------------------------------------------------------------------------------


def live_shards():
    """The most bytes of sharded gradients that there are at once, counted when one is complete."""
    most = {}
    for make in ("in backward", "after backward"):
        net, optimizer = built(make, "fully_shard", "adamw")
        alive, peak = {}, [0]

        def complete(parameter, name, alive=alive, peak=peak):
            alive[name] = 0 if parameter.grad is None else parameter.grad.to_local().nbytes
            peak[0] = max(peak[0], sum(alive.values()))

        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda own, name=name, note=complete: note(own, name))
        backward(net, "fully_shard", 0)
        optimizer.step()
        most[make] = peak[0]
    return most


def test_no_sharded_gradient_outlives_its_update():
    for most in run_ranks(2, live_shards):
        assert most["in backward"] == 0 < most["after backward"]


def under_schedule(schedule, way, micro_batches=4):
    """Trains a stage by a schedule of torch's; returns its weights and numbers of steps, or the error's code."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 6)
    if way == "after the schedule":
        optimizer = shardopt.keyed("adamw", layer.named_parameters(), lr=0.1)
    else:
        optimizer = shardopt.in_backward(layer, "adamw", lr=0.1)
    stage = PipelineStage(layer, 0, 1, torch.device("cpu"))
    train = schedule(stage, micro_batches, loss_fn=torch.nn.functional.mse_loss)
    before = layer.weight.clone()
    try:
        with optimizer.accumulate() if way == "accumulate" else nullcontext():
            train.step(torch.ones(8, 6), target=torch.zeros(8, 6))
    except RuntimeError as error:
        assert torch.equal(layer.weight, before)
        return error.__cause__.code
    optimizer.step()
    return layer.weight.tolist(), [each["step"].item() for each in optimizer.state.values()]


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleGPipe])
def test_schedules_of_pipelines_take_one_step_for_all_micro_batches(schedule):
    (after,) = run_ranks(1, under_schedule, schedule, "after the schedule")
    assert after[1] == [1, 1]
    assert run_ranks(1, under_schedule, schedule, "accumulate") == [after]
    assert run_ranks(1, under_schedule, schedule, "in backward") == ["step-in-backward"]
    whole = run_ranks(1, under_schedule, schedule, "after the schedule", 1)
    assert run_ranks(1, under_schedule, schedule, "in backward", 1) == whole
