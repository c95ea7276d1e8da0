"""All private API that shardopt uses of torch.optim and of torch's modes; for gradients see `torch_gradients.py`.

Each is present in torch 2.11, 2.12, 2.13 and 2.15; a test of each fails by name where a later torch differs.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache, wraps
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.runtime.signatures import signature

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def not_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Marks a function that torch.compile must not compile, with all that it calls.

    Unlike `torch.compiler.disable` it does not load the compiler, which takes seconds, before the first call.
    """
    left_out: Callable[Arguments, Result] = torch._disable_dynamo(function)  # type: ignore[attr-defined]  # not exported
    return left_out


def step_without_hooks(optimizer: type[Optimizer]) -> Callable[..., Any]:
    """Returns the class's `step` without the wrapper that fires step hooks and the profiler's.

    An optimizer that is driven by another must be stepped with this one: the outer optimizer has run the hooks that
    its user sees, and torch's global hooks would run a second time with an optimizer that nobody knows.
    """
    step = optimizer.step
    while getattr(step, "hooked", False):  # twice where torch.compile, once it is loaded, has put another around it
        step = step.__wrapped__  # type: ignore[attr-defined]  # functools.wraps sets it on every hooked step
    return step


def without_hooks(step: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Marks a `step` that torch's Optimizer must not wrap, as what it calls fires the step hooks."""
    step.hooked = True  # type: ignore[attr-defined]  # by which torch knows one that is wrapped already
    return step


def step_nested(optimizer: Optimizer) -> Any:
    """Steps an optimizer within another optimizer's step, without a closure.

    The hooks that were registered on it run; torch's global ones do not, as they run once for what the user stepped.

    Raises:
        RuntimeError: a hook returns neither None nor (args, kwargs); whatever a hook or the step raises.
    """
    args, kwargs = before_step(optimizer)
    result = step_without_hooks(type(optimizer))(*args, **kwargs)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, args, kwargs)
    # A schedule that is attached to this optimizer watches `optimizer.step`, and warns where it finds this unset.
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules set it
    return result


def before_step(optimizer: Optimizer) -> tuple[Any, Any]:
    """Fires the hooks of `register_step_pre_hook`, but not torch's global ones.

    Returns:
        The arguments of `step`, the optimizer first, as the hooks have left them.

    Raises:
        RuntimeError: a hook returns neither None nor (args, kwargs); whatever a hook raises.
    """
    args: Any = (optimizer, None)  # torch's contract lets a `step` have no default for its closure
    kwargs: Any = {}
    for before in optimizer._optimizer_step_pre_hooks.values():
        changed = before(optimizer, args, kwargs)
        if changed is not None:
            if not (isinstance(changed, tuple) and len(changed) == 2):
                raise RuntimeError(f"a step pre-hook must return None or (args, kwargs), but returned {changed!r}")
            args, kwargs = changed
    return args, kwargs


def running_hooks(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer whose `step` runs the hooks that are registered on it from now on.

    torch's constructor sees to that for its class. Classes that leave it out, as torchrec's `KeyedOptimizerWrapper`
    does, take hooks and never run them. The step of this one object is wrapped then: that of the class would also run
    within the steps of its subclasses, and so twice. Where a program has put a function of its own around the step of a
    class that runs them, they run within that.
    """
    step = optimizer.step
    if not (getattr(step, "hooked", False) or getattr(type(optimizer).step, "hooked", False)):
        inner = getattr(step, "__func__", None)  # a schedule of torch's has put a function of no object in its place

        @wraps(step)
        def hooked_step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs) if inner is None else inner(self, *args, **kwargs)

        hooked = without_hooks(Optimizer.profile_hook_step(hooked_step))
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]  # of this object alone
    return optimizer


def remove_step_hooks(optimizer: Optimizer, *hooks: Callable[..., Any]) -> None:
    """Removes step hooks from an optimizer, as often as they were registered; passes over the others."""
    for registered in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for number in [number for number, hook in registered.items() if hook in hooks]:
            del registered[number]


def is_torchs(attribute: str) -> bool:
    """Whether an attribute of an optimizer is torch's: hooks, and what schedules put around `step`.

    These belong to the instance: torch leaves them out of copies and pickles, and makes new ones there.
    """
    return attribute.startswith("_optimizer_") or attribute in (
        "step",
        "_opt_called",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
    )


def take_torchs_attributes(optimizer: Optimizer) -> None:
    """Gives an optimizer what torch's constructor sets: its hooks, and the profiling of steps.

    For one that has its state, groups and defaults elsewhere, and no constructor of torch's that would set them.
    """
    made = vars(_Blank([{"params": []}], {}))
    vars(optimizer).update({name: value for name, value in made.items() if is_torchs(name)})
    optimizer._patch_step_function()


class _Blank(Optimizer):
    """An optimizer without parameters."""

    def step(self, closure: Any = None) -> Any:
        """Does nothing."""


def is_scheduled(optimizer: Optimizer) -> bool:
    """Whether a schedule of torch's was made for this optimizer: each counts its steps."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def note_steps_for_schedules(seen: Optimizer, optimizer: Optimizer) -> None:
    """Makes steps visible to a schedule that was made for another optimizer, which would warn that there are none.

    Args:
        seen: the one that schedules were made for; nothing is done if there are none.
        optimizer: that takes its place, without schedules of its own.
    """
    if not is_scheduled(seen):
        return
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        own = reference()
        assert own is not None  # it is called through itself
        own._opt_called = True  # type: ignore[attr-defined]  # torch's schedules set it
        return step(own, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's
    optimizer.step = noted  # type: ignore[method-assign]  # of this instance


def lazy_state(optimizer: Optimizer, group: Mapping[str, Any], local: Tensor) -> dict[str, Any]:
    """Makes the state that `optimizer` has for `local` after its first gradient, without a step.

    `optimizer.state` and `local.grad` are as before when this returns or raises; while it runs there is one gradient of
    zeros of the size of `local`.

    Args:
        optimizer: of a class that has torch's `_init_group`.
        group: the options that `local` has; its "params" are ignored.
        local: a tensor that it steps on, with state or without.
    """
    gradient, state, group = local.grad, optimizer.state.get(local), {**group, "params": [local]}
    try:
        optimizer.state.pop(local, None)
        local.grad = torch.zeros_like(local)
        with torch.no_grad():
            gather_lists(optimizer, group)  # the lists are thrown away
        return dict(optimizer.state.get(local, {}))
    except KeyError:  # torch 2.11 looks for Adagrad's state, which its constructor makes
        if not isinstance(optimizer, Adagrad):
            raise
        initial = optimizer.defaults["initial_accumulator_value"]
        return dict(Adagrad([group], initial_accumulator_value=initial).state[local])
    finally:
        local.grad = gradient
        optimizer.state.pop(local, None)  # what was made, or half made
        if state is not None:
            optimizer.state[local] = state


def can_make_lazy_state(optimizer: Optimizer) -> bool:
    """Whether `lazy_state` works for an optimizer."""
    return hasattr(optimizer, "_init_group")


def makes_lazy_state_as_torch(optimizer: Optimizer) -> bool:
    """Whether a class makes state by torch's own `_init_group`, so that `lazy_state` works."""
    init_group = getattr(optimizer, "_init_group", None)
    return _is_of_torch_optim(getattr(init_group, "__func__", init_group))


def gathers_as_torch(optimizer: Optimizer) -> bool:
    """Whether a class's step is torch's own, and gets everything that it steps with from torch's `_init_group`.

    That fills lists: first of the tensors that have a gradient, then of their gradients, then of their state, which the
    step changes in place, but for entries that are None.
    """
    return _is_of_torch_optim(step_without_hooks(type(optimizer))) and makes_lazy_state_as_torch(optimizer)


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Whether a class's step is torch's own, and its state is what torch's class makes, there or in `_init_group`."""
    if hasattr(optimizer, "_init_group") and not makes_lazy_state_as_torch(optimizer):
        return False
    return _is_of_torch_optim(step_without_hooks(type(optimizer)))


@lru_cache
def _is_of_torch_optim(function: Any) -> bool:
    """Whether a function is torch.optim's, wrapped at most by torch itself, as torch.compile does once it is loaded.

    Not by `__module__` alone: what functools wraps claims to be from where the wrapped function is.
    """
    if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
        return False
    inner = getattr(function, "__wrapped__", None)
    return function.__module__.startswith("torch.optim.") if inner is None else _is_of_torch_optim(inner)


def gather_lists(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[list[list[Any]], Any]:
    """Gathers the lists that torch's step passes to its kernels for a group.

    Returns them, and what `_init_group` returns.

    Makes the state of those who have a gradient for the first time. To be called as a step is, without autograd.

    Args:
        optimizer: of a class that has torch's `_init_group`.
        group: with "params".
    """
    init_group = optimizer._init_group  # type: ignore[attr-defined]  # not in Optimizer, but in each class that is asked
    plain = getattr(init_group, "__func__", init_group)
    lists: list[list[Any]] = [[] for _ in range(_arguments_of(plain) - (1 if plain is init_group else 2))]
    if optimizer.defaults.get("differentiable"):
        with torch.enable_grad():
            return lists, init_group(group, *lists)
    return lists, init_group(group, *lists)


@lru_cache
def _arguments_of(function: Callable[..., Any]) -> int:
    return len(signature(function).parameters)


def step_with_lists(
    optimizer: Optimizer, hand_over: Callable[[dict[str, Any], tuple[list[Any], ...]], Any] | None
) -> None:
    """Steps an optimizer without hooks, with lists that were gathered ahead.

    Args:
        optimizer: of a class that `gathers_as_torch`, if it has.
        hand_over: fills the lists of a group, and returns what `_init_group` would; None where that is asked itself.
    """
    step = step_without_hooks(type(optimizer))
    if hand_over is None:
        step(optimizer)
        return
    # On the instance, where it comes before the class's; mypy knows it of neither.
    optimizer._init_group = lambda group, *lists: hand_over(group, lists)  # type: ignore[attr-defined]  # see above
    try:
        step(optimizer)
    finally:
        del optimizer._init_group  # type: ignore[attr-defined]  # as above


@cache
def has_fused_kernel(name: str, device_type: str) -> bool:
    """Whether torch has a fused step of its optimizer of that name for a kind of device.

    Its list of devices names backends from outside in any case; the dispatcher says whether they have a kernel.
    """
    listed = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    key = torch._C._dispatch_key_for_device(device_type)
    kernel = f"_fused_{name.lower()}_"
    if device_type not in listed or not hasattr(torch.ops.aten, kernel):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{kernel}", key))


def before_state_dict(optimizer: Optimizer) -> None:
    """Fires the hooks that users registered with `register_state_dict_pre_hook`."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Fires the hooks of `register_state_dict_post_hook`; returns the state that they made."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def changes_what_is_loaded(optimizer: Optimizer) -> bool:
    """Whether there are hooks of `register_load_state_dict_pre_hook`."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks)


def before_load_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Fires the hooks of `register_load_state_dict_pre_hook` on a shallow copy; returns the result."""
    offered = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, offered)
        offered = offered if changed is None else changed
    return offered


def around_loads(
    optimizer: Optimizer, before: Callable[[Optimizer, dict[str, Any]], None], after: Callable[[Optimizer], None]
) -> Iterator[RemovableHandle]:
    """Has torch's load call one function behind the hooks before it, and one ahead of those after it.

    Yields what removes them; nothing where torch's constructor has not run, so that there are no hooks.
    """
    if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        yield optimizer.register_load_state_dict_pre_hook(before)
        yield optimizer.register_load_state_dict_post_hook(after, prepend=True)


def after_load_state_dict(optimizer: Optimizer) -> None:
    """Fires the hooks of `register_load_state_dict_post_hook`."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def is_torchs_getter_asking() -> bool:
    """Whether torch's `get_optimizer_state_dict` or a similar function called the caller's caller, an optimizer.

    They take every optimizer to go by position, and hand it nothing that tells where they are from.
    """
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame and frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


@contextmanager
def out_of_inference_mode() -> Iterator[None]:
    """Suspends the caller's `torch.inference_mode` while it is open; gradients stay unrecorded if they were.

    Tensors that are made in that mode, such as state or host memory that is kept, can never be changed outside of it.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield


def changeable(targets: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Returns a context in which these tensors may be changed: inference mode if one was made in it, else as it is."""
    return torch.inference_mode() if any(map(torch.is_inference, targets)) else nullcontext()


def has_modes() -> bool:
    """Whether inference mode, autocast or a default device is set. Takes 0.3 µs."""
    set_by_function = torch._C._len_torch_function_stack() > 0
    return set_by_function or torch._C._is_any_autocast_enabled() or torch.is_inference_mode_enabled()


def in_eval(module: torch.nn.Module) -> list[str] | None:
    """Returns the names of parts of a module whose leaves are all in `eval()`; None if all of its own are."""
    found, trains = list[str](), False
    for name, child in module._modules.items():
        if child is None:
            continue
        within = in_eval(child) if child._modules else [] if child.training else None  # no call for most
        if within is None:
            found.append(name)
            continue
        trains = True
        if within:
            found += [f"{name}.{each}" for each in within]
    return found if trains or (not found and module.training) else None
