"""Finds parameters that optimizers of a run's app step and that nothing in it holds, and optimizers that it lacks.

An object of the program's own may hold parameters, and other optimizers, in what its `state_dict()` has. What that was
at the last save is noted for that, as a `state_dict` may communicate, and so is not made here: only rank 0 looks.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple
from weakref import WeakSet, finalize, ref

import numpy as np
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.saving.planning.app_tensors import children_of, names_of, places_of
from shardopt.runtime.live_objects import instances_of
from shardopt.runtime.torch_gradients import named_shards_of
from shardopt.state.paths import PARAM_GROUPS, STATE, Path, join
from shardopt.state.state import FlatState, PerRank, RestoreTarget, is_stateful

# Modules of classes whose objects restore no parameters, besides torch's Module. Any other object may.
_RESTORE_NONE = (
    *("torch.optim", "torch.amp", "torch.utils.data", "torchdata"),
    *("shardopt.optim", "shardopt.data", "shardopt.integrations.loader"),
)

_in_apps: WeakSet[Optimizer] = WeakSet()
"""The optimizers in the apps of all runs of this process."""

_MANY = 1 << 12  # the most that is counted of a state

Found = list[tuple[Path, Any]]
"""What is in an app, by path: `objects_in`."""


class _Saved(NamedTuple):
    """Notes of what an object of the program's own saved.

    Args:
        own: the object.
        room: how many elements a tensor may have that is in it (`_size_of`).
        hides_optimizer: whether it has an optimizer's state that no optimizer of the app has.
    """

    own: ref[Any]
    room: float
    hides_optimizer: bool


_saved: dict[int, _Saved] = {}
"""By the id of the object, for as long as it is there: it may have no hash."""

_log = logging.getLogger("shardopt.checkpoint")


def objects_in(value: Any, path: Path = ()) -> Found:
    """Returns what is in an app's dicts, lists and tuples, by path; runs no code of its mappings."""
    if isinstance(value, PerRank):
        return objects_in(value.value, path)
    if not isinstance(value, dict | list | tuple) or is_stateful(value):
        return [(path, value)]
    # Of copies, as another thread may fill them.
    parts = list(dict.items(value)) if isinstance(value, dict) else enumerate(list(value))
    return [each for part, child in parts for each in objects_in(child, (*path, part))]


def optimizers_in(found: Found) -> dict[str, Optimizer]:
    """Returns the optimizers in an app by key."""
    return {join(path): each for path, each in found if isinstance(each, Optimizer)}


def note_optimizers(found: Found) -> None:
    """Notes that the optimizers of an app are in one."""
    _in_apps.update(optimizers_in(found).values())


def warn_of_unheld(found: Found, but: Collection[str] = frozenset()) -> set[str]:
    """Logs a warning for each optimizer that trains tensors that nothing else in the app has; returns their keys.

    Those that an object of the program's own may hold (`_room_in`) are not told of. Local.

    Args:
        but: the keys of optimizers that are passed by.
    """
    optimizers, room = optimizers_in(found), _room_in(found)
    if not optimizers or room == inf:
        return set()
    tensors = [each for _, value in found for each in tensors_of(value)]
    held: set[Any] = set(map(id, tensors))
    others = {
        key: [pair for child in children_of(each) for pair in _trained(child, held)]
        for key, each in optimizers.items()
        if key not in but
    }
    if any(others.values()):
        held.update(place for each in tensors for place in places_of(each))
    told = set()
    for key, pairs in others.items():
        unheld = [pair for pair in pairs if not held.issuperset(places_of(pair[1]))]
        if any(each.numel() > room for _, each in unheld):
            told.add(key)
            name, first = unheld[0]
            _log.warning(
                "%s steps %d parameters that nothing in the app holds, such as %s: a resume would give their "
                "moments to new values. Add their module, or the tensor, to the app; or, if the model has replaced "
                "them, take them out of the groups [stale-parameters]",
                *(key, len(unheld), name or f"one of shape {tuple(first.shape)}"),
            )
    return told


def warn_of_forgotten(found: Found) -> None:
    """Logs a warning of an optimizer with state that an app lacks, and that steps parameters of its modules. Local.

    It is looked for only where those of the app leave some that are trained, as a search of all objects takes long; not
    among those that `gc.freeze` keeps out of collections, as what is alive would be frozen with them after it. An app
    with an object that may hold one (`_room_in`), or with what a `state_dict` of one has, is not told of.
    """
    own = _with_inner(optimizers_in(found).values())
    _in_apps.update(own)
    parts, room = {part for path, _ in found for part in path}, _room_in(found)
    if parts & {PARAM_GROUPS, STATE} or room == inf:
        return
    stepped = {id(each) for optimizer in own for group in optimizer.param_groups for each in group["params"]}
    modules = [(path, each) for path, each in found if isinstance(each, Module)]
    named = {id(each): (each, (*path, name)) for path, module in modules for name, each in module.named_parameters()}
    left = {id: path for id, (each, path) in named.items() if each.requires_grad and id not in stepped}
    if not any(named[id][0].numel() > room for id in left):
        return

    def others() -> dict[int, Optimizer]:
        """Returns optimizers by the ids of what they have state of: where one has only looked for some, it is empty."""
        known = (each for each in instances_of(Optimizer) if each not in _in_apps and STATE in vars(each))
        return {
            id(own): each
            for each in known
            for own, state in each.state.items()
            if id(own) in left and not (isinstance(state, dict) and not state)
        }

    found_others = others()
    if found_others:
        found_others.clear()
        gc.collect()  # those that nobody has any more, but for a schedule of theirs
        found_others = others()
    _in_apps.update(found_others.values())  # once
    lacking = [id for id in left if id in found_others]
    if any(named[id][0].numel() > room for id in lacking):
        _log.warning(
            "an optimizer that is not in the app steps %d parameters of it, such as %s: a resumed run would begin its "
            "state anew. Add it under a key of its own [optimizer-state]",
            *(len(lacking), join(left[lacking[0]])),
        )


def _with_inner(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Returns optimizers, those that they combine, and those that are their attributes."""
    found: dict[int, Optimizer] = {}
    ahead = [*optimizers]
    while ahead:
        if id(each := ahead.pop()) not in found:
            found[id(each)] = each
            # By the type, as a weak proxy of what is gone answers nothing else.
            ahead += [own for own in (*children_of(each), *vars(each).values()) if issubclass(type(own), Optimizer)]
    return [*found.values()]


def warn_of_hidden_optimizers(found: Found) -> bool:
    """Logs a warning of objects of the program's own that save the state of an optimizer that nobody finds in the app.

    In a new process that state is not there yet, and the object has no place for what is stored.

    Returns:
        Whether there is one.
    """
    hiding = [path for path, each in found if _is_noted(each) and _saved[id(each)].hides_optimizer]
    for path in hiding:
        _log.warning(
            "%s saves the state of an optimizer that is neither in the app nor among its attributes: a restore in a "
            "new process is refused unless that state was made before. Add the optimizer to the app too, under a key "
            "of its own [optimizer-state]",
            join(path),
        )
    return bool(hiding)


def note_states(targets: Sequence[RestoreTarget], flat: FlatState) -> None:
    """Notes what objects of the program's own save, at each save: it may differ, as may what else the app has.

    Args:
        targets: neither modules nor optimizers.
    """
    for target in targets:
        if not may_hold_others(own := target.object):
            continue
        hides_optimizer = False
        if within := _shapes_in(_optimizer_states_in(target.state)):
            others = (each.state.get(STATE) for each in flat.targets if isinstance(each.object, Optimizer))
            hides_optimizer = bool(within - _shapes_in([*others]))
        with suppress(TypeError):  # its class has slots, and none for references
            if not _is_noted(own):
                finalize(own, _saved.pop, id(own), None)
            _saved[id(own)] = _Saved(ref(own), _size_of(target.state), hides_optimizer)


def _is_noted(own: Any) -> bool:
    return id(own) in _saved and _saved[id(own)].own() is own


def _optimizer_states_in(state: Any) -> list[Any]:
    if isinstance(state, Mapping):
        is_optimizers = PARAM_GROUPS in state and STATE in state
        return [state[STATE]] if is_optimizers else _optimizer_states_in([*state.values()])
    parts = state if isinstance(state, list | tuple) and len(state) <= _MANY else ()
    return [found for each in parts for found in _optimizer_states_in(each)]


def _size_of(state: Any) -> float:
    """Returns how many entries, numbers and characters a state has; infinity for many, tensors and other objects."""
    size, values = 0, [state]
    for value in values:  # which grows
        if isinstance(value, Tensor | np.ndarray | PerRank) or is_stateful(value):
            return inf
        size += len(value) if isinstance(value, Collection) else 1
        if size > _MANY:
            return inf
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, Collection) and not isinstance(value, str | bytes):
            values += value
    return size


def _room_in(found: Found) -> float:
    """Returns how many elements a tensor may have that the program's own objects in an app hold; infinity for any."""
    own = (each for _, each in found if may_hold_others(each))
    return max((_saved[id(each)].room if _is_noted(each) else inf for each in own), default=0)


def may_hold_others(value: Any) -> bool:
    """Whether a load of an object may change parameters that nobody knows of."""
    if isinstance(value, Module | Optimizer | Tensor) or not (is_stateful(value) or isinstance(value, Mapping)):
        return False
    return not any(each.__module__.startswith(_RESTORE_NONE) for each in type(value).__mro__)


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of a module, or a tensor; none of another object."""
    if isinstance(value, Module):
        return [*value.parameters(), *value.buffers(), *(shard for _, shard in named_shards_of(value))]
    return [value] if isinstance(value, Tensor) else []


def _shapes_in(value: Any) -> Counter[tuple[int, ...]]:
    """Returns the shapes of the tensors in containers, by which copies of them are known, too."""
    shapes, values = Counter[tuple[int, ...]](), [value]
    for each in values:  # which grows
        if isinstance(each, Tensor):
            shapes[tuple(each.shape)] += 1
        elif isinstance(each, Mapping | list | tuple):
            values += each.values() if isinstance(each, Mapping) else each
    return shapes


def _trained(optimizer: Any, but: Collection[int]) -> list[tuple[str, Tensor]]:
    """Returns the trained parameters of an optimizer with their names, "" where it has none; not those of some ids."""
    named = names_of(optimizer)
    pairs = (
        [("", each) for group in optimizer.param_groups for each in group["params"]]
        if named is None
        else [*named.items()]
    )
    return [(name, each) for name, each in pairs if id(each) not in but and each.requires_grad]
