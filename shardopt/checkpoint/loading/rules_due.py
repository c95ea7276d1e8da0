"""Finds the rules of `rename` that a load applies: those that the checkpoint's names were not saved through.

Rules stay in scripts, and a run's own checkpoints have the new names: a swap would be swapped back by the next start.
So checkpoints of a run tell the rules that their names have been through since it began (`Manifest.renamed`). Those of
earlier versions, and of a plain save, tell nothing: whether their names are old or new, nobody knows who reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from shardopt.checkpoint.format.manifest import Manifest, RenameRules
from shardopt.checkpoint.loading.growing import may_grow
from shardopt.checkpoint.loading.names_in_app import contents, names_in_app
from shardopt.checkpoint.loading.options import LoadOptions
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import MismatchError
from shardopt.ranks import Call, Ranks, as_call
from shardopt.sharding.view import view_of
from shardopt.state.state import FlatState


class LeftInScript(dict[str, str]):
    """Rules that are passed at every start of a run, whether or not its names were saved through them."""


class RulesDue(NamedTuple):
    """The rules to apply, the rules to skip, and all rules that the names will have been through.

    `may_be_due` is whether those passed by would fit as well, and no record says that they are not due.
    """

    rename: Mapping[str, str] | None
    passed_by: RenameRules
    been_through: RenameRules
    may_be_due: bool


class _Shifted(NamedTuple):
    """Stored names that rules move into this rank's app, of what it loads, and out of it.

    Stages of a pipeline have parts of an app each: names that shift go from one to the next.
    """

    into_own: list[str]
    out_of_own: list[str]


def find_rules_due(
    ranks: Ranks,
    what: str,
    opened: Callable[[], CheckpointReader],
    flattened: Callable[[], FlatState],
    options: LoadOptions,
) -> RulesDue:
    """Finds, in a round, the rules that the checkpoint's names were not saved through. Collective.

    Args:
        what: names the load in errors.
        opened, flattened: give the checkpoint and the app, in the round.
    """
    rename, as_is = options.rename or {}, replace(options, rename=None)

    def look() -> tuple[bool, bool, _Shifted]:
        reader = opened()
        if reader.manifest.renamed:  # which decides
            return False, True, _Shifted([], [])
        flat = flattened()
        fits_as_is = _fits(reader, flat, as_is)
        try:
            return fits_as_is, _fits(reader, flat, options), _Shifted([], [])
        except MismatchError as error:
            if error.code != "bad-rules":
                raise
            # The load then says which keys get one name; unless these are the new names.
            shifted = _shifted(contents(reader, options.skip), flat, options.select, rename)
            return fits_as_is, shifted is None, shifted or _Shifted([], [])

    call = Call(what, f"{as_call(what).same} with rename")  # which not all of them may have been given
    _, fits = ranks.agree(call, look, report=list, decide=_of_all_ranks)
    return rules_due(rename, opened().manifest.renamed, *fits)


def _of_all_ranks(reports: Sequence[tuple[bool, bool, Sequence[Sequence[str]]]]) -> tuple[bool, bool]:
    """Returns whether the checkpoint fits all ranks as it is, and by the rules.

    These stand where a name that no rank has becomes one of the app's.
    """
    as_is, by_rules, shifted = zip(*reports, strict=True)
    into_own, out_of_own = ({*chain.from_iterable(each)} for each in zip(*shifted, strict=True))
    return all(as_is), all(by_rules) or not into_own <= out_of_own


def rules_due(
    rename: Mapping[str, str], recorded: RenameRules | None, fits_as_is: bool, fits_by_rules: bool
) -> RulesDue:
    """Decides which of the given rules are due.

    A checkpoint without a record may have the old names or the new ones. Where it fits under the rules they are
    applied, unless they are left in a script; else, where all of it fits as it is, none is.

    Args:
        recorded: the rules that the checkpoint tells of; None where it has no record.
        fits_as_is, fits_by_rules: whether the checkpoint has all that the apps of all ranks have, in its shapes.
    """
    given = tuple(rename.items())
    known = recorded or ()
    may_be_due = recorded is None and isinstance(rename, LeftInScript) and fits_as_is and fits_by_rules
    is_new_already = not known and fits_as_is and not fits_by_rules
    passed_by = given if is_new_already or may_be_due else tuple(rule for rule in given if rule in known)
    due = {pattern: into for pattern, into in given if (pattern, into) not in passed_by}
    return RulesDue(due or None, passed_by, tuple(dict.fromkeys((*known, *given))), may_be_due)


def _fits(reader: CheckpointReader, flat: FlatState, options: LoadOptions) -> bool:
    try:
        names = names_in_app(reader, flat, options)
    except MismatchError as error:
        if error.code == "bad-rules" and options.rename is not None:
            raise
        return False
    tensors, others = names.manifest.tensors, {*names.manifest.values, *names.manifest.per_rank}
    absent = []
    for key in names.chosen:
        value = flat.leaves[key].value
        if key in tensors and isinstance(value, Tensor):
            if tensors[key].layout.shape != view_of(value, key).shape:
                return False
        elif key not in others:
            absent.append(key)
    return may_grow(flat, names, options.select, absent)


def _shifted(manifest: Manifest, flat: FlatState, select: str | None, rename: Mapping[str, str]) -> _Shifted | None:
    """Returns what tells old names from new ones where rules shift names, so that two keys get one.

    None where none of the names may be new: each rule finds some. That of the first name finds none any more.
    """
    idle, shifted = dict(rename), _Shifted([], [])
    for key in (*manifest.tensors, *manifest.values, *manifest.per_rank):
        renamed = key
        for pattern, into in rename.items():
            renamed, changes = re.subn(pattern, into, renamed)
            if changes:
                idle.pop(pattern, None)
        if renamed in flat.leaves and key not in flat.leaves and (select is None or re.search(select, renamed)):
            shifted.into_own.append(key)
        elif key in flat.leaves and renamed not in flat.leaves:
            shifted.out_of_own.append(key)
    return shifted if idle else None


def said_of_rules(renamed: Mapping[str, str], rules: RulesDue, url: str) -> str:
    """Returns a log line that says what was renamed, and what was not.

    Args:
        renamed: key of the app → key of the checkpoint, where they differ.
        url: of the checkpoint.
    """
    if rules.may_be_due:
        call = f"checkpoint.load({url!r}, app, rename={dict(rules.passed_by)!r}, init_state=True)"
        return (
            "renamed nothing: it has no record of the rules that its names have been through, and fits as it is; if "
            f"these are the old names, {call} after this applies the rules"
        )
    shown = [f"{old} -> {new}" for new, old in sorted(renamed.items())[:3]]
    more = f", and {len(renamed) - len(shown)} more" if len(renamed) > len(shown) else ""
    texts = [f"renamed {', '.join(shown)}{more}" if shown else "renamed nothing"]
    return "; ".join([*texts, *passed_by_text(rules)])


def passed_by_text(rules: RulesDue) -> list[str]:
    """Returns which rules the names have been through already, if any."""
    passed_by = ", ".join(f"{pattern!r} -> {into!r}" for pattern, into in rules.passed_by)
    return [f"its names have been through {passed_by} already"] if passed_by else []
