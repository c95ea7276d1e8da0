"""Optimizers whose state goes by parameter names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.registry import spec_of
from shardopt.algorithms.torch_private import (
    after_load_state_dict,
    after_state_dict,
    before_load_state_dict,
    before_state_dict,
)
from shardopt.errors import Problem, StateError
from shardopt.optim.groups import (
    NamedTensors,
    by_pattern,
    first_names,
    listed,
    named,
    refuse_non_leaves,
    refuse_unknown_options,
)
from shardopt.optim.loading import LoadPlan, Unmatched
from shardopt.optim.local_step import LocalOptimizer, LocalState
from shardopt.optim.saved import PARAM_GROUPS, PARAMS, STATE, UNTOUCHED, KeyedGroup, plan_all, saved_options

StateDict = dict[str, Any]


class KeyedOptimizer(Optimizer):
    """A torch optimizer whose `state_dict` goes by fully qualified parameter names, and which loads it in place.

    Args:
        params: FQN → parameter (plain, DTensor or ShardedTensor). A parameter with several names (tied) is one
            parameter; its state goes by the first name.
        state: parameter → its state. It is kept by reference and looked at when it is needed.
        param_groups: groups with "params", a list of parameters; kept by reference.

    Raises:
        StateError: state or a group has a tensor that is not in `params`.
    """

    def __init__(
        self, params: Mapping[str, Tensor], state: Mapping[Any, Any], param_groups: Collection[Mapping[str, Any]]
    ) -> None:
        # torch refuses to be given no group, and would make groups of its own from those that it is given.
        super().__init__([{PARAMS: []}], {})
        self.state = cast(Any, state)
        self.param_groups = cast(Any, param_groups if isinstance(param_groups, list) else list(param_groups))
        self._params = dict(params)
        self._names = first_names(self._params)
        self._save_param_groups = False
        refuse_non_leaves(self._params)
        grouped = list(chain.from_iterable(group[PARAMS] for group in param_groups))
        strangers = [key for key in (*state, *grouped) if isinstance(key, Tensor) and key not in self._names]
        if strangers:
            problem = Problem(
                "state and param_groups",
                f"{len(strangers)} tensors without a name",
                "parameters only",
                f"name them in params, which has {listed(self._params)}",
            )
            raise StateError("all state keys must be params", [problem])

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN → parameter, every name of a tied one."""
        return self._params

    def state_dict(self) -> StateDict:
        """`{"state": {fqn: {name: value}}}`, and with `save_param_groups(True)` also "param_groups".

        The tensors are the optimizer's own (sharded ones put together without a copy), so writing into them changes
        it. Groups go by the least FQN in them: `{least fqn: {"params": [sorted fqns], option: value, ...}}`; options
        that say how to compute (`foreach`, `fused`, `capturable`, `differentiable`) are left out. Local to the rank.

        Raises:
            StateError: groups are saved, and one has an option that cannot be stored.
        """
        before_state_dict(self)
        state_dict: StateDict = {STATE: {name: dict(entries) for name, entries in self._named_state()}}
        groups = self._keyed_groups()
        if groups is not None:
            state_dict[PARAM_GROUPS] = {group.key: group.saved for group in groups}
        return after_state_dict(self, state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Unmatched:  # type: ignore[override]  # torch returns None; what was passed over must be told
        """Loads state in place and all or nothing: each tensor keeps its memory; its own tensors are not copied.

        Nothing is broadcast, cast or moved to another placement. Local to the rank; what differs between ranks is
        for `checkpoint.load` to find.

        Args:
            state_dict: as from `state_dict()`.
            strict: whether parameters, state, groups and options on one side only are errors. Otherwise those on both
                sides are loaded; the others stay as they are and are returned.

        Raises:
            MismatchError: lists everything that does not fit; nothing was changed.
        """
        offered = before_load_state_dict(self, state_dict)
        plan = LoadPlan(strict)
        groups = self._keyed_groups()
        plan_all(plan, dict(self._named_state()), groups, offered)
        plan.apply()
        for group in groups or ():
            group.take()
        self._loaded(offered)
        self.post_load_state_dict()
        after_load_state_dict(self)
        return plan.unmatched

    def check_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Raises what `load_state_dict` would, and changes nothing.

        Tensors on the meta device stand for stored ones: only their dtypes and global shapes are compared.

        Raises:
            MismatchError: lists everything that does not fit.
        """
        plan = LoadPlan(strict, descriptions=True)
        plan_all(plan, dict(self._named_state()), self._keyed_groups(), state_dict)
        plan.check()

    def post_load_state_dict(self) -> None:
        """Called after state was loaded; does nothing here."""

    def init_state(self, sparse_grad_parameter_names: Iterable[str] | None = None) -> None:
        """Makes state before the first step; here there is none to make.

        Args:
            sparse_grad_parameter_names: parameters whose gradients will be sparse.

        Raises:
            StateError: a name is not that of a parameter.
        """
        unknown = sorted(set(sparse_grad_parameter_names or ()) - self._params.keys())
        if unknown:
            problem = Problem(
                "sparse_grad_parameter_names", listed(unknown), f"some of {listed(self._params)}", "mend their spelling"
            )
            raise StateError("a parameter is not known", [problem])

    def save_param_groups(self, save: bool) -> None:
        """Whether `state_dict` has the groups, and `load_state_dict` needs them."""
        self._save_param_groups = save

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group `{"params": {fqn: parameter}, option: value, ...}`.

        Raises:
            StateError: the parameters have no names, or a name or a parameter is there already; nothing was changed.
            AlgorithmError: a parameter is sharded, and the algorithm may not step on shards.
        """
        if "_names" not in self.__dict__:  # torch's constructor calls this for the groups that it is given
            super().add_param_group(param_group)
            return
        options = dict(param_group)
        params = self._new_params(options.pop(PARAMS))
        self._add_group(first_names(params), options)
        self._params.update(params)
        self._names.update(first_names(params))

    def _add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        """Adds parameters that are new, under options that may not be complete."""
        self.param_groups.append({PARAMS: list(names), **self.defaults, **options})

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("_params", "_names", "_save_param_groups")}
        return {**super().__getstate__(), **own}

    def _named_state(self) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
        """Name and live state of each parameter that has any, then what state has under names of its own."""
        for parameter, name in self._names.items():
            entries = self.state.get(parameter)
            if entries:
                yield name, entries
        for key in list(self.state):
            if isinstance(key, str):
                yield key, self.state[key]

    def _keyed_groups(self) -> list[KeyedGroup] | None:
        """The groups that have parameters, if groups are saved."""
        if not self._save_param_groups:
            return None
        keyed_groups = []
        for group in self.param_groups:
            names = sorted(self._names[parameter] for parameter in group[PARAMS])
            if names:
                saved = {PARAMS: names, **saved_options(group, names[0]), **self._saved_besides(names)}
                keyed_groups.append(KeyedGroup(group, saved))
        return keyed_groups

    def _saved_besides(self, names: list[str]) -> dict[str, Any]:
        """What is saved with a group besides its options."""
        return {}

    def _loaded(self, offered: Mapping[str, Any]) -> None:
        """Called when tensors and options have their new values, before the hooks."""

    def _new_params(self, params: Any) -> dict[str, Tensor]:
        new = named(params if isinstance(params, Mapping) else list(params))
        problems = [
            Problem(
                name,
                "a parameter that the optimizer has already",
                "a new name and a new tensor",
                "add each parameter once",
            )
            for name, tensor in new.items()
            if name in self._params or tensor in self._names
        ]
        if problems:
            raise StateError("a parameter is added twice", problems)
        refuse_non_leaves(new)
        return new


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer that steps with a torch optimizer, on local tensors.

    Args:
        params: FQN → parameter (plain, DTensor or ShardedTensor, mixed at will, on one or several meshes).
        optim_factory: builds the torch optimizer from the list of tensors that it shall step on. A plain parameter is
            itself in the list; a sharded one is there as its local tensors, in the order of `params`.

    Raises:
        AlgorithmError: a parameter is sharded, and the algorithm is not known or may not step on shards.
        StateError: there are no parameters, or the factory took other tensors than it was given.
    """

    def __init__(self, params: Mapping[str, Tensor], optim_factory: Callable[[list[Tensor]], Optimizer]) -> None:
        params = named(params)
        refuse_non_leaves(params)
        names = first_names(params)
        self._local = LocalOptimizer(names, optim_factory)
        super().__init__(params, {}, self._local.groups)
        self.defaults = self._local.optimizer.defaults
        self.state = cast(Any, LocalState(self._names, self._local))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; hooks run once, on this optimizer.

        Local to the rank, unless a gradient has another placement than its parameter: then all ranks of the mesh must
        call, since it is redistributed. A rank that holds no part of a ShardedTensor counts each step for it, as it
        cannot see whether the others have a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once (but by LBFGS).

        Raises:
            GradientError: the gradient of a sharded parameter does not fit it.
            StateError: a parameter was sharded in another way since the optimizer was built.
        """
        return self._local.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients of ShardedTensor parameters are those of their local shards."""
        self._local.zero_grad(set_to_none)

    def init_state(self, sparse_grad_parameter_names: Iterable[str] | None = None) -> None:
        """Makes the state of every trained parameter that has none, so that there is a destination for loading.

        Training goes on as if it had not been called: no step is taken, no hook fires, parameters, gradients and
        counters stay as they are. Where an algorithm settles its state at the first step (SGD's momentum buffer, ASGD,
        Rprop) it still does; until then the state made here stands only for loading. For a moment there is one
        gradient of zeros, of one local tensor at a time.

        Args:
            sparse_grad_parameter_names: parameters whose gradients will be sparse. The algorithms here keep the same
                state for them.

        Raises:
            StateError: a name is not that of a parameter.
            AlgorithmError: the algorithm is not known, or makes its state inside of its step.
        """
        super().init_state(sparse_grad_parameter_names)
        self._local.make_state(self._names)

    def _add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        self._local.add_group(names, options)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._local.optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        del kept["state"]  # a view of what is in _local
        return {**kept, "_local": self._local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "state": LocalState(state["_names"], state["_local"])})

    def _saved_besides(self, names: list[str]) -> dict[str, Any]:
        if not self._local.settles_at_first_step:
            return {}
        return {UNTOUCHED: [name for name in names if self._local.is_untouched(self._params[name])]}

    def _loaded(self, offered: Mapping[str, Any]) -> None:
        groups = offered[PARAM_GROUPS].values() if self._save_param_groups and PARAM_GROUPS in offered else ()
        untouched = set(chain.from_iterable(group.get(UNTOUCHED, ()) for group in groups))
        for name in self._params.keys() & offered.get(STATE, {}).keys():
            if self.state.get(self._params[name]):
                self._local.state_loaded(self._params[name], name in untouched)


def keyed(
    algorithm: type[Optimizer] | str,
    named_params: NamedTensors,
    *,
    groups: Collection[Mapping[str, Any]] | None = None,
    **defaults: Any,
) -> KeyedOptimizerWrapper:
    """An optimizer for named parameters, plain or sharded, that saves its state and its groups by name.

    Args:
        algorithm: a torch optimizer class or its name in any case, "adamw".
        named_params: `model.named_parameters()`, or a mapping.
        groups: `{"match": regex, option: value, ...}`; each parameter goes to the first group whose regex is found in
            its name, and to a group of its own with the defaults where none is.
        defaults: options of the algorithm.

    Raises:
        AlgorithmError: the algorithm is not known, may not step on shards, or has no such option.
        StateError: there are no parameters, a name comes twice, or a pattern matches nothing.
    """
    spec = spec_of(algorithm)
    optimizer: Any = spec.optimizer if isinstance(algorithm, str) else algorithm
    params = named(named_params)
    grouped = by_pattern(params, groups or ())
    refuse_unknown_options(optimizer, defaults, "defaults")
    for position, (options, _) in enumerate(grouped):
        refuse_unknown_options(optimizer, options, f"groups[{position}]")
        # torch holds only defaults against their ranges; this lets it look at the options of each group too.
        optimizer([torch.zeros(1, 1)], **{**defaults, **options})
    (options, members), *others = grouped
    made = KeyedOptimizerWrapper(members, lambda leaves: optimizer([{PARAMS: leaves, **options}], **defaults))
    for options, members in others:
        made.add_param_group({PARAMS: members, **options})
    made.save_param_groups(True)
    return made
