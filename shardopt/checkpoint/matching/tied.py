"""Compares stored tensors that are one and the same memory in the app, such as tied parameters.

Where each is stored by itself, only one of them can be read into the memory; the others must be equal to it, or the one
that comes last would silently win.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardopt.checkpoint.sources.equality import bytes_are_equal
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.pieces import View


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
        if not all(bytes_are_equal(reader, *keys, piece.box) for piece in views[key].pieces):
            stored = f"other values than {tied_to} in the checkpoint"
            required = "the same: both are one tensor in the app"
            problems.append(Problem(key, stored, required, "untie them in the app, or load one of them alone"))
    if problems:
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", problems)
