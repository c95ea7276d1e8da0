"""Runs an algorithm's own class on scratch memory: one tensor at a time, with its state passed in and out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.initial_state import initial_state
from shardopt.algorithms.low_precision.options import STEP
from shardopt.algorithms.registry import AlgorithmSpec, Options
from shardopt.runtime.signatures import signature
from shardopt.runtime.torch_private import has_fused_kernel, step_without_hooks
from shardopt.state.param_groups import IMPLEMENTATION_OPTIONS, PARAMS, STORAGE_OPTIONS


class Stepped(NamedTuple):
    """The result of a step: the state of the tensor, and the options that it changed."""

    state: dict[str, Any]
    changed: dict[str, Any]


class InnerSteps:
    """An optimizer of the algorithm's class that owns no parameters.

    Args:
        spec: of the algorithm.
        defaults: options; those that its constructor knows are given to it.

    Raises:
        ValueError: an option is out of range, as its constructor says.
    """

    def __init__(self, spec: AlgorithmSpec, defaults: Options) -> None:
        self.spec = spec
        arguments = list(signature(spec.optimizer).parameters)[1:]
        options = {name: value for name, value in defaults.items() if name in arguments}
        make: Any = spec.optimizer
        self._optimizer: Optimizer = make([torch.zeros(1, 1, device="cpu")], **options)
        self.defaults: dict[str, Any] = self._optimizer.defaults
        self._step = step_without_hooks(spec.optimizer)
        self._may_fuse = "fused" in self.defaults and torch.float32 in spec.fused_agrees

    def initial(self, options: Options) -> dict[str, Any]:
        """Returns the state of a one-element tensor before its first step, fp32, on the CPU."""
        return initial_state(self.spec, self._optimizer, self._own(options), torch.zeros(1, device="cpu"))

    def fuses(self, options: Options, device_type: str) -> bool:
        """Whether torch's fused kernel takes the steps of a group on a kind of device."""
        if not self._may_fuse or device_type == "cpu" or isinstance(options["lr"], Tensor):
            return False
        return has_fused_kernel(self.spec.name, device_type)

    def step(self, options: Options, tensor: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> Stepped:
        """Steps a tensor in place: with torch's for-loop on the CPU, elsewhere by its fused kernel where it has one.

        Args:
            options: of its group; not changed.
            tensor, gradient: fp32, of a size that is a multiple of the CPU's vectors.
            state: of the tensor; its tensors are changed. Empty for a first step that makes it.
        """
        own = self._own(options)
        is_fused = self.fuses(options, tensor.device.type)
        if is_fused:
            own["fused"] = True
        group, given = {**own, PARAMS: [tensor]}, dict(state)
        counter = given.get(STEP) if is_fused else None
        if counter is not None:  # which the kernel reads on the device; the host would wait to have it back
            given[STEP] = counter.to(tensor.device, non_blocking=True)
        tensor.grad = gradient
        self._optimizer.param_groups = [group]
        self._optimizer.state = defaultdict(dict, {tensor: given})
        try:
            self._step(self._optimizer)
            new = self._optimizer.state[tensor]
        finally:  # nothing of a step, and no gradient, is kept alive until the next one
            tensor.grad, self._optimizer.param_groups, self._optimizer.state = None, [], defaultdict(dict)
        if counter is not None:
            new[STEP] = counter + 1
        changed = {name: value for name, value in group.items() if name != PARAMS and value is not own.get(name)}
        return Stepped(new, changed)

    def _own(self, options: Options) -> dict[str, Any]:
        """Returns the algorithm's own options, with no implementation chosen but the for-loop."""
        own = {name: value for name, value in options.items() if name not in STORAGE_OPTIONS and name != PARAMS}
        return {**own, **{name: False for name in IMPLEMENTATION_OPTIONS if name in own}}
