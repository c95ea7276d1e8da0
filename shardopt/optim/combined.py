"""An optimizer that combines several, stepped, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import chain
from typing import Any, cast

from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.optim.base import KeyedOptimizer, StateDict
from shardopt.optim.composite import CompositeOptimizer
from shardopt.optim.state_dict.groups import described, listed, named, refuse_unknown
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.optim.state_dict.offered_form import with_named_groups
from shardopt.optim.state_dict.saved_form import plan_keys
from shardopt.param_groups import ELSEWHERE, PARAM_GROUPS, PARAMS, STATE, are_named, members_only, renamed_group

Child = tuple[str, KeyedOptimizer]


class CombinedOptimizer(CompositeOptimizer):
    """Optimizers for different parameters, stepped, saved and loaded as one.

    Every name of a child with a key is seen from here with the key before it: `weight` of `("dense", optimizer)` is
    `dense.weight`, in parameters, state, groups and errors. A child without a key keeps its names. State, groups and
    parameters are the children's own, not copies.

    Args:
        optims: the children, each alone or as (key, optimizer), stepped in this order.

    Raises:
        StateError: there is no child, one is not a keyed optimizer, two names are equal, or one tensor is a parameter
            of two children.
    """

    def __init__(self, optims: Collection[KeyedOptimizer | Child]) -> None:
        children = [optim if isinstance(optim, tuple) else ("", optim) for optim in optims]
        if not children:
            problem = Problem("optims", "none", "at least one optimizer", "pass the optimizers to combine")
            raise StateError("there is nothing to combine", [problem])
        super().__init__([optimizer for _, optimizer in children])
        self._keys = [key for key, _ in children]
        self._params: dict[str, Tensor] = {}
        self._owners: dict[Tensor, KeyedOptimizer] = {}
        self._index()

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Returns the name as seen from the combined optimizer: "key.name", or "name" where the key is ""."""
        return f"{opt_key}.{name}" if opt_key else name

    @property
    def optimizers(self) -> list[Child]:
        """The children and their keys; a child without one has ""."""
        return list(zip(self._keys, self._children, strict=True))

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN with the child's key before it → parameter, every name of a tied one."""
        if len(self._params) != sum(len(child.params) for child in self._children):
            self._index()  # a group was added to a child
        return self._params

    @property
    def state(self) -> Any:
        """Parameter → its state in the child that has it; looking one up takes constant time."""
        self._refuse_torchs_getters()
        return CombinedState(self)

    @state.setter
    def state(self, state: Any) -> None:
        """Takes over the entries of another mapping: each child gets those of its parameters, and of its own names."""
        if self._made:
            self._replace_state(dict(state))

    @property
    def param_groups(self) -> Any:
        """The children's own groups, one child after the other: a tuple, as `add_param_group` adds groups."""
        return tuple(chain.from_iterable(child.param_groups for child in self._children))

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self._refuse_replacing("param_groups")

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that every child has, with the first one's values; a new dict."""
        first, *others = (child.defaults for child in self._children)
        return {name: value for name, value in first.items() if all(name in other for other in others)}

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._refuse_replacing("defaults")

    def init_state(
        self, sparse_grad_parameter_names: Iterable[str] | None = None, *, names: Iterable[str] | None = None
    ) -> None:
        """Makes the state of every child.

        Args:
            sparse_grad_parameter_names: parameters whose gradients will be sparse, with their child's key.
            names: the state to make, with the child's key; None for every trained parameter.

        Raises:
            StateError: a name is not known; no state was made.
            AlgorithmError: a child cannot make its state without a step.
        """
        sparse = set(sparse_grad_parameter_names or ())
        chosen = None if names is None else set(names)
        refuse_unknown("sparse_grad_parameter_names", sparse, self.params)
        refuse_unknown("names", chosen or (), self._state_names())
        for key, optimizer in self.optimizers:
            own = [name for name in optimizer.params if self.prepend_opt_key(name, key) in sparse]
            inner = None if chosen is None else [inner for _, inner in self._of_child(key, optimizer, chosen)]
            optimizer._init_named(own, inner)

    def unstepped_state(self, names: Iterable[str]) -> set[str]:
        """Returns the unstepped state of every child, with its key before the names."""
        chosen, unstepped = set(names), set[str]()
        for key, optimizer in self.optimizers:
            seen_as = {inner: name for name, inner in self._of_child(key, optimizer, chosen)}
            unstepped |= {seen_as[inner] for inner in optimizer.unstepped_state(seen_as)}
        return unstepped

    def drop_state(self, names: Iterable[str]) -> None:
        """Removes the state of these names in every child."""
        chosen = set(names)
        for key, optimizer in self.optimizers:
            optimizer.drop_state([inner for _, inner in self._of_child(key, optimizer, chosen)])

    def _of_child(self, key: str, optimizer: KeyedOptimizer, names: Collection[str]) -> list[tuple[str, str]]:
        """Returns those of the names that are a child's, as they are seen from here and as they are there."""
        pairs = ((self.prepend_opt_key(inner, key), inner) for inner in optimizer._state_names())
        return [(name, inner) for name, inner in pairs if name in names]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the child whose key its names begin with, or to the only child.

        Raises:
            StateError: it is not plain which child is meant, or a name or a parameter is there already; nothing was
                changed.
            AlgorithmError: a parameter is sharded, and the algorithm may not step on shards.
        """
        if not self._made:
            return
        params = named(param_group[PARAMS], dropped="")  # a child knows which prefix it leaves out
        there = [name for name, tensor in params.items() if name in self.params or tensor in self._owners]
        if there:
            problems = [Problem(name, "a parameter of this optimizer", "a new one", "add it once") for name in there]
            raise StateError("a parameter is added twice", problems)
        candidates = set.intersection(*(self._meant(name) for name in params))
        if len(candidates) != 1:
            problem = Problem(
                key=listed(params),
                found=f"names that fit {len(candidates)} of the optimizers, whose keys are {self._keys}",
                required="names that all begin with the key of one",
                remedy="call add_param_group of the one that is meant, in `optimizers`",
            )
            raise StateError("a group can go to no optimizer, or to several", [problem])
        index = candidates.pop()
        inner = {_inner(name, self._keys[index]): tensor for name, tensor in params.items()}
        self._children[index].add_param_group({**param_group, PARAMS: inner})

    def __repr__(self) -> str:
        children = [f"({key!r}, {optimizer!r})" if key else f"{optimizer!r}" for key, optimizer in self.optimizers]
        return f"{type(self).__name__} of [{', '.join(children)}]"

    def locate(self, key: Any) -> tuple[KeyedOptimizer, Any]:
        """Returns the child that has state under a key, and the key as it is there.

        Raises:
            KeyError: no child has it.
        """
        if isinstance(key, Tensor):
            if key not in self._owners:
                self._index()
            return self._owners[key], key
        for own_key, child in self.optimizers:
            if isinstance(key, str) and _begins(key, own_key) and _inner(key, own_key) in child.state:
                return child, _inner(key, own_key)
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
            own = {self.prepend_opt_key(name, key) for name in child._state_names()}
            for name in sorted(names & own):
                remedy = "give the optimizers keys: [(key, optimizer), ...]"
                problems.append(Problem(name, "state of two optimizers", "one name for one thing", remedy))
            names |= own
            for name, tensor in child.params.items():
                params[self.prepend_opt_key(name, key)] = tensor
                other = owners.setdefault(tensor, index)
                if other != index:
                    owner = f"a parameter of optimizers {other} and {index}, which would both step on it"
                    problem = Problem(
                        self.prepend_opt_key(name, key), owner, "one of them", "leave it out of the other"
                    )
                    problems.append(problem)
        if problems:
            raise StateError("optimizers that overlap cannot be combined", problems)
        self._params, self._owners = params, {tensor: self._children[index] for tensor, index in owners.items()}

    def _replace_state(self, state: Mapping[Any, Any]) -> None:
        """Gives each child the entries that are its own.

        Raises:
            StateError: it is not plain which child is meant; nothing was changed.
        """
        self._index()
        by_child: list[tuple[KeyedOptimizer, dict[Any, Any]]] = [(child, {}) for child in self._children]
        problems = []
        for key, entries in state.items():
            if isinstance(key, Tensor):
                meant = {index for index, child in enumerate(self._children) if child is self._owners.get(key)}
            else:
                meant = self._meant(str(key))
            if len(meant) != 1:
                value = described(key) if isinstance(key, Tensor) else f"state of {key!r}"
                problems.append(Problem("state", value, "that of one child", "set it in the one that is meant"))
                continue
            index = meant.pop()
            by_child[index][1][key if isinstance(key, Tensor) else _inner(key, self._keys[index])] = entries
        if problems:
            raise StateError("state can go to no optimizer, or to several", problems)
        for child, own in by_child:
            child.state = cast(Any, own)

    def _refuse_replacing(self, name: str) -> None:
        if self._made:  # torch's constructor sets it before
            problem = Problem(
                name, f"a new {name}", "the children's own", "change it in the one that is meant, in `optimizers`"
            )
            raise StateError("a combined optimizer has nothing of its own to replace", [problem])

    def held_state_names(self) -> set[str]:
        """Returns the names of every child, with its key before them."""
        return {self.prepend_opt_key(name, key) for key, child in self.optimizers for name in child.held_state_names()}

    def _state_names(self) -> set[str]:
        return {self.prepend_opt_key(name, key) for key, child in self.optimizers for name in child._state_names()}

    def _gather(self) -> StateDict:
        gathered: StateDict = {STATE: {}}
        for key, child in self.optimizers:
            state_dict = child.state_dict()
            for name, entries in state_dict[STATE].items():
                seen_as = self.prepend_opt_key(name, key)
                if seen_as in gathered[STATE]:
                    problem = Problem(seen_as, "state of two optimizers", "of one", "give the optimizers keys")
                    raise StateError("two optimizers keep state under one name", [problem])
                gathered[STATE][seen_as] = entries
            if PARAM_GROUPS in state_dict:
                seen_from_here = partial(self.prepend_opt_key, opt_key=key)
                groups = [renamed_group(group, seen_from_here) for group in state_dict[PARAM_GROUPS]]
                gathered.setdefault(PARAM_GROUPS, []).extend(groups)
        return gathered

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        offered = with_named_groups(offered)
        plan_keys(plan, self._saves_groups, offered, self._has_state)
        by_child: list[dict[str, Any]] = [{STATE: {}} for _ in self._children]
        for child_state, child in zip(by_child, self._children, strict=True):
            if child._saves_groups:
                child_state[PARAM_GROUPS] = []
        self._distribute_state(plan, offered.get(STATE, {}), by_child)
        if self._saves_groups:
            self._distribute_groups(plan, offered.get(PARAM_GROUPS, []), by_child)
        for key, child, child_state in zip(self._keys, self._children, by_child, strict=True):
            child.plan_load(plan.child(key), child_state)

    def _distribute_state(self, plan: LoadPlan, offered: Any, by_child: list[dict[str, Any]]) -> None:
        """Distributes the offered "state" to the children, by the names that they have for it."""
        if not isinstance(offered, Mapping):
            remedy = "load what state_dict() of a combined optimizer gave"
            plan.problem(plan.section(STATE), f"a {type(offered).__name__}", "a mapping by name", remedy)
            return
        for name, index in self._owners_of(plan, STATE, offered, by_child).items():
            by_child[index][STATE][_inner(name, self._keys[index])] = offered[name]

    def _distribute_groups(self, plan: LoadPlan, offered: Any, by_child: list[dict[str, Any]]) -> None:
        """Distributes the offered groups to the children, each with the parameters that are the child's.

        Where there are as many as here, a child gets those at the places of its own, empty ones too.
        """
        if not are_named(offered):
            remedy = "load what state_dict() of a combined optimizer gave"
            required = 'a list of groups with names under "params"'
            plan.problem(plan.section(PARAM_GROUPS), f"a {type(offered).__name__}", required, remedy)
            return
        names = [name for group in offered for name in group[PARAMS]]
        owners = self._owners_of(plan, PARAM_GROUPS, names, by_child)
        saving = [child for child in self._children if child._saves_groups]
        places = [index for index, child in enumerate(self._children) if child in saving for _ in child.param_groups]
        alike = len(places) == sum(not group.get(ELSEWHERE) for group in offered)
        for index, key in enumerate(self._keys):
            if PARAM_GROUPS not in by_child[index]:
                continue
            own = {name for name, owner in owners.items() if owner == index}
            own |= {name for group in offered for name in group.get(ELSEWHERE, ()) if index in self._meant(name)}
            for place, group in enumerate(offered):
                members = renamed_group(members_only(group, own), partial(_inner, opt_key=key))
                is_twin = alike and not group[PARAMS] and not group.get(ELSEWHERE) and places[place] == index
                if members[PARAMS] or members.get(ELSEWHERE) or is_twin:
                    by_child[index][PARAM_GROUPS].append(members)

    def _owners_of(
        self, plan: LoadPlan, section: str, names: Iterable[str], by_child: list[dict[str, Any]]
    ) -> dict[str, int]:
        """Returns offered name → the child that it is for; notes those that are for none, or for several."""
        known = {
            self.prepend_opt_key(name, key): {index}
            for index, (key, child) in enumerate(self.optimizers)
            for name in child._state_names()
        }
        owners = {}
        for name in names:
            meant = [index for index in known.get(name) or self._meant(name) if section in by_child[index]]
            if len(meant) == 1:
                owners[name] = meant[0]
            else:
                plan.unexpected(f"{plan.section(section)}.{name}", "combine the optimizers as when it was saved")
        return owners

    def _meant(self, name: str) -> set[int]:
        """Returns the children whose key a new name begins with; where there is none, those without a key."""
        keyed = {index for index, key in enumerate(self._keys) if key and _begins(name, key)}
        return keyed or {index for index, key in enumerate(self._keys) if not key}


class CombinedState(MutableMapping[Any, Any]):
    """`state` of a combined optimizer: that of its children, under parameters and, where it has any, under names.

    Args:
        combined: the optimizer.
    """

    def __init__(self, combined: CombinedOptimizer) -> None:
        self._combined = combined

    def __getitem__(self, key: Any) -> Any:
        child, inner = self._combined.locate(key)
        return child.state[inner]

    def __setitem__(self, key: Any, value: Any) -> None:
        child, inner = self._combined.locate(key)
        child.state[inner] = value

    def __delitem__(self, key: Any) -> None:
        child, inner = self._combined.locate(key)
        del child.state[inner]

    def __iter__(self) -> Iterator[Any]:
        for opt_key, child in self._combined.optimizers:
            for key in child.state:
                yield self._combined.prepend_opt_key(key, opt_key) if isinstance(key, str) else key

    def __len__(self) -> int:
        return sum(len(child.state) for _, child in self._combined.optimizers)

    def clear(self) -> None:
        """Removes the state of every child."""
        for _, child in self._combined.optimizers:
            child.state.clear()

    def __repr__(self) -> str:
        return repr(dict(self))


def _begins(name: str, opt_key: str) -> bool:
    return not opt_key or name.startswith(f"{opt_key}.")


def _inner(name: str, opt_key: str) -> str:
    """Strips the key of the child from a name; one that does not begin with it stays."""
    return name.removeprefix(f"{opt_key}.") if opt_key else name
