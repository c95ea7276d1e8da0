"""A torch optimizer that steps local tensors in place of the user's parameters.

Its groups are the user's: one dict per group, with the user's parameters under "params", so that options changed from
outside (schedules, warm-up) and by the algorithm are the same numbers. Only inside of `step` do the local tensors
stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.communicating import CommunicatingOptimizer
from shardopt.algorithms.elementwise.schedule_free import TRAIN_MODE, ScheduleFree, is_evaluating, refusal_to_step
from shardopt.algorithms.registry import AlgorithmSpec, MakesState, StepsOn, find_spec
from shardopt.errors import ShardoptError
from shardopt.optim.gradients.local_gradients import warn_of_no_gradients
from shardopt.optim.local.group_step import GroupShards, GroupStep, step_groups
from shardopt.optim.local.implementation import (
    choose_fused,
    place_counters,
    refuse_all_sparse,
    refuse_sparse,
    settle_fused,
)
from shardopt.optim.local.refusals import parameters_of, refuse_global_name, refuse_unfit
from shardopt.optim.local.shards import Shards
from shardopt.optim.local.state import Group, LocalState
from shardopt.optim.state_dict.groups import refuse_flattened, refuse_unfit_groups
from shardopt.ranks import SharedGroup
from shardopt.runtime.deferred_checks import DeferredChecks
from shardopt.runtime.signals import CHANGING, is_part_of
from shardopt.runtime.staging_fence import wait_for_copies
from shardopt.runtime.torch_gradients import reshard_before_writing
from shardopt.runtime.torch_private import gathers_as_torch, step_without_hooks
from shardopt.sharding.gradients import zero_gradients
from shardopt.sharding.swapped import MODE_IN_SWAP, STEP_IN_SWAP, params_in, refuse_swapped
from shardopt.sharding.view import empty_local_tensor, local_tensors


class LocalOptimizer:
    """A torch optimizer over parameters' local tensors; from outside, its state and groups go by parameter.

    Where `chooses` is set, groups that name no implementation step with the fastest that agrees with the for-loop.

    Args:
        names: parameter → FQN.
        optim_factory: makes the optimizer from the list of all local tensors, in the order of `names`.

    Raises:
        AlgorithmError: there is a sharded parameter, and the algorithm may not step on shards or is not known.
        StateError: the factory put local tensors of one parameter in two groups, or took others than it was given.
    """

    steps_begun = 0  # that may have changed something

    def __init__(self, names: Mapping[Tensor, str], optim_factory: Callable[[list[Tensor]], Optimizer]) -> None:
        self.shards: dict[Tensor, Shards] = {}
        self.chooses = False
        self._names = dict(names)
        self._looked_for_gradients = False
        self._grouped: list[GroupShards] = []
        self._known: list[list[Tensor]] = []  # the parameters of each group, once they were looked at
        # With the group of each parameter, and its place there.
        self._alone: dict[Tensor, tuple[Group, int, GroupShards]] = {}
        bound = self._bind(names)
        self.optimizer = optim_factory(list(chain.from_iterable(bound.values())))
        # Without the one that torch gives every optimizer that was copied.
        self.required_options = frozenset(self.optimizer.defaults) - {"differentiable"}
        self.spec = spec = find_spec(type(self.optimizer))
        # The classes of torch and ours refuse sparse gradients by themselves.
        self._wants_dense = spec is not None and spec.is_brought_in and not spec.takes_sparse
        if spec is not None and spec.stands_for is not None and not isinstance(self.optimizer, spec.optimizer):
            self.optimizer = spec.optimizer(self.optimizer.param_groups, **self.optimizer.defaults)
        refuse_unfit(self.optimizer, spec, names, self.shards.values(), self.param_groups)
        self._state = LocalState(self.optimizer, spec, self._names, self.shards)
        self._state.caches = self._grouped, self._alone
        owners = {local: parameter for parameter, tensors in bound.items() for local in tensors}
        for group in self.param_groups:
            group["params"] = parameters_of(group["params"], owners, bound, names)
        self._drop_stand_ins(bound)
        self.hand_over_parameters(names)
        self._narrow = self._state.narrow
        if self._narrow is not None:
            for group in self.param_groups:
                self._narrow.refuse_parameters(group, {each: names[each] for each in group["params"]})

    @property
    def state(self) -> LocalState:
        """Parameter → its live state; copies the entries of a mapping that is assigned."""
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._state.replace(state)

    @property
    def param_groups(self) -> list[Group]:
        """The live groups; "params" are the user's parameters, as in groups that are assigned."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Iterable[Group]) -> None:
        groups = param_groups if isinstance(param_groups, list) else list(param_groups)
        refuse_unfit_groups(groups, self._names, self.required_options)
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options for groups that are added."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def steps_on_parameters(self) -> bool:
        """Whether the inner optimizer gets the user's own tensors, sharded as they are."""
        return self.spec is not None and self.spec.steps_on is StepsOn.PARAMETERS

    def add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        """Adds parameters, as torch's `add_param_group`; makes state if the class does so at construction."""
        bound = self._bind(names)
        try:
            groups = [*self.param_groups, {**self.optimizer.defaults, **options}]
            refuse_unfit(self.optimizer, self.spec, names, self.shards.values(), groups)
            if self._narrow is not None:
                self._narrow.refuse_parameters(groups[-1], names)
            self.optimizer.add_param_group({**options, "params": list(chain.from_iterable(bound.values()))})
        except Exception:
            for parameter in names:
                self.shards.pop(parameter, None)
            raise
        self.param_groups[-1]["params"] = list(names)
        self._names.update(names)
        self._drop_stand_ins(bound)
        self.hand_over_parameters({**getattr(self.optimizer, "names", {}), **names})
        if self.spec is not None and self.spec.state_at_construction:
            self._state.make(names, frozen_too=True)

    def hand_over_parameters(self, names: Mapping[Tensor, str]) -> None:
        """If the algorithm steps on parameters, makes these their own local tensors, and passes it their names.

        Until here local tensors stood in for them, whose class torch knows.
        """
        if self.steps_on_parameters:
            self.shards.clear()
            cast(MakesState, self.optimizer).names = names
            refuse_global_name(self._state.global_names, names)

    def work_with(self, group: SharedGroup) -> None:
        """Passes the ranks that train the parameters to an algorithm that sums over all of them."""
        if self.spec is not None and self.spec.has_global_state:
            cast(CommunicatingOptimizer, self.optimizer).shared_group = group

    @property
    def deferred(self) -> DeferredChecks | None:
        """The checks of earlier steps that have not run yet; None where no step leaves any."""
        return self.optimizer.deferred if isinstance(self.optimizer, CommunicatingOptimizer) else None

    @property
    def needs_closure(self) -> bool:
        """Whether a step evaluates the model itself, by a closure."""
        return self.spec is not None and self.spec.needs_closure

    @property
    def evaluating(self) -> bool:
        """Whether the algorithm has put averages into the parameters, and so refuses steps."""
        return isinstance(self.optimizer, ScheduleFree) and is_evaluating(self.param_groups)

    @is_part_of(CHANGING)
    def train(self, mode: bool) -> None:
        """Switches the parameters between weights to train and weights to evaluate, if the algorithm has both."""
        groups = self.param_groups
        if not isinstance(self.optimizer, ScheduleFree) or all(group[TRAIN_MODE] == mode for group in groups):
            return
        refuse_swapped(MODE_IN_SWAP, params_in(groups))
        wait_for_copies()
        self._check_groups()
        reshard_before_writing(chain.from_iterable(group["params"] for group in groups))
        before = [(group, group["params"]) for group in groups]
        try:
            for group, parameters in before:
                for shards in filter(None, map(self.shards.get, parameters)):
                    self._state.follow(shards, group)
                group["params"] = list(chain.from_iterable(map(self._state.local_tensors, parameters)))
            self.optimizer.train(mode)
        finally:
            for group, parameters in before:
                group["params"] = parameters

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Takes one step of the algorithm without hooks; returns the closure's loss."""
        if self.evaluating:
            raise refusal_to_step(type(self.optimizer).__name__)
        wait_for_copies()  # a save in the background knows only the optimizers of its app
        refuse_swapped(STEP_IN_SWAP, params_in(self.param_groups))
        self.steps_begun += 1
        try:
            loss = self._step(closure)
        except ShardoptError:  # is raised before a change
            self.steps_begun -= 1
            raise
        if not self._looked_for_gradients:
            self._looked_for_gradients = True
            warn_of_no_gradients(self._names)
        return loss

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self.spec is None or not self.spec.elementwise:
            self._check_groups()
            self._state.hand_over()
            return step_without_hooks(type(self.optimizer))(self.optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters_of_groups()
        if len(self._grouped) != len(parameters) or not all(map(GroupShards.are_of, self._grouped, parameters)):
            self._check_groups()
            self._grouped[:] = [GroupShards(each, self.shards) for each in parameters]
        self._step_groups(self.spec, list(zip(self.param_groups, self._grouped, strict=True)))
        return loss

    def step_alone(self, parameter: Tensor) -> None:
        """Takes one step on a single parameter, with the options of its group; leaves all others unchanged.

        Only of an elementwise algorithm, which computes the same in a step on all parameters. The caller has asked
        `refuse_swapped`, once for all that it steps.
        """
        wait_for_copies()
        group, place, shards = self._alone.get(parameter) or ({"params": ()}, 0, None)
        here = group["params"][place : place + 1]
        if shards is None or not here or here[0] is not parameter or all(group is not e for e in self.param_groups):
            places = ((at, i) for at in self.param_groups for i, each in enumerate(at["params"]) if each is parameter)
            group, place = next(places, ({}, 0))
            if not group:  # someone took it out
                return
            shards = GroupShards([parameter], self.shards)
            self._alone[parameter] = group, place, shards
        if self._narrow is not None:
            self._narrow.step_alone(group, parameter)
            return
        assert self.spec is not None and self.spec.elementwise
        self._step_groups(self.spec, [(group, shards)])

    def _step_groups(self, spec: AlgorithmSpec, grouped: list[tuple[Group, GroupShards]]) -> None:
        """Steps an elementwise algorithm on these shards only."""
        steps = [GroupStep(group, shards) for group, shards in grouped]
        try:
            with torch.no_grad():
                for step in steps:
                    step.attach(partial(self._state.follow, group=step.group), spec.takes_dense)
                self._gather(spec, steps)
            step_groups(self.optimizer, steps)
        finally:
            for step in reversed(steps):  # so that a borrowed gradient is not restored by the next as the own one
                step.restore()

    def _gather(self, spec: AlgorithmSpec, steps: list[GroupStep]) -> None:
        """Gathers the lists to step with, and chooses the implementation; refuses before anything has changed."""
        fresh = [step for step in steps if not step.repeats]
        for step in fresh:
            if step.shards.sharded:
                refuse_sparse(spec, step.group, step.shards.sharded)
            if self._wants_dense:
                refuse_all_sparse(spec, step.shards.names_of_local_tensors(self._names))
        undo = self._state.hand_over([local for step in fresh for local in step.shards.local_tensors])
        try:
            if self.chooses:
                choose_fused(spec, steps)
            if gathers_as_torch(self.optimizer):
                for step in steps:
                    step.gather(self.optimizer)
            settle_fused(spec, steps, self.optimizer, self._names)
            place_counters(steps, self.optimizer.state)
        except BaseException:
            for step in steps:  # lists that were gathered have state which goes now
                step.shards.cache = None
            undo()
            raise

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops or zeroes the gradients of all parameters."""
        if not self.shards and not self.steps_on_parameters:
            self.optimizer.zero_grad(set_to_none)
            return
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            zero_gradients(parameter, set_to_none)

    def _bind(self, names: Mapping[Tensor, str]) -> dict[Tensor, tuple[Tensor, ...]]:
        """Returns parameter → its local tensors, or an empty stand-in, by which its group is found."""
        bound = {}
        for parameter, name in names.items():
            tensors = local_tensors(parameter)
            if len(tensors) != 1 or tensors[0] is not parameter:
                shards = self.shards[parameter] = Shards(name, parameter)
                tensors = shards.local_tensors or (empty_local_tensor(parameter),)
            bound[parameter] = tensors
        return bound

    def _drop_stand_ins(self, bound: Mapping[Tensor, tuple[Tensor, ...]]) -> None:
        """Removes the state that the class made for stand-ins at construction."""
        elsewhere = {each for each in bound if each in self.shards and not self.shards[each].is_held}
        self._state.elsewhere |= elsewhere
        for local in chain.from_iterable(bound[parameter] for parameter in elsewhere):
            self.optimizer.state.pop(local, None)

    def _parameters_of_groups(self) -> list[list[Tensor]]:
        """Returns the current value of "params" in each group.

        Raises:
            StateError: something is no group.
        """
        try:
            return [group["params"] for group in self.param_groups]
        except (LookupError, TypeError):
            refuse_unfit_groups(self.param_groups, self._names, self.required_options, once=False)
            raise

    def _check_groups(self) -> None:
        """Raises for unsteppable parameters that somebody has added to groups, or has wrapped."""
        parameters = self._parameters_of_groups()
        if len(parameters) == len(self._known) and all(map(_same, parameters, self._known)):
            return
        refuse_unfit_groups(self.param_groups, self._names, self.required_options, once=False)
        refuse_flattened({self._names[parameter]: parameter for parameter in chain.from_iterable(parameters)})
        self._known = [list(each) for each in parameters]


def _same(parameters: Any, known: list[Tensor]) -> bool:
    """Whether a group still has the very same parameters."""
    return isinstance(parameters, list | tuple) and len(parameters) == len(known) and all(map(is_, parameters, known))
