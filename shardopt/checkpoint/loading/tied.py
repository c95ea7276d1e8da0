"""Compares stored tensors that share memory in the app: all of it, as tied parameters do, or part of it.

Where each is stored by itself, only one of them can be read into the memory; the others must be equal to it, or the one
that comes last would silently win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from math import gcd
from typing import NamedTuple

import torch

from shardopt.checkpoint.format.tensor_bytes import flat_bytes
from shardopt.checkpoint.sources.equality import bytes_are_equal
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.pieces import Piece, View


def refuse_unequal(
    reader: CheckpointReader, views: Mapping[str, View], tied: Mapping[str, str], stored_key: Mapping[str, str]
) -> None:
    """Raises MismatchError unless stored tensors that are tied in the app are equal, on the boxes of this rank.

    Args:
        tied: key of a tensor → key of the first one with which it is one memory.
        stored_key: key of the app → key of the checkpoint, where they differ.
    """
    problems = []
    for key, tied_to in tied.items():
        keys = stored_key.get(key, key), stored_key.get(tied_to, tied_to)
        if not all(bytes_are_equal(reader, *keys, piece.box) for piece in views[key].pieces):
            stored = f"other values than {tied_to} in the checkpoint"
            required = "the same: both are one tensor in the app"
            problems.append(Problem(key, stored, required, "untie them in the app, or load only one of them"))
    if problems:
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", problems)


class _Range(NamedTuple):
    """The addresses from a piece's first to its last byte, on one device; bytes of others may be between them."""

    device: str
    begin: int
    end: int
    key: str
    piece: Piece

    def within(self, memory: torch.Tensor, begin: int, unit: int) -> torch.Tensor:
        """Returns the positions of the piece's units in a flat tensor with one element per unit of memory."""
        tensor = self.piece.tensor
        units = tensor.element_size() // unit
        strides = [stride * units for stride in tensor.stride()]
        return memory.as_strided([*tensor.shape, units], [*strides, 1], (self.begin - begin) // unit)


def refuse_overlapping(reader: CheckpointReader, views: Mapping[str, View], stored_key: Mapping[str, str]) -> None:
    """Raises MismatchError unless stored tensors that share part of their memory are equal there.

    Args:
        views: of tensors that are to be filled, of those that are one memory the first.
        stored_key: key of the app → key of the checkpoint, where they differ.
    """
    problems = {}
    for one, other in _sharing(views):
        if other.key not in problems and not _are_equal(reader, one, other, stored_key):
            found = f"other values than {one.key} in the checkpoint, where they share memory in the app"
            remedy = "give one of them memory of its own in the app, by clone(), or load only one of them by select="
            problems[other.key] = Problem(other.key, found, "the same", remedy)
    if problems:
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", [*problems.values()])


def _sharing(views: Mapping[str, View]) -> Iterator[tuple[_Range, _Range]]:
    """Yields the pairs of pieces, of different keys, that share memory."""
    ranges = sorted(_ranges(views), key=lambda each: each[:3])
    cluster: list[_Range] = []
    end = 0
    for each in ranges:
        if cluster and (each.device != cluster[0].device or each.begin >= end):
            yield from _sharing_in(cluster, end)
            cluster = []
        end = max(end, each.end) if cluster else each.end
        cluster.append(each)
    yield from _sharing_in(cluster, end)


def _ranges(views: Mapping[str, View]) -> Iterator[_Range]:
    for key, view in views.items():
        for piece in view.pieces:
            begin, nbytes = piece.tensor.data_ptr(), extent(piece.tensor)
            if nbytes:
                yield _Range(str(piece.tensor.device), begin, begin + nbytes, key, piece)


def extent(tensor: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first element to the end of its last one."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()


def _sharing_in(cluster: list[_Range], end: int) -> Iterator[tuple[_Range, _Range]]:
    """Yields such pairs from pieces whose ranges overlap; columns of one matrix overlap, but share nothing."""
    if len({each.key for each in cluster}) < 2:
        return
    begin, unit = cluster[0].begin, _unit(cluster)
    taken = torch.zeros((end - begin) // unit, dtype=torch.bool, device="cpu")
    for number, each in enumerate(cluster):
        places = each.within(taken, begin, unit)
        if places.any():
            yield from ((one, each) for one in cluster[:number] if one.key != each.key and _do_share(one, each))
        places.fill_(True)


def _do_share(one: _Range, other: _Range) -> bool:
    begin, unit = min(one.begin, other.begin), _unit([one, other])
    taken = torch.zeros((max(one.end, other.end) - begin) // unit, dtype=torch.bool, device="cpu")
    one.within(taken, begin, unit).fill_(True)
    return bool(other.within(taken, begin, unit).any())


def _unit(ranges: list[_Range]) -> int:
    """Returns the greatest number of bytes that divides all offsets and sizes of elements."""
    first = ranges[0].begin
    return reduce(gcd, (number for each in ranges for number in (each.begin - first, each.piece.tensor.element_size())))


def _are_equal(reader: CheckpointReader, one: _Range, other: _Range, stored_key: Mapping[str, str]) -> bool:
    """Whether two pieces would write the same bytes to the memory that they share."""
    begin, size = min(one.begin, other.begin), max(one.end, other.end) - min(one.begin, other.begin)
    memory = torch.zeros(size, dtype=torch.uint8, device="cpu")
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    one.within(taken, begin, 1).fill_(True)
    one.within(memory, begin, 1).copy_(_bytes_of(reader, one, stored_key))
    differs = other.within(memory, begin, 1) != _bytes_of(reader, other, stored_key)
    return not bool((differs & other.within(taken, begin, 1)).any())


def _bytes_of(reader: CheckpointReader, each: _Range, stored_key: Mapping[str, str]) -> torch.Tensor:
    """Reads the stored values of a piece; returns its bytes, with one more dimension for the bytes of an element."""
    stored = reader.read(stored_key.get(each.key, each.key), each.piece.box).to(each.piece.tensor.dtype)
    return flat_bytes(stored).reshape([*each.piece.tensor.shape, each.piece.tensor.element_size()])
