"""Writes torch's own distributed checkpoints, by the torch that is installed: once.

python -m tests.golden.make_dcp
"""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.golden.dcp_state import DTYPES, VALUES, filled, whole
from tests.harness import run_ranks
from tests.support.placement import runs, sharded_tensor_of

FOLDER = "tests/golden/dcp"  # as it is stored in them


def kinds():
    mesh = init_device_mesh("cpu", (2,))
    table = whole("table")
    tensors = {name: distribute_tensor(whole(name), mesh, [Shard(0)], src_data_rank=None) for name in DTYPES}
    tensors |= {
        "transposed": whole("transposed"),
        "scalar": whole("scalar"),
        "empty": distribute_tensor(whole("empty"), mesh, [Replicate()], src_data_rank=None),
        "columns": distribute_tensor(whole("columns"), mesh, [Shard(1)], src_data_rank=None),
        "short": distribute_tensor(whole("short"), mesh, [Shard(0)], src_data_rank=None),
        "table": sharded_tensor_of(table, runs(table.shape, 0, [3, 5, 7]), [0, 1, 0]),
    }
    state = {"tensors": tensors, "nested": [whole("listed"), {"values": VALUES}]}
    dcp.save(state, checkpoint_id=f"{FOLDER}/kinds")


def adamw(flat):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    fill("", model_state)
    fill("", optimizer_state)
    name = "adamw_flat" if flat else "adamw_nested"
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{FOLDER}/{name}")


def fill(key, state):
    if isinstance(state, dict):
        for name, value in state.items():
            fill(f"{key}.{name}" if key else name, value)
    elif isinstance(state, torch.Tensor):
        with torch.no_grad():
            value = filled(key, state.shape, state.dtype)
            if isinstance(state, DTensor):
                value = distribute_tensor(value, state.device_mesh, state.placements, src_data_rank=None).to_local()
                state = state.to_local()
            state.copy_(value)


if __name__ == "__main__":
    run_ranks(2, kinds)
    run_ranks(2, adamw, True)
    run_ranks(2, adamw, False)
