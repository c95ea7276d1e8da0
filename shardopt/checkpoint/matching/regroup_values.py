"""Plain values that a checkpoint has in finer parts than the app, put together as the app has them.

torch.distributed.checkpoint takes containers apart to the last value: what it has saved of a schedule whose state is
one value here stands under `schedule.last_epoch`, `schedule.milestones.3`, and so on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from shardopt.checkpoint.format.shared_values import Values
from shardopt.state import FlatState, Path, is_below, nest


def regroup_values(flat: FlatState, values: Values) -> Values:
    """Returns stored values, those of which the app has a whole container put together to that container.

    Only where nothing is stored under the container's own key, and it is not empty: an empty one may be that of a rank
    which has nothing of what others have there. An empty container within one of which other parts are stored stays
    as the app has it, for it has no parts that could be. Nor are entries by name put together for a list, or elements
    of a list for a dict: these are differences, as any.
    """
    whole = {
        leaf.path: key
        for key, leaf in flat.leaves.items()
        if isinstance(leaf.value, Mapping | list) and leaf.value and key not in values
    }
    if not whole:
        return values
    parts: defaultdict[str, dict[Path, Any]] = defaultdict(dict)
    left = dict(values)
    for key, (path, value) in values.items():
        if key in flat.leaves:
            continue
        at = next((end for end in range(1, len(path)) if path[:end] in whole), None)
        if at is not None:
            parts[whole[path[:at]]][path[at:]] = value
            del left[key]
    for key, within in parts.items():
        here, nested = flat.leaves[key], nest(within)
        if _is_of_kinds(here.value, nested):
            left[key] = here.path, _like(here.value, nested)
        else:
            left |= {name: each for name, each in values.items() if name not in left and is_below(each[0], here.path)}
    return left


def _is_of_kinds(here: Any, stored: Any) -> bool:
    """Whether nested parts are lists and dicts where the app has such; what is empty there may become either."""
    if not here or not isinstance(here, Mapping | list) or not isinstance(stored, dict | list):
        return True
    if isinstance(here, list) or isinstance(stored, list):
        both = isinstance(here, list) and isinstance(stored, list)
        return both and all(map(_is_of_kinds, here, stored))
    named = {str(name): each for name, each in here.items()}
    return all(_is_of_kinds(named.get(str(name)), each) for name, each in stored.items())


def _like(here: Any, stored: Any) -> Any:
    """Returns nested parts with the kinds of containers and of keys that the app has there."""
    if isinstance(stored, list):
        items = here if isinstance(here, list) else []
        return [_like(items[i] if i < len(items) else None, each) for i, each in enumerate(stored)]
    if not isinstance(stored, dict):
        return stored
    known = here if isinstance(here, Mapping) else {}
    names = {str(name): name for name in known}
    numbers = bool(known) and all(type(name) is int for name in known)
    result: dict[Any, Any] = {}
    for part, each in stored.items():
        name = names.get(str(part), int(part) if numbers and str(part).lstrip("-").isdecimal() else part)
        result[name] = _like(known.get(name), each)
    empty = {name: each for name, each in known.items() if type(each) in (dict, list) and not each}
    result = {**empty, **result}
    return Counter(result) if type(here) is Counter else result
