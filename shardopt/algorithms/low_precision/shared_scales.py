"""Scales of blocks that span several ranks: the largest values of whole rows, found before anything is stored."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardopt.algorithms.low_precision.chunks import blocks_of_row
from shardopt.algorithms.low_precision.options import Form
from shardopt.algorithms.reductions import Term
from shardopt.algorithms.shared_rows import SharedRows
from shardopt.sharding.box import Box
from shardopt.sharding.reduced import ShardGroup, blocks_like
from shardopt.sharding.view import local_tensors, view_of


def rows_of(scales: Tensor, box: Box) -> Tensor:
    """Returns this rank's memory of the scales of a box's rows, [rows, blocks]."""
    begin, end = box.offsets[0], box.ends[0]
    for piece in view_of(scales).pieces:
        start, stop = piece.box.offsets[0], piece.box.ends[0]
        if start <= begin and end <= stop:
            return piece.tensor[begin - start : end - start]
    raise AssertionError(f"no scales of {box} on this rank")


class SharedScales(SharedRows):
    """The scales of one parameter's new state, over all ranks that hold parts of its rows.

    Args:
        parameter: whose rows are cut.
        form: of its state.
        cuts: `cuts_of_rows`.

    Attributes:
        scales: entry → the largest values so far, placed as its scales.
    """

    def __init__(self, parameter: Tensor, form: Form, cuts: tuple[ShardGroup, ...]) -> None:
        super().__init__(parameter, cuts, torch.float32)
        count = blocks_of_row(view_of(parameter).shape)
        self.scales = {e.name: blocks_like(parameter, count, torch.float32) for e in form.entries if e.coded}

    def terms(self) -> Iterator[Term]:
        """Yields the numbers to reduce to their maxima over the ranks."""
        memory = (each for scales in self.scales.values() for each in local_tensors(scales))
        yield from ((each, self.cuts) for each in (self.flag, self.lacks, *memory))
