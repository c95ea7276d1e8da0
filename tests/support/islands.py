"""A model that islands train on data of their own, in several layouts; and the same in one process, from the papers."""

import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardopt
from shardopt import checkpoint

BATCH, INNER_LR = 4, 0.05
FRAGMENT_OF = {"0.bias": 0, "0.weight": 0, "2.bias": 1, "2.weight": 1}
"""The two fragments of the model, as neighbours by name with about half of the elements each."""


def plain_model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).to(dtype)


def batch_of(island, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * island + step)
    return torch.randn(BATCH, 6, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model, batch):
    target = batch[:, :4].cumsum(dim=1)
    return (model(batch) - target).square().mean()


class Island:
    """This rank's model in a layout, its optimizer and app."""

    def __init__(self, layout, islands, dtype=torch.float64, inner=None, seed=0, **options):
        self.layout, self.dtype = layout, dtype
        self.mesh = init_device_mesh(
            "cpu", (islands, dist.get_world_size() // islands), mesh_dim_names=("across", "own")
        )
        self.model = plain_model(dtype, seed)
        own = self.mesh["own"]
        if layout == "tensor parallel":
            parallelize_module(self.model, own, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        elif layout == "columns":
            fully_shard(self.model, mesh=own, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        elif layout == "rows":
            fully_shard(self.model, mesh=own)
        else:
            assert layout == "plain"
        inner = {"algorithm": "adamw", "lr": INNER_LR} | (inner or {})
        optimizer = shardopt.keyed(inner.pop("algorithm"), self.model.named_parameters(), process_group=own, **inner)
        self.optimizer = shardopt.SemiSync(optimizer, process_group=self.mesh["across"], **options)
        self.app = {"optimizer": self.optimizer, "step": 0, **self.optimizer.own({"model": self.model})}

    def step(self):
        batch = batch_of(self.mesh.get_local_rank("across"), self.app["step"], self.dtype)
        if self.layout in ("rows", "columns"):
            batch = batch.chunk(self.mesh["own"].size())[self.mesh.get_local_rank("own")]
        loss_of(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.app["step"] += 1

    def values(self):
        """The whole weights of this island, and the whole anchors."""
        return {name: whole(p) for name, p in self.model.named_parameters()}, {
            name: whole(anchor) for name, anchor in self.optimizer.anchors.items()
        }


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def train(layout, islands, steps, root=None, save_at=(), stop_at=None, killed=None, **options):
    """Trains from the newest checkpoint of a run to a step; returns weights and anchors.

    Args:
        killed: a rank and the step before which it kills itself.
    """
    here = Island(layout, islands, **options)
    manager = None if root is None else checkpoint.Manager(root, every=1, keep=9)
    if manager is not None:
        manager.restore(here.app)
    resumed = here.app["step"]
    while here.app["step"] < steps:
        if killed == (dist.get_rank(), here.app["step"]):
            os.kill(os.getpid(), signal.SIGKILL)
        here.step()
        if manager is not None and here.app["step"] in save_at:
            manager.save(here.app["step"], here.app)
    if manager is not None:
        manager.close()
    return resumed, *here.values()


def simulate(islands, steps, every, fragments=1, delay=0, alpha=0.0, lr=0.7, momentum=0.9):
    """Trains all islands in one process, as the papers have it: Nesterov momentum on the mean of what has changed."""
    models = [plain_model() for _ in range(islands)]
    inner = [torch.optim.AdamW(model.parameters(), lr=INNER_LR) for model in models]
    anchors = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    fragment_of = FRAGMENT_OF if fragments == 2 else dict.fromkeys(anchors, 0)
    moments, means = {}, {}
    for step in range(1, steps + 1):
        for island, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            loss_of(model, batch_of(island, step - 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [dict(model.named_parameters()) for model in models]
        for name, anchor in anchors.items():
            first = every * (fragment_of[name] + 1) // fragments
            with torch.no_grad():
                if step >= first and (step - first) % every == 0:
                    means[name] = torch.stack([anchor - each[name] for each in weights]).mean(dim=0)
                due = step - delay
                if due >= first and (due - first) % every == 0:
                    gradient = means.pop(name)
                    moments[name] = gradient if name not in moments else momentum * moments[name] + gradient
                    anchor -= lr * (gradient + momentum * moments[name])
                    for each in weights:
                        each[name].copy_(alpha * each[name] + (1 - alpha) * anchor)
    return [{name: p.detach() for name, p in model.named_parameters()} for model in models], anchors


def assert_close(found, wanted, tolerance=1e-9):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = value.abs().max().clamp(min=1e-30)
        assert ((found[name] - value).abs().max() / scale) <= tolerance, name
