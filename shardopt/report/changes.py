"""What has changed since another checkpoint: the difference of each tensor, in a grid of layers and their tensors."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.sources.contents import CheckpointContents
from shardopt.checkpoint.sources.detect_format import open_source
from shardopt.checkpoint.storage import storage_of
from shardopt.runtime.late import late

if TYPE_CHECKING:
    from shardopt.cli import statistics as of_elements
    from shardopt.cli.difference import TensorDifference
    from shardopt.cli.verbs import diff as of_difference
else:
    of_elements, of_difference = late("shardopt.cli.statistics"), late("shardopt.cli.verbs.diff")

_LAYER = re.compile(r"((?:.*?\.)??\d+)\.(.+)", re.ASCII | re.DOTALL)


def changes_document(contents: CheckpointContents, against: str) -> dict[str, Any]:
    """Returns the differences from another checkpoint, as `shardopt diff` finds them, as JSON. Local.

    Args:
        contents: the checkpoint.
        against: the URL of the earlier one.

    Raises:
        CheckpointNotFoundError: there is none. CorruptionError: what is stored is not what was written.
    """
    before = CheckpointContents(open_source(storage_of(against)))
    found = of_difference.compare(of_elements.reader_of(before), of_elements.reader_of(contents), {}, None)
    return {
        "url": before.url,
        "save_id": before.manifest.save_id,
        "saved_at": before.manifest.saved_at,
        "world_size": before.manifest.world_size,
        "tensors": [_change(key, each) for key, each in found.tensors.items()],
        "values": [each.key for each in found.values],
        "only_before": list(found.only_in_a),
        "only_now": list(found.only_in_b),
        "not_compared": list(found.not_compared),
        "unread": list(found.unread),
    }


def _change(key: str, found: TensorDifference) -> dict[str, Any]:
    """Returns the difference of a tensor; without the two dtypes and shapes if they are equal."""
    wire = {"key": key, "layer": layer_of(key)[0], **asdict(found)}
    if found.a == found.b:
        del wire["a"], wire["b"]
    return wire


def layer_of(key: str) -> tuple[str, str]:
    """Returns the layer of a tensor, and its name within: "model.layers.3" and "attn.wq.weight".

    A layer ends with the first part of the key that is a number. Without one, it is all but the last part.
    """
    match = _LAYER.fullmatch(key)
    if match is not None:
        return match[1], match[2]
    layer, _, name = key.rpartition(".")
    return layer, name
