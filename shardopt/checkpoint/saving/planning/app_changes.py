"""Finds which options and plain values of an app have changed since its step was saved, which is not saved again.

Tensors are not compared: a look at each would cost every save about as much as writing a small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.optim import Optimizer

from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import PARAM_GROUPS, Path, join

_MOST_NAMED = 8
_MOST_SEEN = 10_000  # as a list of losses may have more, which cost each save
_PLAIN = (bool, int, float, str, type(None))

Seen = dict[str, str]
"""Texts of options and values, by key."""


def seen_in(objects: Iterable[tuple[Path, Any]]) -> Seen:
    """Returns the options and plain values of the first objects of an app, by their paths. Local."""
    values = islice(_values_in(objects), _MOST_SEEN)
    return {join(path): repr(each) for path, each in values if _is_plain(each)}


def changed_since(before: Seen, now: Seen) -> list[str]:
    """Returns the keys whose values have changed, at most so many and a count of the others."""
    keys = [key for key, text in now.items() if before.get(key) != text]
    return keys if len(keys) <= _MOST_NAMED else [*keys[:_MOST_NAMED], f"{len(keys) - _MOST_NAMED} more"]


def _values_in(objects: Iterable[tuple[Path, Any]]) -> Iterator[tuple[Path, Any]]:
    for path, value in objects:
        if isinstance(value, Optimizer):
            for number, group in enumerate(value.param_groups):
                options = group if isinstance(group, Mapping) else {}
                for name, option in options.items():
                    if name != PARAMS:
                        yield (*path, PARAM_GROUPS, number, name), option
        else:
            yield path, value


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))
