"""The base of elementwise algorithms that torch lacks: state, buckets and dtypes. Subclasses have the equations.

The equations are written once, over lists of tensors: one tensor at a time (the for-loop), or all of a group that share
device, dtype and counters (foreach). Every element goes through the same operations wherever it stands in memory:

- fp32 and fp64 are computed as they are; of a complex tensor both parts.
- Tensors of 16 bits are taken to fp32 one parameter at a time and rounded back at the end of the step. In 16 bits
  torch's kernels round factors, or do not, by how far from the end of the memory an element is, so that the result
  would depend on where shards end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.communicating import AlgorithmOptimizer
from shardopt.algorithms.initial_state import made_of
from shardopt.algorithms.registry import AtFirstStep, Kind, Options
from shardopt.errors import GradientError, Problem

Numbers = tuple[float, ...]


class ElementwiseOptimizer(AlgorithmOptimizer):
    """A torch optimizer whose step is elementwise.

    Gradients are dense and are not changed. `foreach` steps all tensors of a group together (None: where they are on an
    accelerator); it needs scratch memory of as many bytes as the group's gradients, one at a time that of one
    parameter. There is no `capturable`, `differentiable` or `fused` implementation.
    """

    def _take_step(self) -> None:
        due = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        if any(p.grad.layout is not torch.strided for _, parameters in due for p in parameters):
            name = type(self).__name__
            problem = Problem("a gradient", "a sparse one", "a dense one", "make it dense before the step")
            raise GradientError(f"{name} does not support sparse gradients", [problem], code="sparse-gradient")
        for group, parameters in due:
            for numbers, bucket in self._buckets(group, parameters):
                self._step_bucket(group, numbers, bucket)

    def _initial_state(self, group: Options, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter at its first gradient."""
        return {
            entry.name: parameter.clone(memory_format=torch.preserve_format)
            if entry.initial is AtFirstStep.PARAMETER
            else made_of(entry, group, parameter)
            for entry in self.spec.entries(group, parameter.ndim)
        }

    def _count(self, group: Options, lr: float, state: dict[str, Any]) -> Numbers:
        """Counts a step in the state of a parameter; returns the numbers that its update needs.

        Args:
            group: the options.
            lr: its learning rate, which was read once: a tensor on an accelerator has to be waited for.
            state: of the parameter.
        """
        return (lr,)

    def _update(
        self, group: Options, numbers: Numbers, weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> None:
        """Updates weights and state in place; leaves gradients unchanged.

        Args:
            group: the options.
            numbers: as `_count` gave them.
            weights, gradients, state: N real tensors each, of one device and dtype; state in the order of the spec.
        """
        raise NotImplementedError

    def _buckets(self, group: Options, parameters: Sequence[Tensor]) -> Iterable[tuple[Numbers, list[Tensor]]]:
        foreach = group["foreach"]
        if foreach is None:
            foreach = bool(parameters) and not any(p.is_cpu for p in parameters)
        buckets: dict[Any, tuple[Numbers, list[Tensor]]] = {}
        lr = float(group["lr"]) if parameters else 0.0
        for place, parameter in enumerate(parameters):
            state = self.state[parameter]
            if not state:
                state.update(self._initial_state(group, parameter))
            numbers = self._count(group, lr, state)
            together = foreach and not _is_narrow(parameter)
            key = (numbers, parameter.device, parameter.dtype) if together else place
            buckets.setdefault(key, (numbers, []))[1].append(parameter)
        return buckets.values()

    def _step_bucket(self, group: Options, numbers: Numbers, parameters: Sequence[Tensor]) -> None:
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        names = [entry.name for entry in self.spec.entries(group) if entry.kind is Kind.PARAMETER]
        changed = [list(parameters), *([self.state[p][name] for p in parameters] for name in names)]
        weights, *state = wide = [[computed_in(tensor) for tensor in column] for column in changed]
        gradients = [computed_in(gradient) for gradient in gradients]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        self._update(group, numbers, weights, gradients, *state)
        if _is_narrow(parameters[0]):
            for tensor, result in zip(chain.from_iterable(changed), chain.from_iterable(wide), strict=True):
                tensor.copy_(result)


def computed_in(tensor: Tensor) -> Tensor:
    """Returns the tensor to compute with: an fp32 copy for 16 bits, a real view for a complex one, else the tensor."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if _is_narrow(tensor) else tensor


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize < torch.float32.itemsize
