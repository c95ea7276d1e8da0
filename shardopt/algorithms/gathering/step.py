"""The step of one parameter whose parts are each computed on by one owner: what is sent, computed and applied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import add

import torch
from torch import Tensor

from shardopt.algorithms.communicating import ParameterStep
from shardopt.algorithms.gathering.assignment import Job, layout_on
from shardopt.ranks import ranks_of
from shardopt.sharding.box import Box
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import narrowed
from shardopt.sharding.view import assemble, view_of


class GatheredStep(ParameterStep):
    """The step of a parameter; a subclass cuts it into parts and computes on each.

    Attributes:
        parts: where the parts lie in the parameter; empty ones are left out.
        dtype: in which they travel and are worked on.
    """

    parts: Sequence[Box]
    dtype: torch.dtype

    # --- the equations ---

    def job(self, number: int) -> Job:
        """Returns the layout of a part, in the part's own coordinates, and its cost."""
        raise NotImplementedError

    def begin(self) -> tuple[Sequence[Tensor], ...]:
        """Updates elementwise state, if there is a gradient; returns the local tensors that `sent` takes."""
        raise NotImplementedError

    def sent(self, *tensors: Tensor) -> Tensor:
        """Returns what this rank sends to the owner, from its elements of the tensors that `begin` returned."""
        raise NotImplementedError

    def compute(self, number: int, whole: Tensor) -> Tensor:
        """Computes the result for a whole part, of the same shape, on its owner. May overwrite `whole`."""
        raise NotImplementedError

    def move(self, number: int, weight: Tensor, result: Tensor) -> None:
        """Changes elements of the parameter by their results, in place; in the parameter's dtype, fp32 at least."""
        raise NotImplementedError

    # --- around them ---

    @cached_property
    def layout(self) -> Layout:
        """The layout of the parameter, with the holders of each box."""
        layout = self.view.layout
        return layout if layout.holders is not None else layout_on(layout.shape, layout.boxes[0], ranks_of().rank)

    @cached_property
    def _begun(self) -> list[tuple[Box, list[Tensor]]]:
        """The boxes of this rank, each with its elements of the tensors that `begin` returned."""
        views = [view_of(assemble(self.parameter, [*tensors])) for tensors in self.begin()]
        of_boxes = zip(*(view.pieces for view in views), strict=True)
        return [(pieces[0].box, [piece.tensor for piece in pieces]) for pieces in of_boxes]

    def ready(self) -> None:
        """Updates elementwise state, before the exchange; called for a parameter with a gradient."""
        _ = self._begun

    def local_boxes(self, number: int) -> dict[Box, Tensor]:
        """Returns what this rank sends of a part, by box in the part's coordinates; zeros without a gradient."""
        part = self.parts[number]
        found: dict[Box, Tensor] = {}
        if not self.is_held:
            return found
        if self.gradients is None:
            for piece in self.view.pieces:
                common = piece.box.intersect(part)
                if common is not None:
                    found[common.within(part)] = torch.zeros_like(narrowed(piece.tensor, common.within(piece.box)))
            return found
        for box, tensors in self._begun:
            common = box.intersect(part)
            if common is not None:
                inside = common.within(box)
                found[common.within(part)] = self.sent(*(narrowed(each, inside) for each in tensors))
        return found

    def apply(self, number: int, box: Box, result: Tensor) -> None:
        """Applies a result to a box of a part, in the part's coordinates; does nothing without a gradient."""
        if self.gradients is None:
            return
        box = Box(tuple(map(add, self.parts[number].offsets, box.offsets)), box.sizes)
        (piece,) = (each for each in self.view.pieces if each.box.contains(box))
        here = narrowed(piece.tensor, box.within(piece.box))
        # In 16 bits torch's kernels round a factor, or do not, by how far from the end of the memory an element is: the
        # result would depend on where shards end.
        wide = here.to(torch.promote_types(here.dtype, torch.float32))
        self.move(number, wide, result.to(wide.device))
        if wide is not here:
            here.copy_(wide)
