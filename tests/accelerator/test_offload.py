"""Parameters elsewhere than on the current device: on the host, as under FSDP2's CPUOffloadPolicy, or on another."""

import shutil
import tempfile
from copy import deepcopy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.algorithms import reductions
from shardopt.errors import AlgorithmError
from shardopt.ranks import Ranks
from shardopt.runtime.accelerator import wait_for_reads
from tests.accelerator.support import needs_standin, on_accelerator

pytestmark = needs_standin

GATHERING = ("muon", "soap", "shampoo")


def on_one_rank(standin):
    return {
        each.__name__: each(standin)
        for each in (
            *(unscaled, updated_by_a_rate_of_the_device, on_two_devices, read_before_changes, read_elsewhere),
            added_up_elsewhere,
        )
    }


def unscaled(standin):
    """Gradients of 1 that are on the CPU, whose scale is on the device."""
    weight, found = nn.Parameter(torch.zeros(4)), []
    optimizer = shardopt.keyed("sgd", {"w": weight}, lr=1.0)
    for scale in (4.0, 8.0, 16.0):
        scaler = shardopt.GradScaler(standin.KIND, init_scale=scale)
        weight.grad = torch.full((4,), scale)
        scaler.unscale_(optimizer)
        found.append(weight.grad.tolist()[0])
    return found


def updated_by_a_rate_of_the_device(standin):
    found = []
    for lr in (torch.tensor(0.5).to(standin.KIND), 0.5):
        weight = nn.Parameter(torch.ones(4, 4))
        weight.grad = torch.arange(16.0).view(4, 4)
        shardopt.keyed("adafactor", {"w": weight}, lr=lr).step()
        found.append(weight.tolist())
    return found[0] == found[1]


def on_two_devices(standin):
    """Returns the algorithms that step otherwise on parameters of two devices than on the CPU."""
    wrong = []
    for name in GATHERING:
        found = []
        for kinds in (("cpu", "cpu"), (f"{standin.KIND}:0", f"{standin.KIND}:1")):
            generator = torch.Generator().manual_seed(0)
            weights = {f"w{i}": nn.Parameter(torch.randn(6, 6, generator=generator).to(kinds[i % 2])) for i in range(3)}
            optimizer = shardopt.keyed(name, weights, lr=0.1)
            for _ in range(2):
                for weight in weights.values():
                    weight.grad = torch.randn(6, 6, generator=generator).to(weight.device)
                optimizer.step()
            found.append([weight.tolist() for weight in weights.values()])
        wrong += [] if found[0] == found[1] else [name]
    return wrong


def read_before_changes(standin):
    """Returns the weights in pinned memory that a forward had, by what changed them right after it was queued."""
    found, folder = {}, tempfile.mkdtemp()

    def forward(weight):
        gathered = torch.empty(weight.shape, dtype=weight.dtype, device=standin.KIND)
        with standin.stream(standin.Stream()):  # as `fully_shard` copies its weights with a CPUOffloadPolicy
            gathered.copy_(weight.detach(), non_blocking=True)
        return gathered

    def value(gathered):
        standin.C.synchronize(-1)
        (number,) = gathered.unique().tolist()
        return number

    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.zeros(4, 4).pin_memory())
    averages = shardopt.EMA(model, decay=0.5)
    averages.update()
    with torch.no_grad():
        model.weight.fill_(2.0)
    before = forward(model.weight)
    with averages.swap():
        found["a swap"] = value(before)
        within = forward(model.weight)
    found["its end"] = value(within)

    weight = nn.Parameter(torch.full((4, 4), 9.0).pin_memory())
    checkpoint.save(f"{folder}/1", {"w": weight})
    with torch.no_grad():
        weight.fill_(5.0)
    before = forward(weight)
    checkpoint.load(f"{folder}/1", {"w": weight})
    found["a load"] = value(before)

    optimizer = shardopt.keyed("schedulefreesgd", {"w": weight}, lr=0.5)
    for _ in range(2):
        weight.grad = torch.ones(4, 4)
        optimizer.step()
    with torch.no_grad():
        weight.fill_(5.0)
    before = forward(weight)
    optimizer.eval()
    found["eval"] = value(before)

    weight = nn.Parameter(torch.full((4, 4), 5.0).pin_memory())
    inner = shardopt.keyed("sgd", {"w": weight}, lr=1.0)
    islands = shardopt.SemiSync(inner, lambda anchors: shardopt.keyed("sgd", anchors), every=3, process_group=None)
    weight.grad = torch.ones(4, 4)
    islands.step()
    before = forward(weight)
    islands.sync()
    found["a meeting"] = value(before)

    weight = nn.Parameter(torch.full((4, 4), 5.0).bfloat16().pin_memory())
    optimizer = shardopt.keyed("sgd", {"w": weight}, lr=1.0, master_dtype="float32")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    saved = deepcopy(optimizer.state_dict())
    optimizer.step()
    before = forward(weight)
    optimizer.load_state_dict(saved)
    found["a load of masters"] = value(before)
    shutil.rmtree(folder)
    return found


def read_elsewhere(standin):
    """Returns what a device that is not the current one got of weights that were changed after it had been asked to."""
    weight, there = torch.ones(100).pin_memory(), torch.zeros(100, device=f"{standin.KIND}:1")
    torch.accelerator.synchronize(1)
    there.copy_(weight, non_blocking=True)
    wait_for_reads([weight])
    weight.fill_(7.0)
    return there.cpu()[0].item()


def added_up_elsewhere(standin):
    """Returns how often the host waits to add up numbers of many tensors on the host over a group of the device."""
    terms = [(torch.ones(2), (mock.Mock(group="g"),)) for _ in range(10)]
    standin.C.reset()
    there = mock.Mock(device_beside=lambda device: torch.device(standin.KIND, 0))
    with mock.patch.object(reductions, "ranks_of", lambda group: there):
        reductions.all_reduce_terms(terms, lambda ranks, flat: flat.add_(1))
    return sum(standin.waits().values()), {number for tensor, _ in terms for number in tensor.tolist()}


def rate_elsewhere(standin):
    """Steps weights on the host by fused kernels and a rate on the device."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = shardopt.keyed("adamw", {"w": weight}, lr=torch.tensor(0.5).to(standin.KIND))
    weight.grad = torch.ones(4)
    with pytest.raises(AlgorithmError, match="a rate would be read before it is there"):
        optimizer.step()
    return weight.tolist(), optimizer.state_dict()["state"]


def test_a_rate_on_a_device_is_refused_for_fused_kernels_on_the_host():
    assert on_accelerator(1, rate_elsewhere) == [([1.0] * 4, {})]


def test_each_parameter_is_changed_in_order_where_it_is():
    (found,) = on_accelerator(1, on_one_rank)
    assert found == {"unscaled": [1.0, 1.0, 1.0], "updated_by_a_rate_of_the_device": True, "on_two_devices": []} | {
        "read_before_changes": {
            **{"a swap": 2.0, "its end": 0.0, "a load": 5.0, "eval": 5.0},
            **{"a meeting": 4.0, "a load of masters": 3.0},
        },
        "read_elsewhere": 1.0,
        "added_up_elsewhere": (2, {2.0}),
    }


def offloaded(standin):
    """Steps models that are sharded on the host; returns the devices of what is exchanged, and what is wrong."""
    exchanged, wrong, exchange = set(), [], Ranks.all_to_all

    def noting(ranks, sent, *counts):
        exchanged.add(sent.device.type)
        return exchange(ranks, sent, *counts)

    def stepped(name, shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)).to(standin.KIND)
        if shard:
            mesh = init_device_mesh(standin.KIND, (2,))
            fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        optimizer = shardopt.keyed(name, model.named_parameters(), lr=1e-2)
        for step in range(2):
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(standin.KIND)
            (model(inputs) - inputs[:, :4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [
            each.to_local().detach().clone() if shard else each.detach().chunk(2)[torch.distributed.get_rank()].cpu()
            for each in model.parameters()
        ]

    for name in GATHERING:
        with mock.patch.object(Ranks, "all_to_all", noting):
            found = stepped(name, shard=True)
        if not all(map(torch.allclose, found, stepped(name, shard=False))):
            wrong.append(name)
    return exchanged, wrong


def test_what_is_gathered_from_the_host_goes_through_the_group_of_the_accelerator():
    """That group may have NCCL alone, which takes nothing of the host."""
    assert on_accelerator(2, offloaded) == [({"standin"}, [])] * 2
