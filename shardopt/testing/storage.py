"""The contract of storage as checks: run them over a storage of your own.

Each check takes `make`, which returns a storage of a directory that is new on each call: empty, or not there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from shardopt import checkpoint
from shardopt.checkpoint.storage import FLUSH, Span, Storage, storage_of, use_options
from shardopt.errors import CorruptionError
from shardopt.world import world

T = TypeVar("T")
MakeStorage = Callable[[], Storage]
Check = Callable[[MakeStorage], None]

_THREADS = 8
_SMALL = bytes(range(256)) * 20
_ODD_NAME = "lr=1e-3, 'a' #2 %41 + ä"
_LARGE_BYTES = 20 << 20  # more than one part, or one buffer, of any storage that cuts files


def check_storage(make: MakeStorage, storage_options: Mapping[str, Any] | None = None) -> None:
    """Runs all checks over a storage; takes some seconds. In one process.

    Args:
        make: returns a storage of a directory that is new on each call.
        storage_options: arguments of the class by name, with which its URLs are opened again, such as credentials.

    Raises:
        AssertionError: has a line for each check that failed: its name, and what was found.
    """

    def with_options() -> Storage:
        storage = make()
        use_options(storage.url, storage_options)
        return storage

    failed = []
    for check in CHECKS:
        try:
            check(with_options)
        except Exception as error:
            found = str(error) if type(error) is AssertionError else f"{type(error).__name__}: {error}"
            failed.append(f"  {check.__name__}: {found}")
    if failed:
        raise AssertionError("\n".join([f"{len(failed)} of {len(CHECKS)} checks failed:", *failed]))


def what_is_written_is_read(make: MakeStorage) -> None:
    """Whole and in ranges, which end where the file does."""
    storage, data = _made(make), _SMALL
    _same("write", storage.write("a", _views(data[:7], b"", data[7:1000], data[1000:])), len(data))
    _same("names", storage.names(), ["a"])
    _same("size", storage.size("a"), len(data))
    _same("exists", storage.exists("a"), True)
    for begin, end in ((0, None), (3, None), (3, 10), (0, 8), (5, 5), (len(data) - 2, len(data) + 10)):
        _same(f"read from {begin} to {end}", storage.read("a", begin, end), data[begin:end])
    for expected, wanted in ((len(data), data[9:]), (len(data) + 5, data[9:]), (20, data[9:21])):
        _same(f"read_rest of what has {expected} bytes", storage.read_rest("a", 9, expected), wanted)


def empty_files_and_many_buffers(make: MakeStorage) -> None:
    """A file without bytes is a file, and thousands of buffers are one."""
    storage = _made(make)
    _same("write of nothing", storage.write("none", []), 0)
    _same("write of empty buffers", storage.write("empties", _views(b"", b"")), 0)
    _same("write of 5,000 buffers", storage.write("many", (memoryview(bytes([i % 256])) for i in range(5000))), 5000)
    _same("sizes", [storage.size("none"), storage.size("empties")], [0, 0])
    _same("read of nothing", storage.read("none"), b"")
    _same("read of 5,000 buffers", storage.read("many"), bytes(i % 256 for i in range(5000)))


def memory_of_buffers_is_used_again(make: MakeStorage) -> None:
    """After `FLUSH`: a model on an accelerator passes through a few buffers of the host."""

    class Parts:
        def __iter__(self) -> Iterator[memoryview]:
            memory = bytearray(1000)
            for number in range(20):
                memory[:] = bytes([number]) * 1000
                yield memoryview(memory)
                yield FLUSH

    storage = _made(make)
    _same("write", storage.write("a", Parts()), 20_000)
    _same("read", storage.read("a"), b"".join(bytes([number]) * 1000 for number in range(20)))


def large_files(make: MakeStorage) -> None:
    """Some 20 MiB in pieces of odd sizes, read by several threads at once into memory that is there."""
    storage, data = _made(make), _large()
    cuts = [0, 1, 70_001, 9 << 20, (9 << 20) + 3, _LARGE_BYTES]
    _same("write", storage.write("a", _views(*(data[a:b] for a, b in pairwise(cuts)))), len(data))
    _same("size", storage.size("a"), len(data))
    read = bytearray(len(data))
    whole, step = memoryview(read), _LARGE_BYTES // 32 + 1
    with storage.opened("a") as read_into, world().thread_pool(_THREADS, "contract") as pool:
        spans = [[Span(at, whole[at : at + step])] for at in range(0, len(data), step)]
        for each in [pool.submit(read_into, span) for span in spans]:
            _gives(f"a read in {_THREADS} threads at once", each.result)
    _same("what threads have read", bytes(read), data)
    with storage.opened_once("a") as read_into:
        last = bytearray(5)
        read_into([Span(len(data) - 5, memoryview(last))])
    _same("the last bytes", bytes(last), data[-5:])


def spans_are_filled(make: MakeStorage) -> None:
    """In ascending order: adjacent ones, ones with gaps between, empty ones, thousands."""
    storage, data = _made(make), _SMALL
    storage.write("a", _views(data))
    for ranges in (
        [(0, 3), (3, 3), (3, 9), (20, 30), (30, len(data))],
        [(len(data), len(data))],
        [],
        [(i, i + 1) for i in range(3000)],
        [(i, i + 1) for i in range(0, 200, 2)],
    ):
        memories = [bytearray(end - begin) for begin, end in ranges]
        storage.read_into("a", [Span(begin, memoryview(m)) for (begin, _), m in zip(ranges, memories, strict=True)])
        wanted = [data[begin:end] for begin, end in ranges]
        _same(f"what spans {ranges[:3]}… have", [bytes(memory) for memory in memories], wanted)


def a_file_that_ends_too_soon_is_corrupt(make: MakeStorage) -> None:
    """Whichever span it is in; `too_short` makes the error."""
    storage = _made(make)
    storage.write("a", _views(b"0123456789"))
    for spans in ([(0, 11)], [(8, 3)], [(0, 2), (9, 2)], [(10, 1)], [(50, 1)]):
        read = [Span(begin, memoryview(bytearray(size))) for begin, size in spans]
        _raises(CorruptionError, f"read_into at {spans} of 10 bytes", partial(storage.read_into, "a", read))


def what_is_not_there(make: MakeStorage) -> None:
    """Is a FileNotFoundError to read, and nothing to list or remove; a directory is no file."""
    storage = _made(make)
    storage.child("folder").make()
    storage.child("folder").write("x", _views(b"1"))
    for name in ("a", "folder"):
        _same(f"exists({name!r})", storage.exists(name), False)
        _raises(FileNotFoundError, f"size({name!r})", partial(storage.size, name))
    _raises(FileNotFoundError, "read", lambda: storage.read("a"))
    _raises(FileNotFoundError, "read_into", lambda: storage.read_into("a", [Span(0, memoryview(bytearray(1)))]))
    storage.remove("a")
    storage.remove_durably("a")
    nowhere = storage.child("none").child("below")
    _same("names of no directory", nowhere.names(), [])
    _same("exists in no directory", nowhere.exists("a"), False)
    nowhere.remove("a")


def names_change_at_once(make: MakeStorage) -> None:
    """Also for another object of the directory: a kept listing or size would hide what has been committed."""
    above = _made(make)
    storage, other = above.child("folder"), above.child("folder")
    storage.make()
    _same("names before", (other.names(), other.exists("b")), ([], False))
    storage.write("b", _views(b"12"))
    storage.write("a", _views(b"1"))
    _same("names and size after a write", (other.names(), other.size("b")), (["a", "b"], 2))
    storage.remove("b")
    _same("names after a removal", (other.names(), other.exists("b")), (["a"], False))


def directories(make: MakeStorage) -> None:
    """Children and parents lead to each other; their names are listed, once, sorted."""
    storage = _made(make)
    for name in ("step-2", "step-1", "step-10", _ODD_NAME):
        child = storage.child(name)
        child.make()
        child.make()  # it may be there
        child.write("a", _views(name.encode()))
        child.write("b", _views(b""))
        _same("the end of url", child.url.rstrip("/").endswith(f"/{name}"), True)
    _same("names", storage.names(), sorted(["step-1", "step-10", "step-2", _ODD_NAME]))
    _same("read", storage.child("step-1").read("a"), b"step-1")
    found = storage.child("step-2").parent()
    assert found is not None, "parent() of a child: found None, required the storage above and a name"
    parent, name = found
    _same("parent", (parent.url.rstrip("/"), name), (storage.url.rstrip("/"), "step-2"))
    _same("read through the parent", parent.child("step-10").read("a"), b"step-10")
    _same("as_file of a directory", storage.child("step-1").as_file(), None)
    file = storage.child("step-1").child("a").as_file()
    assert file is not None, "as_file() of a file: found None, required its directory and name"
    _same("read of as_file", file[0].read(file[1]), b"step-1")
    with suppress(OSError):
        storage.child("step-1").remove_if_empty()
    _same("names after remove_if_empty of what is not empty", storage.child("step-1").names(), ["a", "b"])


def published_over_what_was_there(make: MakeStorage) -> None:
    """Whoever reads meanwhile finds the bytes before or those after."""
    storage = _made(make)
    versions = [bytes([number]) * (20_000 + number) for number in range(20)]
    storage.publish("manifest.json", versions[0])
    seen: list[bytes] = []
    ended: list[bool] = []

    def look() -> None:
        while not ended:
            seen.append(storage.read("manifest.json"))

    with world().thread_pool(1, "contract") as pool:
        looking = pool.submit(look)
        try:
            for version in versions:
                _gives("publish while another thread reads", partial(storage.publish, "manifest.json", version))
        finally:
            ended.append(True)
        _gives("read while another thread publishes", looking.result)
    _same("readers that found something else", len([each for each in seen if each not in versions]), 0)
    _same("read", storage.read("manifest.json"), versions[-1])
    storage.write_atomically("manifest.json", _views(b"1", b"2"))
    _same("read after write_atomically", storage.read("manifest.json"), b"12")
    _same("names: nothing else is left", storage.names(), ["manifest.json"])


def published_only_where_nothing_is(make: MakeStorage) -> None:
    """The same bytes again are no error: the answer to an earlier attempt may have been lost."""
    storage, data = _made(make), b"1" * 5000
    exclusive = storage.publish_new("manifest.json", data)
    _same("type of publish_new", type(exclusive), bool)
    for other in (b"2", b"1" * 4999, b"1" * 5001):
        _raises(FileExistsError, "publish_new", partial(storage.publish_new, "manifest.json", other))
    _gives("publish_new of the same bytes again", partial(storage.publish_new, "manifest.json", data))
    _same("read", storage.read("manifest.json"), data)
    _same("names: nothing else is left", storage.names(), ["manifest.json"])
    _same("may_appear", storage.may_appear("manifest.json"), False)
    storage.remove("manifest.json")
    published = _gives("publish_new after a removal", partial(storage.publish_new, "manifest.json", b"3"))
    _same("publish_new after a removal", published, exclusive)
    _same("read of what is new", storage.read("manifest.json"), b"3")


def one_of_many_publishes(make: MakeStorage) -> None:
    """Where `publish_new` says that it is exclusive: of several at one time exactly one returns."""
    above = _made(make)
    storages = [above.child("folder") for _ in range(_THREADS)]
    storages[0].make()
    if not storages[0].publish_new("first", b"1"):
        return

    def publish(number: int, name: str, there: list[int]) -> bool:
        there.append(number)
        while len(there) < _THREADS:
            world().sleep(0)
        try:
            return storages[number].publish_new(name, str(number).encode() * 10_000)
        except FileExistsError:
            return False

    with world().thread_pool(_THREADS, "contract") as pool:
        for name in map(str, range(5)):
            there: list[int] = []
            tried = [pool.submit(publish, number, name, there) for number in range(_THREADS)]
            won = [each.result() for each in tried]
            _same("how many of 8 publish_new returned", won.count(True), 1)
            _same("read", storages[0].read(name), str(won.index(True)).encode() * 10_000)


def its_url_opens_it(make: MakeStorage) -> None:
    """On each rank, which has registered the protocol; so a run of checkpoints is saved and restored by the URL."""
    made = _made(make)
    made.write("a", _views(b"1"))
    _same("a slash at the end of url", made.url.endswith("/"), False)
    _same("names by the url", storage_of(made.url).names(), ["a"])
    _same("url by the url", storage_of(made.url).url, made.url)
    app: dict[str, Any] = {"x": torch.zeros(700, 700), "y": torch.zeros(3, dtype=torch.bfloat16), "n": 0}
    root = made.child(_ODD_NAME).url
    with checkpoint.Manager(root, keep=2) as manager:
        for step in (1, 2, 3, 4):
            app["x"][step] = app["n"] = step
            manager.save(step, app)
    again: dict[str, Any] = {"x": torch.ones(700, 700), "y": torch.ones(3, dtype=torch.bfloat16), "n": 9}
    with checkpoint.Manager(root, keep=2, incremental=True) as manager:
        _same("steps of a run with keep=2", manager.steps(), [3, 4])
        _same("restore", manager.restore(again), 4)
        manager.save(5, again)
        for step in manager.steps():
            _same(f"problems that verify finds in step {step}", checkpoint.verify(manager.path(step)).problems, ())
    _same("what was restored", (torch.equal(again["x"], app["x"]), again["n"]), (True, 4))


CHECKS: tuple[Check, ...] = (
    what_is_written_is_read,
    empty_files_and_many_buffers,
    memory_of_buffers_is_used_again,
    large_files,
    spans_are_filled,
    a_file_that_ends_too_soon_is_corrupt,
    what_is_not_there,
    names_change_at_once,
    directories,
    published_over_what_was_there,
    published_only_where_nothing_is,
    one_of_many_publishes,
    its_url_opens_it,
)
"""All checks, for a test that is to show each by its name."""


def _made(make: MakeStorage) -> Storage:
    storage = make()
    storage.make()
    return storage


def _views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def _large() -> bytes:
    return torch.arange(_LARGE_BYTES // 4, dtype=torch.int32).numpy().tobytes()


def _same(what: str, found: object, required: object) -> None:
    if found != required:
        raise AssertionError(f"{what}: found {_short(found)}, required {_short(required)}")


def _gives(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        raise AssertionError(f"{what}: found {type(error).__name__}: {error}, required no error") from error


def _raises(kind: type[Exception], what: str, call: Callable[[], object]) -> None:
    try:
        found = f"{_short(call())}"
    except kind:
        return
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    raise AssertionError(f"{what}: found {found}, required {kind.__name__}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
