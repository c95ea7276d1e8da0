"""Flattens an app's nested state into keyed leaves, as they are stored, and nests it again.

    app        {"model": model, "optimizer": opt, "progress": {"step": 7}}
    leaves     {"model.layers.0.weight": tensor, "optimizer.state.layers.0.weight.exp_avg": tensor, "progress.step": 7}

Keys are the path's parts joined by dots. The path is kept with the key, so that the way back is exact although
parts hold dots themselves. Names in a module's state are without what wrappers (torch.compile, DistributedDataParallel,
checkpointed activations) put into them; the module itself gets its own names back. Dictionaries of `app` are descended
to the last value. Within what an object's `state_dict()` gave, a container without tensors is one value: what is in it
is that object's own affair, and a fresh object may well have fewer entries than the one that was saved.

Options belong to parameters: where an object's state has groups whose parameters are names, each parameter has one
plain value, the options of its group, under its own key (`optimizer.param_groups.layers.0.weight`). Ranks that hold
different parameters, or have them in other groups, so meet by key; the groups are made again when the object gets its
state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from shardopt.errors import Problem, StateError
from shardopt.sharding.traceable import is_composite, parts_of
from shardopt.state.containers import MAPPINGS, holds_tensors, shallow
from shardopt.state.in_place import as_tensor, put
from shardopt.state.names import LEAST_ID, ParameterNames, may_have_wrappers, plain_names_in
from shardopt.state.param_groups import (
    NAMES_OF_TORCH,
    OWN,
    PARAMS,
    UNTOUCHED,
    Numbered,
    are_named,
    numbers_in,
    options_by_member,
)
from shardopt.state.paths import PARAM_GROUPS, STATE, Index, Path, join
from shardopt.state.state import (
    FlatState,
    Leaf,
    PerRank,
    RestoreTarget,
    Stateful,
    Tied,
    is_stateful,
    like,
    refuse_chains,
    takes_any_part,
    takes_any_state,
)
from shardopt.state.trainer_optimizers import StateWithin, state_of, state_with_optimizers, unwrapped
from shardopt.state.values import OnAnyRank, canonical, encode_value
from shardopt.state.versions import noted_at

_EXTRA_STATE = "._extra_state"  # of a module's own making, such as bytes in a tensor of any length
RESERVED_PREFIXES = ("__xxh3__.", "__per_rank__.", "__rows__.", "__delta__.", "__delta_index__.")
RESERVED_KEYS = ("__metadata__",)  # safetensors keeps its own notes under this name


def flatten(app: Mapping[str, Any], tied: Tied | None = None) -> FlatState:
    """Flattens the state of `app`; calls `state_dict()` once on every object in it. Copies no tensor.

    Args:
        tied: parts of paths that stand for others: a leaf is known by the others alone.

    Raises:
        StateError: two paths give one key, a dict key is neither str nor int, a key is reserved, a value that has a
            `state_dict` gives something else than a dict, a mapping or array cannot be written to, a container is
            within itself, or values that are declared as tied differ.
    """
    if not isinstance(app, Mapping):
        problem = Problem("app", f"a {type(app).__name__}", "a dict by name", 'pass {"model": model, ...}')
        raise StateError("state must have names", [problem])
    flat = FlatState(tied=tied or {}, names=ParameterNames(app))
    if tied:
        refuse_chains(tied)
    try:
        _descend(app, (), lambda _: None, None, flat)  # the root is no leaf, and nothing replaces it
    except RecursionError:
        problem = Problem("app", "containers nested without end", "a tree", "take out what contains itself")
        raise StateError("state cannot be walked through", [problem]) from None
    return flat


def _descend(node: Any, path: Path, replace: Callable[[Any], None], within: bool | None, flat: FlatState) -> None:
    """Adds the leaves of a node.

    Args:
        within: None outside of objects. In what an object's `state_dict()` gave, where a container without tensors is
            one leaf: whether that object takes any state.
    """
    if type(node) is torch.Tensor or type(node) is Parameter:  # as nearly all
        _add(flat, path, node, replace)
    elif isinstance(node, torch.Tensor):
        parts = parts_of(node) if is_composite(node) else None
        if parts is None:
            _add(flat, path, node, replace)
        for part, (owner, tensor) in (parts or {}).items():
            _descend(tensor, (*path, part), partial(setattr, owner, part), within, flat)
    elif isinstance(node, np.ndarray):
        _add(flat, path, as_tensor(node, path), replace)
    elif is_stateful(node):
        _descend_stateful(node, path, flat)
    else:
        _descend_container(node, path, replace, within, flat)


def _descend_container(
    node: Any, path: Path, replace: Callable[[Any], None], within: bool | None, flat: FlatState
) -> None:
    """Adds the leaves of a container, or one leaf for a plain value or a value per rank."""
    has_places = holds_tensors(node)
    if within is not False:
        replace = partial(put, node, replace, flat.filled)
    if path and not has_places:
        _add_plain(flat, path, node, replace, within)
    is_of_app = within is None and not isinstance(node, Counter) and node
    if isinstance(node, MAPPINGS) and (has_places or not path or is_of_app):
        _check_mapping(node, path, flat)
        flat.noted += noted_at(path, node)
        for part, child in node.items():
            _descend(child, (*path, part), partial(setitem, node, part), within, flat)
    elif isinstance(node, MutableMapping) and within is None and not (node or type(node) in (dict, Counter)):
        _add(flat, path, {}, replace)  # a defaultdict, say, stays what it is
    elif isinstance(node, list) and has_places:
        for i, child in enumerate(node):
            _descend(child, (*path, Index(i)), partial(setitem, node, i), within, flat)
    elif isinstance(node, tuple) and has_places:
        current = list(node)
        for i, child in enumerate(node):
            _descend(child, (*path, Index(i)), partial(_set_in_tuple, node, current, replace, i), within, flat)
    else:
        _add(flat, path, node, replace)


def _set_in_tuple(
    node: tuple[Any, ...], current: list[Any], replace: Callable[[Any], None], i: int, value: Any
) -> None:
    # A tuple cannot be changed: each of its leaves that is replaced puts a new tuple in its place.
    current[i] = value
    replace(like(node, current))


def _descend_stateful(node: Stateful, path: Path, flat: FlatState) -> None:
    plain_module = getattr(node.state_dict, "__func__", None) is torch.nn.Module.state_dict
    target = _asked(node, plain_module, path)
    node, state = target.object, target.state
    if not isinstance(state, dict):
        problem = Problem(join(path), f"state_dict() gave a {type(state).__name__}", "a dict", "return a dict by name")
        raise StateError("state must have names", [problem])
    plain: Mapping[str, str] = {}
    if isinstance(node, torch.nn.Module) and may_have_wrappers(names := [part for part in state if type(part) is str]):
        plain = plain_names_in(node, names)
        _refuse_one_name(plain, state, path)
    numbered = None
    if isinstance(node, Optimizer) and not are_named(state.get(PARAM_GROUPS)):
        numbered = _numbered(node, state, flat.names)
        if numbered is None and isinstance(state, StateWithin):
            numbered = _numbered(node, state, state.names)
        state = state if numbered is None else numbered.named(state)
    target.state, target.plain_names, target.numbered = shallow(state, set()), plain, numbered
    flat.noted += noted_at(path, target.state, node)

    is_partial = target.held_names is not None
    takes_any = takes_any_state(node, target.state)
    groups = target.state.get(PARAM_GROUPS)
    if are_named(groups) and (is_partial or any(group[PARAMS] for group in groups)):
        target.groups = groups
    if is_partial or target.groups is not None or holds_tensors(target.state):
        _check_mapping(target.state, path, flat)
        for part, child in target.state.items():
            if part == PARAM_GROUPS and target.groups is not None:
                _add_options(target, (*path, part), flat)
            elif is_partial and part == STATE and isinstance(child, MutableMapping):
                _check_mapping(child, (*path, part), flat)
                for name, entries in child.items():  # one by one: other ranks may have others
                    _descend(entries, (*path, part, name), partial(setitem, child, name), takes_any, flat)
            else:
                at = (*path, plain.get(part, part))
                may_grow = takes_any or (isinstance(node, Optimizer) and takes_any_part(node, part, child))
                _descend(child, at, partial(setitem, target.state, part), may_grow, flat)
                if plain_module and f".{part}".endswith(_EXTRA_STATE):
                    _add_plain(flat, at, None, partial(setitem, target.state, part))
    else:
        _add_plain(flat, path, target.state, target.replace_state, takes_any)
        _add(flat, path, {plain.get(part, part): child for part, child in target.state.items()}, target.replace_state)
    flat.targets.append(target)  # after those within: an object gets its state back whole


def _asked(node: Stateful, plain_module: bool, path: Path) -> RestoreTarget:
    """Asks an object for its state."""
    if isinstance(node, Optimizer):
        inner = unwrapped(node, path)
        state, taker = state_of(node, inner, path)
        return RestoreTarget(path, inner, taker, node, state)
    if plain_module:
        # With keep_vars a module gives its very parameters, which its load_state_dict copies onto themselves for free.
        state = node.state_dict(keep_vars=True)  # type: ignore[call-arg]  # a Module's
        return RestoreTarget(path, node, node, node, state)
    own = state_with_optimizers(node, path)
    if isinstance(own, StateWithin):
        return RestoreTarget(path, unwrapped(own.optimizer, path), node, own.optimizer, own)
    return RestoreTarget(path, node, node, node, own)


def _add_plain(
    flat: FlatState, path: Path, node: Any, replace: Callable[[Any], None], within: bool | None = None
) -> None:
    if within is not False:
        flat.plain[_named(path, flat) if flat.tied else path] = node, replace


def _numbered(optimizer: Optimizer, state: dict[str, Any], names: ParameterNames) -> Numbered | None:
    """Returns the names of an optimizer's parameters, if its state has numbers; None if they are unknown.

    L-BFGS has one vector over all parameters in their order, which no name stands for: its state keeps the numbers.
    """
    parameters = numbers_in(optimizer, state)
    if parameters is None:
        return None
    given: list[str] = []
    for group in optimizer.param_groups:
        own = group.get(NAMES_OF_TORCH, ())
        given += own if len(own) == len(group[PARAMS]) else [""] * len(group[PARAMS])
    found = names.of(parameters, given)
    if found is None or not set(found).isdisjoint(state[STATE]):
        return None
    kind, module = type(optimizer).__name__, f"{type(optimizer).__module__}."
    own = "" if module.startswith("shardopt.") else f"{OWN}{kind}"
    algorithm = kind if module.startswith("torch.optim.") else own
    return Numbered(found, parameters, state[PARAM_GROUPS], algorithm, isinstance(optimizer, torch.optim.LBFGS))


def _add_options(target: RestoreTarget, path: Path, flat: FlatState) -> None:
    """Adds a leaf for each parameter in groups; equal options share one object."""
    plain: dict[int, dict[str, Any]] = {}
    for name, options in options_by_member(target.groups or ()).items():
        if id(options) not in plain:
            plain[id(options)] = {option: _plain_option(value) for option, value in options.items()}
            if UNTOUCHED in options:  # ranks know it of the parameters that they have elements of
                plain[id(options)][UNTOUCHED] = OnAnyRank(bool(options[UNTOUCHED]))
        _add(flat, (*path, name), plain[id(options)], partial(setitem, target.options, name))


def _plain_option(value: Any) -> Any:
    """Returns an option as a plain value, with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _plain_option(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple) and holds_tensors(value):
        items = [*map(_plain_option, value)]
        return like(value, items) if isinstance(value, tuple) else items
    return value


def _refuse_one_name(plain: Mapping[str, str], state: Mapping[str, Any], path: Path) -> None:
    """Raises for names of a module that become equal once wrappers' parts are removed."""
    taken: dict[str, str] = {}
    problems = []
    for part, name in plain.items():
        other = taken.setdefault(name, name if name in state and name not in plain else part)
        if other != part:
            actual = f"{other} and {part} in the state of {path[-1]!r}"
            remedy = "call a module otherwise that has the name of a wrapper"
            problems.append(Problem(join((*path, name)), actual, "one tensor under a name without wrappers", remedy))
    if problems:
        raise StateError("two names are one without what wrappers put into them", problems)


def _check_mapping(node: Mapping[Any, Any], path: Path, flat: FlatState) -> None:
    if not isinstance(node, (dict, MutableMapping)):
        found = f"a {type(node).__name__}"
        problem = Problem(join(path) or "app", found, "a dict, which can be loaded into", "use one")
        raise StateError("state must be in dicts", [problem])
    for part in node:
        # Exact types: a StrEnum, or a bool, spells itself otherwise than it is stored.
        if type(part) is not str and type(part) is not int:
            key = join((*path, str(part)))
            problem = Problem(key, f"a key of type {type(part).__name__}", "str or int", "rename it")
            raise StateError("a key cannot be stored", [problem])
        if type(part) is int and part > LEAST_ID:
            flat.names.refuse_id(part, path)


def _add(flat: FlatState, path: Path, value: Any, replace: Callable[[Any], None]) -> None:
    alias_path = path
    if flat.tied:
        path = _named(path, flat)
        if _is_added_to_tied(flat, path, alias_path, value, replace):
            return
    try:
        key = ".".join(path)  # type: ignore[arg-type]  # nearly all parts are str
    except TypeError:
        key = join(path)
    if key in flat.leaves:
        actual = f"the paths {list(flat.leaves[key].path)} and {list(path)}"
        raise StateError("two paths give one key", [Problem(key, actual, "one path for a key", "rename one of them")])
    is_reserved = key.startswith("__") and (key in RESERVED_KEYS or key.startswith(RESERVED_PREFIXES))
    is_text = key.isascii() or not any("\ud800" <= each <= "\udfff" for each in key)
    if is_reserved or not is_text:
        problem = Problem(repr(key), "a reserved or unencodable key", "another key", "rename it")
        raise StateError("a key cannot be stored", [problem])
    flat.leaves[key] = Leaf(path, value, replace, () if alias_path == path else (alias_path,))


def _named(path: Path, flat: FlatState) -> Path:
    """Returns a path in which names are replaced by the names that stand for them."""
    return tuple(flat.tied.get(part, part) if isinstance(part, str) else part for part in path)


def _is_added_to_tied(flat: FlatState, path: Path, path_here: Path, value: Any, replace: Callable[[Any], None]) -> bool:
    """Merges the leaves of two tied parameters if this rank has both; returns whether it did."""
    key = join(path)
    if path != path_here:
        flat.aliases[join(path_here)] = key, path_here
    alias = next((alias for alias, (name, _) in flat.aliases.items() if name == key), None)
    if alias is None or key not in flat.leaves:
        return False
    leaf = flat.leaves[key]
    if isinstance(value, torch.Tensor) and isinstance(leaf.value, torch.Tensor):
        if value is not leaf.value:
            flat.twins[alias] = join(leaf.path), value
    elif not _are_equal(leaf.value, value, alias):
        found = f"{value!r:.80} under one name, {leaf.value!r:.80} under the other ({join(leaf.path)})"
        raise StateError(
            "tied parameters",
            [Problem(alias, found, "the same", "do not declare them as tied")],
            code="tied-parameters",
        )
    first = leaf.replace

    def replace_both(value: Any) -> None:
        first(value)
        replace(value)

    leaf.replace, leaf.names_here = replace_both, (*leaf.paths_here, path_here)
    return True


def _are_equal(one: Any, other: Any, key: str) -> bool:
    """Whether two values, at most one of which is a tensor, are stored alike."""
    if type(one) is not type(other):
        return False
    if isinstance(one, PerRank):
        one, other = one.value, other.value
    return canonical(encode_value(one, key)) == canonical(encode_value(other, key))
