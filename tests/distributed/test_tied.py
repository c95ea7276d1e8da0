"""Keys that are one memory on every rank are stored once; on some ranks only, as what they are there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt import checkpoint
from tests.harness import run_ranks

RANKS_STAY = True


def spread(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)


VALUE = torch.arange(15.0).reshape(5, 3)


def make(kind, value):
    """The state of this rank; values are as they were given, wherever they lie."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first = spread(value)
    if kind == "on all ranks":  # of four ranks that share five rows, the last holds nothing
        return {"a": first, "b": first}
    if kind == "on some ranks":
        return {"a": first, "b": first if rank else spread(value)}
    if kind == "in another order":
        return {"a": first, "b": first} if rank else {"b": first, "a": first}
    if kind == "to another key":
        other = spread(value)
        return {"a": first, "b": other, "c": first if rank else other}
    if kind == "where both are":  # as the stages of a pipeline have them, of which the last has the head alone
        plain = value.clone()
        return {"a": plain, "b": plain} if rank < size - 1 else {"b": plain}
    if kind == "of a pair of ranks":
        plain = value.clone()
        return {f"a{rank // 2}": plain, f"b{rank // 2}": plain, f"own{rank}": torch.ones(1)}
    raise AssertionError(kind)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def save_and_load(path, kind):
    for number in range(2):  # the second save goes by the plan of the first
        checkpoint.save(f"{path}/{number}", make(kind, VALUE))
        for share_reads in ("never", "always"):
            app = make(kind, torch.zeros(5, 3))
            checkpoint.load(f"{path}/{number}", app, share_reads=share_reads)
            assert all(torch.equal(whole(t), VALUE) for key, t in app.items() if not key.startswith("own"))
            apart = {
                key: spread(torch.zeros(5, 3)) if isinstance(t, torch.distributed.tensor.DTensor) else t.clone().zero_()
                for key, t in app.items()
            }
            checkpoint.load(f"{path}/{number}", apart, share_reads=share_reads)
            assert all(torch.equal(whole(t), VALUE) for key, t in apart.items() if not key.startswith("own"))


TIED = {
    "on all ranks": {"b": "a"},
    "on some ranks": {},
    "in another order": {},
    "to another key": {},
    "where both are": {},
    "of a pair of ranks": {"b0": "a0", "b1": "a1"},
}


@pytest.mark.parametrize("size", [1, 4])
def test_ties(tmp_path, size):
    kinds = TIED if size > 1 else ["on all ranks"]
    run_ranks(size, save_and_load_all, str(tmp_path), list(kinds))
    for kind in kinds:
        for number in range(2):
            path = tmp_path / kind / str(number)
            assert checkpoint.verify(path).ok
            with checkpoint.open(path) as reader:
                stored = reader.manifest.tensors
                assert {key: each.tied_to for key, each in stored.items() if each.tied_to} == TIED[kind], kind
                assert all(torch.equal(reader.read(key), VALUE) for key in stored if not key.startswith("own"))


def save_and_load_all(path, kinds):
    for kind in kinds:
        save_and_load(f"{path}/{kind}", kind)


class Model(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        nn.init.constant_(self.embed.weight, number)


def save_sharded_model(path):
    model = Model(3.0)
    fully_shard(model)
    checkpoint.save(path, {"model": model})
    other = Model(0.0)
    checkpoint.load(path, {"model": other})
    assert (other.head.weight == 3).all() and other.head.weight is other.embed.weight


def test_a_sharded_model_with_tied_weights(tmp_path):
    run_ranks(2, save_sharded_model, str(tmp_path / "c"))
    with checkpoint.open(tmp_path / "c") as reader:
        assert reader.info("model.head.weight").tied_to == "model.embed.weight"
