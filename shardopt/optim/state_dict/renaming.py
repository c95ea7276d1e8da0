"""Renames the parameters of a saved form.

    "state.layers.0.weight" → "state.blocks.0.weight"       rules for keys rename the key of a parameter's state
    "layers.0.weight"       → "blocks.0.weight"             and so its name in the groups

So a parameter has one new name, in its state and in its group, or the rules are refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from shardopt.algorithms.registry import GLOBAL_STATE
from shardopt.errors import MismatchError, Problem
from shardopt.optim.state_dict.saved_form import PARAM_GROUPS, PARAMS, STATE, UNTOUCHED, least_name, renamed_group
from shardopt.state import holds_tensors

NewKey = Callable[[str], str | None]

_GLOBAL_PREFIX = re.compile(rf"(?<![^.]){GLOBAL_STATE}\.")


def renamed(saved: Mapping[str, Any], new_key: NewKey) -> dict[str, Any]:
    """Renames parameters as `KeyedOptimizer.rename_state_dict` does; a state without groups by name stays as it is.

    Raises:
        MismatchError: a parameter in a group is renamed to none, to the same as another, or in its state otherwise.
    """
    state, groups = saved.get(STATE, {}), saved.get(PARAM_GROUPS)
    if not isinstance(state, Mapping) or not _are_keyed(groups):
        return dict(saved)
    new_names = _new_names([name for group in groups.values() for name in group[PARAMS]], state, new_key)
    anew = {key: _sorted(renamed_group(group, lambda name: new_names.get(name, name))) for key, group in groups.items()}
    least = {key: least_name(group) for key, group in anew.items()}

    def name_in_state(name: str) -> str:
        of_group = _GLOBAL_PREFIX.sub("", name, count=1)
        if name not in new_names and of_group != name and of_group in least:
            # It goes by the least name of a group, which need not be the new form of the old one.
            before = _GLOBAL_PREFIX.split(_inner(new_key(f"{STATE}.{name}")) or name, maxsplit=1)[0]
            return f"{before}{GLOBAL_STATE}.{least[of_group].removeprefix(before)}"
        # Tensors are keys of their own, by which they are renamed.
        return name if holds_tensors(state[name]) else new_names.get(name, name)

    return {
        **saved,
        STATE: {name_in_state(name): entries for name, entries in state.items()},
        PARAM_GROUPS: {least[key]: group for key, group in anew.items()},
    }


def _are_keyed(groups: Any) -> TypeGuard[Mapping[str, Mapping[str, Any]]]:
    """Whether these are groups as keyed optimizers save them; any other value is refused by the check of the state."""
    return isinstance(groups, Mapping) and all(
        isinstance(group, Mapping)
        and group.get(PARAMS)
        and all(_are_names(group.get(option, [])) for option in (PARAMS, UNTOUCHED))
        for group in groups.values()
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _new_names(names: Iterable[str], state: Mapping[str, Any], new_key: NewKey) -> dict[str, str]:
    """Returns old name → new name of the parameters in groups."""
    new_names: dict[str, str] = {}
    old_names: defaultdict[str, list[str]] = defaultdict(list)
    problems = []
    for name in names:
        key = f"{STATE}.{name}"
        new_name = _inner(new_key(key))
        if new_name is None:
            remedy = "rename within one optimizer, or save without groups (save_param_groups(False))"
            problems.append(Problem(key, "a rule that makes it no state of this optimizer", "another name", remedy))
            continue
        new_names[name] = new_name
        old_names[new_name].append(name)
        problems += _renamed_otherwise(name, new_name, state.get(name), new_key)
    for new_name, olds in old_names.items():
        if len(olds) > 1:
            several = f"{' and '.join(olds)} in its groups"
            problems.append(Problem(f"{STATE}.{new_name}", several, "one parameter for a name", "mend the rules"))
    if problems:
        raise MismatchError("the rules of rename do not give each parameter of an optimizer one name", problems)
    return new_names


def _renamed_otherwise(name: str, new_name: str, entries: Any, new_key: NewKey) -> list[Problem]:
    """Finds entries of a parameter's state that do not become its state under its new name."""
    remedy = f"write a rule that fits {STATE}.{name} with and without what follows"
    of_entries = {f"{STATE}.{name}.{entry}" for entry in entries} if isinstance(entries, Mapping) else set()
    return [
        Problem(key, f"renamed to {new_key(key)}", f"below {STATE}.{new_name}, its parameter's new name", remedy)
        for key in sorted(of_entries)
        if not (new_key(key) or "").startswith(f"{STATE}.{new_name}.")
    ]


def _inner(key: str | None) -> str | None:
    """Returns the name in a key of state; None if it is another key."""
    return key.removeprefix(f"{STATE}.") or None if key is not None and key.startswith(f"{STATE}.") else None


def _sorted(group: Mapping[str, Any]) -> dict[str, Any]:
    """Sorts the names in a group, as they are saved."""
    return {
        option: sorted(value) if option in (PARAMS, UNTOUCHED) else value  # lists of names
        for option, value in group.items()
    }
