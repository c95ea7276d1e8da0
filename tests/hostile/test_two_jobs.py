"""Two jobs at one path, interleaved at every operation on the storage, and killed at any: no checkpoint is harmed.

The tasks are the real calls, each as a job of one rank; what they do in turns is what processes could do.
"""

import itertools
import shutil
from contextlib import contextmanager

import fsspec
import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, CorruptionError
from shardopt.world import using, world
from tests.harness import Fault
from tests.harness.faults import watched
from tests.harness.object_stores import object_servers
from tests.harness.schedules import orders
from tests.support.worlds import RepeatedNames

LOCAL, REMOTE = "shardopt.checkpoint.storage:LocalStorage.", "shardopt.checkpoint.storage.remote:RemoteStorage."
SYSTEM = ["os:mkdir", "os:open", "os:link", "os:listdir", "os:unlink", "os:rmdir", "os:stat", "os:preadv", "os:writev"]
SYSTEM += [LOCAL + "read", LOCAL + "_write_temporary"]
REQUESTS = ["shardopt.checkpoint.storage.retry:Requests.once"]
STORES = ["s3", "gs", "az"]
CHANGING = ["make", "write", "publish_new", "remove", "remove_if_empty"]
DURABLY = "remove_durably"  # of a store it is `remove`
METHODS = [*CHANGING, "names", "size", "read"]


def app(number):
    return {"x": torch.full((3,), float(number)), "step": number}


class Place:
    """A path to save to, made anew for each order; on disk, in fsspec's memory, or on the server of an object store."""

    def __init__(self, root, remote, server=None):
        self.root, self.remote, self.server, self.numbers = root, remote, server, itertools.count()

    def renew(self):
        world().restart()
        number = next(self.numbers)
        if self.server is not None:
            self.path = self.server.new_root()
        elif self.remote:
            memory = fsspec.filesystem("memory")
            memory.store.clear()
            memory.pseudo_dirs[:] = [""]  # else each root of an order that is over would be listed beside the next
            self.path = f"memory://{self.root.name}/{number}"  # of this test alone
        else:
            for path in self.root.iterdir():
                shutil.rmtree(path)
            self.path = self.root / str(number)
        return self.path

    @property
    def storage(self):
        return storage_of(self.path, durable=False)

    def leave_remains(self):
        """The remains of a save that died."""
        self.storage.make()
        self.storage.write("dead0-r00000.safetensors", [memoryview(b"remains")])

    def save(self, number):
        return lambda: checkpoint.save(self.path, app(number), durable=False)

    def committed(self):
        """The save_id of what is committed, all of which is verified; None where there is nothing."""
        try:
            manifest, _ = read_manifest(self.storage)
        except CheckpointNotFoundError:
            return None
        checkpoint.verify(self.path).raise_if_damaged()
        with checkpoint.open(self.path) as reader:
            assert torch.equal(reader.read("x"), torch.full((3,), float(reader.read("step"))))
        return manifest.save_id

    def files(self):
        return self.storage.names()

    @property
    def calls(self):
        """The methods of the storage, as operations."""
        return [(REMOTE if self.remote else LOCAL) + name for name in METHODS]

    @property
    def changes(self):
        """Those that change what is there: a kill before another one leaves what one before the next of these does."""
        return [REMOTE + name for name in CHANGING] if self.remote else [LOCAL + name for name in (*CHANGING, DURABLY)]

    @property
    def operations(self):
        """The operations that the methods are made of."""
        return REQUESTS if self.remote else SYSTEM


@pytest.fixture(autouse=True)
def names_that_repeat():
    """Orders are run again up to some step: the tasks must then do the same."""
    with using(RepeatedNames()):
        yield


@pytest.fixture(scope="module")
def servers():
    with object_servers() as server:
        yield server


@pytest.fixture(params=["disk", "memory", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in STORES)])
def place(request, tmp_path):
    if request.param not in STORES:
        yield Place(tmp_path, request.param == "memory")
        return
    server = request.getfixturevalue("servers")(request.param)
    with server.reached():
        yield Place(tmp_path, True, server)


@contextmanager
def order_noted(run):
    """Where a check fails, the order that it failed in."""
    try:
        yield
    except BaseException as error:
        error.add_note(str(run))
        raise


def check_saves(place, run, saves, removed=False):
    """Who was told that a save is committed finds it; nobody else has left anything.

    Args:
        saves: which tasks they are.
        removed: whether a task takes away what it finds.
    """
    with order_noted(run):
        committed = place.committed()
        reports = [run.ended[i].result for i in saves if run.ended[i].error is None]
        if not removed or committed is not None:
            assert committed in [report.save_id for report in reports] or any(each.killed for each in run.ended)
        if not removed:
            assert [report.save_id for report in reports] == [committed] * len(reports)
        alive = [run.ended[i] for i in saves if not run.ended[i].killed]
        assert all(isinstance(each.error, CheckpointError) for each in alive if each.error is not None)
        if len(alive) == len(saves) and not removed:
            assert len(reports) == 1
            assert all(isinstance(each.error, CheckpointExistsError) for each in alive if each.error is not None)
            assert len(place.files()) == 2  # the winner's, and the manifest
        if committed is None:  # whatever lies there is in nobody's way
            assert place.save(9)().save_id == place.committed()
            assert len([name for name in place.files() if name.endswith(".safetensors")]) == 1


def two_saves(place, remains):
    def tasks():
        place.renew()
        if remains:
            place.leave_remains()
        return [place.save(1), place.save(2)]

    return tasks


def a_save_and_a_reshard(place, _):
    def tasks():
        place.renew()
        source = Place(place.root, place.remote, place.server)
        source.path = f"{place.path}-source"  # new in each order: what a manifest refers to is remembered by its path
        source.save(2)()
        return [place.save(1), lambda: checkpoint.reshard(source.path, place.path, world_size=1)]

    return tasks


MAKERS = pytest.mark.parametrize("make", [two_saves, a_save_and_a_reshard], ids=lambda make: make.__name__)


@MAKERS
def test_one_of_two_saves_is_committed(place, make):
    for run in orders(make(place, True), place.operations, preemptions=1):
        check_saves(place, run, [0, 1])


def test_one_of_two_saves_is_committed_when_each_is_stopped(place, request):
    """Twice on a disk. A store's calls are its requests, before each of which the test above stops one of the two."""
    preemptions = 1 if place.remote and not request.config.getoption("--exhaustive") else 2
    for run in orders(two_saves(place, True), place.calls, preemptions):
        check_saves(place, run, [0, 1])


def test_a_kill_at_any_call_harms_no_other(place):
    preemptions = 0 if place.remote else 1
    for run in orders(two_saves(place, True), place.changes if place.remote else place.calls, preemptions, kills=1):
        check_saves(place, run, [0, 1])


@pytest.mark.parametrize("number", range(1, 4))
def test_a_failure_after_the_commit_takes_nothing_back(tmp_path, number):
    """The first look at what is there is before the commit, the others are behind it."""
    place = Place(tmp_path, remote=False)
    place.renew()
    with watched([Fault(0, "os:listdir", at=number, action="EIO")], []) as watch:
        if number < 3:
            with pytest.raises(CheckpointError, match="Input/output"):
                place.save(1)()
        else:
            place.save(1)()
    assert watch.struck == (number < 3)
    assert (place.committed() is None) == (number == 1)
    assert len(place.files()) == (0 if number == 1 else 2)


def loaded(place):
    """A load as a task: gives what it has loaded, all of it of one save."""

    def task():
        target = {"x": torch.zeros(3), "step": 0}
        checkpoint.load(place.path, target)
        assert torch.equal(target["x"], torch.full((3,), float(target["step"])))
        return target["step"]

    return task


def a_save_a_load_and_a_removal(place, committed):
    """Somebody takes the save for dead, or its path for a checkpoint that is no longer wanted."""

    def tasks():
        place.renew()
        if committed:
            place.save(1)()
        else:
            place.storage.make()
        place.storage.publish("notes", b"of the user, who keeps the directory")
        return [place.save(2), loaded(place), lambda: remove_checkpoint(place.storage)]

    return tasks


def check_removal(place, run):
    check_saves(place, run, [0], removed=True)
    with order_noted(run):
        _, load, removal = run.ended
        assert removal.error is None or removal.killed
        assert load.killed or load.result in (1, 2) or isinstance(load.error, CheckpointError), load
        assert "notes" in place.files()


@pytest.mark.parametrize(
    ("remote", "committed"),
    [(False, False), (False, True), pytest.param(True, False, marks=pytest.mark.exhaustive)],
)
def test_a_save_a_load_and_a_removal(tmp_path, remote, committed):
    place = Place(tmp_path, remote)
    for run in orders(a_save_a_load_and_a_removal(place, committed), place.calls, preemptions=1):
        check_removal(place, run)


@pytest.mark.parametrize(("remote", "committed"), [(False, False), (False, True), (True, False)])
def test_a_kill_at_any_call_of_a_save_a_load_and_a_removal(tmp_path, remote, committed):
    place = Place(tmp_path, remote)
    for run in orders(a_save_a_load_and_a_removal(place, committed), place.changes, preemptions=0, kills=1):
        check_removal(place, run)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@MAKERS
@pytest.mark.parametrize("remains", [False, True])
def test_every_order_of_two_saves(place, make, remains):
    runs = 0
    for run in orders(make(place, remains), place.operations, preemptions=2, kills=1):
        check_saves(place, run, [0, 1])
        runs += 1
    print(f"{runs} orders")
    assert runs > 700  # a request to a remote store is one operation, what it stands for on a disk are several


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_every_order_of_two_saves_by_their_calls(tmp_path):
    """With no bound at all."""
    place, runs = Place(tmp_path, remote=False), 0
    for run in orders(two_saves(place, True), place.calls, preemptions=100):
        check_saves(place, run, [0, 1])
        runs += 1
    print(f"{runs} orders")
    assert runs > 1000


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("committed", [False, True])
def test_every_order_of_a_save_a_load_and_a_removal(place, committed):
    runs = 0
    for run in orders(a_save_a_load_and_a_removal(place, committed), place.calls, preemptions=2):
        check_removal(place, run)
        runs += 1
    print(f"{runs} orders")
    assert runs > 700


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("committed", [False, True])
def test_a_kill_between_a_save_and_a_removal(place, committed):
    """A manifest may outlive its files where one of the two is killed before it looks again: that is named as damage.

    Nothing is loaded from it, and whoever removes it makes room for a save. On a server, whose requests take
    milliseconds, with one preemption: two are tens of thousands of orders.
    """
    preemptions = 2 if place.server is None else 1
    runs = damaged = 0
    for run in orders(a_save_a_load_and_a_removal(place, committed), place.calls, preemptions, kills=1):
        runs += 1
        try:
            check_removal(place, run)
        except CorruptionError as error:
            with order_noted(run):
                assert any(each.killed for each in run.ended)
                assert {problem.found for problem in error.problems} == {"no such file"}
                with pytest.raises(CorruptionError, match="no such file"):
                    loaded(place)()
                remove_checkpoint(place.storage)
                assert place.save(9)().save_id == place.committed()
            damaged += 1
    print(f"{runs} orders, {damaged} of them with a manifest alone")
    assert runs > 2 * damaged and runs > (1000 if preemptions == 2 else 200)
