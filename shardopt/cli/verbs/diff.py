"""`shardopt diff`: compares two checkpoints, regardless of the ranks that saved them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from shardopt import checkpoint
from shardopt.checkpoint import CheckpointReader
from shardopt.checkpoint.loading.renaming import names_by_rules, refuse_collisions, renamer
from shardopt.checkpoint.progress import Counter
from shardopt.checkpoint.run.branches import by_numbers
from shardopt.checkpoint.text import plural
from shardopt.cli.contents import head_line, typed, value_text
from shardopt.cli.difference import TensorDifference, difference_of
from shardopt.cli.output import Cell, Output, Span, cell_width
from shardopt.cli.rules import parse_rename
from shardopt.cli.tree import names_by_pattern, patterns_of
from shardopt.cli.verbs.show import chosen_by
from shardopt.errors import MismatchError, Problem
from shardopt.state.paths import PARAM_GROUPS

_MOST_LINES = 100
_LONGEST_CHANGE = 60  # columns of a value
_NOTHING = "nothing"
_OPAQUE = (bytes, np.ndarray, torch.Tensor)


class ValueDifference(NamedTuple):
    """A plain value that differs; `ranks` are those whose own value it is, if it is a value per rank."""

    key: str
    a: Any
    b: Any
    ranks: tuple[int, ...] = ()


class Comparison(NamedTuple):
    """The result of a comparison; keys are those of B.

    Args:
        tensors: by key, of both.
        values: those that differ.
        only_in_a, only_in_b: keys that the other has not.
        not_compared: values per rank that different numbers of ranks have saved.
        unread: contents of either that are stored in an unknown way, with what they are. They may differ.
    """

    tensors: Mapping[str, TensorDifference]
    values: Sequence[ValueDifference]
    only_in_a: Sequence[str]
    only_in_b: Sequence[str]
    not_compared: Sequence[str]
    unread: Mapping[str, str]

    @property
    def unequal(self) -> dict[str, TensorDifference]:
        """The tensors that differ."""
        return {key: found for key, found in self.tensors.items() if found.kind not in ("equal", "bits")}

    @property
    def is_different(self) -> bool:
        """Whether a difference was found."""
        return bool(self.unequal or self.values or self.only_in_a or self.only_in_b)

    @property
    def is_equal(self) -> bool:
        """Whether no difference was found, and all could be read."""
        return not (self.is_different or self.unread)


def diff(output: Output, *, a: str, b: str, rename: Sequence[str] | None, select: str | None, all: bool) -> int:
    """Compares two checkpoints; status 1 if they differ, or have what cannot be read."""
    rules = parse_rename(rename or ())
    with checkpoint.open(a) as reader_a, checkpoint.open(b) as reader_b:
        found = compare(reader_a, reader_b, rules, select)
        _print(output, reader_a, reader_b, found, all)
        output.data(_document(reader_a, reader_b, found))
    return 0 if found.is_equal else 1


def compare(a: CheckpointReader, b: CheckpointReader, rename: Mapping[str, str], select: str | None) -> Comparison:
    """Compares two open checkpoints. Local.

    Args:
        rename: regex → replacement, in turn, for the keys of A, as `load` has it for those of a checkpoint.
        select: a regex for keys that are compared, after renaming.

    Raises:
        MismatchError: two keys of A get one name, or neither has a key that is selected.
        CorruptionError: what is stored is not what was written.
    """
    wanted = chosen_by(None, select, "--select")
    roots = {path[:-2] for path, _ in b.manifest.values.values() if len(path) > 1 and path[-2] == PARAM_GROUPS}
    name_of = names_by_rules(a.manifest, rename, roots)
    refuse_collisions(name_of.items())
    renamed = renamer(rename)
    unread = {renamed(key): what for key, what in a.source.unread.items()} | dict(b.source.unread)
    unread = {key: unread[key] for key in sorted(filter(wanted, unread), key=by_numbers)}
    of_b = (*b.manifest.tensors, *b.manifest.values, *b.manifest.per_rank)
    keys_a = {name: key for key, name in name_of.items() if wanted(name) and name not in unread}
    keys_b = {key for key in of_b if wanted(key) and key not in unread}
    if select is not None and not (keys_a or keys_b or unread):
        required = f"a regex that is found in some key; A has {', '.join(islice(name_of.values(), 3)) or 'none'}"
        problem = Problem("--select", f"{select!r}, which no key of A or B has", required, "mend the regex")
        raise MismatchError("there is nothing to compare", [problem], code="nothing-selected")
    common = sorted(keys_a.keys() & keys_b, key=by_numbers)
    tensors = [name for name in common if keys_a[name] in a.manifest.tensors and name in b.manifest.tensors]
    total = sum(prod(info.shape) * info.dtype.itemsize for info in (a.info(keys_a[name]) for name in tensors))
    with checkpoint.progress_bar("comparing") as progress:
        done = Counter(total, progress)
        differences = {name: difference_of(a, keys_a[name], b, name, done.add) for name in tensors}
    values: list[ValueDifference] = []
    not_compared: list[str] = []
    per_rank_a, per_rank_b = _per_rank(a, b, keys_a.values()), _per_rank(b, a, keys_b)
    for name in common:
        key = keys_a[name]
        if name in differences:
            continue
        if key in a.manifest.per_rank and name in b.manifest.per_rank:
            if a.manifest.world_size != b.manifest.world_size:
                not_compared.append(name)
                continue
            for rank, (own, other) in enumerate(zip(per_rank_a, per_rank_b, strict=True)):
                if not _are_equal(own.get(key), other.get(name)):
                    values.append(ValueDifference(name, own.get(key), other.get(name), (rank,)))
        elif key in a.manifest.values and name in b.manifest.values:
            pair = a.read(key), b.read(name)
            if not _are_equal(*pair):
                values.append(ValueDifference(name, *pair))
        else:
            values.append(ValueDifference(name, _kind_of(a, key), _kind_of(b, name)))
    return Comparison(
        differences,
        values,
        sorted(keys_a.keys() - keys_b, key=by_numbers),
        sorted(keys_b - keys_a.keys(), key=by_numbers),
        not_compared,
        unread,
    )


def _per_rank(reader: CheckpointReader, other: CheckpointReader, keys: Collection[str]) -> list[Mapping[str, Any]]:
    """Reads the values of all ranks, if both sides have as many ranks with values to compare."""
    stored = reader.manifest
    if stored.per_rank.keys().isdisjoint(keys) or stored.world_size != other.manifest.world_size:
        return []
    if not other.manifest.per_rank:
        return []
    return [reader.per_rank(rank) for rank in range(stored.world_size)]


def _kind_of(reader: CheckpointReader, key: str) -> str:
    stored = reader.manifest
    return "a tensor" if key in stored.tensors else "a value" if key in stored.values else "a value of each rank"


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two plain values have the same types and values; NaN equals NaN."""
    return json.dumps(typed(one, "")) == json.dumps(typed(other, ""))


def _print(
    output: Output, reader_a: CheckpointReader, reader_b: CheckpointReader, found: Comparison, show_all: bool
) -> None:
    output.line("A  ", Span(reader_a.url, "bold"), f": {head_line(reader_a)}")
    output.line("B  ", Span(reader_b.url, "bold"), f": {head_line(reader_b)}")
    shown = {key: each for key, each in found.tensors.items() if each.kind != "equal"}
    output.table(_some(_tensor_lines(shown, show_all), show_all), right=[])
    value_lines = _value_lines(found.values, show_all)
    for line in _some(value_lines, show_all):
        output.line(*line)
    for side, style, keys in (("A", "red", found.only_in_a), ("B", "green", found.only_in_b)):
        patterns: list[list[Cell]] = [[Span(f"only in {side}: {each}", style)] for each in patterns_of(keys)]
        for line in _some(patterns, show_all):
            output.line(*line)
    for key in found.not_compared:
        why = "each rank has its own, and the numbers of ranks differ"
        output.line(Span(f"not compared: {key}: {why}", "yellow"))
    unread: list[list[Cell]] = [[Span(f"not compared: {key}: {what}", "yellow")] for key, what in found.unread.items()]
    for line in _some(unread, show_all):
        output.line(*line)
    equal = [each for each in found.tensors.values() if each.kind in ("equal", "bits")]
    by_checksum = sum(each.by_checksum for each in equal)
    summary = [f"{plural(len(equal), 'tensor')} equal ({by_checksum:,} by checksum)"]
    summary += [f"{len(found.unequal):,} differ"] if found.unequal else []
    other_bits = sum(each.other_bits for each in found.tensors.values())
    summary += [f"{plural(other_bits, 'equal element')} with other bits"] if other_bits else []
    summary += [f"{plural(len(found.values), 'value')} differ"] if found.values else []
    summary += [
        f"{len(keys):,} only in {side}" for side, keys in (("A", found.only_in_a), ("B", found.only_in_b)) if keys
    ]
    summary += [f"{plural(len(found.unread), 'key')} not compared"] if found.unread else []
    head = (
        ("different", "bold red")
        if found.is_different
        else ("unknown", "yellow")
        if found.unread
        else ("equal", "green")
    )
    output.line(Span(*head), ": ", ", ".join(summary))


def _tensor_lines(unequal: Mapping[str, TensorDifference], show_all: bool) -> list[list[Cell]]:
    """Returns a line for each tensor that differs; one for layers whose tensors differ alike."""
    if show_all:
        return [_tensor_line(key, [each]) for key, each in unequal.items()]
    ways = {key: (each.kind, each.a, each.b, bool(each.differing)) for key, each in unequal.items()}
    return [_tensor_line(key, [unequal[name] for name in names]) for key, names in names_by_pattern(ways).items()]


def _tensor_line(key: str, alike: Sequence[TensorDifference]) -> list[Cell]:
    found, name = alike[0], Span(key, "bold")
    count = [Span(f"{len(alike):,} ×", "dim")] if len(alike) > 1 else []
    if found.kind == "shape":
        return [name, Span(f"{found.a} → {found.b}", "red"), *count]
    if found.kind == "bits":
        unequal = (
            f"{sum(each.other_bits for each in alike):,} of {plural(sum(each.elements for each in alike), 'element')}"
        )
        return [name, Span(f"equal, with other bits (-0.0 or NaN) in {unequal}", "yellow"), *count]
    what = [f"{found.a} → {found.b}"] if found.kind == "dtype" else []
    if found.differing:
        elements = sum(each.elements for each in alike)
        relative = _greatest(each.relative for each in alike)
        of_a = f"{'up to ' * (len(alike) > 1)}{relative:.2g} of A"
        what.append(f"max {_greatest(each.maximum for each in alike):.4g}")
        what.append(f"norm {math.hypot(*(each.norm for each in alike)):.4g} ({of_a})")
        what.append(f"{sum(each.differing for each in alike):,} of {plural(elements, 'element')}")
    else:
        what.append("equal values")
    return [name, Span(", ".join(what), "red" if found.differing else "yellow"), *count]


def _greatest(numbers: Iterable[float]) -> float:
    """Returns the greatest number; NaN if any is NaN."""
    return max(numbers, key=lambda number: (math.isnan(number), number))


def _value_lines(values: Sequence[ValueDifference], show_all: bool) -> list[list[Cell]]:
    """Returns a line for each value; one for all parameters of an optimizer whose options changed alike."""
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    lines: list[list[Cell]] = []
    for key, a, b, ranks in values:
        root, groups, parameter = key.partition(f".{PARAM_GROUPS}.")
        if groups and isinstance(a, dict) and isinstance(b, dict):
            alike[f"{root}.{PARAM_GROUPS}", _changes(a, b, show_all)].append(parameter)
            continue
        of_rank = f" of rank {ranks[0]}" if ranks else ""
        lines.append([Span(f"{key}{of_rank}", "bold"), Span(f"  {_change(a, b, show_all)}", "red")])
    for (root, changes), parameters in alike.items():
        patterns = patterns_of(parameters)
        shown = patterns if show_all else patterns[:4]
        of = ", ".join(shown) + (f" and {len(patterns) - len(shown):,} more" if len(shown) < len(patterns) else "")
        lines.append(
            [Span(root, "bold"), Span(f"  {changes}", "red"), f"  of {plural(len(parameters), 'parameter')}: {of}"]
        )
    return lines


def _changes(a: Mapping[Any, Any], b: Mapping[Any, Any], show_all: bool) -> str:
    names = [name for name in {**a, **b} if not _are_equal(a.get(name, _NOTHING), b.get(name, _NOTHING))]
    changes = ((name, _change(a.get(name, _NOTHING), b.get(name, _NOTHING), show_all)) for name in names)
    return ", ".join(f"{name} {change}" for name, change in changes)


def _change(a: Any, b: Any, show_all: bool) -> str:
    """Returns two values with an arrow; "differs" for values that no reader understands, such as random state."""
    if isinstance(a, dict) and isinstance(b, dict):
        return _changes(a, b, show_all)
    texts = ["nothing" if value is _NOTHING else value_text(value, show_all) for value in (a, b)]
    is_opaque = any(isinstance(value, _OPAQUE) for value in (a, b))
    is_long = not show_all and max(map(cell_width, texts)) > _LONGEST_CHANGE
    return "differs" if is_opaque or is_long else " → ".join(texts)


def _some(lines: Sequence[list[Cell]], show_all: bool) -> Sequence[list[Cell]]:
    if show_all or len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], [Span(f"… {len(lines) - _MOST_LINES:,} more (--all)", "dim")]]


def _document(a: CheckpointReader, b: CheckpointReader, found: Comparison) -> dict[str, Any]:
    return {
        "a": a.url,
        "b": b.url,
        "equal": found.is_equal,
        "tensors": {key: asdict(each) for key, each in found.tensors.items()},
        "values": [
            {"key": key, "a": typed(one, key), "b": typed(other, key), "ranks": list(ranks)}
            for key, one, other, ranks in found.values
        ],
        "only_in_a": list(found.only_in_a),
        "only_in_b": list(found.only_in_b),
        "not_compared": list(found.not_compared),
        "unread": list(found.unread),
    }
