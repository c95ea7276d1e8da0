"""The state of each leaf: the inner optimizer's, or made early and kept from it until the leaf's first step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import filterfalse
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.optim.local.shards import State


class Untouched:
    """State that was made before the first step and that the inner optimizer does not know yet.

    Args:
        entries: names and values, as the user sees them.
        written: whether someone has put values of their own into it.
    """

    def __init__(self, entries: State, written: bool = False) -> None:
        self.entries = entries
        self._written = written
        self._made = [(value, value._version) for value in self._tensors()]

    def written(self) -> bool:
        """Whether someone wrote into the tensors or replaced them, so that they are no longer initial values."""
        now = self._tensors()
        same = len(now) == len(self._made) and all(
            value is made and value._version == version for value, (made, version) in zip(now, self._made, strict=True)
        )
        return self._written or not same

    def __reduce__(self) -> tuple[Any, ...]:
        return Untouched, (self.entries, self.written())  # tensors of a copy count their versions anew

    def _tensors(self) -> list[Tensor]:
        return [value for value in self.entries.values() if isinstance(value, Tensor)]


class ShardStates:
    """Live state, by leaf.

    Args:
        optimizer: the inner one, which has all state but what it is not to know yet.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._untouched: dict[Tensor, Untouched] = {}

    def __getitem__(self, leaf: Tensor) -> State:
        """Live; empty if there is none yet."""
        if self.is_untouched(leaf):
            return self._untouched[leaf].entries
        state: State = self._optimizer.state[leaf]
        return state

    def __contains__(self, leaf: Tensor) -> bool:
        return self.is_untouched(leaf) or bool(self._optimizer.state.get(leaf))

    def is_untouched(self, leaf: Tensor) -> bool:
        """Whether the leaf has state and never had a step, so that the first step makes its state anew."""
        return leaf in self._untouched

    def is_unwritten(self, leaf: Tensor) -> bool:
        """Whether it is untouched, and holds what it was made with."""
        return self.is_untouched(leaf) and not self._untouched[leaf].written()

    def put(self, leaf: Tensor, entries: State, untouched: bool) -> None:
        """Makes these the state of a leaf.

        Args:
            untouched: whether they are initial values, which the leaf's first step makes anew.
        """
        if untouched:
            self._optimizer.state.pop(leaf, None)
            self._untouched[leaf] = Untouched(entries)
        else:
            self._untouched.pop(leaf, None)
            self._optimizer.state[leaf] = entries

    def drop(self, leaf: Any) -> None:
        """Leaves a leaf, or another key of the inner optimizer's state, without any."""
        self._untouched.pop(leaf, None)
        self._optimizer.state.pop(leaf, None)

    def clear(self) -> None:
        """Leaves every leaf, and every other key, without state."""
        self._untouched.clear()
        self._optimizer.state.clear()

    def hand_over(self, leaves: Collection[Tensor] | None = None) -> Callable[[], None]:
        """Lets the inner optimizer make state anew for those of the leaves that are to have their first step.

        What someone wrote into early state is not lost: it is handed to the inner optimizer as it is.

        Args:
            leaves: None for all.

        Returns:
            What undoes this, and drops state that was made since.
        """
        state = self._optimizer.state
        # What is made from now on stands behind what is known, or in dicts that someone has looked at.
        known, empty = len(state), self._empty(leaves)
        among = () if not self._untouched else self._untouched if leaves is None else leaves
        early = {leaf: self._untouched[leaf] for leaf in among if self.is_untouched(leaf) and leaf.grad is not None}
        for leaf, untouched in early.items():
            del self._untouched[leaf]
            if untouched.written():
                state[leaf] = untouched.entries

        def undo() -> None:
            for made in list(state)[known:]:
                del state[made]
            for entries in empty:
                entries.clear()
            self._untouched.update(early)

        return undo

    def _empty(self, leaves: Collection[Tensor] | None) -> list[State]:
        state = self._optimizer.state
        if leaves is None or len(leaves) > len(state) // 8:  # to look a leaf up takes as long as to pass by eight
            return list(filterfalse(None, state.values()))
        return [state[leaf] for leaf in leaves if leaf in state and not state[leaf]]

    def move(self, old: Tensor, new: Tensor, fresh: Callable[[Tensor], Mapping[str, Any]]) -> None:
        """Makes the state of one leaf that of another, with the same values where the new one needs them.

        It stays the same dict, which someone may hold.

        Args:
            old, new: the leaves. Where they have one dtype the state keeps its own.
            fresh: gives what new state of a leaf looks like; tells devices and dtypes.
        """
        entries, early = self[old], self._untouched.get(old)
        written = early is not None and early.written()
        self.drop(old)
        if not entries:
            return
        if (old.device, old.dtype) != (new.device, new.dtype):
            keeps_dtype, like = old.dtype == new.dtype, fresh(new)
            entries.update({name: _moved(value, like.get(name), keeps_dtype) for name, value in entries.items()})
        if early is None:
            self._optimizer.state[new] = entries
        else:
            self._untouched[new] = Untouched(entries, written)


def _moved(value: Any, like: Any, keeps_dtype: bool) -> Any:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    return value.to(device=like.device, dtype=value.dtype if keeps_dtype else like.dtype)
