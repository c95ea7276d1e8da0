"""A file that is open for reading: where boxes lie in it, their bytes, and whether these are intact."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype, damaged, stored_shape
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.storage import ReadInto, Span, Storage, wrap_os_errors
from shardopt.errors import CorruptionError, Problem
from shardopt.sharding.box import Box

ReadChunks = Callable[[int, int], Iterator[memoryview]]
"""Reads a file from one offset to another; yields the bytes in chunks of whole segments, which are soon overwritten."""


class ReadRequest(NamedTuple):
    """A box within a stored box, and the memory to read it into.

    `wanted` is in coordinates of the stored box, whose sizes are `sizes`; `target` has just its shape.
    """

    entry: Entry
    dtype: Dtype
    sizes: tuple[int, ...]
    wanted: Box
    target: Tensor


class Form(NamedTuple):
    """Dtype, shape and bytes of a box as the header of its data file has to have them."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def form_of(dtype: Dtype, box: Box) -> Form:
    """Returns the form in which a box is stored."""
    return Form(dtype.safetensors or "U8", tuple(stored_shape(dtype, box.sizes)), box.numel * dtype.itemsize)


class OpenFile(ABC):
    """A file with boxes of tensors, at most one of each.

    Args:
        storage: the directory that it is in.
        name: of the file.
    """

    checks_first = False
    """Whether there are checksums for more than a segment, which are compared before any of the bytes is used."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self.name = storage, name
        self.where = f"{storage.url}/{name}"
        self.checked: set[int] = set()
        """The numbers (`summed_with`) of bytes that were found intact."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All that is in the file by key, where the file itself says so."""
        return {}

    @abstractmethod
    def entry(self, key: str, form: Form) -> Entry:
        """Returns the entry of a box. Raises CorruptionError where the file has it in another form, or not at all."""

    def requests(
        self, key: str, form: Form, dtype: Dtype, sizes: tuple[int, ...], wanted: Box, target: Tensor
    ) -> Iterable[ReadRequest]:
        """Gives the reads that fill `target` with a box within a stored one; see `ReadRequest`."""
        return (ReadRequest(self.entry(key, form), dtype, sizes, wanted, target),)

    def is_intact(self, segment: int, memory: memoryview, *following: memoryview) -> bool:
        """Whether a segment's bytes, which lie in one piece of memory or several, have the checksum that was written.

        Args:
            segment: number in the file.
        """
        return True

    def summed_with(self, entry: Entry) -> int | None:
        """Returns a number for the bytes that have one checksum with an entry's, if there are such."""
        return None

    @abstractmethod
    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        """Reads all of an entry, and yields a problem for each place where it is not as it was written."""

    def checksums(self, entry: Entry) -> bytes:
        """Returns the checksums of all segments of an entry, one after the other; nothing where it has none."""
        return b""

    def segment_error(self, entry: Entry, segment: int) -> CorruptionError:
        """Returns the error of a segment that fails its checksum, by its number in the file."""
        number = segment - entry.segment
        return damaged(self.where, f"segment {number} of {entry.key!r} with bytes that fail their checksum")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Names this file in what goes wrong while it is read."""
        with wrap_os_errors(f"read {self.where}"):
            try:
                yield
            except FileNotFoundError:
                raise damaged(self.where, "no such file") from None

    @contextmanager
    def opened(self) -> Iterator[ReadInto]:
        """Yields a function that fills spans from this file, for as long as this is open."""
        with ExitStack() as stack:
            with self.reading():
                read = stack.enter_context(self.storage.opened(self.name))

            def read_named(spans: Sequence[Span]) -> None:
                with self.reading():  # and nothing else: the caller's own work may fail in other ways
                    read(spans)

            yield read_named

    def read_into(self, spans: Sequence[Span]) -> None:
        """Fills spans of memory, each from its offset in the file. Nothing is verified."""
        with self.opened() as read:
            read(spans)
