"""One memory under several keys is stored once, and comes back under each of them."""

import itertools
import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.run.mirror import MirrorCopier
from shardopt.cli import main
from shardopt.errors import MismatchError
from shardopt.sharding.layout import Layout


class Model(nn.Module):
    """An embedding and an output layer whose weights are one, or not."""

    def __init__(self, number, tied=True, rows=300):
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():
            nn.init.constant_(parameter, number)
        self.embed.weight.data[0, 0] = -number


EMBED, HEAD = "m.embed.weight", "m.head.weight"


@pytest.fixture
def saved(tmp_path):
    report = checkpoint.save(tmp_path / "c", {"m": Model(7.0), "step": 1})
    assert report.tensors == 2
    return tmp_path / "c"


def is_stored_once(path):
    (file,) = path.glob("*.safetensors")
    body = json.loads((path / "manifest.json").read_bytes())
    nested = ["m", "head.weight"]
    assert (body["min_reader_version"], body["tied"], [*body["tensors"]]) == (2, {HEAD: [EMBED, nested]}, [EMBED])
    assert checkpoint.verify(path).ok
    with safe_open(file, "pt") as opened:
        assert {key for key in opened.keys() if not key.startswith("__")} == {EMBED}  # noqa: SIM118  # no dict
        assert torch.equal(opened.get_tensor(EMBED), Model(7.0).embed.weight)
    return True


def test_tied_weights_are_stored_once(saved):
    assert is_stored_once(saved)


def test_a_checkpoint_without_ties_is_for_readers_of_version_1_too(tmp_path):
    checkpoint.save(tmp_path / "c", {"m": Model(7.0, tied=False)})
    body = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    assert (body["version"], body["min_reader_version"]) == (5, 1)
    assert "tied" not in body


def test_both_keys_are_read(saved):
    weight = Model(7.0).embed.weight
    with checkpoint.open(saved) as reader:
        assert reader.keys() == [EMBED, HEAD, "step"]
        for key, tied_to in ((EMBED, None), (HEAD, EMBED)):
            info = reader.info(key)
            assert (info.shape, info.dtype, info.tied_to) == ((300, 4), torch.float32, tied_to)
            assert torch.equal(reader.read(key), weight)
            assert torch.equal(reader.read(key, checkpoint.Box((0, 1), (2, 2))), weight[:2, 1:3])


def is_loaded(model):
    wanted = Model(7.0).embed.weight
    return torch.equal(model.embed.weight, wanted) and torch.equal(model.head.weight, wanted)


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("rows", [300, 100_000])
def test_loaded_into_models_that_are_tied_and_that_are_not(tmp_path, rows, transactional):
    for number, app in enumerate([Model(7.0, rows=rows), Model(7.0, tied=False, rows=rows)]):
        app.head.weight.data[0, 0] = -7
        checkpoint.save(tmp_path / str(number), {"m": app})
        for tied in (True, False):
            model = Model(0.0, tied, rows=rows)
            report = checkpoint.load(tmp_path / str(number), {"m": model}, transactional=transactional)
            assert report.loaded == (EMBED, HEAD)
            assert torch.equal(model.embed.weight, app.embed.weight)
            assert torch.equal(model.head.weight, app.embed.weight)
            assert (model.head.weight is model.embed.weight) == tied


def test_one_of_the_keys_alone(saved):
    for key in (EMBED, HEAD):
        model = Model(0.0, tied=False)
        report = checkpoint.load(saved, {"m": model, "step": 0}, select=f"^{key}$")
        assert report.loaded == (key,)
        other = model.head if key == EMBED else model.embed
        assert not other.weight[1:].any()
    renamed = {"x": torch.zeros(300, 4), "y": torch.zeros(300, 4), "step": 0}
    checkpoint.load(saved, renamed, rename={f"^{EMBED}$": "x", f"^{HEAD}$": "y"})
    assert torch.equal(renamed["x"], renamed["y"]) and renamed["y"][1, 1] == 7
    with pytest.raises(MismatchError, match=HEAD):
        checkpoint.load(saved, {"m": {"embed": {"weight": torch.zeros(300, 4)}}, "step": 0})


def test_an_untied_checkpoint_does_not_load_into_a_tied_app(tmp_path):
    model = Model(7.0, tied=False)
    model.head.weight.data[3] = 1
    checkpoint.save(tmp_path / "c", {"m": model})
    with pytest.raises(MismatchError, match=f"other values than {EMBED}"):
        checkpoint.load(tmp_path / "c", {"m": Model(0.0)})


def test_resharded_with_its_ties(saved, tmp_path):
    report = checkpoint.reshard(saved, tmp_path / "one", world_size=1)
    assert report.tensors == 2
    assert is_stored_once(tmp_path / "one")
    seen = []

    def halves(key, stored):
        seen.append(key)
        boxes = {checkpoint.Box((i, 0), (j - i, 4)): (0, 1) for i, j in itertools.pairwise([0, 170, 300])}
        return Layout.from_holders((300, 4), boxes)

    checkpoint.reshard(tmp_path / "one", tmp_path / "two", layout=halves)
    assert seen == [EMBED]
    for path in (tmp_path / "one", tmp_path / "two"):
        model = Model(0.0, tied=False)
        checkpoint.load(path, {"m": model, "step": 0})
        assert is_loaded(model)


def test_mirrored(saved, tmp_path):
    with MirrorCopier(tmp_path, tmp_path / "copies") as mirror:
        mirror.upload("c")
    assert is_stored_once(tmp_path / "copies" / "c")


def test_shown(saved, capsys):
    assert main(["show", str(saved), "--flat"]) == 0
    assert f"{HEAD}  float32 [300, 4]  tied to {EMBED}\n" in capsys.readouterr().out
    assert main(["verify", str(saved)]) == 0
    assert "2 tensors, 1 file" in capsys.readouterr().out


def test_damage_is_told_once(saved):
    (file,) = saved.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[4096 + 5] ^= 1
    file.write_bytes(data)
    (problem,) = checkpoint.verify(saved).problems
    assert EMBED in problem.found


def test_over_a_network():
    """Spans of one file that ask for the same bytes twice."""
    url = "memory://shardopt-tests/tied"
    checkpoint.save(url, {"m": Model(7.0), "step": 1})
    for share_reads in ("never", "always"):
        model = Model(0.0, tied=False)
        checkpoint.load(url, {"m": model, "step": 0}, share_reads=share_reads)
        assert is_loaded(model)


@pytest.mark.parametrize("stage", ["now", "lazy"])
def test_saved_beside_training(tmp_path, stage):
    model = Model(7.0)
    model.register_buffer("copy", model.embed.weight.data)  # what may change at any time ties what only a step changes
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1)
    app = {"m": model, "optimizer": optimizer}
    pending = checkpoint.async_save(tmp_path / "c", app, stage=stage)
    pending.result()
    with checkpoint.open(tmp_path / "c") as reader:
        keys = ("m.copy", EMBED, HEAD)
        assert [reader.info(key).tied_to for key in keys] == [None, "m.copy", "m.copy"]  # in the order of state_dict
        assert all(torch.equal(reader.read(key), Model(7.0).embed.weight) for key in keys)
    assert checkpoint.verify(tmp_path / "c").ok


def test_what_is_one_memory_and_not_one_tensor_is_stored_apart(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    app = {
        "whole": whole,
        "again": whole[:],
        "detached": whole.detach(),
        "turned": whole.t(),
        "head": whole[:2],
        "flat": whole.view(24),
        "integers": whole.view(torch.int32),
        "parameter": nn.Parameter(whole, requires_grad=False),
        "empty": whole[:0],
        "also empty": whole[:0],
    }
    checkpoint.save(tmp_path / "c", app)
    with checkpoint.open(tmp_path / "c") as reader:
        tied = {key: reader.info(key).tied_to for key in app if reader.info(key).tied_to}
        assert tied == dict.fromkeys(("again", "detached", "parameter"), "whole")
        for key, tensor in app.items():
            assert torch.equal(reader.read(key), tensor), key


def test_the_plan_of_a_tied_app_is_not_used_for_an_untied_one(tmp_path):
    tied, untied = Model(7.0), Model(7.0, tied=False)
    for number, model in enumerate([tied, untied, tied, untied]):
        checkpoint.save(tmp_path / str(number), {"m": model})
        with checkpoint.open(tmp_path / str(number)) as reader:
            assert (reader.info(HEAD).tied_to == EMBED) == (model is tied)
            assert torch.equal(reader.read(HEAD), model.head.weight)


def test_the_first_key_may_be_empty(tmp_path):
    value = torch.arange(3.0)
    checkpoint.save(tmp_path / "c", {"": value, "x": value})
    with checkpoint.open(tmp_path / "c") as reader:
        assert reader.info("x").tied_to == ""
        assert torch.equal(reader.read("x"), value)
    app = {"": torch.zeros(3), "x": torch.zeros(3)}
    checkpoint.load(tmp_path / "c", app)
    assert torch.equal(app["x"], value)
