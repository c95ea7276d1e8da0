"""Converts keys of other formats to those that shardopt would have written for an app.

Others have the groups of an optimizer as a list, or by parameter and option, and its state maybe by numbers:

    optim.param_groups.0.params, optim.param_groups.0.lr      as torch.distributed.checkpoint flattens nested state
    optim.param_groups.layers.0.weight.lr                     as torch's `flatten_optimizer_state_dict` does
    optim.param_groups                                        one list, as in a file of torch.save
    optim.state.0.exp_avg                                     the first parameter of the first group

All of these become `optim.param_groups.<name>`, a dict, and `optim.state.<name>.exp_avg`. Numbers become names by
"param_names" in the groups, or in the order of the app's own groups, where these are as many and as large. One group
may also be in the order of the parameters of the app's models, frozen ones included where it has as many; where that is
another order, numbers could mean either, and are refused. Checkpoints of our own have numbers where an early version
has saved an optimizer of torch's: there names are needed, or shapes that leave no doubt. Plain values are divided as
the app has them (`regroup_values` puts them together).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module

from shardopt.checkpoint.format.manifest import Manifest, StoredTensors
from shardopt.checkpoint.loading.names import Names, owner_of
from shardopt.checkpoint.loading.positional_params import (
    NumberedState,
    names_in,
    names_of_numbers,
    parameters_of_modules,
)
from shardopt.checkpoint.loading.renaming import (
    name_by_rules,
    names_by_rules,
    path_in_app,
    path_with_tail,
    refuse_collisions,
    renamer,
    roots_in,
    under_names_of,
)
from shardopt.state.names import names_under_wrappers
from shardopt.state.param_groups import NAMES_OF_TORCH, PARAMS
from shardopt.state.paths import PARAM_GROUPS, STATE, Index, Path, join
from shardopt.state.state import FlatState, RestoreTarget

ReadTensor = Callable[[str], Tensor]
"""Returns a stored tensor by its key in the checkpoint."""


def foreign_under_names_of(
    manifest: Manifest,
    flat: FlatState,
    select: str | None,
    rename: Mapping[str, str] | None,
    read: ReadTensor,
    in_order: bool,
) -> Names:
    """Does the work of `under_names_of` for a checkpoint of another format, or with numbers of parameters.

    Args:
        read: gives a stored tensor.
        in_order: whether the order of parameters may tell their names.

    A checkpoint of the state of a module alone, without a name for it, is that of the only module in the app.

    Raises:
        MismatchError: two stored keys get one name; or parameters have numbers, and it is not clear which are meant.
    """
    original = manifest
    optimizers = [each.path for each in flat.targets if each.groups is not None]
    new_key = names_by_rules(manifest, rename or {}, optimizers)
    if rename:
        manifest = _with_names_by_rules(manifest, rename, optimizers)
    prefix = _prefix_of_only_module([new_key[key] for key in manifest.tensors], flat)
    named = {key: prefix + new for key, new in new_key.items()}
    refuse_collisions(named.items())
    stored = Stored(
        tensors={named[key]: key for key in manifest.tensors},
        values={named[key]: value for key, (_, value) in manifest.values.items()},
        read=read,
        shape_of=lambda key: original.tensors[key].layout.shape,
        renamed=renamer(rename),
        numbered=numbered_roots(manifest),
        in_order=in_order,
    )
    for target in flat.targets:
        if target.groups is not None:
            name_parameters(target, flat, stored)
    values = dict(chain.from_iterable(_divided(key, value, flat) for key, value in stored.values.items()))
    roots = roots_in(flat)
    paths = {named[key]: path_with_tail(path, named[key]) for key, (path, _) in manifest.values.items()}
    adapted = replace(
        manifest,
        tensors=StoredTensors(
            (key, each._replace(path=path_in_app(key, path_with_tail(each.path, key), flat, roots)))
            for key, each in ((key, manifest.tensors[old]) for key, old in stored.tensors.items())
        ),
        values={key: (path_in_app(key, paths.get(key, ()), flat, roots), value) for key, value in values.items()},
        per_rank={named[key]: path_with_tail(path, named[key]) for key, path in manifest.per_rank.items()},
        module_versions=None if in_order else manifest.module_versions,  # others' names may have wrappers' parts
    )
    names = under_names_of(adapted, flat, select, None)
    old_key = {key: stored.tensors[names.renamed.get(key, key)] for key in names.manifest.tensors}
    old_per_rank = {new: key for key, new in named.items() if key in manifest.per_rank}
    old_key |= {key: old_per_rank[names.renamed.get(key, key)] for key in names.manifest.per_rank}
    return replace(names, renamed={key: old for key, old in old_key.items() if key != old})


def _with_names_by_rules(manifest: Manifest, rename: Mapping[str, str], roots: Sequence[Path]) -> Manifest:
    """Renames the parameters named in groups by number, by the rules of `rename`."""
    values = {}
    for key, (path, value) in manifest.values.items():
        at = path.index(PARAM_GROUPS) if PARAM_GROUPS in path else len(path)

        def renamed(names: Any, root: Path = path[:at]) -> Any:
            return [name_by_rules(name, root, rename, roots) for name in names]

        if path[at + 2 :] == (NAMES_OF_TORCH,) and isinstance(value, list):
            value = renamed(value)
        elif len(path) == at + 1 and isinstance(value, list):
            value = [
                {**group, NAMES_OF_TORCH: renamed(group[NAMES_OF_TORCH])}
                if isinstance(group, dict) and isinstance(group.get(NAMES_OF_TORCH), list)
                else group
                for group in value
            ]
        values[key] = path, value
    return replace(manifest, values=values)


def _prefix_of_only_module(keys: Collection[str], flat: FlatState) -> str:
    """Returns the prefix that maps keys to the app's only module; "" if some keys are already the app's."""
    modules = [join(each.path) for each in flat.targets if isinstance(each.object, Module)]
    if len(modules) != 1 or any(key in flat.leaves for key in keys):
        return ""
    prefix = f"{modules[0]}."
    own = {key.removeprefix(prefix) for key in flat.leaves if key.startswith(prefix)}
    return prefix if any(key in own for key in keys) or names_under_wrappers(keys, own) else ""


def _divided(key: str, value: Any, flat: FlatState) -> Iterator[tuple[str, Any]]:
    """Yields a value as it is, or its entries if the app has leaves for these."""
    below = f"{key}."
    in_app = key not in flat.leaves and any(each.startswith(below) for each in flat.leaves)
    if not in_app or not isinstance(value, dict | list):
        yield key, value
        return
    for part, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _divided(f"{below}{part}", child, flat)


def numbered_roots(manifest: Manifest) -> list[str]:
    """Returns the stored keys of optimizers with groups by number, as torch's own optimizers save them."""
    roots: dict[str, None] = {}
    for path, value in manifest.values.values():
        if PARAM_GROUPS in path:
            at = path.index(PARAM_GROUPS)
            if isinstance([*path, value][at + 1], Index | list):
                roots[join(path[:at])] = None
        elif isinstance(value, dict) and isinstance(value.get(PARAM_GROUPS), list):
            roots[join(path)] = None
    return [*roots]


@dataclass(slots=True)
class Stored:
    """Stored tensors and values, under keys that are converted step by step to those of the app.

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
        """Removes and returns a value, or a tensor to be converted to a value."""
        return self.values.pop(key) if key in self.values else self.read(self.tensors.pop(key))

    def move(self, new_keys: Mapping[str, str]) -> None:
        """Renames tensors and values all at once: one may get the key that another had."""
        sections: tuple[dict[str, Any], ...] = self.tensors, self.values
        for entries in sections:
            moved = {new: entries.pop(key) for key, new in new_keys.items() if key in entries}
            entries.update(moved)


def name_parameters(target: RestoreTarget, flat: FlatState, stored: Stored) -> None:
    """Moves the groups and the state of an optimizer to the names of its parameters."""
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
    """Splits what is stored as one value for one of torch's optimizers: all of its state, if no tensor is in it."""
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
    """Returns the shapes of the tensors in the state of each numbered parameter."""
    shapes: dict[int, set[tuple[int, ...]]] = {}
    before = f"{root}.{STATE}."
    for key, old in () if stored.in_order else stored.tensors.items():
        number, _, entry = key.removeprefix(before).partition(".")
        if key.startswith(before) and entry and number.isdecimal():
            shapes.setdefault(int(number), set()).add(stored.shape_of(old))
    return {number: frozenset(each) for number, each in shapes.items()}


def _name_by_rules(number: int, root: str, stored: Stored) -> str:
    """Returns the name that the rules of `rename` make of a number; "" if they leave it unchanged."""
    for each in stored.numbered:
        new_key = stored.renamed(f"{each}.{STATE}.{number}.")
        if new_key.startswith(f"{root}.{STATE}."):
            name = new_key.removeprefix(f"{root}.{STATE}.").removesuffix(".")
            return name if name != str(number) else ""
    return ""


def _take_groups(section: str, stored: Stored) -> list[dict[str, Any]]:
    """Takes the groups of an optimizer, if they are a list or are stored entry by number; else returns none."""
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
    """Takes the values of some keys, and nests them.

    Args:
        keys: name of each value in the result, with dots → its key.
    """
    values: dict[str, Any] = _nested({tuple(name.split(".")): stored.take(key) for name, key in keys.items()})
    return values


def _join_options(section: str, known: Collection[str], stored: Stored) -> None:
    """Joins options that are stored one by one to one value per parameter."""
    options: dict[str, dict[str, str]] = {}
    for key in stored.below(section):
        name, option = owner_of(key.removeprefix(f"{section}."), known)
        if name and option:
            options.setdefault(name, {})[option] = key
    equal: dict[str, Any] = {}  # one object for options that are equal, as they were one group
    for name, keys in options.items():
        own = _taken(keys, stored)
        stored.values[f"{section}.{name}"] = equal.setdefault(repr(_exact(own)), own)


def _exact(value: Any) -> Any:
    """Returns what has another text where any digit of a tensor differs; torch prints four."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return sorted((repr(name), _exact(each)) for name, each in value.items())
    return [type(value).__name__, *map(_exact, value)] if isinstance(value, list | tuple) else value


def _nested(pieces: Mapping[Path, Any]) -> Any:
    """Nests values by path; makes lists where parts are positions."""
    if () in pieces:
        return pieces[()]
    branches: dict[str, dict[Path, Any]] = {}
    for (part, *rest), value in pieces.items():
        branches.setdefault(str(part), {})[tuple(rest)] = value
    positions = [*map(str, range(len(branches)))]
    if all(each in branches for each in positions):
        return [_nested(branches[each]) for each in positions]
    return {part: _nested(each) for part, each in branches.items()}
