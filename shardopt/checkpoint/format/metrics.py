"""The metrics of a checkpoint: numbers by name. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardopt.errors import Problem, StateError


def first_given(by_rank: Iterable[Mapping[str, float] | None]) -> dict[str, float]:
    """Returns the metrics of a job: of each name the number of the lowest rank that gives one.

    The last stage of a pipeline alone may know the loss.
    """
    merged: dict[str, float] = {}
    for numbers in by_rank:
        for name, number in (numbers or {}).items():
            merged.setdefault(name, number)
    return merged


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Checks metrics and returns them as floats.

    Raises:
        StateError: some are no numbers, or under names that no file can have; names each of them.
    """
    if not isinstance(metrics, Mapping):
        problem = Problem("metrics", repr(metrics)[:80], "numbers by name", 'give a dict, such as {"loss": 0.5}')
        raise StateError("metrics cannot be kept", [problem], code="invalid-argument")
    numbers: dict[str, float] = {}
    problems = []
    for name, value in metrics.items():
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            name.encode()  # half of a surrogate pair, as in names of odd files, is no JSON that could be read
            numbers[name] = float(value.item() if hasattr(value, "item") else value)  # float() of a loss warns
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor of several elements
            key = f"metrics.{name}".encode(errors="backslashreplace").decode()
            text = f"{value!r} under {name!r}"[:80]
            problems.append(Problem(key, text, "a number under a name in Unicode", "give one, or leave it out"))
    if problems:
        raise StateError("metrics cannot be kept", problems, code="invalid-argument")
    return numbers
