"""Tensors as boxes: integer geometry (`box`, `mesh`), layouts, and the view of any tensor.

What is asked of each kind of tensor: its pieces and layout (`view.view_of`), its local tensors and a tensor like it
made of others (`local_tensors`, `assemble`), its gradients (`gradients`), and what is left of it when a dimension is
summed over (`reduced`). DTensors, ShardedTensors and LocalShardsWrappers have a file each; kinds that others bring
answer through a `TensorKind` (`kinds`), and are never summed over.
"""

from shardopt.sharding.box import Box, cover_faults, whole
from shardopt.sharding.gradients import local_gradients
from shardopt.sharding.kinds import cut_range, register_kind
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import Piece, View
from shardopt.sharding.pieces_tensor import PiecesTensor
from shardopt.sharding.tensor_kind import TensorKind
from shardopt.sharding.view import assemble, local_tensors, view_of

__all__ = [
    "Box",
    "Layout",
    "Piece",
    "PiecesTensor",
    "TensorKind",
    "View",
    "assemble",
    "cover_faults",
    "cut_range",
    "local_gradients",
    "local_tensors",
    "register_kind",
    "view_of",
    "whole",
]
