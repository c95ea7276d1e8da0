"""`shardopt diff`: what differs between two checkpoints, whatever ranks have saved them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any, NamedTuple

from shardopt import checkpoint
from shardopt.checkpoint import CheckpointReader
from shardopt.checkpoint.loading.renaming import names_by_rules, refuse_collisions
from shardopt.checkpoint.progress import Counter
from shardopt.checkpoint.run.branches import by_numbers
from shardopt.cli.contents import head_line, typed, value_text
from shardopt.cli.difference import TensorDifference, difference_of
from shardopt.cli.output import Cell, Output, Span, plural
from shardopt.cli.rules import parse_rename
from shardopt.cli.show import chosen_by
from shardopt.cli.tree import patterns_of
from shardopt.state.param_groups import PARAM_GROUPS

_MOST_LINES = 100


class ValueDifference(NamedTuple):
    """A plain value that is not the same; `ranks` are those whose own value it is, where it is a value per rank."""

    key: str
    a: Any
    b: Any
    ranks: tuple[int, ...] = ()


class Comparison(NamedTuple):
    """All that was found; keys are those of B.

    Args:
        tensors: by key, of both.
        values: those that differ.
        only_in_a, only_in_b: keys that the other has not.
        not_compared: values per rank that different numbers of ranks have saved.
    """

    tensors: Mapping[str, TensorDifference]
    values: Sequence[ValueDifference]
    only_in_a: Sequence[str]
    only_in_b: Sequence[str]
    not_compared: Sequence[str]

    @property
    def unequal(self) -> dict[str, TensorDifference]:
        """The tensors that differ."""
        return {key: found for key, found in self.tensors.items() if found.kind != "equal"}

    @property
    def is_equal(self) -> bool:
        """Whether nothing was found that differs."""
        return not (self.unequal or self.values or self.only_in_a or self.only_in_b)


def diff(output: Output, *, a: str, b: str, rename: Sequence[str] | None, select: str | None, all: bool) -> int:
    """Compares two checkpoints; status 1 where they differ."""
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
        MismatchError: two keys of A get one name.
        CorruptionError: what is stored is not what was written.
    """
    wanted = chosen_by(None, select, "--select")
    roots = {path[:-2] for path, _ in b.manifest.values.values() if len(path) > 1 and path[-2] == PARAM_GROUPS}
    name_of = names_by_rules(a.manifest, rename, roots)
    refuse_collisions(name_of.items())
    keys_a = {name: key for key, name in name_of.items() if wanted(name)}
    keys_b = {key for key in (*b.manifest.tensors, *b.manifest.values, *b.manifest.per_rank) if wanted(key)}
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
    )


def _per_rank(reader: CheckpointReader, other: CheckpointReader, keys: Collection[str]) -> list[Mapping[str, Any]]:
    """Reads the values of all ranks, where some of them are to be compared with those of as many."""
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
    """Whether two plain values have the same types and values; NaN is equal to NaN."""
    return json.dumps(typed(one, "")) == json.dumps(typed(other, ""))


def _print(
    output: Output, reader_a: CheckpointReader, reader_b: CheckpointReader, found: Comparison, show_all: bool
) -> None:
    output.line("A  ", Span(reader_a.url, "bold"), f": {head_line(reader_a)}")
    output.line("B  ", Span(reader_b.url, "bold"), f": {head_line(reader_b)}")
    lines: list[list[Cell]] = [_tensor_line(key, each) for key, each in found.unequal.items()]
    output.table(_some(lines, show_all), right=[])
    value_lines = _value_lines(found.values, show_all)
    for line in _some(value_lines, show_all):
        output.line(*line)
    for side, style, keys in (("A", "red", found.only_in_a), ("B", "green", found.only_in_b)):
        patterns: list[list[Cell]] = [[Span(f"only in {side}: {each}", style)] for each in patterns_of(keys)]
        for line in _some(patterns, show_all):
            output.line(*line)
    for key in found.not_compared:
        output.line(Span(f"not compared: {key}, a value of each of other numbers of ranks", "yellow"))
    equal = [each for each in found.tensors.values() if each.kind == "equal"]
    by_checksum = sum(each.by_checksum for each in equal)
    summary = [f"{plural(len(equal), 'tensor')} equal ({by_checksum:,} by checksum)"]
    summary += [f"{len(found.unequal):,} differ"] if found.unequal else []
    summary += [f"{plural(len(found.values), 'value')} differ"] if found.values else []
    summary += [
        f"{len(keys):,} only in {side}" for side, keys in (("A", found.only_in_a), ("B", found.only_in_b)) if keys
    ]
    output.line(
        Span("equal" if found.is_equal else "different", "green" if found.is_equal else "bold red"),
        ": ",
        ", ".join(summary),
    )


def _tensor_line(key: str, found: TensorDifference) -> list[Cell]:
    name = Span(key, "bold")
    if found.kind == "shape":
        return [name, Span(f"{found.a} → {found.b}", "red")]
    if found.kind == "bits":
        return [name, Span("equal values, other bits (-0.0 or NaN)", "yellow")]
    what = [f"{found.a} → {found.b}"] if found.kind == "dtype" else []
    if found.differing:
        what.append(f"max {found.maximum:.4g}")
        what.append(f"norm {found.norm:.4g} ({found.relative:.2g} of A)")
        what.append(f"{found.differing:,} of {plural(found.elements, 'element')}")
    else:
        what.append("equal values")
    return [name, Span(", ".join(what), "red" if found.differing else "yellow")]


def _value_lines(values: Sequence[ValueDifference], show_all: bool) -> list[list[Cell]]:
    """Returns a line for each value; one for all parameters of an optimizer whose options have changed alike."""
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    lines: list[list[Cell]] = []
    for key, a, b, ranks in values:
        root, groups, parameter = key.partition(f".{PARAM_GROUPS}.")
        if groups and isinstance(a, dict) and isinstance(b, dict):
            alike[f"{root}.{PARAM_GROUPS}", _changes(a, b, show_all)].append(parameter)
            continue
        of_rank = f" of rank {ranks[0]}" if ranks else ""
        change = f"  {value_text(a, show_all)} → {value_text(b, show_all)}"
        lines.append([Span(f"{key}{of_rank}", "bold"), Span(change, "red")])
    for (root, changes), parameters in alike.items():
        patterns = patterns_of(parameters)
        shown = patterns if show_all else patterns[:4]
        of = ", ".join(shown) + (f" and {len(patterns) - len(shown):,} more" if len(shown) < len(patterns) else "")
        lines.append(
            [Span(root, "bold"), Span(f"  {changes}", "red"), f"  of {plural(len(parameters), 'parameter')}: {of}"]
        )
    return lines


def _changes(a: Mapping[Any, Any], b: Mapping[Any, Any], show_all: bool) -> str:
    names = [name for name in {**a, **b} if not _are_equal(a.get(name, "nothing"), b.get(name, "nothing"))]
    texts = [{name: value_text(of[name], show_all) if name in of else "nothing" for name in names} for of in (a, b)]
    return ", ".join(f"{name} {texts[0][name]} → {texts[1][name]}" for name in names)


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
    }
