"""Checkpoints of every format version so far are read by this one, to the last bit."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shardopt import checkpoint
from shardopt.checkpoint.format import FORMAT_VERSION
from tests.golden.state import DTYPES, VALUES, state, whole
from tests.harness import run_ranks

VERSIONS = sorted(Path(__file__).parent.glob("v*"))


def same_bits(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    )


def test_every_version_is_here():
    assert [path.name for path in VERSIONS] == [f"v{i}" for i in range(1, FORMAT_VERSION + 1)]


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.name)
def test_is_read_to_the_last_bit(path):
    assert checkpoint.verify(path).ok
    with checkpoint.open(path) as reader:
        for name in DTYPES:
            assert same_bits(reader.read(f"tensors.rows.{name}"), whole(name)), name
        assert torch.equal(reader.read("tensors.columns"), torch.arange(20.0).reshape(4, 5))
        assert torch.equal(reader.read("tensors.uneven"), torch.arange(15.0).reshape(5, 3))
        assert torch.equal(reader.read("tensors.long"), torch.arange(150_000, dtype=torch.int32))
        assert reader.read("tensors.scalar") == 2.5
        assert reader.read("tensors.empty").shape == (0, 4)
        for name in ("none", "numbers", "counter", "scalar"):
            assert repr(reader.read(f"values.{name}")) == repr(VALUES[name])
        assert reader.read("values.texts.a.b") == "ü"
        assert reader.read("values.texts.set") == {1, 2}
        assert reader.per_rank(1)["mine"]["rank"] == 1


def load(path):
    app = state()
    for tensor in app["tensors"].values():
        tensor.zero_()
    app["values"] = dict.fromkeys(VALUES) | {"texts": dict.fromkeys(VALUES["texts"])}
    checkpoint.load(path, app)
    assert repr(app["values"]) == repr(VALUES)
    for name in DTYPES:
        full = app["tensors"][f"rows.{name}"].to_local()
        begin = 2 * torch.distributed.get_rank() if torch.distributed.get_world_size() == 2 else 0
        assert same_bits(full, whole(name)[begin : begin + full.shape[0]]), name
    return app["mine"].value["rank"]


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("size", [1, 2])
def test_is_loaded_by_ranks(path, size):
    assert run_ranks(size, load, str(path)) == list(range(size))


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.name)
def test_is_read_by_safetensors(path):
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert len(list(opened.keys())) > len(DTYPES)
