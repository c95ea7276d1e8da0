"""Rows of tables in autograd: fetched in forward, and their gradients brought to the ranks that hold them in backward.

The gradient of a sharded table is sparse, which autograd cannot add up for DTensors. So it takes no part in autograd's
own accumulation: what one backward finds for a module, over all of its lookups, is collected, and handed over in one
piece when that backward has done all else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from shardopt.algorithms.torch_private import at_end_of_backward, backward_under_way
from shardopt.nn.route import Route
from shardopt.sharding.view import leaves_of

Found = Mapping[int, tuple[Tensor, Tensor]]
"""Index of a table → rows of this rank, [M] int64, maybe several times the same; their gradients, [M, D]."""


class Collector:
    """What a backward finds for the tables of a module.

    Args:
        deliver: called at the end of each backward that came to a lookup, without recording gradients.
    """

    def __init__(self, deliver: Callable[[Found], None]) -> None:
        self._deliver = deliver
        self._backward = -1
        self._found: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._stream: torch.Stream | None = None

    def add(self, found: Found) -> None:
        """Adds what one lookup got. To be called within backward."""
        if self._backward != backward_under_way():
            self._backward = backward_under_way()
            self._found.clear()  # of a backward that failed
            at_end_of_backward(self._hand_over)
        for number, part in found.items():
            self._found[number].append(part)
            if part[0].device.type != "cpu":
                self._stream = torch.accelerator.current_stream(part[0].device)

    def _hand_over(self) -> None:
        self._await_stream()
        found = {
            number: (torch.cat([rows for rows, _ in parts]), torch.cat([values for _, values in parts]))
            for number, parts in self._found.items()
        }
        self._backward = -1
        self._found.clear()
        with torch.no_grad():
            self._deliver(found)

    def _await_stream(self) -> None:
        """Backward works on the stream of forward, and ends on that of whoever called it."""
        if self._stream is None:
            return
        here = torch.accelerator.current_stream(self._stream.device)
        if here != self._stream:
            here.wait_stream(self._stream)
            for tensor in chain.from_iterable(chain.from_iterable(self._found.values())):
                tensor.record_stream(here)


def fetch(route: Route, collector: Collector, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The rows that this rank asked for, [U_t, D_t] of each table. Collective, and its backward is as well.

    Args:
        route: of the lookup.
        collector: gets the gradients of this rank's rows.
        weights: the tables, sharded.
    """
    fetched: tuple[Tensor, ...] = _Fetch.apply(route, collector, *weights)  # type: ignore[no-untyped-call]  # torch's
    return fetched


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, route: Route, collector: Collector, *weights: Tensor) -> Any:
        kept: Any = ctx
        kept.route, kept.collector = route, collector
        return tuple(route.fetch([_local(weight) for weight in weights]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        route: Route = ctx.route
        values = route.give_back(gradients)
        wanted = [used and needed for used, needed in zip(route.in_use, ctx.needs_input_grad[2:], strict=True)]
        ctx.collector.add({t: (route.rows[t], values[t]) for t, want in enumerate(wanted) if want})
        return None, None, *(None for _ in gradients)


def _local(weight: Tensor) -> Tensor:
    (leaf,) = leaves_of(weight)
    return leaf.detach()
