"""Finds the frozen parameters of optimizers: a save notes them, as no state says which they are.

A resumed run whose script forgets to freeze a layer again, or to unfreeze it, would train otherwise without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.checkpoint.saving.planning.app_tensors import names_of
from shardopt.sharding.gradients import is_moved_by_backward, requires_gradient
from shardopt.state.paths import PARAM_GROUPS, Path, join
from shardopt.state.state import FlatState


def is_untrained(parameter: Tensor) -> bool:
    """Whether nothing trains a parameter."""
    return not requires_gradient(parameter) and not is_moved_by_backward(parameter)


def members_of(path: Path, optimizer: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Yields each parameter of an optimizer: the key of its options, what a line may call it, and the parameter.

    Parameters without names have positions in their keys.
    """
    named = names_of(optimizer)
    if named is not None:
        yield from ((join((*path, PARAM_GROUPS, name)), name, each) for name, each in named.items())
        return
    all_of_them = (each for group in optimizer.param_groups for each in group["params"])
    for number, each in enumerate(all_of_them):
        yield join((*path, PARAM_GROUPS, str(number))), f"one of shape {tuple(each.shape)}", each


def frozen_in(flat: FlatState) -> list[str]:
    """Returns the keys of the frozen parameters of an app's optimizers, as `members_of`. Local."""
    optimizers = [(each.path, each.object) for each in flat.targets if isinstance(each.object, Optimizer)]
    return [
        key
        for path, optimizer in optimizers
        if not all(requires_gradient(each) for group in optimizer.param_groups for each in group["params"])
        for key, _, own in members_of(path, optimizer)
        if is_untrained(own)
    ]
