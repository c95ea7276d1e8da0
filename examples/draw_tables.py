"""Draw a run of kill_and_replan.py: the bytes of each save, and the loss before the kill and after."""

from pathlib import Path

import matplotlib
from compare_runs import read_losses
from draw_runs import BLUE, GREY, ORANGE, draw_losses
from matplotlib import pyplot
from matplotlib.axes import Axes
from spool import records

matplotlib.use("Agg")  # draws into a file and needs no display


def draw(reference: Path, run: Path, picture: Path) -> None:
    """The losses of both runs, with the kill marked, and beside them the bytes of each save of the interrupted one."""
    losses = read_losses(run)
    resumed_at = next(i for i in range(1, len(losses)) if losses[i].step <= losses[i - 1].step)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained", dpi=100)
    draw_losses(left, read_losses(reference), losses[:resumed_at], losses[resumed_at:])
    left.set_xlabel("step")
    left.set_title("A rank is killed, three resume under another plan", loc="left", fontsize=11)
    draw_saves(right, run, losses[0].ranks)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    pyplot.close(figure)


def draw_saves(axes: Axes, run: Path, ranks: int) -> None:
    """A bar for each save of touched rows, in the color of its ranks, and a line where a full save ends."""
    saves = records(run, "saves")
    touched = [save for save in saves if save["writes"] == "touched"]
    full = [save["bytes"] / 1e6 for save in saves if save["writes"] == "full"]
    for at, save in enumerate(touched):
        megabytes = save["bytes"] / 1e6
        axes.bar(at, megabytes, width=0.6, color=BLUE if save["ranks"] == ranks else ORANGE)
        axes.text(at, megabytes, f"{megabytes:.0f}", ha="center", va="bottom")
    after = next((at for at, save in enumerate(touched) if save["ranks"] != ranks), None)
    if after is not None:
        text = "a table with\nanother cut is\nwritten whole"
        axes.text(after + 0.4, touched[after]["bytes"] / 1e6, text, color=ORANGE, va="top")
    if full:
        axes.axhline(full[-1], color=GREY, linestyle="--", linewidth=1)
        axes.text(len(touched) - 0.5, full[-1] * 1.01, f"a full save: {full[-1]:.0f} MB", color=GREY, ha="right")
        axes.set_ylim(0, 1.12 * full[-1])
    axes.set_xticks(range(len(touched)), [save["step"] for save in touched])
    axes.set(xlabel="step of the save", ylabel="MB written by all ranks")
    axes.set_title("A save writes the rows that were touched since the last", loc="left", fontsize=11)
