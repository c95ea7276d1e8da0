"""Shards of parameters: the local tensors that an optimizer steps in their place.

A plain parameter is its own local tensor and is not listed here; a sharded one has a local tensor per shard. A rank
that holds no elements of it has none, and no state: it cannot see whether the others had a gradient, so that a counter
there would drift from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.dense_gradients import checked_gradients
from shardopt.algorithms.registry import Kind
from shardopt.errors import Problem, StateError
from shardopt.sharding.gradients import GradientReader
from shardopt.sharding.view import assemble, is_held, local_tensors

State = dict[str, Any]


class BorrowedGrads:
    """Gradients that local tensors have only during a step."""

    def __init__(self) -> None:
        self.borrowers: list[Tensor] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    def attach(self, local: Tensor, gradient: Tensor | None) -> None:
        """Replaces a local tensor's gradient by another one, or by none."""
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
    """The local tensors of one sharded parameter, with a check that they are still current.

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
        """Returns the parameter's local tensors, if they are no longer `local_tensors`; else ().

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
            raise StateError(
                "a parameter was sharded in another way under its optimizer", [problem], code="stale-parameters"
            )
        return now

    def attach_gradients(self, borrowed: BorrowedGrads, takes_dense: bool = True) -> None:
        """Gives each local tensor its part of the parameter's gradient.

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
        """Assembles a tensor laid out like the parameter from one tensor per shard, without a copy."""
        return assemble(self.parameter, tensors)


class ShardedState(MutableMapping[str, Any]):
    """Live state of one sharded parameter, assembled from its local tensors' states on lookup.

    Entries that lie like the parameter are assembled without a copy; others are those of the first local tensor, and
    are the same for all of them. A copy is a dict of copies, live no more.

    Args:
        shards: of the parameter.
        states: of its local tensors.
        kinds: of the algorithm's entries, by name.
        changed: called after an entry was replaced or removed.
    """

    def __init__(
        self, shards: Shards, states: tuple[State, ...], kinds: Mapping[str, Kind], changed: Callable[[], None]
    ) -> None:
        self._shards = shards
        self._states = states
        self._changed = changed
        self._kinds = kinds

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
        """Copies the first local tensor's entries for the whole parameter to the others."""
        for state in self._states[1:]:
            for name, value in self._states[0].items():
                if self._kinds.get(name) is not Kind.PARAMETER and isinstance(value, Tensor):
                    state[name].copy_(value)


class Untouched:
    """State made before the first step, which the inner optimizer does not know yet.

    Args:
        entries: names and values, as the user sees them.
        written: whether someone has put values of their own into it.
    """

    def __init__(self, entries: State, written: bool = False) -> None:
        self.entries = entries
        self._written = written
        self._made = [(value, value._version) for value in self._tensors()]

    def written(self) -> bool:
        """Whether tensors were written to or replaced, so that they are no longer initial values."""
        now = self._tensors()
        same = len(now) == len(self._made) and all(
            value is made and value._version == version for value, (made, version) in zip(now, self._made, strict=True)
        )
        return self._written or not same

    def __reduce__(self) -> tuple[Any, ...]:
        return Untouched, (self.entries, self.written())  # tensors of a copy count their versions from 0

    def _tensors(self) -> list[Tensor]:
        return [value for value in self.entries.values() if isinstance(value, Tensor)]
