"""The options of a load; of these its strictness: which differences it refuses, and which it ignores."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from shardopt.checkpoint.loading.names import Names
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.sources.reading.broadcast import ShareReads
from shardopt.errors import Problem
from shardopt.ranks import DEADLINE_SECONDS, Group
from shardopt.state.param_groups import (
    ALGORITHM,
    GIVEN,
    IMPLEMENTATION_OPTIONS,
    STORAGE_OPTIONS,
    UNTOUCHED,
    other_algorithm,
)
from shardopt.state.paths import PARAM_GROUPS, Path
from shardopt.state.state import FlatState, Tied

_MOST_KEYS = 5
_KEPT = frozenset({ALGORITHM, GIVEN, UNTOUCHED, *STORAGE_OPTIONS, *IMPLEMENTATION_OPTIONS})
"""Options of groups that are never ignored."""

_log = logging.getLogger("shardopt.checkpoint")

Choice = Literal["raise", "warn", "ignore"]


@dataclass(frozen=True, slots=True)
class Strictness:
    r"""One choice for each kind of difference between a checkpoint and an app; "raise" is the default for all.

    Args:
        missing: keys of the app, and options of its groups, that the checkpoint has not; they stay as they are. A
            compiled regex lets those pass in which it is found, and no others: `re.compile(r"\.lora_[AB]\.")` for
            adapters that begin on a stored model. One that is found in no key of the app, on any rank, is refused.
        unexpected: keys of the checkpoint, and options of its groups, that the app has not; they are left out. A
            schedule such as OneCycleLR adds options that another one does not know.
        dtype: "cast" converts floating point and complex values to the dtype that the app has. Numbers that it cannot
            hold are an error. For a dtype with fewer exponents (fp16 or fp8 from anything wider, fp32 from fp64) values
            are read twice, and checked before anything is changed. Otherwise, as for bf16 from fp32, only numbers next
            to the largest can be lost, and they are found as they are read.
        uninitialized: an optimizer that has state on one side only; it stays as it is.
        row_state: "merge" fits the numbers that row-wise optimizers have for each row of a table to the app's cut of
            its columns. Where torchrec has a number for each part of the columns, a row gets their mean, weighted by
            the columns of the parts; each part of the app gets the number of its row. The report lists them.
    """

    missing: Choice | re.Pattern[str] = "raise"
    unexpected: Choice = "raise"
    dtype: Literal["raise", "cast"] = "raise"
    uninitialized: Choice = "raise"
    row_state: Literal["raise", "merge"] = "raise"
    lets_objects_differ: bool = field(init=False, repr=False, compare=False)
    """Whether differences between an object and its stored state pass, including those within plain values."""

    def __post_init__(self) -> None:
        allowed = {"dtype": ("raise", "cast"), "row_state": ("raise", "merge")}
        for name in ("missing", "unexpected", "dtype", "uninitialized", "row_state"):
            choices = allowed.get(name, ("raise", "warn", "ignore"))
            is_pattern = name == "missing" and isinstance(self.missing, re.Pattern)
            if not is_pattern and getattr(self, name) not in choices:
                or_regex = ", or a compiled regex" if name == "missing" else ""
                raise ValueError(f"{name}: found {getattr(self, name)!r}; required one of {choices}{or_regex}")
        passes = self.missing in ("warn", "ignore") and self.unexpected != "raise"
        object.__setattr__(self, "lets_objects_differ", passes)

    def choice_for_missing(self, key: str) -> Choice:
        """Returns the choice for a key of the app that the checkpoint lacks."""
        if isinstance(self.missing, re.Pattern):
            return "ignore" if self.missing.search(key) else "raise"
        return self.missing

    def unmatched(self, flat: FlatState, names: Names) -> list[Problem]:
        """Returns a problem if `missing`, a regex, matches no key or group option to be loaded."""
        assert isinstance(self.missing, re.Pattern)
        for key in names.chosen & flat.leaves.keys():
            options = flat.leaves[key].value
            of_group = options if isinstance(options, dict) else ()
            if self.missing.search(key) or any(self.missing.search(f"{key}.{name}") for name in of_group):
                return []
        found = f"{self.missing.pattern!r}, which is found in no key of the app"
        remedy = f"correct the regex; the app has {', '.join(islice(flat.leaves, 3)) or 'none'}"
        return [Problem("missing", found, "a regex of keys that may be missing", remedy)]


STRICT = Strictness()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of one load: those of `load`, with `strict` as a `Strictness`."""

    strictness: Strictness = STRICT
    select: str | None = None
    rename: Mapping[str, str] | None = None
    rearrange: Sequence[AnyRule] = ()
    skip: str | None = None
    transactional: bool = False
    share_reads: ShareReads = "auto"
    init_state: bool = False
    progress: Progress | None = None
    deadline_seconds: float = DEADLINE_SECONDS
    process_group: Group | None = None
    tied: Tied | None = None
    base_root: str | None = None
    storage_options: Mapping[str, Any] | None = None
    reads: bool = True
    """Else it is only compared (`estimating/rehearse.py`): no tensor needs memory, and no file of tensors is opened."""
    selects: bool = True
    """Whether the call has `select` and `skip`, which remedies name; a `Follower` does not."""


def strictness_of(strict: bool | Strictness) -> Strictness:
    """Returns the choices of `strict`: True raises for all, False ignores one-sided keys and merges state of rows."""
    if isinstance(strict, Strictness):
        return strict
    return Strictness() if strict else Strictness(missing="ignore", unexpected="ignore", row_state="merge")


def log_passed_over(url: str, missing: Sequence[str], unexpected: Sequence[str], strictness: Strictness) -> None:
    """Logs in one line the keys that "ignore" skipped; as a warning if it skipped keys of both sides."""
    texts = []
    for keys, choice, whose in (
        (missing, strictness.missing, "of the app that the checkpoint has not"),
        (unexpected, strictness.unexpected, "of the checkpoint that the app has not"),
    ):
        if keys and (choice == "ignore" or isinstance(choice, re.Pattern)):
            first = ", ".join([*keys[:_MOST_KEYS], *(["..."] if len(keys) > _MOST_KEYS else [])])
            texts.append(f"{len(keys)} {'key' if len(keys) == 1 else 'keys'} {whose} ({first})")
    if texts:
        level = logging.WARNING if strictness.lets_objects_differ else logging.INFO
        _log.log(level, "loading %s: passed over %s", url, " and ".join(texts))


def with_options_of_both(flat: FlatState, names: Names, strictness: Strictness) -> tuple[Names, list[Problem]]:
    """Returns a checkpoint whose groups have the app's options, as these may differ; and the warnings.

    Options that it alone has are left out where `unexpected` passes, those that the app alone has are the app's where
    `missing` passes. Of another algorithm's groups nothing changes.
    """
    sections: dict[Path, set[str]] = {}
    for target in flat.targets:
        if target.groups is not None:
            known = {name for group in target.groups for name in group}
            sections[(*target.path, PARAM_GROUPS)] = known
    done: dict[tuple[int, int, str], dict[str, Any]] = {}
    by_key = isinstance(strictness.missing, re.Pattern)  # else the same for all that share their options
    values, passed = dict(names.manifest.values), dict[str, str]()
    for key, (path, stored) in names.manifest.values.items():
        known = sections.get(path[:-1], set())
        leaf = flat.leaves.get(key)
        if not known or not isinstance(stored, dict):
            continue
        own: Mapping[str, Any] = leaf.value if leaf is not None else dict.fromkeys(known)
        if other_algorithm(stored, str(own.get(ALGORITHM) or "")):
            continue
        form = id(stored), id(own) if leaf is not None else id(known), key if by_key else ""
        if form not in done:
            left_out = [name for name in stored if name not in own and name not in _KEPT]
            left_out = left_out if strictness.unexpected != "raise" else []
            added = {
                name: value
                for name, value in (own.items() if leaf is not None else ())
                if name not in stored and name not in _KEPT
                if strictness.choice_for_missing(f"{key}.{name}") != "raise"
            }
            done[form] = {name: value for name, value in stored.items() if name not in left_out} | added
            passed |= {f"{key}.{name}": "the checkpoint" for name in left_out}
            passed |= {f"{key}.{name}": "the app" for name in added}
        values[key] = path, done[form]
    warnings = []
    for key, side in passed.items():
        choice = strictness.unexpected if side == "the checkpoint" else strictness.choice_for_missing(key)
        if choice == "warn":
            remedy = "attach the schedule that adds it before the load"
            warnings.append(Problem(key, f"an option that only {side} has", "one that both have", remedy))
        else:
            _log.info("ignored option %s, which only %s has", key, side)
    return replace(names, manifest=replace(names.manifest, values=values)), warnings
