"""An optimizer around another one: the base of clipping and warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.torch_private import step_nested
from shardopt.errors import Problem, StateError
from shardopt.optim.keyed import KeyedOptimizer, StateDict
from shardopt.optim.loading import LoadPlan
from shardopt.optim.saved import PARAMS, STATE

OwnState = dict[str, MutableMapping[str, Any]]


class OptimizerWrapper(KeyedOptimizer):
    """Another keyed optimizer with something around its step.

    Parameters, state, groups and defaults are the wrapped optimizer's, not copies. A subclass overrides
    `_before_step` for what happens between gradients and step, and `_own_state` for what it has to keep itself.
    Hooks that are registered here run once for each step taken here; those of the wrapped optimizer run when it is
    stepped, from here too; torch's global ones run once.

    Args:
        optimizer: is wrapped, and lives on inside.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        # Only what torch needs of every optimizer; its state and groups are those of the wrapped one.
        Optimizer.__init__(self, [{PARAMS: []}], {})
        self._optimizer = optimizer

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN → parameter of the wrapped optimizer."""
        return self._optimizer.params

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        if "_optimizer" in self.__dict__:  # not yet where torch's constructor sets it
            self._optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        if "_optimizer" in self.__dict__:
            self._optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if "_optimizer" in self.__dict__:
            self._optimizer.defaults = defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates the closure, does what this wrapper is for, and steps the wrapped optimizer.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once, with gradients
                enabled. The wrapped optimizer gets none: one that needs to call it several times (LBFGS) refuses.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        step_nested(self._optimizer)
        return loss

    def _before_step(self) -> None:
        """Called in each step when the gradients are there and before the wrapped optimizer steps; does nothing here.

        Gradients may be changed in place, and options of the groups.
        """

    def _own_state(self) -> OwnState:
        """What this wrapper keeps besides the state of the wrapped one: `{name: {key: tensor or plain value}}`.

        It is saved under that name in `state_dict()["state"]`. The inner mappings must be the live ones: loading
        replaces plain values in them, copies into their tensors, and then calls `post_load_state_dict`.
        """
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapped optimizer's."""
        self._optimizer.zero_grad(set_to_none)

    def post_load_state_dict(self) -> None:
        """Called after state was loaded; the wrapped optimizer's."""
        self._optimizer.post_load_state_dict()

    def init_state(self, sparse_grad_parameter_names: Iterable[str] | None = None) -> None:
        """The wrapped optimizer's."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def save_param_groups(self, save: bool) -> None:
        """The wrapped optimizer's."""
        self._optimizer.save_param_groups(save)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The wrapped optimizer's."""
        if "_optimizer" in self.__dict__:
            self._optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        # As torch's: hooks, and what schedules have put around `step`, belong to this instance.
        return {name: value for name, value in vars(self).items() if not _is_torchs(name)}

    @property
    def _saves_groups(self) -> bool:
        return self._optimizer._saves_groups

    def _state_names(self) -> set[str]:
        return {*self._optimizer._state_names(), *self._own_state()}

    def _gather(self) -> StateDict:
        gathered = dict(self._optimizer.state_dict())
        own = self._own_state()
        self._refuse_taken(own, gathered[STATE])
        return {**gathered, STATE: {**gathered[STATE], **{name: dict(entries) for name, entries in own.items()}}}

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        state = offered.get(STATE)
        if isinstance(state, Mapping):
            own = self._own_state()
            for name, entries in own.items():
                if name in state:
                    plan.mapping(f"{STATE}.{name}", entries, state[name], "load what this optimizer saved")
                else:
                    plan.missing(
                        f"{STATE}.{name}", f"wrap it in {type(self).__name__} before saving, or pass strict=False"
                    )
            offered = {**offered, STATE: {name: entries for name, entries in state.items() if name not in own}}
        self._optimizer.plan_load(plan, offered)

    def _after_load(self) -> None:
        self._optimizer._after_load()
        super()._after_load()

    def _refuse_taken(self, own: OwnState, state: Mapping[str, Any]) -> None:
        problems = [
            Problem(
                name,
                f"state of {type(self).__name__} and of what it wraps",
                "one of them",
                "give each wrapper a name of its own",
            )
            for name in own
            if name in state
        ]
        if problems:
            raise StateError("two optimizers keep state under one name", problems)


def _is_torchs(attribute: str) -> bool:
    """Whether torch or a schedule has put it into the optimizer; a copy gets its own."""
    return attribute.startswith("_optimizer_") or attribute in (
        "step",
        "_opt_called",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
    )
