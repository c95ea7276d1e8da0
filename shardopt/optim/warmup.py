"""A wrapper that moves the learning rate through the stages of a warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.communicating import refuse_capture
from shardopt.errors import Problem, StateError
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.core.composite import OptimizerWrapper, StateOfParts
from shardopt.optim.core.node import Held, OwnState
from shardopt.optim.schedules.stages import Schedule, WarmupPolicy, WarmupStage, is_rate, line_of
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import STATE

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]

POSITION = "warmup"
STAGES = "stages"


class WarmupOptimizer(OptimizerWrapper):
    """Wraps a keyed optimizer, and moves its learning rate through stages.

    Step i + 1 is taken at the full rate times the stages' multiplier at iteration i (`WarmupPolicy` has the formulas).

    **Full rates.** `lr` is the full rate of the groups that have the wrapped optimizer's default one; if none has, of
    the first group. The others keep their ratios: a group with twice that rate has twice `lr`, one with rate 0 stays
    at 0. Where no group has a rate other than 0, every one gets `lr`. A group that is added later gets its rate in the
    same way. The full rate of a group stands in it as "initial_lr", from which torch's schedulers start. A rate that
    is a tensor is filled in place.

    **When the rate changes.** It is set when this optimizer is made (for step 1), at the end of each `step()` (for the
    next one), and when state is loaded. Optimizers that step during backward use the first before any `step()`. Until
    the last stage has ended it is also set when a step begins. So these steps are the warm-up's, regardless of what was
    written into the groups between them. When the last stage has ended the rate stays as it is, and is never written
    again: it belongs to the user, and to schedulers.

    **A scheduler of torch's** is attached to this optimizer (or to the one in it) after this one is made. What it
    writes while stages last is not used. Afterwards its rates are used. One that multiplies the rate (StepLR,
    CosineAnnealingLR, ReduceLROnPlateau, ...) continues from where the warm-up ended. One that computes it from
    "initial_lr" (LambdaLR, ...) starts from the full rate.

    **What is saved.** `state[param_name]` (and `state_dict()`) has "warmup", an int64 tensor (iteration, position of
    the stage), equal on all ranks, and "stages", their numbers. Loading refuses state of other stages; further stages
    may be appended. Rates are saved where groups are (`save_param_groups(True)`), and then loaded with the full ones;
    otherwise they follow from `lr` and the iteration.

    Args:
        optimizer: is wrapped. Of two warm-ups around one optimizer, the inner one's rates are used while
            its stages last.
        stages: at least one; copied.
        lr: the full rate, >= 0.
        lr_param: the option of the groups that is set; the full one is "initial_" and this.
        param_name: the name that the warm-up's own state goes by.

    Raises:
        StateError: there are no stages, an argument is bad, a group has no number under `lr_param`,
            or `param_name` is taken.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        self._schedule = Schedule(stages)
        problems = [
            *_wrong_arguments(lr, lr_param, param_name, optimizer._state_names()),
            *self._wrong_groups(lr_param),
        ]
        if problems:
            raise StateError("a warm-up cannot be made", problems, code="warm-up")
        self._lr, self._lr_param, self._param_name = float(lr), lr_param, param_name
        self._own: dict[str, Any] = {
            POSITION: torch.zeros(2, dtype=torch.int64, device="cpu"),
            STAGES: self._schedule.numbers(),
        }
        nominal = [self._nominal(group) for group in self.param_groups]
        self._reference = self._nominal_default(nominal)
        for group, rate in zip(self.param_groups, nominal, strict=True):
            self._set_full(group, self._full_rate(rate))
        self._set_rates()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer; its rate is set for this iteration, like that of all groups."""
        super().add_param_group(param_group)
        self._adopt()

    def __repr__(self) -> str:
        stages = ", ".join(self._schedule.described())
        return f"{type(self).__name__} (iteration {self._iteration} of {stages}) of {self._children[0]!r}"

    @property
    def _iteration(self) -> int:
        return int(self._own[POSITION][0])

    @property
    def _full(self) -> str:
        return f"initial_{self._lr_param}"

    def _own_state(self) -> OwnState:
        return {self._param_name: self._own}

    @property
    def state(self) -> Any:
        """The wrapped optimizer's live state, and the warm-up's own under `param_name`; if removed, that restarts."""
        self._refuse_torchs_getters()
        own, wrapped = Held(_OwnState(self._own_state()), [], {}), self._optimizer

        def locate(key: Any) -> tuple[Any, Any]:
            return own if isinstance(key, str) and key in own.state else wrapped, key

        return StateOfParts([("", wrapped), ("", own)], locate)

    @state.setter
    def state(self, state: Any) -> None:
        if self._param_name in state:
            self._own.update(state[self._param_name])
            state = {
                key: entries for key, entries in state.items() if not isinstance(key, str) or key != self._param_name
            }
        self._optimizer.state = state

    def _before_step(self) -> None:
        refuse_capture(type(self).__name__, "capture forward and backward alone")
        self._adopt()
        if self._iteration < self._schedule.end:
            self._set_rates()

    def _before_backward(self) -> None:
        super()._before_backward()
        self._before_step()  # for optimizers that update in backward, a step begins there

    def _after_step(self) -> None:
        iteration = self._iteration + 1
        self._own[POSITION][0] = iteration
        self._own[POSITION][1] = self._schedule.stage_at(iteration)
        if iteration <= self._schedule.end:
            self._set_rates()

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        state = offered.get(STATE)
        entries = state.get(self._param_name) if isinstance(state, Mapping) else None
        if isinstance(state, Mapping) and isinstance(entries, Mapping) and STAGES in entries:
            saved, own = entries[STAGES], self._schedule.described()
            if isinstance(saved, list):
                saved = [*map(line_of, saved)]
            if not isinstance(saved, list) or not saved or own[: len(saved)] != saved:
                plan.problem(
                    f"{plan.section(STATE)}.{self._param_name}.{STAGES}",
                    f"a warm-up through {saved}",
                    f"one through {own}, or the first of them",
                    "build the optimizer with the stages that were saved; others can only be appended to them",
                )
            offered = {**offered, STATE: {**state, self._param_name: {**entries, STAGES: self._own[STAGES]}}}
        super()._plan(plan, offered)
        loaded_options = plan.loaded_options  # a plan that holds itself would keep this optimizer's memory
        plan.then(lambda: self._follow(loaded_options))

    def _follow(self, loaded_options: Sequence[tuple[dict[str, Any], set[str]]]) -> None:
        """Sets the rates of the loaded iteration in all groups whose rate was not loaded."""
        self._own[POSITION][1] = self._schedule.stage_at(self._iteration)  # stages may have been appended
        loaded = {id(group) for group, options in loaded_options if self._lr_param in options}
        self._set_rates([group for group in self.param_groups if id(group) not in loaded])

    def _set_rates(self, groups: Sequence[dict[str, Any]] | None = None) -> None:
        """Writes the rate of this iteration to groups; to all if None."""
        multiplier = self._schedule.multiplier(self._iteration)
        with torch.no_grad():
            for group in self.param_groups if groups is None else groups:
                rate = group[self._full] * multiplier
                if isinstance(group.get(self._lr_param), Tensor):
                    group[self._lr_param].fill_(rate)
                else:
                    group[self._lr_param] = rate

    def _adopt(self) -> None:
        """Sets the rates of groups that were added later, here or at the wrapped optimizer."""
        new = [group for group in self.param_groups if self._full not in group]
        for group in new:
            rate = group.get(self._lr_param)
            # torch lets groups share the tensor of the default rate, which by now has been multiplied.
            sharing = [other for other in self.param_groups if self._full in other and other[self._lr_param] is rate]
            shared = isinstance(rate, Tensor) and sharing
            self._set_full(group, sharing[0][self._full] if shared else self._full_rate(self._nominal(group)))
        if new:
            self._set_rates(new)

    def _set_full(self, group: dict[str, Any], rate: float) -> None:
        group[self._full] = rate
        self._note_given(group, {self._full: rate})

    def _full_rate(self, nominal: float | None) -> float:
        return self._lr if nominal is None or not self._reference else self._lr * (nominal / self._reference)

    def _nominal(self, group: Mapping[str, Any]) -> float | None:
        """Returns a group's rate as given, before any other warm-up or scheduler."""
        return _number(group.get(self._full, group.get(self._lr_param)))

    def _nominal_default(self, nominal: Sequence[float | None]) -> float | None:
        """Returns the rate that `lr` stands for; None if there is none."""
        default = _number(self.defaults.get(self._lr_param))
        # A default that no group has may be one that nobody chose, or that another warm-up has replaced.
        candidates = [default, *nominal] if default in nominal else nominal
        return next((rate for rate in candidates if rate), None)

    def _wrong_groups(self, lr_param: str) -> Iterator[Problem]:
        for k, group in enumerate(self.param_groups):
            options = sorted(name for name in group if name != PARAMS)
            if lr_param not in group:
                if options:  # without any, as tests and fused optimizers have it, the rate is for others to read
                    remedy = f"pass lr_param, one of {options}"
                    yield Problem(f"param_groups[{k}].{lr_param}", "no such option", "a learning rate", remedy)
            elif _number(group[lr_param]) is None:
                value, required = repr(group[lr_param]), "a number that is not negative, or a tensor of one"
                remedy = f"pass as lr_param the one of {options} that is the learning rate"
                yield Problem(f"param_groups[{k}].{lr_param}", value, required, remedy)


class _OwnState(dict[str, Any]):
    """The warm-up's own state by its name: writes go into it, and a removal restarts it."""

    def __setitem__(self, name: str, entries: Any) -> None:
        self[name].update(entries)

    def __delitem__(self, name: str) -> None:
        self[name][POSITION].zero_()

    def clear(self) -> None:
        """Restarts the warm-up."""
        for name in self:
            del self[name]


def _number(rate: Any) -> float | None:
    """Converts a rate to a float; None if it is no number."""
    return float(rate) if is_rate(rate) or (isinstance(rate, Tensor) and rate.numel() == 1) else None


def _wrong_arguments(lr: object, lr_param: object, param_name: object, taken: set[str]) -> Iterator[Problem]:
    if not is_rate(lr):
        yield Problem("lr", repr(lr), "a finite number that is not negative", "pass the full learning rate")
    if not isinstance(lr_param, str) or not lr_param:
        yield Problem("lr_param", repr(lr_param), "the name of an option", 'pass "lr"')
    if not isinstance(param_name, str) or not param_name:
        yield Problem("param_name", repr(param_name), "a name", 'pass "__warmup"')
    elif param_name in taken:
        taken_name = f"{param_name!r}, which has state in the wrapped optimizer already"
        yield Problem("param_name", taken_name, "another name", "give each warm-up a name of its own")
