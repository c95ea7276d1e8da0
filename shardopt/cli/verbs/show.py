"""`shardopt show`: shows a checkpoint as a tree, one of its tensors, or one value."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING

from shardopt.checkpoint.progress import progress_bar
from shardopt.checkpoint.run.branches import by_numbers
from shardopt.checkpoint.run.listing import list_run
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.sources.contents import CheckpointContents
from shardopt.checkpoint.sources.detect_format import open_source
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.text import count_text, nbytes_text, plural
from shardopt.cli.contents import (
    box_lines,
    document,
    head_line,
    leaves_of,
    tensor_document,
    text_of,
    typed,
    value_text,
)
from shardopt.cli.output import Cell, Output, Span
from shardopt.cli.tree import Row, rows_of, tree_of
from shardopt.cli.verbs import ls
from shardopt.errors import CheckpointNotFoundError, MismatchError, OptionError, Problem
from shardopt.runtime.late import late
from shardopt.world import utc_text

if TYPE_CHECKING:
    from shardopt.cli import statistics as of_elements
    from shardopt.cli.statistics import Statistics
else:
    of_elements = late("shardopt.cli.statistics")

_MOST_ROWS = 200  # that are shown unless more are asked for
_MOST_CHILDREN = 60
_MOST_PRINTED = 1000  # elements
_FEWEST_BINNED = 20  # elements: fewer are better read one by one
_BAR = 40


def show(
    output: Output,
    *,
    url: str,
    key: str | None,
    glob: str | None,
    regex: str | None,
    depth: int | None,
    flat: bool,
    all: bool,
    boxes: bool,
    no_stats: bool,
) -> int:
    """Shows a checkpoint, a module or key in it, or the checkpoints of a run."""
    wanted = chosen_by(glob, regex)
    if depth is not None and depth < 1:
        raise OptionError("there is no such tree", [Problem("--depth", str(depth), "at least 1", "give more levels")])
    try:
        contents = CheckpointContents(open_source(storage_of(url)))
    except CheckpointNotFoundError:
        listing = list_run(url)
        if key is not None or not (listing.checkpoints or listing.branches):
            raise
        kept = listing.reasons_to_keep(Retention())
        ls.print_listing(output, listing, Retention(), kept)
        output.data(ls.document(listing, Retention(), kept))
        return 0
    stored = contents.manifest
    if key is None:
        _show_all(output, contents, wanted, depth, flat, all, boxes)
    elif key in stored.tensors:
        _show_tensor(output, contents, key, statistics=not no_stats, show_all=all)
    elif key in stored.values:
        value = stored.values[key][1]
        output.text(value if isinstance(value, str) else text_of(value))
        output.data({"url": contents.url, "key": key, "value": typed(value, key)})
    elif key in stored.per_rank:
        values = {rank: contents.per_rank(rank).get(key) for rank in range(stored.world_size)}
        for rank, value in values.items():
            output.line(f"rank {rank}: {value_text(value, show_all=True)}")
        output.data({"url": contents.url, "key": key, "ranks": [typed(value, key) for value in values.values()]})
    else:
        below, known = f"{key}.", (*contents.keys(), *stored.per_rank, *contents.source.unread)
        if not any(f"{each}.".startswith(below) for each in known):
            raise contents.unknown(key, {*known, *modules_of(known)}, "a key")
        _show_all(output, contents, lambda name: f"{name}.".startswith(below) and wanted(name), depth, flat, all, boxes)
    return 0


def modules_of(keys: Iterable[str]) -> Iterator[str]:
    """Yields all modules that contain keys: "a" and "a.b" for "a.b.c"."""
    for key in keys:
        parts = key.split(".")
        yield from (".".join(parts[:n]) for n in range(1, len(parts)))


def chosen_by(glob: str | None, regex: str | None, option: str = "--regex") -> Callable[[str], bool]:
    """Returns a function that selects keys. Raises OptionError for an invalid pattern.

    Args:
        glob: a pattern for all of a key, as a shell has it for names; None for any.
        regex: a regular expression to be found in a key; None for any.
        option: which gave it, for the error.
    """
    try:
        pattern = re.compile(regex or "")
    except re.error as error:
        problem = Problem(option, repr(regex), "a regular expression", str(error))
        raise OptionError("invalid arguments", [problem]) from None
    matches = re.compile(fnmatch.translate("*" if glob is None else glob))
    return lambda key: bool(matches.match(key) and pattern.search(key))


def _show_all(
    output: Output,
    contents: CheckpointContents,
    wanted: Callable[[str], bool],
    depth: int | None,
    flat: bool,
    show_all: bool,
    boxes: bool,
) -> None:
    stored, unread = contents.manifest, contents.source.unread
    every = (*stored.tensors, *stored.values, *stored.per_rank, *unread)
    if not any(map(wanted, every)) and (stored.tensors or stored.values):
        problem = Problem(contents.url, "no key that matches", "some", "leave out the pattern to see all keys")
        raise MismatchError("there is nothing to show", [problem], code="nothing-selected")
    if output.as_json:
        output.data(document(contents, wanted))
        return
    saved_at = "" if stored.saved_at is None else f", {utc_text(stored.saved_at)}"
    written_by = "" if stored.written_by is None else f", written by {stored.written_by}"
    output.line(Span(contents.url, "bold"), f": {head_line(contents)}{saved_at}{written_by}")
    if stored.metrics:
        output.line("metrics: " + ", ".join(f"{name} {value:.6g}" for name, value in stored.metrics.items()))
    for key in sorted(filter(wanted, unread), key=by_numbers):
        output.line(Span(f"not read: {key}: {unread[key]}", "yellow"))
    if flat:
        for leaf in sorted(leaves_of(contents, wanted, show_all, boxes), key=lambda leaf: leaf.key):
            output.line(Span(leaf.key, "bold"), f"  {leaf.text}", f"  {leaf.notes}" if leaf.notes else "")
            for line in leaf.details:
                output.line(Span(f"    {line}", "dim"))
        return
    root = tree_of(leaves_of(contents, wanted, show_all, boxes))
    sums = root.sums
    output.line(
        f"{plural(sums.tensors, 'tensor')}, {count_text(sums.elements)} elements, {nbytes_text(sums.nbytes)}",
        f" of {', '.join(sums.dtypes)}" if sums.dtypes else "",
    )
    most = None if show_all or depth is not None else _MOST_CHILDREN
    rows = rows_of(root, depth, most, collapse=not show_all)
    cut_at = None
    if most is not None and len(rows) > _MOST_ROWS:
        deepest = max(row.level for row in rows) + 1
        by_depth = [(level, rows_of(root, level, most)) for level in range(1, deepest)]
        cut_at, rows = next(((level, few) for level, few in reversed(by_depth) if len(few) <= _MOST_ROWS), by_depth[0])
    _print_rows(output, rows)
    if cut_at is not None:
        hint = f"the first {plural(cut_at, 'level')}; more by --depth, --glob, a module as KEY, or --all"
        output.line(Span(hint, "dim"))


def _print_rows(output: Output, rows: list[Row]) -> None:
    cells: list[list[Cell]] = []
    for row in rows:
        indent = "  " * row.level
        if row.left_out:
            cells.append([f"{indent}… {row.left_out:,} more (--all)"])
            continue
        node, sums = row.node, row.node.sums.times(row.copies)
        text = node.leaf.text if node.leaf is not None else ", ".join(sums.dtypes)
        of_tensors = [count_text(sums.elements), nbytes_text(sums.nbytes)] if sums.tensors else []
        notes = [f"{row.copies:,} ×"] if row.copies > 1 else []
        notes += [plural(sums.tensors, "tensor")] if node.children and sums.tensors else []
        notes += [node.leaf.notes] if node.leaf is not None and node.leaf.notes else []
        style = "bold" if node.leaf is not None else "bold cyan"
        cells.append([Span(indent + row.name, style), text, *of_tensors, Span(", ".join(notes), "dim")])
        details = node.leaf.details if node.leaf is not None else ()
        cells += [[Span(f"{indent}  {line}", "dim")] for line in details]
    output.table(cells, right=[2, 3])


def _show_tensor(output: Output, contents: CheckpointContents, key: str, statistics: bool, show_all: bool) -> None:
    """Shows a tensor.

    Args:
        statistics: whether its bytes are read.
        show_all: whether each box has a line.
    """
    _, dtype, layout, tied_to, _ = contents.manifest.tensors[key]
    found, elements = None, prod(layout.shape)
    if statistics:
        with progress_bar("reading") as progress:
            found = of_elements.statistics_of(of_elements.reader_of(contents), key, progress)
    output.line(
        Span(key, "bold"),
        f"  {dtype.name} {list(layout.shape)}, {plural(elements, 'element')}, ",
        nbytes_text(elements * dtype.itemsize),
        f", tied to {tied_to}" if tied_to is not None else "",
    )
    for line in box_lines(contents, key, show_all):
        output.line(Span(f"  {line}", "dim"))
    if found is not None:
        if elements <= _MOST_PRINTED:
            output.text(str(of_elements.reader_of(contents).read(key)))
        _print_statistics(output, found)
    wire = None if found is None else asdict(found)
    output.data({"url": contents.url, "key": key, **tensor_document(contents, key), "statistics": wire})


def _print_statistics(output: Output, found: Statistics) -> None:
    of = "magnitudes: " if found.magnitudes else ""
    if found.minimum is not None:
        numbers = [("min", found.minimum), ("max", found.maximum), ("mean", found.mean), ("std", found.std)]
        output.line(of + "  ".join(f"{name} {_number(value)}" for name, value in numbers))
    counts = [("zeros", found.zeros, ""), ("NaN", found.nan, "bold red")]
    counts += [("inf", found.positive_infinity, "bold red"), ("-inf", found.negative_infinity, "bold red")]
    output.line(
        *(
            Span(f"{'  ' * (i > 0)}{name} {count:,}", style if count else "")
            for i, (name, count, style) in enumerate(counts)
        )
    )
    if found.elements < _FEWEST_BINNED:
        return
    most = max(found.counts, default=0)
    whole = isinstance(found.minimum, int) and len(found.edges) > 1 and found.edges[1] - found.edges[0] == 1
    rows: list[list[Cell]] = []
    for i, count in enumerate(found.counts):
        low, high = found.edges[i], found.edges[i + 1] if i + 1 < len(found.edges) else found.edges[i]
        end = "]" if i == len(found.counts) - 1 else ")"
        interval = _number(int(low)) if whole else f"[{_number(low)} … {_number(high)}{end}"
        interval = _number(low) if low == high else interval
        rows.append([interval, f"{count:,}", Span(_bar(count, most), "cyan")])
    output.table(rows, right=[0, 1])


def _bar(count: int, most: int) -> str:
    eighths = round(8 * _BAR * count / most) if most else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip() if eighths or not count else "▏"


def _number(value: float | int | None) -> str:
    return str(value) if isinstance(value, int) or value is None else f"{value:.6g}"
