"""Which rules of `rename` a load applies: not those that the checkpoint's names have been through already.

Rules stay in scripts, and a run's own checkpoints have the new names: a swap would be swapped back by the next start.
So checkpoints of a run tell the rules that their names have been through since it began (`Manifest.renamed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardopt.checkpoint.format.manifest import RenameRules
from shardopt.checkpoint.matching.growing import may_grow
from shardopt.checkpoint.matching.names_in_app import names_in_app
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import MismatchError
from shardopt.sharding.view import view_of
from shardopt.state import FlatState


class RulesDue(NamedTuple):
    """The rules that are to be applied, those that are passed by, and all that the names will have been through."""

    rename: Mapping[str, str] | None
    passed_by: RenameRules
    been_through: RenameRules


def rules_due(rename: Mapping[str, str], recorded: RenameRules, fits: Sequence[tuple[bool, bool]]) -> RulesDue:
    """Decides which of the given rules are due.

    A checkpoint without a record may have the old names, or be of an earlier version and have the new ones. Where it
    fits under the rules they are applied; else, where all of it fits as it is, none is.

    Args:
        recorded: the rules that the checkpoint tells of.
        fits: `fits_app` of each rank.
    """
    given = tuple(rename.items())
    is_new_already = not recorded and all(as_is for as_is, _ in fits) and not all(by_rules for _, by_rules in fits)
    passed_by = given if is_new_already else tuple(rule for rule in given if rule in recorded)
    due = {pattern: into for pattern, into in given if (pattern, into) not in passed_by}
    return RulesDue(due or None, passed_by, tuple(dict.fromkeys((*recorded, *given))))


def fits_app(
    reader: CheckpointReader, flat: FlatState, select: str | None, rename: Mapping[str, str], skip: str | None
) -> tuple[bool, bool]:
    """Whether a checkpoint has all that this rank's app has, in its shapes: as it is, and under the rules.

    Args:
        select, rename, skip: as for `load`.
    """
    return _fits(reader, flat, select, None, skip), _fits(reader, flat, select, rename, skip)


def _fits(
    reader: CheckpointReader, flat: FlatState, select: str | None, rename: Mapping[str, str] | None, skip: str | None
) -> bool:
    try:
        names = names_in_app(reader, flat, select, rename, skip)
    except MismatchError:
        return False
    tensors, others = names.manifest.tensors, {*names.manifest.values, *names.manifest.per_rank}
    absent = []
    for key in names.chosen:
        value = flat.leaves[key].value
        if key in tensors and hasattr(value, "shape"):
            if tensors[key].layout.shape != view_of(value, key).shape:
                return False
        elif key not in others:
            absent.append(key)
    return may_grow(flat, names, select, absent)


def said_of_rules(renamed: Mapping[str, str], passed_by: RenameRules) -> str:
    """Returns a line on what was renamed, and on what was not.

    Args:
        renamed: key of the app → key of the checkpoint, where they differ.
    """
    shown = [f"{old} -> {new}" for new, old in sorted(renamed.items())[:3]]
    more = f", and {len(renamed) - len(shown)} more" if len(renamed) > len(shown) else ""
    texts = [f"renamed {', '.join(shown)}{more}" if shown else "renamed nothing"]
    if passed_by:
        rules = ", ".join(f"{pattern!r} -> {into!r}" for pattern, into in passed_by)
        texts.append(f"its names have been through {rules} already")
    return "; ".join(texts)
