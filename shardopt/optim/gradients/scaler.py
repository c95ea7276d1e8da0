"""Scales losses for parameters of every kind; all ranks agree on whether to step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from shardopt.errors import GradientError, Problem
from shardopt.optim.gradients.local_gradients import alike, writable_gradients
from shardopt.optim.state_dict.groups import first_names
from shardopt.ranks import Group, SharedGroup
from shardopt.runtime.companions import note_companion
from shardopt.runtime.torch_gradients import ScalerStages, inverse_scale, scale_and_look
from shardopt.sharding.gradients import carries_gradients, takes_gradient
from shardopt.sharding.view import local_tensors

_stepping: ContextVar[bool] = ContextVar("a GradScaler of this package is stepping an optimizer", default=False)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for any mix of plain and sharded parameters, and for optimizers of torch or shardopt.

    Source of loss scaling: Micikevicius et al., Mixed Precision Training (2018), arXiv:1710.03740, section 3.2.

    It unscales local tensors, and the ranks agree on whether any gradient of the job is not finite. All of them step or
    none does, and they keep one scale. (torch's leaves that to each rank for plain parameters. It does not see the
    gradients of shards in a ShardedTensor, and cannot unscale plain parameters and DTensors at once.)

    `unscale_`, and the `step` that calls it if nobody has, are collective: one all-reduce over the whole job, or over
    `process_group`. Every rank takes part, even without a gradient or a loss of its own.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's; on the CPU pass
            device="cpu".
        process_group: the ranks that agree: a process group, or a device mesh. None is the whole job.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Group | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._group = SharedGroup(process_group)
        self._works_on = device

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place. Collective.

        The children of an optimizer (of a combined one, or the wrapped one of a wrapper) are unscaled with it, and it
        with them. Gradients that any of these has unscaled since the last `update` are not unscaled again; the rest is.

        Raises:
            GradientError: a gradient does not fit its parameter, or is fp16, in which overflow cannot be recognised.
                The other ranks skip this step then.
            RuntimeError: nothing is left to unscale, or it was stepped already.
        """
        if not self.is_enabled():
            return
        self._make_scale()
        stages, atoms = ScalerStages(self), _atoms_of(optimizer)
        refuse_stepped(stages, atoms, "unscale_()")
        due = [atom for atom in atoms if stages.stage(atom) is OptState.READY]
        if not due:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer, or on what it is part or made of, "
                "since the last update()."
            )
        inverse = inverse_scale(self)
        found_inf = torch.zeros((), dtype=torch.float32, device=inverse.device)
        verdict = self._unscale(optimizer, due, inverse, found_inf, False)
        for atom in due:
            stages.set(atom, OptState.UNSCALED, verdict)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients, if not done yet, and steps if all gradients of the job are finite. Collective.

        Returns:
            The result of the optimizer's step; None where it was skipped.
        """
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        self._make_scale()
        note_companion(optimizer, self, "_growth_tracker")
        stages, atoms = ScalerStages(self), _atoms_of(optimizer)
        if isinstance(optimizer, Composed) and "closure" not in kwargs:  # which torch refuses
            refuse_stepped(stages, atoms, "step()")
            if any(stages.stage(atom) is OptState.READY for atom in atoms):
                self.unscale_(optimizer)
            stages.set(optimizer, OptState.UNSCALED, _merged(stages.found_inf(atom) for atom in atoms))
        before = _stepping.set(True)
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            _stepping.reset(before)
        for atom in atoms:
            stages.set(atom, OptState.STEPPED)
        return result

    def _make_scale(self) -> None:
        """Makes the scale, as torch does at the first loss, which a middle stage of a pipeline never sees."""
        if self.is_enabled():
            self.scale(torch.zeros((), dtype=torch.float32, device=self._works_on))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales for torch, which asks, for each device, whether any element was not finite."""
        return self._unscale(optimizer, _atoms_of(optimizer), inv_scale, found_inf, allow_fp16)

    def _unscale(
        self,
        optimizer: Optimizer,
        due: Sequence[Optimizer],
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients of the optimizers that are due. Collective: one all-reduce.

        Returns:
            For each device, whether something was not finite anywhere in the job: 1.
        """
        ranks = self._group.ranks
        verdict = {found_inf.device: found_inf}
        failure = None
        with torch.no_grad():
            try:
                for same in alike(_gradients(optimizer, due, allow_fp16)):
                    device = same[0].device
                    verdict.setdefault(device, torch.zeros_like(found_inf, device=device))
                    # Gradients may be on the CPU (FSDP2's offload), which does not wait for such a copy.
                    inverse = inv_scale.to(device, non_blocking=device.type != "cpu")
                    scale_and_look(same, inverse, verdict[device])
            except Exception as error:  # the other ranks are on their way to the all-reduce: they are to skip the step
                failure = error
                found_inf.fill_(1.0)
            device = ranks.device_beside(found_inf.device)
            somewhere = torch.stack([each.to(device) for each in verdict.values()]).sum()
            ranks.all_reduce_sum(somewhere)
            if failure is not None:
                raise failure
            for each in verdict.values():
                each.copy_(somewhere > 0)
        return verdict


def refuse_scaled_backward() -> None:
    """Raises, as a GradScaler cannot unscale or step an optimizer that updates in backward.

    Raises:
        GradientError: always.
    """
    problem = Problem(
        key="GradScaler",
        found="an optimizer that updates parameters in backward, or has such a child",
        required="gradients that are there after backward, to be unscaled and looked at",
        remedy="train in bf16 or fp32, without scaling the loss, or step after backward (shardopt.keyed)",
    )
    raise GradientError(
        "a scaled loss has already updated parameters by gradients that are scaled", [problem], code="grad-scaler"
    )


def refuse_torchs_scaler(param_groups: Any) -> None:
    """Raises if torch's GradScaler may not have unscaled all gradients of the optimizer that it steps.

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
            required="only gradients of plain tensors, or only of DTensors",
            remedy="use shardopt.GradScaler in its place",
        )
        raise GradientError("torch's GradScaler cannot unscale these parameters", [problem], code="grad-scaler")


def _kind(param: Tensor) -> str | None:
    """Returns the kind of a parameter's gradient as torch's GradScaler sees it; None if there is none."""
    if takes_gradient(param) and param.grad is not None:
        tensors = local_tensors(param)
        return "plain tensors" if len(tensors) == 1 and tensors[0] is param else "DTensors"
    return "shards with gradients of their own" if carries_gradients(param) else None


def _gradients(optimizer: Optimizer, due: Sequence[Optimizer], allow_fp16: bool) -> Iterator[Tensor]:
    """Yields the local gradients of the parameters of the optimizers that are due.

    Raises:
        GradientError: one does not fit its parameter, or is fp16 where that is not allowed.
    """
    if getattr(optimizer, "updates_in_backward", False):
        refuse_scaled_backward()
    names = first_names(getattr(optimizer, "params", {}))
    params = chain.from_iterable(group["params"] for each in due for group in each.param_groups)
    for number, param in enumerate(params):
        name = names.get(param, f"parameter {number}")  # an optimizer of torch's has no names
        for gradient in writable_gradients(name, param):
            if gradient is None:
                continue
            if gradient.dtype is torch.float16 and not allow_fp16:
                remedy = "keep parameters in fp32 and compute under torch.autocast"
                problem = Problem(f"{name}.grad", "fp16", "fp32 or bf16, which scaling does not overflow", remedy)
                raise GradientError("a gradient cannot be unscaled", [problem], code="grad-scaler")
            yield gradient


@runtime_checkable
class Composed(Protocol):
    """The protocol of an optimizer that may have parts, and be part of others: a keyed one."""

    def _atoms(self) -> tuple[Optimizer, ...]:
        """Returns the innermost optimizers."""

    def _family(self) -> list[Optimizer]:
        """Returns all optimizers that it is part of, or consists of, itself included."""


def _atoms_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    return optimizer._atoms() if isinstance(optimizer, Composed) else (optimizer,)


def refuse_stepped(stages: ScalerStages, optimizers: Iterable[Optimizer], call: str) -> None:
    """Raises, as torch does, if one of the optimizers was stepped since the last update.

    Raises:
        RuntimeError: one was.
    """
    if any(stages.stage(each) is OptState.STEPPED for each in optimizers):
        raise RuntimeError(
            f"{call} is called after step() of this optimizer, or of what it is part or made of, without an update()."
        )


def share_unscaled(scaler: torch.amp.GradScaler, optimizer: Composed) -> None:
    """Tells torch's GradScaler, which is about to step an optimizer, which gradients it has unscaled.

    torch's knows optimizers one by one: gradients unscaled through a child of one, or through one that it is a
    child of, it would unscale again. Those that are left are unscaled here. Not to be called within a step of this
    package's GradScaler.

    Raises:
        GradientError: gradients were unscaled twice already. No step was taken.
        RuntimeError: a child of it, or one that it is a child of, was stepped since the last update.
    """
    if _stepping.get():
        return
    stages, atoms = ScalerStages(scaler), {id(atom): atom for atom in optimizer._atoms()}
    related = [each for each in optimizer._family() if not atoms.keys().isdisjoint(map(id, _atoms_of(each)))]
    refuse_stepped(stages, related, "step()")
    done = [each for each in related if stages.stage(each) is OptState.UNSCALED]
    times = Counter(id(atom) for each in done for atom in _atoms_of(each))
    if any(times[atom] > 1 for atom in atoms):
        problem = Problem(
            key="torch.amp.GradScaler",
            found=f"unscale_() of {' and of '.join(type(each).__name__ for each in done)}, which share gradients",
            required="each gradient divided by the scale once",
            remedy="call unscale_() of one of them, or use shardopt.GradScaler, which knows what they share",
        )
        raise GradientError("gradients were divided by the scale twice", [problem], code="grad-scaler")
    if not done or stages.stage(optimizer) is OptState.UNSCALED:
        return
    left = [atom for number, atom in atoms.items() if not times[number]]
    for atom in left:
        scaler.unscale_(atom)
    stages.set(optimizer, OptState.UNSCALED, _merged(stages.found_inf(each) for each in (*done, *left)))


def _merged(verdicts: Iterable[Mapping[torch.device, Tensor]]) -> dict[torch.device, Tensor]:
    """Merges verdicts: by device, whether any of them found an element that is not finite."""
    merged: dict[torch.device, Tensor] = {}
    for verdict in verdicts:
        for device, flag in verdict.items():
            merged[device] = torch.maximum(merged[device], flag) if device in merged else flag
    return merged
