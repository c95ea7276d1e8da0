"""The seconds of saves in the logs of runs, which no checkpoint records: how long training waited."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardopt.checkpoint.run.branches import CheckpointId, parse_id

# The lines of `reports.emit_report`: the figures of each rank, at DEBUG, and the line of rank 0 for people, at INFO.
_SAVE = re.compile(r"\bsave url=(.+?) save_id=\S+ (.*)")
_LENGTH = r"([\d.]+ (?:ms|s|min|h \d+ min|days))"  # as `seconds_text` has it
_UNIT = re.compile(r"([\d.]+) ([a-z]+)")
_SAVED = re.compile(rf"\bsaved step (\d+)(?: of branch (\d+))?: .* in {_LENGTH}(?: \(training waited {_LENGTH}\))?\s*$")
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}
_FIGURE = re.compile(r"(\w+)=([-+.\deE]+|inf|nan)(?:\s|$)")
_NAMES = ("seconds", "stall_seconds")


def seconds_in(logs: Sequence[str]) -> dict[CheckpointId, dict[str, float]]:
    """Returns the seconds of saves by checkpoint, for the slowest rank, from logs of `shardopt` at INFO or DEBUG.

    `seconds` is the length of a save, `stall_seconds` for how long it held up training.
    """
    found: dict[CheckpointId, dict[str, float]] = {}
    for path in logs:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                id, figures = _figures_in(line)
                if id is not None:
                    of_step = found.setdefault(id, {})
                    of_step |= {name: max(value, of_step.get(name, 0.0)) for name, value in figures.items()}
    return found


def _figures_in(line: str) -> tuple[CheckpointId | None, dict[str, float]]:
    """Returns the saved checkpoint in a line of a log, and seconds by name; None for any other line."""
    match = _SAVE.search(line)
    if match is not None:
        id = parse_id(match[1].rstrip("/").rpartition("/")[2])
        return id, {name: float(value) for name, value in _FIGURE.findall(match[2]) if name in _NAMES}
    match = _SAVED.search(line)
    if match is None:
        return None, {}
    seconds = _seconds(match[3])
    stall = seconds if match[4] is None else _seconds(match[4])
    return CheckpointId(int(match[1]), int(match[2] or 0)), {"seconds": seconds, "stall_seconds": stall}


def _seconds(text: str) -> float:
    return sum(float(number) * _SECONDS[unit] for number, unit in _UNIT.findall(text))
