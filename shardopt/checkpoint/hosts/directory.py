"""The directory in which a host keeps its shares of checkpoints: private, and distinguishable from other hosts'.

Such directories lie where everybody may write, as /dev/shm is: one that a stranger has made, or can change, is refused.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardopt.checkpoint.format.constants import DIRECTORY_NAME
from shardopt.errors import CheckpointError, NoSpaceError, Problem
from shardopt.world import world

PREFIX = "hosts://"
"""The prefix of URLs of checkpoints on hosts."""

_IDENTITY_NAME = ".host"
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_IDENTITY_BYTES = 16
_MOST_LINKS = 40
_LIMIT_BYTES = 1 << 16  # of a small file


def is_host_directory(path: str) -> bool:
    """Whether a `HostDirectory` has made this directory. Changes nothing."""
    return os.path.isfile(os.path.join(path, _IDENTITY_NAME))


class HostDirectory:
    """A directory of mode 0700 that belongs to this user; keeps it open.

    Processes that see the same one find the same `identity` in it, a random name that stays for as long as it does; on
    other hosts, or in containers with file systems of their own, the same path has another.

    Args:
        path: made if it is not there, with the directories above it.

    Raises:
        CheckpointError: it is a link or no directory, or belongs to somebody else, or others may use it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._refuse_ways_of_strangers()
        try:
            with suppress(FileExistsError):
                os.makedirs(self.path, mode=0o700)
        except OSError as error:
            raise _refused(self.path, f"that it cannot be made: {error.strerror}") from error
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            found = "a symbolic link" if os.path.islink(self.path) else (error.strerror or str(error))
            raise _refused(self.path, found) from error
        self._close = weakref.finalize(self, os.close, self._fd)  # `__del__` may come when `os` is gone
        self._close.atexit = False
        try:
            self._refuse_strangers()
            self._refuse_ways_of_strangers()
            self.identity = self._identity()
        except BaseException:
            self.close()
            raise

    def refuse_replaced(self) -> None:
        """Raises NoSpaceError if the path now has another directory, or none, since its owner is unknown."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            there = None
        held = os.fstat(self._fd)
        if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            found = "none any more" if there is None else "another directory"
            remedy = "keep others from removing it (systemd's RemoveIPC, tmpfiles), and start the job again"
            problem = Problem(self.path, found, "the directory that was there when the hosts met", remedy)
            raise NoSpaceError("a host's own directory is gone", [problem], code="host-directory")

    def close(self) -> None:
        """Closes the descriptor."""
        self._close()
        self._fd = -1

    def open_file(self, directory: str, name: str) -> int:
        """Opens a regular file here ("") or in a subdirectory, without following links. Raises OSError."""
        with self._within(directory, name) as within:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would block
            fd = os.open(name, flags, dir_fd=within)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError("no regular file")
        return fd

    def names(self, directory: str) -> list[str]:
        """Returns the names here ("") or in a subdirectory; none where that is not there. Raises OSError."""
        try:
            with self._within(directory) as within:
                # Opened again: two threads that list one descriptor move one position, and each gets a part.
                fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=within)
        except FileNotFoundError:
            return []
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def remove_file(self, directory: str, name: str) -> None:
        """Removes a file here ("") or in a subdirectory, if it exists. Raises OSError."""
        with suppress(FileNotFoundError), self._within(directory, name) as within:
            os.unlink(name, dir_fd=within)

    def remove_if_empty(self, directory: str) -> None:
        """Removes a subdirectory, if it exists and is empty. Raises OSError."""
        try:
            with self._within("", directory) as within:
                os.rmdir(directory, dir_fd=within)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    @contextmanager
    def _within(self, directory: str, name: str = "name") -> Iterator[int]:
        """Opens a directory, and checks that a name can lead nowhere else."""
        if (directory and not DIRECTORY_NAME.fullmatch(directory)) or os.sep in name or name in ("", ".", ".."):
            raise FileNotFoundError("no name of a file here")
        if not directory:
            yield self._fd
            return
        try:
            within = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        except NotADirectoryError:
            raise FileNotFoundError(f"{directory} is no directory") from None
        try:
            yield within
        finally:
            os.close(within)

    def keep_once(self, name: str, data: bytes) -> bytes:
        """Writes a small file in this directory, unless it exists; returns the file's contents.

        Of those who write one at the same time, one succeeds. Raises CheckpointError.
        """
        temporary = f"{name}.{world().random_name(6)}.tmp"
        while True:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
                with open(fd, "rb") as file:
                    return file.read(_LIMIT_BYTES)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise _refused(self.path, f"a file {name} that cannot be read: {error.strerror}") from error
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                with open(os.open(temporary, flags, 0o600, dir_fd=self._fd), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                with suppress(FileExistsError):
                    os.link(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except OSError as error:
                raise _refused(self.path, f"that nothing can be written there: {error.strerror}") from error
            finally:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=self._fd)

    def _refuse_strangers(self) -> None:
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid():
            raise _refused(self.path, f"a directory of user {status.st_uid}")
        if status.st_mode & 0o077:
            raise _refused(self.path, f"a directory of mode {stat.S_IMODE(status.st_mode):04o}")

    def _refuse_ways_of_strangers(self) -> None:
        """Raises CheckpointError if other users could redirect the path; called before it is made, and afterwards.

        A link is followed that root or this user has made, to where the same holds of all that is above.
        """
        left, above, links = [part for part in self.path.split(os.sep) if part], os.sep, 0
        while True:
            status = os.lstat(above)
            is_shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
            if status.st_uid not in (0, os.geteuid()) or is_shared:
                remedy = "name a directory below another one, that only root or this user can write to"
                if status.st_uid in (0, os.geteuid()):
                    remedy = f"chmod +t {above}, so that users replace only what is theirs; or {remedy}"
                raise _refused(self.path, f"that others may replace it, as {above} is theirs too", remedy)
            if len(left) <= 1:
                return  # the last one is looked at where it is opened
            part = left.pop(0)
            if part == os.pardir:
                above = os.path.dirname(above)
                continue
            beyond = os.path.join(above, part)
            try:
                status = os.lstat(beyond)
            except OSError:
                return  # not there: what is made below is this user's
            if not stat.S_ISLNK(status.st_mode):
                above = beyond
                continue
            links += 1
            if status.st_uid not in (0, os.geteuid()) or links > _MOST_LINKS:
                raise _refused(self.path, f"that it leads through {beyond}, a link that somebody else has made")
            target = os.readlink(beyond)
            above = os.sep if os.path.isabs(target) else above
            left[:0] = [each for each in target.split(os.sep) if each not in ("", os.curdir)]

    def _identity(self) -> str:
        """Returns the directory's identity; makes it if there is none."""
        identity = self.keep_once(_IDENTITY_NAME, world().random_name(_IDENTITY_BYTES).encode()).decode(
            errors="replace"
        )
        if not _IDENTITY.fullmatch(identity):
            raise _refused(self.path, f"a file {_IDENTITY_NAME} that no host has written")
        return identity


def _refused(
    path: str, found: str, remedy: str = "remove it, or name a directory that does not exist yet"
) -> CheckpointError:
    problem = Problem(path, found, "a directory of only this user, of mode 0700", remedy)
    return CheckpointError("a host's own directory cannot be used", [problem], code="host-directory")
