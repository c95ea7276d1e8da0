"""A refused load says which version wrote the checkpoint, if it was another one than reads it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.saving import commit
from shardopt.errors import CheckpointError, CorruptionError, MismatchError
from shardopt.version import WRITER
from tests.harness import run_ranks

TOLD = f"(written by shardopt 9.8.7; this is {WRITER})"


class Refusing:
    def state_dict(self):
        return {"w": torch.ones(3)}

    def load_state_dict(self, state):
        raise KeyError("a name of an older version")


def app_of(size=100_000):
    return {"w": torch.zeros(size), "of": {"step": 1}}


@pytest.fixture(params=["shardopt 9.8.7", WRITER, None])
def written(request, monkeypatch, tmp_path):
    """A checkpoint, and what errors of its loads are to say of its writer."""
    monkeypatch.setattr(commit, "WRITER", request.param)
    checkpoint.save(tmp_path / "it", app_of() | {"object": Refusing()})
    return tmp_path / "it", [TOLD] if request.param == "shardopt 9.8.7" else []


def damage(path, at):
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def told_in(error):
    first = str(error).split("\n")[0]
    return [TOLD] if TOLD in first else [first] if "written by" in first else []


def test_where_a_shape_does_not_fit(written):
    path, told = written
    app = app_of(5) | {"object": Refusing()}
    with pytest.raises(MismatchError, match="nothing was changed") as caught:
        checkpoint.load(path, app)
    assert told_in(caught.value) == told
    report = checkpoint.compare(path, app)
    assert told_in(report.error) == told and str(report.error) == str(caught.value)


@pytest.mark.parametrize("at", [60, 200_000], ids=["in the header of a file", "in the bytes of a tensor"])
def test_where_it_is_damaged(written, at):
    path, told = written
    damage(path, at)
    with pytest.raises(CorruptionError) as caught:
        checkpoint.load(path, app_of(), strict=False)
    assert told_in(caught.value) == told


def test_where_an_object_refuses_its_state(written):
    path, told = written
    with pytest.raises(CheckpointError, match="an object refused") as caught:
        checkpoint.load(path, app_of() | {"object": Refusing()})
    assert told_in(caught.value) == told


def test_the_line_is_short_whatever_a_manifest_names(monkeypatch, tmp_path):
    monkeypatch.setattr(commit, "WRITER", "x" * 1000)
    checkpoint.save(tmp_path / "it", app_of())
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "it", app_of(5))
    assert f"(written by {'x' * 80}; this is {WRITER})" in str(caught.value)


def refused_on_rank_1(path):
    """Returns what this rank raises where only rank 1 has a tensor more, and where only its file is damaged."""
    commit.WRITER = "shardopt 9.8.7"
    app = {"w": distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
    checkpoint.save(path, app)
    texts = []
    for more in ({"more": torch.zeros(2)} if dist.get_rank() else {}, {}):
        with pytest.raises((CheckpointError, MismatchError)) as caught:
            checkpoint.load(path, app | more)
        texts.append(str(caught.value))
        if not texts[1:] and dist.get_rank():
            (file,) = path.glob("*-r00001.safetensors")
            file.write_bytes(file.read_bytes()[:-1])
        dist.barrier()
    return texts


def test_all_ranks_say_the_same(tmp_path):
    (mismatch, damage), others = run_ranks(2, refused_on_rank_1, tmp_path / "it")
    assert [mismatch, damage] == others
    assert "on rank 1: " in mismatch and told_in(mismatch) == [TOLD]
    assert "on rank 1: " in damage and told_in(damage) == [TOLD] and damage.count("written by") == 1
