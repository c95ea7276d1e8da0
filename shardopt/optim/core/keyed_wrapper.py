"""A torch optimizer under parameter names, for plain or sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.communicating import AlgorithmOptimizer
from shardopt.algorithms.elementwise.schedule_free import TRAIN_MODE
from shardopt.algorithms.initial_state import lacking, made_of
from shardopt.algorithms.low_precision.conversion import CannotConvert, converted
from shardopt.algorithms.low_precision.options import as_texts
from shardopt.algorithms.registry import Kind
from shardopt.errors import Problem
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.local.local_step import LocalOptimizer
from shardopt.optim.local.modes import in_own_modes, step_in_own_modes
from shardopt.optim.state_dict.groups import Places, first_names, named, refuse_non_leaf_tensors
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.optim.state_dict.offered import with_named_groups
from shardopt.optim.state_dict.options import class_defaults, given_options, plain_options, refuse_bad_options
from shardopt.optim.state_dict.saved_form import KeyedGroup
from shardopt.runtime.torch_private import not_compiled
from shardopt.sharding.swapped import LOAD_IN_SWAP, params_in, refuse_swapped
from shardopt.sharding.view import is_held
from shardopt.state.param_groups import GIVEN, PARAMS, UNTOUCHED, are_named, options_by_member, other_algorithm
from shardopt.state.paths import PARAM_GROUPS, STATE


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer that steps local tensors with a torch optimizer.

    Args:
        params: FQN → parameter (plain, DTensor or ShardedTensor, mixed at will, on one or several meshes).
        optim_factory: builds the torch optimizer from the list of tensors that it shall step on. A plain parameter is
            itself in the list; a sharded one is there as its local tensors, in the order of `params`.
            What it builds belongs to this optimizer: state that is replaced there, and not in `state`, is not noticed.

    Raises:
        AlgorithmError: a parameter is sharded, and the algorithm is not known or may not step on shards.
        StateError: there are no parameters, or the factory took other tensors than it was given.
    """

    _in_backward: ClassVar[bool] = False
    """Whether each parameter steps by itself."""

    def __init__(self, params: Mapping[str, Tensor], optim_factory: Callable[[list[Tensor]], Optimizer]) -> None:
        params = named(params)
        try:
            local = LocalOptimizer(first_names(params), optim_factory)
        except ValueError:
            refuse_non_leaf_tensors(params)  # torch does too, but names none of them
            raise
        self._local = local
        self._make_leaf(params, local)
        defaults = class_defaults(type(local.optimizer))
        self._defaults = plain_options(defaults)
        self._given_to_all = given_options(local.optimizer.defaults, defaults)
        self._given = [(group, given_options(group, defaults)) for group in local.param_groups]

    @not_compiled
    @step_in_own_modes
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; hooks of this optimizer run once.

        Local to the rank, unless a gradient has another placement than its parameter: then all ranks of the mesh must
        call, since it is redistributed. A rank without elements of a parameter (outside of a DTensor's mesh, without
        shards of a ShardedTensor) has no state of it. It cannot see whether the others have a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once (but by LBFGS).

        Raises:
            GradientError: the gradient of a sharded parameter does not fit it.
            AlgorithmError: a group names `fused=True`, and torch's fused implementation for the CPU would be wrong.
                Then a parameter, its gradient and its state differ in memory order, or SGD is to step in 16 bits.
                Nothing was changed.
            StateError: a parameter was sharded in another way since the optimizer was built; or averages are in the
                model (`eval`).
        """
        return self._local.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes gradients, as torch does; for ShardedTensor parameters those of the local shards."""
        self._local.zero_grad(set_to_none)

    @in_own_modes
    def init_state(
        self, sparse_grad_parameter_names: Iterable[str] | None = None, *, names: Iterable[str] | None = None
    ) -> None:
        """Makes the state of every trained parameter without state, as a destination for loading.

        Training continues as if it had not been called: no step is taken, no hook fires, parameters, gradients and
        counters stay as they are. If an algorithm settles its state at the first step (SGD's momentum buffer, ASGD,
        Rprop), it still does. Until then the state made here serves only as a destination for loading. For a moment
        there is one gradient of zeros, of one local tensor at a time.

        Args:
            sparse_grad_parameter_names: parameters whose gradients will be sparse. The algorithms here keep the same
                state for them.
            names: parameters, and state that belongs to none ("__global__" of L-BFGS), as in `state_dict()["state"]`:
                these get state, frozen or not, and nothing else does. None for every trained parameter and the rest.

        Raises:
            StateError: a name is not known.
            AlgorithmError: the algorithm is not known, or makes its state inside of its step.
        """
        names = None if names is None else set(names)
        super().init_state(sparse_grad_parameter_names, names=names)
        if names is None:
            self._local.state.make(self._names)
            self._local.state.make_global(self._local.state.global_names)
        else:
            chosen = [self._params[name] for name in self._params if name in names]
            self._local.state.make(dict.fromkeys(chosen), frozen_too=True)
            self._local.state.make_global(names)

    def init_entries(self, entries: Mapping[str, Collection[str]]) -> None:
        """Makes entries of state, as the base does; of a group's parameters all or none lack one."""
        spec = self._local.spec
        known = () if spec is None else [entry for entry in spec.state if entry.kind is Kind.PARAMETER]
        names = {self._params[name]: name for name in entries if name in self._params}
        for group in self.param_groups:
            for parameter in filter(names.__contains__, group[PARAMS]):
                wanted, state = entries[names[parameter]], self.state.get(parameter, {})
                absent = [entry for entry in known if entry.name in wanted and entry.name not in state]
                if not absent:
                    break
                made = {entry.name: made_of(entry, group, parameter) for entry in absent}
                self.state[parameter] = {**state, **made}

    def incomplete_state(
        self, entries: Mapping[str, Collection[str]], strange: Collection[str] = ()
    ) -> dict[str, list[str]]:
        """Returns the names of parameters whose stored state is of no use, with the entries that it lacks.

        A step counter without what the first step makes would have the next step go on from zeros.

        Args:
            entries: name, as for `init_state` → the names of what is stored of it.
            strange: names whose state another algorithm has saved: that is taken whole or not at all.
        """
        narrow = self._local.state.narrow
        spec = self._local.spec if narrow is None else narrow.algorithm
        if spec is None:
            return {}
        found = {
            name: lacking(spec, self._local.optimizer, group, parameter, entries[name], name in strange)
            for group in self.param_groups
            for parameter, name in ((each, self._names[each]) for each in group[PARAMS])
            if entries.get(name)
        }
        return {name: absent for name, absent in found.items() if absent}

    def unstepped_state(self, names: Iterable[str]) -> set[str]:
        """Returns the names whose state equals what `init_state` would make; makes one of each to compare.

        Args:
            names: as in `state_dict()["state"]`; others are passed over.
        """
        key_of = {name: self._params.get(name, name) for name in names}
        initial = self._local.state.initial(key for key in key_of.values() if key in self.state)
        return {name for name, key in key_of.items() if key in initial}

    def _add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        options = as_texts(options)
        # Schedules and the like have added some. A mode is no option: the model would not have the weights of it.
        besides = {name for group in self.param_groups for name in group} - {TRAIN_MODE}
        refuse_bad_options(type(self._local.optimizer), options, "param_group", besides)
        self._local.add_group(names, options)
        self._given.append((self.param_groups[-1], plain_options({**self._given_to_all, **options})))

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._local.optimizer!r}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._local.hand_over_parameters(self._names)

    def _own_names(self) -> set[str]:
        return super()._own_names() | self._local.state.global_names

    def _keys_beside(self) -> list[Any]:
        return self._local.state.keys_beside()

    def _atoms(self) -> tuple[Optimizer, ...]:
        """Returns the torch optimizer, which the factory's caller may also hold."""
        return (self._local.optimizer,)

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        groups = (each for each in self.param_groups if isinstance(each, Mapping) and each.get("master_dtype"))
        refuse_swapped(LOAD_IN_SWAP, params_in(groups))  # which a load makes of their masters
        if plan.convert_state:
            offered = self._converted(plan, with_named_groups(offered))
        super()._plan(plan, offered if plan.strict else self._complete(plan, with_named_groups(offered)))

    def _complete(self, plan: LoadPlan, offered: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the offered state without that of parameters of which too little is offered (`incomplete_state`)."""
        state, groups = offered.get(STATE), offered.get(PARAM_GROUPS)
        if not isinstance(state, Mapping):
            return offered
        by_member = options_by_member(groups) if are_named(groups) else {}
        strange = {name for name, options in by_member.items() if other_algorithm(options, self.algorithm)}
        left_out = self.incomplete_state({k: v for k, v in state.items() if isinstance(v, Mapping)}, strange)
        where = plan.section(STATE)
        plan.unmatched.unexpected_keys.extend(f"{where}.{name}.{entry}" for name in left_out for entry in state[name])
        return {**offered, STATE: {name: entries for name, entries in state.items() if name not in left_out}}

    def _converted(self, plan: LoadPlan, offered: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the offered state, converted to the form in which each parameter's group stores it."""
        state, groups = offered.get(STATE), offered.get(PARAM_GROUPS)
        if not isinstance(state, Mapping) or not are_named(groups):
            return offered
        then, made = options_by_member(groups), dict(state)
        narrow = self._local.state.narrow
        spec = self._local.spec if narrow is None else narrow.algorithm
        if spec is None or not spec.elementwise:
            return offered
        for group in self.param_groups:
            for parameter in group[PARAMS]:
                name = self._names[parameter]
                if name in then and isinstance(state.get(name), Mapping) and is_held(parameter):
                    try:
                        made[name], notes = converted(
                            spec, group, then[name], parameter, state[name], counts=narrow is not None
                        )
                    except CannotConvert as refusal:
                        plan.problems.append(replace(refusal.problem, key=f"{plan.section(STATE)}.{name}"))
                        continue
                    plan.conversions += notes
        return {**offered, STATE: made}

    def made_of(
        self,
        defaults: Mapping[str, Any],
        groups: Iterable[Mapping[str, Any]],
        places: Places,
        unmatched: Collection[Problem],
    ) -> None:
        """Records how `keyed` made it, so that a group that names no implementation uses the fastest.

        Args:
            defaults, groups: options that the code gives, and no others: in general, and for each group beyond that.
            places: of its groups among all that there are.
            unmatched: a problem for each pattern that matches no parameter on this rank, and maybe some on another.
        """
        self._local.chooses = True
        self._places, self._unmatched = places, tuple(unmatched)
        self._given_to_all = dict(defaults)
        each = [plain_options({**defaults, **options}) for options in groups]
        self._given = list(zip(self.param_groups, each, strict=True))

    def _note_given(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        for each, given in self._given:
            if each is group:
                given.update(plain_options(options))

    @property
    def algorithm(self) -> str:
        """The name under which the torch optimizer's algorithm is registered, or its class's name."""
        spec = self._local.spec
        return type(self._local.optimizer).__qualname__ if spec is None else spec.name

    def _keyed_group(self, position: int, names: list[str], group: dict[str, Any]) -> KeyedGroup:
        made, local = super()._keyed_group(position, names, group), self._local
        made.saved[GIVEN] = next((dict(given) for each, given in self._given if each is group), {})
        if local.state.saves_untouched:
            made.saved[UNTOUCHED] = [each for each in names if local.state.is_untouched(self._params[each], group)]
        made = replace(made, defaults=self._defaults)
        if local.spec is not None and local.spec.later_options:
            defaults = class_defaults(local.spec.optimizer)
            made = replace(made, later={name: defaults[name] for name in local.spec.later_options})
        if isinstance(local.optimizer, AlgorithmOptimizer):
            made = replace(made, unlike=partial(local.optimizer.unlike, group, kept=self._kept_options))
        return made

    def _loaded(self, offered: Mapping[str, Any]) -> None:
        groups = offered.get(PARAM_GROUPS, ()) if self._save_param_groups else ()
        untouched = {name for group in groups for name in group.get(UNTOUCHED, ())}
        state = self.state
        for name in self._params.keys() & offered.get(STATE, {}).keys():
            entries = state.get(self._params[name])
            if entries and not {*entries}.isdisjoint(offered[STATE][name]):  # of another algorithm there is none
                self._local.state.loaded(self._params[name], offered[STATE][name], name in untouched)
