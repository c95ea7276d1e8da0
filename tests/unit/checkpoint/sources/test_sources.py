"""Checkpoints of others, read without a pickle being run; what is damaged or unknown is named."""

import copy
import json
import os
import re
import struct

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.checkpoint.rearrange import Rule
from shardopt.checkpoint.storage.local import LocalStorage
from shardopt.errors import CheckpointNotFoundError, CorruptionError, FormatError, MismatchError
from shardopt.sharding.box import Box

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

VALUES = {"step": 7, "cfg": {"sizes": [1, 2, {"b": 3}], "pair": (1, 2), "name": "a.b", "none": None}}


def make_model(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    model[0].weight.data = torch.randn(8, 16).T  # its memory is not in C order
    return model


def train(model, optimizer, steps=3):
    losses = []
    for step in range(steps):
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained():
    model = make_model()
    decay, rest = [m.weight for m in model], [m.bias for m in model]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.1)
    train(model, optimizer)
    return model, optimizer


@pytest.fixture(scope="module")
def losses_to_come(trained):
    model, optimizer = make_model(), None
    model.load_state_dict(trained[0].state_dict())
    optimizer = torch.optim.AdamW(
        [{"params": [m.weight for m in model]}, {"params": [m.bias for m in model], "weight_decay": 0.0}], lr=0.1
    )
    optimizer.load_state_dict(copy.deepcopy(trained[1].state_dict()))  # or both would share their state
    return train(model, optimizer)


def save_nested(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state} | VALUES, checkpoint_id=path, no_dist=True)


def save_flattened(path, model, optimizer):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": state} | VALUES, checkpoint_id=path, no_dist=True)


def save_numbered(path, model, optimizer):
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()} | VALUES
    dcp.save(state, checkpoint_id=path, no_dist=True)


def save_file_of_torch(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()} | VALUES, path)


def save_file_with_names(path, model, optimizer):
    state = optimizer.state_dict()
    for group, kind in zip(state["param_groups"], ("weight", "bias"), strict=True):
        group["param_names"] = [f"{i}.{kind}" for i in range(3)]
    torch.save({"model": model.state_dict(), "optim": state} | VALUES, path)


KINDS = [save_nested, save_flattened, save_numbered, save_file_of_torch, save_file_with_names]


def make_app():
    model = make_model(5)
    optimizer = shardopt.keyed(
        "adamw",
        dict(model.named_parameters()),
        lr=0.5,
        groups=[{"match": r"weight$"}, {"match": r"bias$", "weight_decay": 0.3}],
    )
    cfg = {"sizes": [0], "pair": (0, 0), "name": "", "none": 1}
    return model, optimizer, {"model": model, "optim": optimizer, "step": 0, "cfg": cfg}


@pytest.mark.parametrize("save", KINDS)
def test_a_run_resumes_from_any_form(tmp_path, trained, losses_to_come, save, caplog):
    caplog.set_level("INFO", "shardopt.checkpoint")
    save(tmp_path / "saved.pt", *trained)
    model, optimizer, app = make_app()
    checkpoint.load(tmp_path / "saved.pt", app, init_state=True)
    assert {key: app[key] for key in VALUES} == VALUES
    assert train(model, optimizer) == pytest.approx(losses_to_come, rel=1e-6)  # another implementation steps
    assert [group["weight_decay"] for group in optimizer.param_groups[:2]] == [0.01, 0.0]
    assert ("names that its parameters were given with" in caplog.text) is (save is save_file_with_names)


def test_one_group_by_number_takes_the_order_of_the_model(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    torch.save({"optim": optimizer.state_dict(), "model": model.state_dict()}, tmp_path / "a.pt")
    expected = train(model, optimizer)
    other = make_model(1)
    groups = [{"match": r"weight$"}, {"match": r"bias$"}]
    keyed = shardopt.keyed("sgd", dict(other.named_parameters()), lr=0.1, momentum=0.9, groups=groups)
    checkpoint.load(tmp_path / "a.pt", {"optim": keyed, "model": other}, init_state=True)
    assert train(other, keyed) == pytest.approx(expected, rel=1e-6)

    backwards = dict(reversed(dict(other.named_parameters()).items()))
    app = {"optim": shardopt.keyed("sgd", backwards, lr=0.1, momentum=0.9), "model": other}
    averaged = app | {"average": make_model(2)}  # which has the same names
    for each in (app, averaged):
        with pytest.raises(MismatchError, match=r"parameter 0, which is 2\.bias in .* groups and 0\.weight in"):
            checkpoint.load(tmp_path / "a.pt", each, init_state=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"init_state": True}, *({"strict": Strictness(**{each: "ignore"})} for each in ("missing", "unexpected"))],
)
def test_groups_by_number_in_another_order_are_told_with_their_sizes(tmp_path, options):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    decay = [each for each in model.parameters() if each.dim() > 1]
    no_decay = [each for each in model.parameters() if each.dim() < 2]
    saved = torch.optim.AdamW([{"params": decay}, {"params": no_decay, "weight_decay": 0.0}], weight_decay=0.1)
    model(torch.randn(3, 4)).sum().backward()
    saved.step()
    torch.save({"model": model.state_dict(), "optimizer": saved.state_dict()}, tmp_path / "c.pt")

    def load(match, weight_decay, **options):
        groups = [{"match": match, "weight_decay": weight_decay}]
        own = shardopt.keyed("adamw", model.named_parameters(), groups=groups, weight_decay=0.1 - weight_decay)
        checkpoint.load(tmp_path / "c.pt", {"model": model, "optimizer": own}, **options)
        return [(group["weight_decay"], len(group["params"])) for group in own.param_groups]

    with pytest.raises(MismatchError) as refused:
        load(r"bias|^1\.", 0.0, **options)
    (problem,) = refused.value.problems
    assert problem.key == "optimizer.param_groups" and "checkpoint's" in problem.remedy
    assert (problem.found, problem.required) == (
        "groups of 2, 4 parameters, without names",
        "groups of 4, 2 parameters, as in the app",
    )
    assert load(r"bias|^1\.", 0.0, select="^model")
    assert load(r"bias|^1\.", 0.0, strict=False)
    passes = Strictness(missing=re.compile("^optimizer"), unexpected="ignore")
    assert load(r"bias|^1\.", 0.0, strict=passes)
    assert load(r"^[02]\.weight", 0.1, init_state=True) == [(0.1, 2), (0.0, 4)]


@pytest.mark.parametrize("save", KINDS)
def test_all_there_is_has_the_bytes_that_were_saved(tmp_path, trained, save):
    save(tmp_path / "saved.pt", *trained)
    assert checkpoint.verify(tmp_path / "saved.pt").ok
    with checkpoint.open(tmp_path / "saved.pt") as reader:
        for name, value in trained[0].state_dict().items():
            assert torch.equal(reader.read(f"model.{name}"), value)
            box = checkpoint.Box(tuple(size // 3 for size in value.shape), tuple(size // 2 for size in value.shape))
            part = value[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))]
            assert torch.equal(reader.read(f"model.{name}", box), part)
        assert reader.read("step") == 7


def test_tensors_of_any_kind(tmp_path):
    base = torch.arange(48.0).reshape(6, 8)
    state = {
        "bf16": torch.randn(5, 3, dtype=torch.bfloat16),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "transposed": base.T,
        "cube": torch.randn(2, 3, 4).permute(2, 0, 1),
        "int": torch.arange(5),
    }
    gaps = {
        "columns": base[:, 2:6],
        "every other": base[::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "last": base[5],
    }
    torch.save(state | gaps | {"same": state["bf16"]}, tmp_path / "a.pt")
    dcp.save(dict(state | gaps), checkpoint_id=tmp_path / "dcp", no_dist=True)
    plain = {key: value.contiguous() for key, value in state.items() if key not in ("scalar",)}
    save_file(plain, tmp_path / "a.safetensors")
    for path, keys in (("a.pt", [*state, *gaps, "same"]), ("dcp", [*state, *gaps]), ("a.safetensors", plain)):
        with checkpoint.open(tmp_path / path) as reader:
            assert sorted(keys) == [*reader.keys()]
            for key in keys:
                expected = {**state, **gaps, "same": state["bf16"]}[key]
                value = reader.read(key)
                assert value.dtype == expected.dtype and value.shape == expected.shape
                assert torch.equal(value.contiguous().reshape(-1).view(torch.uint8), as_bytes(expected)), (path, key)
                target = torch.zeros([*reversed(expected.shape)], dtype=expected.dtype)
                target = target.permute(tuple(reversed(range(expected.dim()))))
                reader.read_into(key, target)
                assert torch.equal(as_bytes(target), as_bytes(expected))
    with checkpoint.open(tmp_path / "a.pt") as reader:
        assert reader.info("same").tied_to == "bf16"


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_hugging_face_with_an_index(tmp_path):
    state = {f"layers.{i}.weight": torch.randn(4, 3) for i in range(4)}
    names = [*state]
    save_file({name: state[name] for name in names[:2]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: state[name] for name in names[2:]}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    app = {"layers": {str(i): {"weight": torch.zeros(4, 3)} for i in range(4)}}
    checkpoint.load(tmp_path, app)  # without an index: all files of the set
    assert all(torch.equal(app["layers"][str(i)]["weight"], state[f"layers.{i}.weight"]) for i in range(4))

    index = {name: f"model-0000{1 + i // 2}-of-00002.safetensors" for i, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    checkpoint.load(tmp_path, app)
    assert checkpoint.verify(tmp_path).ok

    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index | {"x": "../x.safetensors"}})
    )
    with pytest.raises(CorruptionError, match=r"'\.\./x\.safetensors' as the file of 'x'"):
        checkpoint.open(tmp_path)
    index["more"] = index[names[0]]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CorruptionError, match="nothing under 'more'"):
        checkpoint.open(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptionError, match=r"model-00002-of-00002.safetensors: found no such file"):
        checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CorruptionError, match=r"model-00002-of-00002.safetensors: found no such file"):
        checkpoint.open(tmp_path)


def test_one_file_beside_an_index_is_read_if_files_of_the_index_are_gone(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.zeros(2)}, tmp_path / name)
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({f"w{number}": torch.ones(2) for number in (0, 1)}, tmp_path / "model.safetensors")
    app = {"w0": torch.full((2,), 5.0), "w1": torch.full((2,), 5.0)}
    with pytest.raises(
        FormatError, match=r"model\.safetensors, and 2 files in model\.safetensors\.index\.json; .* remove"
    ):
        checkpoint.load(tmp_path, app)
    checkpoint.load(tmp_path / "model.safetensors", app)
    app["w0"].zero_()
    (tmp_path / names[0]).unlink()
    with pytest.raises(CorruptionError, match=rf"{names[0]}: found no such file"):  # of a set that is half there
        checkpoint.load(tmp_path, app)
    (tmp_path / names[1]).unlink()
    checkpoint.load(tmp_path, app)
    assert app["w0"].all() and app["w1"].all()
    index["weight_map"] = dict.fromkeys(("w0", "w1"), "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint.load(tmp_path, app)


@pytest.mark.parametrize(("other", "key"), [("model.fp16", "w"), ("adapter_model", "lora_A.weight")])
def test_several_files_of_hugging_face_that_do_not_belong_together(tmp_path, other, key):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({key: torch.zeros(2)}, tmp_path / f"{other}.safetensors")
    with pytest.raises(FormatError, match="several sets of files"):
        checkpoint.open(tmp_path)
    app = {"w": torch.zeros(2)}
    checkpoint.load(tmp_path / "model.safetensors", app)
    assert app["w"].all()


def test_weights_without_a_name_are_those_of_the_only_model(tmp_path):
    model, other = make_model(), make_model(1)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for path in ("model.safetensors", "model.pt"):
        checkpoint.load(tmp_path / path, {"model": other})
        assert all(torch.equal(other.state_dict()[key], value) for key, value in model.state_dict().items())
        other = make_model(2)
        checkpoint.load(tmp_path / path, other.state_dict())
        assert all(torch.equal(other.state_dict()[key], value) for key, value in model.state_dict().items())
        with pytest.raises(MismatchError, match=r"0\.\*: found 2 keys in the checkpoint, such as 0\."):
            checkpoint.load(tmp_path / path, {"one": make_model(), "two": make_model()})


def test_a_tied_weight_that_is_stored_once_is_no_missing_one(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    save_file({"embed.weight": model.embed.weight.detach()}, tmp_path / "model.safetensors")
    checkpoint.load(tmp_path / "model.safetensors", {"model": other})
    assert torch.equal(other.head.weight, model.embed.weight)
    other.head.weight = torch.nn.Parameter(torch.zeros(7, 3))
    with pytest.raises(MismatchError, match=r"model.head.weight: found nothing in the checkpoint"):
        checkpoint.load(tmp_path / "model.safetensors", {"model": other})


class Custom:
    """An object that no reader knows."""


def test_what_is_not_known_is_listed_and_can_be_skipped(tmp_path):
    torch.save({"x": torch.ones(3), "args": Custom(), "fine": 1}, tmp_path / "a.pt")
    dcp.save({"x": torch.ones(3), "args": Custom(), "fine": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for path in ("a.pt", "dcp"):
        app = {"x": torch.zeros(3), "fine": 0}
        with pytest.raises(FormatError, match=r"args: found an object of .*Custom.*skip="):
            checkpoint.load(tmp_path / path, app)
        assert app["fine"] == 0
        checkpoint.load(tmp_path / path, app, skip="^args$")
        assert app["fine"] == 1 and torch.equal(app["x"], torch.ones(3))
    torch.save(make_model(), tmp_path / "whole.pt")
    with pytest.raises(FormatError, match="save state_dict"):
        checkpoint.open(tmp_path / "whole.pt")


@pytest.mark.parametrize("key", [0.5, (0, 1), None, True, b"a", "\ud800"], ids=ascii)
def test_keys_of_dicts_that_are_no_names_are_listed_and_can_be_skipped(tmp_path, key):
    torch.save({"x": torch.ones(3), "args": {"of": {key: 1, "big": torch.ones(5)}}, key: 2}, tmp_path / "a.pt")
    assert checkpoint.verify(tmp_path / "a.pt").ok
    app = {"x": torch.zeros(3), "args": {"of": {"big": torch.zeros(5)}}}
    with pytest.raises(FormatError) as refused:
        checkpoint.load(tmp_path / "a.pt", app)
    problems = refused.value.problems
    assert len(problems) == 2 and all("dict key of type" in each.found and "skip=" in each.remedy for each in problems)
    checkpoint.load(tmp_path / "a.pt", app, skip="|".join(f"^{re.escape(each.key)}$" for each in problems))
    assert app["x"].all() and app["args"]["of"]["big"].all()


def test_texts_that_no_encoding_has_are_listed_and_can_be_skipped(tmp_path):
    torch.save({"x": torch.ones(3), "name": "\ud800"}, tmp_path / "a.pt")
    dcp.save({"x": torch.ones(3), "name": "\ud800"}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for path in ("a.pt", "dcp"):
        app = {"x": torch.zeros(3)}
        with pytest.raises(
            FormatError, match=r"name: found an object of builtins.str that is not valid Unicode.*skip="
        ):
            checkpoint.load(tmp_path / path, app)
        checkpoint.load(tmp_path / path, app, skip="name")
        assert app["x"].all()


def test_a_lazily_conjugated_tensor_of_dcp_is_no_damage(tmp_path):
    dcp.save({"x": torch.ones(3), "y": torch.tensor([1j]).conj()}, checkpoint_id=tmp_path, no_dist=True)
    app = {"x": torch.zeros(3), "y": torch.zeros(1, dtype=torch.complex64)}
    with pytest.raises(FormatError, match=r"y: found .*conjugated.*; leave it out with skip=.*resolve_conj"):
        checkpoint.load(tmp_path, app)
    del app["y"]
    checkpoint.load(tmp_path, app, skip="y")
    assert app["x"].all()


def test_skip_leaves_out_of_our_own_checkpoints_too(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(2), "n": 1})
    app = {"a": torch.zeros(2)}
    checkpoint.load(tmp_path / "c", app, skip="^(b|n)$")
    assert torch.equal(app["a"], torch.ones(2))
    with pytest.raises(MismatchError, match="a: found nothing in the checkpoint"):
        checkpoint.load(tmp_path / "c", app, skip=".")


@pytest.mark.parametrize("kind", ["dcp", "pt"])
def test_a_flipped_byte_is_found_before_anything_is_changed(tmp_path, kind):
    state = {"x": torch.arange(4096.0), "y": torch.arange(10.0)}
    if kind == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
        file = next((tmp_path / "saved").glob("*.distcp"))
    else:
        torch.save(state, tmp_path / "saved")
        file = tmp_path / "saved.pt"
        (tmp_path / "saved").rename(file)
    path = file if kind == "pt" else tmp_path / "saved"
    data = bytearray(file.read_bytes())
    at = data.index(struct.pack("<3f", 100.0, 101.0, 102.0))
    data[at + 2] ^= 1
    file.write_bytes(data)
    app = {"x": torch.zeros(4096), "y": torch.zeros(10)}
    with pytest.raises(CorruptionError, match="'x' that fail their checksum"):
        checkpoint.load(path, app)
    assert not app["x"].any() and not app["y"].any()
    report = checkpoint.verify(path)
    assert len(report.problems) == 1 and "'x'" in report.problems[0].found
    if kind == "dcp":
        dcp.load(app, checkpoint_id=path, no_dist=True)
        assert app["x"][100] != 100  # which torch does not notice


def test_files_that_do_not_belong_together(tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "a.pt")
    checkpoint.load(tmp_path, {"x": torch.zeros(1)})
    torch.save({"y": torch.ones(1)}, tmp_path / "b.pt")
    with pytest.raises(FormatError, match=r"several files of torch.save \(a.pt, b.pt\)"):
        checkpoint.open(tmp_path)
    for i, key in enumerate("xyz"):
        torch.save({key: torch.ones(1)}, tmp_path / f"part-0000{i + 1}-of-00003.bin")
    (tmp_path / "a.pt").unlink()
    (tmp_path / "b.pt").unlink()
    app = {key: torch.zeros(1) for key in "xyz"}
    checkpoint.load(tmp_path, app)
    assert all(app.values())
    torch.save({"x": torch.ones(1)}, tmp_path / "part-00002-of-00003.bin")
    with pytest.raises(CorruptionError, match="x: found two entries of this name"):
        checkpoint.open(tmp_path)
    (tmp_path / "part-00002-of-00003.bin").unlink()
    for left_over in ("part-00003-of-00003.bin", "part-00001-of-00003.bin"):
        with pytest.raises(CorruptionError, match=r"part-00002-of-00003.bin: found no such file"):
            checkpoint.open(tmp_path)
        (tmp_path / left_over).rename(tmp_path / "elsewhere")
        with pytest.raises(FormatError, match=r"part-0000[13]-of-00003.bin, one of 3 by its name; .* give its path"):
            checkpoint.open(tmp_path)
        (tmp_path / "elsewhere").rename(tmp_path / left_over)


def test_data_files_of_a_dead_save_are_not_taken_for_those_of_others(tmp_path):
    checkpoint.save(tmp_path / "c", {"x": torch.ones(1)})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match="1 files of a save that was not finished"):
        checkpoint.open(tmp_path / "c")
    file.rename(tmp_path / "c" / "model.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="a data file without its manifest"):
        checkpoint.open(tmp_path / "c")


def test_files_of_dcp_that_are_missing_or_short(tmp_path):
    dcp.save({"x": torch.ones(100)}, checkpoint_id=tmp_path / "d", no_dist=True)
    (file,) = (tmp_path / "d").glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(CorruptionError, match=f"{len(data) - 1} bytes where {len(data)} were written"):
        checkpoint.open(tmp_path / "d")
    file.unlink()
    with pytest.raises(CorruptionError, match="distcp: found no such file"):
        checkpoint.open(tmp_path / "d")


def test_over_any_storage(tmp_path, trained):
    import fsspec

    save_nested(tmp_path / "d", *trained)
    save_file_of_torch(tmp_path / "a.pt", *trained)
    fs = fsspec.filesystem("memory")
    fs.put(str(tmp_path / "d"), "/sources/d", recursive=True)
    fs.put(str(tmp_path / "a.pt"), "/sources/a.pt")
    for url in ("memory://sources/d", "memory://sources/a.pt"):
        weights = {"model": make_model(3)}
        checkpoint.load(url, weights, skip="^(?!model)")
        assert all(torch.equal(weights["model"].state_dict()[key], v) for key, v in trained[0].state_dict().items())


@pytest.mark.parametrize("save", KINDS)
def test_reshard_makes_our_own_of_any(tmp_path, trained, losses_to_come, save):
    save(tmp_path / "saved.pt", *trained)
    checkpoint.reshard(tmp_path / "saved.pt", tmp_path / "own", world_size=3)
    assert checkpoint.verify(tmp_path / "own").ok
    model, optimizer, app = make_app()
    app = {"net": model, "opt": optimizer, "step": 0, "cfg": app["cfg"]}
    rename = {"^model": "net", "^optim": "opt"}
    if save in (save_numbered, save_file_of_torch):  # of which three parameters have one shape
        with pytest.raises(MismatchError, match=r"parameter 1 of shape .* without a name"):
            checkpoint.load(tmp_path / "own", app, init_state=True, rename=rename)
        names = {id(each): name for name, each in trained[0].named_parameters()}
        order = [names[id(each)] for group in trained[1].param_groups for each in group["params"]]
        rename |= {rf"^opt\.state\.{i}\.(?=[^.]*$)": f"opt.state.{name}." for i, name in enumerate(order)}
    checkpoint.load(tmp_path / "own", app, init_state=True, rename=rename)
    assert train(model, optimizer) == pytest.approx(losses_to_come, rel=1e-6)
    assert {key: app[key] for key in VALUES} == VALUES


def test_numbers_in_a_checkpoint_of_our_own_are_understood_too(tmp_path, trained, losses_to_come):
    app = {"model": trained[0], "optim": trained[1], "mine": checkpoint.PerRank(3)}
    checkpoint.save(tmp_path / "own", app)
    model, optimizer, _ = make_app()
    app = {"net": model, "opt": optimizer, "my": checkpoint.PerRank(0)}
    rename = {"^model": "net", "^optim": "opt", "^mine$": "my"}
    checkpoint.load(tmp_path / "own", app, init_state=True, rename=rename)
    assert app["my"].value == 3
    assert train(model, optimizer) == pytest.approx(losses_to_come, rel=1e-6)


def test_reshard_keeps_what_is_there(tmp_path, trained):
    save_nested(tmp_path / "d", *trained)
    checkpoint.reshard(tmp_path / "d", tmp_path / "own", world_size=3)
    with checkpoint.open(tmp_path / "own") as reader:
        for name, value in trained[0].state_dict().items():
            assert torch.equal(reader.read(f"model.{name}"), value)
        assert reader.read("cfg.sizes.2.b") == 3


TARGETS = {save_nested: "dcp", save_flattened: "dcp", save_file_of_torch: "torch", save_file_with_names: "torch"}


def digests(reader):
    return {
        key: reader.read(key).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for key in tensors(reader)
    }


def tensors(reader):
    return reader.manifest.tensors


@pytest.mark.parametrize("save", TARGETS)
def test_there_and_back(tmp_path, trained, losses_to_come, save):
    """To our own format and back to that of others, which torch and we read alike."""
    save(tmp_path / "saved.pt", *trained)
    own = checkpoint.convert(tmp_path / "saved.pt", tmp_path / "own", world_size=2, check=True)
    back = checkpoint.convert(tmp_path / "own", tmp_path / "back.pt", to=TARGETS[save], check=True)
    assert own.digests == back.digests and not own.left_out and not back.left_out
    with checkpoint.open(tmp_path / "saved.pt") as saved, checkpoint.open(tmp_path / "back.pt") as returned:
        assert digests(saved) == digests(returned)
    model, optimizer, app = make_app()
    checkpoint.load(tmp_path / "back.pt", app, init_state=True)
    assert {key: app[key] for key in VALUES} == VALUES
    assert train(model, optimizer) == pytest.approx(losses_to_come, rel=1e-6)


def test_hugging_face_there_and_back(tmp_path, trained):
    state = {f"model.{key}": value.contiguous() for key, value in trained[0].state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    own = checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "own", world_size=3, check=True)
    back = checkpoint.convert(
        tmp_path / "own", tmp_path / "back", to="huggingface", max_file_bytes=800, check=True, dtype=torch.float32
    )
    assert own.digests == back.digests and back.files > 1
    assert checkpoint.verify(tmp_path / "back").ok
    (tmp_path / "back" / "model.safetensors.index.json").unlink()
    assert checkpoint.verify(tmp_path / "back").ok  # all of the set is there
    (tmp_path / "back" / ".conversion").write_text("[]")
    with pytest.raises(CheckpointNotFoundError, match="a conversion that was not finished"):
        checkpoint.open(tmp_path / "back")


def test_what_is_not_known_is_not_left_out_silently_by_a_conversion(tmp_path):
    torch.save({"x": torch.ones(3), "args": Custom()}, tmp_path / "a.pt")
    for call in (checkpoint.convert, checkpoint.reshard):
        with pytest.raises(FormatError, match=r"args: found an object of"):
            call(tmp_path / "a.pt", tmp_path / "own", world_size=1)
    report = checkpoint.convert(tmp_path / "a.pt", tmp_path / "own", skip="^args$")
    assert report.left_out == ("args",)


def test_rules_rearrange_what_is_converted(tmp_path):
    qkv = {name: torch.randn(4, 3) for name in ("q.weight", "k.weight", "v.weight")}
    save_file(qkv, tmp_path / "model.safetensors")
    rule = Rule(tuple(qkv), "qkv.weight", "o i, o i, o i -> o+o+o i")
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "out", to="huggingface", rearrange=[rule], check=True)
    with checkpoint.open(tmp_path / "out") as reader:
        assert torch.equal(reader.read("qkv.weight"), torch.cat([*qkv.values()]))
    checkpoint.convert(tmp_path / "out", tmp_path / "again", to="huggingface", rearrange=[rule.inverse()])
    with checkpoint.open(tmp_path / "again") as reader:
        assert all(torch.equal(reader.read(key), value) for key, value in qkv.items())


def test_numbers_of_parameters_that_are_called_by_numbers(tmp_path):
    def make():
        return torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2)) for _ in range(3)])

    model, other = make(), make()
    optimizer = torch.optim.SGD([{"params": [model[2]]}, {"params": [model[0], model[1]]}], lr=0.1, momentum=0.9)
    for i, parameter in enumerate(model):
        parameter.grad = torch.full((2,), float(i))
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    groups = [{"match": "^2$"}, {"match": "^[01]$"}]
    keyed = shardopt.keyed("sgd", dict(other.named_parameters()), lr=0.1, momentum=0.9, groups=groups)
    checkpoint.load(tmp_path / "a.pt", {"model": other, "optim": keyed}, init_state=True)
    assert [keyed.state[parameter]["momentum_buffer"][0].item() for parameter in other] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("with_tensor", [False, True])
def test_names_that_groups_tell_are_renamed_as_state_is(tmp_path, trained, with_tensor):
    model, optimizer = trained
    state = copy.deepcopy(optimizer.state_dict())
    for group, kind in zip(state["param_groups"], ("weight", "bias"), strict=True):
        group["param_names"] = [f"module.{i}.{kind}" for i in range(3)]
        group["lr"] = torch.tensor(0.1) if with_tensor else 0.1
    torch.save({"net": model.state_dict(), "opt": state}, tmp_path / "a.pt")
    inner, outer = make_model(4), torch.nn.Module()
    outer.layers = inner
    groups = [{"match": r"weight$"}, {"match": r"bias$"}]
    keyed = shardopt.keyed("adamw", dict(outer.named_parameters()), lr=0.1, groups=groups)
    rename = {r"^net\.": "model.layers.", r"^opt\.state\.module\.": "optim.state.layers.", r"^opt\.": "optim."}
    checkpoint.load(tmp_path / "a.pt", {"model": outer, "optim": keyed}, rename=rename, init_state=True)
    for mine, other in zip(inner.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(keyed.state[mine]["exp_avg"], optimizer.state[other]["exp_avg"])
    assert [group["weight_decay"] for group in keyed.param_groups[:2]] == [0.01, 0.0]


def test_names_that_groups_tell_may_have_those_of_wrappers_in_them(tmp_path, trained):
    save_file_with_names(tmp_path / "a.pt", *trained)
    state = torch.load(tmp_path / "a.pt")
    for group in state["optim"]["param_groups"]:
        group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    torch.save(state, tmp_path / "a.pt")
    _, optimizer, app = make_app()
    checkpoint.load(tmp_path / "a.pt", app, init_state=True)
    assert len(optimizer.state) == 6


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_of_a_wrapped_model_without_a_name_are_those_of_the_only_model(tmp_path, prefix):
    model, other = make_model(), make_model(1)
    torch.save({prefix + key: value for key, value in model.state_dict().items()}, tmp_path / "a.pt")
    checkpoint.load(tmp_path / "a.pt", {"model": other})
    assert all(torch.equal(other.state_dict()[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("state", [{}, {"scale": 3}])
def test_an_empty_dict_which_dcp_does_not_store_is_no_missing_one(tmp_path, state):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    saved = {"x": torch.ones(2), "extra": dict(state), "scaler": scaler.state_dict(), "deep": {"none": {}, "n": 1}}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    app = {"x": torch.zeros(2), "extra": {}, "scaler": scaler, "deep": {"none": {}, "n": 0}}
    checkpoint.load(tmp_path / "dcp", app)
    assert app["x"].all() and app["deep"] == {"none": {}, "n": 1} and app["extra"] == state
    with pytest.raises(MismatchError, match=r"more\.a: found nothing"):
        checkpoint.load(tmp_path / "dcp", app | {"more": {"a": 1}})


def torch_optimizer(kind, model):
    """One whose groups are not in the order of the model."""
    groups = [{"params": [m.bias for m in model], "lr": 0.3}, {"params": [m.weight for m in reversed(model)]}]
    return kind(groups, lr=0.7, momentum=0.9) if kind is torch.optim.SGD else kind(groups, lr=0.7)


def save_by_name(path, model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    torch.save({"model": weights, "optim": state} | VALUES, path)


@pytest.mark.parametrize("save", [save_nested, save_flattened, save_by_name])
def test_an_optimizer_of_torch_is_given_state_by_name(tmp_path, trained, losses_to_come, save):
    save(tmp_path / "saved", *trained)
    model = make_model(3)
    optimizer = torch_optimizer(torch.optim.AdamW, model)
    train(model, optimizer, 1)
    app = {"model": model, "optim": optimizer, **make_app()[2], "step": 0}
    checkpoint.load(tmp_path / "saved", {**app, "model": model, "optim": optimizer})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]
    assert train(model, optimizer) == pytest.approx(losses_to_come, rel=1e-6)

    mixed = torch.optim.AdamW(model.parameters())
    train(model, mixed, 1)
    before = copy.deepcopy(mixed.state_dict())
    with pytest.raises(
        MismatchError, match=r"optim\.param_groups\.0\.weight: found other options of 0\.weight than of 0\.bias"
    ):
        checkpoint.load(tmp_path / "saved", {**app, "model": model, "optim": mixed})
    assert str(before) == str(mixed.state_dict())


def test_an_optimizer_of_torch_without_state_is_given_options_by_name(tmp_path):
    model, other = make_model(), make_model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    save_nested(tmp_path / "d", model, optimizer)
    app = {"model": other, "optim": torch.optim.SGD(other.parameters(), lr=0.2)}
    checkpoint.load(tmp_path / "d", app, skip="^(step|cfg)")
    assert app["optim"].param_groups[0]["lr"] == 0.1 and torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("save", [save_file_of_torch, save_numbered, save_nested, save_flattened, save_by_name])
def test_frozen_parameters_that_the_keyed_optimizer_was_not_given(tmp_path, save):
    """torch's had them all: by number they shift the others, and of the frozen ones only options are stored."""
    model, other = make_model(), make_model(1)
    for each in (model, other):
        each[0].weight.requires_grad_(False)
        each[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    save(tmp_path / "saved", model, optimizer)
    expected = train(model, optimizer)
    trainable = {name: each for name, each in other.named_parameters() if each.requires_grad}
    keyed = shardopt.keyed("adamw", trainable, lr=0.5)
    app = {"model": other, "optim": keyed, "step": 0, "cfg": make_app()[2]["cfg"]}
    checkpoint.load(tmp_path / "saved", app, init_state=True)
    assert train(other, keyed) == pytest.approx(expected, rel=1e-6)

    stepped = make_model(2)  # of what was stepped there is state, which must have a place
    keyed = shardopt.keyed("adamw", {"0.weight": stepped[0].weight}, lr=0.5)
    with pytest.raises(MismatchError, match=r"2\.bias\.exp_avg: found a tensor of float32"):
        checkpoint.load(tmp_path / "saved", {**app, "model": stepped, "optim": keyed}, init_state=True)


def test_a_dict_does_not_become_a_list(tmp_path):
    dcp.save({"x": torch.ones(2), "sizes": {"a": 1}}, checkpoint_id=tmp_path / "d", no_dist=True)
    app = {"x": torch.zeros(2), "sizes": [3]}
    checkpoint.load(tmp_path / "d", app)
    assert app["sizes"] == {"a": 1}


STATE_OF_NUMPY = {
    "table": np.arange(6.0).reshape(2, 3),
    "backwards": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
    "empty": np.zeros((0, 3), dtype=np.uint8),
    "random": ("MT19937", np.arange(624, dtype=np.uint32), 3, 0, 0.5),
    "deep": {"more": [np.ones(2, dtype=np.float16), {"flag": np.array(True)}]},
}


def zeros_like(node):
    if isinstance(node, dict):
        return {name: zeros_like(child) for name, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(map(zeros_like, node))
    return np.zeros_like(node) if isinstance(node, np.ndarray) else type(node)()


@pytest.mark.parametrize("kind", ["dcp", "pt"])
def test_arrays_of_numpy_are_loaded_into_arrays(tmp_path, kind):
    path = tmp_path / kind
    if kind == "pt":
        torch.save(STATE_OF_NUMPY, path)
    else:
        dcp.save(STATE_OF_NUMPY, checkpoint_id=path, no_dist=True)
    app = zeros_like(STATE_OF_NUMPY)
    table, numbers = app["table"], app["random"][1]
    checkpoint.load(path, app)
    np.testing.assert_equal(app, STATE_OF_NUMPY)
    assert app["table"] is table and app["random"][1] is numbers  # in place
    assert checkpoint.verify(path).ok
    with checkpoint.open(path) as reader:
        assert reader.read("table", Box((1, 1), (1, 2))).tolist() == [[4.0, 5.0]]
    checkpoint.convert(path, tmp_path / "ours", check=True)
    again = zeros_like(STATE_OF_NUMPY)
    checkpoint.load(tmp_path / "ours", again)
    np.testing.assert_equal(again, STATE_OF_NUMPY)


def test_arrays_without_elements_and_arrays_that_are_no_tensors(tmp_path):
    torch.save({"empty": np.zeros((0, 2)), "big": np.arange(3, dtype=">f8")}, tmp_path / "a.pt")
    app = {"empty": np.zeros((0, 2))}
    checkpoint.load(tmp_path / "a.pt", app, skip="^big$")
    with checkpoint.open(tmp_path / "a.pt") as reader:
        assert reader.read("empty").shape == (0, 2)
        assert reader.read("big").tolist() == [0.0, 1.0, 2.0] and reader.read("big").dtype == ">f8"


def test_tensors_in_tuples_of_dcp(tmp_path):
    shared = torch.arange(12.0).view(3, 4)
    state = {"pair": (shared[:, 1:3], 5), "nested": [{"t": ((shared.T, "x"), [torch.tensor(2)])}], "x": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
    app = {
        "pair": (torch.zeros(3, 2), 0),
        "nested": [{"t": ((torch.zeros(4, 3), ""), [torch.tensor(0)])}],
        "x": torch.zeros(2),
    }
    checkpoint.load(tmp_path / "d", app)
    assert torch.equal(app["pair"][0], shared[:, 1:3]) and app["pair"][1] == 5
    ((first, text), (number,)) = app["nested"][0]["t"]
    assert torch.equal(first, shared.T) and text == "x" and number == 2
    assert checkpoint.verify(tmp_path / "d").ok
    (file,) = (tmp_path / "d").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(shared[1].numpy().tobytes()) + 2] ^= 1  # of the values, which stand before the tensors
    file.write_bytes(data)
    app["x"].zero_()
    with pytest.raises(CorruptionError, match=r"pair\.0' that fail|nested\.0\.t\.0\.0' that fail"):
        checkpoint.load(tmp_path / "d", app)
    assert not app["x"].any()


def test_files_of_several_ranks_without_an_index_are_complete(tmp_path):
    mapping = {"a": 1, "b": 2, "c": 3}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=mapping, save_distributed=True)
    dcp.save({name: torch.ones(3) for name in mapping}, storage_writer=writer, no_dist=True)
    assert sorted(checkpoint.open(tmp_path).keys()) == ["a", "b", "c"]
    for number in (3, 1):  # the last one, of which no other file tells but by their names
        file = tmp_path / f"shard-00001-model-{number:05d}-of-00003.safetensors"
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(CorruptionError, match=rf"model-{number:05d}-of-00003\.safetensors: found no such file"):
            checkpoint.load(tmp_path, {name: torch.zeros(3) for name in mapping})
        file.write_bytes(data)


@pytest.mark.parametrize("replaced_by", [3, 3000])
def test_a_manifest_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch, replaced_by):
    for name, count in (("a", 50), ("b", replaced_by)):
        checkpoint.save(tmp_path / name, {"values": {f"v{i}": i for i in range(count)}})
    manifest = tmp_path / "a" / "manifest.json"
    other = (tmp_path / "b" / "manifest.json").read_bytes()
    size, looks = LocalStorage.size, []

    def replaced_after_a_look(self, name):
        nbytes = size(self, name)
        if name == manifest.name:
            looks.append(nbytes)
            manifest.write_bytes(other if len(looks) == 1 else manifest.read_bytes())
        return nbytes

    monkeypatch.setattr(LocalStorage, "size", replaced_after_a_look)
    with checkpoint.open(tmp_path / "a") as reader:
        assert len(reader.keys()) == replaced_by
    monkeypatch.undo()
    manifest.write_bytes(other[:-9])
    with pytest.raises(CorruptionError, match="seal"):
        checkpoint.open(tmp_path / "a")


@pytest.mark.parametrize("kind", ["hf", "dcp", "pt"])
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_an_error(tmp_path, kind):
    path = tmp_path / ("model.pt" if kind == "pt" else "model")

    def write(value):
        state = {name: torch.full((1000,), value) for name in ("a", "b")}
        if kind == "dcp":
            dcp.save(state, checkpoint_id=path)
        elif kind == "pt":
            torch.save(state, path)
        else:
            path.mkdir(exist_ok=True)
            save_file(state, path / "new")
            (path / "new").replace(path / "model.safetensors")
        for file in (path, *path.glob("*")):
            os.utime(file, (value, value))  # clocks of file systems tick slowly

    write(1.0)
    with checkpoint.open(path) as reader:
        assert reader.read("a").unique() == 1.0
        write(2.0)
        with pytest.raises(CorruptionError, match=r"found a file that changed while it was read.*load again"):
            reader.read("b")


@pytest.mark.parametrize("kind", ["hf", "pt"])
def test_files_without_checksums_that_have_other_bytes_have_another_digest(tmp_path, monkeypatch, kind):
    reads, read = [], LocalStorage.read
    monkeypatch.setattr(LocalStorage, "read", lambda *args: reads.append(args) or read(*args))

    def digest_of(*values):
        state = {f"w{i}": torch.full((100, 1000), value) for i, value in enumerate(values)}
        if kind == "hf":
            save_file(state, tmp_path / "model.safetensors")
        else:
            torch.save(state, tmp_path / "model.pt")
        with checkpoint.open(tmp_path) as reader:
            return reader.digest

    with_sums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        first = digest_of(1.0, 2.0, 3.0)
        assert len(reads) <= 4  # and the file is opened once for all places in it
        assert first == digest_of(1.0, 2.0, 3.0)
        assert (
            len({first, *(digest_of(*values) for values in ((0.0, 2.0, 3.0), (1.0, 0.0, 3.0), (1.0, 2.0, 0.0)))}) == 4
        )
    finally:
        torch.serialization.set_crc32_options(with_sums)


def test_rates_that_differ_behind_the_fourth_digit_stay_those_of_their_parameters(tmp_path):
    rates = {"weight": torch.tensor(0.00123451), "bias": torch.tensor(0.00123449)}
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [getattr(model, name)], "lr": rate} for name, rate in rates.items()]
    save_flattened(tmp_path / "flat", model, stepped(model, groups))
    named = [{"params": [(name, getattr(model, name))], "lr": 0.5} for name in rates]
    optimizer = shardopt.keyed("adamw", named)
    app = {"model": model, "optim": optimizer}
    checkpoint.load(tmp_path / "flat", app, init_state=True, select=r"^(model|optim)\.")
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([*map(float, rates.values())], rel=1e-7)


def stepped(model, groups):
    optimizer = torch.optim.AdamW(groups, foreach=False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer
