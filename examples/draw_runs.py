"""Draw an interrupted training run over the same run uninterrupted."""

from pathlib import Path

import matplotlib
from compare_runs import compare_losses, read_losses
from matplotlib import pyplot

matplotlib.use("Agg")  # draws into a file and needs no display


def draw(reference: Path, run: Path, tolerance: float, picture: Path) -> None:
    """Both runs' losses over steps with the kill and the change of ranks marked, and their difference below."""
    records = read_losses(run)
    resumed_at = next(i for i in range(1, len(records)) if records[i].step <= records[i - 1].step)
    before, after = records[:resumed_at], records[resumed_at:]
    killed_step, resumed_step = before[-1].step, after[0].step - 1
    whole = read_losses(reference)
    blue, orange, grey = "#0072b2", "#d55e00", "#9a9a9a"

    figure, (losses, relative) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained", dpi=110
    )
    losses.plot(
        [r.step for r in whole],
        [r.loss for r in whole],
        color="#d0d0d0",
        linewidth=9,
        solid_capstyle="round",
        label=f"uninterrupted, {whole[0].ranks} ranks",
    )
    losses.plot(
        [r.step for r in before],
        [r.loss for r in before],
        color=blue,
        linewidth=2,
        label=f"interrupted, {before[0].ranks} ranks until the kill",
    )
    losses.plot(
        [r.step for r in after],
        [r.loss for r in after],
        color=orange,
        linewidth=2,
        label=f"resumed on {after[0].ranks} ranks",
    )
    losses.plot(killed_step, before[-1].loss, "X", color=blue, markersize=13, markeredgecolor="white", zorder=5)
    losses.plot(
        resumed_step,
        before[resumed_step - before[0].step].loss,
        "o",
        color=orange,
        markersize=10,
        markeredgecolor="white",
        zorder=5,
    )
    top = max(r.loss for r in whole)
    losses.annotate(
        f"one rank killed\nafter step {killed_step}",
        (killed_step, before[-1].loss),
        (killed_step + 1, 0.55 * top + 0.45 * whole[-1].loss),
        color=blue,
        arrowprops={"arrowstyle": "->", "color": blue},
    )
    losses.annotate(
        f"checkpoint of step {resumed_step}\nresharded {before[0].ranks} → {after[0].ranks} ranks",
        (resumed_step, before[resumed_step - before[0].step].loss),
        (resumed_step - 10, 0.8 * top + 0.2 * whole[-1].loss),
        color=orange,
        arrowprops={"arrowstyle": "->", "color": orange},
    )
    losses.set_ylabel("loss (nats per byte)")
    losses.legend(frameon=False)
    losses.set_title("A rank is lost, the run goes on with half of them, and the loss is the same", loc="left")

    differences = compare_losses(reference, run).differences
    relative.axhline(tolerance, color=grey, linestyle="--", linewidth=1)
    relative.text(whole[0].step, tolerance, f"tolerance {tolerance:g}", color=grey, va="bottom")
    smallest = 1e-9  # equal losses have no place on a logarithmic axis: they are drawn on its floor
    for lines, color in ((differences[:resumed_at], blue), (differences[resumed_at:], orange)):
        relative.plot([d.step for d in lines], [max(d.relative, smallest) for d in lines], ".", color=color)
    relative.set_yscale("log")
    relative.set_ylim(smallest / 2, 10 * tolerance)
    relative.set_ylabel("relative difference")
    relative.set_xlabel("step")
    for axes in (losses, relative):
        axes.axvspan(resumed_step, whole[-1].step, color=orange, alpha=0.06, linewidth=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    pyplot.close(figure)
