"""Another world in the place of the real one: its clock, names, threads, store and storage are those that count."""

import itertools
import os
import random
import socket
import sys
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from shardopt import checkpoint
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.storage import LocalStorage, marker
from shardopt.checkpoint.storage.retry import Requests, RetryPolicy
from shardopt.errors import CheckpointError, RankError
from shardopt.ranks import Ranks
from shardopt.runtime.sockets import bind
from shardopt.world import World, using, world
from tests.harness.planned_fs import PlannedFileSystem
from tests.support.worlds import FakeClock


@pytest.fixture
def clock():
    begin = time.monotonic()
    with using(FakeClock()) as other:
        yield other
    assert time.monotonic() - begin < 60  # far below what has passed on the other clock


def test_the_world_before_comes_back():
    real = world()
    with pytest.raises(ZeroDivisionError), using(World()) as one, using(World()) as other:
        assert world() is other is not one
        raise ZeroDivisionError
    assert world() is real


def test_retries_pause_by_it(clock):
    policy = RetryPolicy(attempts=4, pause_seconds=600.0, longest_pause_seconds=1000.0)
    with pytest.raises(CheckpointError, match=r"4 attempts within 2600\.0 s"):
        Requests(PlannedFileSystem(TimeoutError(), times=99), policy).call("x", "info", "/a")
    assert clock.pauses == [600.0, 1000.0, 1000.0]


class Waiting(FakeClock):
    """Time passes where somebody waits for others too."""

    def condition(self):
        clock = self

        class Condition(threading.Condition):
            def wait(self, timeout=None):
                if super().wait(0.001) or timeout is None:
                    return True
                clock.now += timeout
                return False

        return Condition()


def test_a_rank_that_never_comes_is_given_up_by_it(monkeypatch):
    class Group:
        def rank(self):
            return 0

        def size(self):
            return 2

        def get_group_store(self):
            return HashStore()

    monkeypatch.setattr("shardopt.ranks.ranks._members", lambda group: (0, 1))
    monkeypatch.setattr("shardopt.ranks.ranks.accelerator_of", lambda group: None)
    with using(Waiting()) as clock, pytest.raises(RankError, match="rank 1 gave no sign of life for 60 s"):
        Ranks(Group()).with_deadline(60.0).agree("x", lambda: None)
    assert 60 < clock.now - 100 < 75


def test_what_other_hosts_do_not_see_is_looked_for_by_it(clock, tmp_path):
    with pytest.raises(CheckpointError, match="do not share"):
        marker.wait_for_marker(LocalStorage(str(tmp_path)), "abc")
    assert sum(clock.pauses) == pytest.approx(10, abs=0.2)


def test_names_and_times_of_a_checkpoint_come_from_it(tmp_path):
    class Counting(FakeClock):
        numbers = itertools.count(1)

        def random_name(self, nbytes):
            return f"{next(self.numbers):0{2 * nbytes}x}"

    with using(Counting(now=1e9)):
        report = checkpoint.save(tmp_path / "a", {"w": torch.ones(2)})
    assert report.save_id == f"{1:012x}" and report.seconds == 0
    assert read_manifest(LocalStorage(str(tmp_path / "a")))[0].saved_at == 1e9


def test_storage_is_what_it_opens(tmp_path):
    class Elsewhere(World):
        def open_storage(self, url, durable, opener):
            return opener(url.replace("nowhere", "somewhere"), durable)

    with using(Elsewhere()):
        checkpoint.save(tmp_path / "nowhere" / "a", {"w": torch.ones(2)})
    assert not (tmp_path / "nowhere").exists()
    assert checkpoint.verify(tmp_path / "somewhere" / "a").ok


def test_sockets_wait_for_nobody_but_a_selector():
    listener = world().listen("127.0.0.1")
    selector = world().selector()
    selector.register(listener, 1)
    one = world().begin_connect(*listener.getsockname())
    assert selector.select(5.0)
    world().finish_connect(one)
    other = listener.accept()[0]
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)
    one.send(b"here")
    selector.modify(listener, 1)
    selector.register(other, 1)
    assert [key.fileobj for key, _ in selector.select(5.0)] == [other]
    assert other.recv(9) == b"here"
    one.close()
    assert selector.select(5.0) and other.recv(9) == b""
    for each in (listener, other, selector, *world().socket_pair()):
        each.close()


def test_threads_are_those_that_it_makes(tmp_path):
    class Named(World):
        def __init__(self):
            self.names = []

        def thread(self, target, name=None, daemon=False):
            self.names.append(name)
            return super().thread(target, name, daemon)

        def thread_pool(self, threads, name):
            self.names.append(name)
            return super().thread_pool(threads, name)

    with using(Named()) as named:
        checkpoint.async_save(tmp_path / "a", {"w": torch.ones(2)}).result()
        checkpoint.verify(tmp_path / "a")
    assert {"shardopt-save", "shardopt-verify"} <= set(named.names)


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_a_thread_that_gives_way_takes_no_other_with_it():
    def lower_priority():
        world().lower_priority(15)
        return os.getpriority(os.PRIO_PROCESS, 0), in_a_thread(lambda: os.getpriority(os.PRIO_PROCESS, 0))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    ((mine, [started]),) = in_a_thread(lower_priority)
    assert mine == started == max(before, 15)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_copy_is_made_where_priorities_may_not_be_set(monkeypatch, tmp_path):
    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    tier = checkpoint.Tier(str(tmp_path / "memory"), every=1)
    root, mirror = str(tmp_path / "root"), str(tmp_path / "mirror")
    with checkpoint.Manager(root, every=2, destinations=[tier, checkpoint.Mirror(mirror)]) as manager:
        app = {"x": torch.ones(3)}
        manager.restore(app)
        manager.save(2, app)
    assert checkpoint.verify(f"{mirror}/step-00000002").ok


def test_a_port_is_no_number_of_the_programs_generator():
    before = random.getstate()
    with socket.socket() as listener:
        bind(listener, "127.0.0.1", range(20000, 30000))
    assert random.getstate() == before
