"""The interface of storage: a directory, local or remote, of immutable files that are written whole.

Names are relative to the directory (a prefix, on an object store).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from shardopt.checkpoint.format.constants import RECORD_LIMIT_BYTES, damaged
from shardopt.errors import CheckpointError, CorruptionError, Problem, UnreadableError

FLUSH = memoryview(b"")
"""A marker in a write's buffers: the memory of earlier buffers is reused once the next one is requested."""
BUFFERS_PER_CALL = min(os.sysconf("SC_IOV_MAX"), 1024)


class Span(NamedTuple):
    """A range of a file's bytes, and the memory to read them into.

    Args:
        offset: of the first of them in the file.
        memory: writable; as many bytes are read as it has.
    """

    offset: int
    memory: memoryview


ReadInto = Callable[[Sequence[Span]], None]
"""Fills the memory of ascending spans from one file. Raises CorruptionError if the file ends before."""


class Storage(ABC):
    """A directory of immutable files: each is written once, as a whole."""

    url: str
    is_remote = False
    """Whether reads go over a network; ranks then read once and share, in fewer and larger requests."""
    buffer_bytes = 4 << 20
    """Of the buffers that a save gives to `write`, at most: so many whole segments of 256 KiB, and one at least."""

    @property
    def place(self) -> Mapping[str, str] | None:
        """Which of several stores of this URL it is, by names such as "endpoint"; None where only options say it."""
        return None

    @abstractmethod
    def make(self) -> None:
        """Makes the directory, if the storage has directories."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of everything in the directory, sorted; empty if there is no directory."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Returns the size of a file in bytes. Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Returns a file's bytes from `begin` up to `end`, or to the file's end. Raises FileNotFoundError."""

    def read_record(self, name: str) -> bytes:
        """Returns the bytes of a run's small file. Raises FileNotFoundError; CorruptionError if it is too large."""
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
        """Opens a file for repeated reads by any thread. Raises FileNotFoundError, here or at a read."""

    def opened_once(self, name: str) -> AbstractContextManager[ReadInto]:
        """Opens a file as `opened`, for bytes that nobody needs again soon: what caches hold for others may stay."""
        return self.opened(name)

    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        """Fills the memory of ascending spans. Raises CorruptionError if the file ends before."""
        with self.opened(name) as read:
            read(spans)

    @abstractmethod
    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        """Writes a file as a whole, durable on return. Returns its size in bytes.

        Args:
            buffers: the bytes. Copy or write each before the next is asked for: its memory may be used again then, with
                a model on an accelerator (`b"".join(buffers)` asks for all of them first). Empty ones may be among
                them. If they can be iterated again, a remote store that has lost a file gets it once more. If they have
                `nbytes`, about the size of the file, the parts of an upload may be sized by it. If they have a
                `reuses_memory` that is False, all memory stays as it is until the call returns.
        """

    def write_atomically(self, name: str, buffers: Iterable[memoryview]) -> int:
        """Writes a file as `write` does, over an existing one if any; its name never refers to half a file.

        On object stores every write is atomic.
        """
        return self.write(name, buffers)

    @abstractmethod
    def publish(self, name: str, data: bytes) -> None:
        """Writes a small file in one atomic step: its name never refers to half a file."""

    @abstractmethod
    def publish_new(self, name: str, data: bytes) -> bool:
        """Writes a small file in one atomic step, if no file has its name yet.

        Bytes that stand there already count as written by this call: the answer to an earlier attempt may have been
        lost. So they should be such as nobody else would write.

        Returns:
            Whether only one can have succeeded of several who tried at one time. Where the storage has no such
            operation, a file is looked for before it is written.

        Raises:
            FileExistsError: other bytes stand there.
        """

    def may_appear(self, name: str) -> bool:
        """Whether a file that this object failed to publish may still appear.

        The storage may still carry out a request that timed out.
        """
        return False

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, if it exists."""

    def remove_durably(self, name: str) -> None:
        """Removes a file, if it exists; the removal is durable on return."""
        self.remove(name)

    @abstractmethod
    def remove_if_empty(self) -> None:
        """Removes the directory, if it is empty and the storage has directories."""

    def is_link(self) -> bool:
        """Whether this directory's name is a symbolic link, to a directory elsewhere or to none."""
        return False

    def missing_target(self) -> str | None:
        """Returns where this directory's name leads as a symbolic link, if nothing is there; None otherwise."""
        return None

    @abstractmethod
    def child(self, name: str) -> Storage:
        """Returns the storage of a subdirectory by name."""

    @abstractmethod
    def parent(self) -> tuple[Storage, str] | None:
        """Returns the parent directory, and the name of this one in it; None at the top.

        Saves refer to checkpoints beside them by it, and metrics are added beside a checkpoint.
        """

    def as_file(self) -> tuple[Storage, str] | None:
        """Returns directory and name of the file at this path; None if it is no file."""
        parent = self.parent()
        return parent if parent is not None and parent[0].exists(parent[1]) else None

    def free_bytes(self) -> int | None:
        """Returns the number of bytes that can still be written here; None if it is unknown."""
        return None

    def free_files(self) -> int | None:
        """Returns how many files can still be made here; None if it is unknown, or there is no such limit."""
        return None

    def stamp(self, name: str) -> tuple[int, ...] | None:
        """Returns what changes when a file is written again or replaced; None where that is not known."""
        return None

    def written_at(self, name: str) -> float | None:
        """Returns when a file was last written, copied or moved here, in seconds since 1970; None if it is unknown."""
        return None

    def copy_of(self, name: str) -> int:
        """Returns which of several copies of a file is being read; for `pass_over`."""
        return 0

    def pass_over(self, name: str, copy: int, error: CheckpointError) -> bool:
        """Switches to the next copy of a file, as this one was damaged or out of reach.

        Args:
            copy: as `copy_of` gave it before the file was read.
            error: what was found.

        Returns:
            Whether there is another one, so that it may be read again.
        """
        return False

    def exists(self, name: str) -> bool:
        """Whether a file of this name exists."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True


def contiguous_runs(spans: Sequence[Span]) -> Iterator[tuple[int, list[memoryview]]]:
    """Joins adjacent spans: yields offset, and the memory for the bytes from there on."""
    start = 0
    while start < len(spans):
        stop, end = start, spans[start].offset
        while stop < len(spans) and stop - start < BUFFERS_PER_CALL and spans[stop].offset == end:
            end += spans[stop].memory.nbytes
            stop += 1
        yield spans[start].offset, [span.memory for span in spans[start:stop]]
        start = stop


def skip(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """Returns the buffers without their first `nbytes` bytes."""
    for i, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer[nbytes:], *buffers[i + 1 :]]
        nbytes -= buffer.nbytes
    return []


def unreadable(path: str, error: OSError) -> UnreadableError:
    """Returns the error for a file that its disk fails to read."""
    problem = Problem(path, str(error.strerror or error), "its bytes", "restore from another checkpoint")
    return UnreadableError("a file cannot be read from its disk", [problem])


def too_short(path: str, offset: int) -> CorruptionError:
    """Returns the error for a file that ends before the requested bytes.

    Args:
        path: of the file, as it is printed.
        offset: where the file ends.
    """
    problem = Problem(path, f"its end before byte {offset}", "all of the file", "restore from another checkpoint")
    return CorruptionError("a file is shorter than it was", [problem])
