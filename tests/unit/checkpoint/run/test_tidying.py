"""What retention costs: requests for a commit, files removed several at a time, and training that does not wait."""

import threading
import time
import uuid
from collections import Counter

import pytest
import torch

from benchmarks.many_files import write_checkpoint
from shardopt import checkpoint
from shardopt.checkpoint.run import keeper
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.storage.remote import RemoteStorage


@pytest.fixture
def root():
    return f"memory://shardopt-tests/{uuid.uuid4().hex}"


@pytest.fixture
def calls(monkeypatch):
    """The calls to remote storage, by method and last part of the URL."""
    counted = Counter()

    def count(name):
        inner = getattr(RemoteStorage, name)

        def method(self, *args):
            counted[name, args[0] if args else ""] += 1
            return inner(self, *args)

        monkeypatch.setattr(RemoteStorage, name, method)

    for name in ("size", "read", "read_rest", "names", "remove"):
        count(name)
    return counted


@pytest.mark.parametrize("kept", [4, 12])
def test_a_commit_asks_for_one_manifest_however_many_are_kept(root, calls, kept):
    with checkpoint.Manager(root, keep=kept) as manager:
        for step in range(kept + 3):
            calls.clear()
            manager.save(step, {"x": torch.ones(3)})
        requests = Counter(calls)
        assert manager.steps() == [*range(3, kept + 3)]
    # By the save, before it writes and as it commits; and by retention for the new one alone.
    assert requests["size", "manifest.json"] <= 3
    # As one is removed the others are looked at twice, by one request each; of the new one the end is read by itself.
    assert requests["read_rest", "manifest.json"] <= 2 * kept
    assert requests["read", "manifest.json"] <= 4


def test_a_checkpoint_whose_directory_goes_counts_no_more(root):
    with checkpoint.Manager(root, keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"x": torch.ones(3)})
        remove_checkpoint(storage_of(manager.path(3)))
        manager.save(4, {"x": torch.ones(3)})
        assert manager.steps() == [2, 4]


@pytest.mark.parametrize("where", ["local", "remote"])
def test_the_files_of_many_ranks_are_removed_by_several_threads(root, tmp_path, monkeypatch, where):
    url = root if where == "remote" else str(tmp_path)
    write_checkpoint(f"{url}/c", 40, 1)
    storage, threads = storage_of(f"{url}/c"), set()
    kind = type(storage)

    def remove(self, name, inner=kind.remove):
        threads.add(threading.current_thread().name)
        time.sleep(0.002)
        inner(self, name)

    monkeypatch.setattr(kind, "remove", remove)
    remove_checkpoint(storage)
    assert storage.names() == [] and len(threads) > 2


@pytest.fixture
def without_threads(monkeypatch):
    """A list of names: no thread with one of them can begin, as at the limit of a container."""
    names, start = [], threading.Thread.start

    def limited(thread):
        if thread.name.startswith(tuple(names)):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return names


def test_files_are_removed_also_where_no_thread_is_to_be_had(tmp_path, without_threads):
    write_checkpoint(f"{tmp_path}/c", 40, 1)
    without_threads.append("shardopt-remove")
    remove_checkpoint(storage_of(f"{tmp_path}/c"))
    assert not (tmp_path / "c").exists()


def test_a_save_raises_nothing_where_what_follows_it_gets_no_thread(root, without_threads, tmp_path, caplog):
    """It used to raise after the commit, on rank 0 alone."""
    manager = checkpoint.Manager(root, keep=1, export=checkpoint.Export(tmp_path))
    without_threads += ["shardopt-tidy", "shardopt-export"]
    for step in (1, 2):
        manager.save(step, {"x": torch.ones(3)})
    assert manager.steps() == [1, 2]
    assert "removing from" in caplog.text and "exporting" in caplog.text
    with pytest.raises(RuntimeError, match="start new thread"):
        manager.close()
    without_threads.clear()
    with checkpoint.Manager(root, keep=1) as manager:
        manager.restore({"x": torch.ones(3)})
        manager.save(3, {"x": torch.ones(3)})
    assert manager.steps() == [2, 3]


def test_training_does_not_wait_for_what_is_removed(root, monkeypatch):
    monkeypatch.setattr(keeper, "_WAIT_SECONDS", 0.05)
    held, reached = threading.Event(), threading.Event()
    inner = RemoteStorage.remove_if_empty

    def remove_if_empty(self):
        if not held.is_set():
            reached.set()
            held.wait(30)
        inner(self)

    monkeypatch.setattr(RemoteStorage, "remove_if_empty", remove_if_empty)
    manager = checkpoint.Manager(root, keep=1)
    for step in (1, 2, 3):  # the removal of step 1 runs while step 3 is saved
        manager.save(step, {"x": torch.ones(3)})
    assert reached.wait(30) and not held.is_set()
    assert manager.steps() == [2, 3]
    held.set()
    manager.close()
    assert manager.steps() == [2, 3]  # one at a time: what was unwanted meanwhile goes with the next
    with checkpoint.Manager(root, keep=1) as manager:
        manager.restore({"x": torch.ones(3)})
        manager.save(4, {"x": torch.ones(3)})
    assert manager.steps() == [3, 4]


def test_a_place_below_the_newest_is_not_saved_to_while_removal_runs(root, monkeypatch):
    monkeypatch.setattr(keeper, "_WAIT_SECONDS", 0.05)
    inner, order = RemoteStorage.remove_if_empty, []

    def remove_if_empty(self):
        time.sleep(0.5)
        order.append("removed")
        inner(self)

    monkeypatch.setattr(RemoteStorage, "remove_if_empty", remove_if_empty)
    with checkpoint.Manager(root, keep=1) as manager:
        manager.save(1, {"x": torch.ones(3)})
        manager.save(5, {"x": torch.ones(3)})
        manager.save(3, {"x": torch.ones(3)})
        order.append("saved")
    assert order[:2] == ["removed", "saved"]
