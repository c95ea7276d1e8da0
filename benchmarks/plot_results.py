"""Draws the benchmarks' overview, `results/overview.png`, and writes the table below it, from the tables of results/.

    python -m benchmarks.plot_results

It measures nothing. Every number is read from `checkpoint.md`, `async_save.md` and `step.md`, so run it after these.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

matplotlib.use("Agg")  # draws into a file and needs no display

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- written by benchmarks/plot_results.py -->", "<!-- end of what it writes -->"
BLUE, ORANGE = "#0072b2", "#d55e00"
STEP_SIZE = "400 × 4k"
IMPLEMENTATIONS = {"default": "both by default", "fused": "both fused"}  # of a step that is shown: how its row is named
SAVES, LOADS, STALLS = "Saves", "Loads", "Stalls of a save in the background"
STEPS = "Steps, 400 DTensors of 4k elements, processor time"
PEERS = "DCP or torch.optim"
UNITS = {SAVES: "s", LOADS: "s", STALLS: "ms", STEPS: "ms"}


@dataclass(frozen=True)
class Case:
    """Holds one comparison: times in the unit of its panel, and their ratio as the table has it, of unrounded times."""

    panel: str
    name: str
    ours: float
    theirs: float
    ratio: str


def read_table(path: Path) -> list[dict[str, str]]:
    """Reads the first table of a page: a dict for each row, by the texts of the header.

    Raises:
        ValueError: the page has no table, or a row has another number of cells than the header.
    """
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    if len(cells) < 3:
        raise ValueError(f"{path}: no table")
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def cases_of(results: Path) -> list[Case]:
    """Returns what is drawn, panel by panel, from the tables in the folder `results`."""
    cases = []
    for row in read_table(results / "checkpoint.md"):
        name = row["case"].replace("the same over", "10,000 small tensors,")
        panel = SAVES if re.search(r"\bsave\b", name) else LOADS
        name = re.sub(r",? (save|load)\b", "", name)
        cases.append(Case(panel, name, float(row["ours, s"]), float(row["DCP, s"]), row["DCP / ours"]))
    cases.sort(key=lambda case: case.panel != SAVES)
    rows = {row[""]: row for row in read_table(results / "async_save.md")}
    for stage in ("now", "lazy"):
        ours = rows[f'async_save, stage="{stage}"']
        for stager, words in (("default", "DCP's default"), ("kept stager", "DCP, kept stager")):
            theirs = rows[f"DCP, {stager}"]
            name, ms = f'stage="{stage}" / {words}', "stall, ms"
            cases.append(Case(STALLS, name, float(ours[ms]), float(theirs[ms]), theirs[f"/ ours {stage}"]))
    for row in read_table(results / "step.md"):
        if row["elements on each rank"] != STEP_SIZE or row["torch DTensor, ms"] == "fails":
            continue
        if row["implementation"] in IMPLEMENTATIONS:
            name = f"{row['algorithm']}, {IMPLEMENTATIONS[row['implementation']]}"
            times = float(row["ours DTensor, ms"]), float(row["torch DTensor, ms"])
            cases.append(Case(STEPS, name, *times, row["torch DTensor / ours"]))
    return cases


def table_of(cases: Sequence[Case]) -> str:
    """Returns the cases as a table in Markdown: a unit beside each time, and their ratio."""
    lines = [f"| | shardopt | {PEERS} | times as fast |", "|---|---|---|---|"]
    for panel, unit in UNITS.items():
        lines.append(f"| **{panel}** | | | |")
        for case in cases:
            if case.panel == panel:
                times = f"{_text(case.ours, unit)} | {_text(case.theirs, unit)}"
                lines.append(f"| {case.name} | {times} | {case.ratio} |")
    return "\n".join(lines)


def _text(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def draw(cases: Sequence[Case], picture: Path) -> None:
    """Draws each panel as pairs of bars on a log scale, and writes the PNG `picture` on opaque white."""
    by_panel = {panel: [case for case in cases if case.panel == panel] for panel in UNITS}
    heights = [len(found) + 0.8 for found in by_panel.values()]
    figure, all_axes = pyplot.subplots(
        len(UNITS), figsize=(8.5, 0.42 * sum(heights)), height_ratios=heights, layout="constrained", facecolor="white"
    )
    for axes, (panel, found) in zip(all_axes, by_panel.items(), strict=True):
        _draw_panel(axes, panel, found)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    figure.suptitle("Log scale: shorter is faster", x=0.02, ha="left", fontsize=11)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _draw_panel(axes: Axes, panel: str, cases: Sequence[Case]) -> None:
    unit = UNITS[panel]
    places = range(len(cases))
    for times, color, label, offset in (
        ([case.ours for case in cases], BLUE, "shardopt", -0.19),
        ([case.theirs for case in cases], ORANGE, PEERS, 0.19),
    ):
        bars = axes.barh([place + offset for place in places], times, height=0.36, color=color, label=label)
        axes.bar_label(bars, labels=[_text(each, unit) for each in times], padding=3, fontsize=8.5)
    axes.set_xscale("log")
    both = [each for case in cases for each in (case.ours, case.theirs)]
    axes.set_xlim(min(both) / 2, max(both) * 2)
    axes.set_yticks(places, [case.name for case in cases], fontsize=9.5)
    axes.invert_yaxis()
    axes.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(f"{panel}, {'seconds' if unit == 's' else 'milliseconds'}", loc="left", fontsize=11, weight="bold")


def write_overview(results: Path) -> None:
    """Writes `overview.png` into the folder `results`, and the table into its README.md between the two comments."""
    cases = cases_of(results)
    draw(cases, results / "overview.png")
    page = results / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table_of(cases)}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_overview(RESULTS)


if __name__ == "__main__":
    main()
