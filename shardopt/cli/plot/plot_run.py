"""`shardopt plot run`: draws metrics over a run's steps, the bytes of its checkpoints, and the seconds of its saves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardopt.checkpoint.run.listing import Listed, list_run
from shardopt.checkpoint.text import nbytes_text, plural
from shardopt.cli.logs import seconds_in
from shardopt.cli.output import Output, escaped, shortened
from shardopt.cli.plot.figure import Axes, Figure, check_output, save_figure
from shardopt.errors import CheckpointNotFoundError, Problem

_LINES = {"seconds": "of a save", "stall_seconds": "of which the training stood still"}


def plot_run(output: Output, *, root: str, log: Sequence[str] | None, out: str) -> int:
    """Draws a run, with abandoned checkpoints as points outside its line."""
    check_output(out)
    listing = list_run(root)
    saved = [each for each in listing.checkpoints if each.counts and each.id is not None]
    if not saved:
        problem = Problem(listing.url, "no committed checkpoint of a run", "some", "give the root of a run")
        raise CheckpointNotFoundError("there is nothing to draw", [problem])
    seconds = {id.step: figures for id, figures in sorted(seconds_in(log or ()).items())}
    figure = _draw(listing.url, saved, seconds)
    save_figure(figure, out)
    output.line(f"{out}: {plural(len(saved), 'checkpoint')}, {plural(len(seconds), 'save')} in logs")
    metrics = [{"step": each.id.step, "bytes": each.nbytes, "metrics": each.metrics} for each in saved if each.id]
    output.data({"output": out, "checkpoints": metrics, "saves": seconds})
    return 0


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
