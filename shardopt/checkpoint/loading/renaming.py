"""Applies `rename` and `select` to stored keys, and so gives a checkpoint the names of an app.

The options of a parameter are renamed as its state is: "optimizer.param_groups.layers.0.weight" becomes
"optimizer.param_groups.blocks.0.weight" where the rules make "optimizer.state.blocks.0.weight" of
"optimizer.state.layers.0.weight".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.format.manifest import Manifest, StoredTensor, StoredTensors
from shardopt.checkpoint.loading.names import Names, owner_of
from shardopt.checkpoint.loading.positional_params import names_in
from shardopt.errors import MismatchError, Problem
from shardopt.state.names import may_have_wrappers, names_alike, names_under_wrappers
from shardopt.state.paths import PARAM_GROUPS, STATE, Path, is_below, join, lists_with_gaps, nest
from shardopt.state.state import FlatState, RestoreTarget
from shardopt.state.versions import root_of

T = TypeVar("T")
Values = Mapping[str, tuple[Path, Any]]
Rename = Callable[[str], str]


def under_names_of(manifest: Manifest, flat: FlatState, select: str | None, rename: Mapping[str, str] | None) -> Names:
    """Applies `rename` (regex → replacement, in turn) to stored keys, and `select` (a regex) to keys on both sides.

    Raises:
        MismatchError: two stored keys get one name.
    """
    stored, versions = (*manifest.tensors, *manifest.values, *manifest.per_rank), manifest.module_versions or {}
    plain = (
        {key for key in stored if root_of(key, versions) is not None}
        if versions and may_have_wrappers(stored)
        else set()
    )
    if not (select or rename or flat.tied or _keys_under_wrappers(stored, flat, plain)):
        values = regroup_values(flat, _spread(manifest.values, flat), manifest.tensors.values())
        return Names(replace(manifest, values=values), {}, frozenset(flat.leaves), {})
    wanted = re.compile(select or "")
    roots = [each.path for each in flat.targets if each.groups is not None]
    objects = roots_in(flat)
    new_key = names_by_rules(manifest, rename or {}, roots)
    unwrapped = _keys_under_wrappers(new_key.values(), flat, {new_key[key] for key in plain})
    new_key = {key: unwrapped.get(name, name) for key, name in new_key.items()}
    stands_for = _aliases_among(new_key.values(), flat)
    # Where the name that stands for another is not stored itself, what is stored under the other is the tensor.
    taken, alone = set(new_key.values()), dict[str, str]()
    for alias, name in stands_for.items():
        if name not in taken:
            alone.setdefault(name, alias)
    new_key = {key: stands_for[name] if name in alone.values() else name for key, name in new_key.items()}
    aliases = {alias: name for alias, name in stands_for.items() if alias not in alone.values()}
    refuse_collisions(new_key.items())

    def path_of(key: str, path: Path) -> Path:
        if new_key[key] == key:
            return path
        return path_in_app(new_key[key], path_with_tail(path, new_key[key]), flat, objects)

    def chosen(stored: Mapping[str, T]) -> Iterable[tuple[str, T]]:
        return ((key, entry) for key, entry in stored.items() if wanted.search(new_key[key]))

    renamed_values = {new_key[key]: (path_of(key, path), value) for key, (path, value) in manifest.values.items()}
    tensors = StoredTensors(
        (new_key[key], tensor._replace(path=path_of(key, tensor.path))) for key, tensor in chosen(manifest.tensors)
    )
    values = regroup_values(flat, _spread(renamed_values, flat), tensors.values())
    renamed_manifest = replace(
        manifest,
        tensors=tensors,
        values={key: entry for key, entry in values.items() if wanted.search(key)},
        per_rank={new_key[key]: path_of(key, path) for key, path in chosen(manifest.per_rank)},
    )
    changed = {new: key for key, new in new_key.items() if new != key}
    return Names(renamed_manifest, changed, frozenset(key for key in flat.leaves if wanted.search(key)), aliases)


def renamer(rename: Mapping[str, str] | None) -> Rename:
    """Returns the function that applies the rules of `rename` (regex → replacement, in turn) to a key."""
    rules = [(re.compile(pattern), into) for pattern, into in (rename or {}).items()]

    @cache
    def renamed(key: str) -> str:
        for pattern, into in rules:
            key = pattern.sub(into, key)
        return key

    return renamed


def names_by_rules(manifest: Manifest, rename: Mapping[str, str], roots: Collection[Path]) -> dict[str, str]:
    """Returns stored key → new key, for all stored keys.

    Args:
        rename: regex → replacement, in turn.
        roots: the paths of optimizers under the new names, whose options are renamed as their state is.
    """
    renamed = renamer(rename)
    new_key = {key: renamed(key) for key in (*manifest.tensors, *manifest.values, *manifest.per_rank)}
    if rename:
        new_key |= {key: _renamed_options(key, path, roots, renamed) for key, (path, _) in manifest.values.items()}
    return new_key


def name_by_rules(name: str, root: Path, rename: Mapping[str, str], roots: Collection[Path]) -> str:
    """Returns the new name of a parameter, as the rules rename the keys of its state.

    Args:
        root: the stored path of its optimizer.
        roots: the paths of optimizers under the new names.
    """
    options = (*root, PARAM_GROUPS, name)
    new_key = _renamed_options(join(options), options, roots, renamer(rename))
    before = next((at for each in roots if new_key.startswith(at := f"{join((*each, PARAM_GROUPS))}.")), None)
    return name if before is None else new_key.removeprefix(before)


def path_with_tail(path: Path, new_key: str) -> Path:
    """Returns the path of a renamed key.

    Where both keys end alike, it keeps the parts of the old path, such as positions in lists.
    """
    kept: list[str | int] = []
    rest = new_key
    for part in reversed(path):
        if rest != str(part) and not rest.endswith(f".{part}"):
            break
        kept.append(part)
        rest = rest[: -len(str(part))].removesuffix(".")
    return (*filter(None, rest.split(".")), *reversed(kept))


def roots_in(flat: FlatState) -> dict[str, tuple[Path, Collection[str]]]:
    """Returns the key of each object → its path, and the names of the parameters in its groups."""
    return {join(each.path): (each.path, frozenset(names_in(each.groups))) for each in flat.targets}


def path_in_app(key: str, path: Path, flat: FlatState, roots: Mapping[str, tuple[Path, Collection[str]]]) -> Path:
    """Returns the path that a key has in the app, or would have there.

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
    """Returns the path of a key within an object, whose parameters' names contain dots."""
    section, _, rest = key.partition(".")
    name, entry = owner_of(rest, known)
    if name and section in (STATE, PARAM_GROUPS):
        return (section, name, entry) if entry else (section, name)
    return tuple(key.split("."))


def _renamed_options(key: str, path: Path, roots: Collection[Path], renamed: Rename) -> str:
    """Returns the new key of a plain value; the options of a parameter are renamed like its state."""
    if len(path) < 2 or path[-2] != PARAM_GROUPS:
        return renamed(key)
    new_of_state = renamed(join((*path[:-2], STATE, path[-1])))
    for root in roots:
        before = f"{join((*root, STATE))}."
        if new_of_state.startswith(before):
            return join((*root, PARAM_GROUPS, new_of_state.removeprefix(before)))
    return renamed(key)


def _keys_under_wrappers(keys: Collection[str], flat: FlatState, plain: Collection[str]) -> dict[str, str]:
    """Maps stored keys to the app's keys, where they differ by wrappers that have come or gone.

    Names in a module's state are plain when they are saved (`shardopt.state.names`); early checkpoints have all.

    Args:
        plain: the keys of states that a module gave, which are plain.
    """
    strange = [key for key in keys if key not in flat.leaves]
    unwrapped: dict[str, str] = {}
    for target in flat.targets:
        root = f"{join(target.path)}."
        if isinstance(target.object, Module) and may_have_wrappers(strange):
            own = {key.removeprefix(root) for key in flat.leaves if key.startswith(root)}
            stored = {key.removeprefix(root) for key in keys if key.startswith(root)}
            as_saved = {key.removeprefix(root) for key in plain if key.startswith(root)}
            found = names_under_wrappers(stored, own, as_saved)
            unwrapped |= {root + name: root + short for name, short in found.items()}
        elif target.groups is not None or hasattr(target.object, "names_of_averaged_model"):
            unwrapped |= _keys_of_parameters(keys, strange, target, flat)
    return unwrapped


def _keys_of_parameters(
    keys: Collection[str], strange: Collection[str], target: RestoreTarget, flat: FlatState
) -> dict[str, str]:
    """Maps stored keys of an optimizer, or of averages, to the app's keys, by names of parameters that are alike."""
    state, groups = (f"{join((*target.path, section))}." for section in (STATE, PARAM_GROUPS))
    if target.groups is not None:
        section, own = groups, {*names_in(target.groups)}
        stored = {key.removeprefix(groups) for key in keys if key.startswith(groups)}
    else:  # of averages one entry each
        section = state
        own, stored = (
            {key.removeprefix(state).rpartition(".")[0] for key in each if key.startswith(state)}
            for each in (flat.leaves, keys)
        )
    if own <= stored or not may_have_wrappers([*own, *stored]):
        return {}
    new = names_alike(stored, own)
    unwrapped = {}
    for key in strange if new else ():
        before = next((each for each in (section, state) if key.startswith(each)), None)
        name, entry = owner_of(key.removeprefix(before), new) if before is not None else ("", "")
        if name:
            unwrapped[key] = join((f"{before}{new[name]}", entry)) if entry else f"{before}{new[name]}"
    return unwrapped


def _aliases_among(keys: Iterable[str], flat: FlatState) -> dict[str, str]:
    """Maps keys under tied names (`tied`) to the app's keys under the first name, if the app has these."""
    if not flat.tied:
        return {}
    names = "|".join(map(re.escape, sorted(flat.tied, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![^.])(?:{names})(?![^.])")  # whole segments
    under_others = {key: pattern.sub(lambda found: flat.tied[found[0]], key) for key in keys if key not in flat.leaves}
    return {key: name for key, name in under_others.items() if name in flat.leaves}


def _spread(values: Values, flat: FlatState) -> Values:
    """Splits a value stored whole, for an object with `held_names`, into one value for each entry of its state.

    So earlier versions have it. By now each name in "state" has a key of its own.
    """
    for root in [each.path for each in flat.targets if each.held_names is not None]:
        for path in (root, (*root, STATE)):
            _, whole = values.get(join(path), (path, None))
            if isinstance(whole, dict) and join(path) not in flat.leaves:
                entries = {
                    join((*path, name)): ((*path, name), value)
                    for name, value in whole.items()
                    if (*path[len(root) :], name) != (STATE,) or value
                }
                values = {key: entry for key, entry in values.items() if key != join(path)} | entries
    return values


def refuse_collisions(named: Iterable[tuple[str, str]]) -> None:
    """Raises MismatchError if two stored keys get one name.

    Args:
        named: stored key and name.
    """
    taken: dict[str, str] = {}
    problems = []
    for key, name in named:
        if name in taken:
            found, remedy = f"{taken[name]} and {key}", "give the one that is in the way another name first, or no rule"
            problems.append(Problem(name, found, "one stored key for a name", remedy))
        taken.setdefault(name, key)
    if problems:
        raise MismatchError("the rules of rename give two keys one name", problems, code="bad-rules")


def regroup_values(flat: FlatState, values: Values, tensors: Iterable[StoredTensor]) -> Values:
    """Returns stored values; joins those that the app holds in one container to that container.

    torch.distributed.checkpoint takes containers apart to the last value: what it has saved of a schedule whose state
    is one value here stands under `schedule.last_epoch`, `schedule.milestones.3`, and so on.

    Only where nothing is stored under the container's own key, and it is not empty: an empty one may be that of a rank
    which has nothing of what others have there. An empty container within one of which other parts are stored stays
    as the app has it, for it has no parts that could be. Nor are entries by name put together for a list, or elements
    of a list for a dict: these are differences, as any. Nor is joined what will replace the container (`growing.py`),
    with the stored tensors among it, nor what belongs to state of an optimizer without any: without the tensors among
    it, a list has no places.

    Args:
        tensors: that are stored.
    """
    whole = {
        leaf.path: key
        for key, leaf in flat.leaves.items()
        if isinstance(leaf.value, Mapping | list) and leaf.value and key not in values
    }
    filled = {*flat.plain, *(each.path for each in flat.targets if isinstance(each.object, Optimizer))}
    grow = filled.intersection(whole)
    for path in grow and {tensor.path[:length] for tensor in tensors for length in range(1, len(tensor.path))}:
        if path in filled:
            whole.pop(path, None)
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
        if not lists_with_gaps(within) and _is_of_kinds(here.value, nested):
            left[key] = here.path, _like(here.value, nested)
        else:
            left |= {name: each for name, each in values.items() if name not in left and is_below(each[0], here.path)}
    return left


def _is_of_kinds(here: Any, stored: Any) -> bool:
    """Whether nested parts are lists and dicts as in the app; where the app's are empty, either will do."""
    if not here or not isinstance(here, Mapping | list) or not isinstance(stored, dict | list):
        return True
    if isinstance(here, list) or isinstance(stored, list):
        both = isinstance(here, list) and isinstance(stored, list)
        return both and all(map(_is_of_kinds, here, stored))
    named = {str(name): each for name, each in here.items()}
    return all(_is_of_kinds(named.get(str(name)), each) for name, each in stored.items())


def _like(here: Any, stored: Any) -> Any:
    """Returns nested parts with the app's types of containers and keys."""
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
