"""Loss scaling for parameters of every kind, with one verdict on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.torch_private import scale_and_look
from shardopt.errors import GradientError, Problem
from shardopt.optim.gradients import alike, local_gradients
from shardopt.optim.groups import first_names
from shardopt.ranks import ranks_of
from shardopt.sharding.gradients import takes_gradient
from shardopt.sharding.view import leaves_of

_stepping: ContextVar[bool] = ContextVar("a GradScaler of this package is stepping an optimizer", default=False)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for plain and sharded parameters mixed at will, and for any optimizer of torch or of here.

    It unscales local tensors, and the ranks agree on whether any gradient of the job is not finite: all of them step or
    none does, and they keep one scale. (torch's leaves that to each rank where parameters are plain, does not see the
    gradients of shards in a ShardedTensor, and cannot unscale plain parameters and DTensors at once.)

    `unscale_`, and the `step` that calls it if nobody has, are collective: one all-reduce over the whole job, in which
    every rank takes part, also one without a gradient or a loss of its own.

    Args:
        as torch's; on the CPU pass device="cpu".
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._works_on = device

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place. Collective.

        Raises:
            GradientError: a gradient does not fit its parameter, or is fp16, which cannot be told from overflow. The
                other ranks skip this step then.
        """
        self._make_scale()
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients, unless that was done, and steps if all gradients of the job are finite. Collective.

        Returns:
            What the optimizer's step returned; None where it was skipped.
        """
        self._make_scale()
        before = _stepping.set(True)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            _stepping.reset(before)

    def _make_scale(self) -> None:
        """torch makes it at the first loss; a stage in the middle of a pipeline has none."""
        if self.is_enabled():
            self.scale(torch.zeros((), device=self._works_on))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch calls this to unscale, and wants to know for each device whether something was not finite."""
        ranks = ranks_of()
        found = {found_inf.device: found_inf}
        failure = None
        with torch.no_grad():
            try:
                for same in alike(_gradients(optimizer, allow_fp16)):
                    device = same[0].device
                    found.setdefault(device, torch.zeros_like(found_inf, device=device))
                    scale_and_look(same, inv_scale.to(device, non_blocking=True), found[device])
            except Exception as error:  # the other ranks are on their way to the all-reduce: they are to skip the step
                failure = error
                found_inf.fill_(1.0)
            somewhere = torch.stack([each.to(ranks.device) for each in found.values()]).sum()
            ranks.add_up(somewhere)
            if failure is not None:
                raise failure
            for each in found.values():
                each.copy_(somewhere > 0)
        return found


def refuse_scaled_backward() -> None:
    """To be called where a GradScaler is about to unscale or step an optimizer that updates in backward.

    Raises:
        GradientError: always.
    """
    problem = Problem(
        key="GradScaler",
        found="an optimizer that updates parameters in backward, or has such a part",
        required="gradients that are there after backward, to be unscaled and looked at",
        remedy="train in bf16 or fp32, without scaling the loss, or step after backward (shardopt.keyed)",
    )
    raise GradientError("a scaled loss has already updated parameters by gradients that are scaled", [problem])


def refuse_torchs_scaler(param_groups: Any) -> None:
    """To be called where torch's GradScaler is about to step an optimizer: it may not have unscaled all gradients.

    Raises:
        GradientError: plain parameters and DTensors have gradients, or shards that carry their own. Not raised within a
            step of this package's GradScaler.
    """
    if _stepping.get():
        return
    kinds = {_kind(param) for group in param_groups for param in group["params"]} - {None}
    if len(kinds) > 1 or "shards with gradients of their own" in kinds:
        problem = Problem(
            key="torch.amp.GradScaler",
            found=f"gradients of {' and of '.join(sorted(filter(None, kinds)))}",
            required="gradients of plain tensors alone, or of DTensors alone",
            remedy="use shardopt.GradScaler in its place",
        )
        raise GradientError("torch's GradScaler cannot unscale these parameters", [problem])


def _kind(param: Tensor) -> str | None:
    """What torch's GradScaler takes the gradient of a parameter for; None where there is none."""
    leaves = leaves_of(param)
    is_plain = len(leaves) == 1 and leaves[0] is param
    if takes_gradient(param) and param.grad is not None:
        return "plain tensors" if is_plain else "DTensors"
    carried = not is_plain and any(leaf.grad is not None for leaf in leaves)
    return "shards with gradients of their own" if carried else None


def _gradients(optimizer: Optimizer, allow_fp16: bool) -> Iterator[Tensor]:
    """The local gradients of all parameters.

    Raises:
        GradientError: one does not fit its parameter, or is fp16 where that is not allowed.
    """
    if getattr(optimizer, "updates_in_backward", False):
        refuse_scaled_backward()
    names = first_names(getattr(optimizer, "params", {}))
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, param in enumerate(params):
        name = names.get(param, f"parameter {number}")  # an optimizer of torch's has no names
        for gradient in local_gradients(name, param):
            if gradient is None:
                continue
            if gradient.dtype is torch.float16 and not allow_fp16:
                remedy = "keep parameters in fp32 and compute under torch.autocast"
                problem = Problem(f"{name}.grad", "fp16", "fp32 or bf16, which scaling does not overflow", remedy)
                raise GradientError("a gradient cannot be unscaled", [problem])
            yield gradient
