"""What optimizers made of other optimizers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.optim.base import KeyedOptimizer
from shardopt.optim.related import RelatedOptimizer
from shardopt.optim.state_dict.saved_form import PARAMS
from shardopt.torch_private import is_torchs, not_compiled, step_nested


class CompositeOptimizer(KeyedOptimizer):
    """A keyed optimizer without parameters, state and groups of its own: they are those of its parts, live.

    Hooks that are registered here run once for each step taken here, and then those of each part; torch's global ones
    run once. A subclass says how the names of its parts are seen, and overrides `_before_step`.

    Args:
        parts: keyed optimizers, which are stepped in this order.

    Raises:
        StateError: a part is not a keyed optimizer, or loads in a way that could not be undone.
    """

    def __init__(self, parts: Sequence[KeyedOptimizer]) -> None:
        problems = [problem for part in parts for problem in _unfit(part)]
        if problems:
            raise StateError("an optimizer cannot be part of another", problems)
        # Only what torch needs of every optimizer; it sets state and groups, which have their setters below.
        Optimizer.__init__(self, [{PARAMS: []}], {})
        self._parts = tuple(parts)
        self._join_parts()

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates the closure, does what this optimizer is for, and steps its parts.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once, with gradients
                enabled.

        Raises:
            AlgorithmError: a part has to evaluate the model itself, several times (LBFGS); nothing was changed.
        """
        if self._needs_closure:
            remedy = "call step of LBFGS itself; being part of another serves for saving and loading alone"
            problem = Problem(type(self).__name__, "LBFGS among its parts", "algorithms that step on gradients", remedy)
            raise AlgorithmError("the closure is evaluated once for all", [problem])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        for part in self._parts:
            step_nested(part)
        self._after_step()
        return loss

    def _before_step(self) -> None:
        """Called in each step when the gradients are there and before the parts step; does nothing here.

        Gradients may be changed in place, and options of the groups.
        """

    def _after_step(self) -> None:
        """Called in each step when the parts have stepped; does nothing here."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Every part's."""
        for part in self._parts:
            part.zero_grad(set_to_none)

    def post_load_state_dict(self) -> None:
        """Called after state was loaded; every part's."""
        for part in self._parts:
            part.post_load_state_dict()

    def _keep_options(self, names: set[str]) -> None:
        for part in self._parts:
            part._keep_options(names)

    def _note_given(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        for part in self._parts:
            part._note_given(group, options)

    def save_param_groups(self, save: bool) -> None:
        """Whether `state_dict` has the groups of every part, and `load_state_dict` needs them."""
        for part in self._parts:
            part.save_param_groups(save)

    @property
    def updates_in_backward(self) -> bool:
        """Whether any part does."""
        return any(part.updates_in_backward for part in self._parts)

    def __getstate__(self) -> dict[str, Any]:
        # As torch's: hooks, and what schedules have put around `step`, stay with this instance.
        return {name: value for name, value in vars(self).items() if not is_torchs(name) and name != "_part_of"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join_parts()

    def _join_parts(self) -> None:
        """Lets the parts know what they are part of: what updates in backward asks its hooks, too."""
        for part in self._parts:
            part._is_part_of(self)

    @property
    def _made(self) -> bool:
        """Whether the parts are there; torch's constructor sets what is theirs before that."""
        return "_parts" in self.__dict__

    def _atoms(self) -> tuple[Optimizer, ...]:
        """Those of every part."""
        return tuple(chain.from_iterable(part._atoms() for part in self._parts))

    def _parts_and_owners(self) -> Iterator[RelatedOptimizer]:
        yield from self._parts
        yield from super()._parts_and_owners()

    @property
    def _has_state(self) -> bool:
        return any(part._has_state for part in self._parts)

    @property
    def _needs_closure(self) -> bool:
        return any(part._needs_closure for part in self._parts)

    @property
    def _saves_groups(self) -> bool:
        return any(part._saves_groups for part in self._parts)

    def _after_load(self) -> None:
        for part in self._parts:
            part._after_load()
        super()._after_load()


def _unfit(part: KeyedOptimizer) -> list[Problem]:
    name = type(part).__qualname__
    if not isinstance(part, KeyedOptimizer):
        return [Problem(name, "an optimizer without names", "a KeyedOptimizer", "build it with shardopt.keyed")]
    if type(part).load_state_dict is not KeyedOptimizer.load_state_dict:
        # All parts are checked before any is changed, which a method of its own would not take part in.
        remedy = "override plan_load or post_load_state_dict in its place"
        return [Problem(name, "a load_state_dict of its own", "that of KeyedOptimizer", remedy)]
    return []
