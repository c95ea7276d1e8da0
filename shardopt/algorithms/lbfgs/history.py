"""The history of L-BFGS, and the direction computed from it. `lbfgs` has the equations.

The history is filled place by place, and then again from the first, so that nothing is moved. It has memory for the
pairs that it holds and a few more, and grows as they come: h pairs at most, which is the shape that it is saved with.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from shardopt.algorithms.lbfgs.dots import as_rows, combine, products
from shardopt.algorithms.lbfgs.strong_wolfe import Trial
from shardopt.algorithms.lbfgs.vectors import ParameterVector
from shardopt.sharding.reduced import stack_like
from shardopt.sharding.view import local_tensors, view_of

_LEAST_CURVATURE = 1e-10  # s · y of a pair that is taken into the history
HISTORY = ("old_dirs", "old_stps")
"""The names of Y and S in the state of a parameter."""


def initial_numbers(size: int) -> dict[str, Tensor]:
    """Makes the state that belongs to no parameter, as before the first step, for a history of `size` pairs."""
    numbers = {
        name: torch.zeros((), dtype=torch.int64, device="cpu") for name in ("func_evals", "n_iter", "pairs", "next")
    }
    numbers |= {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in ("t", "H_diag", "prev_loss")}
    return numbers | {
        name: torch.zeros(size, size, dtype=torch.float64, device="cpu") for name in ("s_dot_y", "y_dot_y")
    }


def resize_history(parameter: Tensor, state: MutableMapping[str, Tensor], places: int) -> None:
    """Resizes the history of a parameter to `places` pairs; keeps the first ones and fills the rest with zeros."""
    for name in HISTORY:
        old = state[name]
        if view_of(old, name).shape[0] == places:
            continue
        new = stack_like(parameter, places)
        for into, local in zip(local_tensors(new), local_tensors(old), strict=True):
            kept = min(len(into), len(local))
            into[:kept] = local[:kept]
        state[name] = new  # once it is filled: an interrupt before loses nothing


class Memory:
    """The state of all parameters, and the state that belongs to none, in one step.

    Args:
        vector: of the parameters.
        states: parameter → its state, of those that this rank holds elements of, in the order of the vector; their
            history is given the size that it needs.
        numbers: state that belongs to no parameter.
    """

    def __init__(
        self,
        vector: ParameterVector,
        states: Mapping[Tensor, MutableMapping[str, Tensor]],
        numbers: Mapping[str, Tensor],
    ) -> None:
        self._vector, self._numbers, self._states = vector, numbers, states
        self.direction, self._gradient = self._local_tensors("d"), self._local_tensors("prev_flat_grad")
        self._size = len(numbers["s_dot_y"])
        # A history that somebody has looked at has its whole size, which may be far too much for now.
        self._make_room(int(self.number("pairs")) + 1 if self.number("n_iter") else 1)

    def _local_tensors(self, name: str) -> list[Tensor]:
        return [local for state in self._states.values() for local in local_tensors(state[name])]

    def _make_room(self, pairs: int) -> None:
        """Makes room for `pairs` pairs, and frees places that exceed this by more than a quarter."""
        enough = min(pairs, self._size)
        for parameter, state in self._states.items():
            places = [view_of(state[name]).shape[0] for name in HISTORY]  # unlike after an interrupt
            if not enough <= min(places) <= max(places) <= enough + enough // 4:
                resize_history(parameter, state, min(enough + enough // 4, self._size))
        self._steps, self._changes = self._local_tensors("old_stps"), self._local_tensors("old_dirs")  # S and Y

    def number(self, name: str) -> float:
        """Returns one number of the state that belongs to no parameter."""
        return self._numbers[name].item()

    def set(self, name: str, value: float) -> None:
        """Sets one number of the state that belongs to no parameter."""
        self._numbers[name].fill_(value)

    def add(self, name: str, value: int) -> None:
        """Adds to one number of the state that belongs to no parameter."""
        self._numbers[name].add_(value)

    def next_direction(self, now: Trial) -> float:
        """Sets the direction of the next iteration; stores the gradient and loss that the iteration begins with.

        Collective but in the very first iteration: one all-reduce.

        Args:
            now: the trial at which the parameters are; in the very first iteration its slope is g · g.

        Returns:
            g · d. Minus the norm of g is the best that it can be; a positive one is no descent.
        """
        self.add("n_iter", 1)
        if self.number("n_iter") == 1:
            self.set("pairs", 0)
            self.set("next", 0)
            self.set("H_diag", 1.0)
            for into, gradient in zip(self.direction, now.gradient, strict=True):
                torch.neg(gradient, out=into)
            slope = -now.slope
        else:
            slope = self._add_pair(now.gradient)
        for into, gradient in zip(self._gradient, now.gradient, strict=True):
            into.copy_(gradient)
        self.set("prev_loss", now.loss)
        return slope

    def _add_pair(self, gradient: Sequence[Tensor]) -> float:
        """Adds the last step and its change of gradient to the history, then combines the next direction."""
        length = self.number("t")
        step = [direction * length for direction in self.direction]
        change = [new - old for new, old in zip(gradient, self._gradient, strict=True)]
        pairs = int(self.number("pairs"))
        with_y, with_g = self._products(step, change, gradient, pairs).unbind(1)
        # Rows: S, Y, s, y, g.
        s_y, y_y, g_g = with_y[2 * pairs], with_y[2 * pairs + 1], with_g[2 * pairs + 2]
        old = torch.stack([with_g[:pairs], with_g[pairs : 2 * pairs]])
        of_new = with_g[2 * pairs : 2 * pairs + 2]
        s_g, y_g = torch.zeros(2, self._size, dtype=torch.float64, device="cpu")
        s_g[:pairs], y_g[:pairs] = old
        if s_y > _LEAST_CURVATURE:
            place = int(self.number("next"))
            self._make_room(max(place + 1, pairs))
            self._store(place, step, change, with_y[: 2 * pairs].view(2, pairs), s_y, y_y)
            s_g[place], y_g[place] = of_new
        return self._combine(gradient, s_g, y_g, g_g)

    def _products(
        self, step: Sequence[Tensor], change: Sequence[Tensor], gradient: Sequence[Tensor], pairs: int
    ) -> Tensor:
        """Computes the products of S, Y, s, y and g with y and with g: [2 · pairs + 3, 2], on the CPU. Collective."""
        vector = self._vector
        total = torch.zeros(2 * pairs + 3, 2, dtype=torch.float64, device=vector.device)
        for steps, changes, s, y, g in vector.counted_of(self._steps, self._changes, step, change, gradient):
            history = [as_rows(each[:pairs], pairs) for each in (steps, changes)] if pairs else []
            newest = [as_rows(s), as_rows(y), as_rows(g)]
            total += products([*history, *newest], newest[1:]).to(vector.device)
        return vector.all_reduce_sum(total.flatten(), total.new_zeros(0))[0].view(total.shape)

    def _store(
        self, place: int, step: Sequence[Tensor], change: Sequence[Tensor], old: Tensor, s_y: Tensor, y_y: Tensor
    ) -> None:
        """Stores a pair at a place of the history.

        Args:
            old: [2, pairs], the products of S and of Y with the new y.
        """
        for memory, new in ((self._steps, step), (self._changes, change)):
            for into, value in zip(memory, new, strict=True):
                into[place] = value
        s_dot_y, y_dot_y = self._numbers["s_dot_y"], self._numbers["y_dot_y"]
        pairs = old.shape[1]
        # The row of the new s is filled as later y come: only the products of an s with y that are not older are read.
        s_dot_y[:pairs, place] = old[0]
        y_dot_y[:pairs, place] = y_dot_y[place, :pairs] = old[1]
        s_dot_y[place, place], y_dot_y[place, place] = s_y, y_y
        self.set("H_diag", float(s_y / y_y))
        self.set("pairs", min(pairs + 1, self._size))
        self.set("next", (place + 1) % self._size)

    def _combine(self, gradient: Sequence[Tensor], s_g: Tensor, y_g: Tensor, g_g: Tensor) -> float:
        """Computes the direction, as a combination; returns g · d.

        Args:
            s_g, y_g: the products of S and Y with g, by place.
            g_g: g · g.
        """
        pairs, gamma = int(self.number("pairs")), self.number("H_diag")
        age = (
            torch.arange(pairs, device="cpu") + int(self.number("next")) - pairs
        ) % self._size  # places, the oldest first
        a, b = coefficients(
            self._numbers["s_dot_y"][age][:, age], self._numbers["y_dot_y"][age][:, age], s_g[age], y_g[age], gamma
        )
        slope = -gamma * g_g - gamma * (a @ y_g[age]) + b @ s_g[age]
        by_place = torch.zeros(2 * pairs + 1, dtype=torch.float64, device="cpu")
        by_place[age], by_place[pairs + age], by_place[-1] = b, -gamma * a, -gamma
        for steps, changes, own, into in zip(self._steps, self._changes, gradient, self.direction, strict=True):
            rows = [as_rows(each[:pairs], pairs) for each in (steps, changes)] if pairs else []
            flat = into.contiguous()  # itself, unless someone has put another tensor in its place
            combine(by_place.to(into.device, non_blocking=True), [*rows, as_rows(own)], as_rows(flat)[0])
            if flat is not into:
                into.copy_(flat)
        return float(slope)


def coefficients(
    s_dot_y: Tensor, y_dot_y: Tensor, s_dot_g: Tensor, y_dot_g: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Solves for a and b of the direction −γ g − γ Y a + S b; Byrd, Nocedal and Schnabel (1994), theorem 2.2.

    Args:
        s_dot_y: SᵀY, [h, h], the oldest first; elements below its diagonal are not read.
        y_dot_y: YᵀY, [h, h].
        s_dot_g, y_dot_g: Sᵀg and Yᵀg, [h].
        gamma: γ.
    """
    upper = s_dot_y.triu()
    a = -torch.linalg.solve_triangular(upper, s_dot_g[:, None], upper=True)[:, 0]
    right = upper.diagonal() * a + gamma * (y_dot_g + y_dot_y @ a)
    b = torch.linalg.solve_triangular(upper.T, right[:, None], upper=False)[:, 0]
    return a, b
