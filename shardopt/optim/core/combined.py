"""Combines several optimizers into one that steps, saves and loads them together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, cast

from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.core.composite import CompositeOptimizer, StateOfParts
from shardopt.optim.state_dict.groups import described, listed, named
from shardopt.optim.state_dict.offered import begins, meant, with_key, without_key
from shardopt.state.param_groups import PARAMS

Child = tuple[str, KeyedOptimizer]


class CombinedOptimizer(CompositeOptimizer):
    """Optimizers for different parameters, stepped, saved and loaded as one.

    Every name of a child has the child's key before it: `weight` of `("dense", optimizer)` is `dense.weight`, in
    parameters, state, groups and errors. A child without a key keeps its names. State, groups and parameters are the
    children's own, not copies.

    Args:
        optims: the children, each alone or as (key, optimizer). They are stepped by the names of their algorithms,
            those of one algorithm in this order.

    Raises:
        StateError: there is no child, one is not a keyed optimizer, two names are equal, or one tensor is a parameter
            of two children.
    """

    def __init__(self, optims: Collection[KeyedOptimizer | Child]) -> None:
        children = [optim if isinstance(optim, tuple) else ("", optim) for optim in optims]
        if not children:
            problem = Problem("optims", "none", "at least one optimizer", "pass the optimizers to combine")
            raise StateError("there is nothing to combine", [problem], code="combined-optimizers")
        super().__init__([optimizer for _, optimizer in children], [key for key, _ in children])
        self._owners: dict[Tensor, KeyedOptimizer] = {}
        self._index()

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Returns the name as the combined optimizer has it: "key.name", or "name" if the key is ""."""
        return with_key(name, opt_key)

    @property
    def optimizers(self) -> list[Child]:
        """The children with their keys; a child without key has ""."""
        return list(zip(self._keys, self._children, strict=True))

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN, after the child's key → parameter, under every name of a tied one."""
        if len(self._params) != sum(len(child.params) for child in self._children):
            self._index()  # a group was added to a child
        return self._params

    @property
    def state(self) -> Any:
        """Parameter → its state in the child that has it; a lookup takes constant time."""
        self._refuse_torchs_getters()
        return StateOfParts(self.optimizers, self.locate)

    @state.setter
    def state(self, state: Any) -> None:
        """Takes over another mapping: each child gets the entries of its parameters, and of its own names.

        Raises:
            StateError: it is not plain which child is meant; nothing was changed.
        """
        state = dict(state)
        self._index()
        by_child: list[tuple[KeyedOptimizer, dict[Any, Any]]] = [(child, {}) for child in self._children]
        problems = []
        for key, entries in state.items():
            if isinstance(key, Tensor):
                owners = {index for index, child in enumerate(self._children) if child is self._owners.get(key)}
            else:
                owners = meant(str(key), self._keys)
            if len(owners) != 1:
                value = described(key) if isinstance(key, Tensor) else f"state of {key!r}"
                problems.append(Problem("state", value, "that of one child", "set it in the one that is meant"))
                continue
            index = owners.pop()
            by_child[index][1][key if isinstance(key, Tensor) else without_key(key, self._keys[index])] = entries
        if problems:
            raise StateError("state can go to no optimizer, or to several", problems, code="combined-optimizers")
        for child, own in by_child:
            child.state = cast(Any, own)

    @property
    def param_groups(self) -> Any:
        """The children's own groups, child after child; a tuple, as groups are added by `add_param_group`."""
        return tuple(chain.from_iterable(child.param_groups for child in self._children))

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self._refuse_replacing("param_groups")

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that every child has, with the first child's values; a new dict."""
        first, *others = (child.defaults for child in self._children)
        return {name: value for name, value in first.items() if all(name in other for other in others)}

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._refuse_replacing("defaults")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the child whose key its names begin with, or to the only child.

        Raises:
            StateError: it is not plain which child is meant, or a name or a parameter is there already; nothing was
                changed.
            AlgorithmError: a parameter is sharded, and the algorithm may not step on shards.
        """
        params = named(param_group[PARAMS], dropped="")  # a child knows which prefix it leaves out
        there = [name for name, tensor in params.items() if name in self.params or tensor in self._owners]
        if there:
            problems = [Problem(name, "a parameter of this optimizer", "a new one", "add it once") for name in there]
            raise StateError("a parameter is added twice", problems, code="bad-parameters")
        candidates = set.intersection(*(meant(name, self._keys) for name in params))
        if len(candidates) != 1:
            numbers = sorted(candidates) or range(len(self._children))
            calls = [f"optimizers[{number}][1] ({self._children[number].algorithm})" for number in numbers]
            problem = Problem(
                key=listed(params),
                found=f"names that fit {len(candidates)} of the optimizers, whose keys are {self._keys}",
                required="names that all begin with the key of one",
                remedy=f"call add_param_group of the one that is meant: {listed(calls)}",
            )
            raise StateError("a group can go to no optimizer, or to several", [problem], code="combined-optimizers")
        index = candidates.pop()
        inner = {without_key(name, self._keys[index]): tensor for name, tensor in params.items()}
        self._children[index].add_param_group({**param_group, PARAMS: inner})

    @property
    def _stepped(self) -> tuple[KeyedOptimizer, ...]:
        # Those that communicate: in one order on all ranks, even if the groups of `keyed` are in different orders.
        return tuple(sorted(self._children, key=lambda child: child.algorithm))

    def __repr__(self) -> str:
        children = [f"({key!r}, {optimizer!r})" if key else f"{optimizer!r}" for key, optimizer in self.optimizers]
        return f"{type(self).__name__} of [{', '.join(children)}]"

    def locate(self, key: Any) -> tuple[KeyedOptimizer, Any]:
        """Returns the child that has the state under a key, and its own name for the key.

        Raises:
            KeyError: no child has it.
        """
        if isinstance(key, Tensor):
            if key not in self._owners:
                self._index()
            return self._owners[key], key
        for own_key, child in self.optimizers:
            if isinstance(key, str) and begins(key, own_key) and without_key(key, own_key) in child.state:
                return child, without_key(key, own_key)
        raise KeyError(key)

    def _index(self) -> None:
        """Indexes the children's parameters.

        Raises:
            StateError: two names are equal, or one tensor is a parameter of two children.
        """
        names: set[str] = set()
        params: dict[str, Tensor] = {}
        owners: dict[Tensor, int] = {}
        problems = []
        for index, (key, child) in enumerate(self.optimizers):
            own = {with_key(name, key) for name in child._state_names()}
            for name in sorted(names & own):
                remedy = "give the optimizers keys: [(key, optimizer), ...]"
                problems.append(Problem(name, "state of two optimizers", "one name for one thing", remedy))
            names |= own
            for name, tensor in child.params.items():
                params[with_key(name, key)] = tensor
                other = owners.setdefault(tensor, index)
                if other != index:
                    owner = f"a parameter of optimizers {other} and {index}, which would both step on it"
                    problems.append(Problem(with_key(name, key), owner, "one of them", "leave it out of the other"))
        if problems:
            raise StateError("optimizers that overlap cannot be combined", problems, code="combined-optimizers")
        self._params, self._owners = params, {tensor: self._children[index] for tensor, index in owners.items()}

    def _refuse_replacing(self, name: str) -> None:
        problem = Problem(
            name, f"a new {name}", "the children's own", "change it in the one that is meant, in `optimizers`"
        )
        raise StateError(
            "a combined optimizer has nothing of its own to replace", [problem], code="combined-optimizers"
        )
