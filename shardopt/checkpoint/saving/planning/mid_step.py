"""Tells of a save between the backward passes of one step, as gradients are in no checkpoint.

Many loops leave the gradients of a step until they begin the next one. So a step notes what it has seen, and a save
compares: of the optimizer that stepped last, as the loss of one network may leave gradients in another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from shardopt.runtime.torch_private import running_hooks
from shardopt.sharding.view import local_tensors
from shardopt.state.trainer_optimizers import constructed

_MOST_LOOKED_AT = 64
_Last = tuple[Callable[[], Optimizer | None], Callable[[], Tensor | None], int]
"""Who stepped last, and with which version of which gradient."""

_NONE: _Last = (lambda: None, lambda: None, 0)
_log = logging.getLogger("shardopt.checkpoint")


class MidStep:
    """Looks for gradients that came after the last step, at the first saves of one run. On rank 0."""

    def __init__(self) -> None:
        self._looks = 16  # at so many saves from now on
        self._handles: list[Any] | None = None
        self._last = _NONE

    def look(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Logs a warning, once, of the optimizer that stepped last, if it has other gradients than at that step."""
        if not self._looks:
            return
        self._looks -= 1
        if self._handles is None and any(True for each in optimizers.values() for _ in _gradients(each)):
            hooked = map(running_hooks, map(constructed, optimizers.values()))
            self._handles = [each.register_step_post_hook(self._after_step) for each in hooked]
        if (late := self._late()) is not None:
            self._looks = 0
            _log.warning(
                "%s has gradients of a backward after its last step, and gradients are not saved: if its next step "
                "adds to them, a resumed run would lack them. Save after a step, and not between the micro-batches of "
                "one [optimizer-state]",
                next(key for key, each in optimizers.items() if constructed(each) is late),
            )
        if not self._looks:
            for each in self._handles or ():
                each.remove()

    def _late(self) -> Optimizer | None:
        """Returns the optimizer that stepped last, if it has got gradients since then."""
        optimizer, gradient, version = self._last
        own = optimizer()
        found = None if own is None else next(_gradients(own), None)
        if own is None or found is None or (found is gradient() and _version_of(found) == version):
            return None
        # Zeros are left by zero_grad; what is not finite by a step that a GradScaler has left out.
        here = [local for each in _gradients(own) for local in local_tensors(each)]
        return own if here[0].any() and all(each.isfinite().all() for each in here) else None

    def _after_step(self, optimizer: Optimizer, *unused: Any) -> None:
        with suppress(Exception):  # a line of rank 0 alone is no reason to end a training
            found = next(_gradients(optimizer), None)
            self._last = _NONE if found is None else (ref(optimizer), ref(found), _version_of(found))


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields the gradients of the first parameters of an optimizer that have any."""
    params = (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)
    return (each.grad for each in islice(params, _MOST_LOOKED_AT) if each.grad is not None)


def _version_of(gradient: Tensor) -> int:
    """Returns a number that rises with each addition: to a DTensor, or by `fully_shard` to its local tensor."""
    return gradient._version + sum(local._version for local in local_tensors(gradient))
