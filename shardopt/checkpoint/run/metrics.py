"""What retention goes by: when a checkpoint was saved, and its metrics.

Metrics are numbers by name, in the manifest, and numbers added after the commit.

A committed checkpoint is never changed: what is added stands beside it in the root, as `step-00000500.metrics.json`,
with the name of the save that it is of.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from shardopt.checkpoint.format.constants import METRICS_NAME, damaged, load_json
from shardopt.checkpoint.run.root import record_in
from shardopt.checkpoint.sources.own import manifest_in
from shardopt.checkpoint.storage import Storage
from shardopt.errors import CorruptionError, UnreadableError

_log = logging.getLogger("shardopt.checkpoint")
_told: set[str] = set()  # URLs of damaged files, which removals read each time


class Noted(NamedTuple):
    """The time and the metrics of one checkpoint, which retention goes by, and its id, by which exports are known.

    Args:
        saved_at: in seconds since 1970 began; None where that is not known.
        metrics: numbers by name.
        save_id: the id of the save that made it; None where there is none.
    """

    saved_at: float | None
    metrics: Mapping[str, float]
    save_id: str | None = None


def noted_of(checkpoint: Storage) -> Noted:
    """Reads when a checkpoint was saved, and its metrics; nothing of one that does not exist.

    Raises:
        CheckpointError: what should have them cannot be read. CorruptionError: it is damaged.
    """
    found = manifest_in(checkpoint)
    if found is None:
        return Noted(None, {})
    manifest, _ = found
    own = _metrics_of_file(checkpoint) if manifest.metrics is None else manifest.metrics
    return Noted(manifest.saved_at, {**own, **added_to(checkpoint, manifest.save_id)}, manifest.save_id)


def is_damage(error: BaseException) -> bool:
    """Whether an error says that stored bytes are others than were written, and not that a disk fails for now."""
    return isinstance(error, CorruptionError) and not isinstance(error, UnreadableError)


def added_to(checkpoint: Storage, save_id: str) -> dict[str, float]:
    """Returns the metrics added to a checkpoint of this save; logs a damaged file, once, and returns none.

    Raises:
        CheckpointError: it cannot be read. UnreadableError: the disk fails to return what is there.
    """
    beside = checkpoint.parent()
    if beside is None:
        return {}
    root, name = beside
    where = f"{root.url}/{record_name(name)}"
    try:
        data = record_in(root, record_name(name))
        if data is None:
            return {}
        record = load_json(data, where)
        added = {key: float(value) for key, value in record["metrics"].items()} if record["save_id"] == save_id else {}
        _told.discard(where)
        return added
    except UnreadableError:  # an addition would replace what is there
        raise
    except (CorruptionError, TypeError, ValueError, KeyError, AttributeError):
        if where not in _told:
            _told.add(where)
            _log.warning(
                "%s is no record of metrics: add them again; the checkpoint itself is not touched by this [damaged]",
                where,
            )
        return {}


def add_to(checkpoint: Storage, save_id: str, metrics: Mapping[str, float]) -> None:
    """Adds metrics to a checkpoint of this save; a repeated name replaces the earlier number."""
    beside = checkpoint.parent()
    assert beside is not None  # it has a name in its root
    root, name = beside
    record = {"save_id": save_id, "metrics": {**added_to(checkpoint, save_id), **metrics}}
    root.make()
    root.publish(record_name(name), json.dumps(record).encode())


def record_name(name: str) -> str:
    """Returns the name of the file with the added metrics of the checkpoint of this name."""
    return f"{name}.{METRICS_NAME}"


def remove_records(root: Storage, there: Collection[str], removed: Iterable[str]) -> None:
    """Removes the metrics that were added to checkpoints under a root that are removed, where there are any.

    Args:
        there: the names directly under the root.
        removed: names of checkpoints.
    """
    for name in map(record_name, removed):
        if name in there:
            root.remove(name)


def _metrics_of_file(checkpoint: Storage) -> dict[str, float]:
    """Reads the metrics of an old checkpoint, which had a file for them instead of its manifest."""
    data = record_in(checkpoint, METRICS_NAME)
    where = f"{checkpoint.url}/{METRICS_NAME}"
    try:
        return {} if data is None else {name: float(value) for name, value in load_json(data, where).items()}
    except (TypeError, ValueError):
        raise damaged(where, "what is no number") from None
