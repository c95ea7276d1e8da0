"""The versions of modules' classes, which torch notes in a module's state.

A class raises its `_version` where its values get another meaning, and its `_load_from_state_dict` converts older ones.
So a checkpoint has the versions by which it was saved, and a load hands these to the class, as torch.load does:

    {"model": {"backbone.bn1": 2}}        key of a state → name of a module in it → version, where that is not 1

Classes begin with version 1. So a state that has notes, and none of a module, has that module's by version 1. A state
without notes, as of earlier writers and plain dicts, is taken as of the version that is here. So is a module with a
version that is no number (a class may mean something else by the name), or that the notes of a state leave out: such a
state has all other versions, and "*".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, NamedTuple

from torch.nn import Module

from shardopt.state.names import may_have_wrappers, plain_names_in
from shardopt.state.paths import Path, join

Version = int | None
Versions = Mapping[str, Mapping[str, Version]]

VERSION = "version"
"""The key of the version in torch's notes of one module."""
_FIRST = 1
_REST = "*"
"""Among the names of modules: of others in this state nothing is known."""


class Noted(NamedTuple):
    """A state with torch's notes: its path in the app, and the names of modules that stand otherwise in its keys.

    `is_plain` says that its keys are without what wrappers add to them.
    """

    path: Path
    state: Any
    plain_names: Mapping[str, str]
    is_plain: bool

    def key(self, name: str) -> str:
        """Returns the key of a module in the app, by its name in the notes."""
        name = self.plain_names.get(name, name)
        return join((*self.path, name)) if name else join(self.path)

    def versions(self) -> dict[str, Any]:
        """Returns the version of each module, by its plain name, also where that is no number."""
        notes = notes_of(self.state) or {}
        # Of a wrapper and its module, which have one name, the module is the later.
        return {self.plain_names.get(name, name): note.get(VERSION) for name, note in notes.items()}


def noted_at(path: Path, state: Any, owner: Any = None) -> list[Noted]:
    """Returns a state if it has torch's notes.

    Args:
        owner: the object that gave the state. A module's keys are without wrappers' parts.
    """
    notes = notes_of(state)
    if notes is None:
        return []
    places = {f"{name}.": name for name in notes if name}
    if not isinstance(owner, Module):
        return [Noted(path, state, {}, not may_have_wrappers(places))]
    plain = plain_names_in(owner, places)
    return [Noted(path, state, {places[at]: each.removesuffix(".") for at, each in plain.items()}, True)]


def notes_of(state: Any) -> Mapping[str, Mapping[str, Any]] | None:
    """Returns torch's notes in a module's state; None if it has none, or some that are not of modules."""
    # Not by getattr: the entries of a program's dict may be its attributes.
    own = getattr(state, "__dict__", None) if isinstance(state, OrderedDict) else None
    notes = own.get("_metadata") if type(own) is dict else None
    is_known = isinstance(notes, Mapping) and all(
        type(name) is str and isinstance(each, Mapping) for name, each in notes.items()
    )
    return notes if is_known else None


def with_notes(state: Mapping[str, Any], notes: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """Returns a state with torch's notes."""
    noted: Any = OrderedDict(state)
    if notes is not None:
        noted._metadata = OrderedDict(notes)
    return noted  # type: ignore[no-any-return]  # an attribute of it is not typed


def saved_form(versions: Mapping[str, Any], is_whole: bool = True) -> dict[str, Version]:
    """Returns the versions that are not the first; all, and "*", if there are modules of which nothing is known.

    Args:
        is_whole: whether it has all modules of a state.
    """
    known = {name: version for name, version in versions.items() if type(version) in (int, NoneType)}
    if is_whole and len(known) == len(versions):
        return {name: version for name, version in known.items() if version != _FIRST}
    return {**known, _REST: None}


def versions_in(noted: Iterable[Noted]) -> dict[str, dict[str, Version]]:
    """Returns the versions that a save stores: of states whose names are plain, as which readers take them."""
    found: dict[str, dict[str, Version]] = {}
    for each in noted:
        if each.is_plain:
            modules = {key.rpartition(".")[0] for key in each.state if type(key) is str}
            is_whole = modules <= (notes_of(each.state) or {}).keys()  # not where somebody has put in other keys
            found[join(each.path)] = saved_form(each.versions(), is_whole)
    return found


def merged(each: Iterable[Versions]) -> dict[str, dict[str, Version]]:
    """Returns the versions of several ranks or files as one."""
    together: dict[str, dict[str, Version]] = {}
    for versions in each:
        for root, by_name in versions.items():
            together.setdefault(root, {}).update(by_name)
    return together


def stored_for(noted: Noted, stored: Versions, stored_keys: Mapping[str, str]) -> dict[str, Version]:
    """Returns the stored versions of modules of which something is loaded, by their names in the notes.

    Args:
        stored: of the checkpoint.
        stored_keys: key of what is loaded → its key in the checkpoint.
    """
    if not stored:
        return {}
    modules = _modules(stored_keys)
    found = {name: modules.get(noted.key(name)) for name in notes_of(noted.state) or ()}
    return {name: version for name, at in found.items() for version in ([] if at is None else _version_of(at, stored))}


def note(noted: Noted, versions: Mapping[str, Version]) -> None:
    """Notes other versions in a state."""
    notes = notes_of(noted.state) or {}
    if any(notes[name].get(VERSION) != version for name, version in versions.items()):
        given = {name: {**each, VERSION: versions.get(name, each.get(VERSION))} for name, each in notes.items()}
        noted.state._metadata = OrderedDict(given)


def converts(module: Module) -> bool:
    """Whether a load of a module's own values may depend on their version: by its class, or by hooks."""
    own = type(module)._load_from_state_dict
    return own is not Module._load_from_state_dict or bool(module._load_state_dict_pre_hooks)


def renamed_versions(stored: Versions, new_keys: Mapping[str, str]) -> dict[str, dict[str, Version]]:
    """Returns versions by the new names of modules.

    Args:
        new_keys: stored key → new key, of what is kept. Of other modules nothing is known then.
    """
    renamed: dict[str, dict[str, Version]] = {}
    for old, new in _modules(new_keys).items():
        for version in _version_of(old, stored):
            renamed[new] = {"": version, _REST: None}  # a state by itself, as its neighbours may be elsewhere
    return renamed


def plain_roots(stored: Versions, keys: Iterable[str]) -> Versions:
    """Returns the versions of states without keys that may have what wrappers add."""
    doubtful = {root for key in keys if may_have_wrappers([key]) and (root := root_of(key, stored)) is not None}
    return {root: versions for root, versions in stored.items() if root not in doubtful}


def root_of(key: str, stored: Versions) -> str | None:
    """Returns the key of the state with versions that a key is in; None if it is in none."""
    while key not in stored:
        if not key:
            return None
        key = key.rpartition(".")[0]
    return key


def _modules(keys: Mapping[str, str]) -> dict[str, str]:
    """Returns module → its other name, by the two keys of each entry, which end alike."""
    modules: dict[str, str] = {}
    for key, other in keys.items():
        part, same = None, None
        while part == same and (key or part is None):
            (key, _, part), (other, _, same) = key.rpartition("."), other.rpartition(".")
            if part != same or key in modules:
                break
            modules[key] = other
    return modules


def _version_of(module: str, stored: Versions) -> list[Version]:
    """Returns the stored version of a module, by its key; nothing if the checkpoint has no notes there."""
    root = root_of(module, stored)
    if root is None:
        return []
    name, versions = module[len(root) :].removeprefix("."), stored[root]
    return [] if _REST in versions and name not in versions else [versions.get(name, _FIRST)]
