"""FullyShardedDataParallel (FSDP1), whose parameters optimizers refuse: its weights go through a sharded state dict."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from shardopt import checkpoint
from tests.harness import run_ranks


def wrapped(of_dtensors, seed):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if of_dtensors else None
    model = FullyShardedDataParallel(
        torch.nn.Linear(6, 5), use_orig_params=True, device_id=torch.device("cpu"), device_mesh=mesh
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def whole(model):
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.tolist() for parameter in model.parameters()]


def save(url, of_dtensors):
    model = wrapped(of_dtensors, seed=0)
    checkpoint.save(url, {"model": model.state_dict()})
    return whole(model)


def load(url, of_dtensors):
    model = wrapped(of_dtensors, seed=1)
    state = model.state_dict()
    checkpoint.load(url, {"model": state})
    model.load_state_dict(state)
    return whole(model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("of_dtensors", [False, True], ids=["ShardedTensor", "DTensor"])
def test_a_sharded_state_dict_of_fsdp1_loads_on_a_different_number_of_ranks(tmp_path, of_dtensors):
    url = str(tmp_path / "saved")
    saved = run_ranks(2, save, url, of_dtensors)
    assert run_ranks(3, load, url, of_dtensors) == [saved[0]] * 3
