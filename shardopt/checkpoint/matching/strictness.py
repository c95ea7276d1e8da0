"""Strictness: which differences between a checkpoint and an app a load refuses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MOST_KEYS = 5

_log = logging.getLogger("shardopt.checkpoint")

Choice = Literal["raise", "warn", "ignore"]


@dataclass(frozen=True, slots=True)
class Strictness:
    """One choice for each kind of difference between a checkpoint and an app; "raise" is the default for all.

    Args:
        missing: keys of the app, and options of its groups, that the checkpoint has not; they stay as they are.
        unexpected: keys of the checkpoint, and options of its groups, that the app has not; they are left out. A
            schedule such as OneCycleLR adds options, of which another one knows nothing.
        dtype: "cast" converts floating point and complex values to the dtype that the app has. Numbers that it cannot
            hold are an error: what goes to a dtype with fewer exponents (fp16 or fp8 from anything wider, fp32 from
            fp64) is read twice for it, before anything is changed; of what does not, as bf16 from fp32, only numbers
            next to the largest can be lost, and are found as they are read.
        uninitialized: an optimizer that has state on one side only; it stays as it is.
    """

    missing: Choice = "raise"
    unexpected: Choice = "raise"
    dtype: Literal["raise", "cast"] = "raise"
    uninitialized: Choice = "raise"

    def __post_init__(self) -> None:
        allowed = {"dtype": ("raise", "cast")}
        for name in ("missing", "unexpected", "dtype", "uninitialized"):
            choices = allowed.get(name, ("raise", "warn", "ignore"))
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: found {getattr(self, name)!r}; required one of {choices}")

    @property
    def lets_objects_differ(self) -> bool:
        """Whether differences between an object and its stored state pass, also within plain values."""
        return self.missing != "raise" and self.unexpected != "raise"


def strictness_of(strict: bool | Strictness) -> Strictness:
    """Returns the choices of `load(..., strict=...)`: True raises for everything, False ignores one-sided keys."""
    if isinstance(strict, Strictness):
        return strict
    return Strictness() if strict else Strictness(missing="ignore", unexpected="ignore")


def log_passed_over(url: str, missing: Sequence[str], unexpected: Sequence[str], strictness: Strictness) -> None:
    """Logs in one line the keys that "ignore" has passed over; as a warning where it holds for those of both sides."""
    texts = []
    for keys, choice, whose in (
        (missing, strictness.missing, "of the app that the checkpoint has not"),
        (unexpected, strictness.unexpected, "of the checkpoint that the app has not"),
    ):
        if keys and choice == "ignore":
            first = ", ".join([*keys[:_MOST_KEYS], *(["..."] if len(keys) > _MOST_KEYS else [])])
            texts.append(f"{len(keys)} {'key' if len(keys) == 1 else 'keys'} {whose} ({first})")
    if texts:
        level = logging.WARNING if strictness.lets_objects_differ else logging.INFO
        _log.log(level, "loading %s: passed over %s", url, " and ".join(texts))
