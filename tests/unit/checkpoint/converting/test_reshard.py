"""Offline resharding: the same values, in the files that another number of ranks would have written."""

import tracemalloc

import pytest
import torch

from shardopt import checkpoint
from shardopt.errors import CheckpointExistsError, MismatchError
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from tests.harness import run_ranks
from tests.support.sharded_state import SHAPES, global_value, make_state


def save_state(path):
    checkpoint.save(path, {"state": make_state("first", filled=True), "step": 7})


def load_state(path):
    app = {"state": make_state("first", filled=False), "step": 0}
    report = checkpoint.load(path, app)
    return app["step"], report.bytes_read


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("reshard") / "two"
    run_ranks(2, save_state, str(path))
    return path


def assert_same(path):
    assert checkpoint.verify(path).ok
    with checkpoint.open(path) as reader:
        assert reader.read("step") == 7
        for name, (shape, dtype) in SHAPES.items():
            assert reader.info(f"state.{name}").shape == shape
            assert reader.info(f"state.{name}").dtype == dtype
            assert torch.equal(reader.read(f"state.{name}"), global_value(name)), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_same_values_from_other_ranks(saved_by_two, tmp_path, world_size):
    seen = []
    path = tmp_path / "other"
    report = checkpoint.reshard(saved_by_two, path, world_size=world_size, progress=lambda *done: seen.append(done))
    assert report.tensors == len(SHAPES)
    assert seen[-1][0] == seen[-1][1]
    assert_same(path)
    with checkpoint.open(path) as reader:
        assert len(reader.info("state.rows").boxes) == world_size  # eight rows
        assert reader.manifest.world_size == world_size


def test_what_ranks_of_that_number_would_have_written(saved_by_two, tmp_path):
    """Whoever loads on as many ranks reads each box as it is stored."""
    checkpoint.reshard(saved_by_two, tmp_path / "three", world_size=3)
    run_ranks(3, save_state, str(tmp_path / "by-three"))
    with checkpoint.open(tmp_path / "three") as ours, checkpoint.open(tmp_path / "by-three") as by_three:
        for name in set(SHAPES) - {"table"}:  # its uneven boxes follow no rule
            assert ours.info(f"state.{name}") == by_three.info(f"state.{name}"), name
    assert [step for step, _ in run_ranks(3, load_state, str(tmp_path / "three"))] == [7, 7, 7]


def test_a_chosen_layout(saved_by_two, tmp_path):
    mesh = Mesh((2, 2), (0, 1, 2, 3))

    def layout(key, stored):
        splits = (Split(0, 0), Split(1, 1)) if len(stored.shape) == 2 else ()
        return mesh_layout(stored.shape, mesh, splits)

    checkpoint.reshard(saved_by_two, tmp_path / "tiles", layout=layout)
    assert_same(tmp_path / "tiles")
    with checkpoint.open(tmp_path / "tiles") as reader:
        assert len(reader.info("state.columns").boxes) == 4


def test_memory_is_bounded(tmp_path):
    big = torch.arange(12 << 20, dtype=torch.float32).reshape(3, -1)  # 48 MiB in rows of 16
    checkpoint.save(tmp_path / "one", {"big": big})
    tracemalloc.start()
    checkpoint.reshard(tmp_path / "one", tmp_path / "four", world_size=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20  # tensors' own memory is not traced, and is pieces of 8 MiB
    with checkpoint.open(tmp_path / "four") as reader:
        assert torch.equal(reader.read("big"), big)


def test_values_per_rank_need_a_choice(tmp_path):
    checkpoint.save(tmp_path / "one", {"x": torch.ones(3), "mine": checkpoint.PerRank(5)})
    with pytest.raises(MismatchError, match="drop_per_rank"):
        checkpoint.reshard(tmp_path / "one", tmp_path / "two", world_size=2)
    assert not (tmp_path / "two").exists()
    checkpoint.reshard(tmp_path / "one", tmp_path / "two", world_size=2, drop_per_rank=True)
    checkpoint.reshard(tmp_path / "one", tmp_path / "same", world_size=1)
    app = {"x": torch.zeros(3), "mine": checkpoint.PerRank(0)}
    checkpoint.load(tmp_path / "same", app)
    assert app["mine"].value == 5


def test_the_target_must_be_free(tmp_path):
    checkpoint.save(tmp_path / "one", {"x": torch.ones(3)})
    with pytest.raises(CheckpointExistsError):
        checkpoint.reshard(tmp_path / "one", tmp_path / "one", world_size=2)
    with pytest.raises(ValueError, match="world_size and layout"):
        checkpoint.reshard(tmp_path / "one", tmp_path / "two")
