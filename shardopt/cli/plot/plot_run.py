"""`shardopt plot run`: draws metrics over a run's steps, the bytes of its checkpoints, and the seconds of its saves."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from shardopt.checkpoint.run.branches import parse_id
from shardopt.checkpoint.run.listing import Listed, list_run
from shardopt.checkpoint.text import nbytes_text, plural
from shardopt.cli.output import Output, escaped, shortened
from shardopt.cli.plot.figure import Axes, Figure, check_output, save_figure
from shardopt.errors import CheckpointNotFoundError, Problem

# The lines of `reports.emit_report`: the figures of each rank, at DEBUG, and the line of rank 0 for people, at INFO.
_SAVE = re.compile(r"\bsave url=(.+?) save_id=\S+ (.*)")
_LENGTH = r"([\d.]+) (ms|s|min)"
_SAVED = re.compile(rf"\bsaved step (\d+)(?: of branch \d+)?: .* in {_LENGTH}(?: \(training waited {_LENGTH}\))?\s*$")
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
_FIGURE = re.compile(r"(\w+)=([-+.\deE]+|inf|nan)(?:\s|$)")
_LINES = {"seconds": "of a save", "stall_seconds": "of which the training stood still"}


def plot_run(output: Output, *, root: str, log: Sequence[str] | None, out: str) -> int:
    """Draws a run, with abandoned checkpoints as points outside its line."""
    check_output(out)
    listing = list_run(root)
    saved = [each for each in listing.checkpoints if each.counts and each.id is not None]
    if not saved:
        problem = Problem(listing.url, "no committed checkpoint of a run", "some", "give the root of a run")
        raise CheckpointNotFoundError("there is nothing to draw", [problem])
    seconds = seconds_in(log or ())
    figure = _draw(listing.url, saved, seconds)
    save_figure(figure, out)
    output.line(f"{out}: {plural(len(saved), 'checkpoint')}, {plural(len(seconds), 'save')} in logs")
    metrics = [{"step": each.id.step, "bytes": each.nbytes, "metrics": each.metrics} for each in saved if each.id]
    output.data({"output": out, "checkpoints": metrics, "saves": seconds})
    return 0


def seconds_in(logs: Sequence[str]) -> dict[int, dict[str, float]]:
    """Returns the seconds of saves by step, for the slowest rank, from logs of `shardopt` at INFO or DEBUG."""
    found: dict[int, dict[str, float]] = {}
    for path in logs:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                step, figures = _figures_in(line)
                if step is not None:
                    of_step = found.setdefault(step, {})
                    of_step |= {name: max(value, of_step.get(name, 0.0)) for name, value in figures.items()}
    return dict(sorted(found.items()))


def _figures_in(line: str) -> tuple[int | None, dict[str, float]]:
    """Returns the saved step in a line of a log, and seconds by name; None for any other line."""
    match = _SAVE.search(line)
    if match is not None:
        id = parse_id(match[1].rstrip("/").rpartition("/")[2])
        figures = {name: float(value) for name, value in _FIGURE.findall(match[2]) if name in _LINES}
        return None if id is None else id.step, figures
    match = _SAVED.search(line)
    if match is None:
        return None, {}
    seconds = float(match[2]) * _SECONDS[match[3]]
    stall = seconds if match[4] is None else float(match[4]) * _SECONDS[match[5]]
    return int(match[1]), {"seconds": seconds, "stall_seconds": stall}


def _draw(url: str, saved: Sequence[Listed], seconds: dict[int, dict[str, float]]) -> Figure:
    metrics = list(dict.fromkeys(name for each in saved for name in each.metrics or {}))
    panels = [*metrics, "bytes", *(["seconds"] if seconds else [])]
    figure = Figure(figsize=(7, 1.8 * len(panels) + 0.6), layout="constrained")
    figure.suptitle(escaped(shortened(url, 90)).replace("$", r"\$"), fontsize=10)
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for name, panel in zip(metrics, axes, strict=False):
        _points(panel, saved, [(each.metrics or {}).get(name) for each in saved])
        panel.set_ylabel(escaped(shortened(name, 30)).replace("$", r"\$"), fontsize=9)
    of_bytes = axes[len(metrics)]
    _points(of_bytes, saved, [each.nbytes for each in saved])
    of_bytes.set_ylim(bottom=0)
    of_bytes.set_ylabel("bytes", fontsize=9)
    if of_bytes.get_legend_handles_labels()[0]:
        of_bytes.legend(fontsize=7, loc="lower right")
    of_bytes.yaxis.set_major_formatter(lambda value, _: nbytes_text(value))
    if seconds:
        by_name: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for step, figures in seconds.items():
            for name, value in figures.items():
                by_name[name].append((step, value))
        for name, points in by_name.items():
            axes[-1].plot(*zip(*points, strict=True), "o-", markersize=3, linewidth=1, label=_LINES[name])
        axes[-1].set_ylim(bottom=0)
        axes[-1].set_ylabel("seconds", fontsize=9)
        axes[-1].legend(fontsize=7)
    axes[-1].set_xlabel("step")
    return figure


def _points(panel: Axes, saved: Sequence[Listed], values: Sequence[float | None]) -> None:
    """Draws values over steps: a line for the run, and points for abandoned checkpoints."""
    points = [
        (each.id.step, value, each.in_run)
        for each, value in zip(saved, values, strict=True)
        if each.id is not None and value is not None
    ]
    run = [(step, value) for step, value, in_run in points if in_run]
    aside = [(step, value) for step, value, in_run in points if not in_run]
    if run:
        panel.plot(*zip(*run, strict=True), "o-", markersize=3, linewidth=1, color="#4c78a8")
    if aside:
        panel.plot(*zip(*aside, strict=True), "x", markersize=4, color="#bab0ac", label="abandoned")
    panel.tick_params(labelsize=7)
