"""Makes figures with matplotlib (the extra `plot`), without a display."""

from __future__ import annotations

from shardopt.errors import OptionError, Problem, ShardoptError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ModuleNotFoundError:
    _missing = Problem("matplotlib", "no such package", "matplotlib 3.8 or newer", "pip install 'shardopt[plot]'")
    raise ShardoptError("matplotlib is not installed", [_missing], code="missing-package") from None

__all__ = ["Axes", "Figure", "Rectangle", "check_output", "rank_color", "save_figure"]

_COLORS = (
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d", "#bab0ac"),
    *("#1f4e79", "#a85000", "#2d6a27", "#8f1d1c", "#2f7f79", "#a18800", "#6d3b5e", "#b3505a", "#5b3d2e", "#6d6764"),
)


def rank_color(rank: int) -> str:
    """Returns the colour of a rank; colours repeat after 20 ranks."""
    return _COLORS[rank % len(_COLORS)]


def check_output(path: str) -> None:
    """Raises OptionError for a file name whose suffix is no picture format."""
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        problem = Problem("--out", repr(path), "a name that ends in .png, .svg or .pdf", "give another one")
        raise OptionError("invalid arguments", [problem])


def save_figure(figure: Figure, path: str) -> None:
    """Writes a figure; the same figure always has the same bytes."""
    kind = path.lower().rpartition(".")[2]
    dated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    figure.savefig(path, dpi=120, metadata=dated)
