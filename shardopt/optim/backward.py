"""An optimizer that updates each parameter of a dense module during backward, as soon as its gradient is complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.algorithms.low_precision.options import as_texts
from shardopt.algorithms.registry import AlgorithmSpec, spec_of
from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.core.keyed_wrapper import KeyedOptimizerWrapper
from shardopt.optim.fused import FusedOptimizer, FusedOptimizerModule
from shardopt.optim.gradients.local_gradients import warn_of_no_gradients
from shardopt.optim.keyed import build
from shardopt.optim.state_dict.groups import NamedTensors
from shardopt.ranks import Group
from shardopt.runtime.accelerator import has_streams, module_in_use
from shardopt.runtime.torch_gradients import (
    backward_under_way,
    gradient_hooks,
    in_forward_of_ddp,
    in_pipeline_schedule,
    reduced_by_ddp,
)
from shardopt.sharding.gradients import takes_gradient, zero_gradients
from shardopt.sharding.swapped import STEP_IN_SWAP, refuse_swapped
from shardopt.sharding.view import local_tensors
from shardopt.state.param_groups import PARAMS
from shardopt.state.state import Tied
from shardopt.world import Lock, world


def in_backward(
    module: nn.Module | NamedTensors,
    algorithm: type[Optimizer] | str,
    *,
    groups: Collection[Mapping[str, Any]] | None = None,
    process_group: Group | None = None,
    tied: Tied | None = None,
    **defaults: Any,
) -> InBackwardOptimizer:
    """Makes an optimizer that updates each parameter in backward, once its gradient is complete, and then frees that.

    So there are never more gradients than those of the layer that backward has just come to. The result is bit for bit
    that of `shardopt.keyed` with the same arguments and a step after backward. Names and state are the same, so that
    each loads the other's checkpoints. The training loop stays as it is:

        fully_shard(model)                                   # or tensor parallel, or a plain module
        optimizer = shardopt.in_backward(model, "adamw", lr=3e-4, groups=[{"match": "norm|bias", "weight_decay": 0.0}])
        for step, micro_batches in enumerate(data):
            *some, last = micro_batches
            with optimizer.accumulate():                     # gradients add up; nothing is updated
                for batch in some:
                    loss_of(model, batch).backward()
            loss_of(model, last).backward()                  # updates
            optimizer.step()                                 # for schedulers, hooks and the like

    Every backward outside of `accumulate` updates, so one with several losses belongs into it, all but the last. Within
    one backward, the summands of a gradient (tied parameters, modules that run twice) are added up first. But
    activation checkpointing with `use_reentrant=True` runs a backward of its own for each region, so no parameter may
    be in two. Not for gradients that are looked at after backward: clipping and GradScaler refuse it.

    Args:
        module: the module to train, after it was sharded; or parameters by name, if others have another optimizer.
        algorithm: of an elementwise algorithm, a torch optimizer class or its name in any case.
        groups, process_group, tied: as in `shardopt.keyed`; groups without algorithms of their own.
        defaults: options of `algorithm`.

    Raises:
        AlgorithmError: an algorithm is not known, has no such option, or needs more than the gradient of one parameter.
        StateError: the module, or a parameter, is in DistributedDataParallel or FullyShardedDataParallel, which hand
            out gradients in their own ways. Or a parameter is there twice, or is updated in backward already, such as
            by a module's fused optimizer. Or a pattern matches nothing. A module that is wrapped in
            DistributedDataParallel later is refused by the first backward, before anything is changed. So is a
            schedule of torch.distributed.pipelining with several micro-batches, each of which has a backward.
    """
    groups = groups or ()
    _refuse_algorithm(spec_of(algorithm), groups)
    if isinstance(module, nn.Module):
        _refuse_wrapped(module)
        _refuse_fused(module)
    named_params = module.named_parameters() if isinstance(module, nn.Module) else module
    (optimizer,) = build(InBackwardOptimizer, algorithm, named_params, groups, defaults, process_group, tied)
    optimizer.save_param_groups(True)
    optimizer.start()
    if isinstance(module, nn.Module):
        module.register_forward_pre_hook(_refuse_ddp)
    return optimizer


_NONE = -2  # no backward has this number; -1 is that outside of backwards


@dataclass
class _Now:
    """The running work of an optimizer in backward, which copies do not have."""

    handles: list[RemovableHandle] = field(default_factory=list)
    waiting: dict[Tensor, None] = field(default_factory=dict)  # with gradients that `accumulate` has collected
    accumulating: bool = False
    backward: int = _NONE
    updated: set[Tensor] = field(default_factory=set)  # in that backward
    looked_for_gradients: bool = False
    lock: Lock = field(default_factory=lambda: world().lock())


class InBackwardOptimizer(KeyedOptimizerWrapper, FusedOptimizer):
    """The optimizer that `in_backward` makes; it does nothing before `start`.

    Step-pre-hooks, its own and those of all optimizers that it is part of, run before the first update of each
    backward, so that who refuses a step refuses there, before anything has changed; and again, like step-post-hooks,
    with `step`.

    Args:
        params: FQN → parameter (plain or DTensor).
        optim_factory: builds the torch optimizer from the list of tensors that it shall step on.

    Raises:
        AlgorithmError: a step would be differentiable.
        StateError: a parameter's gradients are not set on itself, as those of ShardedTensors.
    """

    _in_backward = True

    def __init__(self, params: Mapping[str, Tensor], optim_factory: Callable[[list[Tensor]], Optimizer]) -> None:
        super().__init__(params, optim_factory)
        for group in self.param_groups:
            self._refuse({parameter: self._names[parameter] for parameter in group[PARAMS]}, group)
        self._now = _Now()

    def start(self) -> None:
        """Makes backward update the parameters from now on.

        Raises:
            StateError: they are updated in backward by another optimizer, or are in DistributedDataParallel.
        """
        _refuse_updated(self._names)
        self._refuse_reduced()
        self._now.handles = [self._listen(parameter) for parameter in self._names]

    def stop(self) -> None:
        """Stops updates in backward, which then leaves gradients in place; keeps state.

        Until then the parameters keep this optimizer, and it keeps them, where Python's garbage collector does not see
        it: the memory of a model that is dropped before is not freed.
        """
        for handle in self._now.handles:
            handle.remove()
        self._now = _Now()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within this context, backward only adds up gradients; the next backward outside of it updates.

        They take the memory that gradients take. Under `fully_shard`, `set_requires_gradient_sync(False)` can be used
        in its place, which keeps whole gradients and saves communication.
        """
        before, self._now.accumulating = self._now.accumulating, True
        try:
            yield
        finally:
            self._now.accumulating = before

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes no parameter that backward has updated.

        Parameters that got gradients within `accumulate`, and none in a backward after it, are updated now, as they
        would be by a step after backward.

        Args:
            closure: runs forward and backward, which updates, and returns the loss, which is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._now.handles and not self._now.looked_for_gradients:
            self._now.looked_for_gradients = True
            if self._now.backward == _NONE and not self._now.waiting:
                warn_of_no_gradients(self._names)
        refuse_swapped(STEP_IN_SWAP, self._now.waiting)
        for parameter in list(self._now.waiting):
            self._update(parameter)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that `accumulate` collected; there are no others, and zeros are not kept."""
        self._now.waiting.clear()
        super().zero_grad(set_to_none=True)

    def _add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        self._refuse(names, {**self.defaults, **as_texts(options)})
        if self._now.handles:
            _refuse_updated(names)
        super()._add_group(names, options)
        if self._now.handles:
            self._now.handles += map(self._listen, names)

    def _listen(self, parameter: Tensor) -> RemovableHandle:
        """Registers a hook that torch calls when a gradient is complete, and `fully_shard` when it is reduced."""
        trained = parameter.requires_grad
        if not trained and not (parameter.is_floating_point() or parameter.is_complex()):
            return RemovableHandle({})
        # torch takes no hook for a frozen parameter, which may be thawed later.
        parameter.requires_grad_(True)
        handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]  # torch says nothing of its types
        parameter.requires_grad_(trained)
        return cast(RemovableHandle, handle)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._now.accumulating:
            self._now.waiting[parameter] = None
            return
        # Where a model lies on several devices, each has a thread of backward.
        with self._now.lock:
            backward = backward_under_way()
            if backward != self._now.backward:
                refuse_swapped(STEP_IN_SWAP, self._stepped_with())  # of all, before the first of them is stepped
                if self._now.backward == _NONE:
                    self._refuse_reduced()
                if in_pipeline_schedule():
                    raise _by_micro_batch()
                self._before_backward()
                self._now.backward, self._now.updated = backward, set()
            if parameter in self._now.updated:
                raise _came_twice(self._names[parameter])
            self._now.updated.add(parameter)
            self._update(parameter)

    def _stepped_with(self) -> Iterator[Tensor]:
        """Yields the parameters of this optimizer, and of all that are part of one with it."""
        for each in self._family():
            if isinstance(each, KeyedOptimizer) and not each._children:
                yield from each._names

    def _update(self, parameter: Tensor) -> None:
        self._now.waiting.pop(parameter, None)
        if parameter.grad is not None:
            _keep_for_this_stream(parameter.grad)
        self._local.step_alone(parameter)
        # Fused steps leave the version as it is, by which autograd finds who still needs the value of before.
        torch.autograd.graph.increment_version(parameter)
        zero_gradients(parameter, set_to_none=True)

    def _refuse(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        """Raises if parameters of a group, present or new, cannot be stepped in backward; `options` are the group's."""
        if options.get("differentiable"):
            problem = Problem("differentiable", "True", "False, as backward drops what it has computed", "leave it out")
            raise AlgorithmError("a step in backward cannot be differentiated", [problem], code="step-in-backward")
        problems = [
            Problem(name, f"a {type(tensor).__name__}", "a plain tensor or a DTensor", "step it after backward")
            for tensor, name in names.items()
            if not takes_gradient(tensor)
        ]
        if problems:
            raise StateError(
                "backward does not tell when the gradients of these parameters are complete",
                problems,
                code="step-in-backward",
            )
        narrow = self._local.state.narrow
        remedy = (
            "cut it only along its first dimension, give it to a group with state_dtype=None, or step after backward"
        )
        problems = [
            Problem(name, "8-bit state whose blocks lie on several ranks", "scales that need no other rank", remedy)
            for tensor, name in names.items()
            if narrow is not None and narrow.waits_for_others(options, tensor)
        ]
        if problems:
            raise AlgorithmError("ranks cannot agree on scales within backward", problems, code="low-precision")

    def _refuse_reduced(self) -> None:
        if reduced_by_ddp(self._names):
            raise _reduced_later(DistributedDataParallel.__name__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        started = state.pop("_started")
        super().__setstate__({**state, "_now": _Now()})
        if started:
            self.start()

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        kept["_started"] = bool(kept.pop("_now").handles)
        return kept


def _refuse_algorithm(spec: AlgorithmSpec, groups: Collection[Mapping[str, Any]]) -> None:
    if not spec.elementwise:
        algorithm = (
            f"{spec.name}: {spec.why_not or 'its step is for all parameters at once, and ranks communicate in it'}"
        )
        required = "an algorithm that needs nothing but the gradient of the element that it updates"
        problem = Problem("algorithm", algorithm, required, f"step {spec.name} after backward, with shardopt.keyed")
        raise AlgorithmError(f"{spec.name} may not step in backward", [problem], code="step-in-backward")
    if any("algorithm" in group for group in groups):
        remedy = "call in_backward for the parameters of each algorithm, and combine them with CombinedOptimizer"
        problem = Problem("groups", "a group with an algorithm of its own", "one algorithm", remedy)
        raise AlgorithmError("an optimizer in backward has one algorithm", [problem], code="step-in-backward")


def _keep_for_this_stream(gradient: Tensor) -> None:
    """Keeps a gradient's memory until this stream has used it; waits if it is being copied to pinned memory.

    On accelerators, `fully_shard` reduces in streams of its own, and hands gradients over while they are in flight.
    """
    in_use = module_in_use()
    if in_use is None or not has_streams(torch.device(in_use[0])):
        return
    kind, module = in_use
    for local in local_tensors(gradient):
        if local.device.type == kind:
            # Of replicas it was allocated for another stream than the one that steps, which could reuse it too soon.
            local.record_stream(module.current_stream(local.device))
        elif local.is_cpu and local.is_pinned():  # offloaded: torch may not wait for the copy before it calls
            module.current_stream().synchronize()


def _refuse_updated(names: Mapping[Tensor, str]) -> None:
    problems = [
        Problem(name, "an optimizer that updates it in backward", "one optimizer", "call stop() of that one")
        for parameter, name in names.items()
        if any(isinstance(getattr(hook, "__self__", None), InBackwardOptimizer) for hook in gradient_hooks(parameter))
    ]
    if problems:
        raise StateError("a parameter would be updated twice", problems, code="step-in-backward")


def _refuse_fused(module: nn.Module) -> None:
    fused = (child.fused_optimizer for child in module.modules() if isinstance(child, FusedOptimizerModule))
    taken = {parameter for optimizer in fused for parameter in optimizer.params.values()}
    remedy = "pass the other parameters by name, and combine both with CombinedOptimizer"
    problems = [
        Problem(name, "an optimizer that its module has fused in", "one optimizer", remedy)
        for name, parameter in module.named_parameters()
        if parameter in taken
    ]
    if problems:
        raise StateError("a parameter would have two optimizers", problems, code="step-in-backward")


def _by_micro_batch() -> StateError:
    problem = Problem(
        key="backward",
        found="a schedule of torch.distributed.pipelining, which runs one backward for each micro-batch",
        required="one backward for each step",
        remedy="use shardopt.keyed, and step after the schedule; or run it within optimizer.accumulate()",
    )
    return StateError("each micro-batch would be a step", [problem], code="step-in-backward")


def _came_twice(name: str) -> StateError:
    problem = Problem(
        key=name,
        found="a second part of its gradient in one backward, after the first has updated it",
        required="a gradient that comes whole, unlike that of a module which runs twice in a forward and for which "
        "fully_shard holds gradients back (set_requires_gradient_sync(False))",
        remedy="accumulate with optimizer.accumulate() in its place, and load a checkpoint from before this backward",
    )
    return StateError("a gradient came in parts", [problem], code="step-in-backward")


def _refuse_wrapped(module: nn.Module) -> None:
    kinds = {type(child).__name__ for child in module.modules() if isinstance(child, _REDUCES_LATER)}
    if kinds:
        raise _reduced_later(" and ".join(sorted(kinds)))


def _refuse_ddp(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and in_forward_of_ddp():
        raise _reduced_later(DistributedDataParallel.__name__)


def _reduced_later(kind: str) -> StateError:
    remedy = "use fully_shard (with a mesh of two dimensions for replicas), or step after backward (shardopt.keyed)"
    problem = Problem("module", kind, "gradients that are complete when they are set", remedy)
    return StateError(
        f"{kind} averages gradients after backward would have used them", [problem], code="step-in-backward"
    )


_REDUCES_LATER = (DistributedDataParallel, FullyShardedDataParallel)
