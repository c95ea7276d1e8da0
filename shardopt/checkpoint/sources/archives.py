"""Reads tensors in torch.save archives as boxes, and the plain values beside them.

The bytes of a storage have one CRC32. It is compared before any of them is used: torch itself does not look at it.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from operator import add, mul
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype, damaged
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.tensor_bytes import torch_dtype
from shardopt.checkpoint.sources.pickled.stand_ins import Unknown
from shardopt.checkpoint.sources.pickled.torch_archive import TensorRecord
from shardopt.checkpoint.sources.pickled.zip_archive import Read
from shardopt.checkpoint.sources.reading.open_file import Form, OpenFile, ReadChunks, ReadRequest
from shardopt.checkpoint.storage import Storage
from shardopt.errors import Problem, StateError
from shardopt.sharding.box import Box, whole
from shardopt.state.values import encode_value

_MOST_RUNS = 1 << 16  # of elements that lie side by side, of a tensor that has gaps between them
_MOST_TIMES = 64  # that its elements are read, of a tensor in which some share memory
_MOST_VALUE_BYTES = 16 << 20  # of all tensors within plain values of a checkpoint
_SPARE_BYTES = 1024  # of a tensor whose elements share memory


class ArchivedTensors(OpenFile):
    """A file with tensors in archives, each of which is located on request."""

    checks_first = True

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(storage, name)
        self._records: dict[str, TensorRecord] = {}

    @abstractmethod
    def find(self, key: str) -> TensorRecord:
        """Returns the record of a tensor in the file. Raises CorruptionError, FormatError."""

    def read_bytes(self, begin: int, end: int) -> bytes:
        """Returns a byte range of the file; the `Read` function of archives."""
        return self.storage.read(self.name, begin, end)

    def record(self, key: str) -> TensorRecord:
        """Returns the record of a tensor in the file, located once."""
        if key not in self._records:
            self._records[key] = self.find(key)
        return self._records[key]

    def entry(self, key: str, form: Form) -> Entry:
        """Returns the bytes from a tensor's first element to its last, which may have gaps."""
        record = self.record(key)
        if 0 in record.sizes:
            return Entry(key, form.dtype, record.sizes, record.begin, record.begin, 0)
        last = sum((size - 1) * stride for size, stride in zip(record.sizes, record.strides, strict=True))
        return Entry(key, form.dtype, record.sizes, record.begin, record.begin + (last + 1) * record.dtype.itemsize, 0)

    def requests(
        self, targets: Iterable[tuple[str, Tensor]], form: Form, dtype: Dtype, sizes: tuple[int, ...], wanted: Box
    ) -> Iterator[ReadRequest]:
        for key, target in targets:
            record, entry = self.record(key), self.entry(key, form)
            order = _order_in_memory(record)
            if _is_contiguous([(record.sizes[d], record.strides[d]) for d in order]):
                # Its dimensions in the order of memory: the bytes are those of a tensor in C order.
                box = Box(tuple(wanted.offsets[d] for d in order), tuple(wanted.sizes[d] for d in order))
                permuted = tuple(sizes[d] for d in order)
                yield ReadRequest(self, entry, dtype, permuted, box, target.permute(order))
            else:
                yield from self._run_by_run(entry, record, wanted, target)

    def _run_by_run(self, entry: Entry, record: TensorRecord, wanted: Box, target: Tensor) -> Iterator[ReadRequest]:
        """Yields one request per run of adjacent elements."""
        inner = len(record.sizes)  # from here on the wanted elements lie side by side
        while inner and record.strides[inner - 1] == prod(wanted.sizes[inner:]) == prod(record.sizes[inner:]):
            inner -= 1
        outer, run = wanted.sizes[:inner], wanted.sizes[inner:]
        nbytes = record.dtype.itemsize * prod(wanted.sizes)
        if prod(outer) > _MOST_RUNS or nbytes > max(_MOST_TIMES * record.storage_nbytes, _MOST_VALUE_BYTES):
            fault = f"a tensor of strides {list(record.strides)}, in {prod(outer)} runs"
            raise damaged(f"{self.where}: {entry.key}", fault)
        itemsize = record.dtype.itemsize
        for index in product(*map(range, outer)):
            first = (*map(add, index, wanted.offsets), *wanted.offsets[inner:])
            begin = record.begin + itemsize * sum(map(mul, first, record.strides))
            of_run = entry._replace(shape=run, begin=begin, end=begin + itemsize * prod(run))
            yield ReadRequest(self, of_run, record.dtype, run, whole(run), target[index])

    def summed_with(self, entry: Entry) -> int | None:
        record = self.record(entry.key)
        return None if record.crc32 is None else record.storage_begin

    def unsummed_bytes(self, entry: Entry) -> int:
        return entry.end - entry.begin if self.record(entry.key).crc32 is None else 0

    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        record, crc = self.record(entry.key), 0
        for chunk in read(record.storage_begin, record.storage_begin + record.storage_nbytes):
            crc = zlib.crc32(chunk, crc)
        if record.crc32 not in (None, crc):
            yield from damaged(self.where, f"bytes of {entry.key!r} that fail their checksum").problems


def _order_in_memory(record: TensorRecord) -> list[int]:
    """Returns the dimensions by falling stride; those of size 1 stay in place."""
    return sorted(range(len(record.sizes)), key=lambda d: (-record.strides[d], d)) if record.strides else []


def _is_contiguous(dims: list[tuple[int, int]]) -> bool:
    """Whether a tensor of these sizes and strides is contiguous in C order."""
    expected = 1
    for size, stride in reversed(dims):
        if size != 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


class PlainValues:
    """Converts the plain values of a checkpoint; bounds all their tensors together, which may share a storage."""

    def __init__(self) -> None:
        self._bytes_left = _MOST_VALUE_BYTES

    def plain(self, value: Any, read: Read, where: str) -> tuple[Any, str]:
        """Returns the unpickled value as a storable plain value, or the reason why it is none.

        Args:
            read: gives bytes of the file that it is in, for small tensors within it.
        """
        try:
            plain = self._without_records(value, read, where)
            encode_value(plain)
        except _NotPlainError as error:
            return None, str(error)
        except StateError as error:
            return None, error.problems[0].found if error.problems else str(error)
        return plain, ""

    def _without_records(self, value: Any, read: Read, where: str) -> Any:
        if isinstance(value, Unknown):
            raise _NotPlainError(f"an object of {value.name}")
        if isinstance(value, TensorRecord):
            nbytes = prod(value.sizes) * value.dtype.itemsize
            if nbytes > max(value.storage_nbytes, _SPARE_BYTES):
                raise _NotPlainError("a tensor whose elements share memory")
            self._bytes_left -= max(nbytes, value.storage_nbytes)
            if self._bytes_left < 0:
                raise _NotPlainError(f"tensors of more than {_MOST_VALUE_BYTES} bytes within plain values")
            return _read_tensor(value, read, where)
        if type(value) is dict:
            return {key: self._without_records(each, read, where) for key, each in value.items()}
        if type(value) in (list, tuple, set):
            return type(value)(self._without_records(each, read, where) for each in value)
        return value


class _NotPlainError(Exception):
    """A value contains something unknown."""


def _read_tensor(record: TensorRecord, read: Read, where: str) -> Tensor:
    """Reads a small tensor into memory of its own."""
    data = bytearray(read(record.storage_begin, record.storage_begin + record.storage_nbytes))
    if len(data) != record.storage_nbytes or (record.crc32 is not None and zlib.crc32(data) != record.crc32):
        raise damaged(where, "bytes of a tensor that fail their checksum")
    dtype = torch_dtype(record.dtype)
    if 0 in record.sizes:
        return torch.empty(record.sizes, dtype=dtype, device="cpu")
    storage = torch.frombuffer(data, dtype=torch.uint8)
    elements = storage[: len(data) - len(data) % dtype.itemsize].view(dtype)
    offset = (record.begin - record.storage_begin) // dtype.itemsize
    return elements.as_strided(record.sizes, record.strides, offset).clone(memory_format=torch.contiguous_format)
