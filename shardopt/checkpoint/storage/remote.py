"""Storage on object stores, and on any other file system of fsspec.

A PUT is atomic and durable there, so the one of the manifest is the commit: nothing is renamed. Every request has a
deadline and is repeated (`retry.py`). Large files go through the file system's own file objects; obstore's
(`object_stores/`) send several parts at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]  # has no type hints
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]  # as above

from shardopt.checkpoint.storage.base import ReadInto, Span, Storage, contiguous_runs, too_short
from shardopt.checkpoint.storage.open import flat_place
from shardopt.checkpoint.storage.retry import Requests
from shardopt.errors import CheckpointError
from shardopt.runtime.signatures import signature

PART_BYTES = 8 << 20  # S3 takes none below 5 MiB but the last
_IN_PLACE_BYTES = 1 << 20  # smaller buffers are joined: each call costs as much as some hundred KiB of a copy
_MOST_PARTS = 5000  # some stores take fewer than S3


class RemoteStorage(Storage):
    """A prefix of an object store, or a directory of any other file system of fsspec."""

    is_remote = True

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._root = fs, path.rstrip("/")
        self._requests = Requests(fs)
        self._unconfirmed: set[str] = set()  # names of files whose publication may have failed or not
        self.url = fs.unstrip_protocol(path)

    @property
    def place(self) -> Mapping[str, str]:
        return _place_of(self._fs)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _request(self, doing: str, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._requests.call(f"{doing} {self.url}/{name}", method, self._path(name), *args, **kwargs)

    def make(self) -> None:
        self._requests.call(f"make {self.url}", "makedirs", self._root, exist_ok=True)

    def names(self) -> list[str]:
        self._fs.invalidate_cache()  # others write too, and a stale listing would hide what they committed
        try:
            listed = self._requests.call(f"list {self.url}", "ls", self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in listed if path.rstrip("/") != self._root)

    def size(self, name: str) -> int:
        self._fs.invalidate_cache()
        info = self._request("look at", "info", name)
        if info["type"] != "file":
            raise FileNotFoundError(self._path(name))
        return int(info["size"])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._read(name, begin, end, end) if end is None or end > begin else b""

    def read_rest(self, name: str, begin: int, size: int) -> bytes:
        return self._read(name, begin, size + 1, size)

    def _read(self, name: str, begin: int, end: int | None, expected_end: int | None) -> bytes:
        """Reads a range; asks for the file's size where the answer does not end as expected."""

        def read_once() -> bytes:
            try:
                data = bytes(self._requests.once("cat_file", self._path(name), start=begin, end=end))
            except OSError as error:
                if _is_refusal(error) and self.size(name) <= begin:
                    return b""
                raise
            if expected_end is None or len(data) != expected_end - begin:
                size = self.size(name)
                wanted = max((size if end is None else min(end, size)) - begin, 0)
                if len(data) != wanted:
                    raise ConnectionError(f"{len(data)} bytes where {wanted} were requested")
            return data

        return self._requests.repeat(f"read {self.url}/{name}", read_once)

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadInto]:
        yield partial(self._read_into, name)

    def _read_into(self, name: str, spans: Sequence[Span]) -> None:
        joined = contiguous_runs(spans)
        remaining = [(offset, buffers) for offset, buffers in joined if any(buffer.nbytes for buffer in buffers)]

        def read_remaining() -> None:
            """Reads all ranges at once; after a failure, requests only the missing ones again."""
            begins = [offset for offset, _ in remaining]
            ends = [offset + sum(buffer.nbytes for buffer in buffers) for offset, buffers in remaining]
            paths = [self._path(name)] * len(remaining)
            answers = self._requests.once("cat_ranges", paths, begins, ends, on_error="return")
            failed, errors = [], []
            for (offset, buffers), end, answer in zip(remaining, ends, answers, strict=True):
                is_error = isinstance(answer, BaseException)
                error = answer if is_error else self._length_error(name, offset, end, answer)
                if error is not None:
                    failed.append((offset, buffers))
                    errors.append(error)
                    continue
                rest = memoryview(answer)
                for buffer in buffers:
                    buffer[:], rest = rest[: buffer.nbytes], rest[buffer.nbytes :]
            remaining[:] = failed
            if errors:
                raise self._range_error(name, ends[-1]) if _is_refusal(errors[0]) else errors[0]

        if remaining:
            self._requests.repeat(f"read {self.url}/{name}", read_remaining)

    def _length_error(self, name: str, begin: int, end: int, answer: bytes) -> Exception | None:
        """Returns the error for an answer whose length is not that of the range; None if it is."""
        if len(answer) == end - begin:
            return None
        if self.size(name) < end:
            return too_short(self._path(name), begin + len(answer))
        return ConnectionError(f"{len(answer)} bytes where {end - begin} were requested")

    def _range_error(self, name: str, end: int) -> Exception:
        """Returns the error for a range that the store refuses, for example past the file's end."""
        size = self.size(name)
        return too_short(self._path(name), size) if size < end else OSError(errno.EIO, "the store refused a range")

    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        """Writes as `Storage.write` does; sends a failed file again if `buffers` can be iterated again."""
        doing, once = f"write {self.url}/{name}", isinstance(buffers, Iterator)
        if once:
            return self._write_once(name, buffers)
        return self._requests.repeat(doing, lambda: self._write_once(name, buffers))

    def _write_once(self, name: str, buffers: Iterable[memoryview]) -> int:
        nbytes = getattr(buffers, "nbytes", 0)
        part_bytes = _part_bytes(nbytes)
        sent: Iterable[bytearray | memoryview]
        stays = not getattr(buffers, "reuses_memory", True)  # until this returns; see `Storage.write`
        if nbytes > part_bytes and getattr(self._fs, "sends_in_place", False) and stays:
            sent = _in_place(iter(buffers), part_bytes)
        else:
            parts = _parts(iter(buffers), part_bytes)
            head = list(islice(parts, 2))
            if len(head) < 2:
                whole = bytes(head[0]) if head else b""
                self._request("write", "pipe_file", name, whole)
                return len(whole)
            sent = _chain_releasing(head, parts)
        total = self._stream(self._path(name), part_bytes, sent)
        try:
            stored_bytes = self.size(name)
        except FileNotFoundError:
            stored_bytes = 0
        if stored_bytes != total:
            raise ConnectionError(f"the store has {stored_bytes} bytes where {total} were sent")
        return total

    def _stream(self, path: str, part_bytes: int, parts: Iterable[bytearray | memoryview]) -> int:
        """Writes a large file through the file system's own file object, which holds one part at a time or a few."""
        file = self._requests.within_deadline(lambda: self._fs.open(path, "wb", block_size=part_bytes))
        seconds = getattr(file, "deadline_seconds", None)
        total = 0
        try:
            for part in parts:
                self._requests.within_deadline(partial(file.write, part), seconds)
                total += len(part)
            self._requests.within_deadline(file.close, seconds)
        except BaseException:
            # Closing would make a file of the bytes so far; so would the destruction of the object.
            with suppress(Exception):
                discard = getattr(file, "discard", None)
                if discard is not None:
                    self._requests.within_deadline(discard)
            with suppress(AttributeError):  # a file object whose `closed` cannot be set has nothing to hold back
                file.closed = True
            raise
        return total

    def publish(self, name: str, data: bytes) -> None:
        self._request("write", "pipe_file", name, data)

    def publish_new(self, name: str, data: bytes) -> bool:
        condition = _condition_of(self._fs)
        if condition:
            try:
                self._commit(name, data, **condition)
                return bool(getattr(self._fs, "has_conditions", True))
            except FileExistsError:
                self._require_own(name, data)
                return bool(getattr(self._fs, "has_conditions", True))
            except BaseException as error:  # also an interrupt, which ends the wait and not the request
                if not isinstance(error, CheckpointError) or not _is_unmet_or_unknown(self._fs, error):
                    self._unconfirmed.add(name)
                    raise
        if self.exists(name):
            self._require_own(name, data)
            return False
        try:
            self._commit(name, data)
        except BaseException:
            self._unconfirmed.add(name)
            raise
        return False

    def _commit(self, name: str, data: bytes, **condition: Any) -> None:
        path = self._path(name)
        self._requests.repeat(
            f"write {self.url}/{name}", lambda: self._requests.once("pipe_file", path, data, **condition), commits=True
        )

    def may_appear(self, name: str) -> bool:
        return name in self._unconfirmed

    def _require_own(self, name: str, data: bytes) -> None:
        """Raises FileExistsError unless an earlier attempt succeeded and only its answer was lost."""
        try:
            is_own = self.read_rest(name, 0, len(data)) == data
        except FileNotFoundError:
            is_own = False  # the file there has just gone
        if not is_own:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._path(name))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._request("remove", "rm_file", name)

    def remove_if_empty(self) -> None:
        if not self.names():
            with suppress(OSError):  # an object store has nothing by this name
                self._requests.once("rmdir", self._root)

    def parent(self) -> tuple[Storage, str] | None:
        directory, _, name = self._root.rpartition("/")
        return (RemoteStorage(self._fs, directory), name) if directory and name else None

    def as_file(self) -> tuple[Storage, str] | None:
        directory, _, name = self._root.rpartition("/")
        parent = RemoteStorage(self._fs, directory)
        return (parent, name) if directory and parent.exists(name) else None

    def child(self, name: str) -> Storage:
        return RemoteStorage(self._fs, self._path(name))


def _place_of(fs: Any) -> Mapping[str, str]:
    """Returns which of several stores a file system is."""
    if isinstance(getattr(fs, "fs", None), AbstractFileSystem):
        return _place_of(fs.fs)  # a file system that wraps another
    place: Mapping[str, str] | None = getattr(fs, "place", None)
    return flat_place(getattr(fs, "storage_options", {})) if place is None else place


def _condition_of(fs: Any) -> dict[str, Any]:
    """Returns the arguments with which `pipe_file` writes only if no file exists; empty if the store has none.

    fsspec's own way to do it (`mode="create"`, of its base classes) looks first and then writes.
    """
    if isinstance(getattr(fs, "fs", None), AbstractFileSystem):
        return _condition_of(fs.fs)  # a file system that wraps another
    for kind in type(fs).__mro__:
        if kind in (AsyncFileSystem, AbstractFileSystem):
            break
        for method in ("_pipe_file", "pipe_file"):
            arguments = signature(vars(kind)[method]).parameters if method in vars(kind) else {}
            if "mode" in arguments:  # s3fs, gcsfs, memory
                return {"mode": "create"}
            if "overwrite" in arguments:  # adlfs
                return {"overwrite": False}
    return {}


def _is_unmet_or_unknown(fs: Any, error: CheckpointError) -> bool:
    """Whether a store may have refused a request for its condition: it is not met, or the store knows no conditions."""
    cause, numbers = error.__cause__, getattr(fs, "refuses_conditions_by", (errno.EINVAL, errno.ENOSYS))
    return isinstance(cause, OSError) and cause.errno in numbers


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EINVAL


def _part_bytes(nbytes: int) -> int:
    """Returns the size of the parts of a file: S3 accepts at most 10,000."""
    return PART_BYTES * max(1, -(-nbytes // (_MOST_PARTS * PART_BYTES)))


def _parts(buffers: Iterator[memoryview], part_bytes: int) -> Iterator[bytearray]:
    """Joins buffers into parts of equal size, but for the last, each in memory of its own."""
    part = bytearray()
    for buffer in buffers:
        while buffer.nbytes:
            head = buffer[: part_bytes - len(part)]
            part += head
            buffer = buffer[head.nbytes :]
            if len(part) == part_bytes:
                yield part
                part = bytearray()
    if part:
        yield part


def _in_place(buffers: Iterator[memoryview], part_bytes: int) -> Iterator[bytearray | memoryview]:
    """Yields large buffers from where they are, at most a part at a time, and small ones joined."""
    joined = bytearray()
    for buffer in buffers:
        if len(joined) >= _IN_PLACE_BYTES or (joined and buffer.nbytes >= _IN_PLACE_BYTES):
            yield joined
            joined = bytearray()
        if buffer.nbytes >= _IN_PLACE_BYTES:
            yield from (buffer[begin : begin + part_bytes] for begin in range(0, buffer.nbytes, part_bytes))
        else:
            joined += buffer
    if joined:
        yield joined


def _chain_releasing(head: list[bytearray], rest: Iterable[bytearray]) -> Iterator[bytearray]:
    """Yields the parts of `head`, releasing each, and then the rest."""
    while head:
        yield head.pop(0)
    yield from rest
