"""Writes torch's own distributed checkpoints, by the torch that is installed: once.

python -m tests.golden.make_dcp

By an older torch, which need not have all that the tests want, each of two processes:

RANK=<0 or 1> python -m tests.golden.make_dcp tests/golden/dcp_of_torch_<version>
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.golden.dcp_state import DTYPES, VALUES, filled, whole

FOLDER = "tests/golden/dcp"  # as it is stored in them


def kinds(folder=FOLDER):
    mesh = init_device_mesh("cpu", (2,))
    tensors = {name: placed(whole(name), mesh, Shard(0)) for name in DTYPES}
    tensors |= {
        "transposed": whole("transposed"),
        "scalar": whole("scalar"),
        "empty": placed(whole("empty"), mesh, Replicate()),
        "columns": placed(whole("columns"), mesh, Shard(1)),
        "short": placed(whole("short"), mesh, Shard(0)),
        "table": table(whole("table"), [(0, 3, 0), (3, 5, 1), (5, 7, 0)]),
    }
    state = {"tensors": tensors, "nested": [whole("listed"), {"values": VALUES}]}
    dcp.save(state, checkpoint_id=f"{folder}/kinds")


def placed(full, mesh, placement):
    """A DTensor of a value that each rank has, without anything being sent."""
    local = full
    if isinstance(placement, Shard):
        chunks = torch.chunk(full, 2, placement.dim)
        rank = dist.get_rank()
        local = chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())


def table(full, parts):
    """A ShardedTensor whose rows from begin to end are on a rank."""
    shards = [
        LocalShard(full[begin:end].clone(), ShardMetadata([begin, 0], [end - begin, full.shape[1]], f"rank:{rank}/cpu"))
        for begin, end, rank in parts
        if rank == dist.get_rank()
    ]
    return init_from_local_shards(shards, full.shape)


def adamw(flat, folder=FOLDER):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # forward on the CPU is not in every version
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    fill("", model_state)
    fill("", optimizer_state)
    name = "adamw_flat" if flat else "adamw_nested"
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{folder}/{name}")


def fill(key, state):
    if isinstance(state, dict):
        for name, value in state.items():
            fill(f"{key}.{name}" if key else name, value)
    elif isinstance(state, torch.Tensor):
        with torch.no_grad():
            value = filled(key, state.shape, state.dtype)
            if isinstance(state, DTensor):
                value = placed(value, state.device_mesh, *state.placements).to_local()
                state = state.to_local()
            state.copy_(value)


if __name__ == "__main__":
    if "RANK" in os.environ:
        meeting = f"file://{os.path.abspath(sys.argv[1])}.meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=2)
        kinds(sys.argv[1])
        adamw(False, sys.argv[1])
        dist.barrier()
        dist.destroy_process_group()
    else:
        from tests.harness import run_ranks

        run_ranks(2, kinds)
        run_ranks(2, adamw, True)
        run_ranks(2, adamw, False)
