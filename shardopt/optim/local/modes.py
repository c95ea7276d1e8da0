"""Runs steps and makes state outside of the program's modes: autocast, a default device, inference mode.

Computed in 16 bits a step would be another one; a counter on a default device (meta, say) would have no number; and
state that is made in inference mode could never be changed outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

from shardopt.runtime.torch_private import has_modes, out_of_inference_mode

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CallersModes:
    """Suspends the caller's modes while it is open; gradients stay unrecorded if they were."""

    def __init__(self) -> None:
        self._device = torch.get_default_device()
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._ended = ExitStack()

    def __enter__(self) -> CallersModes:
        self._ended.enter_context(out_of_inference_mode())
        if self._device.type != "cpu":
            self._ended.enter_context(torch.device("cpu"))
        for kind, dtype in self._autocast:
            self._ended.enter_context(torch.autocast(kind, dtype, enabled=False))
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.close()

    def call(self, closure: Callable[[], Result]) -> Result:
        """Calls a function of the caller's, with the autocast and default device that it expects."""
        with ExitStack() as again:
            again.enter_context(self._device)
            for kind, dtype in self._autocast:
                again.enter_context(torch.autocast(kind, dtype))
            return closure()


def step_in_own_modes(step: Callable[Arguments, Any]) -> Callable[Arguments, Any]:
    """Makes a method `step(closure)` run outside of the caller's modes, and the closure within them."""

    @wraps(step)
    def run(*args: Arguments.args, **options: Arguments.kwargs) -> Any:
        if not has_modes():
            return step(*args, **options)
        with CallersModes() as modes:
            given = [partial(modes.call, each) if callable(each) else each for each in args]
            named = {name: partial(modes.call, each) if callable(each) else each for name, each in options.items()}
            return cast(Callable[..., Any], step)(*given, **named)

    return run


def in_own_modes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Makes a function run outside of the caller's modes."""

    @wraps(function)
    def run(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not has_modes():
            return function(*args, **options)
        with CallersModes():
            return function(*args, **options)

    return run
