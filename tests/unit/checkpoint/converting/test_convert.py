"""Conversions: what others' own readers find in what was written, and what stands there when one did not end."""

import importlib
import io
import json
import pickle
import tracemalloc
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.converting.choosing import renamed_path
from shardopt.checkpoint.converting.out_files import write_file
from shardopt.checkpoint.converting.pickle_bytes import StoredElsewhere, pickle_of
from shardopt.checkpoint.converting.zip_bytes import Member, ZipArchive, torch_members
from shardopt.checkpoint.format.constants import DTYPES
from shardopt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptionError,
    MismatchError,
    OptionError,
    StateError,
)
from shardopt.sharding.mesh import Mesh, Split, mesh_layout

convert_line = importlib.import_module("shardopt.checkpoint.converting.convert")  # beside the function of that name
FORMATS = ("shardopt", "dcp", "huggingface", "torch")
WITHOUT_PREFIX = {r"^model\.": ""}


class Net(torch.nn.Module):
    """An embedding that is tied to the output, eleven layers between them, and a dtype that is no fp32."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(40, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(11)])
        self.head = torch.nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.arange(7, dtype=torch.int64))
        self.register_buffer("scale", torch.tensor(2.5, dtype=torch.bfloat16))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trained():
    torch.manual_seed(0)
    model = Net()
    groups = [{"match": "bias", "weight_decay": 0.0}]
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=1e-3, groups=groups)
    for _ in range(3):
        model(torch.randint(0, 40, (4,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "step": 3, "data": {"position": [1, 2], "seed": 2**70}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The app, and its checkpoint: in one box a tensor, in boxes of rows, and in boxes of rows and columns."""
    root, app = tmp_path_factory.mktemp("saved"), trained()
    checkpoint.save(root / "whole", app)
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    for name, dims in (("rows", (0,)), ("cells", (0, 1))):

        def layout_of(key, stored, dims=dims):
            return mesh_layout(
                stored.shape, mesh, tuple(Split(i, dim) for i, dim in enumerate(dims) if dim < len(stored.shape))
            )

        checkpoint.reshard(root / "whole", root / name, layout=layout_of)
    return app, root


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def digests_of(source):
    with checkpoint.open(source) as reader:
        return {key: xxhash.xxh3_128_hexdigest(raw(reader.read(key))) for key in reader.manifest.tensors}


@pytest.mark.parametrize("stored", ["whole", "rows", "cells"])
def test_every_format_has_the_same_digests(saved, tmp_path, stored):
    _, root = saved
    expected = digests_of(root / "whole")
    for to in FORMATS:
        report = checkpoint.convert(root / stored, tmp_path / to, to, max_file_bytes=3000, world_size=None, check=True)
        wanted = {k: d for k, d in expected.items() if to != "huggingface" or k.startswith("model.")}
        assert report.digests == wanted, to
        assert report.tensors == len(wanted)
    assert checkpoint.verify(tmp_path / "shardopt").ok
    assert digests_of(tmp_path / "shardopt") == expected
    again = checkpoint.convert(tmp_path / "shardopt", tmp_path / "again", world_size=3, check=True)
    assert again.digests == expected
    with checkpoint.open(tmp_path / "again") as ours, checkpoint.open(root / "whole") as first:
        assert ours.manifest.values == first.manifest.values
        assert ours.info("model.head.weight").tied_to == "model.embed.weight"


def test_torch_reads_the_file(saved, tmp_path):
    app, root = saved
    checkpoint.convert(root / "cells", tmp_path / "all.pt", to="torch")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (state["step"], state["data"]) == (3, {"position": [1, 2], "seed": 2**70})
    other = Net()
    other.load_state_dict(state["model"])
    assert all(torch.equal(a, b) for a, b in zip(app["model"].parameters(), other.parameters(), strict=True))
    assert state["model"]["head.weight"].data_ptr() == state["model"]["embed.weight"].data_ptr()
    mapped = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)
    assert torch.equal(mapped["model"]["layers.10.weight"], app["model"].layers[10].weight)
    keyed = shardopt.keyed("adamw", other.named_parameters(), lr=9.0, groups=[{"match": "bias", "weight_decay": 7.0}])
    keyed.init_state()
    keyed.load_state_dict(state["optimizer"])
    assert [(g["lr"], g["weight_decay"]) for g in keyed.param_groups] == [(1e-3, 0.0), (1e-3, 0.01)]
    plain = torch.optim.AdamW(
        [
            {"params": [p for n, p in other.named_parameters() if "bias" not in n]},
            {"params": [p for n, p in other.named_parameters() if "bias" in n]},
        ]
    )
    plain.load_state_dict(state["optimizer"])  # by position: groups and parameters are in the order of the model
    for name, parameter in other.named_parameters():
        assert torch.equal(plain.state[parameter]["exp_avg"], state["optimizer"]["state"][name]["exp_avg"])


@pytest.mark.filterwarnings("ignore")  # torch's own, of a load without process groups
@pytest.mark.parametrize("stored", ["whole", "cells"])
def test_dcp_reads_model_and_values(saved, tmp_path, stored):
    app, root = saved
    report = checkpoint.convert(root / stored, tmp_path / "dcp", to="dcp", max_file_bytes=3000)
    assert report.files > 3
    state = {"model": Net().state_dict(), "step": 0, "data": {"position": None, "seed": 0}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert (state["step"], state["data"]) == (3, {"position": [1, 2], "seed": 2**70})
    for name, tensor in app["model"].state_dict().items():
        assert torch.equal(state["model"][name], tensor), name
    assert sorted(each.name for each in tmp_path.joinpath("dcp").iterdir())[0] == ".metadata"
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    with checkpoint.open(root / stored) as reader:
        assert len(metadata.state_dict_metadata["model.layers.3.weight"].chunks) == len(
            reader.info("model.layers.3.weight").boxes
        )


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("flattened", [False, True])
def test_dcp_fills_both_forms_of_torchs_optimizer_state(saved, tmp_path, flattened):
    app, root = saved
    checkpoint.convert(root / "rows", tmp_path / "dcp", to="dcp")
    model = Net()
    decayed = [p for name, p in model.named_parameters() if "bias" not in name]
    rest = [p for name, p in model.named_parameters() if "bias" in name]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 5.0}], lr=9.0)
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(1e-3, 0.01), (1e-3, 0.0)]
    expected = app["optimizer"].state_dict()["state"]
    for name, parameter in model.named_parameters():
        for entry in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][entry], expected[name][entry]), (name, entry)


@pytest.mark.parametrize("most_bytes", [5e9, 1500])
def test_hugging_faces_folder(saved, tmp_path, most_bytes):
    app, root = saved
    report = checkpoint.convert(
        root / "cells", tmp_path / "hf", to="huggingface", rename=WITHOUT_PREFIX, max_file_bytes=most_bytes
    )
    names = sorted(each.name for each in (tmp_path / "hf").iterdir())
    if most_bytes > 1500:
        assert names == ["model.safetensors"]
        files = {"model.safetensors": None}
    else:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        files = dict.fromkeys(index["weight_map"].values())
        count = len(files)
        assert names == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] + [
            "model.safetensors.index.json"
        ]
        where = [index["weight_map"][f"layers.{i}.weight"] for i in range(11)]
        assert where == sorted(where)  # layer 2 before layer 10
        assert index["metadata"]["total_size"] == sum(t.nbytes for n, t in state_of(app).items() if n != "head.weight")
    read = {}
    for name in files:
        with safe_open(tmp_path / "hf" / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            read |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping
    expected = {name: tensor for name, tensor in state_of(app).items() if name != "head.weight"}  # tied: once
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    assert report.digests["head.weight"] == report.digests["embed.weight"]
    assert "step" in report.left_out and "optimizer.state.embed.weight.exp_avg" in report.left_out


def state_of(app):
    return app["model"].state_dict()


def test_casts_and_refuses_what_would_be_lost(tmp_path):
    state = {"a": torch.tensor([1.0, 1e30]), "n": torch.arange(3), "b": torch.rand(5, 5)}
    checkpoint.save(tmp_path / "src", state)
    checkpoint.convert(tmp_path / "src", tmp_path / "hf", to="huggingface", dtype=torch.bfloat16, check=True)
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("b"), state["b"].bfloat16())
        assert torch.equal(file.get_tensor("n"), state["n"])
    for to in FORMATS:
        with pytest.raises(CheckpointError, match=r"a: found 1\.0\d+e\+30"):
            checkpoint.convert(tmp_path / "src", tmp_path / f"half-{to}", to, dtype=torch.float16)
        assert not is_checkpoint(tmp_path / f"half-{to}", to)
    with pytest.raises(MismatchError, match="floating-point"):
        checkpoint.convert(tmp_path / "src", tmp_path / "x", to="huggingface", dtype=torch.int8)


def test_optimizer_state_keeps_its_dtype(saved, tmp_path):
    _, root = saved
    checkpoint.convert(root / "rows", tmp_path / "out", dtype=torch.bfloat16)
    with checkpoint.open(tmp_path / "out") as reader:
        assert reader.info("model.layers.0.weight").dtype == torch.bfloat16
        assert reader.info("optimizer.state.layers.0.weight.exp_avg").dtype == torch.float32
        assert reader.info("model.counts").dtype == torch.int64


def is_checkpoint(path, to):
    if to == "torch":
        return path.exists()
    return any(
        (path / name).exists()
        for name in ("manifest.json", ".metadata", "model.safetensors", "model.safetensors.index.json")
    )


@pytest.mark.parametrize("biases_first", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_what_torch_would_take_by_position_is_told_of_and_goes_by_names(tmp_path, caplog, biases_first, full):
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        groups = [{"params": [each for each in model.parameters() if each.dim() == dim], "lr": dim} for dim in (1, 2)]
        return model, torch.optim.Adam(groups if biases_first else list(model.parameters())[::-1])

    model, optimizer = make()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    checkpoint.convert(tmp_path / "step", tmp_path / "model.pt", to="torch")
    assert ("goes by position" in caplog.text) is biases_first
    other, of_other = make()
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    set_optimizer_state_dict(other, of_other, state["optimizer"], options=StateDictOptions(full_state_dict=full))
    for own, new in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[own]["exp_avg"], of_other.state[new]["exp_avg"])
    assert [each["lr"] for each in of_other.param_groups] == [each["lr"] for each in optimizer.param_groups]
    assert [each.keys() for each in of_other.param_groups] == [each.keys() for each in optimizer.param_groups]


def test_rename_takes_state_and_options_along(saved, tmp_path):
    _, root = saved
    rename = {r"(?<![^.])layers\.(\d+)": r"blocks.\1", r"^optimizer\.": "opt."}
    checkpoint.convert(root / "rows", tmp_path / "x.pt", to="torch", rename=rename, skip=r"^data\.")
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert state.keys() == {"model", "opt", "step"}
    assert "blocks.3.weight" in state["model"] and "blocks.3.weight" in state["opt"]["state"]
    assert "blocks.3.bias" in state["opt"]["param_groups"][1]["params"]
    with pytest.raises(MismatchError, match="one name"):
        checkpoint.convert(root / "rows", tmp_path / "y.pt", to="torch", rename={r"layers\.\d+": "layer"})
    with pytest.raises(MismatchError, match="nothing to convert"):
        checkpoint.convert(root / "rows", tmp_path / "y.pt", to="torch", select="no such")


def test_select_takes_optimizer_state_to_hugging_face_where_it_is_asked_for(saved, tmp_path):
    _, root = saved
    checkpoint.convert(root / "rows", tmp_path / "hf", to="huggingface", select=r"exp_avg$")
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 23


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        (("model", "a.b"), "a.b", ("a.b",)),
        (("model", "a.b"), "model.c.b", ("model", "c.b")),
        (("o", "state", "a.b", "exp_avg"), "o.state.c.exp_avg", ("o", "state", "c", "exp_avg")),
        (("o", "state", "a.b", "exp_avg"), "p.state.a.b.exp_avg", ("p", "state", "a.b", "exp_avg")),
        (("o", "state", "a.b", "exp_avg"), "p.state.c.d.exp_avg", ("p", "state", "c.d", "exp_avg")),
        (("a", "b"), "new.a.b", ("new", "a", "b")),
        (("x", "y"), "z", ("z",)),
        (("x", "y"), "x.y", ("x", "y")),
    ],
)
def test_paths_of_renamed_keys(path, new, expected):
    assert renamed_path(path, new) == expected


def test_values_per_rank_are_kept_or_refused(tmp_path):
    checkpoint.save(tmp_path / "src", {"w": torch.ones(3), "rng": checkpoint.PerRank({"seed": 4})})
    checkpoint.convert(tmp_path / "src", tmp_path / "own")
    with checkpoint.open(tmp_path / "own") as reader:
        assert reader.per_rank(0) == {"rng": {"seed": 4}}
    for to in ("dcp", "torch"):
        with pytest.raises(MismatchError, match="rng"):
            checkpoint.convert(tmp_path / "src", tmp_path / to, to)
        checkpoint.convert(tmp_path / "src", tmp_path / to, to, drop_per_rank=True)
    with pytest.raises(MismatchError, match="rng"):
        checkpoint.convert(tmp_path / "src", tmp_path / "two", world_size=2)


def test_what_has_no_form_is_refused_by_name(tmp_path):
    checkpoint.save(tmp_path / "src", {"w": torch.ones(3), "deep": {"lr": np.float32(0.5)}})
    for to in ("dcp", "torch"):
        with pytest.raises(StateError, match=r"deep\.lr: .*skip="):
            checkpoint.convert(tmp_path / "src", tmp_path / to, to)
        checkpoint.convert(tmp_path / "src", tmp_path / to, to, skip=r"^deep\.lr$")
    checkpoint.save(tmp_path / "c", {"w": torch.ones(3, dtype=torch.complex128)})
    with pytest.raises(StateError, match="complex128"):
        checkpoint.convert(tmp_path / "c", tmp_path / "hf", to="huggingface")
    checkpoint.save(tmp_path / "values", {"n": 3})
    with pytest.raises(MismatchError, match="nothing to convert"):
        checkpoint.convert(tmp_path / "values", tmp_path / "hf", to="huggingface")
    for wrong in ({"to": "gguf"}, {"max_file_bytes": 0}, {"world_size": 0}, {"to": "dcp", "world_size": 2}):
        with pytest.raises(OptionError):
            checkpoint.convert(tmp_path / "src", tmp_path / "x", **wrong)


@pytest.mark.parametrize("to", FORMATS)
def test_no_checkpoint_is_written_over(saved, tmp_path, to):
    _, root = saved
    checkpoint.convert(root / "rows", tmp_path / "x", to)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    with pytest.raises(CheckpointExistsError):
        checkpoint.convert(root / "rows", tmp_path / "x", to)
    assert before == {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}


def test_files_of_others_are_left_alone(saved, tmp_path):
    _, root = saved
    (tmp_path / "adapter.safetensors").write_bytes(b"mine")
    (tmp_path / "__0_0.distcp").write_bytes(b"mine")
    for to in ("huggingface", "dcp"):
        with pytest.raises(CheckpointExistsError, match="file of another"):
            checkpoint.convert(root / "rows", tmp_path, to)
    assert {each.name for each in tmp_path.iterdir()} == {"adapter.safetensors", "__0_0.distcp"}


@pytest.mark.filterwarnings("ignore")  # as above
def test_elements_of_lists_that_are_empty_dicts_stay_in_dcp(tmp_path):
    state = {
        "seen": [{}, {"x": 7}, {}],
        "tensors": [{}, {"t": torch.ones(1), "empty": {}}, {"inner": {}}],
        "mixed": [1, [{}], 3],
    }
    checkpoint.save(tmp_path / "c", state)
    checkpoint.convert(tmp_path / "c", tmp_path / "dcp", to="dcp")
    checkpoint.convert(tmp_path / "dcp", tmp_path / "back", to="shardopt")
    del state["tensors"][1]["empty"]  # type: ignore[index]  # as torch leaves it out of a dict
    for url in ("dcp", "back"):
        loaded: dict = {"seen": [], "tensors": None, "mixed": []}
        checkpoint.load(tmp_path / url, loaded)
        assert repr(loaded) == repr(state)
    checkpoint.save(tmp_path / "d", {"list": [{"t": torch.ones(1), "empty": {}}], "values": {"x": 1}})
    checkpoint.convert(tmp_path / "d", tmp_path / "of torch", to="dcp")
    loaded = {"list": [{"t": torch.zeros(1), "empty": {}}], "values": {"x": 0}}
    dcp.load(loaded, checkpoint_id=tmp_path / "of torch", no_dist=True)  # which an entry more would confuse
    assert repr(loaded) == repr({"list": [{"t": torch.ones(1), "empty": {}}], "values": {"x": 1}})


@pytest.mark.parametrize("to", ["shardopt", "dcp", "huggingface"])
def test_an_interrupted_conversion_resumes(saved, tmp_path, monkeypatch, to):
    """The third file fails; the first two are then not written again, unless a byte of them has changed."""
    _, root = saved
    calls = []
    options = {"world_size": 4} if to == "shardopt" else {"max_file_bytes": 1500}

    def failing(storage, file, *args):
        calls.append(file.name)
        if len(calls) == 3:
            raise OSError(5, "the disk is gone")
        return write_file(storage, file, *args)

    monkeypatch.setattr(convert_line, "write_file", failing)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        checkpoint.convert(root / "cells", tmp_path / "x", to, **options)
    assert not is_checkpoint(tmp_path / "x", to)
    first, second, third = calls
    damaged = bytearray((tmp_path / "x" / second).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "x" / second).write_bytes(damaged)
    before = (tmp_path / "x" / first).stat().st_ino
    report = checkpoint.convert(root / "cells", tmp_path / "x", to, **options, check=True)
    assert calls[3:5] == [second, third] and first not in calls[3:]
    assert (tmp_path / "x" / first).stat().st_ino == before
    assert report.bytes_reused == (tmp_path / "x" / first).stat().st_size
    assert not [each.name for each in (tmp_path / "x").iterdir() if each.name.startswith(".") and "conver" in each.name]
    fresh = checkpoint.convert(root / "cells", tmp_path / "fresh", to, **options)
    assert fresh.digests == report.digests
    names = {each.name for each in (tmp_path / "x").iterdir()} - {"manifest.json"}
    assert all((tmp_path / "x" / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes() for name in names)


def test_resuming_with_other_arguments_clears_what_is_of_no_use(saved, tmp_path, monkeypatch):
    _, root = saved
    with monkeypatch.context() as patch:

        def no_commit(plan, reports):
            raise KeyError("killed before the commit")

        patch.setattr(convert_line, "_commit", no_commit)
        with pytest.raises(KeyError):
            checkpoint.convert(root / "rows", tmp_path / "hf", to="huggingface", max_file_bytes=1000)
    left = sorted(each.name for each in (tmp_path / "hf").glob("model-*"))
    assert len(left) > 3
    (tmp_path / "hf" / f".{left[0]}.0123456789ab.tmp").write_bytes(b"half")
    report = checkpoint.convert(root / "rows", tmp_path / "hf", to="huggingface", max_file_bytes=2000)
    names = {each.name for each in (tmp_path / "hf").iterdir()}
    assert len(names) == report.files + 1
    assert report.bytes_reused == 0


@pytest.mark.parametrize("to", FORMATS)
def test_check_finds_a_byte_that_changed(saved, tmp_path, monkeypatch, to):
    _, root = saved
    commit = convert_line._commit

    def damaging(plan, reports):
        done = commit(plan, reports)
        file = plan.files[-1]
        with open(f"{plan.storage.url}/{file.name}", "r+b") as stream:
            stream.seek(file.begins[-1] + file.parts[-1].nbytes // 2)
            byte = stream.read(1)
            stream.seek(-1, 1)
            stream.write(bytes([byte[0] ^ 1]))
        return done

    monkeypatch.setattr(convert_line, "_commit", damaging)
    with pytest.raises(CorruptionError):
        checkpoint.convert(root / "rows", tmp_path / "x", to, check=True)


@pytest.mark.parametrize("to", FORMATS)
def test_object_stores(saved, to):
    _, root = saved
    url = f"memory://convert-{to}/x"
    report = checkpoint.convert(root / "cells", url, to, max_file_bytes=3000, check=True)
    assert report.digests["model.embed.weight"] == digests_of(root / "whole")["model.embed.weight"]
    assert report.url.endswith("x")


def test_memory_does_not_grow_with_tensors(tmp_path):
    checkpoint.save(tmp_path / "src", {"w": torch.arange(32 << 20, dtype=torch.float32).reshape(4096, -1)})  # 128 MiB
    tracemalloc.start()
    checkpoint.convert(tmp_path / "src", tmp_path / "x.pt", to="torch", durable=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20  # windows are torch's memory: benchmarks/convert.py measures the process


def test_archives_of_every_dtype():
    for name, dtype in DTYPES.items():
        with torch.random.fork_rng():
            numbers = torch.randint(0, 2 if name == "bool" else 100, (15 * dtype.itemsize,), dtype=torch.uint8)
        whole = numbers.view(getattr(torch, name)).reshape(3, 5)
        for tensor in (whole, whole[0, 0], whole[:0]):
            data = pickle_of({"t": StoredElsewhere("0", dtype, tuple(tensor.shape))}, "k", str)
            archive = ZipArchive(torch_members(data, [("0", tensor.nbytes)]))
            chunks = (memoryview(raw(tensor))[:7], memoryview(raw(tensor))[7:])
            written = b"".join(archive.body(lambda chunks=chunks: iter(chunks)))
            assert len(written) == archive.nbytes
            assert all(begin % 64 == 0 for begin in archive.begins)
            assert zipfile.ZipFile(io.BytesIO(written)).testzip() is None
            read = load(written)["t"]
            assert (read.dtype, read.shape, read.stride()) == (tensor.dtype, tensor.shape, tensor.contiguous().stride())
            assert raw(read) == raw(tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def load(written):
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf")
        return torch.load(io.BytesIO(written), weights_only=True)


def test_pickles_of_plain_values():
    value = [None, True, False, 0, 255, 256, -1, 2**31, -(2**40), 2**300, 1.5, float("inf"), "é\n", b"\x00\xff"]
    value += [(), (1, (2,)), [], {}, {"a": {2: [3]}}, {1, 2}, Counter("aab"), torch.arange(3)]
    records = {}

    def keep(tensor):
        records["0"] = raw(tensor)
        return "0"

    read = load(b"".join(ZipArchive(torch_members(pickle_of(value, "k", keep), [*records.items()])).body(iter)))
    assert read[:-1] == value[:-1] and torch.equal(read[-1], value[-1])
    assert [*map(type, read)] == [*map(type, value)]
    for strange in (object(), np.int64(3), 2**5000, {"a": [{3.5: {frozenset()}}]}):
        with pytest.raises(StateError, match="k"):
            pickle_of({"x": strange}, "k", str)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_archives_beyond_4_gib(tmp_path):
    """A member of more, members behind it, and many of them: what zip64 is for."""
    large = (4 << 30) + 5
    members = [
        Member("archive/large", None, large),
        *(Member(f"archive/{i}", b"x" * (i % 3), i % 3) for i in range(70_000)),
    ]
    archive = ZipArchive(members)
    block = memoryview(bytes(1 << 24))

    def take():
        for begin in range(0, large, 1 << 24):
            yield block[: min(1 << 24, large - begin)]

    with open(tmp_path / "large.zip", "wb") as file:
        for chunk in archive.body(take):
            file.write(chunk)
    assert (tmp_path / "large.zip").stat().st_size == archive.nbytes
    with zipfile.ZipFile(tmp_path / "large.zip") as read:
        assert [info.file_size for info in read.infolist()] == [member.nbytes for member in members]
        assert read.read("archive/69998") == b"x" * (69998 % 3)
    state = tmp_path / "large.pt"
    whole = ZipArchive(
        torch_members(pickle_of(StoredElsewhere("0", DTYPES["uint8"], (large,)), "k", str), [("0", large)])
    )
    with open(state, "wb") as file:
        for chunk in whole.body(take):
            file.write(chunk)
    assert torch.load(state, weights_only=True, mmap=True).shape == (large,)


@pytest.mark.parametrize("to", ["shardopt", "dcp", "huggingface"])
def test_a_directory_that_is_a_checkpoint_of_another_format_is_taken(tmp_path, to):
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint.save(tmp_path / "own", {"x": torch.ones(2)})
    for name, fill in (("one", "model"), ("named", "anything")):
        (tmp_path / name).mkdir()
        save_file({"x": torch.ones(2)}, tmp_path / name / f"{fill}.safetensors")
    (tmp_path / "torch").mkdir()
    torch.save({"x": torch.ones(2)}, tmp_path / "torch" / "pytorch_model.bin")
    for name in ("dcp", "own", "one", "named", *(["torch"] if to != "huggingface" else [])):
        path = tmp_path / name
        before = sorted(path.iterdir())
        with pytest.raises(CheckpointExistsError, match="is taken"):
            checkpoint.convert(tmp_path / "own", path, to, check=True)
        if to == "shardopt":
            with pytest.raises(CheckpointExistsError, match="is taken"):
                checkpoint.reshard(tmp_path / "own", path, world_size=2)
        assert sorted(path.iterdir()) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "training_args.bin").write_bytes(b"of others")
    (tmp_path / "other" / "config.json").write_text("{}")
    checkpoint.convert(tmp_path / "own", tmp_path / "other", to, check=True)
    checkpoint.convert(tmp_path / "own", tmp_path / "own" / "model.pt", "torch", check=True)


@pytest.mark.parametrize("kind", ["huggingface", "dcp"])
def test_files_of_another_source_of_the_same_shapes_are_not_taken(tmp_path, monkeypatch, kind):
    for name, value in (("one", 1.0), ("two", 2.0)):
        checkpoint.save(tmp_path / f"{name}-own", {f"w{i}": torch.full((64,), value) for i in range(3)})
        checkpoint.convert(tmp_path / f"{name}-own", tmp_path / name, kind)
    calls = []

    def failing(storage, file, *args):
        calls.append(file.name)
        if len(calls) == 3:
            raise OSError(5, "the disk is gone")
        return write_file(storage, file, *args)

    with monkeypatch.context() as patch:
        patch.setattr(convert_line, "write_file", failing)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            checkpoint.convert(tmp_path / "one", tmp_path / "x", "huggingface", max_file_bytes=256)
    report = checkpoint.convert(tmp_path / "two", tmp_path / "x", "huggingface", max_file_bytes=256, check=True)
    assert report.bytes_reused == 0
    with checkpoint.open(tmp_path / "x") as reader:
        assert {reader.read(key).unique().item() for key in reader.manifest.tensors} == {2.0}


def test_one_file_may_have_any_number_of_bytes(tmp_path):
    checkpoint.save(tmp_path / "own", {"w": torch.zeros(4)})
    assert checkpoint.convert(tmp_path / "own", tmp_path / "x", "huggingface", max_file_bytes=float("inf")).files == 1
