"""The state of each local tensor: the inner optimizer's, or made early and kept from it until the first step."""

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
    """Live state, by local tensor.

    Args:
        optimizer: the inner one, which has all state but that which is untouched.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._untouched: dict[Tensor, Untouched] = {}

    def __getitem__(self, local: Tensor) -> State:
        """Returns the live state; empty if there is none yet."""
        if self.is_untouched(local):
            return self._untouched[local].entries
        state: State = self._optimizer.state[local]
        return state

    def __contains__(self, local: Tensor) -> bool:
        return self.is_untouched(local) or bool(self._optimizer.state.get(local))

    def is_untouched(self, local: Tensor) -> bool:
        """Whether it has state and never had a step, so that the first step makes its state anew."""
        return local in self._untouched

    def is_unwritten(self, local: Tensor) -> bool:
        """Whether it is untouched, and has the values that it was made with."""
        return self.is_untouched(local) and not self._untouched[local].written()

    def put(self, local: Tensor, entries: State, untouched: bool) -> None:
        """Sets the state of a local tensor.

        Args:
            untouched: whether the entries are initial values, which the first step makes anew.
        """
        if untouched:
            self._optimizer.state.pop(local, None)
            self._untouched[local] = Untouched(entries)
        else:
            self._untouched.pop(local, None)
            self._optimizer.state[local] = entries

    def drop(self, local: Any) -> None:
        """Removes the state of a local tensor, or of another key of the inner optimizer's state."""
        self._untouched.pop(local, None)
        self._optimizer.state.pop(local, None)

    def clear(self) -> None:
        """Removes the state of every local tensor, and of every other key."""
        self._untouched.clear()
        self._optimizer.state.clear()

    def hand_over(self, tensors: Collection[Tensor] | None = None) -> Callable[[], None]:
        """Lets the inner optimizer make state anew for those of the tensors that are to have their first step.

        Early state that someone wrote into is not lost: it is handed to the inner optimizer as it is.

        Args:
            tensors: None for all.

        Returns:
            A function that undoes this, and drops state that was made since.
        """
        state = self._optimizer.state
        # State that is made from now on stands behind known keys, or in dicts that someone has looked at.
        known, empty = len(state), self._empty(tensors)
        among = () if not self._untouched else self._untouched if tensors is None else tensors
        early = {
            local: self._untouched[local] for local in among if self.is_untouched(local) and local.grad is not None
        }
        for local, untouched in early.items():
            del self._untouched[local]
            if untouched.written():
                state[local] = untouched.entries

        def undo() -> None:
            for made in list(state)[known:]:
                del state[made]
            for entries in empty:
                entries.clear()
            self._untouched.update(early)

        return undo

    def _empty(self, tensors: Collection[Tensor] | None) -> list[State]:
        state = self._optimizer.state
        if tensors is None or len(tensors) > len(state) // 8:  # a look-up takes as long as to pass by eight
            return list(filterfalse(None, state.values()))
        return [state[local] for local in tensors if local in state and not state[local]]

    def move(self, old: Tensor, new: Tensor, fresh: Callable[[Tensor], Mapping[str, Any]]) -> None:
        """Moves the state of one local tensor to another, with the same values where the new one needs them.

        It stays the same dict, which someone may hold.

        Args:
            old, new: the local tensors. Where they have one dtype the state keeps its own.
            fresh: makes new state of a local tensor, for its devices and dtypes.
        """
        entries, early = self[old], self._untouched.get(old)
        written = early is not None and early.written()
        self.drop(old)
        if not entries:
            return
        if (old.device, old.dtype) != (new.device, new.dtype):
            keeps_dtype, like = old.dtype == new.dtype, fresh(new)
            entries.update({name: _converted(value, like.get(name), keeps_dtype) for name, value in entries.items()})
        if early is None:
            self._optimizer.state[new] = entries
        else:
            self._untouched[new] = Untouched(entries, written)


def _converted(value: Any, like: Any, keeps_dtype: bool) -> Any:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    return value.to(device=like.device, dtype=value.dtype if keeps_dtype else like.dtype)
