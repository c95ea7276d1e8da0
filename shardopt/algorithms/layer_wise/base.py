"""The base of algorithms whose rate for each parameter follows from norms of the whole parameter.

θ parameter, G gradient; a subclass says which of θ, G and the update U are measured.

Each rank computes the squares of its own elements in float64. One all-reduce for each process group among which
parameters are cut makes them those of whole parameters, all in one buffer; then the step is taken. So norms differ
between meshes in the last bits of float64, and the factor made of them, which is rounded to the dtype that is computed
in, hardly ever does: everything else is elementwise. What is measured before the exchange is not kept but computed
again, so that nothing has changed where a rank refuses its gradient, and there is never more scratch memory than for
one local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardopt.algorithms.communicating import CommunicatingOptimizer, ParameterStep, uncovered
from shardopt.algorithms.reductions import Term
from shardopt.algorithms.registry import Kind, Options
from shardopt.sharding.pieces import View
from shardopt.sharding.view import local_tensors


class LayerWiseOptimizer(CommunicatingOptimizer):
    """A torch optimizer over parameters that may be sharded, on one or several meshes."""

    # --- the equations ---

    def _measure(
        self, group: Options, number: int, weight: Tensor, gradient: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns the two tensors whose norms determine the factor; changes nothing.

        Args:
            group: the options.
            number: of this step, from 1; 0 where none is counted.
            weight, gradient: local tensors, real, of at least 32 bits; neither is changed.
            state: that which has the parameter's shape, in the order of the spec.
        """
        raise NotImplementedError

    def _factor(self, group: Options, dimensions: int, norms: Tensor) -> Tensor:
        """Returns the factor of the rate, fp64 [], from the two norms, [2], of a parameter with so many dimensions."""
        raise NotImplementedError

    def _move(
        self,
        group: Options,
        number: int,
        weight: Tensor,
        gradient: Tensor,
        state: Sequence[Tensor],
        factor: Tensor,
        dimensions: int,
    ) -> None:
        """Changes weight and state in place, elementwise; `factor` has their dtype and no dimensions."""
        raise NotImplementedError

    # --- the step ---

    def equations(self, step: ParameterStep) -> Iterator[Iterable[Term]]:
        """Makes one exchange, of the squares of two norms.

        It waits for a device only if a parameter is a ShardedTensor: its ranks then ask each other for a gradient.
        """
        group, dimensions = step.group, len(step.view.shape)
        names = [entry.name for entry in self.spec.entries(group, dimensions) if entry.kind is Kind.PARAMETER]
        numbers = step.numbers(2, torch.float64)
        if step.gradients is not None or not step.all_or_none:  # zeros, in case that other shards have a gradient
            number = int(step.state.get("step", 0)) + 1
            for _, weight, gradient, state in _wide(step, names):
                pair = self._measure(group, number, weight, gradient, state)
                for place, each in enumerate(pair):
                    numbers[place] += torch.linalg.vector_norm(each, dtype=torch.float64).square_()
        yield [(numbers, step.cuts)]
        if not step.is_due():
            return
        number = int(step.counted_state().get("step", 0))
        factor = self._factor(group, dimensions, numbers[:2].sqrt())
        for memory, weight, gradient, state in _wide(step, names):
            self._move(group, number, weight, gradient, state, factor.to(weight.dtype), dimensions)
            for into, result in zip(memory, (weight, *state), strict=True):
                if result is not into:
                    into.copy_(result)


def _wide(
    step: ParameterStep, names: Sequence[str]
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor, list[Tensor]]]:
    """Yields, for each local tensor, its memory and its state's, then the weight, gradient and state to compute with.

    Those of 16 bits are taken to fp32, as torch's kernels for 16 bits round by how far from the end of the memory an
    element is. Where there is no gradient or state yet, single zeros stand for all, which are to be read alone.
    """
    lacks = step.gradients is None or (names and not step.state)
    zeros = [local.new_zeros(()).expand_as(local) for local in step.local_tensors] if lacks else []
    state = [local_tensors(step.state[name]) if step.state else zeros for name in names]
    gradients = zeros if step.gradients is None else step.gradients
    sign = -1 if step.group["maximize"] else 1
    for gradient, *memory in zip(gradients, step.local_tensors, *state, strict=True):
        wide = torch.promote_types(memory[0].dtype, torch.float32)
        weight, *entries = (each.to(wide) for each in memory)
        yield tuple(memory), weight, gradient.to(wide) if sign == 1 else -gradient.to(wide), entries


def unsuitable_for_norms(view: View) -> str:
    """Returns why the norm of a parameter cannot be taken; "" if it can."""
    if not view.dtype.is_floating_point:
        return f"elements of {view.dtype}"
    return uncovered(view)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns the quotient of two norms; 1 if either is 0."""
    defined = (numerator > 0) & (denominator > 0)
    return torch.where(defined, numerator / torch.where(defined, denominator, 1.0), 1.0)
