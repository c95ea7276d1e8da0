"""Draw a run of train_and_serve.py: the reward, and how old the weights were that each batch was sampled from."""

from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from spool import records

matplotlib.use("Agg")  # draws into a file and needs no display

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#707070"
Records = list[dict[str, Any]]


def draw(root: Path, picture: Path) -> None:
    """Reward over steps, and beside it the age of the weights; the kills are marked in both."""
    batches, kills = records(root, "batches"), records(root, "kills")
    figure = pyplot.figure(figsize=(11, 4.6), layout="constrained", dpi=100)
    grid = figure.add_gridspec(2, 2, height_ratios=(2, 1))
    reward, seconds = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1])
    steps = figure.add_subplot(grid[1, 1], sharex=seconds)
    draw_rewards(reward, batches, kills)
    draw_ages(seconds, steps, batches, kills)
    for axes in (reward, seconds, steps):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    pyplot.close(figure)


def draw_rewards(axes: Axes, batches: Records, kills: Records) -> None:
    """The reward of each step, before and after the trainers resume, with the batches after which ranks were killed."""
    for life in sorted({each["life"] for each in batches}):
        of_life = [each for each in batches if each["life"] == life]
        label = f"resumed from the checkpoint of step {of_life[0]['step'] - 1}" if life else "until a trainer is killed"
        color = ORANGE if life else BLUE
        axes.plot(
            [each["step"] for each in of_life], [each["reward"] for each in of_life], ".-", color=color, label=label
        )
    for kill in kills:
        at = [each for each in batches if each["at"] <= kill["at"]][-1]
        place = (at["step"], at["reward"])
        axes.plot(*place, "X", color="black", markersize=11, markeredgecolor="white", zorder=5)
        arrow = {"arrowstyle": "->", "color": GREY}
        text = f"{kill['role']} {kill['rank']}\nis killed"
        axes.annotate(text, place, (place[0] + 1.5, place[1] - 0.14), arrowprops=arrow, va="top")
    axes.set(xlabel="step", ylabel="mean reward of a batch")
    axes.set_title("The policy learns from samples of its newest weights", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="lower right")


def draw_ages(seconds: Axes, steps: Axes, batches: Records, kills: Records) -> None:
    """The age of the weights over time, in seconds and in steps. Where a job starts again there are no batches."""
    begin = batches[0]["at"]
    points = [(each["at"] - begin, mean(each["seconds_old"]), mean(each["steps_old"])) for each in batches]
    for kill in kills:
        at = kill["at"] - begin
        index = next((i for i, (time, *_) in enumerate(points) if time > at), len(points))
        points.insert(index, (at, nan, nan))  # which interrupts the line
        gap = max(
            pairwise(time for time, *_ in points[max(index - 1, 0) : index + 3]), key=lambda pair: pair[1] - pair[0]
        )
        for axes in (seconds, steps):
            axes.axvspan(at, gap[1], color=GREY, alpha=0.12, linewidth=0)
        text = f"{kill['role']}\nkilled: {gap[1] - at:.0f} s\nto go on"
        place = (at + 0.6, 0.97)
        seconds.text(*place, text, transform=seconds.get_xaxis_transform(), color=GREY, va="top", fontsize=9)
    times = [time for time, *_ in points]
    seconds.plot(times, [age for _, age, _ in points], ".-", color=BLUE)
    steps.plot(times, [age for *_, age in points], ".-", color=BLUE)
    top = max(age for _, age, _ in points if age == age)
    seconds.set(ylabel="seconds", ylim=(0, 1.5 * top))
    seconds.tick_params(labelbottom=False)
    steps.set(xlabel="seconds since the first batch", ylabel="steps", ylim=(-0.3, 3.3), yticks=[0, 1, 2, 3])
    seconds.set_title("Age of the weights that each batch was sampled from", loc="left", fontsize=11)
