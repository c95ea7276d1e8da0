"""The state that optimizers will have after their first step, made for an estimate and dropped again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.errors import AlgorithmError
from shardopt.runtime.torch_private import lazy_state, makes_lazy_state_as_torch
from shardopt.state.flatten import flatten
from shardopt.state.paths import STATE, join
from shardopt.state.state import FlatState, Tied, UnsteppedStateful


@contextmanager
def with_first_state(app: Mapping[str, Any], tied: Tied | None) -> Iterator[tuple[FlatState, tuple[str, ...]]]:
    """Yields the flat form of an app as it will be after the first step, while its optimizers have that state.

    Every trained parameter gets state, as if it had a gradient. Keyed optimizers make it by `init_state`, on the device
    of the parameters. State of torch's own is made on the meta device, and takes no memory. All that was made is
    dropped afterwards. Also yields the keys of optimizers whose state is not counted: nothing can make it before a
    step.

    Args:
        app, tied: as for `save`.
    """
    flat = flatten(app, tied)
    uncounted: list[str] = []
    with ExitStack() as made:
        is_changed = False
        for target in flat.targets:
            if isinstance(target.object, Optimizer):
                known = _make(target.object, target.state, made)
                is_changed |= known is not False
                uncounted += [join(target.path)] if known is None else []
        yield (flatten(app, tied) if is_changed else flat), tuple(uncounted)


def _make(optimizer: Optimizer, state: Mapping[str, Any], made: ExitStack) -> bool | None:
    """Makes an optimizer's state, to be dropped by `made`. Whether there was some to make; None if it cannot be."""
    if isinstance(optimizer, UnsteppedStateful):
        before, is_known = {*state.get(STATE, ())}, True

        def new() -> set[str]:
            return {*optimizer.state_dict()[STATE]} - before

        # Before there is any: it may end in the middle, as where the device has no memory left.
        made.callback(lambda: optimizer.drop_state(new()))
        try:
            optimizer.init_state()  # type: ignore[call-arg]  # of all: an `init_state` without names
        except AlgorithmError:  # of some part it is made inside of the step
            is_known = False
        return bool(new()) if is_known else None
    absent = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    ]
    if not absent:
        return False
    if not makes_lazy_state_as_torch(optimizer):
        return None
    new_here = [(parameter, _state_on_meta(optimizer, group, parameter)) for group, parameter in absent]
    for parameter, state_of in new_here:
        if state_of:
            made.callback(optimizer.state.pop, parameter, None)
            optimizer.state[parameter] = state_of
    return any(state_of for _, state_of in new_here)


def _state_on_meta(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        twin = torch.empty_like(parameter, device="meta").requires_grad_()
    state = lazy_state(optimizer, group, twin)
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
        state.setdefault("momentum_buffer", twin.detach())  # which torch makes inside of the step, of the gradient
    return state
