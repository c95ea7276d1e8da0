"""A torch optimizer that steps on local tensors in the place of the user's parameters.

Its groups are the user's: one dict per group, with the user's parameters under "params", so that options changed from
outside (schedules, warm-up) and by the algorithm are the same numbers. Only inside of `step` do the local tensors
stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.fresh import fresh_state
from shardopt.algorithms.registry import AlgorithmSpec, MakesGlobalState, MakesState, StepsOn, find_spec, unknown
from shardopt.algorithms.torch_private import step_without_hooks
from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.optim.implementation import (
    all_have,
    any_sparse,
    names_from_gradients,
    prefers_fused,
    refuse_sparse,
    some_are_late,
)
from shardopt.optim.leaves import GroupLeaves, ShardedState, Shards, State, moved_state, zero_gradients
from shardopt.optim.turn import Turn, in_turns
from shardopt.sharding.gradients import requires_gradient
from shardopt.sharding.view import leaves_of, view_of

Group = dict[str, Any]


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


class LocalOptimizer:
    """A torch optimizer over the leaves of parameters, with its state and its groups as seen from outside.

    Where `chooses` is set, groups that name no implementation step with the fastest that agrees with the for-loop.

    Args:
        names: parameter → FQN.
        optim_factory: makes the optimizer from the list of all leaves, in the order of `names`.

    Raises:
        AlgorithmError: there is a sharded parameter, and the algorithm may not step on shards or is not known.
        StateError: the factory put local tensors of one parameter in two groups, or took others than it was given.
    """

    def __init__(self, names: Mapping[Tensor, str], optim_factory: Callable[[list[Tensor]], Optimizer]) -> None:
        self.shards: dict[Tensor, Shards] = {}
        self.untouched: dict[Tensor, Untouched] = {}
        self.chooses = False
        self._grouped: list[GroupLeaves] = []
        self._alone: dict[Tensor, tuple[Group, GroupLeaves]] = {}
        leaves = {parameter: self._bind(name, parameter) for parameter, name in names.items()}
        self.optimizer = optim_factory(list(chain.from_iterable(leaves.values())))
        self.spec = spec = find_spec(type(self.optimizer))
        if spec is not None and spec.stands_for is not None and not isinstance(self.optimizer, spec.optimizer):
            self.optimizer = spec.optimizer(self.optimizer.param_groups, **self.optimizer.defaults)
        self._refuse(names)
        self._refuse_graphs_of_shards(self.groups)
        owners = {leaf: parameter for parameter, its in leaves.items() for leaf in its}
        for group in self.groups:
            group["params"] = _parameters_of(group["params"], owners, leaves, names)
        self.hand_over_parameters(names)

    @property
    def groups(self) -> list[Group]:
        """The live groups; "params" are the user's parameters."""
        return self.optimizer.param_groups

    @property
    def settles_at_first_step(self) -> bool:
        """Whether state made before the first step is kept from the inner optimizer until then."""
        return self.spec is not None and self.spec.settled_at_first_step

    @property
    def steps_on_parameters(self) -> bool:
        """Whether the inner optimizer is handed the user's own tensors, sharded as they are."""
        return self.spec is not None and self.spec.steps_on is StepsOn.PARAMETERS

    def leaves(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """The tensors that are stepped on in place of a parameter."""
        shards = self.shards.get(parameter)
        return (parameter,) if shards is None else shards.leaves

    def add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        """Adds parameters; as torch's `add_param_group`, and with state where the class makes it at construction."""
        leaves = list(chain.from_iterable(self._bind(name, parameter) for parameter, name in names.items()))
        try:
            self._refuse(names)
            self._refuse_graphs_of_shards([*self.groups, {**self.optimizer.defaults, **options}])
            self.optimizer.add_param_group({**options, "params": leaves})
        except Exception:
            for parameter in names:
                self.shards.pop(parameter, None)
            raise
        self.groups[-1]["params"] = list(names)
        self.hand_over_parameters({**getattr(self.optimizer, "names", {}), **names})
        if self.spec is not None and self.spec.state_at_construction:
            self.make_state(names)

    def hand_over_parameters(self, names: Mapping[Tensor, str]) -> None:
        """Where the algorithm steps on parameters: makes them their own leaves, and tells it how they are called.

        Until here local tensors stood in for them, whose class torch knows.
        """
        if self.steps_on_parameters:
            self.shards.clear()
            cast(MakesState, self.optimizer).names = names

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """One step of the algorithm without hooks; returns the closure's loss."""
        if self.spec is None or not self.spec.elementwise:
            self._hand_over(self.untouched)
            return step_without_hooks(type(self.optimizer))(self.optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_leaves(self.spec, list(zip(self.groups, self._leaves_of_groups(), strict=True)))
        return loss

    def step_alone(self, parameter: Tensor) -> None:
        """One step on a single parameter, with the options of its group; no other parameter is looked at.

        Only of an elementwise algorithm, which computes the same in a step on all parameters.
        """
        assert self.spec is not None and self.spec.elementwise
        group, leaves = self._alone.get(parameter, (None, None))
        if group is None or leaves is None or all(group is not each for each in self.groups):
            group = next(each for each in self.groups if any(parameter is its for its in each["params"]))
            leaves = GroupLeaves([parameter], self.shards)
            self._alone[parameter] = group, leaves
        self._step_leaves(self.spec, [(group, leaves)])

    def _step_leaves(self, spec: AlgorithmSpec, grouped: list[tuple[Group, GroupLeaves]]) -> None:
        """A step of an elementwise algorithm on these leaves, and nothing else."""
        turns = [Turn(group, leaves) for group, leaves in grouped]
        try:
            for turn in turns:
                with torch.no_grad():
                    turn.lend(partial(self._follow, group=turn.group), spec.takes_dense)
            anew = [turn for turn in turns if not turn.repeats]
            for turn in anew:
                refuse_sparse(spec, turn.group, turn.leaves.sharded)
            for turn in anew:
                self._hand_over(turn.leaves.leaves)
            for turn in turns:
                if "fused" in turn.group:
                    turn.group["fused"] = self._fused_now(spec, turn)
            with in_turns(self.optimizer, turns):
                step_without_hooks(type(self.optimizer))(self.optimizer)
        finally:
            for turn in turns:
                turn.give_back()

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops or zeroes the gradients of all parameters."""
        if not self.shards and not self.steps_on_parameters:
            self.optimizer.zero_grad(set_to_none)
            return
        for parameter in chain.from_iterable(group["params"] for group in self.groups):
            zero_gradients(parameter, set_to_none)

    def make_state(self, parameters: Iterable[Tensor]) -> None:
        """Makes state for those parameters that have none and may get a gradient; changes nothing else.

        Raises:
            AlgorithmError: the algorithm is not known, or cannot make state without a step.
        """
        if self.spec is None:
            raise AlgorithmError("an optimizer is not known here", [unknown(type(self.optimizer))])
        group_of = {parameter: group for group in self.groups for parameter in group["params"]}
        for parameter in filter(group_of.__contains__, parameters):
            if not requires_gradient(parameter):
                continue
            for leaf in self.leaves(parameter):
                if leaf in self.untouched or self.optimizer.state.get(leaf):
                    continue
                made = fresh_state(self.spec, self.optimizer, group_of[parameter], leaf)
                if made and self.settles_at_first_step:
                    self.untouched[leaf] = Untouched(made)
                elif made:
                    self.optimizer.state[leaf] = made
        if self.spec.has_global_state:
            cast(MakesGlobalState, self.optimizer).make_global()

    def state_of(self, parameter: Tensor) -> MutableMapping[str, Any]:
        """The live state of a parameter; empty if there is none yet."""
        shards = self.shards.get(parameter)
        if shards is None:
            return self._leaf_state(parameter)
        assert self.spec is not None  # sharded parameters are refused for an unknown class
        return ShardedState(shards, tuple(map(self._leaf_state, shards.leaves)), self.spec, self.state_changed)

    def has_state(self, parameter: Tensor) -> bool:
        """Whether there is any state of a parameter."""
        leaf = self.leaves(parameter)[0]
        return leaf in self.untouched or bool(self.optimizer.state.get(leaf))

    def is_untouched(self, parameter: Tensor) -> bool:
        """Whether the parameter has state and never had a step, so that the first step makes its state anew."""
        return self.leaves(parameter)[0] in self.untouched

    def state_loaded(self, parameter: Tensor, untouched: bool) -> None:
        """Takes it that the state of a parameter was loaded.

        Args:
            parameter: has state.
            untouched: whether the loaded state is that of a parameter which never had a step.
        """
        self.state_changed()
        for leaf in self.leaves(parameter):
            early = self.untouched.pop(leaf, None)
            if untouched:
                entries = self.optimizer.state.pop(leaf, None) if early is None else early.entries
                self.untouched[leaf] = Untouched(entries)
            elif early is not None:
                self.optimizer.state[leaf] = early.entries
        state = self.state_of(parameter)
        if isinstance(state, ShardedState):
            state.share_scalars()

    def state_changed(self) -> None:
        """Drops what is kept about the state from step to step: someone else than the inner optimizer changed it."""
        self._grouped.clear()
        self._alone.clear()

    def _bind(self, name: str, parameter: Tensor) -> tuple[Tensor, ...]:
        held = leaves_of(parameter)
        if len(held) == 1 and held[0] is parameter:
            return held
        self.shards[parameter] = Shards(name, parameter)
        return self.shards[parameter].leaves

    def _refuse(self, names: Mapping[Tensor, str]) -> None:
        if self.steps_on_parameters:
            assert self.spec is not None
            found = {name: self.spec.unsuitable(view_of(parameter, name)) for parameter, name in names.items()}
            problems = [
                Problem(name, what, f"a parameter that {self.spec.name} can step", "give it to another optimizer")
                for name, what in found.items()
                if what
            ]
            if problems:
                raise AlgorithmError(f"{self.spec.name} cannot step these parameters", problems)
        if not self.shards or (self.spec is not None and (self.spec.elementwise or self.steps_on_parameters)):
            return
        if self.spec is None:
            raise AlgorithmError("an unknown optimizer may not step on shards", [unknown(type(self.optimizer))])
        first = next(iter(self.shards.values()))
        problem = Problem(
            key=first.name,
            found=f"a sharded parameter under {self.spec.name}: {self.spec.why_not}",
            required="an algorithm that treats every element by itself, or plain parameters",
            remedy=f"give this parameter to another optimizer, or keep it whole on every rank for {self.spec.name}",
        )
        raise AlgorithmError(f"{self.spec.name} may not step on shards", [problem])

    def _refuse_graphs_of_shards(self, groups: Iterable[Mapping[str, Any]]) -> None:
        if self.shards and any(group.get("differentiable") for group in groups):
            problem = Problem(
                key=next(iter(self.shards.values())).name,
                found="a sharded parameter in a step with differentiable=True",
                required="plain parameters, as local tensors take no part in autograd",
                remedy="leave differentiable out, or keep the parameters whole",
            )
            raise AlgorithmError("a step on shards cannot be differentiated", [problem])

    def _leaf_state(self, leaf: Tensor) -> State:
        untouched = self.untouched.get(leaf)
        if untouched is not None:
            return untouched.entries
        state: State = self.optimizer.state[leaf]
        return state

    def _leaves_of_groups(self) -> list[GroupLeaves]:
        parameters = [group["params"] for group in self.groups]
        if len(self._grouped) != len(parameters) or not all(map(GroupLeaves.are_of, self._grouped, parameters)):
            self._grouped = [GroupLeaves(its, self.shards) for its in parameters]
        return self._grouped

    def _fused_now(self, spec: AlgorithmSpec, turn: Turn) -> bool | None:
        """What a group's "fused" is to be in this step."""
        group, leaves = turn.group, turn.leaves
        fused: bool | None = group["fused"]
        if self.chooses and prefers_fused(spec, group, leaves.kinds):
            fused = turn.repeats or not (spec.takes_sparse and any_sparse(leaves.leaves))
        if fused and spec.settled_at_first_step and not turn.repeats:
            names = names_from_gradients(spec, group)
            if leaves.settled != names:
                if some_are_late(names, leaves.leaves, self.optimizer.state):
                    return False
                if all_have(names, leaves.leaves, self.optimizer.state):
                    leaves.settled = names
        return fused

    def _follow(self, shards: Shards, group: Group) -> None:
        replaced = shards.moved()
        if not replaced:
            return
        for old, new in zip(replaced, shards.leaves, strict=True):
            state = dict(self._leaf_state(old))
            untouched = self.untouched.pop(old, None)
            self.optimizer.state.pop(old, None)
            if not state:
                continue
            if (old.device, old.dtype) != (new.device, new.dtype):
                assert self.spec is not None  # sharded parameters are refused for an unknown class
                state = moved_state(state, fresh_state(self.spec, self.optimizer, group, new), old, new)
            if untouched is None:
                self.optimizer.state[new] = state
            else:
                self.untouched[new] = Untouched(state, untouched.written())

    def _hand_over(self, leaves: Iterable[Tensor]) -> None:
        """Lets the inner optimizer make state anew for those of the leaves that are to have their first step.

        What someone wrote into early state is not lost: it is handed to the inner optimizer as it is.
        """
        if not self.untouched:
            return
        for leaf in [leaf for leaf in leaves if leaf in self.untouched and leaf.grad is not None]:
            early = self.untouched.pop(leaf)
            if early.written():
                self.optimizer.state[leaf] = early.entries


class LocalState(MutableMapping[Any, Any]):
    """`optimizer.state` of a keyed optimizer: parameter → its state, live; looking one up takes constant time."""

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
            self._local.untouched.pop(leaf, None)
            self._local.optimizer.state.pop(leaf, None)

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


def _parameters_of(
    taken: list[Tensor],
    owners: Mapping[Tensor, Tensor],
    leaves: Mapping[Tensor, tuple[Tensor, ...]],
    names: Mapping[Tensor, str],
) -> list[Tensor]:
    """The parameters that a group of local tensors belongs to, each once, in the group's order."""
    strangers = [leaf for leaf in taken if leaf not in owners]
    if strangers:
        problem = Problem(
            key=f"a tensor of shape {tuple(strangers[0].shape)}",
            found="a tensor that the factory took from elsewhere",
            required="the tensors that the factory is given",
            remedy="let the factory build the optimizer over its argument",
        )
        raise StateError("the optimizer has tensors without a name", [problem])
    here = set(taken)
    parameters = list(dict.fromkeys(owners[leaf] for leaf in taken))
    for parameter in parameters:
        if not here.issuperset(leaves[parameter]):
            problem = Problem(
                key=names[parameter],
                found="local shards in two groups",
                required="one group",
                remedy="let the factory put all shards of a parameter in one group",
            )
            raise StateError("a parameter is in two groups", [problem])
    return parameters
