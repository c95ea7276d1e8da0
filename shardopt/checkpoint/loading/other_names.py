"""The `rename` that a refused load lacked, where one rule gives stored tensors the names of all that are missing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice

_MOST_RULES = 20  # tried: each is applied to all stored keys


def rename_hint(missing: Mapping[str, str], stored: Mapping[str, str], fitting: Collection[str]) -> str | None:
    """Returns such a rule as it is written in `rename={...}`; None if there is none.

    Args:
        missing: key of the app → kind of tensor.
        stored: key of the checkpoint that is unexpected → kind of tensor.
        fitting: other keys of the checkpoint, which the rule must leave alone.
    """
    if not missing:
        return None
    for pattern, into in islice(dict.fromkeys(_rules(missing, stored)), _MOST_RULES):
        renamed = {re.sub(pattern, into, key): kind for key, kind in stored.items()}
        is_harmless = not any(re.search(pattern, key) for key in fitting)
        if is_harmless and all(renamed.get(key) == kind for key, kind in missing.items()):
            return f'rename={{r"{pattern}": "{into}"}}'
    return None


def _rules(missing: Mapping[str, str], stored: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields rules that give some stored key the name of the first missing one: a prefix less, one more, or a segment
    changed."""
    wanted, kind = next(iter(missing.items()))
    for key in (key for key, of in stored.items() if of == kind):
        if key.endswith(f".{wanted}"):
            yield f"^{re.escape(key.removesuffix(wanted))}", ""
        elif wanted.endswith(f".{key}"):
            yield "^", wanted.removesuffix(key)
        elif changed := _changed_segment(key.split("."), wanted.split(".")):
            yield rf"\b{re.escape(changed[0])}\.", f"{changed[1]}."


def _changed_segment(before: Collection[str], after: Collection[str]) -> tuple[str, str] | None:
    """Returns the one segment, not the last and no number, in which two names of equal length differ."""
    if len(before) != len(after):
        return None
    pairs = [*zip(before, after, strict=True)]
    changed = [pair for pair in pairs if pair[0] != pair[1]]
    if len(changed) != 1 or changed[0] == pairs[-1] or changed[0][0].isdigit():
        return None
    return changed[0]
