"""The registry of frameworks' classes of sharded tensors: class → `TensorKind`.

Of a class that is registered here the rest of the package knows just what its `TensorKind` says. State of optimizers
that lies like such a tensor is a `PiecesTensor`: boxes, and local memory for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.parameter import Parameter

from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, boxes_of_range
from shardopt.sharding.pieces_tensor import PiecesKind, PiecesTensor
from shardopt.sharding.tensor_kind import TensorKind

_kinds: dict[type, TensorKind] = {PiecesTensor: PiecesKind()}


def register_kind(cls: type[Tensor], kind: TensorKind) -> None:
    """Registers a class of sharded tensors, and its subclasses; a later call replaces an earlier one.

    Args:
        cls: a subclass of `torch.Tensor`.
        kind: what to ask of its instances.

    Raises:
        LayoutError: `cls` is no subclass of `torch.Tensor`, or all tensors are of it.
    """
    if not issubclass(cls, Tensor) or cls in (Tensor, Parameter):
        problem = Problem(
            "register_kind", repr(cls), "a subclass of torch.Tensor", "register the framework's own class"
        )
        raise LayoutError("a class cannot be registered as a kind of tensors", [problem])
    _kinds[cls] = kind


def kind_of(tensor: Tensor) -> TensorKind | None:
    """Returns the kind registered for a tensor's class or its nearest base; None for all of torch's classes."""
    if type(tensor) is Tensor or type(tensor) is Parameter or not _kinds:
        return None
    return next((_kinds[base] for base in type(tensor).__mro__ if base in _kinds), None)


def cut_range(flat: Tensor, shape: Sequence[int], start: int) -> list[tuple[Box, Tensor]]:
    """Cuts a run of a tensor's elements, in C order, into boxes: the pieces of a section of a flat buffer.

    At most 2·d - 1 boxes for d dimensions.

    Args:
        flat: 1-dimensional, contiguous; elements `start` to `start + len(flat)` of the flattened tensor.
        shape: of the whole tensor.
        start: position of the first element in the flattened tensor.

    Returns:
        Boxes in the order of their elements, each with its section of `flat`, as a view of the box's sizes.
    """
    pieces: list[tuple[Box, Tensor]] = []
    at = 0
    for box in boxes_of_range(tuple(shape), start, start + flat.numel()):
        pieces.append((box, flat[at : at + box.numel].view(box.sizes)))
        at += box.numel
    return pieces
