"""`optimizer.state` of a keyed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from shardopt.optim.local_step import LocalOptimizer


class LocalState(MutableMapping[Any, Any]):
    """Parameter → its state, live; looking one up takes constant time."""

    def __init__(self, names: Mapping[Tensor, str], local: LocalOptimizer) -> None:
        self._names = names
        self._local = local

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Tensor) and key in self._names:
            return self._local.state_of(key)
        if isinstance(key, Tensor) or key not in self._local.optimizer.state:
            raise KeyError(key)
        return self._local.optimizer.state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, Tensor):
            self._local.optimizer.state[key] = value
            return
        self._local.state_changed()
        state = self[key]
        entries = dict(value)
        state.clear()
        state.update(entries)

    def __delitem__(self, key: Any) -> None:
        self._local.state_changed()
        for leaf in self._local.leaves(key) if isinstance(key, Tensor) else (key,):
            self._local.states.drop(leaf)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of a dict; what was never looked up has empty state here, and so takes the default."""
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]

    def __contains__(self, key: object) -> bool:
        if isinstance(key, Tensor):
            return key in self._names and self._local.has_state(key)
        return key in self._local.optimizer.state

    def __iter__(self) -> Iterator[Any]:
        yield from filter(self._local.has_state, self._names)
        yield from [key for key in self._local.optimizer.state if not isinstance(key, Tensor)]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))
