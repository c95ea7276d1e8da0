"""Storage on local disks, and on anything mounted as one."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from shardopt.checkpoint.storage.base import (
    BUFFERS_PER_CALL,
    FLUSH,
    ReadInto,
    Span,
    Storage,
    contiguous_runs,
    skip,
    too_short,
    unreadable,
)
from shardopt.runtime.late import late
from shardopt.world import world

if TYPE_CHECKING:
    from shardopt.checkpoint.storage import direct
else:
    direct = late("shardopt.checkpoint.storage.direct")

_log = logging.getLogger("shardopt.checkpoint")

_DIRECT_BYTES = 8 << 20  # of a batch from which on it goes past the page cache
_BATCH_BYTES = 16 << 20  # for the disk at a time; more would hold on to memory that was made only to be written
_HOT_BYTES = 512 << 10  # copied in one call where the disk is not waited for; then still in the core's cache
# Errors of a disk, or the file system on it, that has lost bytes; not of one that is out of reach.
_LOST = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}
_durably_named: set[str] = set()  # directories that this process has made durable, with all above them
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # as `_write_temporary` names them

_CACHESTAT = 451  # the system call, which has no name in libc yet: pages of a file in the page cache, and four counts
_SYNC_FILE_RANGE_WRITE, _RENAME_NOREPLACE, _AT_FDCWD = 2, 1, -100
_libc = ctypes.CDLL(None, use_errno=True)  # for what os has no name for
_sync_file_range = getattr(_libc, "sync_file_range", None)  # of Linux
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_renameat2 = getattr(_libc, "renameat2", None)  # of Linux
if _renameat2 is not None:
    _renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
# Of file systems that know no hard links (FAT, some mounts over FUSE), or no rename without replacing.
_NO_SUCH_OPERATION = (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
_NO_SYNC_OF_DIRECTORIES = (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF)
_not_synced: set[int] = set()  # file systems of which that was said


class LocalStorage(Storage):
    """A directory of a file system with atomic renames, POSIX durability and vectored I/O."""

    buffer_bytes = _HOT_BYTES

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
            self.sync_directory(os.path.dirname(path))  # a new name is in the directory above it
        self.sync_names_above(os.path.dirname(missing[-1]))
        if self._durable:
            _durably_named.update(missing)

    def sync_names_above(self, path: str) -> None:
        """Makes the names of a directory and of its parents durable, once per process.

        Whoever made them may have failed, or been killed, before they were.
        """
        if not self._durable:
            return
        above = [path]
        while above[-1] not in _durably_named and not os.path.ismount(above[-1]):
            above.append(os.path.dirname(above[-1]))
            with suppress(PermissionError):  # then nobody of this user has made it
                self.sync_directory(above[-1])
        _durably_named.update(above)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.url))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int:
        try:
            with _reading(self._path(name)):
                status = os.stat(self._path(name))
        except NotADirectoryError:
            raise FileNotFoundError(self._path(name)) from None
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(f"{self._path(name)} is no file")
        return status.st_size

    def stamp(self, name: str) -> tuple[int, ...]:
        status = os.stat(self._path(name))
        return status.st_size, status.st_mtime_ns  # not the inode, which some file systems number anew

    def written_at(self, name: str) -> float:
        status = os.stat(self._path(name))
        return max(status.st_mtime, status.st_ctime)  # copies have the times at which their originals were written

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with _reading(self._path(name)), open(self._path(name), "rb") as file:
            file.seek(begin)
            return file.read() if end is None else file.read(end - begin)

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadInto]:
        with self._descriptor(name) as fd:
            yield partial(self._read_into, fd, name)

    @contextmanager
    def opened_once(self, name: str) -> Iterator[ReadInto]:
        with self._descriptor(name) as fd:
            yield partial(self._read_into if _is_cached(fd) else self._read_and_drop, fd, name)

    @contextmanager
    def _descriptor(self, name: str) -> Iterator[int]:
        with _reading(self._path(name)):
            fd = os.open(self._path(name), os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)

    def _read_and_drop(self, fd: int, name: str, spans: Sequence[Span]) -> None:
        """Reads, and takes out of the page cache again what reads have brought there."""
        self._read_into(fd, name, spans)
        # From the beginning on: a folio that a read has filled in part is dropped after the next one.
        end = max((span.offset + span.memory.nbytes for span in spans), default=0)
        if end:  # 0 would stand for the whole file
            os.posix_fadvise(fd, 0, end, os.POSIX_FADV_DONTNEED)

    def _read_into(self, fd: int, name: str, spans: Sequence[Span]) -> None:
        try:
            if len(spans) == 1:  # of large reads, where each line runs after its own code has left the core's cache
                offset, memory = spans[0]
                while memory.nbytes:
                    got = os.preadv(fd, (memory,), offset)
                    if got == 0:
                        raise too_short(self._path(name), offset)
                    offset, memory = offset + got, memory[got:]
                return
            for offset, buffers in contiguous_runs(spans):
                while buffers:
                    got = os.preadv(fd, buffers, offset)
                    if got == 0 and any(buffer.nbytes for buffer in buffers):
                        raise too_short(self._path(name), offset)
                    offset += got
                    buffers = skip(buffers, got)
        except OSError:
            with _reading(self._path(name)):
                raise

    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        fd = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            total = self.write_to(fd, buffers)
            self.sync_file(fd)
        finally:
            os.close(fd)
        self.sync_directory(self.url)
        return total

    def write_to(self, fd: int, buffers: Iterable[memoryview]) -> int:
        """Writes to an open file from its beginning; returns the number of bytes."""
        total, undecided = 0, self._durable
        writer: direct.DirectWriter | None = None

        def most_bytes() -> int:
            return _HOT_BYTES if writer is not None or not self._durable else _BATCH_BYTES

        try:
            for batch, nbytes in _batches(buffers, most_bytes):
                if undecided and nbytes >= _DIRECT_BYTES:
                    writer, undecided = direct.direct_writer(fd, total), False
                if writer is not None:
                    writer.write(batch)
                else:
                    unwritten = [buffer for buffer in batch if buffer.nbytes]
                    while unwritten:
                        unwritten = skip(unwritten, os.writev(fd, unwritten))
                    if self._durable and _sync_file_range is not None and nbytes:
                        # Has the disk work while the next bytes are made. A hint: the fsync at the end is what makes
                        # them durable, and reports errors.
                        _sync_file_range(fd, total, nbytes, _SYNC_FILE_RANGE_WRITE)
                total += nbytes
            if writer is not None:
                writer.finish()
        finally:
            if writer is not None:
                writer.close()
        return total

    def write_atomically(self, name: str, buffers: Iterable[memoryview]) -> int:
        temporary = f".{name}.{world().random_name(6)}.tmp"
        try:
            nbytes = self.write(temporary, buffers)
            os.replace(self._path(temporary), self._path(name))
        except BaseException:
            with suppress(OSError):
                os.unlink(self._path(temporary))
            raise
        self.sync_directory(self.url)
        return nbytes

    def publish(self, name: str, data: bytes) -> None:
        temporary = self._write_temporary(name, data)
        os.replace(temporary, self._path(name))
        self.sync_directory(self.url)

    def publish_new(self, name: str, data: bytes) -> bool:
        temporary = self._write_temporary(name, data)
        try:
            exclusive = _link_exclusively(temporary, self._path(name))
        except FileExistsError:
            # The answer to a link over a network may be lost, and the link there.
            if self.read_rest(name, 0, len(data)) != data:
                raise
            exclusive = False  # as far as one can tell
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        self.sync_directory(self.url)
        return exclusive

    def _write_temporary(self, name: str, data: bytes) -> str:
        """Writes a file durably under a temporary name of its own; removes it if that fails."""
        temporary = self._path(f".{name}.{world().random_name(6)}.tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                self.sync_file(file.fileno())
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def remove_durably(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))
            self.sync_directory(self.url)

    def remove_if_empty(self) -> None:
        try:
            os.rmdir(self.url)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def is_link(self) -> bool:
        return os.path.islink(self.url)

    def missing_target(self) -> str | None:
        return os.path.realpath(self.url) if self.is_link() and not os.path.exists(self.url) else None

    def child(self, name: str) -> Storage:
        return LocalStorage(self._path(name), self._durable)

    def parent(self) -> tuple[Storage, str] | None:
        directory, name = os.path.split(self.url)
        return (LocalStorage(directory, self._durable), name) if name else None

    def as_file(self) -> tuple[Storage, str] | None:
        if not os.path.isfile(self.url):
            return None
        return LocalStorage(os.path.dirname(self.url), self._durable), os.path.basename(self.url)

    def free_bytes(self) -> int | None:
        try:
            status = os.statvfs(self.url)
        except OSError:
            return None
        return status.f_bavail * status.f_frsize

    def free_files(self) -> int | None:
        try:
            status = os.statvfs(self.url)
        except OSError:
            return None
        return status.f_favail if status.f_files else None

    def sync_file(self, fd: int) -> None:
        """Makes the bytes of an open file durable."""
        if self._durable:
            os.fsync(fd)

    def sync_directory(self, path: str) -> None:
        """Makes the names in a directory durable; otherwise a crash may lose a file whose bytes are safe.

        Some file systems do not know how (over a network, in a container, FUSE): that is said once for each, and the
        names are as durable as it makes them by itself.
        """
        fd = os.open(path, os.O_RDONLY)
        try:
            self.sync_file(fd)
        except OSError as error:
            if error.errno not in _NO_SYNC_OF_DIRECTORIES:
                raise
            device = os.fstat(fd).st_dev
            if device not in _not_synced:
                _not_synced.add(device)
                _log.warning(
                    "the file system of %s does not flush directories (%s): a machine that loses power may lose files "
                    "that were written just before [storage-failed]",
                    path,
                    error.strerror,
                )
        finally:
            os.close(fd)


def _batches(buffers: Iterable[memoryview], most_bytes: Callable[[], int]) -> Iterator[tuple[list[memoryview], int]]:
    """Yields the buffers in a list, and its bytes; the list is emptied once the next buffers are asked for.

    Args:
        most_bytes: gives the bytes from which on a list is full, which may change from one to the next.
    """
    batch: list[memoryview] = []
    nbytes, most = 0, most_bytes()
    for buffer in buffers:
        batch.append(buffer)
        nbytes += buffer.nbytes
        if len(batch) == BUFFERS_PER_CALL or nbytes >= most or buffer is FLUSH:
            yield batch, nbytes
            batch.clear()  # the caller still has the list
            nbytes, most = 0, most_bytes()
    if nbytes:
        yield batch, nbytes


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turns errors of disks that have lost bytes into UnreadableError, but not errors of unreachable disks."""
    try:
        yield
    except OSError as error:
        if error.errno in _LOST:
            raise unreadable(path, error) from error
        raise


def _is_cached(fd: int) -> bool:
    """Whether more than half of a file is in the page cache; also where the system, as Linux before 6.5, cannot say."""
    everything, counts = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
    if sys.platform != "linux" or _libc.syscall(_CACHESTAT, fd, everything, counts, 0) != 0:
        return True
    return counts[0] * mmap.PAGESIZE > os.fstat(fd).st_size // 2


def is_temporary(name: str) -> bool:
    """Whether a name belongs to a temporary file, left by a process that died during a publish."""
    return _TEMPORARY.fullmatch(name) is not None


def _link_exclusively(temporary: str, path: str) -> bool:
    """Gives a file its final name, unless that is taken; returns whether the system could do so exclusively."""
    try:
        os.link(temporary, path)
        return True
    except OSError as error:
        if error.errno not in _NO_SUCH_OPERATION:
            raise
    if _renameat2 is not None:
        if _renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
        if number not in _NO_SUCH_OPERATION:
            raise OSError(number, os.strerror(number), path)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    os.replace(temporary, path)
    return False
