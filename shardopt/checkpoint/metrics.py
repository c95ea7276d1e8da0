"""What was measured of a checkpoint: numbers by name, in a file beside its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shardopt.checkpoint.format import METRICS_NAME, damaged, load_json
from shardopt.checkpoint.storage import Storage


def pack_metrics(metrics: Mapping[str, float]) -> bytes:
    """The file's bytes. Raises TypeError and ValueError where something is no number."""
    return json.dumps({name: float(each) for name, each in metrics.items()}).encode()


def metrics_of(checkpoint: Storage) -> dict[str, float]:
    """Those of a checkpoint; empty where it has none.

    Raises:
        CorruptionError: the file is damaged.
    """
    try:
        data = checkpoint.read(METRICS_NAME)
    except FileNotFoundError:
        return {}
    where = f"{checkpoint.url}/{METRICS_NAME}"
    try:
        return {name: float(value) for name, value in load_json(data, where).items()}
    except (TypeError, ValueError):
        raise damaged(where, "what is no number") from None
