"""A file system in memory, as `shardopt.checkpoint.storage.local` uses the real one: what was not flushed may be lost.

The product's own code for local storage runs over it: `SimulatedOs` stands in the place of its `os`.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import stat
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.simulation.tasks import Scheduler

_SECONDS = 60e-6  # of an operation


class Inode:
    """A file or a directory, and what of it is flushed to the disk."""

    def __init__(self, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.data = bytearray()
        self.flushed_data = b""
        self.entries: dict[str, Inode] = {}
        self.flushed_entries: dict[str, Inode] = {}
        self.unreadable = False
        self.written = 0.0  # when, in seconds of the simulation

    def flush(self) -> None:
        self.flushed_data, self.flushed_entries = bytes(self.data), dict(self.entries)

    def lose(self, draw: Callable[[], float]) -> None:
        """Loses power: of what was not flushed any part may be there afterwards."""
        if self.is_directory:
            names = sorted({*self.entries, *self.flushed_entries})
            for name in names:
                now, then = self.entries.get(name), self.flushed_entries.get(name)
                kept = now if now is then or draw() < 0.5 else then
                if kept is None:
                    self.entries.pop(name, None)
                else:
                    self.entries[name] = kept
            for name in names:
                if name in self.entries:
                    self.entries[name].lose(draw)
        elif bytes(self.data) != self.flushed_data:
            kept_bytes = int(draw() * (len(self.data) + 1))
            self.data = bytearray(self.data[:kept_bytes] if draw() < 0.7 else self.flushed_data)
        self.flush()


class FileSystem:
    """The files that all hosts of a job see.

    Attributes:
        failing: process name and operation's number → the error number of the operation.
        slow: process name → how many times longer its operations take.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.root = Inode(is_directory=True)
        self._open: dict[int, Inode] = {}
        self._next_fd = 1000
        self.failing: dict[tuple[str, int], int] = {}
        self.slow: dict[str, float] = {}
        self._operations: dict[str, int] = {}

    def operate(self, what: str, path: str) -> None:
        """Takes time, and may fail or be the last thing that a process does."""
        scheduler = self.scheduler
        assert scheduler.current is not None
        name = scheduler.current.process.name
        scheduler.operate(f"{what} {path}", _SECONDS * self.slow.get(name, 1.0))
        if self.failing:
            self._operations[name] = count = self._operations.get(name, 0) + 1
            number = self.failing.get((name, count))
            if number is not None:
                scheduler.note(name, f"{errno.errorcode[number]} of {what} {path}")
                raise OSError(number, os.strerror(number), path)

    def find(self, path: str) -> Inode | None:
        inode = self.root
        for name in path.strip("/").split("/"):
            if name:
                below = inode.entries.get(name) if inode.is_directory else None
                if below is None:
                    return None
                inode = below
        return inode

    def get(self, path: str) -> Inode:
        inode = self.find(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode

    def directory_of(self, path: str) -> tuple[Inode, str]:
        directory, name = posixpath.split(path)
        inode = self.get(directory)
        if not inode.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return inode, name

    def create(self, path: str, exclusively: bool) -> Inode:
        directory, name = self.directory_of(path)
        if name in directory.entries and exclusively:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        inode = directory.entries.setdefault(name, Inode(is_directory=False))
        inode.written = self.scheduler.now
        return inode

    def readable(self, path: str) -> Inode:
        inode = self.get(path)
        if inode.is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if inode.unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return inode

    def open_fd(self, path: str, flags: int) -> int:
        self.operate("open", path)
        inode = self.create(path, exclusively=True) if flags & os.O_CREAT else self.get(path)
        if not inode.is_directory and not flags & os.O_CREAT:
            self.readable(path)
        self._next_fd += 1
        self._open[self._next_fd] = inode
        return self._next_fd

    def inode_of(self, fd: int) -> Inode:
        return self._open[fd]

    def close_fd(self, fd: int) -> None:
        self._open.pop(fd, None)

    def lose_power(self) -> None:
        """Loses what was not flushed, or parts of it. No process is there any more."""
        self.scheduler.note("storage", "loses power")
        self.root.lose(self.scheduler.random.random)
        self._open.clear()


class _File(io.BytesIO):
    """What `open` returns: read as a whole, or written to a new file."""

    def __init__(self, files: FileSystem, path: str, inode: Inode, writes: bool) -> None:
        super().__init__(b"" if writes else bytes(inode.data))
        self._files, self._path, self._inode, self._writes = files, path, inode, writes
        files._next_fd += 1
        self._fd = files._next_fd
        files._open[self._fd] = inode

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        if self._writes and bytes(self._inode.data) != self.getvalue():
            self._files.operate("write", self._path)
            self._inode.data = bytearray(self.getvalue())

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
            finally:
                self._files.close_fd(self._fd)
                super().close()


class SimulatedOs:
    """`os`, as far as local storage uses it, over simulated files."""

    O_RDONLY, O_WRONLY, O_CREAT, O_EXCL = os.O_RDONLY, os.O_WRONLY, os.O_CREAT, os.O_EXCL
    strerror = staticmethod(os.strerror)
    fsencode = staticmethod(os.fsencode)
    fspath = staticmethod(os.fspath)

    def __init__(self, files: FileSystem) -> None:
        self._files = files
        self.path = SimpleNamespace(
            join=posixpath.join,
            abspath=posixpath.abspath,
            dirname=posixpath.dirname,
            basename=posixpath.basename,
            split=posixpath.split,
            isdir=lambda path: (found := files.find(path)) is not None and found.is_directory,
            isfile=lambda path: (found := files.find(path)) is not None and not found.is_directory,
            ismount=lambda path: path == "/",
            lexists=lambda path: files.find(path) is not None,
            islink=lambda path: False,
        )

    def open_file(self, path: str, mode: str = "r") -> _File:
        """In the place of the built-in `open`."""
        self._files.operate("open", path)
        if mode == "rb":
            return _File(self._files, path, self._files.readable(path), writes=False)
        assert mode == "xb", mode
        return _File(self._files, path, self._files.create(path, exclusively=True), writes=True)

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        return self._files.open_fd(path, flags)

    def close(self, fd: int) -> None:
        self._files.close_fd(fd)

    def fsync(self, fd: int) -> None:
        self._files.operate("fsync", "")
        self._files.inode_of(fd).flush()

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self._files.operate("write", "")
        inode = self._files.inode_of(fd)
        inode.written, data = self._files.scheduler.now, inode.data
        begin = len(data)
        for buffer in buffers:
            data += buffer
        return len(data) - begin

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._files.operate("read", "")
        inode = self._files.inode_of(fd)
        if inode.unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest = memoryview(bytes(inode.data))[offset:]
        total = 0
        for buffer in buffers:
            count = min(buffer.nbytes, rest.nbytes)
            buffer.cast("B")[:count] = rest[:count]
            rest, total = rest[count:], total + count
        return total

    def stat(self, path: str) -> Any:
        self._files.operate("stat", path)
        inode = self._files.get(path)
        kind = stat.S_IFDIR if inode.is_directory else stat.S_IFREG
        written = 1e9 + inode.written
        return SimpleNamespace(st_mode=kind, st_size=len(inode.data), st_mtime=written, st_ctime=written)

    def statvfs(self, path: str) -> Any:
        self._files.get(path)
        return SimpleNamespace(f_bavail=0, f_frsize=4096, f_files=0)

    def listdir(self, path: str) -> list[str]:
        self._files.operate("list", path)
        inode = self._files.get(path)
        if not inode.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return list(inode.entries)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._files.operate("make", path)
        inode = self._files.root
        for name in path.strip("/").split("/"):
            inode = inode.entries.setdefault(name, Inode(is_directory=True))

    def link(self, source: str, target: str) -> None:
        self._files.operate("link", target)
        inode = self._files.get(source)
        directory, name = self._files.directory_of(target)
        if name in directory.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        directory.entries[name] = inode

    def replace(self, source: str, target: str) -> None:
        self._files.operate("replace", target)
        inode = self._files.get(source)
        directory, name = self._files.directory_of(target)
        directory.entries[name] = inode
        old, old_name = self._files.directory_of(source)
        del old.entries[old_name]

    def unlink(self, path: str) -> None:
        self._files.operate("unlink", path)
        self._files.get(path)
        directory, name = self._files.directory_of(path)
        del directory.entries[name]

    def rmdir(self, path: str) -> None:
        self._files.operate("rmdir", path)
        if self._files.get(path).entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        directory, name = self._files.directory_of(path)
        del directory.entries[name]
