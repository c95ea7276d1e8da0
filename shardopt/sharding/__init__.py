"""Tensors as boxes: integer geometry (`box`, `mesh`), layouts, and the view of any tensor."""

from shardopt.sharding.box import Box, cover_faults, whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.view import Piece, View, assemble, gradient_leaves, leaves_of, view_of

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
