"""Rows of tables of what was found, beside its bound, and whether that is met."""

from __future__ import annotations

HEADINGS = ("what", "found", "bound", "met")

Row = tuple[str, str, str, str]


def row(what: str, found: float, unit: str, bound: float | None = None, beside: str = "") -> Row:
    """Makes a row; `beside` stands behind what was found. Without a bound there is nothing to be met."""
    text = f"{_text(found)} {unit}".strip() + (f", {beside}" if beside else "")
    if bound is None:
        return what, text, "-", "-"
    return what, text, f"{_text(bound)} {unit}".strip(), "yes" if found <= bound else "no"


def _text(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
