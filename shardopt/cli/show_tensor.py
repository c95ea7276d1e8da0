"""One tensor of a checkpoint: where it lies, its statistics, and a histogram."""

from __future__ import annotations

from dataclasses import asdict
from math import prod

from shardopt import checkpoint
from shardopt.checkpoint import CheckpointReader
from shardopt.cli.contents import box_lines, dtype_text, tensor_document
from shardopt.cli.output import Cell, Output, Span, nbytes_text, plural
from shardopt.cli.statistics import Statistics, statistics_of

_MOST_PRINTED = 1000  # elements
_FEWEST_BINNED = 20  # elements: fewer are better read one by one
_BAR = 40


def show_tensor(output: Output, reader: CheckpointReader, key: str, statistics: bool, show_all: bool) -> None:
    """Shows a tensor.

    Args:
        statistics: whether its bytes are read.
        show_all: whether each box has a line.
    """
    info = reader.info(key)
    found = None
    if statistics:
        with checkpoint.progress_bar("reading") as progress:
            found = statistics_of(reader, key, progress)
    elements = prod(info.shape)
    output.line(
        Span(key, "bold"),
        f"  {dtype_text(info.dtype)} {list(info.shape)}, {plural(elements, 'element')}, ",
        nbytes_text(elements * info.dtype.itemsize),
        f", tied to {info.tied_to}" if info.tied_to is not None else "",
    )
    for line in box_lines(reader, key, show_all):
        output.line(Span(f"  {line}", "dim"))
    if found is not None:
        if elements <= _MOST_PRINTED:
            output.text(str(reader.read(key)))
        _print_statistics(output, found)
    wire = None if found is None else asdict(found)
    output.data({"url": reader.url, "key": key, **tensor_document(reader, key), "statistics": wire})


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
