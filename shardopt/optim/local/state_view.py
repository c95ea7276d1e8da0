"""View of the inner optimizer's state by the user's parameters: `optimizer.state` of a keyed optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.optim.local.local_step import LocalOptimizer
from shardopt.optim.state_dict.groups import described, listed

_NO_DEFAULT = object()


class LocalState(MutableMapping[Any, Any]):
    """Parameter → its state, live; looking one up takes constant time.

    A parameter that has none is looked up as an empty dict. On a rank that holds no elements of a parameter there is no
    place for its state: setting it there changes nothing.
    """

    def __init__(self, names: Mapping[Tensor, str], local_optimizer: LocalOptimizer) -> None:
        self._names = names
        self._local = local_optimizer

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
        self._refuse_strangers([key])
        self._local.set_state(key, value)

    def __delitem__(self, key: Any) -> None:
        if key not in self and key not in self._names:
            raise KeyError(key)
        self._local.state_changed()
        for local in self._local.local_tensors(key) if isinstance(key, Tensor) else (key,):
            self._local.states.drop(local)

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Takes over the entries of another mapping, which is not kept, and drops all others.

        Raises:
            StateError: it has state of a tensor that is no parameter; nothing was changed.
        """
        if state is self:
            return
        self._refuse_strangers(key for key in state if isinstance(key, Tensor))
        entries = {key: state[key] for key in state}
        self.clear()
        for key, value in entries.items():
            self[key] = value

    def clear(self) -> None:
        """Removes all state; where a class makes its state when it is constructed, all have it anew."""
        self._local.clear_state()

    def pop(self, key: Any, default: Any = _NO_DEFAULT) -> Any:
        """Removes an entry and returns it, as of a dict."""
        if key not in self:
            if default is _NO_DEFAULT:
                raise KeyError(key)
            return default
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Returns an entry, which is set to the default if absent, as of a dict; one that is empty counts as absent."""
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

    def _refuse_strangers(self, keys: Iterable[Tensor]) -> None:
        required, remedy = f"one of {listed(self._names.values())}", "set the state of the optimizer's own parameters"
        problems = [Problem("state", described(key), required, remedy) for key in keys if key not in self._names]
        if problems:
            raise StateError("state of tensors that are no parameters cannot be set", problems)
