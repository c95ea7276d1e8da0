"""Optimizers that other libraries have wrapped in classes of their own, or that are within a program's own objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain, islice, pairwise
from typing import Any, cast
from weakref import ProxyTypes

import torch
from torch.optim import Optimizer

from shardopt.errors import Problem, StateError
from shardopt.state.containers import attributes_of, entries_of
from shardopt.state.names import ParameterNames
from shardopt.state.paths import PARAM_GROUPS, STATE, Path, join
from shardopt.state.state import CheckedStateful, Stateful, like

SHARDOPTS_WARM_UP = "shardopt's WarmupOptimizer (docs/integrations/torchrec.md shows it around fused tables)"

_FEW = 64
"""Of as many entries a container shows whether it has optimizers; one with data may have millions."""
_FEW_WITHIN = 16
"""Of as many a container within another one shows it."""
_DEPTH = 3
"""So many containers and objects may be around an optimizer, each within the next."""

_NO_PARTS: tuple[type, ...] = (Optimizer, *ProxyTypes)
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


class StateWithin(dict[str, Any]):
    """The state of an optimizer in the state of an object around it: an object of its own, which a load fills.

    Args:
        state: as the optimizer gave it, maybe with more beside it.
        optimizer: maybe in a trainer's class.
        names: of parameters in the object.
    """

    __slots__ = ("names", "optimizer")

    def __init__(self, state: Mapping[str, Any], optimizer: Optimizer, names: ParameterNames) -> None:
        super().__init__(state)
        self.optimizer, self.names = optimizer, names

    def __copy__(self) -> StateWithin:
        return StateWithin(self, self.optimizer, self.names)

    def __reduce__(self) -> Any:  # the object around it may copy or pickle what it gets, which is no copy of parameters
        return dict, (dict(self),)

    def state_dict(self) -> StateWithin:
        return self

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = dict(state)
        self.clear()
        self.update(state)


def state_with_optimizers(node: Stateful, path: Path = ()) -> Any:
    """Returns the state of an object, with a `StateWithin` in place of each state that an optimizer in it has given.

    So optimizers within trainers, engines and schedulefree's wrapper get names for their parameters, and state to load
    into. Their states are found by what they give while the object is asked. Copies of alike ones are taken in the
    order in which they were asked for: before the first step, as in a new process, nothing else tells which is which.

    Raises:
        StateError: there are copies in another order.
    """
    within = [] if isinstance(node, CheckedStateful | StateWithin) else optimizers_within(node)
    left: dict[int, tuple[Optimizer, Any]] = {}
    with ExitStack() as after:
        for each in within:
            _note_given(each, left, after)
        state = node.state_dict()
    if not left:
        return state
    same, names = set[int](), ParameterNames(_parts_of(node))

    def of_same(part: dict[str, Any]) -> StateWithin | None:
        pair = left.get(id(part[STATE]))
        same.add(id(part[STATE]))
        return StateWithin(part, pair[0], names) if pair is not None and _has_all(*pair, part) else None

    def of_copied(part: dict[str, Any]) -> StateWithin | None:
        others = [key for key, pair in left.items() if key not in same and _has_all(*pair, part)]
        alike = [key for key in others if _form_of({**part, **left[key][1], STATE: 0}) == _form_of({**part, STATE: 0})]
        found = next((key for key in alike if _form_of(left[key][1][STATE]) == _form_of(part[STATE])), None)
        if found is None:
            return None
        if found != alike[0]:
            actual = f"copies of the states of {len(alike)} optimizers, in another order than it asks for them"
            remedy = "return what their state_dict() gives, without a copy"
            problem = Problem(join(path) or "app", actual, "the states themselves", remedy)
            raise StateError("which optimizer has which state is not known", [problem])
        return StateWithin(part, left.pop(found)[0], names)

    return _with_places(_with_places(state, of_same), of_copied)


def _parts_of(node: Any, depth: int = 1) -> dict[str, Any]:
    """Returns the attributes of an object by name, and those of objects that are attributes; no containers of many."""
    parts = {name: own for name, own in [*vars(node).items()] if not issubclass(type(own), _NO_PARTS)}
    few = {name: value for name, value in parts.items() if len([*islice(entries_of(value) or (), _FEW)]) < _FEW}
    inner = {name: attributes_of(value) is not None and depth > 0 for name, value in few.items()}
    return {name: _parts_of(value, depth - 1) if inner[name] else value for name, value in few.items()}


def _note_given(optimizer: Optimizer, given: dict[int, tuple[Optimizer, Any]], after: ExitStack) -> None:
    """Notes what an optimizer gives as its state, until `after` ends."""
    attributes, give = vars(optimizer), optimizer.state_dict
    before = {name: each for name, each in attributes.items() if name == "state_dict"}

    def noting(*arguments: Any, **options: Any) -> Any:
        own: Any = give(*arguments, **options)
        if isinstance(own, dict) and isinstance(own.get(STATE), dict):
            given[id(own[STATE])] = optimizer, own  # a wrapper's after that of what it wraps, which may be the same
        return own

    attributes["state_dict"] = noting
    after.callback(attributes.update, before)
    after.callback(attributes.pop, "state_dict", None)


def _with_places(state: Any, place: Callable[[dict[str, Any]], StateWithin | None]) -> Any:
    """Returns a state, with copies of the containers that have got a `StateWithin`."""
    if not isinstance(state, dict | list | tuple) or isinstance(state, StateWithin):
        return state
    if isinstance(state, dict) and isinstance(state.get(STATE), dict) and (own := place(state)) is not None:
        return own
    parts = state.items() if isinstance(state, dict) else enumerate(state)
    changed = {part: new for part, child in parts if (new := _with_places(child, place)) is not child}
    if not changed:
        return state
    if isinstance(state, tuple):
        return like(state, [changed.get(i, child) for i, child in enumerate(state)])
    copied: Any = copy.copy(state)
    for part, child in changed.items():
        copied[part] = child
    return copied


def _has_all(optimizer: Optimizer, own: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a state has all parts of an optimizer's own; keyed ones, which check it, take no others."""
    return own.keys() == state.keys() if isinstance(optimizer, CheckedStateful) else own.keys() <= state.keys()


def _form_of(state: Any) -> Any:
    """Returns a state with shapes in place of tensors, by which a copy is known."""
    if isinstance(state, Mapping):
        return {part: _form_of(child) for part, child in state.items()}
    if isinstance(state, list | tuple):
        return [*map(_form_of, state)]
    return state if isinstance(state, str | int | float) else getattr(state, "shape", type(state))


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


def optimizers_within(node: Any) -> list[Optimizer]:
    """Returns the optimizers that an object has as attributes, or in containers and objects that are, then theirs."""
    found, seen = [node], {id(node)}
    for each in found if hasattr(node, "__dict__") else ():  # it grows
        for inner in chain.from_iterable(_optimizers_in(value, _DEPTH) for value in [*vars(each).values()]):
            if id(inner) not in seen:
                seen.add(id(inner))
                found.append(inner)
    return found[1:]


def _optimizers_in(value: Any, depth: int) -> list[Optimizer]:
    """Returns an optimizer itself, or those in a container or an object of the program's."""
    if issubclass(type(value), Optimizer):  # by the type, as a weak proxy of what is gone answers nothing else
        return [value]
    within = entries_of(value) if depth else None
    entries = attributes_of(value) if depth and within is None else within
    if entries is None:
        return []
    few = _FEW if within is None or depth == _DEPTH else _FEW_WITHIN
    first = [*islice(entries, few)]  # at once, as a thread may add some
    found = [inner for each in first for inner in _optimizers_in(each, depth - 1)]
    return found + [inner for each in (entries if found else ()) for inner in _optimizers_in(each, depth - 1)]
