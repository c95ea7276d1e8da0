"""A source of zeros, so that padding is read in the same way as stored tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.sources.reading.open_file import ComputedFile, ReadRequest, form_of
from shardopt.checkpoint.storage import Span
from shardopt.sharding.box import whole


class Zeros(ComputedFile):
    """A file of zeros, which has any box that is asked for."""

    def request(self, key: str, dtype: Dtype, target: Tensor) -> ReadRequest:
        """Returns the read that fills a whole target with zeros."""
        box = whole(target.shape)
        return ReadRequest(self, self.entry(key, form_of(dtype, box)), dtype, box.sizes, box, target)

    def fill(self, spans: Sequence[Span]) -> None:
        for _, memory in spans:
            if memory.nbytes:
                ctypes.memset(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), 0, memory.nbytes)
