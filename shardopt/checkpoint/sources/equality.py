"""Compares stored tensors by their checksums or, if these do not decide, by their bytes."""

from __future__ import annotations

import torch

from shardopt.checkpoint.format.tensor_bytes import flat_bytes
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.checking import pieces_in_order
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece


def checksums_are_equal(
    reader: CheckpointReader, key: str, other_reader: CheckpointReader, other: str, box: Box
) -> bool:
    """Whether a box of two stored tensors is known to be equal: cut alike, with equal checksums.

    Checksums are of whole stored boxes, also of bytes not asked for, and some formats have none: False says nothing.
    """
    if reader.info(key).dtype != other_reader.info(other).dtype:
        return False
    cuts, sums = _cuts_and_checksums(reader, key, box)
    other_cuts, other_sums = _cuts_and_checksums(other_reader, other, box)
    return cuts == other_cuts and bool(sums or not box.numel) and all(sums) and sums == other_sums


def bytes_are_equal(reader: CheckpointReader, key: str, other: str, box: Box) -> bool:
    """Whether a box of two tensors of a checkpoint has the same dtype and bytes."""
    if reader.key_in_files(key) == reader.key_in_files(other) or checksums_are_equal(reader, key, reader, other, box):
        return True
    dtype = reader.info(key).dtype
    return dtype == reader.info(other).dtype and all(
        torch.equal(flat_bytes(reader.read(key, piece)), flat_bytes(reader.read(other, piece)))
        for piece in pieces_in_order(box, dtype.itemsize)
    )


def _cuts_and_checksums(reader: CheckpointReader, key: str, box: Box) -> tuple[list[object], list[bytes]]:
    """Returns, for each stored box that overlaps `box`, the overlap in both coordinates, and its checksums."""
    wanted = torch.empty(box.sizes, dtype=reader.info(key).dtype, device="meta")
    reads = reader.requests([(key, [Piece(box, wanted)])])
    targets = [read.target for read in reads]
    strides = [(target.storage_offset(), target.stride()) for target in targets]  # a transposed tensor is another one
    cuts: list[object] = [(read.sizes, read.wanted, at) for read, at in zip(reads, strides, strict=True)]
    return cuts, [read.file.checksums(read.entry) for read in reads]
