"""Optimizers that trainers of other libraries have wrapped in classes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch.optim import Optimizer

from shardopt.errors import Problem, StateError
from shardopt.state.containers import attributes_of
from shardopt.state.paths import PARAM_GROUPS, STATE, Path, join
from shardopt.state.state import CheckedStateful, Stateful, has_optimizer

SHARDOPTS_WARM_UP = "shardopt's WarmupOptimizer (docs/integrations/torchrec.md shows it around fused tables)"

_OF_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def unwrapped(node: Stateful, path: Path = ()) -> Stateful:
    """Returns the optimizer inside the class that another library's trainer has put around it.

    Such a wrapper (of Accelerate, Lightning, Fabric) is an Optimizer to isinstance, but none of its constructors has
    run: so it has no place for hooks, by which a load keeps an optimizer that is half loaded from stepping.

    torchrec's wrappers too. Its warm-up adds a parameter to those of what it wraps, for its position. A combined
    optimizer lists its parameters anew each time: it never gets that one, and would leave the position out.

    Raises:
        StateError: it is not one optimizer that it wraps, the wrapper has parameters that what it wraps lacks, or it is
            torch's ZeroRedundancyOptimizer.
    """
    *_, node = layers_of(node, path)
    if any(each.__module__ == _OF_ZERO for each in type(node).__mro__):
        required = "an optimizer whose ranks have their state at one time"
        remedy = "take shardopt.keyed with fully_shard, which shards its state as well"
        problem = Problem(join(path) or "app", f"torch's {type(node).__name__}", required, remedy)
        raise StateError("what has its state on one rank at a time cannot be saved and loaded", [problem])
    return node


def state_of(node: Stateful, inner: Stateful, path: Path) -> tuple[dict[str, Any], Stateful]:
    """Returns the state to save of an optimizer within `node`, and what takes it: a wrapper whose own says more.

    torch's PostLocalSGDOptimizer has the position of its averager in it. A trainer's class that imitates the class of
    what it wraps has no state of its own, and may gather that of all ranks if it is asked.

    Args:
        node: the outermost wrapper, or the optimizer itself.
        inner: as `unwrapped` returns it.

    Raises:
        StateError: what a wrapper keeps is not in its state, or not beside that of the optimizer.
    """
    state = inner.state_dict()
    for wrapper, within in pairwise(layers_of(node)):
        if type(within) in type(wrapper).__bases__:
            continue
        own: Any = {}
        if type(wrapper).state_dict is not Optimizer.state_dict:
            try:
                own = wrapper.state_dict()
            except Exception as error:  # of its base class, as that of torch_optimizer's Lookahead
                found = f"state that its state_dict() does not give ({type(error).__name__}: {error})"
                _refuse_kept(wrapper, [found], path)
        own = own if isinstance(own, dict) else {}
        more = own.keys() - state.keys()
        if more and own.keys() >= state.keys() and not isinstance(inner, CheckedStateful):
            return own, wrapper
        by_itself, here = vars(wrapper).get(STATE), getattr(inner, STATE, None)  # maybe an older dict of the inner's
        more = more or _names_in(own) - _names_in(state)
        if more := more or _names_in({STATE: by_itself}) - _names_in({STATE: here}):
            _refuse_kept(wrapper, sorted(map(str, more)), path)
    return state, inner


def layers_of(node: Any, path: Path = ()) -> Iterator[Any]:
    """Yields a wrapper, what it wraps, and so on to the optimizer itself. Raises as `unwrapped`."""
    yield node
    while isinstance(node, Optimizer) and not is_constructed(node):
        inner = _inner_of(node)
        _refuse_unlike_one(node, inner, path)
        _refuse_lost(node, inner[0], path)
        node = inner[0]
        yield node


def optimizer_within(node: Any, state: Any) -> tuple[Optimizer, Stateful, str | int | None] | None:
    """Returns the optimizer in an object that is none, if the object's state has that of this one optimizer.

    So an optimizer within schedulefree's wrapper, or an engine, gets names for its parameters, and state to load into.

    Args:
        state: of the object; anything, if it is no dict.

    Returns:
        The optimizer, maybe in a trainer's class; that without the class; and under which key the object's state has
        that of the optimizer, or None if it is the optimizer's, maybe with more beside it. None if the object is
        another.
    """
    found = _inner_of(node) if attributes_of(node) is not None else []
    if len(found) != 1 or isinstance(node, CheckedStateful) or not isinstance(state, dict) or not has_optimizer(state):
        return None
    inner = unwrapped(found[0])
    own = inner.state_dict()
    if _is_that_of(own, state):
        return None if state.keys() != own.keys() and isinstance(inner, CheckedStateful) else (found[0], inner, None)
    parts = [part for part, each in state.items() if _is_that_of(own, each)]
    return (found[0], inner, parts[0]) if len(parts) == 1 else None


def _is_that_of(own: Mapping[str, Any], state: Any) -> bool:
    """Whether it is an optimizer's own state or a copy, by the names in it; there may be more beside that."""
    return (
        isinstance(state, dict)
        and own.keys() <= state.keys()
        and all(isinstance(each.get(STATE), dict) for each in (own, state))
        and own[STATE].keys() == state[STATE].keys()
        and _names_in(own) == _names_in(state)
    )


def _inner_of(wrapper: Any) -> list[Optimizer]:
    """Returns the optimizers that a wrapper has as attributes."""
    # By the type, as a weak proxy of what is gone answers nothing else.
    return list({id(each): each for each in vars(wrapper).values() if issubclass(type(each), Optimizer)}.values())


def _names_in(state: Mapping[str, Any]) -> set[Any]:
    """Returns the names of entries by parameter in the state of an optimizer, and those of options of its groups."""
    by_parameter, groups = state.get(STATE), state.get(PARAM_GROUPS)
    parts = [
        *(by_parameter.values() if isinstance(by_parameter, Mapping) else ()),
        *(groups if isinstance(groups, list) else ()),
    ]
    return {name for each in parts if isinstance(each, Mapping) for name in each}


def _refuse_kept(wrapper: Any, names: Sequence[str], path: Path) -> None:
    problem = Problem(
        join(path) or "app",
        f"a {type(wrapper).__module__}.{type(wrapper).__qualname__}, which keeps {', '.join(names)} itself",
        "one whose state_dict() has that besides all that the one of torch's optimizer in it has",
        "give the app the optimizer in it, and under a key of its own what the wrapper keeps",
    )
    raise StateError("a wrapper of an optimizer has state that cannot be saved", [problem])


def _refuse_unlike_one(wrapper: Any, inner: Sequence[Optimizer], path: Path) -> None:
    """Raises StateError for what wraps no optimizer, or several."""
    if len(inner) != 1:
        actual = f"a {type(wrapper).__module__}.{type(wrapper).__qualname__}, whose constructor has not run torch's"
        required = f"an optimizer of torch's classes, or what wraps one (found {len(inner)} in it)"
        remedy = "pass the optimizer itself, or save it by its library"
        problem = Problem(join(path) or "app", actual, required, remedy)
        raise StateError("what stands for an optimizer cannot be saved and loaded", [problem])


def _refuse_lost(wrapper: Any, inner: Any, path: Path) -> None:
    """Raises StateError for named parameters of a wrapper whose state the optimizer in it does not save."""
    has, saved = getattr(wrapper, "params", None), getattr(inner, "params", None)
    if not isinstance(has, Mapping) or not isinstance(saved, Mapping) or saved.keys() >= has.keys():
        return
    keys = [join((*path, STATE, name)) for name in has if name not in saved]
    found = f"state of a {type(wrapper).__module__}.{type(wrapper).__qualname__}, which its state_dict() leaves out"
    remedy = f"for a warm-up take {SHARDOPTS_WARM_UP}"
    problems = [Problem(key, found, "state that is saved: a resumed run would begin it anew", remedy) for key in keys]
    raise StateError("a wrapper of an optimizer has state that cannot be saved", problems)


def constructed(optimizer: Optimizer) -> Optimizer:
    """Returns what takes hooks: an optimizer, or the one inside another library's class; raises as `unwrapped`."""
    if isinstance(optimizer, Optimizer) and not is_constructed(optimizer):
        return cast(Optimizer, unwrapped(optimizer))
    return optimizer


def is_constructed(optimizer: Optimizer) -> bool:
    """Whether the constructor of torch's Optimizer has run, without which it takes no hooks.

    Some classes make the places for hooks of steps by themselves. Of these, torchrec's by names have their state. What
    has a `state` of its own around an optimizer, as timm's Lookahead, would get what is loaded for that optimizer.
    """
    own, hooks = vars(optimizer), _hooks_of_optimizers()
    if hooks <= own.keys() or hooks.isdisjoint(own):
        return hooks <= own.keys()
    by_names = isinstance(getattr(optimizer, "params", None), Mapping)
    return by_names or STATE not in own or len(_inner_of(optimizer)) != 1


@cache
def _hooks_of_optimizers() -> frozenset[str]:
    """Returns the names of the attributes in which torch's optimizers keep their hooks."""
    some = torch.optim.SGD([torch.empty(0, device="cpu")])
    return frozenset(name for name in vars(some) if name.endswith("hooks"))
