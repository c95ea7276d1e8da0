"""Has torch's optimizers keep what their own load would replace or cast: their group dicts, and the dtypes of state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.runtime.torch_private import around_loads
from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import PARAM_GROUPS, STATE
from shardopt.state.state import PartialStateful
from shardopt.state.trainer_optimizers import optimizers_within

STEP = "step"
"""An entry of whose dtype torch takes care itself."""


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
        for each in _optimizers_of(loaded):
            vars(each)["__setstate__"] = partial(_set_state, each)  # by which loads end, torch's and others'
            after_load.callback(_by_class_again, each)
            if not isinstance(each, PartialStateful):
                given: dict[str, Any] = {}
                for hook in around_loads(each, partial(_note, given), partial(_put_back, given)):
                    after_load.callback(hook.remove)
        yield


def _optimizers_of(loaded: Any) -> list[Optimizer]:
    """Returns the optimizers whose load that of an object may be, or call: none for keyed ones and modules.

    A module may call some if its class loads extra state.
    """
    if isinstance(loaded, Optimizer):
        return [] if isinstance(loaded, PartialStateful) else [loaded, *optimizers_within(loaded)]
    own = (getattr(getattr(loaded, name, None), "__func__", None) for name in ("load_state_dict", "set_extra_state"))
    return [] if tuple(own) == (Module.load_state_dict, Module.set_extra_state) else optimizers_within(loaded)


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
    shares = any(id(group) in own for each in optimizers_within(optimizer) for group in each.param_groups)
    for group, values, changes in zip(kept, old, written, strict=False):
        if not shares:
            group.clear()
        group.update(changes if shares else values)
    kept[len(old) :] = []
    kept += old[len(kept) :]
