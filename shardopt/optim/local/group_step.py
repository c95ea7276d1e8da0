"""One step of one group: its local tensors stand where the user's parameters do, and have their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.optim.local.shards import BorrowedGrads, GroupShards, Shards
from shardopt.optim.local.step_cache import deciding_options, gathered
from shardopt.torch_private import gather_lists, step_with_lists

Group = dict[str, Any]


class GroupStep:
    """A group that takes part in a step; `restore` leaves it as it was.

    Args:
        group: with the user's parameters.
        leaves: of those.
    """

    def __init__(self, group: Group, leaves: GroupShards) -> None:
        self.group, self.leaves = group, leaves
        self._seen: Group = {name: group[name] for name in ("params", "fused") if name in group}
        # What is gathered is kept for leaves of one kind only.
        self._options = deciding_options(group) if leaves.alike else ()
        self._loan = BorrowedGrads()
        self._gradients: list[Tensor | None] | None = None
        self.gradients_in_order = False
        """Whether in a step that repeats gradients are contiguous, and of the shape of their leaves."""
        self.lists: list[list[Any]] | None = None
        """What torch gathers of the group: leaves that have a gradient, gradients, then lists of their state, in which
        None stands for what the step makes. None before `gather`, and where torch does not gather ahead."""
        self.told: Any = None
        """What torch's `_init_group` has returned with that."""
        self.chosen = False
        """Whether the group names no implementation, and "fused" was set for it."""
        self.repeats = False
        """Whether this step can go by what the leaves have gathered."""

    def attach(self, follow: Callable[[Shards], None], takes_dense: bool) -> None:
        """Puts the leaves into the group, with their gradients.

        Args:
            follow: called with shards whose local tensors may have been replaced, before their gradients are looked at.
            takes_dense: whether the algorithm steps with dense gradients.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        leaves, kept = self.leaves, self.leaves.gathered
        leaves.gathered = None
        self._gradients, self.gradients_in_order = leaves.attach(self._loan, follow, takes_dense)
        self.group["params"] = leaves.leaves
        if kept is not None and self._gradients is not None and kept.holds(self._options, self._gradients):
            self.repeats, leaves.gathered = True, kept

    def gather(self, optimizer: Optimizer) -> None:
        """Lets torch gather what it steps with, which may make state; or does what it did before."""
        kept = self.leaves.gathered
        if self.repeats and kept is not None and self._gradients is not None:
            self.lists, self.told = kept.again(self._gradients), kept.told
            return
        self.lists, self.told = gather_lists(optimizer, self.group)
        if self.leaves.alike:
            self.leaves.gathered = gathered(self._options, self.leaves.leaves, self.lists, self.told)

    def hand_over(self, lists: Sequence[list[Any]]) -> Any:
        """Does what torch's `_init_group` would do in the step."""
        assert self.lists is not None
        for each, mine in zip(lists, self.lists, strict=True):
            each.extend(mine)
        return self.told

    def restore(self) -> None:
        """Undoes `attach`, and what the group was told for the time of the step."""
        self.group.update(self._seen)
        self._loan.restore()


def step_groups(optimizer: Optimizer, turns: Sequence[GroupStep]) -> None:
    """A step of the optimizer, without hooks, on the groups of these turns, with what they have gathered."""
    every = optimizer.param_groups
    by_group = {id(turn.group): turn for turn in turns}
    ahead = any(turn.lists is not None for turn in turns)
    optimizer.param_groups = [turn.group for turn in turns]
    try:
        step_with_lists(optimizer, (lambda group, lists: by_group[id(group)].hand_over(lists)) if ahead else None)
    finally:
        optimizer.param_groups = every
