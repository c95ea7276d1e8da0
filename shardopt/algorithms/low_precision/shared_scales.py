"""Scales of blocks that lie on several ranks: the largest values of whole rows, found before anything is stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shardopt.algorithms.low_precision.blocks import blocks_of_row
from shardopt.algorithms.low_precision.options import Form
from shardopt.algorithms.reductions import Term, all_reduce_largest
from shardopt.sharding.box import Box
from shardopt.sharding.reduced import ShardGroup, blocks_like, shard_groups_of
from shardopt.sharding.view import device_of, local_tensors, view_of


def cuts_of_blocks(parameter: Tensor) -> tuple[ShardGroup, ...]:
    """Returns the groups of ranks that have parts of the same rows of a parameter."""
    return tuple(cut for cut in shard_groups_of(parameter) if any(cut.dims))


def rows_of(scales: Tensor, box: Box) -> Tensor:
    """Returns this rank's memory of the scales of a box's rows, [rows, blocks]."""
    begin, end = box.offsets[0], box.ends[0]
    for piece in view_of(scales).pieces:
        start, stop = piece.box.offsets[0], piece.box.ends[0]
        if start <= begin and end <= stop:
            return piece.tensor[begin - start : end - start]
    raise AssertionError(f"no scales of {box} on this rank")


class SharedScales:
    """The scales of one parameter's new state, over all ranks that have parts of its rows.

    Args:
        parameter: whose rows are cut.
        form: of its state.
        cuts: `cuts_of_blocks`.

    Attributes:
        scales: entry → the largest values so far, placed as its scales.
        flag: 1 where a rank has a gradient, 2 where it cannot step; fp32, one element.
    """

    def __init__(self, parameter: Tensor, form: Form, cuts: tuple[ShardGroup, ...]) -> None:
        count = blocks_of_row(view_of(parameter).shape)
        self._cuts = cuts
        self.scales = {e.name: blocks_like(parameter, count, torch.float32) for e in form.entries if e.coded}
        self.flag = torch.zeros(1, dtype=torch.float32, device=device_of(parameter))

    def has_gradient(self) -> None:
        """Notes that this rank has a gradient."""
        self.flag.fill_(1)

    def refuse(self) -> None:
        """Notes that this rank cannot step."""
        self.flag.fill_(2)

    @property
    def is_known(self) -> bool:
        """Whether what ranks have told can be read without waiting for a device."""
        return self.flag.is_cpu

    @property
    def is_due(self) -> bool:
        """Whether any rank has a gradient; valid once they have agreed."""
        return bool(self.flag == 1)

    @property
    def is_refused(self) -> bool:
        """Whether any rank cannot step; valid once they have agreed."""
        return bool(self.flag == 2)

    def terms(self) -> Iterator[Term]:
        """Yields the numbers of which the largest count."""
        yield self.flag, self._cuts
        for scales in self.scales.values():
            for memory in local_tensors(scales):
                yield memory, self._cuts


def agree(shared: Iterable[SharedScales]) -> None:
    """Takes the largest of all numbers over the ranks: one all-reduce for each process group. Collective."""
    all_reduce_largest(term for each in shared for term in each.terms())
