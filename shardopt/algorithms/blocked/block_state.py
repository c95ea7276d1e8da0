"""State of blocks: made with each block on the rank that owns it, and read and written as whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import narrowed
from shardopt.sharding.sharded_tensor import sharded_tensor_at
from shardopt.sharding.view import view_of


def make_zeros(
    shape: Sequence[int],
    boxes: Sequence[Box],
    owners: Sequence[int] | None,
    rank: int,
    like: Tensor,
    by_itself: bool = False,
) -> Tensor:
    """Makes a tensor of zeros with each box on its owner. Local: no collective.

    Args:
        shape: of the whole.
        boxes: that cover it.
        owners: of each box, ranks of the job; None: all of it is here, as a plain tensor.
        rank: this one.
        like: a tensor of its dtype and device.
        by_itself: whether other ranks may have the whole as well, with owners of their own.
    """
    if owners is None or not boxes:
        return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)
    placed = list(zip(boxes, owners, strict=True))
    here = [like.new_zeros(box.sizes) for box, owner in placed if owner == rank]
    return sharded_tensor_at(shape, placed, here, like, by_itself)


def owners_in(key: str, state: Tensor, boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """Returns the holder of each box of a tensor from `make_zeros`; None for a plain tensor.

    Raises:
        StateError: it was made of other boxes; names `key`.
    """
    layout = view_of(state).layout
    if layout.holders is None:
        return None
    holder_of = dict(zip(layout.boxes, layout.holders, strict=True))
    if holder_of.keys() != set(boxes):
        required = f"{len(boxes)} blocks, as its group's block_size says"
        remedy = "leave block_size as it was, or drop the state"
        problem = Problem(key, f"{len(holder_of)} blocks", required, remedy)
        raise StateError("state does not fit", [problem], code="bad-options")
    return tuple(holder_of[box][0] for box in boxes)


class WorkingTensor:
    """Holds one block of a state tensor, whole and contiguous; `put_back` writes its changes into the state.

    A block that is a slice of a plain tensor is copied: the bits of products may depend on where their factors are
    aligned, and so on how many blocks are in one memory.

    Args:
        state: as `make_zeros` made it.
        box: of the block in it.
        square: whether it is the box of a factor; then the tensor is its matrix [m, m] without padding.
    """

    def __init__(self, state: Tensor, box: Box, square: bool = False) -> None:
        (piece,) = (each for each in view_of(state).pieces if each.box.contains(box))
        self._there = narrowed(piece.tensor, box.within(piece.box))
        if square:
            self._there = self._there[:, 0, : box.sizes[0]]
        whole = self._there.numel() == piece.tensor.numel() and self._there.is_contiguous()
        self.tensor = self._there if whole else self._there.clone(memory_format=torch.contiguous_format)

    def put_back(self, result: Tensor) -> None:
        """Writes the new values of the block into the state tensor."""
        if result is not self._there:
            self._there.copy_(result)
