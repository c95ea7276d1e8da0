"""Parallel jobs of two ranks on an accelerator: they save, restart and resume, and compute what they do on the CPU."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardopt
from shardopt import checkpoint
from shardopt.nn import ShardedEmbeddingBag, Table
from shardopt.optim.semi_sync.islands.buckets import Buckets
from shardopt.ranks import Ranks, collectives
from shardopt.sharding.view import local_tensors
from tests.accelerator.support import each_kind, needs_gpu, needs_standin, on_accelerator

STEPS, EVERY, STOP = 6, 2, 5  # what follows the save at step 4 is lost
ROWS = {"a": 11, "b": 3, "c": 5, "d": 7}  # of tables


def batch_of(step, place):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randn(4, 6, generator=generator)


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def fsdp(kind):
    model = plain_model().to(kind)
    fully_shard(model, mesh=init_device_mesh(kind, (dist.get_world_size(),)))
    adamw = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    return model, shardopt.GradientClippingOptimizer(adamw, "norm", max_gradient=0.5), backward


def tensor_parallel(kind):
    model = plain_model().to(kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    adamw = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    optimizer = shardopt.GradientClippingOptimizer(adamw, "norm", max_gradient=0.5)
    return model, optimizer, lambda model, kind, step: backward(model, kind, step, place=0)


def semi_sync(kind):
    model = plain_model().to(kind)
    optimizer = shardopt.keyed(
        "adamw", model.named_parameters(), lr=0.1, process_group=dist.new_group([dist.get_rank()])
    )
    return model, shardopt.SemiSync(optimizer, process_group=dist.group.WORLD, every=3), backward


def backward(model, kind, step, place=None):
    inputs = batch_of(step, dist.get_rank() if place is None else place).to(kind)
    (model(inputs) - inputs[:, :4]).square().mean().backward()


def pipeline(kind):
    stage = plain_model()[:2] if dist.get_rank() == 0 else plain_model()[2:]
    stage = stage.to(kind)
    named = {f"{name if dist.get_rank() == 0 else '2' + name[1:]}": each for name, each in stage.named_parameters()}
    optimizer = shardopt.GradientClippingOptimizer(shardopt.keyed("adamw", named, lr=0.1), "norm", max_gradient=0.5)
    return named, optimizer, partial(through_stages, stage)


def through_stages(stage, model, kind, step):
    inputs, passed = batch_of(step, 0).to(kind), torch.zeros(4, 8, device=kind)
    if dist.get_rank() == 0:
        hidden = stage(inputs)
        dist.send(hidden.detach(), 1)
        dist.recv(passed, 1)
        hidden.backward(passed)
    else:
        dist.recv(passed, 0)
        passed.requires_grad_()
        (stage(passed) - inputs[:, :4]).square().mean().backward()
        dist.send(passed.grad, 0)


def tables(kind):
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    cuts = zip(ROWS.items(), ("rows", "rows", "columns", "whole"), strict=True)  # of the last rank 1 has no piece
    model = ShardedEmbeddingBag([Table(name, rows, 4, mode="sum", cut=cut) for (name, rows), cut in cuts], mesh)
    model.to(kind)
    with torch.no_grad():
        for weight in model.parameters():
            weight.to_local().copy_(torch.arange(float(weight.to_local().numel())).view_as(weight.to_local()) / 10)
    optimizer = shardopt.keyed("rowwiseadagrad", model.named_parameters(), lr=0.1)
    return model, optimizer, look_up_twice


def look_up_twice(model, kind, step):
    look_up(model, kind, step)
    look_up(model, kind, step + STEPS)


def look_up(model, kind, step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = {name: torch.randint(0, rows, (7,), generator=generator).to(kind) for name, rows in ROWS.items()}
    offsets = torch.tensor([0, 2, 2, 5]).to(kind)
    found = model({name: (each, offsets) for name, each in ids.items()})
    sum(vectors.square().sum() for vectors in found.values()).backward()


def fused_and_moved(standin):
    """Returns whether a fused step is of its backward alone, and where gradients of tables are that were moved."""
    found = []
    for kind in (standin.KIND, "cpu"):
        model, *_ = tables(kind)
        look_up(model, kind, 0)  # whose gradients stay
        model.fuse("rowwiseadagrad", lr=0.1)
        look_up(model, kind, 1)
        found.append([local(each) for weight in model.parameters() for each in (weight, *gradients(weight))])
    moved = tables(standin.KIND)[0].cpu()
    look_up(moved, "cpu", 0)
    devices = {each.device.type for weight in moved.parameters() for each in gradients(weight)}
    return [torch.allclose(*pair) for pair in zip(*found, strict=True)], devices


def gradients(weight):
    return [] if weight.grad is None else [each.coalesce().values() for each in local_tensors(weight.grad)]


@needs_standin
def test_a_fused_step_of_tables_is_of_its_backward_alone_and_moved_tables_look_up_where_they_are():
    for same, devices in on_accelerator(2, fused_and_moved):
        assert len(same) > 4 and all(same) and devices == {"cpu"}


JOBS = {
    "fsdp": fsdp,
    "tensor parallel": tensor_parallel,
    "pipeline": pipeline,
    "tables": tables,
    "semi-sync": semi_sync,
}


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def trained(kind, start, root, stop, stage):
    """Starts or resumes a job, and trains it up to a step; returns what this rank has then, and where it began."""
    model, optimizer, backward_of = start(kind)
    app = {"optimizer": optimizer, "step": 0}
    app |= optimizer.own({"model": model}) if isinstance(optimizer, shardopt.SemiSync) else {"model": model}
    with checkpoint.Manager(root, every=EVERY, stage=stage) as manager:
        manager.restore(app)
        began = app["step"]
        while app["step"] < stop:
            backward_of(model, kind, app["step"])
            optimizer.step()
            optimizer.zero_grad()
            app["step"] += 1
            manager.save(app["step"], app)
    parameters = model if isinstance(model, dict) else dict(model.named_parameters())
    state = {
        f"{name}.{key}": value for name, each in optimizer.state_dict()["state"].items() for key, value in each.items()
    }
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: local(tensor) for name, tensor in (parameters | tensors).items()}, began


def jobs_here(standin, folder, stage, order):
    """Returns what is wrong where the default stream is late ("late"), or the program's own ("side"), or copies."""
    wrong = {}
    for name, start in JOBS.items():
        if name == "pipeline" and dist.get_world_size() == 1:
            continue
        expected, _ = trained("cpu", start, folder / name / "cpu", STEPS, stage)
        with standin.stream(standin.Stream() if order == "side" else None):
            standin.C.late(order == "late")
            standin.C.side(order == "side")
            trained(standin.KIND, start, folder / name / "there", STOP, stage)
            found, began = trained(standin.KIND, start, folder / name / "there", STEPS, stage)
            standin.C.late(False)
            standin.C.side(False)
        assert began == STOP - STOP % EVERY, began
        assert found.keys() == expected.keys() and len(found) > 2
        far = {
            key: ((found[key].double() - each.double()).abs() / each.double().abs().clamp(min=1)).max().item()
            for key, each in expected.items()
            if each.numel()
        }
        wrong |= {f"{name}: {key}": each for key, each in far.items() if not each <= 1e-5}
    return wrong


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        ("lazy", "late"),
        pytest.param("lazy", "side", marks=pytest.mark.exhaustive),
        pytest.param("now", "copies", marks=pytest.mark.exhaustive),
    ],
)
@each_kind
def test_jobs_of_two_ranks_resume_and_compute_as_on_the_cpu(tmp_path, stage, order, kind):
    assert on_accelerator(2, jobs_here, tmp_path, stage, order, kind=kind) == [{}, {}]


@needs_gpu
@pytest.mark.parametrize("stage", ["lazy", "now"])
def test_jobs_of_one_rank_do_so_over_nccl(tmp_path, stage):
    assert on_accelerator(1, over_nccl, tmp_path, stage, kind="cuda", group=True) == [("nccl", {})]


def over_nccl(cuda, folder, stage):
    backend = dist.group.WORLD._get_backend(torch.device(cuda.KIND))
    return backend.name(), jobs_here(cuda, folder, stage, "copies")


def reduced_on(standin):
    """Where a rank that has set no device adds up its norm; and what islands of the host's weights make of these
    through a group that only accelerators have."""
    own, device = (
        dist.new_group([dist.get_rank()], use_local_synchronization=True),
        torch.device("standin", dist.get_rank()),
    )
    seen, reduce = [], dist.all_reduce

    def noted(tensor, *args, **kwargs):
        seen.append(tensor.device)
        return reduce(tensor, *args, **kwargs)

    weight, host = nn.Parameter(torch.ones(4, 4, device=device)), nn.Parameter(torch.ones(4))
    clipped = shardopt.GradientClippingOptimizer(shardopt.keyed("adamw", {"w": weight}), "norm", max_gradient=0.5)
    inner = shardopt.keyed("sgd", {"w": host}, lr=1.0, process_group=own)
    across = dist.new_group(backend="standin:standin_gloo")
    islands = shardopt.SemiSync(inner, "sgd", outer_options={"lr": 1.0}, process_group=across, every=1)
    weight.grad, host.grad = torch.ones_like(weight), torch.full((4,), 2.0 * dist.get_rank())
    dist.all_reduce = noted
    try:
        clipped.step()
        islands.step()
    finally:
        dist.all_reduce = reduce
    return seen[0] == device, seen[-1].type, host.tolist()


@needs_standin
def test_numbers_are_added_up_where_they_are_or_where_the_group_communicates():
    assert on_accelerator(2, reduced_on) == [(True, "standin", [0.0] * 4)] * 2


def added_in_order(standin):
    """Whether sums of three ranks are those in the order of ranks, whatever an all-reduce would make of them."""

    def drawn(rank, size):
        return torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 10**rank

    ranks, right = Ranks(dist.group.WORLD), []
    buckets = Buckets([torch.ones(3, device=standin.KIND) for _ in range(3)], [(0, 1), None, (0,)])
    for view in buckets.views:
        view.fill_(1)
    with (
        mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce,
        mock.patch.object(collectives, "_BYTES_IN_ORDER", 4096),
    ):
        buckets.begin_mean(ranks)
        buckets.end_mean()
        right.append(reduce.call_count == 1 and all(view.cpu().eq(1).all() for view in buckets.views))
        reduce.side_effect = AssertionError
        for late in (False, True):
            standin.C.late(late)
            for size in (2, 7, 3000):
                numbers = drawn(ranks.rank, size).to(standin.KIND)
                numbers.mul_(2)  # queued
                begun = ranks.begin_all_reduce_sum(numbers)
                total = begun.wait().mul_(0.5)
                right.append(torch.equal(total.cpu(), drawn(0, size) + drawn(1, size) + drawn(2, size)))
            standin.C.late(False)
    return right


@needs_standin
def test_what_islands_add_up_is_added_in_the_order_of_ranks():
    assert on_accelerator(3, added_in_order) == [[True] * 7] * 3
