"""The base of algorithms whose rate for each parameter follows from norms of the whole parameter.

θ parameter, G gradient; a subclass says which of θ, G and the update U are measured.

Each rank computes the squares of its own elements in float64. One all-reduce for each process group among which
parameters are cut makes them those of whole parameters, all in one buffer (and one more, where others have replicas of
what three ranks or more cut, makes these equal); then the step is taken. So norms differ between meshes in the last
bits of float64, and the factor made of them, which is rounded to the dtype that is computed in, hardly ever does:
everything else is elementwise. What is measured before the exchange is not kept but computed again, so that nothing has
changed where a rank refuses its gradient, and there is never more scratch memory than for one batch of parameters, or
one local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardopt.algorithms.communicating import CommunicatingOptimizer, ParameterStep, numbers_of, uncovered
from shardopt.algorithms.lists import Tensors, add_squares, batched, owners_of
from shardopt.algorithms.reductions import Term
from shardopt.algorithms.registry import Kind, Options
from shardopt.sharding.pieces import View
from shardopt.sharding.view import local_tensors


class LayerWiseOptimizer(CommunicatingOptimizer):
    """A torch optimizer over parameters that may be sharded, on one or several meshes."""

    # --- the equations, over lists of local tensors ---

    def _measure(
        self, group: Options, number: int, weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Returns for each of N local tensors two whose norms its factor is made of; changes nothing.

        Args:
            group: the options.
            number: of this step, from 1.
            weights, gradients, state: N real tensors each, of at least 32 bits; state in the order of the spec, as far
                as it has the parameter's shape.
        """
        raise NotImplementedError

    def _factor(self, group: Options, dimensions: int, weight: Tensor, other: Tensor) -> Tensor:
        """Returns the factors of the rates of S parameters with so many dimensions: float64, [S] of two norms, [S]."""
        raise NotImplementedError

    def _move(
        self,
        group: Options,
        number: int,
        factors: Tensor,
        dimensions: int,
        weights: list[Tensor],
        gradients: list[Tensor],
        *state: list[Tensor],
    ) -> None:
        """Changes weights and state in place, elementwise; `factors`, [N], have their dtype."""
        raise NotImplementedError

    # --- the step ---

    def batches(self, steps: Sequence[ParameterStep]) -> Iterable[Sequence[ParameterStep]]:
        """Returns steps of one number, of parameters with dimensions alike, together."""
        return batched(steps, lambda step: (_number(step), bool(step.state), len(step.view.shape) > 1))

    def equations_of(self, steps: Sequence[ParameterStep]) -> Iterator[Iterable[Iterable[Term]]]:
        """One exchange: the squares of two norms. No device is waited for, but where a parameter is a ShardedTensor:
        then ranks ask each other whether it has a gradient."""
        first = steps[0]
        group, number, dimensions = first.group, _number(first), len(first.view.shape)
        names = [entry.name for entry in self.spec.entries(group, dimensions) if entry.kind is Kind.PARAMETER]
        numbers, owners = numbers_of(steps, 2, torch.float64), owners_of(steps)
        # Without a gradient zeros, in case that other shards have one.
        if first.is_held and (first.gradients is not None or not first.all_or_none):
            # Nothing that is measured may stay until the exchange.
            pair = self._measure(group, number, *_columns(steps, names)[1])
            for place in range(2):
                add_squares(numbers[:, place], owners, pair[place])
            del pair
        yield [[(row, step.cuts)] for row, step in zip(numbers.unbind(), steps, strict=True)]
        if not first.is_due():
            return
        for step in steps:
            step.counted_state()
        memory, wide = _columns(steps, names)
        factors = self._factor(group, dimensions, *numbers[:, :2].sqrt().unbind(1)).to(wide[0][0].dtype)
        self._move(group, number, factors.index_select(0, owners), dimensions, *wide)
        for into, results in zip(memory, (wide[0], *wide[2:]), strict=True):
            if results is not into:
                torch._foreach_copy_(into, results)


def _number(step: ParameterStep) -> int:
    """Returns the number of a step that is not counted yet, from 1."""
    return int(step.state.get("step", 0)) + 1


def _columns(steps: Sequence[ParameterStep], names: Sequence[str]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Returns the memory of local tensors and of their state; and weights, gradients and state to compute with.

    Weights of 16 bits are taken to fp32, as torch's kernels for 16 bits round by how far from the end of the memory an
    element is. State has their dtype, also where the parameter was cast after its first step. Where there is no
    gradient or state yet, a single zero stands for all, which is to be read alone.
    """
    first = steps[0]
    weights = [local for step in steps for local in step.local_tensors]
    gradients = [each for step in steps for each in step.gradients or ()]
    state = [[each for step in steps for each in local_tensors(step.state[name])] for name in names if first.state]
    if not gradients or not first.state:
        zero = weights[0].new_zeros(())
        zeros = [zero.expand_as(weight) for weight in weights]
        gradients, state = gradients or zeros, state or [zeros for _ in names]
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    wide = [_converted(column, dtype) for column in (weights, gradients, *state)]
    if first.group["maximize"]:
        wide[1] = list(torch._foreach_neg(wide[1]))
    return [weights, *state], wide


def _converted(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns tensors as they are if all have the dtype, or else copies of that dtype."""
    if all(each.dtype is dtype for each in tensors):
        return tensors
    made = [torch.empty_like(each, dtype=dtype) for each in tensors]
    torch._foreach_copy_(made, tensors)
    return made


def unsuitable_for_norms(view: View) -> str:
    """Returns why the norm of a parameter cannot be taken; "" if it can."""
    if not view.dtype.is_floating_point:
        return f"elements of {view.dtype}"
    return uncovered(view)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns the quotient of two norms; 1 if either is 0."""
    defined = (numerator > 0) & (denominator > 0)
    return torch.where(defined, numerator / torch.where(defined, denominator, 1.0), 1.0)
