"""Memory that is not there, memory that autograd remembers, and numbers beyond all sizes."""

import json
import struct

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.format.data_file import parse_header
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.checkpoint.sources.reading.open_file import DataFileReader
from shardopt.checkpoint.sources.reading.read_plan import ReadRequest
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import CorruptionError, MismatchError, ShardoptError
from shardopt.sharding.box import whole
from tests.harness import run_ranks


def test_offsets_beyond_all_floats_and_then_a_float():
    first = {"dtype": "F32", "shape": [], "data_offsets": [0, 10**400]}
    text = json.dumps({"a": first, "b": {**first, "data_offsets": [10**400, float("inf")]}}).encode()
    with pytest.raises(CorruptionError):
        parse_header(struct.pack("<Q", len(text)) + text, 8 + len(text), "a file")


def with_freed_memory(path, how):
    tensors = {f"t{i}": torch.ones(5, 3) for i in range(4)}
    if how == "load":
        checkpoint.save(path, tensors)
    tensors["t1"].untyped_storage().resize_(0)
    with pytest.raises(ShardoptError, match="t1"):
        getattr(checkpoint, how)(path, tensors)


@pytest.mark.parametrize("how", ["load", "save"])
def test_a_tensor_whose_memory_was_freed(tmp_path, how):
    """As `storage.resize_` does, with which sharded modules give memory back; in a process that may die."""
    run_ranks(1, with_freed_memory, tmp_path / "c", how, backend=None)


def test_autograd_learns_that_a_tensor_was_loaded(tmp_path):
    """As after torch's `load_state_dict`: a backward through values that are gone fails, and is not wrong."""
    weight = torch.ones(3, requires_grad=True)
    checkpoint.save(tmp_path / "c", {"w": weight})
    loss = (weight**2).sum()
    checkpoint.load(tmp_path / "c", {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("strides", [(1, 1), (0, 1), (2, 3), (1, 2)])
def test_elements_that_share_memory(tmp_path, strides):
    """Loaded into, some would have the values of others."""
    checkpoint.save(tmp_path / "c", {"w": torch.arange(12.0).view(3, 4)})
    memory = torch.full((20,), -1.0)
    with pytest.raises(MismatchError, match=r"w: found .* share"):
        checkpoint.load(tmp_path / "c", {"w": memory.as_strided((3, 4), strides)})
    assert torch.equal(memory, torch.full((20,), -1.0))


@pytest.mark.parametrize("strides", [(4, 1), (1, 3), (5, 1), (1, 4)])
def test_elements_that_lie_apart(tmp_path, strides):
    checkpoint.save(tmp_path / "c", {"w": torch.arange(12.0).view(3, 4)})
    target = torch.full((20,), -1.0).as_strided((3, 4), strides)
    checkpoint.load(tmp_path / "c", {"w": target})
    assert torch.equal(target, torch.arange(12.0).view(3, 4))


def test_wants_of_nothing_among_others(tmp_path):
    """Only `fetch` itself can be asked so: layers above leave empty boxes out."""
    tensors = {"a": torch.ones(3), "b": torch.zeros(0), "c": torch.ones(2)}
    checkpoint.save(tmp_path / "c", tensors)
    storage = storage_of(tmp_path / "c")
    file = DataFileReader(storage, read_manifest(storage)[0].files[0])
    into = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    boxes = {key: whole(tuple(tensor.shape)) for key, tensor in tensors.items()}
    fetch(
        [
            ReadRequest(file, file.entries[key], DTYPES["float32"], boxes[key].sizes, boxes[key], target)
            for key, target in into.items()
        ]
    )
    assert all(torch.equal(into[key], tensors[key]) for key in tensors)
