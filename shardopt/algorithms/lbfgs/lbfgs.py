"""L-BFGS on sharded parameters: every rank keeps only the history of its own shards.

x all parameters as one vector, g its gradient; the columns of S and Y are the last h changes of x and g, oldest first.
With R the upper triangle of SᵀY, D its diagonal, and γ = (s · y) / (y · y) of the newest pair, the direction is

    d = −H g = −γ g − γ Y a + S b        where R a = −Sᵀg        and        Rᵀ b = D a + γ (Yᵀg + YᵀY a).

So all that ranks have to add up are products, and those that an iteration adds are with its g and its newest y: one
all-reduce brings them together, the others are kept. d is then local to each rank, and g · d follows from the
same numbers. Each element is counted by one of the ranks that hold it; products and combinations are taken in fp64.

Sources: Byrd, Nocedal and Schnabel, Representations of quasi-Newton matrices and their use in limited memory methods
(1994), theorem 2.2; options, limits and the order of decisions as torch.optim.LBFGS has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.communicating import CommunicatingOptimizer, refuse_capture
from shardopt.algorithms.lbfgs.history import Memory, initial_numbers, resize_history
from shardopt.algorithms.lbfgs.strong_wolfe import Trial, strong_wolfe
from shardopt.algorithms.lbfgs.vectors import ParameterVector
from shardopt.algorithms.options import COUNT, RATE, one_of, options_of
from shardopt.algorithms.registry import GLOBAL_STATE, Options
from shardopt.errors import AlgorithmError, Problem
from shardopt.runtime.signatures import signature
from shardopt.sharding.gradients import local_gradients, requires_gradient
from shardopt.sharding.reduced import stack_like
from shardopt.sharding.view import assemble, is_held, local_tensors


class LBFGS(CommunicatingOptimizer):
    """torch.optim.LBFGS over parameters that may be sharded, on one or several meshes.

    State of a parameter: `d`, the last direction, and `prev_flat_grad`, the last gradient, both like the parameter;
    `old_dirs` and `old_stps`, the columns of Y and S, [history_size, *shape of the parameter], cut as it is. They are
    filled in turn, and while training have memory for the pairs that there are and up to a quarter more; who looks at
    them in a keyed optimizer, as a save does, gets all of their places, and with the next step those without a pair are
    given back. State under "__global__", on the CPU:
    `n_iter`, `func_evals`, `pairs` (in the history) and `next` (the place of the next one) as int64; `t`, `H_diag` (γ),
    `prev_loss`, `s_dot_y` and `y_dot_y` (SᵀY and YᵀY by place) as float64. The history keeps the size that it had at
    the first step.

    Args:
        params: parameters, or one group of them. Those that are complex count as twice as many real ones.
        lr: the step length, or the first one to try; a number or a tensor of one element.
        max_iter: most iterations in a step.
        max_eval: most evaluations in a step; None for 5/4 of `max_iter`.
        tolerance_grad: a gradient without a larger element is zero.
        tolerance_change: changes of parameters or loss up to this are none.
        history_size: h, at least 1.
        line_search_fn: None or "strong_wolfe".
        maximize: whether to go up. An option of the group where torch's LBFGS has it, as of 2.15, or where it is set.

    Raises:
        AlgorithmError: there are several groups.
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = None,
        *,
        maximize: bool = False,
    ) -> None:
        options = options_of(locals(), lr=RATE, history_size=COUNT, line_search_fn=one_of(None, "strong_wolfe"))
        options["max_eval"] = max_iter * 5 // 4 if max_eval is None else max_eval
        if not maximize and "maximize" not in signature(torch.optim.LBFGS).parameters:
            del options["maximize"]  # or groups that torch saved would lack it
        self._vector: ParameterVector | None = None
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the only group, as torch's constructor passes it.

        Raises:
            AlgorithmError: there is a group already.
        """
        if self.param_groups:
            problem = Problem("param_groups", "a second group", "one", "give all parameters the same options")
            raise AlgorithmError("LBFGS optimizes all parameters together", [problem], code="lbfgs")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes up to `max_iter` iterations. Collective: every rank of the job, or of `shared_group`, must call.

        One all-reduce for every evaluation, and one for every iteration but the very first; each is waited for, since
        its numbers decide what comes next. The first time, and when there are other parameters, ranks also exchange
        which of them hold what.

        Args:
            closure: clears the gradients, evaluates the model, goes backward and returns the loss, the same on every
                rank; called up to `max_eval` times and a few more, with gradients enabled.

        Returns:
            The first result of the closure.

        Raises:
            AlgorithmError: there is no closure, or the step is captured into a graph.
            GradientError: a gradient does not fit its parameter, or is sparse.
            RankError: the closure returned different losses on different ranks; or another rank failed.
        """
        refuse_capture(type(self).__name__)
        if closure is None:
            problem = Problem("closure", "none", "one", "pass a function that evaluates the model again")
            raise AlgorithmError("LBFGS evaluates the model several times in a step", [problem], code="lbfgs")
        (group,) = self.param_groups
        vector = self._vector_of(group)
        vector.maximize = group.get("maximize", False)
        states = {parameter: self._state_of(parameter) for parameter in vector.parameters if is_held(parameter)}
        memory = Memory(vector, states, self.make_global())
        first_loss, now = vector.evaluate(closure)
        evaluations = 1
        memory.add("func_evals", 1)
        if now.peak <= group["tolerance_grad"]:
            return first_loss
        lr = float(group["lr"])
        for iteration in range(1, group["max_iter"] + 1):
            length = lr
            if memory.number("n_iter") == 0 and now.total > 1.0:
                length *= 1.0 / now.total
            slope = memory.next_direction(now)
            memory.set("t", length)
            if slope > -group["tolerance_change"]:
                break
            before = now.loss
            last = iteration == group["max_iter"]
            start = replace(now, step=0.0, slope=slope)
            now, spent = self._move(vector, memory, closure, start, length, evaluations, last)
            memory.set("t", now.step)
            evaluations += spent
            memory.add("func_evals", spent)
            if last or evaluations >= group["max_eval"] or now.peak <= group["tolerance_grad"]:
                break
            if abs(now.step) * vector.reach <= group["tolerance_change"]:
                break
            if abs(now.loss - before) < group["tolerance_change"]:
                break
        return first_loss

    def _move(
        self,
        vector: ParameterVector,
        memory: Memory,
        closure: Callable[[], Any],
        start: Trial,
        length: float,
        evaluations: int,
        last: bool,
    ) -> tuple[Trial, int]:
        """Moves the parameters along the direction; returns the trial reached, and the number of evaluations."""
        group, direction = self.param_groups[0], memory.direction
        if group["line_search_fn"] is None:
            vector.add(length, direction)
            if last:  # the result of an evaluation would not be used
                return replace(start, step=length), 0
            return replace(vector.evaluate(closure, direction)[1], step=length), 1
        here = vector.copy()

        def evaluate(step: float) -> Trial:
            vector.add(step, direction)
            try:
                trial = vector.evaluate(closure, direction)[1]
            finally:
                vector.restore(here)
            return replace(trial, step=step)

        def too_short(steps: float) -> bool:
            return bool(steps * vector.reach < group["tolerance_change"])

        best, spent = strong_wolfe(evaluate, start, length, too_short, group["max_eval"] - evaluations)
        vector.add(best.step, direction)
        return best, spent

    def complete_state(self, parameter: Tensor) -> None:
        """Brings the state of a parameter, if any, to the shapes that are saved."""
        state = self.state.get(parameter)
        if state:
            (group,) = self.param_groups
            by_name: Any = self.state  # torch declares tensors as its only keys, and takes any
            numbers = by_name.get(GLOBAL_STATE)
            resize_history(parameter, state, len(numbers["s_dot_y"]) if numbers else group["history_size"])

    def initial_state(self, group: Options, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter without state, in the shapes that are saved; changes nothing."""
        return self._new_state(parameter, group["history_size"])

    def _new_state(self, parameter: Tensor, places: int) -> dict[str, Any]:
        def zeros() -> Tensor:
            return assemble(parameter, [local.new_zeros(local.shape) for local in local_tensors(parameter)])

        return {
            "d": zeros(),
            "prev_flat_grad": zeros(),
            "old_dirs": stack_like(parameter, places),
            "old_stps": stack_like(parameter, places),
        }

    def initial_global(self) -> dict[str, Tensor]:
        """Makes the state that belongs to no parameter as it is before the first step; changes nothing."""
        return initial_numbers(self.param_groups[0]["history_size"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter, 1))
        return state

    def _vector_of(self, group: Options) -> ParameterVector:
        """Returns the vector of all parameters that are, or were, trained."""
        # A rank without elements has no state that shows what was trained, but makes a new vector with the others.
        before = set(() if self._vector is None else self._vector.parameters)
        parameters = [
            parameter
            for parameter in group["params"]
            if requires_gradient(parameter)
            or self.state.get(parameter)
            or (parameter in before and not is_held(parameter))
            or any(gradient is not None for gradient in local_gradients(parameter))
        ]
        ranks = self.shared_group.ranks
        if self._vector is None or not self._vector.fits(ranks, parameters):
            names = {parameter: self.names.get(parameter, f"{i:09}") for i, parameter in enumerate(parameters)}
            self._vector = ParameterVector(ranks, names)
        return self._vector

    def __getstate__(self) -> dict[str, Any]:
        # The vector is of these very parameters.
        return {**super().__getstate__(), "names": self.names, "shared_group": self.shared_group, "_vector": None}
