"""A checkpoint of others in the form that ours would have for an app.

Others have the groups of an optimizer as a list, or by parameter and option, and its state maybe by numbers:

    optim.param_groups.0.params, optim.param_groups.0.lr      as torch.distributed.checkpoint flattens nested state
    optim.param_groups.layers.0.weight.lr                     as torch's `flatten_optimizer_state_dict` does
    optim.param_groups                                        one list, as in a file of torch.save
    optim.state.0.exp_avg                                     the first parameter of the first group

All of these become `optim.param_groups.<name>`, a dict, and `optim.state.<name>.exp_avg`. Numbers become names by
"param_names" in the groups, or in the order of the app's own groups, where these are as many and as large. One group
may also be in the order of the parameters of the app's models, frozen ones included where it has as many; where that is
another order, numbers could mean either, and are refused. An optimizer of torch in the app has numbers itself: what is
stored by name is put under these, by the names that the app's modules give its parameters. Plain values are divided as
the app has them (`granularity.py` puts them together).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.format.manifest import Manifest, StoredTensors
from shardopt.checkpoint.matching.numbers import (
    groups_by_number,
    names_in,
    names_of_numbers,
    numbers_of_names,
    parameters_of_modules,
)
from shardopt.checkpoint.matching.renaming import (
    Names,
    name_by_rules,
    names_by_rules,
    refuse_collisions,
    under_names_of,
)
from shardopt.names import names_under_wrappers
from shardopt.param_groups import PARAM_GROUPS, PARAMS
from shardopt.state import FlatState, Handback, Index, Path, join

_NAMES_OF_TORCH = "param_names"
_STATE = "state"

ReadTensor = Callable[[str], Tensor]
"""Returns a stored tensor, by its key in the checkpoint."""


@dataclass(slots=True)
class _Stored:
    """What is stored, under keys that become those of the app.

    Args:
        tensors: key → key in the checkpoint.
        values: key → plain value.
        read: gives small tensors that are to become part of a plain value.
    """

    tensors: dict[str, str]
    values: dict[str, Any]
    read: ReadTensor

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


def foreign_under_names_of(
    manifest: Manifest, flat: FlatState, select: str | None, rename: Mapping[str, str] | None, read: ReadTensor
) -> Names:
    """As `under_names_of`, of a checkpoint of another format.

    A checkpoint of the state of a module alone, without a name for it, is that of the only module in the app.

    Raises:
        MismatchError: two stored keys get one name; or parameters have numbers, and it is not clear which are meant.
    """
    optimizers = [each.path for each in flat.handbacks if each.groups is not None]
    new_key = names_by_rules(manifest, rename or {}, optimizers)
    if rename:
        manifest = _with_names_by_rules(manifest, rename, optimizers)
    prefix = _prefix_of_only_module([new_key[key] for key in manifest.tensors], flat)
    named = {key: prefix + new for key, new in new_key.items()}
    refuse_collisions(named.items())
    stored = _Stored(
        tensors={named[key]: key for key in manifest.tensors},
        values={named[key]: value for key, (_, value) in manifest.values.items()},
        read=read,
    )
    for handback in flat.handbacks:
        if handback.groups is not None:
            _name_parameters(handback, flat, stored)
        elif isinstance(handback.target, Optimizer):
            _number_parameters(handback, flat, stored)
    values = dict(chain.from_iterable(_divided(key, value, flat) for key, value in stored.values.items()))
    roots = {join(each.path): (each.path, frozenset(names_in(each.groups))) for each in flat.handbacks}
    paths = {named[key]: _tail(path, named[key]) for key, (path, _) in manifest.values.items()}
    adapted = replace(
        manifest,
        tensors=StoredTensors(
            (key, manifest.tensors[old]._replace(path=_path_of(key, (), flat, roots)))
            for key, old in stored.tensors.items()
        ),
        values={key: (_path_of(key, paths.get(key, ()), flat, roots), value) for key, value in values.items()},
        per_rank={named[key]: _tail(path, named[key]) for key, path in manifest.per_rank.items()},
    )
    names = under_names_of(adapted, flat, select, None)
    old_key = {key: stored.tensors[names.renamed.get(key, key)] for key in names.manifest.tensors}
    old_per_rank = {new: key for key, new in named.items() if key in manifest.per_rank}
    old_key |= {key: old_per_rank[names.renamed.get(key, key)] for key in names.manifest.per_rank}
    return replace(names, renamed={key: old for key, old in old_key.items() if key != old})


def _with_names_by_rules(manifest: Manifest, rename: Mapping[str, str], roots: Sequence[Path]) -> Manifest:
    """Renames the parameters that groups by number tell the names of."""
    values = {}
    for key, (path, value) in manifest.values.items():
        at = path.index(PARAM_GROUPS) if PARAM_GROUPS in path else len(path)

        def renamed(names: Any, root: Path = path[:at]) -> Any:
            return [name_by_rules(name, root, rename, roots) for name in names]

        if path[at + 2 :] == (_NAMES_OF_TORCH,) and isinstance(value, list):
            value = renamed(value)
        elif len(path) == at + 1 and isinstance(value, list):
            value = [
                {**group, _NAMES_OF_TORCH: renamed(group[_NAMES_OF_TORCH])}
                if isinstance(group, dict) and isinstance(group.get(_NAMES_OF_TORCH), list)
                else group
                for group in value
            ]
        values[key] = path, value
    return replace(manifest, values=values)


def _prefix_of_only_module(keys: Collection[str], flat: FlatState) -> str:
    """Returns what keys lack to be those of the app's only module; nothing where some are the app's as they are."""
    modules = [join(each.path) for each in flat.handbacks if isinstance(each.target, Module)]
    if len(modules) != 1 or any(key in flat.leaves for key in keys):
        return ""
    prefix = f"{modules[0]}."
    own = {key.removeprefix(prefix) for key in flat.leaves if key.startswith(prefix)}
    return prefix if any(key in own for key in keys) or names_under_wrappers(keys, own) else ""


def _tail(path: Path, new_key: str) -> Path:
    """Returns the path of a key that is renamed, with the parts of the old one, positions in lists among them, where
    both keys end alike."""
    kept: list[str | int] = []
    rest = new_key
    for part in reversed(path):
        if rest != str(part) and not rest.endswith(f".{part}"):
            break
        kept.append(part)
        rest = rest[: -len(str(part))].removesuffix(".")
    return (*filter(None, rest.split(".")), *reversed(kept))


def _path_of(key: str, path: Path, flat: FlatState, roots: Mapping[str, tuple[Path, Collection[str]]]) -> Path:
    """Returns the path that a key has in the app, or would have if it were there.

    Args:
        path: of the key outside of optimizers, as far as it is known.
    """
    if key in flat.leaves:
        return flat.leaves[key].path
    for root, (at, known) in roots.items():
        if known and key.startswith(f"{root}."):
            return (*at, *_path_within(key.removeprefix(f"{root}."), known))
    return path or tuple(key.split("."))


def _path_within(key: str, known: Collection[str]) -> Path:
    """Returns the path that a key has within an object: names of parameters have dots in them."""
    section, _, rest = key.partition(".")
    name, entry = _owner(rest, known)
    if name and section in (_STATE, PARAM_GROUPS):
        return (section, name, entry) if entry else (section, name)
    return tuple(key.split("."))


def _owner(key: str, names: Collection[str]) -> tuple[str, str]:
    """Returns the longest of some names of parameters with which a key begins, and what follows; ("", "") for none."""
    name = key
    while name and name not in names:
        name = name.rpartition(".")[0]
    return (name, key[len(name) + 1 :]) if name else ("", "")


def _name_parameters(handback: Handback, flat: FlatState, stored: _Stored) -> None:
    """Puts the groups and the state of an optimizer under the names of its parameters."""
    root = join(handback.path)
    section = f"{root}.{PARAM_GROUPS}"
    known = frozenset(names_in(handback.groups))
    stored_groups = _take_groups(section, stored)
    options = [
        {name: value for name, value in group.items() if name not in (PARAMS, _NAMES_OF_TORCH)}
        for group in stored_groups
    ]
    names = names_of_numbers(stored_groups, handback, flat)
    for group, own in zip(stored_groups, options, strict=True):
        for member in group[PARAMS]:
            stored.values[f"{section}.{names.get(member, member)}"] = own
    _join_options(section, known, stored)
    new_keys = {}
    for key in stored.below(f"{root}.{_STATE}"):
        number, _, entry = key.removeprefix(f"{root}.{_STATE}.").partition(".")
        # Where groups have numbers, so has the state: also where parameters are called "0" and "1" here.
        if number.isdecimal() and int(number) in names:
            new_keys[key] = f"{root}.{_STATE}.{names[int(number)]}.{entry}"
    stored.move(new_keys)
    frozen = {name for name, parameter in parameters_of_modules(flat) if not parameter.requires_grad}
    for name in frozen - known:
        # torch's optimizers are mostly given all parameters; of such as are never stepped only options are stored.
        if not stored.below(f"{root}.{_STATE}.{name}"):
            stored.values.pop(f"{section}.{name}", None)


def _number_parameters(handback: Handback, flat: FlatState, stored: _Stored) -> None:
    """Puts the groups and the state that are stored by name under the numbers that one of torch's optimizers has."""
    root = join(handback.path)
    section = f"{root}.{PARAM_GROUPS}"
    numbers = numbers_of_names(handback, flat)
    _join_options(section, numbers, stored)
    options = {name: stored.values[f"{section}.{name}"] for name in numbers if f"{section}.{name}" in stored.values}
    if not options:
        return
    stored.values[section] = groups_by_number(handback, numbers, options)
    new_keys = {}
    for key in stored.below(f"{root}.{_STATE}"):
        name, entry = _owner(key.removeprefix(f"{root}.{_STATE}."), numbers)
        if name:
            new_keys[key] = f"{root}.{_STATE}.{numbers[name]}.{entry}"
    stored.move(new_keys)
    for name in options:
        del stored.values[f"{section}.{name}"]


def _take_groups(section: str, stored: _Stored) -> list[dict[str, Any]]:
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
    if not entries or any(not any(_is_or_below(option, PARAMS) for option in each) for each in entries.values()):
        return []
    return [_taken(each, stored) for _, each in sorted(entries.items())]


def _taken(keys: Mapping[str, str], stored: _Stored) -> dict[str, Any]:
    """Takes the values of some keys and nests them.

    Args:
        keys: name of each value in the result, with dots → its key.
    """
    values: dict[str, Any] = _nested({tuple(name.split(".")): stored.take(key) for name, key in keys.items()})
    return values


def _is_or_below(key: str, root: str) -> bool:
    return key == root or key.startswith(f"{root}.")


def _join_options(section: str, known: Collection[str], stored: _Stored) -> None:
    """Makes one value for each parameter of options that are stored one by one."""
    options: dict[str, dict[str, str]] = {}
    for key in stored.below(section):
        name, option = _owner(key.removeprefix(f"{section}."), known)
        if name and option:
            options.setdefault(name, {})[option] = key
    equal: dict[str, Any] = {}  # one object for options that are equal, as they were one group
    for name, keys in options.items():
        own = _taken(keys, stored)
        stored.values[f"{section}.{name}"] = equal.setdefault(repr(sorted(own.items())), own)


def _divided(key: str, value: Any, flat: FlatState) -> Iterator[tuple[str, Any]]:
    """Yields a value as it is, or what is in it where the app has leaves of their own for that."""
    below = f"{key}."
    in_app = key not in flat.leaves and any(each.startswith(below) for each in flat.leaves)
    if not in_app or not isinstance(value, dict | list):
        yield key, value
        return
    for part, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _divided(f"{below}{part}", child, flat)


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


def has_numbers(manifest: Manifest) -> bool:
    """Whether a checkpoint has groups of parameters by number, as torch's own optimizers save them."""
    return any(
        PARAM_GROUPS in path and isinstance([*path, value][path.index(PARAM_GROUPS) + 1], Index | list)
        for path, value in manifest.values.values()
    )
