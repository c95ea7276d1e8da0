"""The contents of an open checkpoint as leaves of a tree, and as JSON."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from shardopt.checkpoint.sources.contents import CheckpointContents
from shardopt.checkpoint.text import nbytes_text, plural
from shardopt.cli.output import cell_width, shortened
from shardopt.cli.tree import Leaf, patterns_of
from shardopt.errors import StateError
from shardopt.state.paths import PARAM_GROUPS
from shardopt.state.values import encode_value

_LONGEST_VALUE = 200
_WIDEST_LINE = 60  # after which a list continues in the next one
_MOST_PATTERNS = 4
_MOST_BOXES = 16
_RANK_OF_FILE = re.compile(r"-r(\d{5,9})(?:-\d+)?\.", re.ASCII)


def leaves_of(
    contents: CheckpointContents, wanted: Callable[[str], bool], show_all: bool = False, boxes: bool = False
) -> Iterator[Leaf]:
    """Yields a leaf for each wanted key; one for all parameters of an optimizer with equal options.

    Args:
        show_all: whether long texts are whole.
        boxes: whether each tensor has a line for each box.
    """
    stored = contents.manifest
    alike_boxes: dict[Hashable, int] = {}
    for key in filter(wanted, stored.tensors):
        _, dtype, layout, tied_to, _ = stored.tensors[key]
        # One number for equal cuts, which are the same object for most tensors of a checkpoint.
        cuts = alike_boxes.setdefault(id(layout.boxes), alike_boxes.setdefault(layout.boxes, len(alike_boxes)))
        notes = [f"in {plural(len(layout.boxes), 'box')}"] if len(layout.boxes) > 1 else []
        notes += [f"tied to {tied_to}"] if tied_to is not None else []
        counted = prod(layout.shape) if tied_to is None else 0
        yield Leaf(
            key=key,
            alike=("tensor", dtype.name, layout.shape, cuts, tied_to),
            text=f"{dtype.name} {list(layout.shape)}",
            notes=", ".join(notes),
            dtype=dtype.name,
            elements=counted,
            nbytes=counted * dtype.itemsize,
            details=tuple(box_lines(contents, key, show_all)) if boxes else (),
        )
    options: defaultdict[tuple[str, ...], dict[str, Any]] = defaultdict(dict)
    for key in filter(wanted, stored.values):
        path, value = stored.values[key]
        if len(path) > 1 and path[-2] == PARAM_GROUPS and isinstance(value, dict):
            options[tuple(map(str, path[:-1]))][str(path[-1])] = value
        else:
            yield Leaf(key, ("value", text := value_text(value, show_all)), f"= {text}")
    for root, by_parameter in options.items():
        yield from _options_leaves(".".join(root), by_parameter, show_all)
    for key in filter(wanted, stored.per_rank):
        yield Leaf(key, "per rank", "a value of each rank")


def _options_leaves(root: str, by_parameter: Mapping[str, dict[str, Any]], show_all: bool) -> Iterator[Leaf]:
    """Yields a leaf for each distinct set of options, with its parameters."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name, options in by_parameter.items():
        alike[json.dumps(typed(options, name), sort_keys=True)].append(name)
    for i, names in enumerate(alike.values(), 1):
        options = dict(by_parameter[names[0]])
        given = options.pop("given", {})
        if isinstance(given, dict) and any(options.get(name) != value for name, value in given.items()):
            options["given"] = given
        texts = [f"{name}={value_text(value, show_all)}" for name, value in options.items()]
        patterns = patterns_of(names)
        shown = patterns if show_all else patterns[:_MOST_PATTERNS]
        details = [*_wrapped(texts), *(f"of {pattern}" for pattern in shown)]
        if len(shown) < len(patterns):
            details.append(f"and {len(patterns) - len(shown):,} more")
        key = f"{root}.{'each' if len(alike) == 1 else f'set {i}'}"
        yield Leaf(key, ("options", root, i), f"of {plural(len(names), 'parameter')}", details=tuple(details))


def _wrapped(texts: Sequence[str]) -> Iterator[str]:
    """Yields lines of texts, a few in each, separated by commas."""
    line = ""
    for i, text in enumerate(texts):
        line += text if i == len(texts) - 1 else f"{text}, "
        if cell_width(line) > _WIDEST_LINE or i == len(texts) - 1:
            yield line.rstrip()
            line = ""


def box_lines(contents: CheckpointContents, key: str, show_all: bool) -> Iterator[str]:
    """Yields a line for each box of a tensor, with its file."""
    layout = contents.manifest.tensors[key].layout
    pairs = list(zip(layout.boxes, layout.files, strict=True))
    for box, file in pairs if show_all else pairs[:_MOST_BOXES]:
        yield f"{box} in {contents.manifest.files[file].path}"
    if len(pairs) > _MOST_BOXES and not show_all:
        yield f"and {len(pairs) - _MOST_BOXES:,} more (--all)"


def writer_rank(name: str, number: int) -> int:
    """Returns the rank that wrote a data file; for other formats the number of the file."""
    match = _RANK_OF_FILE.search(name)
    return int(match[1]) if match else number


def value_text(value: Any, show_all: bool = False) -> str:
    """Returns a plain value on one line."""
    text = text_of(value)
    text = " ".join(text.split()) if "\n" in text else text  # of an array
    return text if show_all or cell_width(text) <= _LONGEST_VALUE else shortened(text, _LONGEST_VALUE)


def text_of(value: Any) -> str:
    """Returns a plain value as Python writes it; as JSON if Python cannot, as for ints of 5,000 digits."""
    try:
        return repr(value)
    except ValueError:
        return json.dumps(typed(value, "value"))


def typed(value: Any, key: str) -> Any:
    """Returns a plain value in the JSON form of docs/format.md; its text if it has no such form."""
    try:
        return encode_value(value, key)
    except StateError:  # of another format's checkpoint
        return {"text": repr(value)}


def head_line(contents: CheckpointContents) -> str:
    """Returns the summary of a checkpoint that follows its URL."""
    stored = contents.manifest
    saved = f"saved by {plural(stored.world_size, 'rank')} as {stored.save_id}"
    own, beside = (
        f"{plural(len(files), 'file')}, {nbytes_text(sum(file.nbytes for file in files))}"
        for files in (stored.own_files, stored.referred_files)
    )
    return f"{saved}, {own}" + (f", and of earlier saves {beside}" if stored.referred_files else "")


def tensor_document(contents: CheckpointContents, key: str) -> dict[str, Any]:
    """Returns everything about a tensor except its bytes, as JSON."""
    _, dtype, layout, tied_to, _ = contents.manifest.tensors[key]
    names = [contents.manifest.files[file].path for file in layout.files]
    elements = prod(layout.shape)
    return {
        "dtype": dtype.name,
        "shape": list(layout.shape),
        "elements": elements,
        "bytes": elements * dtype.itemsize,
        "tied_to": tied_to,
        "boxes": [
            {"offsets": list(box.offsets), "sizes": list(box.sizes), "file": name}
            for box, name in zip(layout.boxes, names, strict=True)
        ],
    }


def document(contents: CheckpointContents, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the contents of a checkpoint as JSON."""
    stored = contents.manifest
    return {
        "url": contents.url,
        "save_id": stored.save_id,
        "saved_at": stored.saved_at,
        "written_by": stored.written_by,
        "world_size": stored.world_size,
        "metrics": stored.metrics,
        "files": [{"name": file.path, "bytes": file.nbytes} for file in stored.files],
        "tensors": {key: tensor_document(contents, key) for key in filter(wanted, sorted(stored.tensors))},
        "values": {key: typed(stored.values[key][1], key) for key in filter(wanted, sorted(stored.values))},
        "per_rank": sorted(filter(wanted, stored.per_rank)),
        "unread": {key: contents.source.unread[key] for key in filter(wanted, sorted(contents.source.unread))},
    }
