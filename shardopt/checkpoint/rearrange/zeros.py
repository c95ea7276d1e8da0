"""A source of zeros, so that padding is read in the same way as stored tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.sources.reading.open_file import Form, OpenFile, ReadChunks, ReadRequest, form_of
from shardopt.checkpoint.storage import ReadInto, Span
from shardopt.errors import Problem
from shardopt.sharding.box import whole


class Zeros(OpenFile):
    """A file of zeros, which has any box that is asked for."""

    def entry(self, key: str, form: Form) -> Entry:
        return Entry(key, form.dtype, form.shape, 0, form.nbytes, 0)

    def request(self, key: str, dtype: Dtype, target: Tensor) -> ReadRequest:
        """Returns the read that fills a whole target with zeros."""
        box = whole(target.shape)
        return ReadRequest(self, self.entry(key, form_of(dtype, box)), dtype, box.sizes, box, target)

    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        return iter(())

    @contextmanager
    def opened(self, once: bool = False) -> Iterator[ReadInto]:
        yield _fill


def _fill(spans: Sequence[Span]) -> None:
    for _, memory in spans:
        if memory.nbytes:
            ctypes.memset(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), 0, memory.nbytes)
