"""The private parts of torch.optim that shardopt leans on, all of them in this one place.

Each is present and behaves alike in torch 2.11 to 2.13; a test of each fails by name where a later torch differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def step_without_hooks(optimizer: type[Optimizer]) -> Callable[..., Any]:
    """The class's `step` under the wrapper that fires step hooks and the profiler's.

    An optimizer that is driven by another must be stepped with this one: the outer optimizer has run the hooks that
    its user sees, and torch's global hooks would run a second time with an optimizer that nobody knows.
    """
    step = optimizer.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]  # functools.wraps sets it on every hooked step


def lazy_state(optimizer: Optimizer, group: Mapping[str, Any], leaf: Tensor) -> dict[str, Any]:
    """The state that `optimizer` would make for `leaf` at its first gradient, without a step.

    `optimizer.state` and `leaf.grad` are as before when this returns; while it runs there is one gradient of zeros
    of the size of `leaf`.

    Args:
        optimizer: of a class that has torch's `_init_group`.
        group: the options that `leaf` has; its "params" are ignored.
        leaf: a tensor without state in `optimizer`.
    """
    init_group = optimizer._init_group  # type: ignore[attr-defined]  # not in Optimizer, but in each class that is asked
    # After the group, _init_group takes lists that a step would hand to its kernels; they are thrown away.
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(init_group).parameters)[1:]]
    gradient = leaf.grad
    leaf.grad = torch.zeros_like(leaf)
    try:
        init_group({**group, "params": [leaf]}, *lists)
    finally:
        leaf.grad = gradient
    return dict(optimizer.state.pop(leaf, {}))


def can_make_lazy_state(optimizer: Optimizer) -> bool:
    """Whether `lazy_state` can be called."""
    return hasattr(optimizer, "_init_group")


def before_state_dict(optimizer: Optimizer) -> None:
    """Fires the hooks that its users registered with `register_state_dict_pre_hook`."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Fires the hooks of `register_state_dict_post_hook`, and gives what they made of the state."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def before_load_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Fires the hooks of `register_load_state_dict_pre_hook` on a shallow copy, and gives what they made of it."""
    offered = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, offered)
        offered = offered if changed is None else changed
    return offered


def after_load_state_dict(optimizer: Optimizer) -> None:
    """Fires the hooks of `register_load_state_dict_post_hook`."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
