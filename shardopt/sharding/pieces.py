"""Pieces of a tensor on this rank: boxes, each with its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.parameter import Parameter, is_lazy

from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.traceable import is_composite, seen_through
from shardopt.sharding.wrapper import is_wrapper


class Piece(NamedTuple):
    """A box of a tensor, and its local memory.

    Args:
        box: where in the global tensor.
        tensor: the elements, of the box's sizes. It shares memory with the viewed tensor, is not always contiguous, and
            takes no part in autograd.
    """

    box: Box
    tensor: Tensor


class View(NamedTuple):
    """A tensor as one rank sees it: its pieces here, and the layout of the whole.

    Args:
        shape: the global shape.
        dtype: the type of the elements in memory. A rank that holds no shard of a LocalShardsWrapper cannot know it,
            and has what the wrapper says here.
        pieces: what this rank holds, in ascending order of offsets; empty where it holds nothing. A tensor without
            elements is one empty piece on each rank that has it.
        layout: where the whole tensor is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    layout: Layout

    def numbered_in(self, members: tuple[int, ...] | None, all_of: str | None = None) -> View:
        """Returns the view with ranks renumbered by their positions in `members`; the same view for None.

        Args:
            all_of: the tensor's name, where each of its boxes has to be on some of them; None where that may not be.

        Raises:
            LayoutError: some boxes are on none of them.
        """
        if members is None:
            return self
        layout = self.layout.numbered_in(members)
        if all_of is not None and len(layout.boxes) < len(self.layout.boxes):
            holders = sorted({rank for by in self.layout.holders or () for rank in by}.difference(members))
            remedy = "make the call with the group of all ranks that hold it, or leave it out"
            held, required = f"boxes that only ranks {holders} hold", f"all of it on ranks {list(members)}"
            problem = Problem(all_of, held, required, remedy)
            raise LayoutError("a tensor is not all on the ranks of the group", [problem], code="process-group")
        return self._replace(layout=layout)

    def known_in_part(self) -> View:
        """Returns the view with a layout to which other ranks may add holders."""
        layout = self.layout
        return self if layout.holders is None or layout.local else self._replace(layout=replace(layout, local=True))


def refusal(key: str, actual: str, required: str, remedy: str) -> LayoutError:
    """Makes the error for a tensor that cannot be described as boxes."""
    return LayoutError("a tensor cannot be described as boxes", [Problem(key, actual, required, remedy)])


def awaited(local: Tensor) -> Tensor:
    """Waits for the collective that makes a tensor, if any, as redistribution may return unfinished ones."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def memory_of(tensor: Tensor, key: str) -> Tensor:
    """Returns the tensor outside of autograd; raises LayoutError unless its elements are plain strided memory."""
    own_class = type(tensor) is not Tensor and type(tensor) is not Parameter  # nearly none is of another
    if own_class:
        tensor = seen_through(tensor)
        own_class = type(tensor) is not Tensor and type(tensor) is not Parameter
    if own_class and is_lazy(tensor):
        actual, remedy = "a lazy parameter without a shape", "run the module once before"
    elif tensor.layout is not torch.strided:
        actual, remedy = f"{tensor.layout} memory", "convert it with to_dense()"
    elif tensor.is_nested:
        actual, remedy = "a nested tensor", "convert it with to_padded_tensor(), or store its components"
    elif own_class and is_composite(tensor):
        actual, remedy = (
            f"the tensor subclass {type(tensor).__name__} of other tensors",
            "freeze it, and where it is cut give each rank two rows or more; or leave it out (select=), or pass the "
            "tensors that it wraps",
        )
    elif own_class and (type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or is_wrapper(tensor)):
        # A class that runs operations by itself may have no memory at all: a MaskedTensor's address is null.
        actual, remedy = (
            f"the tensor subclass {type(tensor).__name__}",
            "leave it out (select=), or pass the tensors that it wraps",
        )
    elif tensor.is_conj() or tensor.is_neg():
        actual, remedy = "a lazily conjugated or negated view", "apply resolve_conj() and resolve_neg()"
    else:
        return tensor.detach() if tensor.requires_grad else tensor
    raise refusal(key, actual, "strided memory, plain or inside a DTensor or ShardedTensor", remedy)


def elements_overlap(tensor: Tensor) -> bool:
    """Whether elements of a strided tensor may share memory, as in an expanded one: a stride is too small."""
    if tensor.is_contiguous():
        return False
    beyond = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < beyond:
            return True
        beyond += (size - 1) * stride
    return False


def overlap_problem(key: str, tensor: Tensor) -> Problem | None:
    """Returns why a tensor cannot be loaded into, if its elements share memory."""
    if not elements_overlap(tensor):
        return None
    shared = f"elements that share memory (strides {tensor.stride()})"
    return Problem(key, shared, "a place for each element", "call contiguous() first")


def empty_piece(shape: tuple[int, ...], dtype: torch.dtype, memory: Sequence[Tensor]) -> tuple[Piece, ...]:
    """Returns the single piece of a tensor without elements, as no local tensor need have its shape."""
    device = memory[0].device if memory else "cpu"
    return (Piece(whole(shape), torch.empty(shape, dtype=dtype, device=device)),)


def shard_pieces(
    shape: tuple[int, ...], dtype: torch.dtype, shards: Sequence[tuple[Box, Tensor]], key: str
) -> tuple[Piece, ...]:
    """Makes pieces from local shards, each of which must have the size of its box."""
    if prod(shape) == 0:
        return empty_piece(shape, dtype, [shard for _, shard in shards])
    for box, shard in shards:
        if tuple(shard.shape) != box.sizes or shard.dtype != dtype:
            raise refusal(
                key,
                f"a local shard of shape {tuple(shard.shape)}, {shard.dtype}",
                f"shape {box.sizes}, {dtype}, as its metadata says",
                "make the tensor anew from its local shards",
            )
    pieces = [Piece(box, memory_of(shard, key)) for box, shard in shards if box.numel]
    return tuple(sorted(pieces, key=lambda piece: piece.box.offsets))


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Returns a box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor
