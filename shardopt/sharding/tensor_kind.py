"""The interface by which a framework describes its own class of sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardopt.sharding.box import Box


class TensorKind:
    """Describes a class of sharded tensors. A subclass must at least define `pieces`.

    Each rank describes its own pieces alone. A save exchanges them, and refuses pieces of two ranks that overlap
    without being the same box, and elements that no rank has.
    """

    def shape(self, tensor: Any) -> Sequence[int]:
        """Returns the global shape; the same on every rank."""
        return tuple(tensor.shape)

    def pieces(self, tensor: Any) -> Sequence[tuple[Box, Tensor]]:
        """Returns the disjoint boxes that this rank holds, each with a plain tensor of its elements and sizes.

        No copies: what is written into them must be in the tensor. All have one dtype; a rank may have none. The very
        same tensors each time, as long as their memory was not replaced: an optimizer keeps state by them.
        """
        raise NotImplementedError

    def gradients(self, tensor: Any) -> Sequence[Tensor | None]:
        """Returns the gradient of each of `pieces`, with its sizes and dtype; None if there is none. No copies."""
        return [local.grad for _, local in self.pieces(tensor)]

    def zero_gradients(self, tensor: Any, set_to_none: bool) -> None:
        """Drops or zeroes the tensors of `gradients`; here, those that are no piece's `.grad` are always zeroed."""
        for (_, local), gradient in zip(self.pieces(tensor), self.gradients(tensor), strict=True):
            if gradient is not None and gradient is not local.grad:
                gradient.detach().zero_()
            if set_to_none:
                local.grad = None
            elif local.grad is not None:
                local.grad.detach_().zero_()
