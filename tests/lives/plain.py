"""The plain side of a life: torch alone, whole tensors, one process that never ends. What a resume must come to."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch

from tests.lives.script import ALGORITHMS, SCHEDULES, Script, value

DECAY = 0.9


class Plain:
    """The state of training as a program that was never stopped would have it."""

    def __init__(self, script: Script):
        self.script = copy.deepcopy(script)
        self.params = {name: torch.nn.Parameter(value(name, 0)) for name in script.params}
        algorithm, options = ALGORITHMS[script.algorithm]
        groups = [{"params": [self.params[name] for name in names], **own} for names, own in script.groups_of()]
        self.optimizer = algorithm(groups, foreach=False, **options)
        self.make_schedule()
        self.averages = {name: param.detach().clone() for name, param in self.params.items()} if script.averages else {}
        self.averaged = 0
        self.step_number = 0
        self.records: dict[str, object] = {}
        for name in script.frozen:
            self.params[name].requires_grad_(False)

    def make_schedule(self, last_epoch: int = -1) -> None:
        make = SCHEDULES[self.script.schedule]
        self.schedule = None if make is None else make(self.optimizer, last_epoch)

    def copied(self) -> Plain:
        return copy.deepcopy(self)

    def step(self) -> None:
        self.step_number += 1
        for name, param in self.params.items():
            param.grad = gradient(name, self.step_number) if param.requires_grad else None
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        for name, average in self.averages.items():
            weight = self.params[name].detach()
            average.copy_(weight if not self.averaged else average * DECAY + weight * (1 - DECAY))
        self.averaged += bool(self.averages)

    def options(self, name: str) -> dict[str, object]:
        """Returns the live group of a parameter."""
        return next(g for g in self.optimizer.param_groups if any(self.params[name] is each for each in g["params"]))

    def options_fit(self, old: Plain) -> bool:
        """Whether parameters that are in one group here had the same options."""
        by_group: dict[int, list[dict[str, object]]] = {}
        for name in self.params.keys() & old.params.keys():
            options = {key: each for key, each in old.options(name).items() if key != "params"}
            by_group.setdefault(id(self.options(name)), []).append(options)
        return all(each == group[0] for group in by_group.values() for each in group)

    def resume(self, old: Plain, kept: Collection[str] = (), without_schedule: bool = False) -> None:
        """Takes what the earlier program had, as far as this one has a place for it.

        Args:
            kept: options that stay as the code gives them.
            without_schedule: whether that is begun again where it was.
        """
        for name in self.params.keys() & old.params.keys():
            with torch.no_grad():
                self.params[name].copy_(old.params[name])
            state = old.optimizer.state.get(old.params[name])
            if state:
                self.optimizer.state[self.params[name]] = copy.deepcopy(state)
            mine = self.options(name)
            theirs = {key: each for key, each in old.options(name).items() if key in mine and key not in kept}
            mine.update({key: each for key, each in theirs.items() if key != "params"})
        if self.schedule is not None and old.schedule is not None and not without_schedule:
            self.schedule.load_state_dict(copy.deepcopy(old.schedule.state_dict()))
        if self.averages and old.averages:
            self.averaged = old.averaged
            for name in self.averages.keys() & old.averages.keys():
                self.averages[name].copy_(old.averages[name])
        self.step_number, self.records = old.step_number, copy.deepcopy(old.records)


def gradient(name: str, step: int) -> torch.Tensor | None:
    """Returns the gradient of a parameter in a step; some have none."""
    return None if (step + len(name)) % 7 == 0 and name != "bias" else value(name, step)
