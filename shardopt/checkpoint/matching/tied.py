"""Tensors of an app that are one and the same memory, such as tied parameters.

Where each is stored by itself, only one of them can be read into the memory; the others must be equal to it, or the one
that comes last would silently win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from shardopt.checkpoint.reading.data_file_reader import OpenFile
from shardopt.checkpoint.reading.fetch import pieces_in_order
from shardopt.checkpoint.reading.read_plan import ReadRequest
from shardopt.checkpoint.reading.reader import CheckpointReader
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece, View


def refuse_unequal(
    reader: CheckpointReader, views: Mapping[str, View], tied: Mapping[str, str], stored_key: Mapping[str, str]
) -> None:
    """Raises MismatchError unless what is stored under the keys of twins is equal, as far as this rank holds it.

    Args:
        stored_key: key of the app → key of the checkpoint, where they differ.
    """
    problems = []
    for key, twin in tied.items():
        keys = stored_key.get(key, key), stored_key.get(twin, twin)
        if not all(_is_equal(reader, *keys, piece.box) for piece in views[key].pieces):
            found, required = f"other values than {twin} in the checkpoint", "the same: both are one tensor in the app"
            problems.append(Problem(key, found, required, "untie them in the app, or load one of them alone"))
    if problems:
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", problems)


def _is_equal(reader: CheckpointReader, key: str, twin: str, box: Box) -> bool:
    if reader.key_in_files(key) == reader.key_in_files(twin):
        return True
    dtype = reader.info(key).dtype
    if dtype != reader.info(twin).dtype:
        return False
    here, there = _stored(reader, key, box, dtype), _stored(reader, twin, box, dtype)
    cut_alike = [request.sizes for _, request in here] == [request.sizes for _, request in there]
    if cut_alike and list(_checksums(here)) == list(_checksums(there)):
        return True
    return all(
        torch.equal(_raw(reader.read(key, part)), _raw(reader.read(twin, part)))
        for part in pieces_in_order(box, dtype.itemsize)
    )


def _stored(reader: CheckpointReader, key: str, box: Box, dtype: torch.dtype) -> list[tuple[OpenFile, ReadRequest]]:
    return list(reader.requests(key, [Piece(box, torch.empty(box.sizes, dtype=dtype, device="meta"))]))


def _checksums(stored: list[tuple[OpenFile, ReadRequest]]) -> Iterator[bytes]:
    """Of all segments of the stored boxes. Equal ones tell of equal boxes; others may be of bytes not asked for."""
    return (file.checksums(request.entry) for file, request in stored)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
