"""Tensors as boxes: integer geometry (`box`, `mesh`), layouts, and the view of any tensor."""

from shardopt.sharding.box import Box, cover_faults, whole
from shardopt.sharding.gradients import gradient_leaves
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import Piece, View
from shardopt.sharding.view import assemble, leaves_of, view_of

__all__ = [
    "Box",
    "Layout",
    "Piece",
    "View",
    "assemble",
    "cover_faults",
    "gradient_leaves",
    "leaves_of",
    "view_of",
    "whole",
]
