"""Checkpoints on object stores, and on any other file system of fsspec.

A PUT is atomic and durable there, so the one of the manifest is the commit: nothing is renamed. Every request has a
deadline and is repeated (`retry.py`); large files go in parts, several at a time (`multipart.py`, for S3), or through
the file system's own way of writing large files.
"""

from __future__ import annotations

import errno
import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]  # has no type hints
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]  # as above

from shardopt.checkpoint.storage.base import ReadInto, Span, Storage, runs, too_short
from shardopt.checkpoint.storage.multipart import PART_BYTES, has_multipart, upload
from shardopt.checkpoint.storage.retry import Requests
from shardopt.errors import CheckpointError


class RemoteStorage(Storage):
    """A prefix of an object store, or a directory of any other file system of fsspec."""

    is_remote = True

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._root = fs, path.rstrip("/")
        self._requests = Requests(fs)
        self._given_up: set[str] = set()  # names of files whose publication failed, as far as one can tell
        self.url = fs.unstrip_protocol(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _ask(self, doing: str, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
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
        info = self._ask("look at", "info", name)
        if info["type"] != "file":
            raise FileNotFoundError(self._path(name))
        return int(info["size"])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= begin:
            return b""

        def read_once() -> bytes:
            try:
                found = bytes(self._requests.once("cat_file", self._path(name), start=begin, end=end))
            except OSError as error:
                if _is_refusal(error) and self.size(name) <= begin:
                    return b""
                raise
            if end is None or len(found) < end - begin:
                size = self.size(name)
                wanted = max((size if end is None else min(end, size)) - begin, 0)
                if len(found) != wanted:
                    raise ConnectionError(f"{len(found)} bytes where {wanted} were asked for")
            return found

        return self._requests.repeat(f"read {self.url}/{name}", read_once)

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadInto]:
        yield partial(self._read_into, name)

    def _read_into(self, name: str, spans: Sequence[Span]) -> None:
        left = [(offset, buffers) for offset, buffers in runs(spans) if any(buffer.nbytes for buffer in buffers)]

        def read_what_is_left() -> None:
            """All ranges at once; those that came are not asked for again when others have failed."""
            begins = [offset for offset, _ in left]
            ends = [offset + sum(buffer.nbytes for buffer in buffers) for offset, buffers in left]
            paths = [self._path(name)] * len(left)
            parts = self._requests.once("cat_ranges", paths, begins, ends, on_error="return")
            failed, errors = [], []
            for (offset, buffers), end, part in zip(left, ends, parts, strict=True):
                error = part if isinstance(part, BaseException) else self._short(name, offset, end, part)
                if error is not None:
                    failed.append((offset, buffers))
                    errors.append(error)
                    continue
                rest = memoryview(part)
                for buffer in buffers:
                    buffer[:], rest = rest[: buffer.nbytes], rest[buffer.nbytes :]
            left[:] = failed
            if errors:
                raise self._past_the_end(name, ends[-1]) if _is_refusal(errors[0]) else errors[0]

        if left:
            self._requests.repeat(f"read {self.url}/{name}", read_what_is_left)

    def _short(self, name: str, begin: int, end: int, part: bytes) -> Exception | None:
        """What is wrong with an answer that has not the length that was asked for."""
        if len(part) == end - begin:
            return None
        if self.size(name) < end:
            return too_short(self._path(name), begin + len(part))
        return ConnectionError(f"{len(part)} bytes where {end - begin} were asked for")

    def _past_the_end(self, name: str, end: int) -> Exception:
        """What to say of a range that the store refuses; it does so where the file ends before the range begins."""
        size = self.size(name)
        return too_short(self._path(name), size) if size < end else OSError(errno.EIO, "the store refused a range")

    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        """As in `Storage`. If `buffers` can be iterated again, a file that failed as a whole is sent again."""
        doing, once = f"write {self.url}/{name}", isinstance(buffers, Iterator)
        if once:
            return self._write_once(name, buffers)
        return self._requests.repeat(doing, lambda: self._write_once(name, buffers))

    def _write_once(self, name: str, buffers: Iterable[memoryview]) -> int:
        path, parts = self._path(name), _parts(iter(buffers))
        head = list(islice(parts, 2))
        if len(head) < 2:
            whole = bytes(head[0]) if head else b""
            self._ask("write", "pipe_file", name, whole)
            return len(whole)
        if has_multipart(self._fs):
            total = upload(self._fs, self._requests, path, _after(head, parts))
        else:
            total = self._stream(path, _after(head, parts))
        try:
            found = self.size(name)
        except FileNotFoundError:
            found = 0
        if found != total:
            raise ConnectionError(f"the store has {found} bytes where {total} were sent")
        return total

    def _stream(self, path: str, parts: Iterable[bytearray]) -> int:
        """Writes a large file through the file system's own file object, which holds a part at a time."""
        file = self._requests.within_deadline(lambda: self._fs.open(path, "wb", block_size=PART_BYTES))
        total = 0
        try:
            for part in parts:
                self._requests.within_deadline(lambda part=part: file.write(part))  # type: ignore[misc]  # bound now
                total += len(part)
            self._requests.within_deadline(file.close)
        except BaseException:
            # Closing would make a file of what has come so far; so would the object's end.
            with suppress(Exception):
                discard = getattr(file, "discard", None)
                if discard is not None:
                    self._requests.within_deadline(discard)
            with suppress(AttributeError):  # a file object whose `closed` cannot be set has nothing to hold back
                file.closed = True
            raise
        return total

    def publish(self, name: str, data: bytes) -> None:
        self._ask("write", "pipe_file", name, data)

    def publish_new(self, name: str, data: bytes) -> bool:
        condition = _condition_of(self._fs)
        if condition:
            try:
                self._ask("write", "pipe_file", name, data, **condition)
                return True
            except FileExistsError:
                self._require_own(name, data)
                return True
            except CheckpointError as error:
                if not _is_unmet_or_unknown(error):
                    self._given_up.add(name)
                    raise
        if self.exists(name):
            self._require_own(name, data)
            return False
        try:
            self.publish(name, data)
        except BaseException:
            self._given_up.add(name)
            raise
        return False

    def may_appear(self, name: str) -> bool:
        return name in self._given_up

    def _require_own(self, name: str, data: bytes) -> None:
        """Raises FileExistsError unless an attempt was carried out after all, and only its answer lost."""
        try:
            is_own = self.read(name) == data
        except FileNotFoundError:
            is_own = False  # what stood there has just gone
        if not is_own:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._path(name))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask("remove", "rm_file", name)

    def remove_if_empty(self) -> None:
        if not self.names():
            with suppress(OSError):  # an object store has nothing by this name
                self._requests.once("rmdir", self._root)

    def as_file(self) -> tuple[Storage, str] | None:
        directory, _, name = self._root.rpartition("/")
        parent = RemoteStorage(self._fs, directory)
        return (parent, name) if directory and parent.exists(name) else None

    def child(self, name: str) -> Storage:
        return RemoteStorage(self._fs, self._path(name))


def _condition_of(fs: Any) -> dict[str, Any]:
    """What to ask of `pipe_file` so that it writes only where nothing is; empty where the store cannot tell.

    fsspec's own way to do it (`mode="create"`, of its base classes) looks first and then writes.
    """
    if isinstance(getattr(fs, "fs", None), AbstractFileSystem):
        return _condition_of(fs.fs)  # a file system that wraps another
    for kind in type(fs).__mro__:
        if kind in (AsyncFileSystem, AbstractFileSystem):
            break
        for method in ("_pipe_file", "pipe_file"):
            arguments = inspect.signature(vars(kind)[method]).parameters if method in vars(kind) else {}
            if "mode" in arguments:  # s3fs, gcsfs, memory
                return {"mode": "create"}
            if "overwrite" in arguments:  # adlfs
                return {"overwrite": False}
    return {}


def _is_unmet_or_unknown(error: CheckpointError) -> bool:
    """Whether a store may have refused a request for its condition: it is not met, or no condition is known there."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EINVAL, errno.ENOSYS)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EINVAL


def _parts(buffers: Iterator[memoryview]) -> Iterator[bytearray]:
    """The bytes of buffers in parts of `PART_BYTES`, which double every 2,500: S3 takes no more than 10,000."""
    part, number, limit = bytearray(), 0, PART_BYTES
    for buffer in buffers:
        while buffer.nbytes:
            took = buffer[: limit - len(part)]
            part += took
            buffer = buffer[took.nbytes :]
            if len(part) == limit:
                yield part
                number += 1
                part, limit = bytearray(), PART_BYTES << number // 2500
    if part:
        yield part


def _after(head: list[bytearray], rest: Iterable[bytearray]) -> Iterator[bytearray]:
    """First what is in `head`, which nobody holds on to then."""
    while head:
        yield head.pop(0)
    yield from rest
