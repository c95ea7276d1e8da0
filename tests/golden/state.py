"""The states that the golden checkpoints hold. Once a checkpoint of a version is stored, its state must not change."""

from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardopt
from shardopt import checkpoint

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]

VALUES = {
    "none": None,
    "numbers": [True, 3, -(2**70), 0.1, -0.0, float("inf"), 1e-320],
    "texts": {"a.b": "ü", 7: b"\x00\xff", "tuple": (1, ("x",)), "set": {1, 2}},
    "counter": Counter("abca"),
    "scalar": np.float32(0.1),
}


def whole(name):
    """The global value of a tensor of the golden state."""
    dtype = getattr(torch, name)
    numbers = torch.arange(1, 13).reshape(4, 3)
    if name == "float8_e8m0fnu":
        return (2.0 ** (numbers % 5)).to(dtype)
    return (numbers % 2 == 0) if name == "bool" else numbers.to(dtype)


def state():
    """The state on this rank of two."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    tensors = {f"rows.{name}": place(whole(name), Shard(0)) for name in DTYPES}
    tensors |= {
        "columns": place(torch.arange(20.0).reshape(4, 5), Shard(1)),
        "replicated": place(torch.arange(7.0), Replicate()),
        "uneven": place(torch.arange(15.0).reshape(5, 3), Shard(0)),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "long": place(torch.arange(150_000, dtype=torch.int32), Shard(0)),
    }
    mine = checkpoint.PerRank({"rank": dist.get_rank(), "state": torch.arange(3, dtype=torch.uint8)}, "keep")
    return {"tensors": tensors, "values": dict(VALUES), "list": [torch.ones(2), {"x": 1}], "mine": mine}


ROWS, PLAIN = torch.arange(15.0).reshape(5, 3), torch.arange(4, dtype=torch.bfloat16)


def tied_state():
    """State that version 2 describes and version 1 cannot: on this rank of two, keys that are one memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(ROWS, mesh, [Shard(0)], src_data_rank=None)
    plain = PLAIN.clone()
    tied = {"rows": rows, "same.rows": rows, "list": [plain, {"x": plain}], "plain": plain, "apart": PLAIN.clone()}
    return {"tied": tied, "step": 7}


GROUPS = [{"match": r"^blocks\.1", "lr": 0.25}, {"match": r"\.bias$", "betas": (0.5, 0.75), "weight_decay": 0.0}]


def stepped_optimizer(steps=2):
    """An optimizer of three groups, which differ in their options, and in that one parameter had no step."""
    names = [f"blocks.{i}.{kind}" for i in (0, 1, 2) for kind in ("weight", "bias")]
    params = {name: torch.nn.Parameter(torch.arange(3.0) + i) for i, name in enumerate(names)}
    optimizer = shardopt.keyed("adamw", params, lr=0.125, groups=GROUPS)
    for step in range(steps):
        for i, (name, parameter) in enumerate(params.items()):
            parameter.grad = None if name == names[-1] else torch.arange(3.0) * (step + 1) - i
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0625
    return optimizer


def optimizers():
    """Optimizers of several kinds, as `optimizers_v1` and `optimizers_v2` have them: in one process."""
    torch.manual_seed(0)
    groups = [{"match": "w", "algorithm": "sgd", "momentum": 0.5}, {"match": "b", "lr": 0.25}]
    weights = {name: torch.nn.Parameter(torch.arange(4.0)) for name in ("w1", "w2", "b1", "c")}
    several = shardopt.keyed("adagrad", weights, lr=0.125, groups=groups)
    params = {name: torch.nn.Parameter(torch.arange(3.0) + 1) for name in ("b", "a")}
    whole = shardopt.keyed("lbfgs", params, lr=0.5, history_size=3)
    return {"adamw": stepped_optimizer(0), "several": several, "lbfgs": whole}


def step_all(apart):
    """Takes two steps with each of `optimizers()`."""
    apart["adamw"] = stepped_optimizer()
    for step in (1, 2):
        for parameter in apart["several"].params.values():
            parameter.grad = torch.arange(4.0) * step
        apart["several"].step()

        def loss():
            params = apart["lbfgs"].params
            apart["lbfgs"].zero_grad()
            total = (params["a"] * params["b"] - 2).square().sum()
            total.backward()
            return total

        apart["lbfgs"].step(loss)
    apart["several"].param_groups[0]["lr"] = 0.0625


def optimizer_state():
    """State that version 3 has in another form than those before: the options of groups."""
    return {**tied_state(), "optimizer": stepped_optimizer()}


def referring_state(changed=True):
    """State of which version 4 refers to much in an earlier save; that is saved first, with `changed=False`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = torch.arange(768 * 256, dtype=torch.int32).reshape(768, 256)
    adapter = torch.arange(6.0).reshape(2, 3)
    if changed:
        table[300] += 1  # of 1 KiB a row: in the second segment of three
        adapter += 0.5
    frozen = distribute_tensor(torch.arange(30_000.0).reshape(300, 100), mesh, [Shard(0)], src_data_rank=None)
    return {"frozen": frozen, "table": table, "adapter": adapter, "step": int(changed)}


def drifted(step):
    """What each step changes in a few elements everywhere: words of 2, 4 and 1 bytes, skips of 1 to 3."""
    halves = (torch.arange(72_000) % 7).to(torch.bfloat16).reshape(2, -1)
    long = torch.arange(66_000, dtype=torch.int32)  # more than a segment
    no_name = (torch.arange(4_600) % 5).to(torch.complex128)
    for each in range(1, step + 1):
        halves[:, each::499] += each
        long[each::17_001] += 1
        long[-each] = -1
        no_name[each::401] -= 2j * each
    return {"halves": halves, "long": long, "no_name": no_name}


def delta_state(changed=2):
    """State of which version 5 has deltas on an earlier save, and on one between; they are saved with less changed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    app = drifted(int(changed))
    app["halves"] = distribute_tensor(app["halves"], mesh, [Shard(0)], src_data_rank=None)
    return {**app, "step": int(changed)}


STATES = {1: state, 2: tied_state, 3: optimizer_state, 4: referring_state, 5: delta_state}


class Layers(torch.nn.Module):
    """Two layers of one shape, which may have changed places, and one of another."""

    def __init__(self, order=("first", "second")):
        super().__init__()
        for i, name in enumerate((*order, "head")):
            self.add_module(name, torch.nn.Linear(3, 2 if name == "head" else 3))
            with torch.no_grad():
                for parameter in self.get_submodule(name).parameters():
                    parameter.copy_(torch.arange(float(parameter.numel())).reshape(parameter.shape) / 8 - i)


def torch_optimizers(order=("first", "second")):
    """torch's own optimizers as `torch_positions` has them, by position, beside the model that they train."""
    model = Layers(order)
    decayed, others = (
        [pair for pair in model.named_parameters() if pair[0].endswith(end)] for end in ("weight", "bias")
    )
    return {
        "model": model,
        "named": torch.optim.AdamW(
            [{"params": decayed, "lr": 0.25}, {"params": others, "weight_decay": 0.0}], lr=0.125
        ),
        "shapes": torch.optim.Adam(model.head.parameters(), lr=0.125, amsgrad=True),
        "doubtful": torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5),
        "stateless": torch.optim.SGD(model.parameters(), lr=0.125),
        "lbfgs": torch.optim.LBFGS([model.head.bias], lr=0.125, max_iter=2, history_size=2),
    }


def step_torch_optimizers(app):
    """Takes two steps with each of `torch_optimizers()`, whose gradients go by name."""
    model = app["model"]
    for step in (1, 2):
        for i, name in enumerate(sorted(dict(model.named_parameters()))):
            parameter = model.get_parameter(name)
            parameter.grad = torch.arange(float(parameter.numel())).reshape(parameter.shape) / 4 - i * step
        for name in ("named", "shapes", "doubtful", "stateless"):
            app[name].step()
        app["lbfgs"].step(lambda: (model.head.bias * model.head.bias.grad).sum())
    app["named"].param_groups[0]["lr"] = 0.0625
