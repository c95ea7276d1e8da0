"""Strictness: which differences between a checkpoint and an app a load refuses, and what is passed over."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardopt.checkpoint.loading.names import Names
from shardopt.errors import Problem
from shardopt.state.param_groups import (
    ALGORITHM,
    GIVEN,
    IMPLEMENTATION_OPTIONS,
    PARAM_GROUPS,
    STORAGE_OPTIONS,
    UNTOUCHED,
    other_algorithm,
)
from shardopt.state.state import FlatState, Path

_MOST_KEYS = 5
_KEPT = frozenset({ALGORITHM, GIVEN, UNTOUCHED, *STORAGE_OPTIONS, *IMPLEMENTATION_OPTIONS})
"""Options of groups that are never passed over."""

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
    lets_objects_differ: bool = field(init=False, repr=False, compare=False)
    """Whether differences between an object and its stored state pass, also within plain values."""

    def __post_init__(self) -> None:
        allowed = {"dtype": ("raise", "cast")}
        for name in ("missing", "unexpected", "dtype", "uninitialized"):
            choices = allowed.get(name, ("raise", "warn", "ignore"))
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: found {getattr(self, name)!r}; required one of {choices}")
        object.__setattr__(self, "lets_objects_differ", self.missing != "raise" and self.unexpected != "raise")


STRICT = Strictness()


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


def with_options_of_both(flat: FlatState, names: Names, strictness: Strictness) -> tuple[Names, list[Problem]]:
    """Returns a checkpoint in which groups have the app's options, as far as these may differ; and what to warn of.

    Options that it alone has are left out where `unexpected` passes, those that the app alone has are the app's where
    `missing` passes. Of another algorithm's groups nothing changes.
    """
    if strictness.unexpected == strictness.missing == "raise":
        return names, []
    sections: dict[Path, set[str]] = {}
    for target in flat.targets:
        if target.groups is not None:
            known = {name for group in target.groups for name in group}
            sections[(*target.path, PARAM_GROUPS)] = known
    done: dict[tuple[int, int], dict[str, Any]] = {}
    values, passed = dict(names.manifest.values), dict[str, str]()
    for key, (path, stored) in names.manifest.values.items():
        known = sections.get(path[:-1], set())
        leaf = flat.leaves.get(key)
        if not known or not isinstance(stored, dict):
            continue
        own: Mapping[str, Any] = leaf.value if leaf is not None else dict.fromkeys(known)
        if other_algorithm(stored, str(own.get(ALGORITHM) or "")):
            continue
        form = id(stored), id(own) if leaf is not None else id(known)
        if form not in done:
            left_out = [name for name in stored if name not in own and name not in _KEPT]
            left_out = left_out if strictness.unexpected != "raise" else []
            added = {name: value for name, value in own.items() if name not in stored and name not in _KEPT}
            added = added if strictness.missing != "raise" and leaf is not None else {}
            done[form] = {name: value for name, value in stored.items() if name not in left_out} | added
            passed |= {f"{key}.{name}": "the checkpoint" for name in left_out}
            passed |= {f"{key}.{name}": "the app" for name in added}
        values[key] = path, done[form]
    warnings = []
    for key, side in passed.items():
        choice = strictness.unexpected if side == "the checkpoint" else strictness.missing
        if choice == "warn":
            remedy = "attach the schedule that adds it before the load"
            warnings.append(Problem(key, f"an option that {side} alone has", "one that both have", remedy))
        else:
            _log.info("passed over %s, an option that %s alone has", key, side)
    return replace(names, manifest=replace(names.manifest, values=values)), warnings
