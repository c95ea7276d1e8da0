"""Compares stored tensors that are one and the same memory in the app, such as tied parameters.

Where each is stored by itself, only one of them can be read into the memory; the others must be equal to it, or the one
that comes last would silently win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardopt.checkpoint.reading.fetch import pieces_in_order
from shardopt.checkpoint.reading.open_file import OpenFile, ReadRequest
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece, View


def refuse_unequal(
    reader: CheckpointReader, views: Mapping[str, View], tied: Mapping[str, str], stored_key: Mapping[str, str]
) -> None:
    """Raises MismatchError unless stored tensors that are tied in the app are equal, as far as this rank has them.

    Args:
        tied: key of a tensor → key of the first one with which it is one memory.
        stored_key: key of the app → key of the checkpoint, where they differ.
    """
    problems = []
    for key, tied_to in tied.items():
        keys = stored_key.get(key, key), stored_key.get(tied_to, tied_to)
        if not all(_is_equal(reader, *keys, piece.box) for piece in views[key].pieces):
            stored = f"other values than {tied_to} in the checkpoint"
            required = "the same: both are one tensor in the app"
            problems.append(Problem(key, stored, required, "untie them in the app, or load one of them alone"))
    if problems:
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", problems)


def _is_equal(reader: CheckpointReader, key: str, other: str, box: Box) -> bool:
    if reader.key_in_files(key) == reader.key_in_files(other):
        return True
    dtype = reader.info(key).dtype
    if dtype != reader.info(other).dtype:
        return False
    reads, other_reads = _reads(reader, key, box, dtype), _reads(reader, other, box, dtype)
    cut_alike = [*map(_geometry, reads)] == [*map(_geometry, other_reads)]
    checksums = list(_checksums(reads))
    if cut_alike and all(checksums) and checksums == list(_checksums(other_reads)):
        return True
    return all(
        torch.equal(_raw(reader.read(key, piece)), _raw(reader.read(other, piece)))
        for piece in pieces_in_order(box, dtype.itemsize)
    )


def _reads(reader: CheckpointReader, key: str, box: Box, dtype: torch.dtype) -> list[tuple[OpenFile, ReadRequest]]:
    return list(reader.requests(key, [Piece(box, torch.empty(box.sizes, dtype=dtype, device="meta"))]))


def _geometry(read: tuple[OpenFile, ReadRequest]) -> tuple[Any, ...]:
    """Returns the place of each element in a stored box: equal bytes laid out otherwise are not equal."""
    _, _, sizes, wanted, target = read[1]
    return sizes, wanted, target.shape, target.stride(), target.storage_offset()


def _checksums(reads: list[tuple[OpenFile, ReadRequest]]) -> Iterator[bytes]:
    """Yields the checksums of the stored boxes. Equal ones mean equal boxes; others may be of bytes not asked for."""
    return (file.checksums(request.entry) for file, request in reads)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
