"""A checkpoint: its tree with sums, its tensors, who wrote which box of them, and numbers about their elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.format.manifest import StoredLayout, encode_boxes
from shardopt.checkpoint.progress import progress_bar
from shardopt.checkpoint.run.branches import by_numbers
from shardopt.checkpoint.sources.contents import CheckpointContents
from shardopt.cli.contents import leaves_of, writer_rank
from shardopt.cli.tree import Row, rows_of, tree_of
from shardopt.runtime.late import late

if TYPE_CHECKING:
    from shardopt.cli import statistics as of_elements
    from shardopt.cli.statistics import Statistics
else:
    of_elements = late("shardopt.cli.statistics")


NOT_FINITE = {"nan": "NaN", "positive_infinity": "inf", "negative_infinity": "-inf"}
"""The counts of elements that are not finite, and what they count."""


def checkpoint_document(contents: CheckpointContents, values: bool) -> dict[str, Any]:
    """Returns a checkpoint as JSON. Local.

    Args:
        values: whether every byte is read, twice, for the statistics of each tensor.

    Raises:
        CorruptionError: what is stored is not what was written.
    """
    stored = contents.manifest
    layouts: dict[tuple[Any, ...], int] = {}
    wires: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for key in sorted(stored.tensors, key=by_numbers):
        _, dtype, layout, tied_to, _ = stored.tensors[key]
        alike = (layout.shape, id(layout.boxes), layout.files)  # one box may have several writers, as replicas have
        layouts.setdefault(alike, len(layouts))
        if len(wires) < len(layouts):
            wires.append(_layout(contents, layout))
        elements = math.prod(layout.shape)
        numbers[key] = len(tensors)
        wire = {"key": key, "dtype": dtype.name, "elements": elements, "bytes": elements * dtype.itemsize}
        tensors.append({**wire, "layout": layouts[alike]} | ({} if tied_to is None else {"tied_to": tied_to}))
    if values:
        for key, found in _statistics(contents).items():
            tensors[numbers[key]]["statistics"] = found
    root = tree_of(leaves_of(contents, lambda key: True))
    return {
        "url": contents.url,
        "save_id": stored.save_id,
        "saved_at": stored.saved_at,
        "seconds": stored.seconds,
        "world_size": stored.world_size,
        "metrics": stored.metrics,
        "files": len(stored.files),
        "file_bytes": sum(file.nbytes for file in stored.files),
        "tensor_count": root.sums.tensors,
        "elements": root.sums.elements,
        "bytes": root.sums.nbytes,
        "has_statistics": values,
        "not_finite": _not_finite(tensors) if values else None,
        "layouts": wires,
        "tensors": tensors,
        "tree": [_row(row, numbers) for row in rows_of(root, collapse=False)],
    }


def _layout(contents: CheckpointContents, layout: StoredLayout) -> dict[str, Any]:
    files = contents.manifest.files
    return {**encode_boxes(layout), "ranks": [writer_rank(files[number].name, number) for number in layout.files]}


def _row(row: Row, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Returns a row of the tree: of a tensor its number, of a value its text, of a module its sums."""
    node, wire = row.node, {"level": row.level, "name": row.name}
    if node.leaf is not None and node.leaf.key in numbers:
        wire["tensor"] = numbers[node.leaf.key]
    elif node.leaf is not None:
        wire["text"] = "; ".join([node.leaf.text, *node.leaf.details])
    if node.children:
        wire |= {"tensors": node.sums.tensors, "elements": node.sums.elements, "bytes": node.sums.nbytes}
    return wire


def _statistics(contents: CheckpointContents) -> dict[str, dict[str, Any]]:
    """Returns the statistics of each tensor, and its 2-norm and root mean square, by key."""
    stored = contents.manifest
    reader = of_elements.reader_of(contents)
    keys = [key for key, tensor in stored.tensors.items() if tensor.tied_to is None]
    found: dict[str, dict[str, Any]] = {}
    with progress_bar("reading") as progress:
        for number, key in enumerate(keys, 1):
            statistics = of_elements.statistics_of(reader, key)
            # All bins are equally wide: ten thousand lists of edges would be half of the page.
            edges = [statistics.edges[0], statistics.edges[-1]] if statistics.edges else []
            found[key] = {**asdict(statistics), **_norms(statistics), "edges": edges}
            if progress is not None:
                progress(number, len(keys))
    return found


def _not_finite(tensors: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many elements of all tensors are NaN and infinite, and how many tensors have such."""
    found = [each["statistics"] for each in tensors if "statistics" in each]
    sums = {name: sum(each[name] for each in found) for name in NOT_FINITE}
    return {**sums, "tensors": sum(any(each[name] for name in NOT_FINITE) for each in found)}


def _norms(statistics: Statistics) -> dict[str, float]:
    """Returns the 2-norm and the root mean square of the finite elements."""
    finite = statistics.elements - statistics.nan - statistics.positive_infinity - statistics.negative_infinity
    if statistics.mean is None or statistics.std is None:
        return {"norm": 0.0, "rms": 0.0}
    rms = math.hypot(statistics.mean, statistics.std)  # E x² = (E x)² + the variance
    return {"norm": rms * math.sqrt(finite), "rms": rms}
