"""`shardopt plot layout`: draws which rank holds what of the largest tensors, as stored and resharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from shardopt import checkpoint
from shardopt.checkpoint import CheckpointReader
from shardopt.checkpoint.converting.reshard import chunks_over
from shardopt.checkpoint.format.tensor_bytes import dtype_name
from shardopt.checkpoint.text import nbytes_text
from shardopt.cli.contents import writer_rank
from shardopt.cli.output import Output, escaped, shortened
from shardopt.cli.plot.figure import Axes, Figure, Rectangle, check_output, rank_color, save_figure
from shardopt.cli.tree import patterns_of
from shardopt.cli.verbs.show import chosen_by
from shardopt.errors import MismatchError, OptionError, Problem
from shardopt.sharding.box import Box

_MOST_TENSORS = 6
_MOST_NUMBERED = 64  # boxes, in which the number of the rank is written


class Held(NamedTuple):
    """A box, and the ranks that hold it; none if every rank does."""

    box: Box
    ranks: tuple[int, ...]


class Drawn(NamedTuple):
    """Tensors with one shape, dtype and layout, and their holders."""

    keys: list[str]
    shape: tuple[int, ...]
    dtype: str
    stored: list[Held]
    afterwards: list[Held]


def plot_layout(output: Output, *, url: str, world_size: int | None, glob: str | None, out: str) -> int:
    """Draws the layouts of the largest tensors, and the bytes that each rank holds."""
    check_output(out)
    if world_size is not None and world_size < 1:
        problem = Problem("--world-size", str(world_size), "at least 1 rank", "give the number of ranks")
        raise OptionError("there is no such job", [problem])
    wanted = chosen_by(glob, None)
    with checkpoint.open(url) as reader:
        keys = [key for key in reader.manifest.tensors if wanted(key) and 0 not in reader.info(key).shape]
        if not keys:
            problem = Problem(reader.url, "no tensor that matches", "some", "give another pattern")
            raise MismatchError("there is nothing to draw", [problem], code="nothing-selected")
        sizes = (reader.manifest.world_size, world_size)
        drawn, nbytes = _collect(reader, keys, world_size)
        figure = _draw(reader.url, drawn[:_MOST_TENSORS], nbytes, sizes)
    save_figure(figure, out)
    output.line(f"{out}: {len(drawn[:_MOST_TENSORS])} of {len(drawn)} layouts, the largest tensors first")
    output.data({"output": out, "layouts": [_wire(each) for each in drawn], "bytes_by_rank": nbytes})
    return 0


def _wire(drawn: Drawn) -> dict[str, Any]:
    held = [[{**each.box._asdict(), "ranks": each.ranks} for each in side] for side in (drawn.stored, drawn.afterwards)]
    return {**drawn._asdict(), "stored": held[0], "afterwards": held[1]}


def _collect(
    reader: CheckpointReader, keys: Sequence[str], world_size: int | None
) -> tuple[list[Drawn], dict[str, list[int]]]:
    """Returns the distinct layouts, largest tensors first, and each rank's bytes as stored and resharded."""
    stored = reader.manifest
    alike: dict[Any, Drawn] = {}
    totals: dict[str, Counter[int]] = {"stored": Counter(), "afterwards": Counter()}
    for key in keys:
        tensor = stored.tensors[key]
        if tensor.tied_to is not None:
            continue
        ranks = [writer_rank(stored.files[file].name, file) for file in tensor.layout.files]
        before = [Held(box, (rank,)) for box, rank in zip(tensor.layout.boxes, ranks, strict=True)]
        after = []
        if world_size is not None:
            layout = chunks_over(world_size)(key, tensor.layout)
            holders = layout.holders or tuple(() for _ in layout.boxes)
            after = [Held(box, ranks_of_box) for box, ranks_of_box in zip(layout.boxes, holders, strict=True)]
        for side, held, size in (("stored", before, stored.world_size), ("afterwards", after, world_size or 0)):
            for box, of_box in held:
                for rank in of_box or range(size):
                    totals[side][rank] += box.numel * tensor.dtype.itemsize
        same = (tensor.layout.shape, tensor.dtype.name, tuple(before), tuple(after))
        info = reader.info(key)
        drawn = alike.setdefault(same, Drawn([], info.shape, dtype_name(info.dtype), before, after))
        drawn.keys.append(key)
    sizes = {"stored": stored.world_size, "afterwards": world_size or 0}
    nbytes = {
        side: [total[rank] for rank in range(max([sizes[side], *(rank + 1 for rank in total)]))]
        for side, total in totals.items()
    }
    return sorted(alike.values(), key=lambda each: -prod(each.shape)), nbytes


def _draw(url: str, drawn: Sequence[Drawn], nbytes: dict[str, list[int]], sizes: tuple[int, int | None]) -> Figure:
    columns = 1 if sizes[1] is None else 2
    figure = Figure(figsize=(5 * columns, 1.7 * len(drawn) + 2.2), layout="constrained")
    figure.suptitle(escaped(shortened(url, 90)).replace("$", r"\$"), fontsize=10)
    axes = figure.subplots(len(drawn) + 1, columns, squeeze=False)
    titles = (f"as {sizes[0]} ranks stored it", f"as {sizes[1]} ranks would hold it")
    for i, each in enumerate(drawn):
        for column, held in enumerate((each.stored, each.afterwards)[:columns]):
            _draw_tensor(axes[i][column], each, held, named=column == 0, title=titles[column] if i == 0 else "")
    for column, side in enumerate(("stored", "afterwards")[:columns]):
        of_ranks = nbytes[side]
        axes[-1][column].bar(range(len(of_ranks)), of_ranks, color=[rank_color(rank) for rank in range(len(of_ranks))])
        axes[-1][column].set_xlabel("rank")
        axes[-1][column].set_ylabel("written" if side == "stored" else "held", fontsize=8)
        axes[-1][column].set_xticks(range(0, len(of_ranks), max(1, len(of_ranks) // 8)))
        axes[-1][column].yaxis.set_major_formatter(lambda value, _: nbytes_text(value))
        axes[-1][column].tick_params(labelsize=7)
    return figure


def _draw_tensor(axes: Axes, drawn: Drawn, held: Sequence[Held], named: bool, title: str) -> None:
    cuts = [
        len({each.box.offsets[dim] for each in (*drawn.stored, *drawn.afterwards)}) for dim in range(len(drawn.shape))
    ]
    dims = sorted(sorted(range(len(drawn.shape)), key=lambda dim: (-cuts[dim], -drawn.shape[dim], dim))[:2])
    height, width = ([1, 1] + [drawn.shape[dim] for dim in dims])[-2:]
    for box, ranks in held:
        if any(box.offsets[dim] for dim in range(len(drawn.shape)) if dim not in dims):
            continue  # behind one that is drawn
        spans = [(0, 1), (0, 1), *((box.offsets[dim], box.sizes[dim]) for dim in dims)][-2:]
        (top, rows), (left, across) = spans
        color = rank_color(ranks[0]) if ranks else "#dddddd"
        axes.add_patch(Rectangle((left, top), across, rows, facecolor=color, edgecolor="white", linewidth=0.8))
        if len(held) <= _MOST_NUMBERED:
            text = ",".join(map(str, ranks[:4])) + ("…" if len(ranks) > 4 else "") if ranks else "every rank"
            axes.text(left + across / 2, top + rows / 2, text, ha="center", va="center", fontsize=7)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_xticks([0, width])
    axes.set_yticks([0, height] if len(dims) > 1 else [])
    axes.tick_params(labelsize=6)
    lines = [title] if title else []
    if named:
        pattern = patterns_of(drawn.keys)
        more = f" and {len(pattern) - 1} more" if len(pattern) > 1 else ""
        lines.append(f"{escaped(shortened(pattern[0], 50))}{more}, {drawn.dtype} {list(drawn.shape)}")
    axes.set_title("\n".join(lines).replace("$", r"\$"), fontsize=8)
