"""Optimizers by name around torch's, written as torchrec writes its `KeyedOptimizerWrapper` and `CombinedOptimizer`.

No constructor of torch's runs, `init_state` is a step on zero gradients, and a load wants state that is there.
"""

from collections import OrderedDict

import torch


class Keyed(torch.optim.Optimizer):
    """Around one of torch's optimizers."""

    def __init__(self, params, inner):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.params, self.inner, self.defaults = params, inner, {}
        self.state, self.param_groups = inner.state, inner.param_groups

    def __getstate__(self):
        return self.__dict__

    def step(self, closure=None):
        self.inner.step(closure)

    def init_state(self, sparse_grad_parameter_names=None):
        for parameter in self.params.values():
            parameter.grad = torch.zeros_like(parameter)
        self.step()

    def state_dict(self):
        names = {each: name for name, each in self.params.items()}
        groups = [{**group, "params": sorted(names[each] for each in group["params"])} for group in self.param_groups]
        return {
            "state": {names[each]: dict(entries) for each, entries in self.state.items()},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict):
        state, stored = self.state, state_dict["state"]
        if len(state) != len(stored):
            raise ValueError(f"Different parameter count: {len(state)} vs {len(stored)}")
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"Different param_groups count: {len(self.param_groups)} vs {len(groups)}")
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in new.items() if name != "params"})
        for name, entries in stored.items():
            for entry, value in entries.items():
                state[self.params[name]][entry].copy_(value)


class Combined(Keyed):
    """Around several of them."""

    def __init__(self, optimizers):
        self._optims, self.defaults = [("", each) for each in optimizers], {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    params = property(lambda self: {name: each for _, own in self._optims for name, each in own.params.items()})
    state = property(lambda self: {key: each for _, own in self._optims for key, each in own.state.items()})
    param_groups = property(lambda self: [group for _, own in self._optims for group in own.param_groups])

    def step(self, closure=None):
        for _, each in self._optims:
            each.step(closure)
