"""Draw an interrupted training run over the same run uninterrupted."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from compare_runs import Difference, Record, compare_losses, read_losses
from matplotlib import pyplot
from matplotlib.axes import Axes

matplotlib.use("Agg")  # draws into a file and needs no display

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#9a9a9a"
EQUAL = 1e-10  # where equal losses are drawn: zero has no place on a logarithmic axis


def draw(reference: Path, run: Path, tolerance: float, picture: Path) -> None:
    """Both runs' losses, with the kill and the change of ranks marked, and below how far apart they are."""
    records = read_losses(run)
    resumed_at = next(i for i in range(1, len(records)) if records[i].step <= records[i - 1].step)
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained", dpi=110
    )
    draw_losses(upper, read_losses(reference), records[:resumed_at], records[resumed_at:])

    differences = compare_losses(reference, run).differences
    draw_differences(lower, ((differences[:resumed_at], BLUE), (differences[resumed_at:], ORANGE)), tolerance)
    lower.set(xlabel="step", ylabel="relative difference")
    for axes in (upper, lower):
        axes.axvspan(records[resumed_at].step - 1, records[-1].step, color=ORANGE, alpha=0.06, linewidth=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    pyplot.close(figure)


def draw_differences(axes: Axes, parts: Iterable[tuple[Sequence[Difference], str]], tolerance: float) -> None:
    """How far the losses of a run's parts, each in its color, are from those of the uninterrupted run, by step."""
    highest = 10 * tolerance
    for part, color in parts:
        axes.plot([each.step for each in part], [max(each.relative, EQUAL) for each in part], ".", color=color)
        highest = max([highest, *(3 * each.relative for each in part)])
    axes.axhline(tolerance, color=GREY, linestyle="--", linewidth=1)
    axes.text(1, tolerance, f"tolerance {tolerance:g}", color=GREY, va="bottom")
    axes.set_yscale("log")
    axes.set_yticks([EQUAL, 1e-8, 1e-6, 1e-4], ["equal", "1e-8", "1e-6", "1e-4"])
    axes.set_ylim(EQUAL / 3, highest)


def draw_losses(axes: Axes, whole: list[Record], before: list[Record], after: list[Record]) -> None:
    """The uninterrupted run as a broad band, and the interrupted one in it, before the kill and after."""
    for records, color, width, label in (
        (whole, "#d0d0d0", 9, f"uninterrupted, {whole[0].ranks} ranks"),
        (before, BLUE, 2, f"interrupted, {before[0].ranks} ranks until the kill"),
        (after, ORANGE, 2, f"resumed on {after[0].ranks} ranks"),
    ):
        axes.plot([each.step for each in records], [each.loss for each in records], color=color, lw=width, label=label)

    killed = before[-1]
    restored = next(each for each in before if each.step == after[0].step - 1)
    height = 0.6 * whole[-1].loss + 0.4 * max(each.loss for each in whole)
    resharded = f"checkpoint of step {restored.step},\nresharded {before[0].ranks} → {after[0].ranks}"
    for at, marker, color, side, shift, text in (
        (killed, "X", BLUE, "left", 0.5, f"one rank is killed\nafter step {killed.step}"),
        (restored, "o", ORANGE, "right", -0.5, resharded),
    ):
        axes.plot(at.step, at.loss, marker, color=color, markersize=12, markeredgecolor="white", zorder=5)
        arrow = {"arrowstyle": "->", "color": color}
        place = (at.step + shift, height)
        axes.annotate(text, (at.step, at.loss), place, color=color, ha=side, va="bottom", arrowprops=arrow)
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False)
    axes.set_title("A rank is lost, the run goes on with fewer, and the loss is the same", loc="left")
