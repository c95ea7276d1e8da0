"""Reconciles the differences between checkpoint and app over all ranks: which are refused, and which keys no rank has.

round   hashes of what each rank differs in         `differences_of` → `compare_differences` on rank 0
round   only where there is any: what differs, of   `reconcile`
        the first rank of each kind, for all

Problems are bounded as errors of ranks are (`ranks/failures.py`). A stored key is unexpected if it is so on every rank:
keys are sent by their places in the sorted list of all of them, as runs, which are few where a rank has a stage of a
model, or a part of its experts. Entries of which one side has nothing at all are one problem each. Loads that would
load nothing, and would look like those that have loaded everything, are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import xxhash

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.loading.compare import (
    LENGTH_DIFFERS,
    MISSING,
    NOT_STORED,
    Match,
    in_longer_lists,
    kind_of_stored,
)
from shardopt.checkpoint.loading.names import Names, stored_paths
from shardopt.checkpoint.loading.options import Strictness
from shardopt.checkpoint.loading.other_names import rename_hint
from shardopt.checkpoint.text import plural
from shardopt.errors import MismatchError, Problem
from shardopt.ranks import Ranks
from shardopt.ranks.connections.tree import pack_runs, unpack_runs
from shardopt.ranks.failures import describe, names_of, problems_of
from shardopt.ranks.kinds import kinds_of, pack_kinds, unpack_kinds
from shardopt.state.param_groups import SAVED_BY
from shardopt.state.paths import PARAM_GROUPS
from shardopt.state.state import FlatState

_NO_KEY = "nothing under this key"
_UNEXPECTED = (
    "give its new name with rename={...}, add it to the app, leave it out with "
    'strict=Strictness(unexpected="ignore"), or load only some keys by select='
)
_IN_OBJECT = (
    "if an object of the app holds an optimizer, make its state before loading (init_state(), or a step), or save and "
    "load the optimizer itself too; otherwise "
)
_GROWN = 'if the run added a group for it, call add_param_group({"params": {…}}) before the load; otherwise '
_MISSING_ENTRY = (
    'remove it from the app, leave it as it is with strict=Strictness(missing="ignore"), or give its old name with '
    "rename={...}"
)
_UNEXPECTED_ENTRY = (
    'to resume, add its object to the app; or leave it out with strict=Strictness(unexpected="ignore"), or give its '
    "new name with rename={...}"
)
_FEW_ENTRIES = 6  # of an app, that a remedy names
_BY_SELECT = re.compile(
    r'to load only what both have, pass select=r"[^"]*"; |, or load only some keys by select=$'
    r"|, or leave it as it is with skip=.*$"
)
# Where optimizers keep theirs, which follows from what models have.
_OF_OPTIMIZERS = re.compile(r"(^|\.)(state|param_groups)(\.|$)")


def differences_of(match: Match, names: Names) -> list[str]:
    """Returns hashes of this rank's problems, of its unexpected keys, and of all stored keys; "" for none."""
    problems = [asdict(problem) for problem in match.problems]
    keys = _stored_keys(names) if match.unexpected else []
    return [_hash(problems), _hash(match.unexpected), _hash(keys)]


def _hash(value: Sequence[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode()) if value else ""


def _stored_keys(names: Names) -> list[str]:
    """Returns all stored keys under the app's names, sorted."""
    manifest = names.manifest
    return sorted({*manifest.tensors, *manifest.values, *manifest.per_rank})


def compare_differences(reports: Sequence[Sequence[str] | None]) -> dict[str, Any]:
    """Compares, on rank 0, the `differences_of` all ranks; None for a rank without differences."""
    problems, unexpected, keys = zip(*(each or ("", "", "") for each in reports), strict=True)
    return {
        "problems": pack_kinds(kinds_of(problems)),
        # A rank that expects all that is stored leaves nothing unexpected.
        "unexpected": pack_kinds(kinds_of(unexpected)) if all(unexpected) else [],
        "keys_alike": len(set(keys)) == 1,
    }


def reconcile(
    ranks: Ranks,
    what: str,
    match: Match,
    names: Names,
    strictness: Strictness,
    differences: dict[str, Any],
    selects: bool,
) -> None:
    """Raises for what does not fit on some rank, and for stored keys that no rank has a place for. Collective.

    Args:
        match: gets the unexpected keys of the job, and warnings of them.
        differences: as `compare_differences` gave it on rank 0.
        selects: whether the call has arguments `select` and `skip`, which remedies may name.

    Raises:
        MismatchError: lists each difference once, with the ranks that have it; of very many the first ones.
    """
    with_problems, with_keys = unpack_kinds(differences["problems"]), unpack_kinds(differences["unexpected"])
    stored = _stored_keys(names) if differences["keys_alike"] else None

    def report() -> list[Any]:
        is_first = ranks.rank in [group[0] for group in with_problems]
        sends_keys = ranks.rank in [group[0] for group in with_keys]
        return [
            describe(MismatchError("", _causes_first(match.problems)), ranks.size) if is_first else None,
            _pack(match.unexpected, stored) if sends_keys else None,
            _shared(names) if is_first or sends_keys else None,
        ]

    def merge(reports: Sequence[Any]) -> dict[str, Any]:
        by_kind = [(reports[group[0]][0], [ranks.members[rank] for rank in group]) for group in with_problems]
        problems, left_out = problems_of((error for error, _ in by_kind), ranks.size)
        ranks_with: dict[Problem, list[int]] = {}
        for error, group in by_kind:
            for problem in error["problems"]:
                ranks_with.setdefault(Problem(**problem), []).extend(group)
        is_whole = not any("left_out" in error for error, _ in by_kind)
        found = [Problem(**each) for each in problems]
        told = [_on(sorted(ranks_with.get(each, ())), ranks.size, each, is_whole) for each in found]
        failed = sorted(rank for error, group in by_kind if error["problems"] for rank in group)
        expected_by_none: set[str] = set()
        if with_keys:
            lists = (_unpack(reports[group[0]][1], stored) for group in with_keys)
            expected_by_none = set.intersection(*map(set, lists))
        unexpected = [key for key in match.unexpected if key in expected_by_none]
        told_shared = [each[2] for each in reports if each[2] is not None]
        shared = {entry for entries, _ in told_shared for entry in entries}
        if not with_keys:  # some rank expects all
            shared = entries_of(_stored_keys(names))
        return {
            "problems": [asdict(problem) for problem in told],
            "left_out": left_out,
            "failed": len(failed),
            "where": names_of(failed) if failed else "",
            "unexpected": _pack(unexpected, stored),
            "own": sorted(entries_of(unexpected) & (shared | entries_of(names.chosen))),
            "select": _select_of(sorted(shared)) if any(has_tensors for _, has_tensors in told_shared) else "",
        }

    _, merged = ranks.agree(what, work=report, report=lambda report: report, decide=merge)
    unexpected = set(_unpack(merged["unexpected"], stored))
    refused = _judge_unexpected(match, names, strictness, unexpected)

    def told(problems: Sequence[Problem]) -> list[Problem]:
        found = _causes_first(_by_entry(problems, names, merged))
        return found if selects else [replace(each, remedy=_BY_SELECT.sub("", each.remedy)) for each in found]

    if refused or merged["failed"]:
        on_some = not refused and merged["failed"] < ranks.size
        where = f"{what} failed on {merged['where']}: " if on_some else ""
        problems = [*(Problem(**problem) for problem in merged["problems"]), *refused]
        message = f"{where}the checkpoint does not fit the app; nothing was changed"
        if hint := _other_names(problems, match, names):
            message += f"\nStored tensors have the missing names after {hint}."
        raise MismatchError(message, told(problems), merged["left_out"])
    match.warnings = told(match.warnings)


def _other_names(problems: Sequence[Problem], match: Match, names: Names) -> str | None:
    """Returns the rule that gives stored weights the names of those that are missing, if it is one."""
    missing = {
        problem.key: problem.required
        for problem in problems
        if problem.found.startswith(NOT_STORED) and problem.required.startswith("a tensor")
        if not _OF_OPTIMIZERS.search(problem.key)
    }
    manifest, unexpected = names.manifest, set(match.unexpected)
    stored = {key: kind_of_stored(manifest, key) for key in match.unexpected if key in manifest.tensors}
    fitting = [key for key in manifest.tensors if key not in unexpected and not _OF_OPTIMIZERS.search(key)]
    return rename_hint(missing, stored, fitting)


def _causes_first(problems: Iterable[Problem]) -> list[Problem]:
    """Sorts problems: first what names its cause, then weights, then optimizers; those of both sides first; stable."""

    def rank(each: Problem) -> tuple[bool, bool, bool]:
        names_cause = SAVED_BY in each.found or each.remedy.startswith(_GROWN)
        of_one_side = each.found.startswith(NOT_STORED) or each.remedy.endswith((_UNEXPECTED, _UNEXPECTED_ENTRY))
        return not names_cause, _OF_OPTIMIZERS.search(each.key) is not None, of_one_side

    return sorted(problems, key=rank)


def _judge_unexpected(match: Match, names: Names, strictness: Strictness, by_none: Collection[str]) -> list[Problem]:
    """Keeps the unexpected keys that no rank expects; returns a problem for each one that is refused."""
    match.unexpected = [key for key in match.unexpected if key in by_none]
    choice = strictness.unexpected
    if choice == "ignore":
        return []
    grown, paths = _grown_by(match.unexpected, names.chosen), stored_paths(names.manifest)
    items = in_longer_lists({key: paths[key] for key in match.unexpected}, names.chosen)
    problems = [
        Problem(
            key,
            f"{kind_of_stored(names.manifest, key)} in the checkpoint",
            _NO_KEY,
            f"{_IN_OBJECT if _is_within_leaf(key, names.chosen) else ''}{_GROWN if key in grown else ''}"
            f"{LENGTH_DIFFERS if key in items else ''}{_UNEXPECTED}",
        )
        for key in match.unexpected
    ]
    if choice == "raise":
        return problems
    match.warnings += problems
    return []


def entries_of(keys: Iterable[str]) -> set[str]:
    """Returns the entries of an app, or of a checkpoint, that keys are of."""
    return {key.partition(".")[0] for key in keys}


def _by_entry(problems: Sequence[Problem], names: Names, merged: dict[str, Any]) -> list[Problem]:
    """Replaces the problems with an entry of which one side has nothing at all by one for each, if any has several.

    Args:
        merged: what ranks have found, as `reconcile` merges it, the same on all.
    """
    stored = entries_of(_stored_keys(names))
    own = {*merged["own"], *entries_of(each.key for each in problems if each.required != _NO_KEY)}
    told: list[Problem] = []
    lacking: dict[tuple[bool, str], list[Problem]] = {}  # by whether the app lacks the entry
    for each in problems:
        is_unexpected, entry = each.required == _NO_KEY, each.key.partition(".")[0]
        is_missing = each.found.startswith(NOT_STORED) and each.remedy.endswith(MISSING)
        if (is_unexpected and entry not in own) or (is_missing and entry not in stored):
            lacking.setdefault((is_unexpected, entry), []).append(each)
        else:
            told.append(each)
    if max(map(len, lacking.values()), default=0) < 2:
        return [*problems]
    if len({is_unexpected for is_unexpected, _ in lacking}) == 2:  # one may be the other, under another name
        remedies = {True: _UNEXPECTED, False: MISSING}
    else:
        remedies = {True: merged["select"] + _UNEXPECTED_ENTRY, False: merged["select"] + _MISSING_ENTRY}
    for (is_unexpected, entry), group in lacking.items():
        of_entry = _of_entry(entry, group, is_unexpected, bool(merged["left_out"]))
        told.append(replace(of_entry, remedy=remedies[is_unexpected]))
    return told


def _of_entry(entry: str, group: Sequence[Problem], is_unexpected: bool, is_cut: bool) -> Problem:
    """Returns one problem for those with the keys of an entry; `is_cut` if there may be more."""
    required = f'an entry "{entry}" in the app' if is_unexpected else group[0].required
    if len(group) == 1:
        return replace(group[0], required=required)
    count, such = plural(len(group), "key"), f", such as {group[0].key}"
    if is_unexpected:
        return replace(group[0], key=f"{entry}.*", found=f"{count} in the checkpoint{such}", required=required)
    found = group[0].found if len({each.found for each in group}) == 1 else NOT_STORED  # else on various ranks
    return replace(group[0], key=f"{entry}.*", found=found, required=f"{count}{' or more' if is_cut else ''}{such}")


def _shared(names: Names) -> tuple[list[str], bool]:
    """Returns the entries of which this rank and the checkpoint both have keys, and whether some are of tensors."""
    keys = [key for key in _stored_keys(names) if key in names.chosen]
    return sorted(entries_of(keys)), not names.manifest.tensors.keys().isdisjoint(keys)


def _select_of(entries: Sequence[str]) -> str:
    """Returns the remedy of a load of only these entries, which both sides have; "" for too many to name."""
    if len(entries) > _FEW_ENTRIES:
        return ""
    regex = "|".join(map(re.escape, entries))
    regex = regex if len(entries) == 1 else f"({regex})"
    return rf'to load only what both have, pass select=r"^{regex}(\.|$)"; '


def _grown_by(unexpected: Collection[str], chosen: Collection[str]) -> set[str]:
    """Returns the unexpected keys of groups, of optimizers in the app, for parameters that a model of it has."""
    own = entries_of(chosen)
    names = {
        key: key.partition(f".{PARAM_GROUPS}.")[2]
        for key in unexpected
        if f".{PARAM_GROUPS}." in key and key.partition(".")[0] in own
    }
    if not names:
        return set()
    of_models = [key for key in chosen if not _OF_OPTIMIZERS.search(key)]
    ends = {key[start:] for key in of_models for start in (0, *(at + 1 for at, each in enumerate(key) if each == "."))}
    return {key for key, name in names.items() if name in ends}


def _is_within_leaf(key: str, leaves: Collection[str]) -> bool:
    """Whether the app has one value where the checkpoint has several, of which this key is one."""
    return any(key[:end] in leaves for end, each in enumerate(key) if each == ".")


def _on(having: Sequence[int], size: int, problem: Problem, is_whole: bool) -> Problem:
    """Adds to a problem the ranks that have it, unless all do; `is_whole` if ranks have sent all their problems."""
    if len(having) == size or not having:
        return problem
    return replace(problem, found=f"{problem.found} (on {names_of(having)}{'' if is_whole else ', at least'})")


def _pack(keys: Iterable[str], stored: Sequence[str] | None) -> list[Any]:
    """Encodes keys by their positions among the stored keys, as runs; verbatim if there are none."""
    if stored is None:
        return list(keys)
    wanted = set(keys)
    return pack_runs(place for place, key in enumerate(stored) if key in wanted)


def _unpack(wire: Sequence[Any], stored: Sequence[str] | None) -> list[str]:
    """Decodes what `_pack` encoded."""
    return list(wire) if stored is None else [stored[place] for place in unpack_runs(wire)]


def is_met(flat: FlatState, names: Names) -> bool:
    """Whether this rank's app and the checkpoint share any key, or both have none."""
    manifest = names.manifest
    if any(key in stored for key in names.chosen for stored in (manifest.tensors, manifest.values, manifest.per_rank)):
        return True
    has_nothing = not (flat.leaves or manifest.tensors or manifest.values or manifest.per_rank)
    return has_nothing or any(each.elsewhere for each in flat.targets)


def refuse_nothing(manifest: Manifest, flat: FlatState, select: str | None) -> None:
    """Raises MismatchError for a load in which no rank has a place for any key.

    Args:
        manifest: of the checkpoint.
        select: as for `load`.
    """
    if select is None:
        stored = ", ".join(islice((*manifest.tensors, *manifest.values, *manifest.per_rank), 3)) or "none"
        required = "one at least: nothing would be loaded"
        remedy = f"give names by rename={{...}}; the checkpoint has {stored}"
        problem = Problem("app", "no key that the checkpoint has", required, remedy)
    else:
        required = "a regex that is found in some key of both the app and the checkpoint"
        remedy = f"mend the regex; the app has {', '.join(islice(flat.leaves, 3)) or 'none'}"
        problem = Problem("select", repr(select), required, remedy)
    raise MismatchError("there is nothing to load", [problem], code="nothing-selected")
