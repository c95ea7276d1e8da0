"""Vectors of tables in autograd: forward fetches them, backward sends their gradients to the ranks that hold pieces.

The gradient of a sharded table is sparse, which autograd cannot add up for DTensors. So it takes no part in autograd's
own accumulation: the gradients of one backward for a module, over all of its lookups, are collected, and delivered
at once when that backward has done all else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardopt.nn.route import Route
from shardopt.nn.served import Served, gradients_of_rows
from shardopt.runtime.torch_gradients import at_end_of_backward, backward_under_way
from shardopt.sharding.view import local_tensors

RowGradients = Mapping[int, tuple[Tensor, Tensor]]
"""Index of a table → rows of this rank's piece, [M] int64, each once, ascending; their gradients, [M, W]."""


class Collector:
    """Collects the gradients of a module's tables during a backward; keeps nested backwards apart.

    Args:
        deliver: called at the end of each backward that came to a lookup, without recording gradients.
    """

    def __init__(self, deliver: Callable[[RowGradients], None]) -> None:
        self._deliver = deliver
        # Each is kept by its backward alone, and so forgotten with one that fails.
        self._under_way: WeakValueDictionary[int, _OfBackward] = WeakValueDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Collector, (self._deliver,)  # a copy has no backward under way

    def add(self, row_gradients: RowGradients) -> None:
        """Adds the gradients of one lookup. Call it within backward."""
        number = backward_under_way()
        here = self._under_way.get(number)
        if here is None:
            here = self._under_way[number] = _OfBackward(self._deliver)
            at_end_of_backward(here.hand_over)
        here.add(row_gradients)


class _OfBackward:
    """The gradients of one backward, delivered at its end."""

    def __init__(self, deliver: Callable[[RowGradients], None]) -> None:
        self._deliver = deliver
        self._row_gradients: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._streams: dict[torch.Stream, None] = {}

    def add(self, row_gradients: RowGradients) -> None:
        for number, pair in row_gradients.items():
            self._row_gradients[number].append(pair)
            if pair[0].device.type != "cpu":
                self._streams[torch.accelerator.current_stream(pair[0].device)] = None

    def hand_over(self) -> None:
        self._await_streams()
        several = {number: pairs for number, pairs in self._row_gradients.items() if len(pairs) > 1}
        row_gradients = {number: pairs[0] for number, pairs in self._row_gradients.items()} | added_up(several)
        self._row_gradients.clear()
        with torch.no_grad():
            self._deliver(row_gradients)

    def _await_streams(self) -> None:
        """Makes the caller's stream, on which backward ends, wait for the streams of the lookups."""
        for stream in self._streams:
            here = torch.accelerator.current_stream(stream.device)
            if here == stream:
                continue
            here.wait_stream(stream)
            for tensor in chain.from_iterable(chain.from_iterable(self._row_gradients.values())):
                tensor.record_stream(here)


def added_up(found: Mapping[int, Sequence[tuple[Tensor, Tensor]]]) -> dict[int, tuple[Tensor, Tensor]]:
    """Adds up the gradients of several lookups of tables, row by row, in their order: replicas get the same bits.

    That of `index_add_` is left to the GPU, and is another one each time.
    """
    none = {number: [None] * len(pairs) for number, pairs in found.items()}
    pieces = {number: Served([rows for rows, _ in found[number]], each, each) for number, each in none.items()}
    return gradients_of_rows(pieces, lambda number: torch.cat([values for _, values in found[number]]))


def fetch(route: Route, collector: Collector, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Fetches the vectors that this rank wants, [V_t, D_t] of each table. Collective, like its backward.

    Args:
        route: of the lookup.
        collector: gets the gradients of this rank's rows.
        weights: the tables, sharded.
    """
    # Stand-ins: autograd runs hooks of its inputs also where they get no gradient, as weights never do from here.
    inputs = [_local(weight).new_empty(0, requires_grad=weight.requires_grad) for weight in weights]
    fetched: tuple[Tensor, ...] = _Fetch.apply(route, collector, weights, *inputs)  # type: ignore[no-untyped-call]  # torch's
    return fetched


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, route: Route, collector: Collector, weights: Sequence[Tensor], *inputs: Tensor
    ) -> Any:
        kept: Any = ctx
        kept.route, kept.collector = route, collector
        # Activation checkpointing repeats a forward only where what it saved is asked for. All ranks have to repeat
        # a lookup, or none; of what pools vectors, some save nothing.
        ctx.save_for_backward(*inputs)
        return tuple(route.fetch([_local(weight) for weight in weights]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        route: Route = ctx.route
        stand_ins = ctx.saved_tensors
        values = route.return_gradients(gradients)
        wanted = [used and needed for used, needed in zip(route.in_use, ctx.needs_input_grad[3:], strict=True)]
        ctx.collector.add({t: pair for t, pair in values.items() if wanted[t]})
        return None, None, None, *(None for _ in stand_ins)


def _local(weight: Tensor) -> Tensor:
    (local,) = local_tensors(weight)
    return local.detach()
