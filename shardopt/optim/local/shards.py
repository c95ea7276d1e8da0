"""Shards of parameters: the local tensors that an optimizer steps on in their place.

A plain parameter is its own local tensor and is not listed here; a sharded one has a local tensor per shard. A rank
that holds no elements of it has none, and no state: it cannot see whether the others had a gradient, so that a counter
there would drift from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.dense_gradients import checked_gradients
from shardopt.algorithms.registry import AlgorithmSpec, Kind
from shardopt.errors import Problem, StateError
from shardopt.optim.local.memory_order import InOrder
from shardopt.optim.local.step_cache import StepCache
from shardopt.sharding.gradients import GradientReader, attach_gradients
from shardopt.sharding.view import assemble, is_held, local_tensors

State = dict[str, Any]


class BorrowedGrads:
    """Gradients that local tensors have only for the time of a step."""

    def __init__(self) -> None:
        self.borrowers: list[Tensor] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    def attach(self, local: Tensor, gradient: Tensor | None) -> None:
        """Gives a local tensor a gradient, or none, in the place of its own, if it has one."""
        if local.grad is not None:
            self._own.append((local, local.grad))
        self.borrowers.append(local)
        local.grad = gradient

    def restore(self) -> None:
        """Gives every local tensor its own gradient back, or none."""
        for local in self.borrowers:
            local.grad = None
        for local, gradient in self._own:
            local.grad = gradient


class Shards:
    """The local tensors of one sharded parameter, and whether these are still the ones that it has.

    Args:
        name: the parameter's FQN, for errors.
        parameter: the user's tensor.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.is_held = is_held(parameter)
        self.local_tensors = local_tensors(parameter) if self.is_held else ()
        self.reader = GradientReader(parameter)

    def moved(self) -> tuple[Tensor, ...]:
        """Returns the local tensors that were replaced since the last call, if the parameter got others; else ().

        Raises:
            StateError: the new local tensors have other shapes, so that state cannot follow them.
        """
        now = local_tensors(self.parameter)
        if len(now) == len(self.local_tensors) and all(map(is_, now, self.local_tensors)):
            return ()
        shapes_before, shapes = ([tuple(t.shape) for t in tensors] for tensors in (self.local_tensors, now))
        if shapes_before != shapes:
            problem = Problem(
                key=self.name,
                found=f"local shapes {shapes}",
                required=f"{shapes_before}, as when the optimizer was built",
                remedy="build the optimizer after the model is sharded",
            )
            raise StateError("a parameter was sharded in another way under its optimizer", [problem])
        replaced, self.local_tensors = self.local_tensors, now
        return replaced

    def attach_gradients(self, borrowed: BorrowedGrads, takes_dense: bool = True) -> None:
        """Gives each local tensor its own of the parameter's gradient.

        Where one shard has a gradient the whole parameter has one, which is zero on the shards without, or without rows
        where the gradient is sparse.

        Args:
            borrowed: records the gradients to be restored afterwards.
            takes_dense: whether the algorithm steps with dense gradients.

        Raises:
            GradientError: the gradient does not fit the parameter.
        """
        gradients = checked_gradients(self.parameter, self.name, (torch.strided, torch.sparse_coo), takes_dense)
        for local, gradient in zip(self.local_tensors, gradients or (None,) * len(self.local_tensors), strict=True):
            borrowed.attach(local, gradient)
        self.reader.accepted()

    def assemble(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Makes a tensor that lies like the parameter, of one tensor per shard, without a copy."""
        return assemble(self.parameter, tensors)


class GroupShards:
    """The local tensors of a group's parameters, kept from step to step.

    A step keeps two things here: `cache`, the lists that it gathered, if the next one may go by them; and `in_order`,
    that it saw them lie alike in memory.

    Args:
        parameters: of the group, in its order.
        shards: parameter → its shards, of the sharded ones.
    """

    def __init__(self, parameters: Iterable[Tensor], shards: Mapping[Tensor, Shards]) -> None:
        self._parameters = list(parameters)
        self._shards = [shards.get(parameter) for parameter in self._parameters]
        self._readers = {each.reader: each for each in self._shards if each is not None and each.is_held}
        self.cache: StepCache | None = None
        self.in_order: InOrder | None = None
        self._refresh()

    def are_of(self, parameters: list[Tensor]) -> bool:
        """Whether the group still has the same parameters."""
        return len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))

    @property
    def alike(self) -> bool:
        """Whether all parameters with elements here are sharded and have one local tensor. Only their state is replaced
        by nobody else: that of a plain parameter is the inner optimizer's own dict."""
        return None not in self._shards and len(self._readers) == len(self.local_tensors)

    @property
    def kinds(self) -> set[tuple[bool, torch.dtype]]:
        """Whether on the CPU, and dtype, of the local tensors. A plain parameter gets others while it stays the same
        (`module.to`)."""
        return self._kinds if None not in self._shards else _kinds_of(self.local_tensors)

    @property
    def any_on_cpu(self) -> bool:
        """Whether a local tensor is on the CPU."""
        return any(map(_IS_CPU, self.local_tensors))

    def attach(
        self, borrowed: BorrowedGrads, follow: Callable[[Shards], None], takes_dense: bool = True
    ) -> tuple[list[Tensor | None] | None, bool]:
        """Gives every local tensor of a sharded parameter its gradient.

        Args:
            borrowed: records the gradients to be restored afterwards.
            follow: called with shards whose local tensors may have been replaced, before their gradients are looked at.
            takes_dense: whether the algorithm steps with dense gradients.

        Returns:
            The gradients of sharded parameters, None for one without; None where one had to be looked at. And whether
            they are known to be contiguous.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        gradients, others, in_order = attach_gradients(self._readers, borrowed.borrowers)
        if not others:
            return gradients, in_order
        try:
            for shards in [self._readers[reader] for reader in others]:
                follow(shards)
                shards.attach_gradients(borrowed, takes_dense)
        finally:
            # Those before one that is refused may have other local tensors, and are not looked at again.
            self._refresh()
        return None, False

    def names_of_local_tensors(self, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """Returns the FQN of the parameter that each local tensor belongs to.

        Args:
            names: of plain parameters.
        """
        plain = {local: names[local] for local in self.local_tensors if local in names}
        return {**plain, **{local: name for name, local in self.sharded}}

    def _refresh(self) -> None:
        pairs = zip(self._parameters, self._shards, strict=True)
        tensors = ((tensor,) if shards is None else shards.local_tensors for tensor, shards in pairs)
        self.local_tensors = list(chain.from_iterable(tensors))
        sharded = [shards for shards in self._shards if shards is not None]
        self.sharded = [(shards.name, local) for shards in sharded for local in shards.local_tensors]
        self._kinds = _kinds_of(self.local_tensors)


def _kinds_of(tensors: Collection[Tensor]) -> set[tuple[bool, torch.dtype]]:
    return set(zip(map(_IS_CPU, tensors), map(_DTYPE, tensors), strict=True))


_IS_CPU, _DTYPE = attrgetter("is_cpu"), attrgetter("dtype")  # of plain parameters this is read in every step


class ShardedState(MutableMapping[str, Any]):
    """State of one sharded parameter: live, made of the states of its local tensors when it is looked at.

    Entries that lie like the parameter are assembled without a copy; others are those of the first local tensor, and
    are the same for all of them. A copy is a dict of copies, live no more.

    Args:
        shards: of the parameter.
        states: of its local tensors.
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
        return self._shards.assemble(tuple(state[name] for state in self._states))

    def __setitem__(self, name: str, value: Any) -> None:
        if self._kinds.get(name) is Kind.PARAMETER:
            values = local_tensors(value)
        else:
            # A counter that two local tensors share would be counted up twice in a step.
            values = (value, *(deepcopy(value) for _ in self._states[1:]))
        for state, own in zip(self._states, values, strict=True):
            state[name] = own
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
        """Copies entries that the first local tensor has for the whole parameter to the others."""
        for state in self._states[1:]:
            for name, value in self._states[0].items():
                if self._kinds.get(name) is not Kind.PARAMETER and isinstance(value, Tensor):
                    state[name].copy_(value)
