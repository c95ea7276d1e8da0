"""Draws the pictures of docs/concepts.md, from layouts and plans that the code itself makes.

python docs/pictures/draw.py [FOLDER]     # docs/pictures, if none is given

They stand on white in either scheme of the site (site.css), and are narrow, so that a phone shows their text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout

ROWS, COLUMNS = 12, 8
COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44"]
INK, PALE = "#222222", "#888888"
FONT = {"fontsize": 11, "color": INK}
WIDTH = 6.4  # inches


def draw_layout(axis: Axes, layout: Layout, title: str) -> None:
    """Draws the boxes of a layout over the tensor, with the ranks that hold each."""
    for box, holders in zip(layout.boxes, layout.holders, strict=True):
        (row, column), (height, width) = box.offsets, box.sizes
        at = (column, row)
        axis.add_patch(Rectangle(at, width, height, facecolor=COLOURS[holders[0]], edgecolor="white", linewidth=2))
        text = "rank " + ", ".join(str(rank) for rank in holders)
        text += f"\n{row}:{row + height}, {column}:{column + width}"
        axis.text(column + width / 2, row + height / 2, text, ha="center", va="center", fontsize=11, color="white")
    axis.set(xlim=(0, COLUMNS), ylim=(ROWS, 0), aspect="equal", xticks=[0, COLUMNS], yticks=[0, ROWS])
    axis.tick_params(length=0, labelsize=9, labelcolor=PALE)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_title(title, fontsize=11, color=INK)


def draw_boxes(path: Path) -> None:
    """One tensor under four shardings."""
    shape = (ROWS, COLUMNS)
    layouts = {
        "FSDP2 on 4 ranks": mesh_layout(shape, Mesh((4,), (0, 1, 2, 3)), (Split(0, 0),)),
        "FSDP2 on 3 ranks": mesh_layout(shape, Mesh((3,), (0, 1, 2)), (Split(0, 0),)),
        "HSDP, 2 × 2": mesh_layout(shape, Mesh((2, 2), (0, 1, 2, 3)), (Split(1, 0),)),
        "rows × columns, 2 × 2": mesh_layout(shape, Mesh((2, 2), (0, 1, 2, 3)), (Split(0, 0), Split(1, 1))),
    }
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 8.2), layout="constrained")
    for axis, (title, layout) in zip(axes.flat, layouts.items(), strict=True):
        draw_layout(axis, layout, title)
    figure.suptitle(f"A tensor of {ROWS} × {COLUMNS}: who holds which box", **FONT)
    save(figure, path)


def draw_overlaps(path: Path) -> None:
    """What each of three ranks reads of the files of four."""
    shape = (ROWS, COLUMNS)
    stored = mesh_layout(shape, Mesh((4,), (0, 1, 2, 3)), (Split(0, 0),))
    wanted = mesh_layout(shape, Mesh((3,), (0, 1, 2)), (Split(0, 0),))
    figure, axis = plt.subplots(figsize=(WIDTH, 5.6), layout="constrained")
    for column, layout, label in ((0.0, stored, "file of rank {}"), (6.0, wanted, "rank {} of 3")):
        for box, holders in zip(layout.boxes, layout.holders, strict=True):
            row, height = box.offsets[0], box.sizes[0]
            colour = COLOURS[holders[0]] if layout is stored else PALE  # a colour is a file
            axis.add_patch(Rectangle((column, row), 2.4, height, facecolor=colour, edgecolor="white", lw=2))
            text = f"{label.format(holders[0])}\n{rows(row, height)}"
            axis.text(column + 1.2, row + height / 2, text, ha="center", va="center", fontsize=10, color="white")
    for box in wanted.boxes:
        for other, (writer, *_) in zip(stored.boxes, stored.holders, strict=True):
            overlap = box.intersect(other)
            if overlap is None:
                continue
            row, height = overlap.offsets[0], overlap.sizes[0]
            axis.annotate(
                "",
                xy=(5.95, row + height / 2),
                xytext=(2.45, row + height / 2),
                arrowprops={"arrowstyle": "-|>", "color": COLOURS[writer], "lw": 2},
            )
            text = rows(row, height)
            axis.text(4.2, row + height / 2 - 0.12, text, ha="center", va="bottom", fontsize=9, color=INK)
    axis.set(xlim=(-0.1, 8.5), ylim=(ROWS + 0.1, -0.1), xticks=[], yticks=[])
    axis.axis("off")
    figure.suptitle("Saved by 4 ranks, loaded by 3: each arrow is one range of bytes", **FONT)
    save(figure, path)


def rows(first: int, count: int) -> str:
    return f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"


def draw_time_line(path: Path) -> None:
    """A save in the call, in the background, and behind the next backward."""
    figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 6.6), layout="constrained", sharex=True)
    train, copy, write, commit = "#bbbbbb", COLOURS[3], COLOURS[0], COLOURS[2]
    cases = {
        "save(…): the program waits for all of it": (
            [(0, 2, train, "step"), (6.6, 2, train, "step"), (8.6, 2, train, "step")],
            [(2, 3, write, "write"), (5, 1.6, commit, "commit")],
        ),
        'async_save(…), or stage="now": it waits for the copy': (
            [(0, 2, train, "step"), *((3.2 + 2 * number, 2, train, "step") for number in range(4))],
            [(2, 1.2, copy, "copy"), (3.2, 3, write, "write"), (6.2, 1.6, commit, "commit")],
        ),
        'stage="lazy": the copy runs beside forward and backward': (
            [
                (0, 2, train, "step"),
                (2, 1.4, train, "fwd, bwd"),
                (3.4, 0.6, "#888888", ""),
                *((4 + 2 * number, 2, train, "step") for number in range(4)),
            ],
            [(2, 2, copy, "copy"), (4, 3, write, "write"), (7, 1.6, commit, "commit")],
        ),
    }
    for axis, (title, lanes) in zip(axes, cases.items(), strict=True):
        for y, lane in zip((1.1, 0), lanes, strict=True):
            for start, length, colour, text in lane:
                style = "round,pad=0,rounding_size=0.06"
                axis.add_patch(
                    FancyBboxPatch((start + 0.03, y), length - 0.06, 0.85, style, facecolor=colour, edgecolor="none")
                )
                ink = INK if colour in (train, copy) else "white"
                axis.text(start + length / 2, y + 0.42, text, ha="center", va="center", fontsize=10, color=ink)
        committed = next(start + length for start, length, colour, _ in lanes[1] if colour == commit)
        axis.axvline(committed, color=commit, linestyle="--", linewidth=1.5)
        axis.text(committed + 0.08, 0.42, "it exists", va="center", fontsize=11, color=commit)
        axis.set(xlim=(-2.1, 12), ylim=(-0.2, 2.2), xticks=[], yticks=[])
        axis.text(-2.05, 1.5, "training", va="center", **FONT)
        axis.text(-2.05, 0.42, "saving", va="center", **FONT)
        axis.axis("off")
        axis.set_title(title, loc="left", fontsize=11, color=INK)
    save(figure, path)


def draw_all_or_nothing(path: Path) -> None:
    """A directory while it is saved to, and what a restart finds at any moment."""
    figure, axis = plt.subplots(figsize=(WIDTH, 5.6), layout="constrained")
    moments = [
        ("files are written", ["a1b2-r00000.safetensors", "a1b2-r00001.safet"], False),
        ("all are written", ["a1b2-r00000.safetensors", "a1b2-r00001.safetensors"], False),
        ("the manifest is there", ["a1b2-r00000.safetensors", "a1b2-r00001.safetensors", "manifest.json"], True),
    ]
    for number, (title, files, committed) in enumerate(moments):
        top = 3.6 * (2 - number)
        colour = COLOURS[2] if committed else PALE
        style = "round,pad=0,rounding_size=0.12"
        axis.add_patch(FancyBboxPatch((0, top), 6.4, 3, style, facecolor="#f4f4f4", edgecolor=colour, lw=2))
        axis.text(0.2, top + 2.5, "step-00000200/", fontsize=11, color=INK, family="monospace", va="center")
        for line, name in enumerate(files):
            ink = COLOURS[2] if name == "manifest.json" else INK
            axis.text(0.5, top + 1.8 - 0.62 * line, name, fontsize=11, color=ink, family="monospace", va="center")
        found = "step 200" if committed else "step 100"
        axis.text(6.7, top + 2.3, title, va="center", fontsize=12, color=colour if committed else INK)
        axis.text(6.7, top + 1.1, f"killed here:\na restart finds\n{found}", va="center", **FONT)
        if number:
            axis.annotate(
                "", xy=(3.2, top + 3), xytext=(3.2, top + 3.6), arrowprops={"arrowstyle": "-|>", "color": INK}
            )
    axis.set(xlim=(-0.1, 9.8), ylim=(-0.1, 10.3), xticks=[], yticks=[])
    axis.axis("off")
    save(figure, path)


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main(folder: Path) -> None:
    draw_boxes(folder / "boxes.png")
    draw_overlaps(folder / "overlaps.png")
    draw_time_line(folder / "time-line.png")
    draw_all_or_nothing(folder / "all-or-nothing.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
