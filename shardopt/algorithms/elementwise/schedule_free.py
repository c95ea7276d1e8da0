"""Schedule-Free SGD and AdamW: averages of the weights take the place of a schedule.

y the weights that gradients are taken at, x their average, z the weights of the base method; t the number of the step.
In training mode the model has y, in evaluation mode x; x itself is not kept, as y = β x + (1 − β) z.

    w = tʳ lr_max^weight_lr_power, c = w / Σ w, where lr_max is the largest rate so far
    U = G + weight_decay y                                                  (SGD)
    V ← β₂ V + (1 − β₂) G², U = G / (√(V / (1 − β₂ᵗ)) + eps) + weight_decay y        (AdamW)
    z ← z − lr U
    x ← (1 − c) x + c z,  that is  y ← (1 − c) y + c z_old + lr (β (1 − c) − 1) U

with β momentum, or β₁ of betas, and lr times t / warmup_steps in the first steps.
Source: Defazio et al., The Road Less Scheduled (arXiv:2405.15682), in the order of operations of the authors' package.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.elementwise.base import ElementwiseOptimizer, Numbers, computed_in
from shardopt.algorithms.options import NOT_NEGATIVE, RATE, Range, are_decays, options_of, refuse_options
from shardopt.algorithms.registry import Options
from shardopt.errors import Problem, StateError
from shardopt.runtime.accelerator import wait_for_reads
from shardopt.runtime.signals import CHANGING, is_part_of
from shardopt.sharding.swapped import MODE_IN_SWAP, params_in, refuse_swapped
from shardopt.sharding.view import local_tensors

TRAIN_MODE = "train_mode"
"""The option of a group that says whether the model has y (True) or x."""


class ScheduleFree(ElementwiseOptimizer):
    """The base of both Schedule-Free optimizers: the two modes, and the weights of the average.

    Counters are a parameter's own (`step`; `weight_sum`, the sum of w, and `lr_max` in float64), so a parameter that
    had no gradient for a while averages over its own steps alone.
    """

    @is_part_of(CHANGING)
    def train(self, mode: bool = True) -> None:
        """Switches the model from the averages x to the weights to train y; with `mode=False` from y to x.

        Nothing happens in the mode that there is already, nor to a parameter that never had a step, whose x is y. Both
        ways there is one rounding: y after `eval` and `train` may differ from before in the last bits. One that fails
        in the middle is taken back.
        """
        if any(group[TRAIN_MODE] != mode for group in self.param_groups):
            refuse_swapped(MODE_IN_SWAP, params_in(self.param_groups))
        groups = [group for group in self.param_groups if group[TRAIN_MODE] != mode]
        wait_for_reads(chain.from_iterable(local_tensors(each) for group in groups for each in group["params"]))
        begun: list[tuple[dict[str, Any], Tensor, int]] = []
        try:
            for group in groups:
                for parameter in group["params"]:
                    begun.append((group, parameter, parameter._version))
                    self._switch(group, parameter, mode)
            for group in groups:
                group[TRAIN_MODE] = mode
        except BaseException:  # out of memory, or an interrupt: no mix is left, which would be taken for either
            for group, parameter, version in begun:
                if parameter._version != version:
                    self._switch(group, parameter, not mode)
            for group in groups:
                group[TRAIN_MODE] = not mode
            raise

    @torch.no_grad()
    def _switch(self, group: Options, parameter: Tensor, mode: bool) -> None:
        base = self.state.get(parameter, {}).get("z")
        if base is None:
            return
        beta = self._beta(group)
        here = computed_in(parameter)
        here.lerp_(computed_in(base), 1 - beta if mode else 1 - 1 / beta)
        if here.dtype != parameter.dtype and not parameter.is_complex():
            parameter.copy_(here)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does; it begins in training mode, regardless of the other groups.

        Raises:
            ValueError: an option is out of its range, or is none: what is in the model is changed by `train` alone.
        """
        options = {**self.defaults, **param_group}
        set_by = Range("to be set by train() and eval()", lambda mode: TRAIN_MODE not in param_group)
        refuse_options(
            type(self).__name__, {TRAIN_MODE: None, **options}, train_mode=set_by, weight_lr_power=NOT_NEGATIVE
        )
        super().add_param_group(param_group)

    def eval(self) -> None:
        """Switches the model to the averages x, for evaluation; steps are refused until `train`."""
        self.train(False)

    def unlike(self, group: Options, options: Options, kept: Collection[str]) -> Iterable[tuple[str, Any, Any]]:
        """Yields (name, stored, own) if a load keeps the group's β, but the saved weights were made with another."""
        for name in {"momentum", "betas"}.intersection(kept, options, group):
            if self._beta({**group, name: options[name]}) != self._beta(group):
                yield name, options[name], group[name]

    def _beta(self, group: Options) -> float:
        raise NotImplementedError

    def _refuse_step(self) -> None:
        if is_evaluating(self.param_groups):
            raise refusal_to_step(type(self).__name__)

    def _count(self, group: Options, lr: float, state: dict[str, Any]) -> Numbers:
        state["step"] += 1
        step = int(state["step"])
        if step <= group["warmup_steps"]:
            lr = lr * (step / group["warmup_steps"])
        lr_max = max(lr, float(state["lr_max"]))
        state["lr_max"].fill_(lr_max)
        weight = (step ** group["r"]) * (lr_max ** group["weight_lr_power"])
        state["weight_sum"] += weight
        total = float(state["weight_sum"])
        return lr, weight / total if total else 0.0, float(step)

    @staticmethod
    def _move(group: Options, lr: float, share: float, beta: float, y: list[Tensor], z: list[Tensor], u: Any) -> None:
        """Moves y and z by U, with c = `share`."""
        torch._foreach_lerp_(y, z, share)
        torch._foreach_add_(y, u, alpha=lr * (beta * (1 - share) - 1))
        torch._foreach_sub_(z, u, alpha=lr)


class ScheduleFreeSGD(ScheduleFree):
    """Schedule-Free SGD (arXiv:2405.15682).

    State of a parameter: `z`, of its shape and dtype; `step`, `weight_sum` and `lr_max`, numbers on the CPU.

    Args:
        params: tensors or groups of them.
        lr: the learning rate, a number or a tensor of one element, which is read in every step; no schedule is needed.
        momentum: β, between 0 and 1.
        weight_decay: at least 0, taken at y.
        warmup_steps: over which the rate rises linearly.
        r: the power of the step in the weight of the average.
        weight_lr_power: the power of the largest rate so far in it, at least 0.
        foreach, maximize: as of `Lion`.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        options = options_of(
            locals(),
            lr=RATE,
            momentum=Range("a number between 0 and 1", lambda momentum: 0 < momentum < 1),
            weight_decay=NOT_NEGATIVE,
            warmup_steps=NOT_NEGATIVE,
        )
        super().__init__(params, _in_training(options))

    def _beta(self, group: Options) -> float:
        return float(group["momentum"])

    def _update(
        self, group: Options, numbers: Numbers, weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> None:
        (lr, share, _), (z,) = numbers, state
        u: Any = gradients
        if group["weight_decay"] != 0:
            u = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        self._move(group, lr, share, self._beta(group), weights, z, u)


class ScheduleFreeAdamW(ScheduleFree):
    """Schedule-Free AdamW (arXiv:2405.15682).

    State of a parameter: `exp_avg_sq` and `z`, of its shape and dtype; `step`, `weight_sum` and `lr_max`, numbers on
    the CPU.

    Args:
        params: tensors or groups of them.
        lr: the learning rate, a number or a tensor of one element, which is read in every step; no schedule is needed.
        betas: (β₁, β₂), β₁ between 0 and 1, β₂ in [0, 1).
        eps: is added to the root.
        weight_decay, warmup_steps, r, weight_lr_power, foreach, maximize: as of `ScheduleFreeSGD`.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        options = options_of(
            locals(),
            lr=RATE,
            betas=Range("two numbers in [0, 1), the first above 0", lambda betas: are_decays(betas) and betas[0] > 0),
            eps=NOT_NEGATIVE,
            weight_decay=NOT_NEGATIVE,
            warmup_steps=NOT_NEGATIVE,
        )
        super().__init__(params, _in_training(options))

    def _beta(self, group: Options) -> float:
        return float(group["betas"][0])

    def _update(
        self, group: Options, numbers: Numbers, weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> None:
        (lr, share, step), (squares, z) = numbers, state
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        roots = torch._foreach_div(squares, 1 - beta2 ** int(step))
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        u = torch._foreach_div(gradients, roots)
        if group["weight_decay"] != 0:
            torch._foreach_add_(u, weights, alpha=group["weight_decay"])
        self._move(group, lr, share, beta1, weights, z, u)


def _in_training(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with training mode inserted before `foreach` and `maximize`."""
    last = ("foreach", "maximize")
    own = {name: value for name, value in options.items() if name not in last}
    return {**own, TRAIN_MODE: True, **{name: options[name] for name in last}}


def is_evaluating(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the model holds averages instead of the weights to train, by the options of its groups."""
    return any(group.get(TRAIN_MODE) is False for group in groups)


def refusal_to_step(key: str) -> StateError:
    """Makes the error for a step on averages."""
    problem = Problem(
        key, "an optimizer in evaluation mode", "training mode", "call optimizer.train() before the first step"
    )
    return StateError("a step would train the averages; nothing was changed", [problem], code="averages")
