"""Metrics of a checkpoint: numbers by name, in its manifest."""

from __future__ import annotations

from shardopt.checkpoint.format.constants import METRICS_NAME, damaged, load_json
from shardopt.checkpoint.sources.read_manifest import read_manifest
from shardopt.checkpoint.storage import Storage
from shardopt.errors import CheckpointNotFoundError


def metrics_of(checkpoint: Storage) -> dict[str, float]:
    """Returns the metrics of a checkpoint; empty where it has none, or where there is no checkpoint.

    Raises:
        CorruptionError: what should have them is damaged.
    """
    try:
        manifest, _ = read_manifest(checkpoint)
    except CheckpointNotFoundError:
        return {}
    if manifest.metrics is not None:
        return dict(manifest.metrics)
    return _metrics_of_file(checkpoint)


def _metrics_of_file(checkpoint: Storage) -> dict[str, float]:
    """Reads the metrics of a checkpoint from before they were in manifests, when a file had them."""
    try:
        data = checkpoint.read_record(METRICS_NAME)
    except FileNotFoundError:
        return {}
    where = f"{checkpoint.url}/{METRICS_NAME}"
    try:
        return {name: float(value) for name, value in load_json(data, where).items()}
    except (TypeError, ValueError):
        raise damaged(where, "what is no number") from None
