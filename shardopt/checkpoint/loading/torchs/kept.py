"""Has torch's optimizers keep what their own load would replace or cast: their group dicts, and the dtypes of state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.runtime.torch_private import around_loads
from shardopt.state.containers import attributes_of, entries_of
from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import PARAM_GROUPS, STATE
from shardopt.state.state import PartialStateful

STEP = "step"
"""An entry of whose dtype torch takes care itself."""
_FEW = 64
"""Of as many entries a container shows whether it has optimizers; one with data may have millions."""
_FEW_WITHIN = 16
"""Of as many a container within another one shows it."""
_DEPTH = 3
"""So many containers and objects may be around an optimizer, each within the next."""


@contextmanager
def keeping_groups_and_dtypes(loaded: Any) -> Iterator[None]:
    """Has torch's optimizers keep their groups and the dtypes of state in the load of an object; keyed ones do so.

    Group dicts, and the list of them, others may share (SAM, Lookahead), or a loop may hold one; what is set in a
    replaced dict has no effect. An optimizer keeps them in `__setstate__`, before anything else gets the dicts that its
    load has made. One that is not found within another has new dicts, and the other gets them from it, as without this.

    Dtypes of moments in fp32, counts and masks are cast to those of the parameters by torch. Where the optimizer's own
    load goes on, or a hook of the program's runs, state has its dtypes already.
    """
    with ExitStack() as after_load:
        for each in _with_inner(loaded) if _may_load_others(loaded) else ():
            if isinstance(loaded, Optimizer):
                vars(each)["__setstate__"] = partial(_set_state, each)  # by which loads end, torch's and others'
                after_load.callback(_by_class_again, each)
            if isinstance(each, Optimizer) and not isinstance(each, PartialStateful):
                given: dict[str, Any] = {}
                for hook in around_loads(each, partial(_note, given), partial(_put_back, given)):
                    after_load.callback(hook.remove)
        yield


def _may_load_others(loaded: Any) -> bool:
    """Whether the load of an object may be one of torch's optimizers, or call one: neither keyed ones nor modules do.

    A module may whose class loads extra state.
    """
    if isinstance(loaded, Optimizer):
        return not isinstance(loaded, PartialStateful)
    own = (getattr(getattr(loaded, name, None), "__func__", None) for name in ("load_state_dict", "set_extra_state"))
    return hasattr(loaded, "__dict__") and tuple(own) != (Module.load_state_dict, Module.set_extra_state)


def _note(given: dict[str, Any], _: Optimizer, state_dict: Mapping[str, Any]) -> None:
    given.clear()  # it may load several times
    given.update(state_dict)


def _put_back(given: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Puts given state where a load has cast it; parameters go by their numbers in the given groups, as in the load."""
    numbers, parameters = (
        chain.from_iterable(group[PARAMS] for group in groups)
        for groups in (given[PARAM_GROUPS], optimizer.param_groups)
    )
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in given[STATE] and parameter in optimizer.state:
            optimizer.state[parameter] = _as_given(optimizer.state[parameter], given[STATE][number])


def _as_given(loaded: Any, given: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(given, Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(given, dict):
        own = given.keys() - {STEP}
        return {key: _as_given(each, given[key]) if key in own else each for key, each in loaded.items()}
    if isinstance(loaded, list | tuple) and type(loaded) is type(given) and len(loaded) == len(given):
        return type(given)(map(_as_given, loaded, given))
    return given if isinstance(given, str) else loaded  # of which torch's load makes the text of a generator


def _by_class_again(optimizer: Optimizer) -> None:
    vars(optimizer).pop("__setstate__", None)  # asked for now: a load may replace the dict of attributes


def _set_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Sets the state of an optimizer as its `__setstate__` does, with the new groups' values in its own group dicts."""
    finds_them = hasattr(type(optimizer), PARAM_GROUPS)  # by a property
    kept: Any = () if finds_them else getattr(optimizer, PARAM_GROUPS, ())
    new: Any = state.get(PARAM_GROUPS)
    old: list[dict[str, Any]] | None = None
    before: list[dict[str, Any]] = []
    as_many = isinstance(kept, list) and isinstance(new, list) and len(kept) == len(new)
    if as_many and {*map(id, kept)}.isdisjoint(map(id, new)):  # else it keeps them itself
        if PARAM_GROUPS in vars(optimizer):
            before = [dict(group) for group in kept]
            vars(optimizer)[PARAM_GROUPS] = old = [*map(dict, before)]  # a class may read what it had
        for group, values in zip(kept, new, strict=True):
            group.clear()
            group.update(values)
        state = {**state, PARAM_GROUPS: kept}
    failed = True
    try:
        type(optimizer).__setstate__(optimizer, state)
        failed = False
    finally:
        was_set = vars(optimizer).get(PARAM_GROUPS) is not old
        if old is not None and not was_set:  # by the class, which may write there
            vars(optimizer)[PARAM_GROUPS] = kept
            _take_written(optimizer, kept, [] if failed else before, old)


def _take_written(
    optimizer: Optimizer, kept: list[Any], before: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]]
) -> None:
    """Gives group dicts, which have loaded options, what a class that has not taken these has written instead.

    One that has written nothing has had another optimizer take them, with which it shares its dicts.

    Args:
        before: the options of each group before; none where it has failed, so that all go back.
        old: what the class has had as its groups.
    """
    written: list[dict[str, Any]] = [
        {name: value for name, value in group.items() if name not in had or value is not had[name]}
        for group, had in zip(old, before or [{}] * len(old), strict=False)
    ]
    if before and not any(written) and len(old) == len(before):
        return
    own = {*map(id, kept)} if before else set()
    shares = any(id(group) in own for each in _with_inner(optimizer)[1:] for group in each.param_groups)
    for group, values, changes in zip(kept, old, written, strict=False):
        if not shares:
            group.clear()
        group.update(changes if shares else values)
    kept[len(old) :] = []
    kept += old[len(kept) :]


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer, and those that it has as attributes or in containers and objects that are attributes.

    Another object may be given too.
    """
    found, seen = [optimizer], {id(optimizer)}
    for each in found:  # it grows
        for inner in chain.from_iterable(_optimizers_in(value, _DEPTH) for value in [*vars(each).values()]):
            if id(inner) not in seen:
                seen.add(id(inner))
                found.append(inner)
    return found


def _optimizers_in(value: Any, depth: int) -> list[Optimizer]:
    """Returns an optimizer itself, or those in a container or an object of the program's."""
    try:
        if isinstance(value, Optimizer):
            return [value]
    except ReferenceError:  # a weak proxy of what is gone, somewhere in the program's objects
        return []
    within = entries_of(value) if depth else None
    entries = attributes_of(value) if depth and within is None else within
    if entries is None:
        return []
    few = _FEW if within is None or depth == _DEPTH else _FEW_WITHIN
    first = [*islice(entries, few)]  # at once, as a thread may add some
    found = [inner for each in first for inner in _optimizers_in(each, depth - 1)]
    return found + [inner for each in (entries if found else ()) for inner in _optimizers_in(each, depth - 1)]
