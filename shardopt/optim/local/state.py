"""The state of an optimizer that steps local tensors, by the user's parameters: a keyed optimizer's `state`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from itertools import filterfalse
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.communicating import AlgorithmOptimizer, CommunicatingOptimizer
from shardopt.algorithms.initial_state import initial_state, is_initial
from shardopt.algorithms.low_precision.optimizer import LowPrecisionOptimizer
from shardopt.algorithms.registry import GLOBAL_STATE, AlgorithmSpec, unknown
from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.optim.local.shards import ShardedState, Shards, State, Untouched
from shardopt.optim.state_dict.groups import described, listed
from shardopt.sharding.gradients import requires_gradient
from shardopt.state.param_groups import PARAMS

Group = dict[str, Any]

_NO_DEFAULT = object()


class LocalState(MutableMapping[Any, Any]):
    """Parameter → its live state; a lookup takes constant time.

    A parameter that has none is looked up as an empty dict. On a rank that holds no elements of a parameter there is no
    place for its state: setting it there changes nothing.

    Args:
        optimizer: steps, and has the state.
        spec: of its algorithm, if that is known.
        names: parameter → FQN; kept, as parameters are added.
        shards: of the parameters that are not stepped on themselves; kept.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        spec: AlgorithmSpec | None,
        names: Mapping[Tensor, str],
        shards: Mapping[Tensor, Shards],
    ) -> None:
        self._optimizer, self._spec, self._names, self._shards = optimizer, spec, names, shards
        self._untouched: dict[Tensor, Untouched] = {}  # state that the optimizer does not know yet, by local tensor
        self.elsewhere: set[Tensor] = set()
        """The parameters without elements on this rank."""
        self.caches: tuple[Any, ...] = ()
        """State that steps cache; cleared when anyone but the optimizer changes it."""
        self.narrow = optimizer if isinstance(optimizer, LowPrecisionOptimizer) else None
        self._settled = spec is not None and spec.settled_at_first_step
        self._kinds = {} if spec is None else {entry.name: entry.kind for entry in spec.state}

    def local_tensors(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors that are stepped in place of a parameter; none if this rank has no elements of it."""
        if self.elsewhere and parameter in self.elsewhere:
            return ()
        shards = self._shards.get(parameter)
        return (parameter,) if shards is None else shards.local_tensors

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Tensor) and key in self._names:
            return self._of(key)
        if isinstance(key, Tensor) or key not in self._optimizer.state:
            raise KeyError(key)
        return self._optimizer.state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, Tensor):
            self._optimizer.state[key] = value
            return
        self._refuse_strangers([key])
        self._changed()
        tensors = self.local_tensors(key)
        if tensors and tensors[0] is key:  # stepped on itself: the very mapping, as in torch
            self._put(key, cast(State, value), untouched=False)
        elif tensors:
            state, copied = self._of(key), dict(value)  # which may be live itself
            state.clear()
            state.update(copied)

    def __delitem__(self, key: Any) -> None:
        if key not in self and key not in self._names:
            raise KeyError(key)
        self._changed()
        for local in self.local_tensors(key) if isinstance(key, Tensor) else (key,):
            self._drop(local)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, Tensor):
            return key in self._names and self._has(key)
        return key in self._optimizer.state

    def __iter__(self) -> Iterator[Any]:
        yield from filter(self._has, self._names)
        yield from self.keys_beside()

    def keys_beside(self) -> list[Any]:
        """Returns the keys of state that belongs to no parameter."""
        return [key for key in self._optimizer.state if not isinstance(key, Tensor)]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Copies the entries of another mapping, and drops all others.

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
        """Removes all state; if a class makes state at construction, all parameters get it again."""
        self._changed()
        self._untouched.clear()
        self._optimizer.state.clear()
        if self._spec is not None and self._spec.state_at_construction:
            self.make(list(self._names), frozen_too=True)

    def pop(self, key: Any, default: Any = _NO_DEFAULT) -> Any:
        """Removes and returns an entry, like a dict's `pop`."""
        if key not in self:
            if default is _NO_DEFAULT:
                raise KeyError(key)
            return default
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Returns an entry, set to the default if it is absent or empty, like a dict's `setdefault`."""
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]

    def make(self, parameters: Iterable[Tensor], frozen_too: bool = False) -> None:
        """Makes state for the parameters without state; changes nothing else.

        Args:
            frozen_too: whether also for those that get no gradient now.

        Raises:
            AlgorithmError: the algorithm is not known, or cannot make state without a step.
        """
        if self._spec is None:
            raise AlgorithmError(
                "an optimizer is not known here", [unknown(type(self._optimizer))], code="unknown-algorithm"
            )
        group_of = self._group_of()
        for parameter in parameters:
            # A group that was taken out, as to freeze its parameters, leaves their state, which saves have.
            group = group_of.get(parameter, {**self._optimizer.defaults, PARAMS: [parameter]} if frozen_too else None)
            if group is None or not (frozen_too or requires_gradient(parameter)):
                continue
            for local in self.local_tensors(parameter):
                known = self._is_known(local)
                made = None if known else initial_state(self._spec, self._optimizer, group, local)
                if made:
                    self._put(local, made, untouched=self._settled)

    @property
    def global_names(self) -> frozenset[str]:
        """The names of present or future state that belongs to no parameter."""
        if self._spec is None or not self._spec.has_global_state:
            return frozenset()
        return frozenset([GLOBAL_STATE])

    def make_global(self, names: Collection[str]) -> None:
        """Makes the state of these names, which belongs to no parameter, if there is none yet."""
        if not self.global_names.isdisjoint(names):
            cast(CommunicatingOptimizer, self._optimizer).make_global()

    def initial(self, keys: Iterable[Tensor | str]) -> set[Tensor | str]:
        """Returns the parameters whose state equals what `make` makes, so that training does not need it.

        Args:
            keys: parameters, and names of state that belongs to none.
        """
        if self._spec is None or self._spec.state_at_construction:  # there would be nobody to make it again
            return set()
        group_of = self._group_of()
        return {key for key in keys if self._is_initial(self._spec, key, group_of)}

    def _is_initial(self, spec: AlgorithmSpec, key: Tensor | str, group_of: Mapping[Tensor, Group]) -> bool:
        if isinstance(key, str):
            there = self._optimizer.state.get(cast(Any, key), {})
            return bool(there) and is_initial(there, cast(CommunicatingOptimizer, self._optimizer).initial_global())
        group, tensors = group_of.get(key), self.local_tensors(key)
        if group is None or not all(self._is_known(local) for local in tensors):
            return False
        if self.narrow is not None:
            return self.narrow.is_unstepped(group, key)
        if self._settled:
            return all(local in self._untouched and not self._untouched[local].written() for local in tensors)
        self._of(key)  # completes that of an algorithm that keeps less while it trains
        return all(
            is_initial(self._of_local(local), initial_state(spec, self._optimizer, group, local)) for local in tensors
        )

    @property
    def saves_untouched(self) -> bool:
        """Whether a save notes which parameters have state but no step yet, as the first step replaces that state."""
        return self._settled or (self.narrow is not None and self.narrow.algorithm.settled_at_first_step)

    def is_untouched(self, parameter: Tensor, group: Group) -> bool:
        """Whether the parameter of a group has state but no step yet, so that the first step replaces the state."""
        tensors = self.local_tensors(parameter)
        if self.narrow is not None:
            return bool(tensors) and self.narrow.is_unstepped(group, parameter)
        return bool(tensors) and tensors[0] in self._untouched

    def loaded(self, parameter: Tensor, entries: Collection[str], untouched: bool) -> None:
        """Notes that the state of a parameter was loaded.

        Args:
            parameter: has state.
            entries: the names of what was loaded of it.
            untouched: whether the loaded state is that of a parameter which never had a step.
        """
        self._changed()
        for local in self.local_tensors(parameter):
            early = self._untouched.get(local)
            # State that nothing was loaded into is untouched still; where there are no elements nobody can tell.
            if early is None or early.written() or not local.numel():
                self._put(local, self._of_local(local), untouched and self._settled)
        state = self._of(parameter)
        if isinstance(state, ShardedState):
            state.share_scalars()
        if self.narrow is not None:
            self.narrow.state_loaded(parameter, entries)

    def follow(self, shards: Shards, group: Group) -> None:
        """Moves the state of a sharded parameter to its current local tensors, if they have changed.

        It stays the same dicts, which someone may hold, with the same values where the new tensors need them; where
        these have the old ones' dtype, state keeps its own.
        """
        now, moved = shards.moved(), []
        for old, new in zip(shards.local_tensors, now, strict=False):
            entries, early = self._of_local(old), self._untouched.get(old)
            written, values = early is not None and early.written(), {}
            if entries and (old.device, old.dtype) != (new.device, new.dtype):
                assert self._spec is not None  # sharded parameters are refused for an unknown class
                like = initial_state(self._spec, self._optimizer, group, new)
                keeps_dtype = old.dtype == new.dtype
                values = {name: _like(value, like.get(name), keeps_dtype) for name, value in entries.items()}
            moved.append((new, entries, early, written, values))
        if not now:
            return
        # Nothing fails from here on; an interrupt leaves the old ones, and is made up for by the next call.
        for new, entries, early, written, values in moved:
            entries.update(values)
            if entries and early is None:
                self._optimizer.state[new] = entries
            elif entries:
                self._untouched[new] = Untouched(entries, written)
        before, shards.local_tensors = shards.local_tensors, now
        for old in set(before).difference(now):
            self._drop(old)

    def hand_over(self, tensors: Collection[Tensor] | None = None) -> Callable[[], None]:
        """Lets the inner optimizer make state again for tensors that are about to have their first step.

        Early state that someone wrote into is not lost: it is handed to the inner optimizer as it is.

        Args:
            tensors: None for all.

        Returns:
            A function that undoes this, and drops state that was made since.
        """
        state = self._optimizer.state
        # State that is made from now on stands behind known keys, or in dicts that someone has looked at.
        known = len(state)
        if tensors is None or len(tensors) > len(state) // 8:  # a look-up takes as long as to pass by eight
            empty = list(filterfalse(None, state.values()))
        else:
            empty = [state[local] for local in tensors if local in state and not state[local]]
        among = () if not self._untouched else self._untouched if tensors is None else tensors
        early = {each: self._untouched[each] for each in among if each in self._untouched and each.grad is not None}
        written = {local for local, untouched in early.items() if untouched.written()}
        # No state is out of both for a moment, so that an interrupt loses none; what is in both counts as early.
        for local, untouched in early.items():
            if local in written:
                state[local] = untouched.entries
            del self._untouched[local]

        def undo() -> None:
            for made in list(state)[known:]:
                del state[made]
            for entries in empty:
                entries.clear()
            self._untouched.update(early)

        return undo

    def _of_local(self, local: Tensor) -> State:
        """Returns the live state of a local tensor; empty if there is none yet."""
        early = self._untouched.get(local)
        state: State = self._optimizer.state[local] if early is None else early.entries
        return state

    def _is_known(self, local: Tensor) -> bool:
        return local in self._untouched or bool(self._optimizer.state.get(local))

    def _put(self, local: Tensor, entries: State, untouched: bool) -> None:
        """Sets the state of a local tensor; with `untouched`, state that the first step replaces."""
        if untouched:
            self._optimizer.state.pop(local, None)
            self._untouched[local] = Untouched(entries)
        else:
            self._untouched.pop(local, None)
            self._optimizer.state[local] = entries

    def _drop(self, local: Any) -> None:
        """Removes the state of a local tensor, or of another key of the optimizer's state."""
        self._untouched.pop(local, None)
        self._optimizer.state.pop(local, None)

    def _of(self, parameter: Tensor) -> MutableMapping[str, Any]:
        """Returns the live state of a parameter; empty if there is none, or this rank has no elements of it."""
        if self.elsewhere and parameter in self.elsewhere:
            return {}
        shards = self._shards.get(parameter)
        if shards is None:
            if isinstance(self._optimizer, AlgorithmOptimizer):
                self._optimizer.complete_state(parameter)
            return self._of_local(parameter)
        states = tuple([self._of_local(local) for local in shards.local_tensors])
        return ShardedState(shards, states, self._kinds, self._changed)

    def _has(self, parameter: Tensor) -> bool:
        tensors = self.local_tensors(parameter)
        return bool(tensors) and self._is_known(tensors[0])

    def _group_of(self) -> dict[Tensor, Group]:
        return {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}

    def _changed(self) -> None:
        for cache in self.caches:
            cache.clear()

    def _refuse_strangers(self, keys: Iterable[Tensor]) -> None:
        required, remedy = f"one of {listed(self._names.values())}", "set the state of the optimizer's own parameters"
        problems = [Problem("state", described(key), required, remedy) for key in keys if key not in self._names]
        if problems:
            raise StateError("state of tensors that are no parameters cannot be set", problems)


def _like(value: Any, like: Any, keeps_dtype: bool) -> Any:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    return value.to(device=like.device, dtype=value.dtype if keeps_dtype else like.dtype)
