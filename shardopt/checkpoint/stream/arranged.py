"""Weights as rules rearrange them for those who serve them: the same memory, as other boxes of other tensors.

    names and shapes on all ranks  →  the tensors that rules make      once
    local pieces  →  cuts  →  tensors of pieces                        in each step, on each rank by itself

A rank gives what it holds of each published tensor: no weight moves to another rank, and none is copied on its device.
So what a tensor is made of, such as the experts of a stack, may be on several ranks. Where a rule changes the order
within a dimension, memory has no view with one stride along it: such boxes are copied to host memory, which is kept.
They could be several boxes with views, but a tensor has as many data files as a rank has boxes of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardopt.checkpoint.format.tensor_bytes import GIVEN_BACK, has_no_memory, stored_dtype, torch_dtype
from shardopt.checkpoint.rearrange.cuts import Cut, boxes_of_zeros, cuts_of
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.saving.planning.tied import tied_in
from shardopt.checkpoint.stream.agreed import Agreement
from shardopt.checkpoint.stream.made import Made, Told, is_named, made, merged
from shardopt.errors import Problem, StateError
from shardopt.ranks import Ranks
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import View
from shardopt.sharding.pieces_tensor import PiecesTensor
from shardopt.sharding.view import device_of, view_of


class Arranged:
    """Rearranges the weights of each step by the same rules.

    Args:
        rules: from the tensors of the model to the published ones; the same on all ranks.
    """

    def __init__(self, rules: Sequence[AnyRule]) -> None:
        self._rules = tuple(rules)
        self._agreement = Agreement("rearrange", repr(self._rules), "rearranging what is published")
        self._made: tuple[dict[str, Told], Made] | None = None  # of all ranks' weights, what the rules make of them
        self._is_named: dict[str, bool] = {}
        self._cuts: dict[tuple[str, tuple[Box, ...]], list[tuple[str, int, Cut]]] = {}
        self._on_host: dict[tuple[str, Box], Tensor] = {}  # by new name; a step is in other memory once it is published

    def of(self, ranks: Ranks, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the published tensors of weights, over the same memory. Collective: one round, at first two.

        Args:
            weights: of this rank, of any kind. They are not changed.

        Raises:
            MismatchError: the weights of all ranks do not fit the rules; every difference is listed.
            LayoutError, StateError: ranks have different rules; or a weight that a rule names has no boxes or no
                memory, or another shape on another rank.
        """

        def look() -> tuple[dict[str, View], dict[str, Told]]:
            views = {name: seen(name, tensor) for name, tensor in weights.items() if self._names(name)}
            return views, _told(weights, views)

        views, of_job = self._agreement.of(ranks, look, self._merged)
        if self._made is None or self._made[0] is not of_job:  # also if that was interrupted at the last step
            self._cuts.clear()
            self._on_host.clear()
            self._made = of_job, made(of_job, self._rules)
        return self._published(self._made[1], weights, views)

    def _names(self, name: str) -> bool:
        if name not in self._is_named:
            self._is_named[name] = is_named(name, self._rules)
        return self._is_named[name]

    def _merged(self, told: Mapping[int, dict[str, Told]]) -> dict[str, Told]:
        """Merges what ranks tell; finds on rank 0 whether the rules fit, so that all ranks raise what it raises."""
        of_job = merged(told)
        made(of_job, self._rules, warns=True)
        return of_job

    def _published(self, of_job: Made, weights: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Tensor]:
        """Returns what this rank has of each published tensor."""
        published = {new: weights[name] for new, name in of_job.unchanged.items() if name in weights}
        pieces: defaultdict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
        for name, view in views.items():
            for new, number, cut in self._cuts_of(of_job, name, view):
                memory = cut.of(view.pieces[number].tensor)
                pieces[new].append((cut.box, self._in_order(new, cut.box, memory)))
        for new, tensor in of_job.tensors.items():
            here = [name for name in of_job.members[new] if name in weights]
            if not here:
                continue
            device, dtype = device_of(weights[here[0]]), torch_dtype(tensor.dtype)
            zeros = [
                box for each in tensor.components if each.key is None for box in boxes_of_zeros(each, tensor.shape)
            ]
            if zeros:
                zero = torch.zeros((), dtype=dtype, device=device)
                pieces[new] += [(box, zero.expand(box.sizes)) for box in zeros]
            published[new] = PiecesTensor(tensor.shape, pieces[new], dtype, device)
        for also, new in of_job.ties.items():
            if new in published:
                published[also] = published[new]
        return published

    def _in_order(self, new: str, box: Box, memory: Tensor) -> Tensor:
        """Returns the memory of a box if it has the box's sizes, else a copy on the host that has them."""
        if memory.shape == box.sizes:
            return memory
        if (new, box) not in self._on_host:
            self._on_host[new, box] = torch.empty(box.sizes, dtype=memory.dtype, device="cpu")
        on_host = self._on_host[new, box]
        with torch.no_grad():
            on_host.view(memory.shape).copy_(memory)
        return on_host

    def _cuts_of(self, of_job: Made, name: str, view: View) -> list[tuple[str, int, Cut]]:
        """Returns the cuts of a weight's pieces, each with the new tensor and the number of the piece; kept."""
        boxes = tuple(piece.box for piece in view.pieces)
        if (name, boxes) not in self._cuts:
            self._cuts[name, boxes] = [
                (new, number, cut)
                for new, component in of_job.parts.get(name, ())
                for number, box in enumerate(boxes)
                for cut in cuts_of(component, box)
            ]
        return self._cuts[name, boxes]


def seen(name: str, tensor: Tensor) -> View:
    """Returns the boxes of a weight; raises StateError if its memory was given back."""
    view = view_of(tensor, name)
    if any(has_no_memory(piece.tensor) and not piece.tensor.is_meta for piece in view.pieces):
        problem = Problem(name, GIVEN_BACK, "a tensor with values", "publish while its parameter is there")
        raise StateError("a tensor cannot be published", [problem])
    return view


def _told(weights: Mapping[str, Tensor], views: Mapping[str, View]) -> dict[str, Told]:
    """Returns what this rank tells the others of its weights."""
    tied, told = tied_in(views), dict[str, Told]()
    for name in weights:
        view = views.get(name)
        if view is not None and view.pieces:
            told[name] = [[*view.shape], stored_dtype(view.dtype, name).name, tied.get(name, name)]
        else:
            told[name] = None if view is None else [[*view.shape], "", ""]
    return told
