"""A torch optimizer that steps on local tensors in the place of the user's parameters.

Its groups are the user's: one dict per group, with the user's parameters under "params", so that options changed from
outside (schedules, warm-up) and by the algorithm are the same numbers. Only inside of `step` do the local tensors
stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.communicating import AlgorithmOptimizer, CommunicatingOptimizer
from shardopt.algorithms.elementwise.schedule_free import TRAIN_MODE, ScheduleFree, is_evaluating, refusal_to_step
from shardopt.algorithms.initial_state import initial_state, is_initial
from shardopt.algorithms.low_precision.conversion import Conversion, converted
from shardopt.algorithms.low_precision.optimizer import LowPrecisionOptimizer
from shardopt.algorithms.registry import (
    GLOBAL_STATE,
    AlgorithmSpec,
    MakesState,
    StepsOn,
    find_spec,
    unknown,
)
from shardopt.errors import AlgorithmError
from shardopt.optim.gradients.local_gradients import warn_of_no_gradients
from shardopt.optim.local.group_step import GroupStep, step_groups
from shardopt.optim.local.implementation import choose_fused, refuse_sparse, settle_fused
from shardopt.optim.local.refusals import parameters_of, refuse_global_name, refuse_unfit
from shardopt.optim.local.shard_states import ShardStates
from shardopt.optim.local.shards import GroupShards, ShardedState, Shards, State
from shardopt.optim.state_dict.groups import refuse_flattened, refuse_unfit_groups
from shardopt.ranks import SharedGroup
from shardopt.sharding.gradients import requires_gradient, zero_gradients
from shardopt.sharding.swapped import MODE_IN_SWAP, STEP_IN_SWAP, refuse_swapped
from shardopt.sharding.view import empty_local_tensor, local_tensors
from shardopt.torch_private import free_unsharded_parameters, gathers_as_torch, step_without_hooks

Group = dict[str, Any]


class LocalOptimizer:
    """A torch optimizer over the local tensors of parameters, with its state and its groups as seen from outside.

    Where `chooses` is set, groups that name no implementation step with the fastest that agrees with the for-loop.

    Args:
        names: parameter → FQN.
        optim_factory: makes the optimizer from the list of all local tensors, in the order of `names`.

    Raises:
        AlgorithmError: there is a sharded parameter, and the algorithm may not step on shards or is not known.
        StateError: the factory put local tensors of one parameter in two groups, or took others than it was given.
    """

    def __init__(self, names: Mapping[Tensor, str], optim_factory: Callable[[list[Tensor]], Optimizer]) -> None:
        self.shards: dict[Tensor, Shards] = {}
        self.chooses = False
        self._names = dict(names)
        self._looked_for_gradients = False
        self._elsewhere: set[Tensor] = set()
        self._grouped: list[GroupShards] = []
        self._known: list[list[Tensor]] = []  # the parameters of each group, once they were looked at
        # With the group of each parameter, and its place there.
        self._alone: dict[Tensor, tuple[Group, int, GroupShards]] = {}
        self._alone_in: dict[Tensor, Group] = {}
        bound = self._bind(names)
        self.optimizer = optim_factory(list(chain.from_iterable(bound.values())))
        # Without the one that torch gives every optimizer that was copied.
        self.required_options = frozenset(self.optimizer.defaults) - {"differentiable"}
        self.spec = spec = find_spec(type(self.optimizer))
        if spec is not None and spec.stands_for is not None and not isinstance(self.optimizer, spec.optimizer):
            self.optimizer = spec.optimizer(self.optimizer.param_groups, **self.optimizer.defaults)
        refuse_unfit(self.optimizer, spec, names, self.shards.values(), self.groups)
        self.states = ShardStates(self.optimizer)
        owners = {local: parameter for parameter, tensors in bound.items() for local in tensors}
        for group in self.groups:
            group["params"] = parameters_of(group["params"], owners, bound, names)
        self._drop_stand_ins(bound)
        self.hand_over_parameters(names)
        self._narrow = self.optimizer if isinstance(self.optimizer, LowPrecisionOptimizer) else None
        if self._narrow is not None:
            for group in self.groups:
                self._narrow.refuse_parameters(group, {each: names[each] for each in group["params"]})

    @property
    def groups(self) -> list[Group]:
        """The live groups; "params" are the user's parameters."""
        return self.optimizer.param_groups

    @property
    def settles_at_first_step(self) -> bool:
        """Whether state made before the first step is kept from the inner optimizer until then."""
        return self.spec is not None and self.spec.settled_at_first_step

    @property
    def saves_untouched(self) -> bool:
        """Whether it is saved which parameters have state and never had a step."""
        return self.settles_at_first_step or (self._narrow is not None and self._narrow.settles_late)

    def unlike(
        self, group: Mapping[str, Any], options: Mapping[str, Any], kept: Collection[str]
    ) -> Iterable[tuple[str, Any, Any]]:
        """Returns those of a saved group's options that mean other state than is here: name, stored, own.

        Args:
            kept: options that a load leaves as they are here.
        """
        return self.optimizer.unlike(group, options, kept) if isinstance(self.optimizer, AlgorithmOptimizer) else ()

    @property
    def steps_on_parameters(self) -> bool:
        """Whether the inner optimizer is handed the user's own tensors, sharded as they are."""
        return self.spec is not None and self.spec.steps_on is StepsOn.PARAMETERS

    @property
    def global_names(self) -> frozenset[str]:
        """The names under which there is, or will be, state that belongs to no parameter."""
        if self.spec is None or not self.spec.has_global_state:
            return frozenset()
        return frozenset([GLOBAL_STATE])

    def local_tensors(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors that are stepped on in place of a parameter; none on a rank without elements of it."""
        if self._elsewhere and parameter in self._elsewhere:
            return ()
        shards = self.shards.get(parameter)
        return (parameter,) if shards is None else shards.local_tensors

    def add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        """Adds parameters; as torch's `add_param_group`, and with state where the class makes it at construction."""
        bound = self._bind(names)
        try:
            groups = [*self.groups, {**self.optimizer.defaults, **options}]
            refuse_unfit(self.optimizer, self.spec, names, self.shards.values(), groups)
            if self._narrow is not None:
                self._narrow.refuse_parameters(groups[-1], names)
            self.optimizer.add_param_group({**options, "params": list(chain.from_iterable(bound.values()))})
        except Exception:
            for parameter in names:
                self.shards.pop(parameter, None)
            self._elsewhere.difference_update(names)
            raise
        self.groups[-1]["params"] = list(names)
        self._names.update(names)
        self._drop_stand_ins(bound)
        self.hand_over_parameters({**getattr(self.optimizer, "names", {}), **names})
        if self.spec is not None and self.spec.state_at_construction:
            self.make_state(names, frozen_too=True)

    def hand_over_parameters(self, names: Mapping[Tensor, str]) -> None:
        """Makes parameters their own local tensors where the algorithm steps on parameters, and gives it their names.

        Until here local tensors stood in for them, whose class torch knows.
        """
        if self.steps_on_parameters:
            self.shards.clear()
            cast(MakesState, self.optimizer).names = names
            refuse_global_name(self.global_names, names)

    def work_with(self, group: SharedGroup) -> None:
        """Gives an algorithm that sums over all of its parameters the ranks that train them."""
        if self.spec is not None and self.spec.has_global_state:
            cast(CommunicatingOptimizer, self.optimizer).shared_group = group

    @property
    def evaluating(self) -> bool:
        """Whether the algorithm has put averages into the parameters, in which no step may be taken."""
        return isinstance(self.optimizer, ScheduleFree) and is_evaluating(self.groups)

    def train(self, mode: bool) -> None:
        """Lets an algorithm with weights of two kinds put those to train into the parameters, or those to evaluate."""
        if not isinstance(self.optimizer, ScheduleFree) or all(group[TRAIN_MODE] == mode for group in self.groups):
            return
        refuse_swapped(MODE_IN_SWAP, chain.from_iterable(group["params"] for group in self.groups))
        self._check_groups()
        if self.shards:
            free_unsharded_parameters()
        before = [(group, group["params"]) for group in self.groups]
        try:
            for group, parameters in before:
                for shards in filter(None, map(self.shards.get, parameters)):
                    self._move_state(shards, group)
                group["params"] = list(chain.from_iterable(map(self.local_tensors, parameters)))
            self.optimizer.train(mode)
        finally:
            for group, parameters in before:
                group["params"] = parameters

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Takes one step of the algorithm without hooks; returns the closure's loss."""
        if self.evaluating:
            raise refusal_to_step(type(self.optimizer).__name__)
        refuse_swapped(STEP_IN_SWAP, chain.from_iterable(group["params"] for group in self.groups))
        if self.spec is None or not self.spec.elementwise:
            self._check_groups()
            self.states.hand_over()
            loss = step_without_hooks(type(self.optimizer))(self.optimizer, closure)
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step_groups(self.spec, list(zip(self.groups, self._shards_of_groups(), strict=True)))
        if not self._looked_for_gradients:
            self._looked_for_gradients = True
            warn_of_no_gradients(self._names)
        return loss

    def step_alone(self, parameter: Tensor) -> None:
        """Takes one step on a single parameter, with the options of its group; no other parameter is looked at.

        Only of an elementwise algorithm, which computes the same in a step on all parameters.
        """
        if self._narrow is not None:
            group_of = self._alone_in.get(parameter)
            if group_of is None or all(group_of is not each for each in self.groups):
                self._alone_in = self._group_of()
                group_of = self._alone_in.get(parameter)
            if group_of is not None:
                self._narrow.step_alone(group_of, parameter)
            return
        assert self.spec is not None and self.spec.elementwise
        group, place, shards = self._alone.get(parameter) or ({"params": ()}, 0, None)
        here = group["params"][place : place + 1]
        if shards is None or not here or here[0] is not parameter or all(group is not each for each in self.groups):
            places = [
                (group, place)
                for group in self.groups
                for place, each in enumerate(group["params"])
                if each is parameter
            ]
            if not places:  # someone took it out
                return
            (group, place), shards = places[0], GroupShards([parameter], self.shards)
            self._alone[parameter] = group, place, shards
        self._step_groups(self.spec, [(group, shards)])

    def _step_groups(self, spec: AlgorithmSpec, grouped: list[tuple[Group, GroupShards]]) -> None:
        """Takes a step of an elementwise algorithm on these shards, and on nothing else."""
        steps = [GroupStep(group, shards) for group, shards in grouped]
        try:
            with torch.no_grad():
                for step in steps:
                    step.attach(partial(self._move_state, group=step.group), spec.takes_dense)
                self._gather(spec, steps)
            step_groups(self.optimizer, steps)
        finally:
            for step in reversed(steps):  # so that a borrowed gradient is not restored by the next as the own one
                step.restore()

    def _gather(self, spec: AlgorithmSpec, steps: list[GroupStep]) -> None:
        """Gathers the lists to step with, and chooses the implementation; a refusal here has changed nothing."""
        anew = [step for step in steps if not step.repeats]
        for step in anew:
            if step.shards.sharded:
                refuse_sparse(spec, step.group, step.shards.sharded)
        undo = None
        if anew:
            undo = self.states.hand_over(list(chain.from_iterable(step.shards.local_tensors for step in anew)))
        try:
            if self.chooses:
                choose_fused(spec, steps)
            if gathers_as_torch(self.optimizer):
                for step in steps:
                    step.gather(self.optimizer)
            settle_fused(spec, steps, self.optimizer.state, self._names)
        except BaseException:
            if undo is not None:
                undo()
            raise

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops or zeroes the gradients of all parameters."""
        if not self.shards and not self.steps_on_parameters:
            self.optimizer.zero_grad(set_to_none)
            return
        for parameter in chain.from_iterable(group["params"] for group in self.groups):
            zero_gradients(parameter, set_to_none)

    def make_state(self, parameters: Iterable[Tensor], frozen_too: bool = False) -> None:
        """Makes state for those parameters that have none; changes nothing else.

        Args:
            frozen_too: whether also for those that get no gradient now.

        Raises:
            AlgorithmError: the algorithm is not known, or cannot make state without a step.
        """
        if self.spec is None:
            raise AlgorithmError("an optimizer is not known here", [unknown(type(self.optimizer))])
        group_of = self._group_of()
        for parameter in parameters:
            group = group_of.get(parameter)
            if group is None or not (frozen_too or requires_gradient(parameter)):
                continue
            for local in self.local_tensors(parameter):
                made = None if local in self.states else initial_state(self.spec, self.optimizer, group, local)
                if made:
                    self.states.put(local, made, untouched=self.settles_at_first_step)

    def make_global_state(self, names: Collection[str]) -> None:
        """Makes the state of these names that belongs to no parameter, where there is none yet."""
        if not set(self.global_names).isdisjoint(names):
            cast(CommunicatingOptimizer, self.optimizer).make_global()

    def with_initial_state(self, keys: Iterable[Tensor | str]) -> set[Tensor | str]:
        """Returns those whose state is there and as `make_state` makes it: without it training goes the same way.

        Args:
            keys: parameters, and names of state that belongs to none.
        """
        if self.spec is None or self.spec.state_at_construction:  # there would be nobody to make it again
            return set()
        group_of = self._group_of()
        return {key for key in keys if self._has_initial_state(self.spec, key, group_of)}

    def _has_initial_state(self, spec: AlgorithmSpec, key: Tensor | str, group_of: Mapping[Tensor, Group]) -> bool:
        if isinstance(key, str):
            there = self.optimizer.state.get(cast(Any, key), {})
            return bool(there) and is_initial(there, cast(CommunicatingOptimizer, self.optimizer).initial_global())
        group, tensors = group_of.get(key), self.local_tensors(key)
        if group is None or not all(local in self.states for local in tensors):
            return False
        if self._narrow is not None:
            return self._narrow.is_unstepped(group, key)
        if self.settles_at_first_step:
            return all(map(self.states.is_unwritten, tensors))
        self.state_of(key)  # completes that of an algorithm that keeps less while it trains
        return all(
            is_initial(self.states[local], initial_state(spec, self.optimizer, group, local)) for local in tensors
        )

    def _group_of(self) -> dict[Tensor, Group]:
        return {parameter: group for group in self.groups for parameter in group["params"]}

    def state_of(self, parameter: Tensor) -> MutableMapping[str, Any]:
        """Returns the live state of a parameter; empty if there is none yet, or no element of the parameter."""
        if self._elsewhere and parameter in self._elsewhere:
            return {}
        shards = self.shards.get(parameter)
        if shards is None:
            if isinstance(self.optimizer, AlgorithmOptimizer):
                self.optimizer.complete_state(parameter)
            return self.states[parameter]
        assert self.spec is not None  # sharded parameters are refused for an unknown class
        states = tuple(self.states[local] for local in shards.local_tensors)
        return ShardedState(shards, states, self.spec, self.state_changed)

    def set_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Replaces the state of a parameter; where it is stepped on itself, by the very mapping, as in torch."""
        self.state_changed()
        tensors = self.local_tensors(parameter)
        if not tensors:
            return
        if tensors[0] is parameter:
            self.states.put(parameter, cast(State, entries), untouched=False)
            return
        state, copied = self.state_of(parameter), dict(entries)  # which may be live itself
        state.clear()
        state.update(copied)

    def clear_state(self) -> None:
        """Removes all state; where the class makes its state at construction, it is made anew."""
        self.state_changed()
        self.states.clear()
        if self.spec is not None and self.spec.state_at_construction:
            self.make_state(list(self._names), frozen_too=True)

    def has_state(self, parameter: Tensor) -> bool:
        """Whether there is any state of a parameter."""
        tensors = self.local_tensors(parameter)
        return bool(tensors) and tensors[0] in self.states

    def is_untouched(self, parameter: Tensor) -> bool:
        """Whether the parameter has state and never had a step, so that the first step makes its state anew."""
        tensors = self.local_tensors(parameter)
        if self._narrow is not None:
            group = self._group_of().get(parameter)
            return bool(tensors) and group is not None and self._narrow.is_unstepped(group, parameter)
        return bool(tensors) and self.states.is_untouched(tensors[0])

    def state_loaded(self, parameter: Tensor, untouched: bool) -> None:
        """Notes that the state of a parameter was loaded.

        Args:
            parameter: has state.
            untouched: whether the loaded state is that of a parameter which never had a step.
        """
        self.state_changed()
        for local in self.local_tensors(parameter):
            self.states.put(local, self.states[local], untouched and self.settles_at_first_step)
        state = self.state_of(parameter)
        if isinstance(state, ShardedState):
            state.share_scalars()
        if self._narrow is not None:
            self._narrow.state_loaded(parameter)

    def converted(
        self, group: Mapping[str, Any], then: Mapping[str, Any], parameter: Tensor, entries: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], list[Conversion]]:
        """Returns the state of a parameter as its group stores it, of state that another group's options stored.

        Raises:
            CannotConvert: it cannot be stored so without other ranks.
        """
        spec = self.spec if self._narrow is None else self._narrow.algorithm
        if spec is None or not spec.elementwise:
            return entries, []
        return converted(spec, group, then, parameter, entries, counts=self._narrow is not None)

    def waiting_for_others(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> list[str]:
        """Returns the names of those parameters whose step needs numbers of other ranks, as those of cut 8-bit state.

        Args:
            names: parameters of one group, or to be.
            options: of that group, all of them.
        """
        if self._narrow is None:
            return []
        return [name for parameter, name in names.items() if self._narrow.waits_for_others(options, parameter)]

    def state_changed(self) -> None:
        """Drops the caches of state from step to step: someone else than the inner optimizer changed it."""
        self._grouped.clear()
        self._alone.clear()
        self._alone_in.clear()

    def _bind(self, names: Mapping[Tensor, str]) -> dict[Tensor, tuple[Tensor, ...]]:
        """Returns parameter → its local tensors; one without has an empty stand-in, by which its group is known."""
        bound = {}
        for parameter, name in names.items():
            tensors = local_tensors(parameter)
            if len(tensors) != 1 or tensors[0] is not parameter:
                shards = self.shards[parameter] = Shards(name, parameter)
                if not shards.is_held:
                    self._elsewhere.add(parameter)
                tensors = shards.local_tensors or (empty_local_tensor(parameter),)
            bound[parameter] = tensors
        return bound

    def _drop_stand_ins(self, bound: Mapping[Tensor, tuple[Tensor, ...]]) -> None:
        """Takes back state that the class has made for stand-ins at construction."""
        for parameter in self._elsewhere & bound.keys():
            for local in bound[parameter]:
                self.optimizer.state.pop(local, None)

    def _shards_of_groups(self) -> list[GroupShards]:
        parameters = self._parameters_of_groups()
        if len(self._grouped) != len(parameters) or not all(map(GroupShards.are_of, self._grouped, parameters)):
            self._check_groups()
            self._grouped = [GroupShards(each, self.shards) for each in parameters]
        return self._grouped

    def _parameters_of_groups(self) -> list[list[Tensor]]:
        """Returns the value under "params" of each group, whatever it is by now.

        Raises:
            StateError: something is no group.
        """
        try:
            return [group["params"] for group in self.groups]
        except (LookupError, TypeError):
            refuse_unfit_groups(self.groups, self._names, self.required_options, once=False)
            raise

    def _check_groups(self) -> None:
        """Refuses parameters that somebody has put into groups, or has wrapped, and that cannot be stepped."""
        parameters = self._parameters_of_groups()
        if len(parameters) == len(self._known) and all(map(_same, parameters, self._known)):
            return
        refuse_unfit_groups(self.groups, self._names, self.required_options, once=False)
        refuse_flattened({self._names[parameter]: parameter for parameter in chain.from_iterable(parameters)})
        self._known = [list(each) for each in parameters]

    def _move_state(self, shards: Shards, group: Group) -> None:
        replaced = shards.moved()
        if replaced:
            assert self.spec is not None  # sharded parameters are refused for an unknown class
            fresh = partial(initial_state, self.spec, self.optimizer, group)
            for old, new in zip(replaced, shards.local_tensors, strict=True):
                self.states.move(old, new, fresh)


def _same(parameters: Any, known: list[Tensor]) -> bool:
    """Whether a group has the very parameters that it had; anything may stand there by now."""
    return isinstance(parameters, list | tuple) and len(parameters) == len(known) and all(map(is_, parameters, known))
