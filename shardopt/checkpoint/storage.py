"""Where checkpoints lie: a local directory, or anything that fsspec opens. The only file that knows the difference.

A storage is one directory (a prefix, on an object store). Names are relative to it.
"""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import fsspec  # type: ignore[import-untyped]  # has no type hints
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # as above

from shardopt.errors import CheckpointError, CorruptionError, Problem, ShardoptError

_BUFFERS_PER_CALL = min(os.sysconf("SC_IOV_MAX"), 1024)


class Span(NamedTuple):
    """Bytes of a file, from `offset` on, and the writable memory that they are wanted in."""

    offset: int
    memory: memoryview


class Storage(ABC):
    """A directory of immutable files: each is written once, as a whole."""

    url: str
    is_remote = False
    """Whether reading goes over a network, so that ranks do better to read once and share."""

    @abstractmethod
    def make(self) -> None:
        """Makes the directory, where there are such things."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is in the directory, sorted; empty where there is none."""

    @abstractmethod
    def size(self, name: str) -> int:
        """A file's bytes. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """A file's bytes from `begin` up to `end`; fewer where it ends before. Raises FileNotFoundError."""

    @abstractmethod
    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        """Fills the memory of spans, which are in ascending order. Raises CorruptionError if the file ends before."""

    @abstractmethod
    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        """Writes a file as a whole; what it holds is durable on return. Returns its bytes."""

    @abstractmethod
    def publish(self, name: str, data: bytes) -> None:
        """Writes a small file in one atomic step: at no time does a part of it exist under its name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""

    def retract(self, name: str) -> None:
        """Removes a file, if it is there; that it is gone is durable on return."""
        self.remove(name)

    @abstractmethod
    def remove_if_empty(self) -> None:
        """Removes the directory, where there are such things and it holds nothing."""

    @abstractmethod
    def child(self, name: str) -> Storage:
        """The directory of that name within this one."""

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True


def storage_of(url: str | os.PathLike[str], durable: bool = True) -> Storage:
    """The storage at a path or at any URL that fsspec knows, with fsspec's own configuration and credentials.

    Args:
        durable: whether local files and directories are flushed to the disk before a write returns.
    """
    fs, path = fsspec.core.url_to_fs(os.fspath(url))
    return LocalStorage(path, durable) if isinstance(fs, LocalFileSystem) else RemoteStorage(fs, path)


@contextmanager
def telling(doing: str) -> Iterator[None]:
    """Turns an error of the operating system, or of a file system of fsspec, into a CheckpointError that says more."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardoptError):
            raise
        raise CheckpointError(f"cannot {doing}: {error}") from error


class LocalStorage(Storage):
    """A directory of a file system with atomic renames, POSIX durability and vectored I/O."""

    def __init__(self, path: str, durable: bool = True) -> None:
        self.url = os.path.abspath(path)
        self._durable = durable

    def _path(self, name: str) -> str:
        return os.path.join(self.url, name)

    def make(self) -> None:
        missing = [self.url]
        while not os.path.isdir(os.path.dirname(missing[-1])):
            missing.append(os.path.dirname(missing[-1]))
        os.makedirs(self.url, exist_ok=True)
        for path in missing:
            self._sync_directory(os.path.dirname(path))  # a new name is in the directory above it

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.url))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int:
        try:
            found = os.stat(self._path(name))
        except NotADirectoryError:
            raise FileNotFoundError(self._path(name)) from None
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(f"{self._path(name)} is no file")
        return found.st_size

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with open(self._path(name), "rb") as file:
            file.seek(begin)
            return file.read() if end is None else file.read(end - begin)

    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        fd = os.open(self._path(name), os.O_RDONLY)
        try:
            for offset, buffers in _runs(spans):
                self._read_run(fd, name, offset, buffers)
        finally:
            os.close(fd)

    def _read_run(self, fd: int, name: str, offset: int, buffers: list[memoryview]) -> None:
        while buffers:
            got = os.preadv(fd, buffers, offset)
            if got == 0 and any(buffer.nbytes for buffer in buffers):
                raise _too_short(self._path(name), offset)
            offset += got
            buffers = _skip(buffers, got)

    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        fd = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        total = 0
        try:
            batch: list[memoryview] = []
            for buffer in buffers:
                batch.append(buffer)
                if len(batch) == _BUFFERS_PER_CALL:
                    total += _write_all(fd, batch)
                    batch = []
            total += _write_all(fd, batch)
            self._sync(fd)
        finally:
            os.close(fd)
        self._sync_directory(self.url)
        return total

    def publish(self, name: str, data: bytes) -> None:
        temporary = self._path(f".{name}.tmp")
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            self._sync(file.fileno())
        os.replace(temporary, self._path(name))
        self._sync_directory(self.url)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def retract(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))
            self._sync_directory(self.url)

    def remove_if_empty(self) -> None:
        try:
            os.rmdir(self.url)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def child(self, name: str) -> Storage:
        return LocalStorage(self._path(name), self._durable)

    def _sync(self, fd: int) -> None:
        if self._durable:
            os.fsync(fd)

    def _sync_directory(self, path: str) -> None:
        """Makes the names in a directory durable; without it a crash may lose a file whose bytes are safe."""
        fd = os.open(path, os.O_RDONLY)
        try:
            self._sync(fd)
        finally:
            os.close(fd)


class RemoteStorage(Storage):
    """A prefix of an object store, or of any other file system of fsspec. A PUT is atomic and durable there."""

    is_remote = True

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._root = fs, path.rstrip("/")
        self.url = fs.unstrip_protocol(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def make(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        self._fs.invalidate_cache()  # others write too, and a stale listing would hide what they committed
        try:
            listed = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in listed)

    def size(self, name: str) -> int:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path(name))
        if info["type"] != "file":
            raise FileNotFoundError(self._path(name))
        return int(info["size"])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        return bytes(self._fs.cat_file(self._path(name), start=begin, end=end))

    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        runs = list(_runs(spans))
        begins = [offset for offset, _ in runs]
        ends = [offset + sum(buffer.nbytes for buffer in buffers) for offset, buffers in runs]
        parts = self._fs.cat_ranges([self._path(name)] * len(runs), begins, ends, on_error="raise")
        for (offset, buffers), end, part in zip(runs, ends, parts, strict=True):
            if len(part) != end - offset:
                raise _too_short(self._path(name), offset + len(part))
            left = memoryview(part)
            for buffer in buffers:
                buffer[:], left = left[: buffer.nbytes], left[buffer.nbytes :]

    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        total = 0
        with self._fs.open(self._path(name), "wb") as file:
            for buffer in buffers:
                file.write(buffer)
                total += buffer.nbytes
        return total

    def publish(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(name), data)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_if_empty(self) -> None:
        if not self.names():
            with suppress(OSError):  # an object store has nothing by this name
                self._fs.rmdir(self._root)

    def child(self, name: str) -> Storage:
        return RemoteStorage(self._fs, self._path(name))


def _runs(spans: Sequence[Span]) -> Iterator[tuple[int, list[memoryview]]]:
    """Spans that follow one another without a gap, put together: offset, and memory for the bytes from there on."""
    start = 0
    while start < len(spans):
        stop, end = start, spans[start].offset
        while stop < len(spans) and stop - start < _BUFFERS_PER_CALL and spans[stop].offset == end:
            end += spans[stop].memory.nbytes
            stop += 1
        yield spans[start].offset, [span.memory for span in spans[start:stop]]
        start = stop


def _write_all(fd: int, buffers: list[memoryview]) -> int:
    total = sum(buffer.nbytes for buffer in buffers)
    buffers = [buffer for buffer in buffers if buffer.nbytes]
    while buffers:
        buffers = _skip(buffers, os.writev(fd, buffers))
    return total


def _skip(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of buffers after so many bytes of them are done."""
    for i, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[i + 1 :]]
        nbytes -= buffer.nbytes
    return []


def _too_short(path: str, offset: int) -> CorruptionError:
    problem = Problem(path, f"its end before byte {offset}", "all of the file", "restore from another checkpoint")
    return CorruptionError("a file is shorter than it was", [problem])
