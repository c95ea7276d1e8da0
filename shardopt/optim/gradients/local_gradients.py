"""The local memory of gradients, to measure, scale, clamp and unscale it for parameters of any kind."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import is_

import torch
from torch import Tensor

from shardopt.errors import GradientError
from shardopt.optim.state_dict.groups import listed
from shardopt.runtime.torch_gradients import scale_and_look
from shardopt.sharding.gradients import has_gradient, local_gradients, requires_gradient, takes_gradient
from shardopt.sharding.pieces import elements_overlap
from shardopt.sharding.view import assemble, is_held, local_tensors

_log = logging.getLogger("shardopt")

_SHORT = (torch.bfloat16, torch.float16)


def writable_gradients(name: str, parameter: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the memory of each local tensor's gradient (`local_tensors(parameter)`); None if there is none.

    Writing into it changes the gradient that the optimizer steps with. Of a sparse gradient it is the values, after
    the gradient was coalesced in place. A gradient with another placement than its parameter is redistributed, and
    takes the old one's place; for that all ranks of its mesh must call. So does a copy of one whose elements share
    memory (`expand`), which cannot be written into.

    Raises:
        GradientError: the gradient does not fit the parameter.
    """
    try:
        gradients = local_gradients(parameter)
    except GradientError as error:
        problems = [replace(problem, key=f"{name}.grad") for problem in error.problems]
        raise GradientError(error.message, problems, code=error.code) from None
    whole = parameter.grad if takes_gradient(parameter) else None
    standing = tuple(local.grad for local in local_tensors(parameter)) if whole is None else local_tensors(whole)
    sparse = any(map(_is_sparse, gradients))
    gradients = tuple(map(_writable, gradients))
    if not all(map(is_, gradients, standing)):
        if whole is None:
            for local, gradient in zip(local_tensors(parameter), gradients, strict=True):
                local.grad = gradient
        else:
            parameter.grad = assemble(parameter, [gradient for gradient in gradients if gradient is not None])
    return tuple(map(_memory, gradients)) if sparse else gradients


def warn_of_no_gradients(names: Mapping[Tensor, str]) -> None:
    """Logs a warning if no parameter has a gradient; called in an optimizer's first step.

    One that is frozen, or of which this rank holds no elements, need have none.

    Args:
        names: parameter → FQN.
    """
    trained = {param: name for param, name in names.items() if requires_gradient(param) and is_held(param)}
    if trained and not any(map(has_gradient, trained)):
        _log.warning(
            "not one of the %d parameters of an optimizer has a gradient in its first step, which moves nothing (%s). "
            "Unless this step left these layers out, it was most likely made before fully_shard, parallelize_module or "
            "to_empty gave the model other parameters: make the optimizer after these, from the model's new "
            "named_parameters() [stale-parameters]",
            len(trained),
            listed(trained.values()),
        )


def scale(kinds: Iterable[list[Tensor]], factor: Tensor) -> None:
    """Multiplies local gradients in place.

    Args:
        kinds: gradients of one device and dtype each, as from `alike`.
        factor: fp64, without dimensions, anywhere. One on another device than the gradients has to be waited for.
    """
    if factor.device.type == "cpu" and factor.item() == 1.0:  # as in most steps; elsewhere a look would wait
        return
    for same in kinds:
        device, dtype = same[0].device, same[0].dtype
        if dtype in _SHORT:  # a factor of their own precision could be off by half a percent
            scale_and_look(same, factor.to(device, torch.float32), torch.zeros((), dtype=torch.float32, device=device))
        else:
            # Of another dtype, a factor would keep CUDA from multiplying all of them at once.
            torch._foreach_mul_(same, factor.to(device, dtype))


def clamp(kinds: Iterable[list[Tensor]], largest: float) -> None:
    """Limits every element of local gradients to [-largest, largest], in place; NaN stays NaN."""
    for same in kinds:
        torch._foreach_clamp_min_(same, -largest)
        torch._foreach_clamp_max_(same, largest)


def alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by device and dtype, for torch's operations on many tensors at once."""
    kinds: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(tensor)
    return list(kinds.values())


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse


def _writable(gradient: Tensor | None) -> Tensor | None:
    """Returns the gradient, or an equal one whose elements can be changed individually."""
    if gradient is None:
        return None
    if gradient.is_sparse:
        return gradient.coalesce()
    return gradient.clone() if elements_overlap(gradient) else gradient


def _memory(gradient: Tensor | None) -> Tensor | None:
    return gradient.values() if gradient is not None and gradient.is_sparse else gradient
