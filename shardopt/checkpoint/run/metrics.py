"""Metrics of a checkpoint: numbers by name, in its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardopt.checkpoint.commit import read_manifest
from shardopt.checkpoint.format.constants import METRICS_NAME, damaged, load_json
from shardopt.checkpoint.storage import Storage
from shardopt.errors import CheckpointNotFoundError, Problem, StateError


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers.

    Raises:
        StateError: what is none is named.
    """
    if not isinstance(metrics, Mapping):
        problem = Problem("metrics", repr(metrics)[:80], "numbers by name", 'give a dict, such as {"loss": 0.5}')
        raise StateError("metrics cannot be kept", [problem])
    numbers: dict[str, float] = {}
    problems = []
    for name, value in metrics.items():
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several elements
            found = repr(value)[:80] if isinstance(name, str) else f"{value!r} under {name!r}"[:80]
            problems.append(Problem(f"metrics.{name}", found, "a number under a name", "give one, or leave it out"))
    if problems:
        raise StateError("metrics cannot be kept", problems)
    return numbers


def pack_metrics(metrics: Mapping[str, Any]) -> bytes:
    """As JSON. Raises StateError, as `numbers_of`."""
    return json.dumps(numbers_of(metrics)).encode()


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
        data = checkpoint.read(METRICS_NAME)
    except FileNotFoundError:
        return {}
    where = f"{checkpoint.url}/{METRICS_NAME}"
    try:
        return {name: float(value) for name, value in load_json(data, where).items()}
    except (TypeError, ValueError):
        raise damaged(where, "what is no number") from None
