"""The interface of storage: a directory, wherever it is, of immutable files that are written as wholes.

Names are relative to the directory (a prefix, on an object store).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from shardopt.checkpoint.format.constants import RECORD_LIMIT_BYTES, damaged
from shardopt.errors import CheckpointError, CorruptionError, Problem, UnreadableError

FLUSH = memoryview(b"")
"""Among the buffers of a write: the memory of those before it is used again once the next is asked for."""
BUFFERS_PER_CALL = min(os.sysconf("SC_IOV_MAX"), 1024)


class Span(NamedTuple):
    """Bytes of a file, and the memory that they are read into.

    Args:
        offset: of the first of them in the file.
        memory: writable; as many bytes are read as it has.
    """

    offset: int
    memory: memoryview


ReadInto = Callable[[Sequence[Span]], None]
"""Fills the memory of spans, which are in ascending order, from one file. Raises CorruptionError if it ends before."""


class Storage(ABC):
    """A directory of immutable files: each is written once, as a whole."""

    url: str
    is_remote = False
    """Whether reading goes over a network: then ranks read once and share, in fewer and larger requests."""

    @abstractmethod
    def make(self) -> None:
        """Makes the directory, where there are such things."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of all that is in the directory, sorted; empty where there is none."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Returns the size of a file in bytes. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Returns a file's bytes from `begin` up to `end`; fewer where it ends before. Raises FileNotFoundError."""

    def read_record(self, name: str) -> bytes:
        """Returns a small file of a run. Raises FileNotFoundError; CorruptionError where it is no small one."""
        data = self.read_rest(name, 0, RECORD_LIMIT_BYTES)
        if len(data) > RECORD_LIMIT_BYTES:
            raise damaged(f"{self.url}/{name}", f"more than {RECORD_LIMIT_BYTES} bytes")
        return data

    def read_rest(self, name: str, begin: int, size: int) -> bytes:
        """Returns a file's bytes from `begin` to its end, which is expected at `size`.

        Fewer, or one more, where it has another size: so that nobody has to ask for that in a request of its own.
        """
        return self.read(name, begin, size + 1)

    @abstractmethod
    def opened(self, name: str) -> AbstractContextManager[ReadInto]:
        """Opens a file to read from repeatedly, by any thread. Raises FileNotFoundError, here or when it is read."""

    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        """Fills the memory of spans, which are in ascending order. Raises CorruptionError if the file ends before."""
        with self.opened(name) as read:
            read(spans)

    @abstractmethod
    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        """Writes a file as a whole, durable on return. Returns its size in bytes.

        Args:
            buffers: the bytes; each must stay as it is until a `FLUSH` has been taken, and only some MiB of them are
                held at a time. If they can be
                iterated again, a remote store that has lost a file gets it once more.
        """

    def write_atomically(self, name: str, buffers: Iterable[memoryview]) -> int:
        """Writes a file as `write` does, in the place of one that may be there: under its name there is never half of
        it. On object stores every write is such."""
        return self.write(name, buffers)

    @abstractmethod
    def publish(self, name: str, data: bytes) -> None:
        """Writes a small file in one atomic step: at no time does half of it exist under its name."""

    @abstractmethod
    def publish_new(self, name: str, data: bytes) -> bool:
        """Writes a small file in one atomic step, where there is none of its name yet.

        Bytes that stand there already count as written by this call: the answer to an earlier attempt may have been
        lost. So they should be such as nobody else would write.

        Returns:
            Whether only one can have succeeded of several who tried at one time. Where the storage has no such
            operation, a file is looked for before it is written.

        Raises:
            FileExistsError: other bytes stand there.
        """

    def may_appear(self, name: str) -> bool:
        """Whether a file that this object could not publish may be there at any time: a request was given up that the
        storage may still carry out."""
        return False

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""

    def remove_durably(self, name: str) -> None:
        """Removes a file, if it is there; the removal is durable on return."""
        self.remove(name)

    @abstractmethod
    def remove_if_empty(self) -> None:
        """Removes the directory, where there are such things and it holds nothing."""

    @abstractmethod
    def child(self, name: str) -> Storage:
        """Returns the storage of the directory of that name within this one."""

    def parent(self) -> tuple[Storage, str] | None:
        """Returns the directory that this one is in, and its name there; None where there is none above it."""
        return None

    def as_file(self) -> tuple[Storage, str] | None:
        """Returns the directory and the name of the file at this path; None where it is no file."""
        return None

    def free_bytes(self) -> int | None:
        """Returns the number of bytes that may be written here at most; None where that cannot be known."""
        return None

    def copy_of(self, name: str) -> int:
        """Returns which copy of a file is read now, where there are several; for `pass_over`."""
        return 0

    def pass_over(self, name: str, copy: int, error: CheckpointError) -> bool:
        """Takes the next copy of a file from now on, as this one was found damaged or out of reach.

        Args:
            copy: as `copy_of` gave it before the file was read.
            error: what was found.

        Returns:
            Whether there is another one, so that it may be read again.
        """
        return False

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True


def contiguous_runs(spans: Sequence[Span]) -> Iterator[tuple[int, list[memoryview]]]:
    """Joins spans that follow one another without a gap: offset, and memory for the bytes from there on."""
    start = 0
    while start < len(spans):
        stop, end = start, spans[start].offset
        while stop < len(spans) and stop - start < BUFFERS_PER_CALL and spans[stop].offset == end:
            end += spans[stop].memory.nbytes
            stop += 1
        yield spans[start].offset, [span.memory for span in spans[start:stop]]
        start = stop


def unreadable(path: str, error: OSError) -> UnreadableError:
    """Returns the error for a file that its disk cannot read."""
    problem = Problem(path, str(error.strerror or error), "its bytes", "restore from another checkpoint")
    return UnreadableError("a file cannot be read from its disk", [problem])


def too_short(path: str, offset: int) -> CorruptionError:
    """Returns the error for a file that ends before the bytes that were to be read.

    Args:
        path: of the file, as it is printed.
        offset: where the file ends.
    """
    problem = Problem(path, f"its end before byte {offset}", "all of the file", "restore from another checkpoint")
    return CorruptionError("a file is shorter than it was", [problem])
