"""Checkpoints of every format version so far are read by this one, to the last bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import FORMAT_VERSION
from tests.golden.state import (
    DTYPES,
    PLAIN,
    ROWS,
    STATES,
    VALUES,
    delta_state,
    drifted,
    optimizers,
    state,
    step_all,
    stepped_optimizer,
    tied_state,
    whole,
)
from tests.harness import run_ranks

VERSIONS = sorted(Path(__file__).parent.glob("v*"))
V1, V2, V3, V4, V5 = (Path(__file__).parent / f"v{number}" for number in range(1, 6))


def same_bits(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    )


def test_every_version_is_here():
    assert [path.name for path in VERSIONS] == [f"v{i}" for i in range(1, FORMAT_VERSION + 1)]
    assert [f"v{i}" for i in STATES] == [path.name for path in VERSIONS]


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.name)
def test_is_whole(path):
    report = checkpoint.verify(path)
    assert report.ok and not report.remains


def test_version_1_is_read_to_the_last_bit():
    with checkpoint.open(V1) as reader:
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


@pytest.mark.parametrize("size", [1, 2])
def test_version_1_is_loaded_by_ranks(size):
    assert run_ranks(size, load, str(V1)) == list(range(size))


def test_version_1_is_read_by_safetensors():
    for file in V1.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert len(list(opened.keys())) > len(DTYPES)


TIED = {"tied.same.rows": "tied.rows", "tied.list.1.x": "tied.list.0", "tied.plain": "tied.list.0"}


def test_version_2_is_read_to_the_last_bit():
    with checkpoint.open(V2) as reader:
        tied = {key: reader.info(key).tied_to for key in reader.manifest.tensors if reader.info(key).tied_to}
        assert tied == TIED
        assert all(same_bits(reader.read(key), ROWS) for key in ("tied.rows", "tied.same.rows"))
        assert all(same_bits(reader.read(f"tied.{key}"), PLAIN) for key in ("list.0", "list.1.x", "plain", "apart"))
        assert reader.read("step") == 7


def test_version_3_has_the_options_of_parameters():
    with checkpoint.open(V3) as reader:
        options = reader.read("optimizer.param_groups.blocks.0.bias")
        assert (options["lr"], options["betas"], options["algorithm"]) == (0.125, (0.5, 0.75), "AdamW")
        assert reader.read("optimizer.param_groups.blocks.1.bias")["lr"] == 0.0625
    stored = json.loads((V3 / "manifest.json").read_bytes())
    assert len(stored["shared_values"]) == 3 and len(stored["shared"]) == 6


def test_version_4_is_read_through_its_references():
    stored = json.loads((V4 / "manifest.json").read_bytes())
    assert stored["min_reader_version"] == 4
    assert sum(name.startswith("../base_of_v4/") for name, _, _ in stored["files"]) == 2
    table = torch.arange(768 * 256, dtype=torch.int32).reshape(768, 256)
    table[300] += 1
    with checkpoint.open(V4) as reader:
        assert torch.equal(reader.read("frozen"), torch.arange(30_000.0).reshape(300, 100))
        assert torch.equal(reader.read("table"), table)
        assert [box.offsets[0] for box in reader.info("table").boxes] == [0, 256, 512]
        assert torch.equal(reader.read("adapter"), torch.arange(6.0).reshape(2, 3) + 0.5)
    patched = [key for file in V4.glob("*.safetensors") for key in safe_open(file, "pt").keys()]  # noqa: SIM118  # no dict
    assert "__rows__.256.table" in patched and "frozen" not in patched


def test_version_5_is_read_through_its_deltas():
    stored = json.loads((V5 / "manifest.json").read_bytes())
    assert (stored["version"], stored["min_reader_version"]) == (5, 5)
    with checkpoint.open(V5) as reader:
        for key, value in drifted(2).items():
            assert same_bits(reader.read(key), value), key
            assert [len(entry.deltas) for entry in reader.manifest.tensors[key].layout.entries] == [2] * (
                1 + (key == "halves")
            )
        directories = {file.directory for file in reader.manifest.files}
    assert directories == {None, "base_of_v5", "between_of_v5"}
    keys = [key for file in V5.glob("*.safetensors") for key in safe_open(file, "pt").keys()]  # noqa: SIM118  # no dict
    assert {"__delta__.halves", "__delta_index__.long", "__delta__.no_name"} <= {*keys} and "long" not in keys


def load_deltas(path):
    app, wanted = delta_state(0), delta_state(2)
    checkpoint.load(path, app)
    assert same_bits(app["halves"].to_local(), wanted["halves"].to_local())
    assert all(same_bits(app[key], wanted[key]) for key in ("long", "no_name"))
    return app["step"]


@pytest.mark.parametrize("size", [1, 2])
def test_version_5_is_loaded_by_ranks(size):
    assert run_ranks(size, load_deltas, str(V5)) == [2] * size


def load_tied(path):
    app = tied_state()
    for key in ("rows", "plain", "apart"):
        app["tied"][key].zero_()
    app["step"] = 0
    if Path(path) == V3:
        app["optimizer"] = stepped_optimizer(0)
    checkpoint.load(path, app, init_state=True)
    if Path(path) == V3:
        assert repr(app["optimizer"].state_dict()) == repr(stepped_optimizer().state_dict())
    assert same_bits(app["tied"]["same.rows"].full_tensor(), ROWS)
    assert app["tied"]["list"][0] is app["tied"]["list"][1]["x"] is app["tied"]["plain"]
    assert same_bits(app["tied"]["plain"], PLAIN) and same_bits(app["tied"]["apart"], PLAIN)
    return app["step"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("path", [V2, V3], ids=lambda path: path.name)
def test_versions_2_and_3_are_loaded_by_ranks(path, size):
    assert run_ranks(size, load_tied, str(path)) == [7] * size


@pytest.mark.parametrize("version", [1, 2])
def test_optimizers_of_earlier_versions_resume(version):
    path = Path(__file__).parent / f"optimizers_v{version}"
    assert checkpoint.verify(path).ok
    trained, resumed = optimizers(), optimizers()
    step_all(trained)
    checkpoint.load(path, resumed, init_state=True)
    for name, optimizer in resumed.items():
        assert repr(optimizer.state_dict()) == repr(trained[name].state_dict()), name


def test_version_2_has_a_tied_tensor_once_for_safetensors():
    keys = set()
    for file in V2.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            keys |= {key for key in opened.keys() if not key.startswith("__")}  # noqa: SIM118  # no dict
    assert keys == {"tied.rows", "tied.list.0", "tied.apart"}
