"""The checkpoints of a run by step: directories `step-00000500` under one root."""

from __future__ import annotations

import re

from shardopt.checkpoint.format import MANIFEST_NAME
from shardopt.checkpoint.storage import Storage

_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """What the directory of a step is called."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Which step a directory is of; None if of none."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def steps_in(root: Storage) -> list[int]:
    """The steps that have a directory, whatever is in it, ascending."""
    return sorted(step for step in map(step_of, root.names()) if step is not None)


def committed_in(root: Storage) -> list[int]:
    """The steps whose checkpoint is committed, ascending."""
    return [step for step in steps_in(root) if root.child(name_of(step)).exists(MANIFEST_NAME)]
