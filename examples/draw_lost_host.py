"""Draw two runs that lost a host, one that had its state in the memory of hosts and one that had it in the store."""

from pathlib import Path
from typing import Any

from compare_runs import compare_losses, read_losses
from draw_runs import BLUE, GREY, ORANGE, draw_differences
from matplotlib import pyplot
from matplotlib.axes import Axes


def draw(reference: Path, memory: Any, store: Any, tolerance: float, picture: Path) -> None:
    """Both runs' losses by the seconds since each lost its host, and below how far they are from an uninterrupted run.

    Args:
        reference: the uninterrupted run.
        memory, store: the runs, as `lose_a_host.Loss`.
    """
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 7), height_ratios=(3, 1), layout="constrained", dpi=110)
    whole = read_losses(reference)
    upper.axvline(0, color=GREY, linestyle="--", linewidth=1)
    heights = (0.75, 0.5)
    for loss, color, name, share in ((memory, BLUE, "hosts' memory", heights[0]), (store, ORANGE, "store", heights[1])):
        height = whole[-1].loss + share * (whole[0].loss - whole[-1].loss)
        draw_run(upper, loss, color, name, height)
    upper.set(xlabel="seconds since the host was lost", ylabel="loss (nats per byte)")
    upper.legend(frameon=False, loc="upper right")
    upper.set_title("One of four hosts is lost with its memory, three go on, and the loss is the same", loc="left")

    parts = [
        (compare_losses(reference, loss.out).differences, color) for loss, color in ((memory, BLUE), (store, ORANGE))
    ]
    draw_differences(lower, parts, tolerance)
    lower.set(xlabel="step", ylabel="relative difference\nto the uninterrupted run")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    pyplot.close(figure)


def draw_run(axes: Axes, loss: Any, color: str, name: str, height: float) -> None:
    """A run until its host is lost, and from where it went on; the seconds and the steps between the two."""
    records, resumed_at = loss.records, loss.resumed_at
    times = loss.times
    for part in (slice(0, resumed_at), slice(resumed_at, None)):
        label = f"gone on from the {name}" if part.start else None
        axes.plot(times[part], [each.loss for each in records[part]], color=color, lw=2, label=label)
    lost, after = records[resumed_at - 1], records[resumed_at]
    axes.plot(times[resumed_at - 1], lost.loss, "X", color=color, markersize=11, markeredgecolor="white", zorder=5)
    axes.plot(times[resumed_at], after.loss, "o", color=color, markersize=9, markeredgecolor="white", zorder=5)
    text = f"{name}: back to step {loss.restored} of {lost.step}, {loss.steps_lost} lost;\n"
    text += f"next step after {loss.seconds_to_next:.1f} s, first new one after {loss.seconds_to_new:.1f} s"
    arrow = {"arrowstyle": "->", "color": color}
    axes.annotate(text, (times[resumed_at], after.loss), (0.3, height), color=color, va="center", arrowprops=arrow)
