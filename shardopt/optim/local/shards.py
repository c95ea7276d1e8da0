"""Parameters and the local tensors that an optimizer steps on in their place.

P parameters as the user has them, L leaves of each. A plain parameter is its own leaf and is not listed here; a sharded
one has a leaf per local shard. A rank that holds no part of it has none, and no state: it cannot see whether the others
had a gradient, so that a counter there would drift from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.dense_gradients import found_gradients
from shardopt.algorithms.registry import AlgorithmSpec, Kind
from shardopt.errors import Problem, StateError
from shardopt.optim.local.memory_order import InOrder
from shardopt.optim.local.step_cache import StepCache
from shardopt.sharding.gradients import GradientReader, attach_gradients
from shardopt.sharding.view import assemble, is_held, local_tensors

State = dict[str, Any]


class BorrowedGrads:
    """Gradients that leaves have only for the time of a step."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    def attach(self, leaf: Tensor, gradient: Tensor | None) -> None:
        """Gives a leaf a gradient, or none, in the place of its own, if it has one."""
        if leaf.grad is not None:
            self._own.append((leaf, leaf.grad))
        self.leaves.append(leaf)
        leaf.grad = gradient

    def restore(self) -> None:
        """Leaves every leaf with what it had."""
        for leaf in self.leaves:
            leaf.grad = None
        for leaf, gradient in self._own:
            leaf.grad = gradient


class Shards:
    """The leaves of one sharded parameter, and whether they are still its local tensors.

    Args:
        name: the parameter's FQN, for errors.
        parameter: the user's tensor.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.is_held = is_held(parameter)
        self.leaves = local_tensors(parameter) if self.is_held else ()
        self.reader = GradientReader(parameter)

    def moved(self) -> tuple[Tensor, ...]:
        """The leaves that were replaced since the last call, if the parameter got other local tensors; else ().

        Raises:
            StateError: the new local tensors have other shapes, so that state cannot follow them.
        """
        held = local_tensors(self.parameter)
        if len(held) == len(self.leaves) and all(a is b for a, b in zip(held, self.leaves, strict=True)):
            return ()
        before, now = [tuple(t.shape) for t in self.leaves], [tuple(t.shape) for t in held]
        if before != now:
            problem = Problem(
                key=self.name,
                found=f"local shapes {now}",
                required=f"{before}, as when the optimizer was built",
                remedy="build the optimizer after the model is sharded",
            )
            raise StateError("a parameter was sharded in another way under its optimizer", [problem])
        replaced, self.leaves = self.leaves, held
        return replaced

    def attach_gradients(self, loan: BorrowedGrads, takes_dense: bool = True) -> None:
        """Gives each leaf its part of the parameter's gradient.

        Where one shard has a gradient the whole parameter has one, which is zero on the shards without, or without rows
        where the gradient is sparse.

        Args:
            loan: what to undo afterwards.
            takes_dense: whether the algorithm steps with dense gradients.

        Raises:
            GradientError: the gradient does not fit the parameter.
        """
        found = found_gradients(self.parameter, self.name, (torch.strided, torch.sparse_coo), takes_dense)
        for leaf, gradient in zip(self.leaves, found or (None,) * len(self.leaves), strict=True):
            loan.attach(leaf, gradient)
        self.reader.accepted()

    def put_together(self, parts: tuple[Tensor, ...]) -> Tensor:
        """A tensor that lies like the parameter, made of one tensor per leaf without a copy."""
        return assemble(self.parameter, parts)

    def take_apart(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The reverse of `put_together`."""
        return local_tensors(whole)


class GroupShards:
    """The leaves of a group's parameters, kept from step to step.

    For who steps on them: `gathered` is what the last step gathered of them, if the next one may go by it; `in_order`
    that it saw them lie alike in memory.

    Args:
        parameters: of the group, in its order.
        shards: parameter → its shards, of the sharded ones.
    """

    def __init__(self, parameters: Iterable[Tensor], shards: Mapping[Tensor, Shards]) -> None:
        self._parameters = list(parameters)
        self._shards = [shards.get(parameter) for parameter in self._parameters]
        self._readers = {its.reader: its for its in self._shards if its is not None and its.is_held}
        self.gathered: StepCache | None = None
        self.in_order: InOrder | None = None
        self._refresh()

    def are_of(self, parameters: list[Tensor]) -> bool:
        """Whether the group still has the same parameters."""
        return len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))

    @property
    def alike(self) -> bool:
        """Whether all parameters with a part here are sharded and have one leaf. Only their state is replaced by none
        but us: that of a plain parameter is the inner optimizer's own dict."""
        return None not in self._shards and len(self._readers) == len(self.leaves)

    @property
    def kinds(self) -> set[tuple[bool, torch.dtype]]:
        """Whether on the CPU, and dtype, of the leaves. A plain parameter gets others while it stays the same
        (`module.to`)."""
        return self._kinds if None not in self._shards else _kinds_of(self.leaves)

    @property
    def any_on_cpu(self) -> bool:
        """Whether a leaf is on the CPU."""
        return any(map(_IS_CPU, self.leaves))

    def attach(
        self, loan: BorrowedGrads, follow: Callable[[Shards], None], takes_dense: bool = True
    ) -> tuple[list[Tensor | None] | None, bool]:
        """Gives every leaf of a sharded parameter its gradient.

        Args:
            loan: what to undo afterwards.
            follow: called with shards whose local tensors may have been replaced, before their gradients are looked at.
            takes_dense: whether the algorithm steps with dense gradients.

        Returns:
            The gradients of sharded parameters, None for one without; None where one had to be looked at. And whether
            they are known to be contiguous.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        gradients, others, in_order = attach_gradients(self._readers, loan.leaves)
        if not others:
            return gradients, in_order
        try:
            for shards in [self._readers[reader] for reader in others]:
                follow(shards)
                shards.attach_gradients(loan, takes_dense)
        finally:
            # Those before one that is refused may have other leaves, and are not looked at again.
            self._refresh()
        return None, False

    def names_of_local_tensors(self, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """The FQN of the parameter that each leaf belongs to.

        Args:
            names: of plain parameters.
        """
        plain = {leaf: names[leaf] for leaf in self.leaves if leaf in names}
        return {**plain, **{leaf: name for name, leaf in self.sharded}}

    def _refresh(self) -> None:
        both = zip(self._parameters, self._shards, strict=True)
        self.leaves = list(chain.from_iterable((tensor,) if its is None else its.leaves for tensor, its in both))
        self.sharded = [(its.name, leaf) for its in self._shards if its is not None for leaf in its.leaves]
        self._kinds = _kinds_of(self.leaves)


def _kinds_of(leaves: Collection[Tensor]) -> set[tuple[bool, torch.dtype]]:
    return set(zip(map(_IS_CPU, leaves), map(_DTYPE, leaves), strict=True))


_IS_CPU, _DTYPE = attrgetter("is_cpu"), attrgetter("dtype")  # of plain parameters this is asked in every step


class ShardedState(MutableMapping[str, Any]):
    """State of one sharded parameter: live, made of the states of its leaves when it is looked at.

    Entries that lie like the parameter are put together without a copy; others are those of the first leaf, and are
    the same for all of them. A copy is a dict of copies, live no more.

    Args:
        shards: of the parameter.
        states: of its leaves.
        spec: of the algorithm.
        changed: called after an entry was replaced or removed.
    """

    def __init__(
        self, shards: Shards, states: tuple[State, ...], spec: AlgorithmSpec, changed: Callable[[], None]
    ) -> None:
        self._shards = shards
        self._states = states
        self._changed = changed
        self._kinds = {entry.name: entry.kind for entry in spec.state}

    def __getitem__(self, name: str) -> Any:
        first = self._states[0][name]
        if self._kinds.get(name) is not Kind.PARAMETER:
            return first
        return self._shards.put_together(tuple(state[name] for state in self._states))

    def __setitem__(self, name: str, value: Any) -> None:
        if self._kinds.get(name) is Kind.PARAMETER:
            parts = self._shards.take_apart(value)
        else:
            # A counter that two leaves share would be counted up twice in a step.
            parts = (value, *(deepcopy(value) for _ in self._states[1:]))
        for state, part in zip(self._states, parts, strict=True):
            state[name] = part
        self._changed()

    def __delitem__(self, name: str) -> None:
        for state in self._states:
            del state[name]
        self._changed()

    def __iter__(self) -> Iterator[str]:
        return iter(self._states[0])

    def __len__(self) -> int:
        return len(self._states[0])

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def share_scalars(self) -> None:
        """Copies what the first leaf has for the whole parameter to the others."""
        for state in self._states[1:]:
            for name, value in self._states[0].items():
                if self._kinds.get(name) is not Kind.PARAMETER and isinstance(value, Tensor):
                    state[name].copy_(value)
