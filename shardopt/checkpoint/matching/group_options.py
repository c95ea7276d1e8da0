"""Options of groups that one side only has, such as those that a schedule has added, where they may be passed over."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardopt.checkpoint.matching.renaming import Names
from shardopt.checkpoint.matching.strictness import Strictness
from shardopt.errors import Problem
from shardopt.param_groups import (
    ALGORITHM,
    GIVEN,
    IMPLEMENTATION_OPTIONS,
    PARAM_GROUPS,
    STORAGE_OPTIONS,
    UNTOUCHED,
    other_algorithm,
)
from shardopt.state import FlatState, Path

_KEPT = frozenset({ALGORITHM, GIVEN, UNTOUCHED, *STORAGE_OPTIONS, *IMPLEMENTATION_OPTIONS})
_log = logging.getLogger("shardopt.checkpoint")


def with_options_of_both(flat: FlatState, names: Names, strictness: Strictness) -> tuple[Names, list[Problem]]:
    """Returns a checkpoint in which groups have the app's options, as far as these may differ; and what to warn of.

    Options that it alone has are left out where `unexpected` passes, those that the app alone has are the app's where
    `missing` passes. Of another algorithm's groups nothing changes.
    """
    if strictness.unexpected == strictness.missing == "raise":
        return names, []
    sections: dict[Path, set[str]] = {}
    for handback in flat.handbacks:
        if handback.groups is not None:
            known = {name for group in handback.groups for name in group}
            sections[(*handback.path, PARAM_GROUPS)] = known
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
