"""The base of optimizers that are made of other optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.elementwise.schedule_free import TRAIN_MODE, refusal_to_step
from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.optim.base import KeyedOptimizer
from shardopt.optim.local.modes import step_in_own_modes
from shardopt.optim.related import RelatedOptimizer
from shardopt.param_groups import PARAMS
from shardopt.ranks import Group, SharedGroup
from shardopt.sharding.swapped import MODE_IN_SWAP, STEP_IN_SWAP, refuse_swapped
from shardopt.torch_private import is_torchs, not_compiled, step_nested


class CompositeOptimizer(KeyedOptimizer):
    """A keyed optimizer without parameters, state and groups of its own: they are those of its children, live.

    Hooks that are registered here run once for each step taken here, and then those of each child; torch's global ones
    run once. A subclass says how the names of its children are seen, and overrides `_before_step`.

    Args:
        children: keyed optimizers, which are stepped in this order.

    Raises:
        StateError: a child is not a keyed optimizer, or loads in a way that could not be undone.
    """

    def __init__(self, children: Sequence[KeyedOptimizer]) -> None:
        problems = [problem for child in children for problem in _unfit(child)]
        if problems:
            raise StateError("an optimizer cannot be part of another", problems)
        # Only torch's own constructor; it sets state and groups, which have their setters below.
        Optimizer.__init__(self, [{PARAMS: []}], {})
        self._children = tuple(children)
        self._join_children()

    @not_compiled
    @step_in_own_modes
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates the closure, calls `_before_step`, and steps the children.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once, with gradients
                enabled.

        Raises:
            AlgorithmError: a child has to evaluate the model itself, several times (LBFGS); nothing was changed.
            StateError: averages are in the model (`eval`); nothing was changed.
        """
        if self._needs_closure:
            remedy = "call step of LBFGS itself; being part of another serves for saving and loading alone"
            problem = Problem(
                type(self).__name__, "LBFGS among its children", "algorithms that step on gradients", remedy
            )
            raise AlgorithmError("the closure is evaluated once for all", [problem])
        if self.evaluating:
            raise refusal_to_step(type(self).__name__)
        refuse_swapped(STEP_IN_SWAP, chain.from_iterable(group[PARAMS] for group in self.param_groups))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        for child in self._stepped:
            step_nested(child)
        self._after_step()
        return loss

    @property
    def _stepped(self) -> tuple[KeyedOptimizer, ...]:
        """The children that each step steps: all of them."""
        return self._children

    def _before_step(self) -> None:
        """Called in each step when the gradients are there and before the children step; does nothing here.

        Gradients may be changed in place, and options of the groups.
        """

    def _after_step(self) -> None:
        """Called in each step when the children have stepped; does nothing here."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes the gradients of every child."""
        for child in self._children:
            child.zero_grad(set_to_none=set_to_none)

    def train(self, mode: bool = True) -> None:
        """Calls that of every child."""
        if any(group.get(TRAIN_MODE) is not mode for group in self.param_groups if TRAIN_MODE in group):
            # Before the first child has changed.
            refuse_swapped(MODE_IN_SWAP, chain.from_iterable(group[PARAMS] for group in self.param_groups))
        for child in self._children:
            child.train(mode)

    @property
    def evaluating(self) -> bool:
        """Whether any child is."""
        return any(child.evaluating for child in self._children)

    def post_load_state_dict(self) -> None:
        """Called after state was loaded; every child's."""
        for child in self._children:
            child.post_load_state_dict()

    def unshared_tensors(self) -> list[tuple[tuple[str, ...], list[Tensor]]]:
        """Returns those of every child."""
        return [each for child in self._children for each in child.unshared_tensors()]

    def _keep_options(self, names: set[str]) -> None:
        for child in self._children:
            child._keep_options(names)

    @property
    def group(self) -> Group | None:
        """That of the children, where one has any."""
        return next((child.group for child in self._children if child.group is not None), None)

    def work_with(self, group: SharedGroup) -> None:
        """From now on every child takes these for the ranks that train its parameters."""
        super().work_with(group)
        for child in self._children:
            child.work_with(group)

    def unmatched_patterns(self) -> list[Problem]:
        """Returns those of every child."""
        return [problem for child in self._children for problem in child.unmatched_patterns()]

    def _note_given(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        for child in self._children:
            child._note_given(group, options)

    def save_param_groups(self, save: bool) -> None:
        """Whether `state_dict` has the groups of every child, and `load_state_dict` needs them."""
        for child in self._children:
            child.save_param_groups(save)

    @property
    def updates_in_backward(self) -> bool:
        """Whether any child does."""
        return any(child.updates_in_backward for child in self._children)

    def __getstate__(self) -> dict[str, Any]:
        # As torch's: hooks, and wrappers that schedules have put around `step`, stay with this instance.
        return {name: value for name, value in vars(self).items() if not is_torchs(name) and name != "_part_of"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join_children()

    def _join_children(self) -> None:
        """Registers this optimizer with its children: those that update in backward call its hooks, too."""
        for child in self._children:
            child._is_part_of(self)

    @property
    def _made(self) -> bool:
        """Whether the children are there; torch's constructor sets attributes of theirs before that."""
        return "_children" in self.__dict__

    def _atoms(self) -> tuple[Optimizer, ...]:
        """Returns those of every child."""
        return tuple(chain.from_iterable(child._atoms() for child in self._children))

    def _children_and_owners(self) -> Iterator[RelatedOptimizer]:
        yield from self._children
        yield from super()._children_and_owners()

    @property
    def _has_state(self) -> bool:
        return any(child._has_state for child in self._children)

    @property
    def _needs_closure(self) -> bool:
        return any(child._needs_closure for child in self._children)

    @property
    def _saves_groups(self) -> bool:
        return any(child._saves_groups for child in self._children)

    def _after_load(self) -> None:
        for child in self._children:
            child._after_load()
        super()._after_load()


def _unfit(child: KeyedOptimizer) -> list[Problem]:
    name = type(child).__qualname__
    if not isinstance(child, KeyedOptimizer):
        return [Problem(name, "an optimizer without names", "a KeyedOptimizer", "build it with shardopt.keyed")]
    if type(child).load_state_dict is not KeyedOptimizer.load_state_dict:
        # All children are checked before any is changed, which a method of its own would not take part in.
        remedy = "override plan_load or post_load_state_dict in its place"
        return [Problem(name, "a load_state_dict of its own", "that of KeyedOptimizer", remedy)]
    return []
