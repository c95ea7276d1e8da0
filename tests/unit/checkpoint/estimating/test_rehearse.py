"""`compare` says what `load` would say, before the load, without the tensors of either side."""

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.checkpoint.rearrange import Rule
from shardopt.errors import CheckpointNotFoundError, MismatchError


def app_of(device="cpu", width=8, make=shardopt.keyed):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
    return {"model": model, "optimizer": make("adamw", model.named_parameters(), lr=0.1), "step": 0}


def torchs(_, parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr)


def stepped(app):
    app["model"](torch.ones(2, 4)).sum().backward()
    app["optimizer"].step()
    return app


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / "saved", stepped(app_of()))
    return tmp_path / "saved"


@pytest.mark.parametrize("make", [shardopt.keyed, torchs])
def test_an_app_on_the_meta_device_is_compared(saved, tmp_path, make):
    checkpoint.save(tmp_path / "of this", stepped(app_of(make=make)))
    report = checkpoint.compare(tmp_path / "of this", app_of("meta", make=make), init_state=True)
    loaded = checkpoint.load(tmp_path / "of this", app_of(make=make), init_state=True)
    assert report.fits and report.problems == () and {*report.loaded} == {*loaded.loaded}
    assert report.bytes_wanted == loaded.bytes_wanted and "fits" in str(report)


def test_no_data_file_is_read(saved):
    for file in saved.glob("*.safetensors"):
        file.unlink()
    assert checkpoint.compare(saved, app_of("meta"), init_state=True).fits


STORED = {"same": torch.ones(2), "shape": torch.ones(2, 3), "dtype": torch.ones(2), "old": torch.ones(3), "value": 3}
APP = {"same": (2,), "shape": (3, 2), "dtype": (2,), "new": (3,)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strict": False},
        {"strict": Strictness(dtype="cast", unexpected="warn")},
        {"select": "same|dtype"},
        {"rename": {"^old$": "new"}},
        {"rename": {"^old$": "same"}},
        {"skip": "old|value"},
        {"rearrange": [Rule("shape", "shape", "a b -> b a")]},
        {"select": "^none$"},
    ],
    ids=str,
)
def test_its_problems_are_those_of_the_load(tmp_path, options):
    checkpoint.save(tmp_path / "c", STORED)
    app = {key: torch.zeros(shape, dtype=torch.float64 if key == "dtype" else None) for key, shape in APP.items()}
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", app, **options)
    for device in ("cpu", "meta"):
        report = checkpoint.compare(tmp_path / "c", {key: each.to(device) for key, each in app.items()}, **options)
        assert report.problems == tuple(caught.value.problems)
        assert (report.error.message, report.error.code) == (caught.value.message, caught.value.code)
        assert not report.fits and "does not fit" in str(report)


def test_elements_that_share_memory_are_refused_as_by_the_load(tmp_path):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(3)})
    app = {"w": torch.zeros(1).expand(3)}
    with pytest.raises(MismatchError, match="share memory") as caught:
        checkpoint.load(tmp_path / "c", app)
    assert checkpoint.compare(tmp_path / "c", app).problems == tuple(caught.value.problems)


def test_it_tells_the_kinds_of_differences_apart(tmp_path):
    checkpoint.save(tmp_path / "c", STORED)
    app = {key: torch.zeros(shape, dtype=torch.float64 if key == "dtype" else None) for key, shape in APP.items()}
    report = checkpoint.compare(tmp_path / "c", app)
    assert (report.missing, report.unexpected) == (("new",), ("old", "value"))
    assert report.differing == ("shape", "dtype") and report.loaded == ("same",)


def test_nothing_is_changed(saved):
    app = app_of()
    before = str((app["model"].state_dict(), app["optimizer"].state_dict()))
    assert checkpoint.compare(saved, app, init_state=True).fits
    assert not checkpoint.compare(saved, app_of(width=9), init_state=True).fits
    assert str((app["model"].state_dict(), app["optimizer"].state_dict())) == before and app["step"] == 0


def test_tied_parameters_on_the_meta_device_need_one_stored_tensor(tmp_path):
    checkpoint.save(tmp_path / "c", {"model": {"0.weight": torch.ones(4, 4)}})
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert checkpoint.compare(tmp_path / "c", {"model": model}).missing == ("model.1.weight",)
    model[1].weight = model[0].weight
    report = checkpoint.compare(tmp_path / "c", {"model": model})
    assert report.fits and report.bytes_wanted == 64


def test_a_path_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.compare(tmp_path / "none", app_of())
