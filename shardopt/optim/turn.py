"""One step of one group: its local tensors stand where the user's parameters do, and have their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.torch_private import gathering, gathers_as_torch
from shardopt.optim.gathered import deciding, gathered
from shardopt.optim.leaves import GroupLeaves, Loan, Shards

Group = dict[str, Any]


class Turn:
    """A group that takes part in a step; `give_back` leaves it as it was.

    Args:
        group: with the user's parameters.
        leaves: of those.
    """

    def __init__(self, group: Group, leaves: GroupLeaves) -> None:
        self.group, self.leaves = group, leaves
        self._seen: Group = {name: group[name] for name in ("params", "fused") if name in group}
        self._options = deciding(group)
        self._loan = Loan()
        self._gradients: list[Tensor | None] | None = None
        self.repeats = False
        """Whether this step can go by what the leaves have gathered."""

    def lend(self, follow: Callable[[Shards], None], takes_dense: bool) -> None:
        """Puts the leaves into the group, with their gradients.

        Args:
            follow: called with shards whose local tensors may have been replaced, before their gradients are looked at.
            takes_dense: whether the algorithm steps with dense gradients.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        leaves, kept = self.leaves, self.leaves.gathered
        leaves.gathered = None
        self._gradients = leaves.lend(self._loan, follow, takes_dense)
        self.group["params"] = leaves.leaves
        if kept is not None and self._gradients is not None and kept.holds(self._options, self._gradients):
            self.repeats, leaves.gathered = True, kept

    def gather(self, init_group: Callable[..., Any], lists: Sequence[list[Any]]) -> Any:
        """torch's `_init_group` for this group, or what it did before."""
        kept = self.leaves.gathered
        if self.repeats and kept is not None and self._gradients is not None:
            return kept.again(self._gradients, lists)
        told = init_group(self.group, *lists)
        if self.leaves.alike:
            self.leaves.gathered = gathered(self._options, self.leaves.leaves, lists, told)
        return told

    def give_back(self) -> None:
        """Undoes `lend`, and what the group was told for the time of the step."""
        self.group.update(self._seen)
        self._loan.give_back()


@contextmanager
def in_turns(optimizer: Optimizer, turns: Sequence[Turn]) -> Iterator[None]:
    """While this is open, the optimizer has the groups of these turns, and gathers through them."""
    every = optimizer.param_groups
    by_group = {id(turn.group): turn for turn in turns}
    optimizer.param_groups = [turn.group for turn in turns]
    try:
        if any(turn.leaves.alike for turn in turns) and gathers_as_torch(optimizer):
            with gathering(optimizer, lambda init_group, group, lists: by_group[id(group)].gather(init_group, lists)):
                yield
        else:
            yield
    finally:
        optimizer.param_groups = every
