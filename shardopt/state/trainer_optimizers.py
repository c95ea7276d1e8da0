"""Optimizers that trainers of other libraries have wrapped in classes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch.optim import Optimizer

from shardopt.errors import Problem, StateError
from shardopt.state.paths import STATE, Path, join
from shardopt.state.state import CheckedStateful, Stateful

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
    while isinstance(node, Optimizer) and not is_constructed(node):
        inner = _inner_of(node)
        _refuse_unlike_one(node, inner, path)
        _refuse_lost(node, inner[0], path)
        node = inner[0]
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
            except AttributeError as error:  # of its base class, as that of torch_optimizer's Lookahead
                _refuse_kept(wrapper, [f"state that its state_dict() does not give ({error})"], path)
        more = own.keys() - state.keys() if isinstance(own, dict) else set()
        if more and own.keys() >= state.keys() and not isinstance(inner, CheckedStateful):
            return own, wrapper
        if more := more or _own_entries(vars(wrapper).get(STATE), inner):
            _refuse_kept(wrapper, sorted(map(str, more)), path)
    return state, inner


def layers_of(node: Any) -> Iterator[Any]:
    """Yields a wrapper that `unwrapped` takes, what it wraps, and so on to the optimizer itself."""
    yield node
    while isinstance(node, Optimizer) and not is_constructed(node):
        node = _inner_of(node)[0]
        yield node


def _inner_of(wrapper: Any) -> list[Optimizer]:
    """Returns the optimizers that a wrapper has as attributes."""
    return list({id(each): each for each in vars(wrapper).values() if isinstance(each, Optimizer)}.values())


def _own_entries(own: Any, inner: Any) -> set[Any]:
    """Returns the names in a wrapper's own state by parameter that the optimizer's has not; it may be an older dict."""
    states = [each.values() if isinstance(each, Mapping) else () for each in (own, inner.state)]
    has, known = ({name for each in state if isinstance(each, Mapping) for name in each} for state in states)
    return has - known


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
    """Whether the constructor of torch's Optimizer has run, without which it takes no hooks."""
    return not _hooks_of_optimizers().isdisjoint(vars(optimizer))


@cache
def _hooks_of_optimizers() -> frozenset[str]:
    """Returns the names of the attributes in which torch's optimizers keep their hooks."""
    some = torch.optim.SGD([torch.empty(0, device="cpu")])
    return frozenset(name for name in vars(some) if name.endswith("hooks"))
