"""Keys of an optimizer's state, by which a comparison sees that one side only has some; and what its shapes tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.errors import Problem
from shardopt.state import Handback, Path, join


def state_key(optimizer: Handback) -> str:
    """The key under which the state of an optimizer stands in an app."""
    return join((*optimizer.path, "state"))


def keys_of_state(optimizer: Handback, keys: Iterable[str]) -> list[str]:
    """Those of the keys, the app's or a checkpoint's under the app's names, that are within an optimizer's state."""
    prefix = f"{state_key(optimizer)}."
    return [key for key in keys if key.startswith(prefix)]


def with_reason_of_parts(
    problem: Problem, path: Path, stored: Sequence[int], wanted: Sequence[int], manifest: Manifest
) -> Problem:
    """Says why state of rows does not fit, where either side has it for parts of a table's columns.

    A column-wise sharded table with R rows in P parts has state of rows (row-wise Adagrad's) for each part: shape
    [P · R]. What a row is divided by comes from the gradients of its part, and so neither side follows from the other.

    Args:
        path: of the state, whose last but one member is the name of its parameter.
        stored, wanted: its shapes in the checkpoint and in the app.

    Returns:
        The problem as it is where the shapes tell of nothing of the kind.
    """
    name = str(path[-2]) if len(path) > 1 else ""
    if len(stored) != 1 or len(wanted) != 1 or not name:
        return problem
    for key, tensor in manifest.tensors.items():
        rows = tensor.layout.shape[0] if len(tensor.layout.shape) == 2 else 0
        if rows and (key == name or key.endswith(f".{name}")) and not (stored[0] % rows or wanted[0] % rows):
            weights = re.escape(key.removesuffix(name))
            remedy = (
                "what a row is divided by is another number for each part of the columns, and cannot be had from that "
                "of other parts: shard the columns into as many parts as when it was saved, or begin this state anew, "
                f'and load the weights alone (select=r"^{weights}")'
            )
            found, required = (
                f"{text}, for {_parts(shape[0] // rows)}"
                for text, shape in ((problem.found, stored), (problem.required, wanted))
            )
            return replace(problem, found=found, required=required, remedy=remedy)
    return problem


def _parts(count: int) -> str:
    return "whole rows" if count == 1 else f"rows in {count} parts of the columns"
