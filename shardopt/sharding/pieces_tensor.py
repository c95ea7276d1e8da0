"""A tensor made of boxes and their local memory, for optimizer state placed like a registered kind of tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box
from shardopt.sharding.tensor_kind import TensorKind


class PiecesTensor(Tensor):
    """A sharded tensor of which this rank holds some boxes, each as a plain tensor.

    It computes nothing: it is for optimizers, checkpoints and norms, which work on the pieces. As a parameter it takes
    gradients in the `.grad` of its pieces.

    Args:
        shape: the global shape; the same on every rank.
        pieces: the boxes of this rank, disjoint, and for each a plain tensor of the box's sizes; all of one dtype and
            device. They are kept, not copied.
        dtype: of the elements; needed on a rank without pieces.
        device: the same.
        requires_grad: whether it is trained.
    """

    boxes: tuple[Box, ...]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        pieces: Sequence[tuple[Box, Tensor]],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> PiecesTensor:
        tensors = tuple(tensor for _, tensor in pieces)
        if not tensors and dtype is None:
            problem = Problem("dtype", "none, on a rank without pieces", "that of the other ranks", "pass it")
            raise LayoutError("a tensor cannot be made of pieces", [problem])
        made: PiecesTensor = Tensor._make_wrapper_subclass(
            cls,
            tuple(shape),
            dtype=tensors[0].dtype if tensors else dtype,
            device=tensors[0].device if tensors else torch.device(device or "cpu"),
            requires_grad=requires_grad,
        )
        made.boxes, made.tensors = tuple(box for box, _ in pieces), tensors
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stubs misread it
        return f"PiecesTensor(shape={tuple(self.shape)}, dtype={self.dtype}, boxes={[str(box) for box in self.boxes]})"

    def like(self, tensors: Sequence[Tensor]) -> PiecesTensor:
        """Returns a PiecesTensor with the same boxes and other tensors."""
        device = None if tensors else self.device
        return PiecesTensor(self.shape, list(zip(self.boxes, tensors, strict=True)), self.dtype, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> PiecesTensor:
        copied = self.like([tensor.detach().clone() for tensor in self.tensors])
        memo[id(self)] = copied
        return copied.requires_grad_(self.requires_grad)  # type: ignore[return-value]  # it is the same object

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        pieces = list(zip(self.boxes, self.tensors, strict=True))
        return PiecesTensor, (tuple(self.shape), pieces, self.dtype, self.device, self.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs have one that is switched off
        cls,
        operation: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if operation is torch.ops.aten.detach.default:
            return args[0].like([tensor.detach() for tensor in args[0].tensors])
        raise TypeError(f"{operation} on a PiecesTensor: it only holds pieces; compute on its `tensors`")


class PiecesKind(TensorKind):
    """The kind of a PiecesTensor: its own boxes and tensors."""

    def pieces(self, tensor: PiecesTensor) -> Sequence[tuple[Box, Tensor]]:
        return list(zip(tensor.boxes, tensor.tensors, strict=True))
