"""Optimizers made of others: the base of all, and that of wrappers around one (clipping, warm-up)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.elementwise.schedule_free import TRAIN_MODE, refusal_to_step
from shardopt.errors import AlgorithmError, Problem, ShardoptError, StateError
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.core.node import Node
from shardopt.optim.local.modes import step_in_own_modes
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.optim.state_dict.offered import Part, distributed, with_key, with_named_groups, without_key
from shardopt.optim.state_dict.saved_form import plan_keys
from shardopt.runtime.partial_loads import refuse_partly_loaded
from shardopt.runtime.torch_private import not_compiled, step_nested
from shardopt.sharding.swapped import MODE_IN_SWAP, STEP_IN_SWAP, params_in, refuse_swapped
from shardopt.state.paths import STATE


class CompositeOptimizer(KeyedOptimizer):
    """A keyed optimizer that steps its parts, and has their live parameters, state and groups.

    Hooks that are registered here run once for each step taken here, and then those of each part; torch's global ones
    run once. A subclass overrides `_before_step` for what happens between gradients and step, `_after_step`, and
    `_own_state` for state that it keeps itself.

    Args:
        children: keyed optimizers, which are stepped in this order.
        keys: of each child, what stands before its names.
        home: as of `Node`.

    Raises:
        StateError: a child is not a keyed optimizer, or loads in a way that could not be undone.
    """

    def __init__(self, children: Sequence[KeyedOptimizer], keys: Sequence[str] = ("",), home: Any = None) -> None:
        problems = [problem for child in children for problem in _unfit(child)]
        if problems:
            raise StateError("an optimizer cannot be part of another", problems, code="combined-optimizers")
        Node.__init__(self, home, [*zip(keys, children, strict=True)])

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
            PartialLoadError: it or a part of it may be half changed; nothing was changed.
        """
        if self.needs_closure:
            remedy = "call step of LBFGS itself; being part of another serves for saving and loading alone"
            problem = Problem(
                type(self).__name__, "LBFGS among its children", "algorithms that step on gradients", remedy
            )
            raise AlgorithmError("the closure is evaluated once for all", [problem], code="combined-optimizers")
        if self.evaluating:
            raise refusal_to_step(type(self).__name__)
        refuse_swapped(STEP_IN_SWAP, params_in(self.param_groups))
        refuse_partly_loaded([(type(self).__name__, self)])  # before the first part steps
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        for place, child in enumerate(self._stepped):
            try:
                step_nested(child)
            except ShardoptError as error:
                if place:  # what it says of steps is of that child alone
                    stepped = f"{place} of {len(self._stepped)} parts of this {type(self).__name__} had stepped"
                    error.restate(f"{error.message}; {stepped}")
                raise
        self._after_step()
        return loss

    @property
    def _stepped(self) -> tuple[KeyedOptimizer, ...]:
        """The children that each step steps; all of them here."""
        return self._children

    def _before_step(self) -> None:
        """Called in each step after the gradients exist, before the children step; does nothing here.

        Gradients may be changed in place, and options of the groups.
        """

    def _after_step(self) -> None:
        """Called in each step after the children have stepped; does nothing here."""

    def incomplete_state(
        self, entries: Mapping[str, Collection[str]], strange: Collection[str] = ()
    ) -> dict[str, list[str]]:
        """Returns the names whose stored state is of no use to a child, with the entries that it lacks.

        Args:
            entries: name, as for `init_state` → the names of what is stored of it.
            strange: names whose state another algorithm has saved.
        """
        found: dict[str, list[str]] = {}
        for key, child in self._parts:
            seen_as = {name: without_key(name, key) for name in entries if without_key(name, key) in child.params}
            seen_as = {name: inner for name, inner in seen_as.items() if with_key(inner, key) == name}
            if hasattr(child, "incomplete_state"):
                of_child = child.incomplete_state(
                    {inner: entries[name] for name, inner in seen_as.items()},
                    {inner for name, inner in seen_as.items() if name in strange},
                )
                found |= {with_key(inner, key): absent for inner, absent in of_child.items()}
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes the gradients of every child."""
        for child in self._children:
            child.zero_grad(set_to_none=set_to_none)

    def train(self, mode: bool = True) -> None:
        """Calls `train` of every child."""
        if any(group.get(TRAIN_MODE) is not mode for group in self.param_groups if TRAIN_MODE in group):
            # Before the first child has changed.
            refuse_swapped(MODE_IN_SWAP, params_in(self.param_groups))
        super().train(mode)

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        """Plans to load its own state, and has every child plan the state offered to it."""
        state, own = offered.get(STATE), self._own_state()
        if own and isinstance(state, Mapping):
            for name, entries in own.items():
                key = f"{plan.section(STATE)}.{name}"
                if name in state:
                    plan.mapping(key, entries, state[name], "load what this wrapper saved")
                else:
                    remedy = f"it was saved without {type(self).__name__}: pass strict=False to load without this"
                    plan.missing(key, remedy)
            offered = {**offered, STATE: {name: entries for name, entries in state.items() if name not in own}}
        if self._is_around_one:
            self._children[0].plan_load(plan, offered)
            return
        offered = with_named_groups(offered)
        plan_keys(plan, self._saves_groups, offered, self._has_state)
        parts = [
            Part(key, child._state_names(), len(child.param_groups) if child._saves_groups else None)
            for key, child in zip(self._keys, self._children, strict=True)
        ]
        of_parts = distributed(plan, parts, offered)
        for part, child, of_part in zip(parts, self._children, of_parts, strict=True):
            child.plan_load(plan.child(part.key), of_part)


class OptimizerWrapper(CompositeOptimizer):
    """Wraps another keyed optimizer, and does something around its step.

    Parameters, state, groups and defaults are the wrapped optimizer's, not copies. A subclass overrides
    `_before_step` for what happens between gradients and step, and `_own_state` for the state that it keeps itself.

    Args:
        optimizer: is wrapped, and lives on inside.

    Raises:
        StateError: it is not a keyed optimizer.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        super().__init__([optimizer], home=optimizer)

    @property
    def _optimizer(self) -> KeyedOptimizer:
        """The wrapped optimizer.

        Trainers that make the class of an optimizer a base of their own wrapper's (Lightning) keep this under that very
        name in the wrapper itself.
        """
        kept: KeyedOptimizer | None = vars(self).get("_optimizer")
        return self._children[0] if kept is None else kept

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN → parameter of the wrapped optimizer."""
        return self._optimizer.params

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self._optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._optimizer!r}"


class StateOfParts(MutableMapping[Any, Any]):
    """The `state` of a composite optimizer: looks up state in the parts, by parameter or by name with keys.

    Args:
        homes: have it as `state`; each with the key that stands before its names.
        locate: returns which of them has a key, and the key as it is there; or raises KeyError.
    """

    def __init__(self, homes: Iterable[tuple[str, Any]], locate: Callable[[Any], tuple[Any, Any]]) -> None:
        self._homes, self._locate = list(homes), locate

    def __getitem__(self, key: Any) -> Any:
        home, inner = self._locate(key)
        return home.state[inner]

    def __setitem__(self, key: Any, value: Any) -> None:
        home, inner = self._locate(key)
        home.state[inner] = value

    def __delitem__(self, key: Any) -> None:
        home, inner = self._locate(key)
        del home.state[inner]

    def __iter__(self) -> Iterator[Any]:
        for own_key, home in self._homes:
            for key in home.state:
                yield with_key(key, own_key) if isinstance(key, str) else key

    def __len__(self) -> int:
        return sum(len(home.state) for _, home in self._homes)

    def clear(self) -> None:
        """Removes the state of all parts."""
        for _, home in self._homes:
            home.state.clear()

    def __repr__(self) -> str:
        return repr(dict(self))


def _unfit(child: KeyedOptimizer) -> list[Problem]:
    name = type(child).__qualname__
    if not isinstance(child, KeyedOptimizer):
        if isinstance(getattr(child, "params", None), Mapping):
            home = f"{type(child).__module__}.{name}"
            remedy = "put it in a KeyedOptimizer of its params, state and groups (docs/integrations/torchrec.md)"
            return [Problem(name, f"a {home}, a keyed optimizer of another library", "shardopt's", remedy)]
        return [Problem(name, "an optimizer without names", "a KeyedOptimizer", "build it with shardopt.keyed")]
    if type(child).load_state_dict is not KeyedOptimizer.load_state_dict:
        # All children are checked before any is changed, which a method of its own would not take part in.
        remedy = "override plan_load or post_load_state_dict in its place"
        return [Problem(name, "a load_state_dict of its own", "that of KeyedOptimizer", remedy)]
    return []
