"""Optimizers that have not stepped yet are given the state that a checkpoint is to be loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from shardopt.checkpoint.commit import read_manifest
from shardopt.checkpoint.manifest import Manifest
from shardopt.checkpoint.storage import storage_of
from shardopt.ranks import ranks_of
from shardopt.state import FlatState, Path, flatten


def init_unstepped(url: str, app: Mapping[str, Any], deadline_seconds: float) -> None:
    """Calls `init_state` of the optimizers in `app` that have no state where the checkpoint has some. Collective.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: there is no manifest to be read.
    """
    flat, _ = ranks_of().agree(
        f"looking into {url}",
        work=lambda: _uninitialized(flatten(app), read_manifest(storage_of(url))[0]),
        deadline_seconds=deadline_seconds,
    )
    for optimizer in flat:
        optimizer.init_state()  # outside of the round, as some communicate by themselves


def _uninitialized(flat: FlatState, manifest: Manifest) -> list[Any]:
    """The optimizers that have no tensor in their state, and some in the manifest."""
    stored = [tensor.path for tensor in manifest.tensors.values()]
    own = [flat.leaves[key].path for key in flat.tensors()]
    found = []
    for each in flat.handbacks:
        state = (*each.path, "state")
        can = isinstance(each.target, Optimizer) and hasattr(each.target, "init_state")
        if can and _any_below(stored, state) and not _any_below(own, state):
            found.append(each.target)
    return found


def _any_below(paths: list[Path], root: Path) -> bool:
    return any(path[: len(root)] == root for path in paths)
