"""Flattens unpickled state like an app's own: tensors, arrays and plain values by path.

NumPy arrays are tensors here, as they are in what this library saves. Their bytes stand within a pickle, and so are
held from the time on when it was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from shardopt.checkpoint.format.constants import damaged
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.manifest import StoredLayout, StoredTensor
from shardopt.checkpoint.format.tensor_bytes import stored_dtype
from shardopt.checkpoint.sources.pickled.torch_archive import TensorRecord
from shardopt.checkpoint.sources.reading.open_file import ComputedFile, Form
from shardopt.checkpoint.storage import Span, Storage
from shardopt.state.paths import PARAM_GROUPS, Index, Path


def leaves_of(state: Any, path: Path, where: str) -> Iterator[tuple[Path, Any]]:
    """Yields path and value of each leaf of nested state: descends dicts, and lists and tuples that hold tensors.

    A tensor is a `TensorRecord` or a NumPy array that torch can have; arrays among the options of groups are values.
    An entry of a dict whose key is neither str nor int is yielded as a dict of that key alone, which has no plain form.

    Raises:
        CorruptionError: it is nested without end.
    """
    try:
        yield from _descend(state, path, True)
    except RecursionError:
        raise damaged(where, "containers nested without end") from None


def _descend(node: Any, path: Path, is_root: bool = False) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, dict) and (node or is_root):
        for part, child in node.items():
            if type(part) not in (str, int):
                yield (*path, ascii(part)), {part: None}
            else:
                yield from _descend(child, (*path, part))
    elif is_container(node) and holds_tensors(node, PARAM_GROUPS not in path):
        for i, child in enumerate(node):
            yield from _descend(child, (*path, Index(i)))
    else:
        yield path, node


def is_container(node: Any) -> bool:
    """Whether it is a list or tuple."""
    return isinstance(node, list | tuple) and not isinstance(node, TensorRecord)


def is_array(node: Any) -> bool:
    """Whether it is a NumPy array that torch can represent."""
    return isinstance(node, np.ndarray) and _as_tensor(node) is not None


def holds_tensors(node: Any, count_arrays: bool = True) -> bool:
    """Whether it contains a tensor, or an array that becomes one."""
    if isinstance(node, TensorRecord) or (count_arrays and is_array(node)):
        return True
    if isinstance(node, dict):
        return any(holds_tensors(each, count_arrays) for each in node.values())
    return is_container(node) and any(holds_tensors(each, count_arrays) for each in node)


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Returns an array as a tensor; None if torch has no such dtype or byte order."""
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except (TypeError, ValueError):
        return None


class HeldArrays(ComputedFile):
    """The arrays inside the pickles of a file, served like a file of their own.

    The pickles have checksums, which were compared when they were read.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(storage, name)
        self._bytes = bytearray()
        self._places: dict[str, tuple[int, int]] = {}

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    @property
    def holds_any(self) -> bool:
        """Whether there is an array, even one without elements."""
        return bool(self._places)

    def add(self, key: str, path: Path, array: np.ndarray[Any, Any], number: int) -> StoredTensor:
        """Adds an array (`is_array`); returns it as a stored tensor in the file of this number."""
        tensor = _as_tensor(array)
        assert tensor is not None
        begin = len(self._bytes)
        self._bytes += tensor.numpy().tobytes()
        self._places[key] = begin, len(self._bytes)
        return StoredTensor(path, stored_dtype(tensor.dtype, key), StoredLayout.in_one_box(tensor.shape, number))

    def digest_of(self, key: str) -> str:
        """Returns the digest of an array's bytes."""
        begin, end = self._places[key]
        return xxhash.xxh3_64_hexdigest(memoryview(self._bytes)[begin:end])

    def entry(self, key: str, form: Form) -> Entry:
        begin, end = self._places[key]
        return Entry(key, form.dtype, form.shape, begin, end, 0)

    def fill(self, spans: Sequence[Span]) -> None:
        for offset, memory in spans:
            memory[:] = self._bytes[offset : offset + memory.nbytes]
