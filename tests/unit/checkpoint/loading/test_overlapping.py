"""Tensors of an app that share a part of their memory: what is stored of both has to be equal there."""

import time

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.checkpoint.loading.tied import refuse_overlapping
from shardopt.errors import MismatchError
from shardopt.sharding.view import view_of


def rows(memory):
    return {"one": memory[:4], "other": memory[2:]}


def reshaped(memory):
    return {"one": memory, "other": memory.view(-1)[5:23]}


def transposed(memory):
    return {"one": memory.t()[1:3], "other": memory[:2]}


def other_dtype(memory):
    return {"one": memory[:3], "other": memory.view(torch.int16)[2:]}


SHARING = [rows, reshaped, transposed, other_dtype]


def stored(path, views, distinct):
    memory = torch.arange(24.0).reshape(6, 4)
    app = {key: each.clone() for key, each in views(memory).items()}
    if distinct:
        app["other"].view(-1)[1] += 1
    checkpoint.save(path, app)
    return app


@pytest.mark.parametrize("views", SHARING)
def test_unequal_values_for_shared_memory_are_refused(tmp_path, views):
    saved = stored(tmp_path / "c", views, distinct=True)
    memory = torch.zeros(6, 4)
    with pytest.raises(MismatchError, match=r"o\w+: found other values than o\w+ in the checkpoint, where they share"):
        checkpoint.load(tmp_path / "c", views(memory))
    assert not memory.any()
    checkpoint.load(tmp_path / "c", views(memory), select="other")  # as the error advises
    assert torch.equal(views(memory)["other"], saved["other"])
    app = views(memory)
    app["other"] = app["other"].clone()
    checkpoint.load(tmp_path / "c", app)
    assert all(torch.equal(app[key], saved[key]) for key in saved)


@pytest.mark.parametrize("views", SHARING)
def test_equal_values_are_loaded(tmp_path, views):
    saved = stored(tmp_path / "c", views, distinct=False)
    app = views(torch.zeros(6, 4))
    checkpoint.load(tmp_path / "c", app)
    assert all(torch.equal(app[key], saved[key]) for key in saved)


def test_values_are_compared_as_they_are_cast(tmp_path):
    checkpoint.save(tmp_path / "c", {"one": torch.full((4,), 1.0), "other": torch.full((4,), 1.0 + 2.0**-20)})
    memory = torch.zeros(6, dtype=torch.bfloat16)
    app = {"one": memory[:4], "other": memory[2:]}
    checkpoint.load(tmp_path / "c", app, strict=Strictness(dtype="cast"))
    assert memory.eq(1).all()


def test_columns_of_one_matrix_share_nothing(tmp_path, monkeypatch):
    app = {name: each for name, each in zip("qkv", torch.randn(5, 9).chunk(3, dim=1), strict=True)}
    checkpoint.save(tmp_path / "c", {name: each + 1 for name, each in app.items()})
    wanted = {name: each + 1 for name, each in app.items()}
    monkeypatch.setattr("shardopt.checkpoint.loading.tied._are_equal", None)  # nothing is read twice
    checkpoint.load(tmp_path / "c", app)
    assert all(torch.equal(app[name], wanted[name]) for name in wanted)


def test_looking_for_shared_memory_takes_microseconds_a_tensor():
    views = {str(i): view_of(torch.zeros(8), "a tensor") for i in range(3000)}
    begin = time.process_time()
    refuse_overlapping(None, views, {})
    assert time.process_time() - begin < 3000 * 100e-6
