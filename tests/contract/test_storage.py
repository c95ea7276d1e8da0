"""The contract of every storage, wherever the bytes lie."""

import errno
import functools
import importlib
import itertools
import os
import stat
import tracemalloc
import uuid

import fsspec
import pytest
import torch
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from shardopt import checkpoint
from shardopt.checkpoint.storage import (
    LocalStorage,
    RecordedReads,
    ReplayStorage,
    Span,
    is_temporary,
    local,
    remote,
    retry,
    storage_of,
    use_options,
    wrap_os_errors,
)
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError
from shardopt.testing.storage import CHECKS
from tests.docs.blocks import ROOT, blocks_of
from tests.harness import Fault
from tests.harness.faults import watched
from tests.harness.object_stores import object_servers
from tests.harness.planned_fs import PlannedFileSystem

SERVED = ["s3", "gs", "az", "s3fs"]
KINDS = ["local", "memory", "directory", "generic local", "failing", "short", "recorded", *SERVED, "own"]
NOT_OF = {
    # File systems without a URL of their own, and one whose URL is obstore's where that is installed.
    "its_url_opens_it": ["directory", "generic local", "failing", "short", "s3fs"],
    "published_over_what_was_there": ["directory", "generic local"],  # fsspec writes local files in place
}
"""Checks of the contract → what they do not hold for."""
FAULTS = {"failing": OSError(errno.EBUSY, "SlowDown"), "short": "short"}


@pytest.fixture(scope="module")
def servers():
    """Servers of object stores by protocol, each begun when it is asked for."""
    with object_servers() as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(retry, "RETRY_POLICY", retry.RetryPolicy(pause_seconds=0.001))


def served(kind, request):
    """The storage of a new bucket."""
    server = request.getfixturevalue("servers")("s3" if kind == "s3fs" else kind)
    if kind != "s3fs":
        root = server.new_root()
        use_options(root, server.options())
        return storage_of(root)
    return RemoteStorage(fsspec.filesystem("s3", **server.options()), server.new_root().removeprefix("s3://"))


@functools.cache
def class_on_page():
    """The storage that docs/recipes/own-storage.md writes."""
    names = {}
    exec(blocks_of(ROOT / "docs/recipes/own-storage.md")[0].text, names)
    return names["SqliteStorage"]


class Recorded(ReplayStorage):
    """A storage that is written to past the record of its answers."""

    def __init__(self, storage):
        super().__init__(storage, RecordedReads())
        for name in ("make", "write", "write_atomically", "publish", "publish_new", "remove", "remove_if_empty"):
            setattr(self, name, getattr(storage, name))


def make(kind, folder):
    if kind == "local":
        return storage_of(folder / "root")
    if kind == "memory":
        return storage_of(f"memory://shardopt-tests/{uuid.uuid4().hex}")
    if kind == "recorded":
        return Recorded(make("memory", folder))
    if kind == "own":
        folder.mkdir(exist_ok=True)
        return class_on_page()(f"sqlite://{folder}/a.db/root")
    if kind in FAULTS:  # every request, once
        return RemoteStorage(PlannedFileSystem(FAULTS[kind]), f"/{folder.name}")
    if kind == "directory":
        return RemoteStorage(DirFileSystem(str(folder), fs=LocalFileSystem()), "root")
    return RemoteStorage(
        fsspec.filesystem("file"), str(folder / "root")
    )  # a file system as fsspec's own classes have it


@pytest.fixture(params=KINDS)
def storage(request, tmp_path):
    kind = request.param
    made = served(kind, request) if kind in SERVED else make(kind, tmp_path)
    made.make()
    return made


def views(*parts):
    return [memoryview(part) for part in parts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Sending a large body directly with raw bytes:ResourceWarning")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(check, kind, tmp_path, request):
    if kind in NOT_OF.get(check.__name__, ()):
        return
    roots = map(str, itertools.count())
    if kind in SERVED:
        check(lambda: served(kind, request))
    else:
        check(lambda: make(kind, tmp_path / next(roots)))


@given(
    kind=st.sampled_from(["local", "memory"]),
    data=st.binary(min_size=1, max_size=3000),
    cuts=st.lists(st.integers(0, 3000), max_size=12),
    taken=st.lists(st.booleans(), min_size=13, max_size=13),
)
def test_spans_are_filled(tmp_path_factory, kind, data, cuts, taken):
    """Whatever of the file is wanted, in ascending order, with and without gaps, empty spans among them."""
    storage = make(kind, tmp_path_factory.mktemp("spans"))
    storage.make()
    storage.write("a", views(data))
    points = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    wanted = [(begin, end) for begin, end, take in zip(points, points[1:], taken, strict=False) if take]
    wanted += [(end, end) for _, end in wanted[:1]]
    wanted.sort()
    memory = [bytearray(end - begin) for begin, end in wanted]
    storage.read_into("a", [Span(begin, memoryview(m)) for (begin, _), m in zip(wanted, memory, strict=True)])
    assert [bytes(m) for m in memory] == [data[begin:end] for begin, end in wanted]


@pytest.mark.parametrize("spans", [[(0, 11)], [(8, 3)], [(0, 2), (9, 2)], [(10, 1)], [(50, 1)]], ids=str)
def test_a_file_that_ends_too_soon_is_named(storage, spans):
    storage.write("a", views(b"0123456789"))
    with pytest.raises(CorruptionError, match=r"/a: found its end before byte 1?\d"):
        storage.read_into("a", [Span(begin, memoryview(bytearray(size))) for begin, size in spans])


NOT_EXCLUSIVE = {"directory", "generic local"}
"""File systems of which fsspec can only say that it looks before it writes."""


def test_publications_are_exclusive_where_they_can_be(storage, request):
    exclusive = request.node.callspec.params["storage"] not in NOT_EXCLUSIVE
    assert storage.publish_new("manifest.json", b"1") == exclusive


class WithoutConditions(PlannedFileSystem):
    """A store that refuses a conditional PUT as an unknown request, or that knows none."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def pipe_file(self, path, value, mode="overwrite", **options):
        if mode == "create":
            raise OSError(self.number, "a header that implies functionality that is not implemented")
        super().pipe_file(path, value, **options)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_store_without_conditions_is_looked_into_first(number):
    storage = RemoteStorage(WithoutConditions(number), "/root")
    assert storage.publish_new("m", b"1") is False
    with pytest.raises(FileExistsError):
        storage.publish_new("m", b"2")
    assert storage.read("m") == b"1"


def test_a_condition_is_asked_for_where_a_client_has_one():
    class Azure(AsyncFileSystem):
        async def _pipe_file(self, path, value, overwrite=True, max_concurrency=None, **kwargs): ...

    class Google(AsyncFileSystem):
        async def _pipe_file(self, path, data, metadata=None, mode="overwrite"): ...

    class Old(AsyncFileSystem):
        async def _pipe_file(self, path, data, chunksize=1): ...

    cases = [(Azure, {"overwrite": False}), (Google, {"mode": "create"}), (Old, {}), (LocalFileSystem, {})]
    for kind, condition in cases:
        assert remote._condition_of(kind()) == condition
        assert remote._condition_of(DirFileSystem("root", fs=kind())) == condition


def test_what_was_given_up_may_appear(monkeypatch):
    monkeypatch.setattr(retry, "RETRY_POLICY", retry.RetryPolicy(attempts=2, pause_seconds=0.001))
    storage = RemoteStorage(PlannedFileSystem(OSError(errno.EBUSY, "SlowDown"), times=9), "/root")
    with pytest.raises(CheckpointError, match="6 attempts"):
        storage.publish_new("m", b"1")
    assert storage.may_appear("m")
    assert not storage.may_appear("n")


@pytest.mark.parametrize(("without", "exclusive"), [([], True), (["link"], True), (["link", "rename"], False)], ids=str)
@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_local_file_systems_without_links(tmp_path, monkeypatch, without, exclusive, number):
    storage = LocalStorage(str(tmp_path))
    if "rename" in without:
        monkeypatch.setattr(local, "_renameat2", None)
    faults = [Fault(0, "os:link", action=errno.errorcode[number], times=9)] if without else []
    with watched(faults, []):
        assert storage.publish_new("m", b"1") == exclusive
        with pytest.raises(FileExistsError):
            storage.publish_new("m", b"2")
        storage.publish_new("m", b"1")
    assert storage.read("m") == b"1"
    assert storage.names() == ["m"]


@pytest.mark.parametrize("operation", ["os:link", "os:fsync"])
@pytest.mark.parametrize("kind", ["ENOSPC", "EIO"])
def test_what_cannot_be_published_leaves_nothing(tmp_path, operation, kind):
    storage = LocalStorage(str(tmp_path))
    with watched([Fault(0, operation, action=kind)], []), pytest.raises(OSError):
        storage.publish_new("m", b"1")
    assert storage.names() == []


def test_remains_of_a_publication_have_a_name_that_is_known(tmp_path):
    storage = LocalStorage(str(tmp_path))
    with watched([Fault(0, "os:unlink", action="EIO")], []):
        storage.publish_new("manifest.json", b"1")
    remains, name = storage.names()
    assert name == "manifest.json"
    assert is_temporary(remains)
    assert not any(
        map(is_temporary, ["manifest.json", ".manifest.json.tmp", "a.0123456789ab.tmp", ".0123456789ab.tmp"])
    )


@pytest.mark.parametrize("kind", ["local", "memory", "directory", "generic local", "own"])
def test_a_checkpoint_takes_the_same_line_everywhere(tmp_path, monkeypatch, kind):
    for module in ("saving.commit", "sources.open"):
        there = importlib.import_module(f"shardopt.checkpoint.{module}")
        monkeypatch.setattr(there, "storage_of", lambda url, durable=True: make_again(kind, tmp_path))
    value = torch.arange(200_000.0).reshape(400, 500)
    checkpoint.save("x", {"a": value, "b": value[:, 3:7], "n": 3})
    app = {"a": torch.zeros(400, 500), "b": torch.zeros(4, 400).T, "n": 0}
    checkpoint.load("x", app)
    assert torch.equal(app["a"], value) and torch.equal(app["b"], value[:, 3:7]) and app["n"] == 3


def make_again(kind, folder):
    return storage_of(f"memory://shardopt-tests{folder}") if kind == "memory" else make(kind, folder)


# Local directories.


def test_a_local_file_is_not_written_over(tmp_path):
    storage = LocalStorage(str(tmp_path))
    storage.write("a", views(b"1"))
    with pytest.raises(FileExistsError):
        storage.write("a", views(b"2"))
    assert storage.read("a") == b"1"


def test_new_directories_are_durable_and_all_above_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(LocalStorage, "sync_directory", lambda self, path: synced.append(path))
    monkeypatch.setattr(local, "_durably_named", {str(tmp_path.parent)})
    LocalStorage(str(tmp_path / "a" / "b" / "c")).make()
    # Who made the last of them, which was there, may not have come that far.
    assert synced == [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path), str(tmp_path.parent)]
    synced.clear()
    LocalStorage(str(tmp_path / "a" / "b" / "c")).make()
    assert synced == [str(tmp_path / "a" / "b")]  # the others are known to be
    LocalStorage("/").make()


def test_what_is_made_only_to_be_written_is_not_held_on_to(tmp_path):
    storage = LocalStorage(str(tmp_path), durable=False)
    tracemalloc.start()
    nbytes = storage.write("a", (memoryview(bytes(1 << 20)) for _ in range(64)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert nbytes == 64 << 20
    assert peak < 20 << 20


@pytest.mark.parametrize(
    ("nbytes", "part_bytes"), [(0, 2), (9_999, 2), (10_000, 2), (10_001, 4), (15_000, 4), (30_001, 8)]
)
def test_a_file_of_any_size_has_fewer_parts_than_s3_takes(monkeypatch, nbytes, part_bytes):
    monkeypatch.setattr(remote, "PART_BYTES", 2)
    assert remote._part_bytes(nbytes) == part_bytes
    data = os.urandom(nbytes)
    parts = list(remote._parts(iter(views(data[:1001], b"", data[1001:])), part_bytes))
    assert b"".join(parts) == data and len(parts) <= 5001
    assert all(len(part) == part_bytes for part in parts[:-1])


def flushed(tmp_path, durable):
    storage = LocalStorage(str(tmp_path / "a" / "b"), durable)
    with watched([], ["os:fsync", "os:writev", "os:replace", "os:link", "os:unlink", "os:open", "os:close"]) as watch:
        storage.make()
        storage.write("a", views(b"1"))
        storage.publish("m", b"2")
        storage.publish_new("n", b"3")
        storage.child("c").make()
    assert watch.calls.count("os:open") == watch.calls.count("os:close")
    return watch.calls


def test_bytes_are_flushed_before_they_are_named(tmp_path):
    LocalStorage(str(tmp_path / "others")).make()  # all directories above are durable
    calls = [call for call in flushed(tmp_path, True) if call not in ("os:open", "os:close")]
    # Two directories; the file, its directory; the temporary file, its new name, twice; one directory.
    assert calls == [
        *["os:fsync"] * 2,
        "os:writev",
        *["os:fsync"] * 2,
        "os:fsync",
        "os:replace",
        "os:fsync",
        *["os:fsync", "os:link", "os:unlink", "os:fsync"],
        "os:fsync",
    ]
    assert "os:fsync" not in flushed(tmp_path / "again", False)


def test_short_reads_and_writes_are_continued(tmp_path):
    storage, data = LocalStorage(str(tmp_path)), os.urandom(100_000)
    parts = [data[:1], data[1:40_000], data[40_000:40_003], data[40_003:]]
    faults = [Fault(0, "os:writev", action="short", times=9), Fault(0, "os:preadv", action="short", times=9)]
    with watched(faults, []) as watch:
        assert storage.write("a", views(*parts)) == len(data)
        memory = bytearray(len(data))
        whole = memoryview(memory)
        storage.read_into("a", [Span(0, whole[:5]), Span(5, whole[5:70_000]), Span(70_000, whole[70_000:])])
    assert watch.calls.count("os:writev") == watch.calls.count("os:preadv") == 10
    assert bytes(memory) == data == storage.read("a")


@pytest.mark.parametrize("operation", ["os:writev", "os:fsync", "os:open"])
@pytest.mark.parametrize("kind", ["ENOSPC", "EIO"])
def test_a_failing_call_is_an_error_and_leaves_no_file_open(tmp_path, operation, kind):
    storage = LocalStorage(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    with watched([Fault(0, operation, action=kind)], []), pytest.raises(OSError) as caught:
        storage.write("a", views(b"1"))
    assert caught.value.errno == getattr(errno, kind)
    with watched([Fault(0, "os:fsync", action=kind)], []), pytest.raises(OSError):
        storage.publish("m", b"1")
    assert not storage.exists("m")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_or_a_path_below_a_file_is_no_file(tmp_path):
    storage = LocalStorage(str(tmp_path))
    (tmp_path / "manifest.json").mkdir()
    (tmp_path / "file").touch()
    assert not storage.exists("manifest.json")
    assert not storage.child("file").exists("manifest.json")
    assert storage.child("file").names() == []
    for path in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError):
            checkpoint.open(path)


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_what_the_system_refuses_is_our_error(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot make .*file"):
        checkpoint.save(tmp_path / path, {"n": 1})


def test_telling_keeps_what_is_ours():
    with pytest.raises(CheckpointNotFoundError, match=r"^as it is \[no-checkpoint\]$"), wrap_os_errors("read x"):
        raise CheckpointNotFoundError("as it is")  # a FileNotFoundError too
    with (
        pytest.raises(CheckpointError, match=r"^cannot read x: \[Errno 5\] io \[storage-failed\]$") as caught,
        wrap_os_errors("read x"),
    ):
        raise OSError(5, "io")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ZeroDivisionError), wrap_os_errors("read x"):
        raise ZeroDivisionError


@pytest.mark.parametrize(("operation", "said"), [("os:preadv", "EIO"), ("os:preadv", "short"), ("os:open", "EIO")])
def test_reading_through_errors(tmp_path, operation, said):
    checkpoint.save(tmp_path / "c", {"x": torch.arange(9.0)})
    app = {"x": torch.zeros(9)}
    with watched([Fault(0, operation, action=said, at=1)], []) as watch:
        if said == "short":
            checkpoint.load(tmp_path / "c", app)
            assert app["x"].tolist() == list(range(9))
        else:
            with pytest.raises(CheckpointError, match=r"cannot be read from its disk.*\n.*found Input/output error"):
                checkpoint.load(tmp_path / "c", app)
    assert watch.struck


def refusing_directories(monkeypatch, number):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(local, "_not_synced", set())
    monkeypatch.setattr(local, "_durably_named", set())


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF])
def test_a_file_system_that_does_not_flush_directories_is_told_once(tmp_path, monkeypatch, caplog, number):
    refusing_directories(monkeypatch, number)
    app = {"x": torch.ones(3)}
    with checkpoint.Manager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, app)
        assert manager.restore(app) == 2
    (line,) = [line for line in caplog.messages if "flush" in line]
    assert os.strerror(number) in line


def test_a_disk_that_fails_to_flush_a_directory_fails_the_save(tmp_path, monkeypatch):
    refusing_directories(monkeypatch, errno.EIO)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.save(tmp_path / "c", {"x": torch.ones(3)})
