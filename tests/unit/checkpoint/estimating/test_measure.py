"""A measurement of storage ends in time and leaves nothing; what a killed one leaves goes with a later commit."""

import errno

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.estimating import measure as measuring
from shardopt.checkpoint.storage.local import LocalStorage
from shardopt.errors import NoSpaceError, ShardoptError
from shardopt.world import world


@pytest.fixture
def app():
    return {"large": torch.ones(5 << 20), **{f"small.{i}": torch.ones(16) for i in range(100)}}


def test_seconds_are_measured_and_nothing_is_left(app, tmp_path):
    (tmp_path / "root" / "step-00000007").mkdir(parents=True)
    estimate = checkpoint.estimate(app, tmp_path / "root", measure_seconds=60)
    assert estimate.save_seconds > 0 and estimate.load_seconds > 0 and estimate.measured_bytes == 4 * ((5 << 20) + 1600)
    assert [path.name for path in tmp_path.rglob("*")] == ["root", "step-00000007"]


def test_other_storage_is_measured(app):
    root = f"memory://estimated/{world().random_name(6)}"
    estimate = checkpoint.estimate(app, root, measure_seconds=60)
    assert estimate.save_seconds > 0 and estimate.load_seconds > 0
    manager = checkpoint.Manager(root)
    assert manager.steps() == [] and manager._run.root.storage.names() == []


def test_a_sample_has_small_and_large_tensors_in_proportion(app, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "_LEAST_BYTES", 1 << 20)
    seen = []
    of = measuring.Sample.of
    monkeypatch.setattr(measuring.Sample, "of", lambda sizes, *args: seen.append(sizes) or of(sizes, *args))
    checkpoint.estimate(app, tmp_path, measure_seconds=60)
    assert len(seen[0]) == 1 and {len(sizes) for sizes in seen[1:]} == {1 + 5}  # a twentieth
    large = max(numel for _, numel in seen[-1])
    assert abs(4 * large - (1 << 20)) < 1 << 10


def test_samples_are_extended_to_all_bytes_but_for_what_every_file_costs():
    timed = [measuring._Timed(0.0, 1.0, 0.5), *(measuring._Timed(0.25, 1 + 2 * each, 0.5 + each) for each in (3, 1, 2))]
    found = measuring._from_samples(timed, 400, 0.1)
    assert found == (100, 1 + 4 / 0.25, 0.5 + 2 / 0.25, 0.1)
    timed.append(measuring._Timed(0.3, 7.0, None))  # given up: the complete ones say more
    assert measuring._from_samples(timed, 400, 0.1) == found


@pytest.mark.parametrize(("fraction", "seconds"), [(0.01, None), (0.5, 14.0)])
def test_a_write_that_was_given_up_counts_if_much_of_it_was_written(fraction, seconds):
    timed = [measuring._Timed(0.0, 1.0, 0.5), measuring._Timed(fraction, 7.0, None)]
    found = measuring._from_samples(timed, 1 << 20, 0.1)
    assert (found.write, found.read) == (seconds, None)


def test_a_write_is_given_up_when_the_time_is_over(app, monkeypatch, tmp_path):
    write = LocalStorage.write

    def slow(self, name, buffers):
        return write(self, name, (world().sleep(0.2) or buffer for buffer in buffers))

    monkeypatch.setattr(LocalStorage, "write", slow)
    monkeypatch.setattr(LocalStorage, "buffer_bytes", 4 << 20)
    begin = world().monotonic()
    estimate = checkpoint.estimate({"large": app["large"]}, tmp_path, measure_seconds=1.3)
    assert world().monotonic() - begin < 3
    assert 1 < estimate.save_seconds < 3 and estimate.load_seconds is None and [*tmp_path.iterdir()] == []


def test_a_disk_without_space_is_an_error_and_nothing_is_left(app, monkeypatch, tmp_path):
    write = LocalStorage.write

    def full(self, name, buffers):
        write(self, name, [memoryview(b"some")])
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(LocalStorage, "write", full)
    with pytest.raises(NoSpaceError):
        checkpoint.estimate(app, tmp_path, measure_seconds=1)
    assert [*tmp_path.iterdir()] == []


def test_a_root_that_cannot_be_made_is_an_error(app, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardoptError):
        checkpoint.estimate(app, tmp_path / "file" / "root", measure_seconds=1)


def test_what_a_killed_measurement_leaves_goes_with_a_later_commit(app, monkeypatch, tmp_path):
    with checkpoint.Manager(tmp_path, keep=None) as manager:
        manager.save(3, {"step": 3})
        monkeypatch.setattr(measuring._Probe, "clear", lambda self: None)
        monkeypatch.setattr(LocalStorage, "remove", lambda self, name: None)
        checkpoint.estimate(app, tmp_path, measure_seconds=0.2)
        monkeypatch.undo()
        assert len([*(tmp_path / "step-00000004").iterdir()]) >= 3
        assert manager.steps() == [3]
        manager.save(6, {"step": 6})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000006"]


def test_no_random_number_of_the_program_is_drawn(tmp_path):
    before = torch.get_rng_state()
    checkpoint.estimate({"w": torch.zeros(1000)}, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
