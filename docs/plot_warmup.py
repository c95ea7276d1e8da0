"""Draws docs/warmup.png: the multiplier of every warm-up policy, and of a whole run.

    pip install "shardopt[demo]" && python docs/plot_warmup.py [FOLDER]     # docs, if none is given

The values are those that `WarmupOptimizer` uses, read from a schedule, so that the picture cannot differ from the code.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from shardopt.optim.schedules.stages import Schedule, WarmupPolicy, WarmupStage

P = WarmupPolicy
SHOWN = 130  # iterations; the single stages end at 100
PANELS = {
    "NONE": [WarmupStage(P.NONE, 100)],
    "CONSTANT\nvalue=0.3": [WarmupStage(P.CONSTANT, 100, 0.3)],
    "LINEAR\nvalue=0.1": [WarmupStage(P.LINEAR, 100, 0.1)],
    "POLY\nvalue=2": [WarmupStage(P.POLY, 100, 2.0)],
    "STEP\nvalue=0.5, decay_iters=25": [WarmupStage(P.STEP, 99, 0.5, decay_iters=25)],
    "INVSQRT": [WarmupStage(P.INVSQRT, 100)],
    "COSINE_ANNEALING_WARM_RESTARTS\nvalue=0.1, sgdr_period=50": [
        WarmupStage(P.COSINE_ANNEALING_WARM_RESTARTS, 100, 0.1, sgdr_period=50)
    ],
    "INTERPOLATE\nvalue=1, end_value=0.2, from 40": [
        WarmupStage(P.INTERPOLATE, 100, 1.0, start_interpolating_iters=40, end_value=0.2)
    ],
    "a run: LINEAR, CONSTANT, POLY\nto 20, to 60, to 120": [
        WarmupStage(P.LINEAR, 20, 0.05),
        WarmupStage(P.CONSTANT, 60),
        WarmupStage(P.POLY, 120, 2.0),
    ],
}


def main(folder: Path) -> None:
    figure, axes = plt.subplots(3, 3, figsize=(11, 8), sharex=True, sharey=True, layout="constrained")
    for axis, (title, stages) in zip(axes.flat, PANELS.items(), strict=True):
        schedule = Schedule(stages)
        iterations = range(SHOWN + 1)
        for stage in stages:
            axis.axvline(stage.max_iters, color="0.75", linewidth=1, linestyle="--")
        axis.plot(iterations, [schedule.multiplier(i) for i in iterations], color="C0", linewidth=2)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.2)
    axes[0, 0].set(xlim=(0, SHOWN), ylim=(-0.03, 1.08), yticks=[0, 0.25, 0.5, 0.75, 1])
    for axis in axes[-1]:
        axis.set_xlabel("iteration (steps done)")
    for axis in axes[:, 0]:
        axis.set_ylabel("× full rate")
    figure.suptitle("Warm-up policies (dashed: a stage ends; after the last one the rate stays)", fontsize=12)
    figure.savefig(folder / "warmup.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
