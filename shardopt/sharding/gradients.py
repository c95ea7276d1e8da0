"""Gradients of parameters of any kind, as the local tensors that an optimizer steps with.

Nothing is copied, and nothing communicates but `local_gradients` where a gradient has another placement than its
parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.parameter import Parameter

from shardopt.errors import GradientError, Problem
from shardopt.sharding.kinds import kind_of
from shardopt.sharding.pieces import awaited, elements_overlap
from shardopt.sharding.traceable import is_composite
from shardopt.sharding.view import assemble, local_tensors
from shardopt.sharding.wrapper import is_wrapper


def local_gradients(param: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradient of each of `local_tensors(param)`; None if there is none.

    Local, unless the gradient of a DTensor has another placement than the parameter: then it is redistributed, and all
    ranks of the mesh must call. Sparse gradients are handed through. Shards of ShardedTensor and LocalShardsWrapper
    carry their own gradients.

    Args:
        param: of any kind that `view_of` knows.

    Raises:
        GradientError: the gradient is no DTensor where the parameter is one (or the reverse), is on another mesh, or
            has another shape, global or local. Or it is sparse, and would have to be redistributed.
    """
    tensors = local_tensors(param)
    if not isinstance(param, DTensor):
        kind = kind_of(param)
        if kind is not None:
            return tuple(kind.gradients(param))
        if isinstance(param, ShardedTensor) or is_wrapper(param):
            return tuple(local.grad for local in tensors)
        grad = param.grad
        if grad is None or (grad.shape == param.shape and not isinstance(grad, DTensor)):
            return (grad,)
        raise _bad_gradient(param, grad, "give the parameter a plain gradient of its own shape")
    grad = param.grad
    if grad is None:
        wrapped = is_wrapper(param._local_tensor)
        return tuple(local.grad if wrapped else None for local in tensors)
    if not isinstance(grad, DTensor):
        raise _bad_gradient(param, grad, "wrap it with DTensor.from_local on the parameter's mesh and placements")
    have, want = grad._spec, param._spec
    if have.mesh != want.mesh:
        raise _bad_gradient(param, grad, "redistribute it to the parameter's mesh before the step")
    if grad.shape != param.shape:
        raise _bad_gradient(param, grad, "give the parameter a gradient of its own global shape")
    if have.placements != want.placements:
        grad = _redistributed(param, grad)
    gradients = tuple(awaited(local) for local in local_tensors(grad))
    if [local.shape for local in gradients] != [local.shape for local in tensors]:
        raise _bad_gradient(param, grad, "pass the parameter's shape and stride where the gradient is made")
    return gradients


def _redistributed(param: DTensor, grad: DTensor) -> DTensor:
    """Gives a gradient the placements of its parameter. All ranks of the mesh must call."""
    if grad._local_tensor.layout is not torch.strided:
        raise _bad_gradient(param, grad, "make the sparse gradient with the parameter's placements")
    try:
        with torch.no_grad():
            return grad.redistribute(placements=param._spec.placements)
    except ValueError as error:  # torch knows no way, as to some _StridedShards
        raise _bad_gradient(param, grad, "make the gradient with the parameter's placements") from error


class GradientReader:
    """Reads the gradient of a parameter with one local tensor, in the common case.

    That is: dense, placed as the parameter, and with a place in memory for each element, so that it can be scaled.

    `local_gradients` for those who ask in every step: in a fraction of its time, as it remembers which placement it has
    found good. Calling it gives None where there is no gradient, and where only `local_gradients` can tell.
    """

    __slots__ = ("_have", "_local", "_param", "_want")

    def __init__(self, param: Tensor) -> None:
        self._param: Any = param
        # A placement of the gradient and one of the parameter that were found equal.
        self._have: DTensorSpec | None = None
        self._want: DTensorSpec | None = None
        self._local: Tensor | None = None  # the local tensor of a DTensor that `attach_gradients` may go by

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientReader, (self._param,)  # a copy is to look for itself

    def __call__(self) -> Tensor | None:
        param = self._param
        grad: Tensor | None
        if isinstance(param, DTensor):
            whole = param.grad
            if type(whole) is not DTensor:
                return None
            have, want = whole._spec, param._spec
            if have is not self._have or want is not self._want:
                if have.mesh != want.mesh or have.placements != want.placements or have.shape != want.shape:
                    return None
                self._have, self._want = have, want
            wanted, grad = param._local_tensor, whole._local_tensor
        elif type(param) is Parameter or type(param) is Tensor:
            wanted, grad = param, param.grad
        else:
            return None
        # Of another class are unfinished results of collectives, and several shards in one.
        if type(grad) is not Tensor or grad.shape != wanted.shape:
            return None
        if grad.is_contiguous():  # as it mostly is
            return grad
        return None if grad.layout is not torch.strided or elements_overlap(grad) else grad

    def accepted(self) -> None:
        """Notes that `local_gradients` accepted the parameter and its gradient."""
        param = self._param
        if isinstance(param, DTensor) and type(param._local_tensor) is Tensor:
            if param._spec is not self._want:
                self._have, self._want = None, param._spec
            self._local = param._local_tensor
            self()


def attach_gradients(
    readers: Iterable[GradientReader], attached: list[Tensor]
) -> tuple[list[Tensor | None], list[GradientReader], bool]:
    """Sets `grad` of DTensors' local tensors to their local gradients, if nothing changed since they were accepted.

    That is known by the very same objects: on small parameters a step's time is made of such checks, and this loop
    touches as few objects as it can. Shape, dtype and device are checked where the gradient is set.

    Args:
        readers: of different parameters.
        attached: gets the local tensors that were given a gradient; before, they had none of their own.

    Returns:
        For each reader the dense gradient that was set, None where there is none. The readers that must be looked at:
        there, too, the first list has None, and the local tensor was left alone. And whether all gradients that were
        set are contiguous.
    """
    gradients: list[Tensor | None] = []
    others = []
    in_order = True
    strided = torch.strided
    # Asking a DTensor for its gradient takes three times as long where torch looks for overrides, of which it has none.
    with torch._C.DisableTorchFunctionSubclass():
        for reader in readers:
            param, own = reader._param, reader._local
            if own is not None and param._local_tensor is own and param._spec is reader._want and own.grad is None:
                grad = param.grad
                if grad is None:
                    gradients.append(None)
                    continue
                if type(grad) is DTensor and grad._spec is reader._have:
                    dense = grad._local_tensor
                    if type(dense) is Tensor:
                        in_order = in_order and dense.is_contiguous()
                        if in_order or dense.layout is strided:
                            try:
                                own.grad = dense
                            except (RuntimeError, TypeError):  # of another size or dtype, which `local_gradients` names
                                pass
                            else:
                                gradients.append(dense)
                                attached.append(own)
                                continue
            gradients.append(None)
            others.append(reader)
    return gradients, others, in_order


def takes_gradient(param: Tensor) -> bool:
    """Whether a gradient is set on the tensor itself (`param.grad`), not on its local shards."""
    return not (isinstance(param, ShardedTensor) or is_wrapper(param) or kind_of(param) is not None)


def has_gradient(param: Tensor) -> bool:
    """Whether a parameter of any kind has a gradient on this rank. Local."""
    return (takes_gradient(param) and param.grad is not None) or carries_gradients(param)


def carries_gradients(param: Tensor) -> bool:
    """Whether local tensors of a parameter have gradients of their own, or its registered kind keeps some."""
    kind = kind_of(param)
    gradients = [each.grad for each in local_tensors(param)] if kind is None else kind.gradients(param)
    return any(gradient is not None for gradient in gradients)


def set_gradients(param: Tensor, gradients: Sequence[Tensor]) -> None:
    """Gives a parameter these gradients of its local tensors, with their shapes and dtypes; copies nothing. Local.

    The reverse of `local_gradients`; not of registered kinds, whose gradients are their frameworks' own.
    """
    if takes_gradient(param):
        param.grad = assemble(param, gradients)
        return
    for local, gradient in zip(local_tensors(param), gradients, strict=True):
        local.grad = gradient


def zero_gradients(param: Tensor, set_to_none: bool) -> None:
    """Drops or zeroes the gradients of one parameter of any kind."""
    kind = kind_of(param)
    if kind is not None:
        kind.zero_gradients(param, set_to_none)
        return
    tensors = local_tensors(param)
    for holder in (*tensors, param) if takes_gradient(param) else tensors:
        if set_to_none:
            holder.grad = None
        elif holder.grad is not None:
            holder.grad.detach_().zero_()


def requires_gradient(param: Tensor) -> bool:
    """Whether the tensor is trained, on any rank."""
    if isinstance(param, ShardedTensor):
        return bool(param.metadata().tensor_properties.requires_grad)
    return param.requires_grad


def is_frozen(param: Tensor) -> bool:
    """Whether a tensor says that it gets no gradient; shards with gradients of their own may still get one."""
    return takes_gradient(param) and not param.requires_grad


def is_moved_by_backward(param: Tensor) -> bool:
    """Whether backward itself moves this tensor of an optimizer, for whose step it leaves no gradient. Local.

    So are views of tables, which torchrec's fused optimizers have: no parameters, and without a gradient. False where
    no element of it is.
    """
    if requires_gradient(param) or (takes_gradient(param) and isinstance(param, Parameter)) or has_gradient(param):
        return False
    local = local_tensors(param)
    return bool(local) and not any(each.requires_grad for each in local)


def may_move_in_backward(optimizer: Any) -> bool:
    """Whether backward may move tensors of an optimizer of any library, as it says itself, or as they say.

    It may be true of one whose tensors have no gradients yet: ask only where a copy too many does no harm. Local.
    """
    if getattr(optimizer, "updates_in_backward", False):
        return True
    return any(is_moved_by_backward(param) for group in optimizer.param_groups for param in group["params"])


def is_added_up(param: Tensor) -> bool:
    """Whether norms and sums of a tensor's elements make sense: not for a frozen one, or for codes and scales."""
    return not (is_frozen(param) and is_composite(param))


def _bad_gradient(param: Tensor, grad: Tensor, remedy: str) -> GradientError:
    problem = Problem("gradient", _described(grad), f"a gradient that fits {_described(param)}", remedy)
    return GradientError("a gradient does not fit its parameter", [problem])


def _described(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        shapes = [tuple(local.shape) for local in local_tensors(tensor)]
        return f"DTensor of shape {tuple(tensor.shape)} placed {spec.placements} on {spec.mesh}, local shapes {shapes}"
    return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
