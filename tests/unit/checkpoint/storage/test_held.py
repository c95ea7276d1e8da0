"""What a run is kept in stays the same store, whatever others ask for; and caches of fsspec are not read."""

import gc
import weakref
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shardopt import checkpoint
from shardopt.checkpoint.storage import hold, release, storage_of, use_options
from shardopt.checkpoint.storage import open as storage_open
from shardopt.checkpoint.storage.object_stores import open as opening
from shardopt.errors import OptionError


class Clusters(MemoryFileSystem):
    """Several stores, by endpoint, which have the same URLs."""

    protocol = "clusters"
    cachable = False
    stores: ClassVar = {}

    def __init__(self, endpoint="default", password=None, **options):
        super().__init__(endpoint=endpoint, password=password, **options)
        self.store, self.pseudo_dirs = self.stores.setdefault(endpoint, ({}, [""]))


@pytest.fixture(autouse=True)
def clusters(monkeypatch):
    fsspec.register_implementation("clusters", Clusters, clobber=True)
    monkeypatch.setattr(storage_open, "_options", {})
    monkeypatch.setattr(Clusters, "stores", {})
    monkeypatch.setattr(opening, "conf", {})


OLD, NEW = {"endpoint": "old"}, {"endpoint": "new", "password": "a"}
RUN = "clusters://b/run"
ANOTHER = r"found another endpoint than that of .*clusters://b/run;"


def app(step):
    return {"w": torch.full((4,), float(step)), "step": step}


def steps_in(endpoint):
    files = Clusters.stores[endpoint][0] if endpoint in Clusters.stores else {}
    return sorted({int(name.split("step-")[1][:8]) for name in files if "step-" in name})


def test_a_run_stays_in_its_store():
    with checkpoint.Manager(RUN, storage_options=OLD) as before:
        before.save(7, app(7))
    with checkpoint.Manager(RUN, storage_options=NEW) as manager:
        assert manager.restore(app(0)) == 0
        for ask in (
            lambda: checkpoint.Manager(RUN, storage_options=OLD),
            lambda: checkpoint.Manager("clusters://b", destinations=[checkpoint.Mirror(RUN, storage_options=OLD)]),
            lambda: checkpoint.load(f"{RUN}/step-00000007", app(0), storage_options=OLD),
            lambda: checkpoint.save(f"{RUN}/step-00000008", app(0), storage_options=OLD),
            lambda: checkpoint.Follower(RUN, {"w": torch.ones(4)}, storage_options=OLD),
        ):
            with pytest.raises(OptionError, match=ANOTHER) as caught:
                ask()
            assert "password" not in str(caught.value) and "'a'" not in str(caught.value)
        manager.save(1, app(1))
        use_options("clusters://b", OLD)  # of all that is above
        manager.save(2, app(2))
        checkpoint.Manager(RUN, storage_options={**NEW, "password": "renewed"})  # which nobody has any more
        manager.save(3, app(3))
        assert manager.steps() == steps_in("new") == [1, 2, 3]
        assert steps_in("old") == [7]
    with checkpoint.Manager(RUN, storage_options=OLD) as after:
        assert after.restore(app(0)) == 7


def test_options_of_a_step_do_not_lead_a_run_elsewhere():
    checkpoint.save(f"{RUN}/step-00000002", app(2), storage_options=OLD)
    with checkpoint.Manager(RUN, storage_options=NEW) as manager:
        manager.save(1, app(1))
        manager.save(2, app(3))
        target = app(0)
        checkpoint.load(manager.path(2), target)
        assert target["step"] == 3 and manager.steps() == steps_in("new") == [1, 2]


def test_what_changes_behind_a_url_is_for_those_who_come_later(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://one:9000")
    one = hold("s3://held/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://two:9000")
    assert storage_of("s3://held/run/step-1/").place == one.place == {"endpoint": "https://one:9000"}
    assert storage_of("s3://held/run/step-1/").url == "s3://held/run/step-1"
    assert storage_of("s3://held/runs").place == {"endpoint": "https://two:9000"}
    with pytest.raises(OptionError, match=r"s3://held/run: found another endpoint than that of .*once it is closed"):
        hold("s3://held/run")
    release(one)
    owner = Clusters()
    two = hold("s3://held/run", owner)
    assert two.place == {"endpoint": "https://two:9000"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://one:9000")
    two.cycle = two  # as of a Manager that nobody has closed
    del two
    with monkeypatch.context() as patched:
        patched.setattr(gc, "collect", lambda: pytest.fail("garbage was collected while the owner is there"))
        assert storage_of("s3://held/run").place == {"endpoint": "https://two:9000"}
    del owner
    assert storage_of("s3://held/run").place == one.place
    gc.collect()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"export": checkpoint.Export("clusters://b/hf")},
        {"destinations": [checkpoint.Mirror("clusters://b/copies")]},
        {"destinations": [checkpoint.Tier("/tmp/none", every=1)]},
    ],
    ids=["plain", "export", "mirror", "tiers"],
)
def test_nothing_keeps_a_manager_that_nobody_has(options):
    manager = checkpoint.Manager(RUN, **options)
    gone = weakref.ref(manager)
    del manager
    assert gone() is None


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache"])
@pytest.mark.parametrize(
    "options", [{"clusters": NEW}, {"target_options": NEW}, NEW, {"clusters": NEW, "cache_storage": "x"}]
)
def test_no_cache_hides_what_others_write(cache, options, tmp_path):
    use_options(f"{cache}::{RUN}", {**options, cache: {"cache_storage": str(tmp_path)}})
    cached, direct = storage_of(f"{cache}::{RUN}"), storage_of(RUN)
    assert cached.url == direct.url and cached.place == direct.place == {"endpoint": "'new'"}
    for data in (b"1", b"2"):
        direct.publish("m", data)
        assert cached.read("m") == data
    use_options(RUN, NEW)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_could_not_be_made_holds_nothing(tmp_path):
    twice = [checkpoint.Tier(tmp_path / "t", every=1)] * 2
    with pytest.raises(OptionError, match="one path twice"):  # whose traceback keeps what the constructor had
        checkpoint.Manager(RUN, storage_options=OLD, destinations=twice)
    with pytest.raises(OptionError, match="one path twice") as kept:
        checkpoint.Manager(RUN, storage_options=OLD, destinations=twice)
    with checkpoint.Manager(RUN, storage_options=NEW) as manager:
        manager.save(1, app(1))
    assert steps_in("new") == [1] and kept.value is not None


class NoGroup:
    """Neither a process group nor a mesh."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: checkpoint.Publisher(RUN, storage_options=OLD, process_group=NoGroup()),
        lambda: checkpoint.Publisher(RUN, storage_options=OLD, keep=0),
        lambda: checkpoint.Manager(RUN, storage_options=OLD, process_group=NoGroup()),
        lambda: checkpoint.Manager(
            RUN, storage_options=OLD, process_group=NoGroup(), destinations=[checkpoint.Mirror("clusters://b/copies")]
        ),
        lambda: checkpoint.Follower(RUN, [torch.ones(4)], storage_options=OLD),
        lambda: checkpoint.Follower(RUN, {"w": torch.ones(4)}, storage_options=OLD, silence_seconds=0),
    ],
    ids=["publisher", "publisher keep", "manager", "mirror", "follower app", "follower"],
)
def test_what_could_not_be_made_holds_nothing(make):
    with pytest.raises(OptionError) as kept:  # whose traceback keeps what the constructor had
        make()
    with checkpoint.Manager(RUN, storage_options=NEW) as manager:
        manager.save(1, app(1))
    assert steps_in("new") == [1] and kept.value is not None


def test_a_follower_that_is_closed_holds_nothing():
    for options in (OLD, NEW):
        with checkpoint.Publisher("clusters://b/weights", storage_options=options) as publisher:
            publisher.publish(1, {"w": torch.full((4,), float(len(options)))})
    weights = {"w": torch.zeros(4)}
    for options in (OLD, NEW):
        with checkpoint.Follower("clusters://b/weights", weights, storage_options=options) as follower:
            assert follower.update().step == 1 and weights["w"].eq(len(options)).all()
        follower.close()
        with follower.serving() as step:
            assert step == 1
        for ask in (follower.update, follower.poll):
            with pytest.raises(RuntimeError, match="this Follower was closed; make a new one"):
                ask()


def test_how_files_are_read_is_not_where_they_are():
    with checkpoint.Manager(RUN, storage_options=OLD) as manager:
        manager.save(1, app(1))
        checkpoint.load(manager.path(1), app(0), storage_options={**OLD, "default_block_size": 1 << 20, "timeout": 5})


def test_storages_that_are_equal_are_held_each(monkeypatch):
    monkeypatch.setattr(storage_open, "_held", {})
    first, second = hold(RUN), hold(RUN)
    monkeypatch.setattr(type(first), "__eq__", lambda self, other: self.url == other.url)
    monkeypatch.setattr(type(first), "__hash__", None)
    release(first)
    assert len(storage_open._held) == 1
    release(second)
    assert not storage_open._held
