"""Texts for people: bytes, counts, lengths of time, and a remedy that several errors have."""

from __future__ import annotations

from collections.abc import Sequence


def how_steps_rise(delete: str = "delete(step)") -> str:
    """Returns what to do about a step that a Manager may not save."""
    return (
        "a Manager's steps must rise over all phases of a run; to do steps again, call restore(app, step=...) first. A "
        f"second Manager, as for the best steps, is not restored: first {delete} each of its steps() above the one "
        "that the run resumed; or let one Manager keep the best too, by Retention(best=)"
    )


WHERE_TAKEN = f"save to a new path; a committed checkpoint is never written over. A{how_steps_rise()[1:]}"


def nbytes_text(nbytes: float) -> str:
    """Returns a number of bytes in units of 10³: "1.34 GB"."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """Returns a count in units of 10³: "124 M"."""
    return _scaled(count, ("", "K", "M", "B", "T"))


def _scaled(number: float, units: Sequence[str]) -> str:
    unit = 0
    while number >= 999.5 and unit < len(units) - 1:
        number, unit = number / 1000, unit + 1
    digits = f"{number:.0f}" if unit == 0 or number >= 99.95 else f"{number:.3g}"
    return f"{digits} {units[unit]}".rstrip()


def seconds_text(seconds: float) -> str:
    """Returns a length of time: "3 ms", "0.16 s", "3 min", "2 h 5 min", "4 days"; "0 ms" if negative."""
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 0.0995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours / 24:.0f} days"


def plural(count: int, word: str) -> str:
    """Returns "1 tensor", "2 tensors", "2 boxes"."""
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('x') else 's'}"
