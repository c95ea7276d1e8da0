"""State and options of optimizers, as others and torch's own have them, put under the names that the app has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from torch import Tensor

from shardopt.checkpoint.matching.positional_params import (
    NumberedState,
    names_in,
    names_of_numbers,
    parameters_of_modules,
)
from shardopt.param_groups import NAMES_OF_TORCH, PARAM_GROUPS, PARAMS, STATE
from shardopt.state import FlatState, Path, RestoreTarget, join

ReadTensor = Callable[[str], Tensor]
"""Returns a stored tensor, by its key in the checkpoint."""


@dataclass(slots=True)
class Stored:
    """What is stored, under keys that become those of the app.

    Args:
        tensors: key → key in the checkpoint.
        values: key → plain value.
        read: gives small tensors that are to become part of a plain value.
        shape_of: gives the shape of a tensor, by its key in the checkpoint.
        renamed: applies the rules of `rename` to a key.
        numbered: the stored keys of optimizers that have groups by number.
        in_order: as in `NumberedState`.
    """

    tensors: dict[str, str]
    values: dict[str, Any]
    read: ReadTensor
    shape_of: Callable[[str], tuple[int, ...]]
    renamed: Callable[[str], str]
    numbered: Collection[str]
    in_order: bool

    def below(self, root: str) -> list[str]:
        """Returns the keys below a root."""
        return [key for key in chain(self.tensors, self.values) if key.startswith(f"{root}.")]

    def take(self, key: str) -> Any:
        """Removes a value, or a tensor that is to become one, and returns it."""
        return self.values.pop(key) if key in self.values else self.read(self.tensors.pop(key))

    def move(self, new_keys: Mapping[str, str]) -> None:
        """Gives tensors and values other keys, all at once: one may get the key that another has had."""
        sections: tuple[dict[str, Any], ...] = self.tensors, self.values
        for entries in sections:
            moved = {new: entries.pop(key) for key, new in new_keys.items() if key in entries}
            entries.update(moved)


def name_parameters(target: RestoreTarget, flat: FlatState, stored: Stored) -> None:
    """Puts the groups and the state of an optimizer under the names of its parameters."""
    root = join(target.path)
    section = f"{root}.{PARAM_GROUPS}"
    known = frozenset(names_in(target.groups))
    _divide(root, stored)
    stored_groups = _take_groups(section, stored)
    options = [
        {name: value for name, value in group.items() if name not in (PARAMS, NAMES_OF_TORCH)}
        for group in stored_groups
    ]
    by_rules = cache(lambda number: _name_by_rules(number, root, stored))
    shapes = _shapes_by_number(root, stored)
    names = names_of_numbers(NumberedState(stored_groups, shapes, by_rules, stored.in_order), target, flat)
    moved_by_rules = any(map(by_rules, names))
    for group, own in zip(stored_groups, options, strict=True):
        for member in group[PARAMS]:
            stored.values[f"{section}.{names.get(member, member)}"] = own
    _join_options(section, known, stored)
    new_keys = {}
    for key in stored.below(f"{root}.{STATE}"):
        number, _, entry = key.removeprefix(f"{root}.{STATE}.").partition(".")
        # Where groups have numbers, so has the state: also where parameters are called "0" and "1" here.
        if number.isdecimal() and int(number) in names and not moved_by_rules:
            new_keys[key] = f"{root}.{STATE}.{names[int(number)]}.{entry}"
    stored.move(new_keys)
    frozen = {name for name, parameter in parameters_of_modules(flat) if not parameter.requires_grad}
    for name in frozen - known:
        # torch's optimizers are mostly given all parameters; of such as are never stepped only options are stored.
        if not stored.below(f"{root}.{STATE}.{name}"):
            stored.values.pop(f"{section}.{name}", None)


def _divide(root: str, stored: Stored) -> None:
    """Takes apart what is stored as one value of one of torch's optimizers: all of it, where no tensor is in it."""
    whole = stored.values.get(root)
    if not isinstance(whole, dict) or not isinstance(whole.get(PARAM_GROUPS), list):
        return
    del stored.values[root]
    for name, value in whole.items():
        if name != STATE:
            stored.values[f"{root}.{name}"] = value
    for number, entries in whole.get(STATE, {}).items():
        stored.values |= {f"{root}.{STATE}.{number}.{entry}": value for entry, value in entries.items()}


def _shapes_by_number(root: str, stored: Stored) -> dict[int, frozenset[tuple[int, ...]]]:
    """Returns the shapes of the tensors in the state of each parameter that has a number."""
    shapes: dict[int, set[tuple[int, ...]]] = {}
    before = f"{root}.{STATE}."
    for key, old in () if stored.in_order else stored.tensors.items():
        number, _, entry = key.removeprefix(before).partition(".")
        if key.startswith(before) and entry and number.isdecimal():
            shapes.setdefault(int(number), set()).add(stored.shape_of(old))
    return {number: frozenset(each) for number, each in shapes.items()}


def _name_by_rules(number: int, root: str, stored: Stored) -> str:
    """Returns the name that the rules of `rename` make of a number; "" where it stays a number."""
    for each in stored.numbered:
        new_key = stored.renamed(f"{each}.{STATE}.{number}.")
        if new_key.startswith(f"{root}.{STATE}."):
            name = new_key.removeprefix(f"{root}.{STATE}.").removesuffix(".")
            return name if name != str(number) else ""
    return ""


def _take_groups(section: str, stored: Stored) -> list[dict[str, Any]]:
    """Takes the groups of an optimizer where they are a list, or its entries by number; else there are none."""
    whole = stored.values.get(section)
    if isinstance(whole, list) and all(isinstance(group, dict) and PARAMS in group for group in whole):
        del stored.values[section]
        return [{**group, PARAMS: list(group[PARAMS])} for group in whole]
    entries: dict[int, dict[str, str]] = {}
    for key in stored.below(section):
        number, _, option = key.removeprefix(f"{section}.").partition(".")
        if number.isdecimal() and option:
            entries.setdefault(int(number), {})[option] = key
    if not entries or any(not any(option.partition(".")[0] == PARAMS for option in each) for each in entries.values()):
        return []
    return [_taken(each, stored) for _, each in sorted(entries.items())]


def _taken(keys: Mapping[str, str], stored: Stored) -> dict[str, Any]:
    """Takes the values of some keys and nests them.

    Args:
        keys: name of each value in the result, with dots → its key.
    """
    values: dict[str, Any] = _nested({tuple(name.split(".")): stored.take(key) for name, key in keys.items()})
    return values


def _join_options(section: str, known: Collection[str], stored: Stored) -> None:
    """Makes one value for each parameter of options that are stored one by one."""
    options: dict[str, dict[str, str]] = {}
    for key in stored.below(section):
        name, option = owner_of(key.removeprefix(f"{section}."), known)
        if name and option:
            options.setdefault(name, {})[option] = key
    equal: dict[str, Any] = {}  # one object for options that are equal, as they were one group
    for name, keys in options.items():
        own = _taken(keys, stored)
        stored.values[f"{section}.{name}"] = equal.setdefault(repr(sorted(own.items())), own)


def owner_of(key: str, names: Collection[str]) -> tuple[str, str]:
    """Returns the longest of some names of parameters with which a key begins, and what follows; ("", "") for none."""
    name = key
    while name and name not in names:
        name = name.rpartition(".")[0]
    return (name, key[len(name) + 1 :]) if name else ("", "")


def _nested(pieces: Mapping[Path, Any]) -> Any:
    """Nests values by path; lists where the parts are positions."""
    if () in pieces:
        return pieces[()]
    branches: dict[str, dict[Path, Any]] = {}
    for (part, *rest), value in pieces.items():
        branches.setdefault(str(part), {})[tuple(rest)] = value
    positions = [*map(str, range(len(branches)))]
    if all(each in branches for each in positions):
        return [_nested(branches[each]) for each in positions]
    return {part: _nested(each) for part, each in branches.items()}
