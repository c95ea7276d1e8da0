"""One step of one group: local tensors stand in the place of the user's parameters, and have their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.optim.local.shards import BorrowedGrads, GroupShards, Shards
from shardopt.optim.local.step_cache import deciding_options, make_cache
from shardopt.torch_private import gather_lists, step_with_lists

Group = dict[str, Any]


class GroupStep:
    """A group that takes part in a step; `restore` leaves it as it was.

    Args:
        group: with the user's parameters.
        shards: of those.
    """

    def __init__(self, group: Group, shards: GroupShards) -> None:
        self.group, self.shards = group, shards
        self._before: Group = {name: group[name] for name in ("params", "fused") if name in group}
        # A cache is kept only where every parameter is sharded and has one local tensor.
        self._options = deciding_options(group) if shards.alike else ()
        self._borrowed = BorrowedGrads()
        self._gradients: list[Tensor | None] | None = None
        self.gradients_in_order = False
        """Whether in a step that repeats gradients are contiguous, and of the shape of their local tensors."""
        self.lists: list[list[Any]] | None = None
        """The lists that torch gathers of the group: local tensors with a gradient, gradients, then lists of their
        state, None where the step makes it. None before `gather`, and where torch does not gather ahead."""
        self.init_result: Any = None
        """The result of torch's `_init_group`."""
        self.chosen = False
        """Whether the group names no implementation, and "fused" was set for it."""
        self.repeats = False
        """Whether this step can go by the lists that were gathered in the last one."""

    def attach(self, follow: Callable[[Shards], None], takes_dense: bool) -> None:
        """Puts the local tensors into the group, with their gradients.

        Args:
            follow: called with shards whose local tensors may have been replaced, before their gradients are looked at.
            takes_dense: whether the algorithm steps with dense gradients.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        shards, kept = self.shards, self.shards.cache
        shards.cache = None
        self._gradients, self.gradients_in_order = shards.attach(self._borrowed, follow, takes_dense)
        self.group["params"] = shards.local_tensors
        if kept is not None and self._gradients is not None and kept.holds(self._options, self._gradients):
            self.repeats, shards.cache = True, kept

    def gather(self, optimizer: Optimizer) -> None:
        """Lets torch gather the lists that it steps with, which may make state; or takes those of the last step."""
        kept = self.shards.cache
        if self.repeats and kept is not None and self._gradients is not None:
            self.lists, self.init_result = kept.lists_with(self._gradients), kept.init_result
            return
        self.lists, self.init_result = gather_lists(optimizer, self.group)
        if self.shards.alike:
            self.shards.cache = make_cache(self._options, self.shards.local_tensors, self.lists, self.init_result)

    def fill(self, lists: Sequence[list[Any]]) -> Any:
        """Fills lists as torch's `_init_group` would in the step; returns what it would return."""
        assert self.lists is not None
        for each, own in zip(lists, self.lists, strict=True):
            each.extend(own)
        return self.init_result

    def restore(self) -> None:
        """Undoes `attach`, and options that were set in the group for the time of the step."""
        self.group.update(self._before)
        self._borrowed.restore()


def step_groups(optimizer: Optimizer, steps: Sequence[GroupStep]) -> None:
    """Takes a step of the optimizer, without hooks, on these groups, with the lists that they have gathered."""
    every = optimizer.param_groups
    by_group = {id(step.group): step for step in steps}
    ahead = any(step.lists is not None for step in steps)
    optimizer.param_groups = [step.group for step in steps]
    try:
        step_with_lists(optimizer, (lambda group, lists: by_group[id(group)].fill(lists)) if ahead else None)
    finally:
        optimizer.param_groups = every
