"""The base of all optimizers here: a node that loads in place, and a leaf if it owns parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.optim.core.by_position import ByPosition
from shardopt.optim.core.node import Held, Node, OwnState, StateDict
from shardopt.optim.state_dict.agreement import differences
from shardopt.optim.state_dict.groups import (
    NamedParameters,
    Places,
    described,
    first_names,
    listed,
    named,
    refuse_flattened,
    refuse_non_leaf_tensors,
    refuse_unfit_groups,
)
from shardopt.optim.state_dict.load_plan import LoadPlan, Unmatched
from shardopt.optim.state_dict.offered import changed_by_hooks, with_named_groups
from shardopt.optim.state_dict.options import saved_options, warn_of
from shardopt.optim.state_dict.saved_form import KeyedGroup, plan_groups, plan_keys, plan_state
from shardopt.ranks import Group, SharedGroup, ranks_of
from shardopt.runtime.accelerator import wait_for_reads
from shardopt.runtime.partial_loads import loading_alone
from shardopt.runtime.staging_fence import wait_for_copies
from shardopt.runtime.torch_gradients import reshard_before_writing
from shardopt.runtime.torch_private import (
    after_load_state_dict,
    changes_what_is_loaded,
    out_of_inference_mode,
)
from shardopt.sharding.view import is_held, local_tensors
from shardopt.state.param_groups import ALGORITHM, NAMES_OF_TORCH, PARAMS, are_named
from shardopt.state.paths import PARAM_GROUPS, STATE
from shardopt.state.state import Tied

__all__ = ["KeyedOptimizer", "StateDict"]


class KeyedOptimizer(Node):
    """A torch optimizer whose `state_dict` uses fully qualified parameter names, and loads in place.

    Args:
        params: FQN → parameter (plain, DTensor or ShardedTensor). A parameter with several names (tied) is one
            parameter; its state goes by the first name.
        state: parameter → its state. It is kept by reference and looked at when it is needed.
        param_groups: groups with "params", a list of parameters; kept by reference.

    Raises:
        StateError: state or a group has a tensor that is not in `params`.
    """

    _shared_group = SharedGroup()
    _unmatched: tuple[Problem, ...] = ()
    _places = Places()
    _kept_options: frozenset[str] = frozenset()
    _elsewhere: tuple[int, frozenset[str]] | None = None  # with how many parameters there were
    _children: tuple[KeyedOptimizer, ...]

    def __init__(
        self, params: Mapping[str, Tensor], state: Mapping[Any, Any], param_groups: Collection[Mapping[str, Any]]
    ) -> None:
        groups = param_groups if isinstance(param_groups, list) else list(param_groups)
        self._make_leaf(params, Held({}, groups, {}))
        self.state = state
        grouped = list(chain.from_iterable(group[PARAMS] for group in param_groups))
        strangers = [key for key in (*state, *grouped) if not isinstance(key, Tensor) or key not in self._names]
        if strangers:
            several = listed(key if isinstance(key, str) else described(key) for key in strangers)
            problem = Problem(
                "state and param_groups",
                f"{len(strangers)} keys that are no parameters: {several}",
                "parameters only",
                f"name them in params, which has {listed(self._params)}",
            )
            raise StateError("All state keys must be params.", [problem])

    def _make_leaf(self, params: Mapping[str, Tensor], home: Any) -> None:
        """Makes this node a leaf with these parameters, whose state, groups and defaults are at `home`."""
        Node.__init__(self, home)
        self._params = dict(params)
        self._names = first_names(self._params)
        # Of names that are added later: what is left out of them, and which stands for another.
        self._dropped = ""
        self._tied: Tied = {}
        if isinstance(params, NamedParameters):
            self._dropped, self._tied = params.dropped, params.tied
        else:  # those were looked at
            refuse_flattened(self._params)
        refuse_non_leaf_tensors(self._params, home.param_groups)

    def as_torch(self) -> ByPosition:
        """Returns a view of this optimizer by position, for torch's `get_optimizer_state_dict` and similar functions.

        It is a `torch.optim.Optimizer` over the same parameters, state and groups:

            get_optimizer_state_dict(model, optimizer.as_torch(), options=StateDictOptions(full_state_dict=True))

        Names are then those that the model has. State is made as by `init_state` where torch would take a step with
        gradients of zeros to make it, so that no counter moves.
        """
        return ByPosition(self)

    @out_of_inference_mode()
    def load_state_dict(  # type: ignore[override]  # torch returns None; keys that were passed over must be reported
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        convert_dtype: bool = False,
        convert_state: bool = False,
    ) -> Unmatched:
        """Loads state in place, all or nothing: each tensor keeps its memory; one offered to itself is not copied.

        Nothing is broadcast or moved to another placement, and nothing cast unasked. Local to the rank; but with
        `master_dtype` all ranks of a `fully_shard` model call it, as its next forward gathers again. What differs
        between ranks is for `checkpoint.load` to find. From then on, the options are those of the state. If the code
        now gives another value than when the state was saved, rank 0 logs a warning that lists both; `keep_options`
        keeps the code's. An accelerator's step that lacked a gradient is forgotten once its parameters are loaded too.
        Any change of them counts that no step made, as far as torch counts changes; until then `state_dict` raises.

        Args:
            state_dict: as from `state_dict()`, of this version or an earlier one. Or from a torch optimizer made of
                `named_parameters()`, which has "param_names" in its groups. Options go by parameter: each group takes
                those that all of its parameters have, regardless of the groups in which they were saved.
            strict: whether parameters, state and options on one side only, and groups that another algorithm
                has saved, are errors. Otherwise keys on both sides are loaded. Of another algorithm no options are, and
                of each parameter's state all that is kept here or nothing. The rest stays as it is and is returned.
            convert_dtype: whether floating-point state of another dtype is converted to the one that is here. Numbers
                that it cannot hold are errors.
            convert_state: whether state that was stored by other options (`state_dtype`, `master_dtype`, `rounding`) is
                made into the form of the options here, which stay. A master is made of the parameter, which has to have
                its values by then. Rank 0 logs a warning of what was converted, and how far it is off where that is not
                exact. For a moment there is the state of all parameters twice.

        Raises:
            MismatchError: lists everything that does not fit, options in which the parameters of a group disagree
                too; nothing was changed.
        """
        plan = LoadPlan(strict, convert_dtype, convert_state=convert_state)
        self.plan_load(plan, state_dict)
        plan.check()
        wait_for_copies()  # a save in the background may still be copying tensors that this changes
        groups = [group[PARAMS] for group in self.param_groups if group.get("master_dtype")]
        if with_masters := [*chain.from_iterable(groups)]:  # which are made of these
            wait_for_reads(chain.from_iterable(map(local_tensors, with_masters)))
            reshard_before_writing(with_masters)
        with loading_alone(self, (*plan.unmatched.missing_keys, *plan.algorithms)):
            plan.apply()
            noted = plan.overridden or plan.algorithms or plan.conversions or plan.rounded_anew
            if noted and self._shared_group.ranks.rank == 0:
                warn_of(plan)
            self.post_load_state_dict()
            self._after_load()
        return plan.unmatched

    def check_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, convert_dtype: bool = False) -> None:
        """Raises what `load_state_dict` would raise, and changes nothing.

        Tensors on the meta device stand for stored ones: only their dtypes and global shapes are compared. The hooks of
        `register_load_state_dict_pre_hook` run here as they do in a load, since they may change what is loaded; they
        get a copy. `checkpoint.load` checks before it reads anything, and loads afterwards, so it runs each hook twice.
        First a hook gets descriptions in place of tensors, which it may rename, move and drop, but not look into. Then
        it gets the tensors that were read.

        Raises:
            MismatchError: lists everything that does not fit; or a hook fails with a description.
        """
        plan = LoadPlan(strict, convert_dtype, descriptions=True)
        self.plan_load(plan, state_dict)
        plan.check()

    def keep_options(self, *names: str) -> None:
        """Makes loads keep these options of all groups as the code gives them. Local: call it on every rank.

        With "lr", "initial_lr" is kept as well. A schedule that is loaded beside the optimizer has rates of its own
        ("base_lrs"), and sets them again. So leave it out of the app, load with `Strictness(unexpected="ignore")`,
        make another one afterwards, and call its `step()` once for each step taken.

        Args:
            names: of options.

        Raises:
            StateError: no group has an option of that name.
        """
        known = {name for group in self.param_groups for name in group} - {PARAMS}
        unknown = [name for name in names if name not in known]
        if unknown:
            required = f"some of {listed(sorted(known))}"
            problem = Problem("keep_options", listed(map(repr, unknown)), required, "mend their spelling")
            raise StateError("an option is not known", [problem], code="bad-options")
        self._keep_options({*names, *(f"initial_{name}" for name in names)})

    def unshared_tensors(self) -> list[tuple[tuple[str, ...], list[Tensor]]]:
        """Returns parameters whose values differ between ranks under the same names, by intent.

        And before them the parts of a path below which a save takes them, so that each has a key of its own.
        """
        return [each for child in self._children for each in child.unshared_tensors()]

    @property
    def process_group(self) -> Group | None:
        """The ranks that train these parameters, as given to `keyed`; None is the whole job."""
        of_parts = (child.process_group for child in self._children if child.process_group is not None)
        return next(of_parts, self._shared_group.process_group)

    def work_with(self, group: SharedGroup) -> None:
        """Sets the ranks that train the parameters."""
        self._shared_group = group
        for each in self._below:
            each.work_with(group)

    def _keep_options(self, names: set[str]) -> None:
        self._kept_options |= names
        for child in self._children:
            child._keep_options(names)

    @property
    def algorithm(self) -> str:
        """The name of the algorithm that steps, which is saved with each group; "" if unknown.

        State that another one has saved is not loaded.
        """
        return ""

    def unmatched_patterns(self) -> list[Problem]:
        """Returns a problem for each pattern of groups that matches no parameter on this rank."""
        return [*self._unmatched, *(problem for child in self._children for problem in child.unmatched_patterns())]

    def _note_given(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Records the options of a group that the code gave."""
        for child in self._children:
            child._note_given(group, options)

    def post_load_state_dict(self) -> None:
        """Called after a load, once for every node of the tree."""
        for child in self._children:
            child.post_load_state_dict()

    def check_agreement(self, process_group: Group | None = None) -> None:
        """Finds options and counters that differ between ranks. Collective; call it now and then.

        It compares learning rates and all other options (except those that say how to compute), step counters and other
        numbers in state. It does so for every parameter that several ranks have. Weights and tensors of state are not
        compared: saves do that (`check_replicas`).

        Args:
            process_group: the ranks that compare: a process group, or a device mesh. None is the optimizer's own group,
                or the whole job.

        Raises:
            StateError: names, for each option and number that differs, the first parameter, with the values of each
                rank. Or a pattern of groups matches no parameter on any rank. Every rank raises.
        """
        names = first_names(self.params)

        def groups() -> Any:
            refuse_unfit_groups(self.param_groups, names)
            return self.param_groups

        ranks = ranks_of(process_group if process_group is not None else self.process_group)
        drifted = differences(ranks, names, groups, lambda: self._gather()[STATE], self.unmatched_patterns())
        if drifted:
            raise StateError("ranks have drifted apart", drifted, code="replicas-differ")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group `{"params": {fqn: parameter}, option: value, ...}`.

        Raises:
            StateError: the parameters have no names, or a name or a parameter is there already; nothing was changed.
            AlgorithmError: a parameter is sharded, and the algorithm may not step on shards; or it has no such option.
        """
        options = dict(param_group)
        given = options.pop(PARAMS)
        params = named(given if isinstance(given, Mapping) else list(given), self._dropped, tied=self._tied)
        there = [name for name, tensor in params.items() if name in self._params or tensor in self._names]
        if there:
            found, remedy = "a parameter that the optimizer has already", "add each parameter once"
            problems = [Problem(name, found, "a new name and a new tensor", remedy) for name in there]
            raise StateError("a parameter is added twice", problems, code="bad-parameters")
        refuse_non_leaf_tensors(params, [self.defaults, options])
        self._add_group(first_names(params), options)
        self._params.update(params)
        self._names.update(first_names(params))

    def _add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        """Adds new parameters, with options that may be incomplete."""
        self.param_groups.append({PARAMS: list(names), **self.defaults, **options})

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        """Plans to load a state dict that hooks have processed."""
        form = offered.get(PARAM_GROUPS)
        if not are_named(form) or any(NAMES_OF_TORCH in group for group in form):
            offered = with_named_groups(offered)
        state = offered.get(STATE)
        elsewhere = self._names_elsewhere()
        if elsewhere and isinstance(state, Mapping):
            offered = {**offered, STATE: {name: entries for name, entries in state.items() if name not in elsewhere}}
        groups, live = self._own_groups(), self._own_state()
        plan_keys(plan, groups is not None, offered, has_state=bool(live))
        if STATE in offered:
            plan_state(plan, live, offered[STATE])
        if groups is not None and PARAM_GROUPS in offered:
            plan_groups(plan, groups, offered[PARAM_GROUPS])
        for group in groups or ():
            group.keep(plan.filled)
            plan.then(partial(group.take, plan.filled))
        plan.then(lambda: self._loaded(offered))
        if not self._children and self._home.deferred is not None:
            plan.then(self._home.deferred.state_is_loaded)

    def _after_load(self) -> None:
        """Fires the hooks that wait for a whole load, those of parts first."""
        for child in self._children:
            child._after_load()
        after_load_state_dict(self)

    def _names_elsewhere(self) -> Collection[str]:
        if self._elsewhere is None or self._elsewhere[0] != len(self._params):
            names = frozenset(name for name, parameter in self._params.items() if not is_held(parameter))
            self._elsewhere = len(self._params), names
        return self._elsewhere[1]

    def _own_names(self) -> set[str]:
        if self._children:
            return super()._own_names()
        return {*self._params, *(key for key in self._keys_beside() if isinstance(key, str))}

    def plan_load(self, plan: LoadPlan, state_dict: Mapping[str, Any]) -> None:
        """Fires the hooks that may change the loaded state, and plans to load it."""
        has_hooks = changes_what_is_loaded(self)
        self._plan(plan, changed_by_hooks(self, state_dict, plan.descriptions) if has_hooks else dict(state_dict))

    def _own_state(self) -> OwnState:
        """Returns the live state of each parameter that has state, and then state under names of its own.

        Of a parameter that lies on other ranks alone there is none: a counter on a rank that cannot see the gradients
        would drift from theirs.
        """
        if self._children:
            return super()._own_state()
        state, elsewhere = self.state, self._names_elsewhere()
        found = ((name, state.get(parameter)) for parameter, name in self._names.items() if name not in elsewhere)
        own: OwnState = {name: entries for name, entries in found if entries}
        for key in self._keys_beside():
            if isinstance(key, str):
                own[key] = state[key]
            elif isinstance(key, Tensor):
                required = f"that of {listed(self._names.values())}"
                problem = Problem("state", described(key), required, "take it out of optimizer.state")
                raise StateError("state of a tensor without a name cannot be saved or loaded", [problem])
        return own

    def _keys_beside(self) -> list[Any]:
        """Returns the keys of a leaf's state that are none of its parameters."""
        return [key for key in self.state if key not in self._names]

    def _own_groups(self) -> list[KeyedGroup] | None:
        """Returns the groups in order, including empty ones, if groups are saved; else None.

        Raises:
            StateError: something that somebody has put there is no group, no parameter, or stands in two groups.
        """
        if self._children or not self._save_param_groups:
            return None
        groups = self.param_groups
        try:
            names = [sorted([self._names[parameter] for parameter in group[PARAMS]]) for group in groups]
        except (LookupError, TypeError):
            refuse_unfit_groups(groups, self._names)
            raise
        if len(set(chain.from_iterable(names))) < sum(map(len, names)):
            refuse_unfit_groups(groups, self._names)
        return [self._keyed_group(i, *own) for i, own in enumerate(zip(names, groups, strict=True))]

    def _keyed_group(self, position: int, names: list[str], group: dict[str, Any]) -> KeyedGroup:
        """Returns a group and its saved form, with the sorted names of its parameters."""
        made = KeyedGroup(group, {PARAMS: names}, self._kept_options, partial(self._places.has, position))
        made.saved.update(saved_options(group, made.where(PARAM_GROUPS, position)))
        if self.algorithm:
            made.saved[ALGORITHM] = self.algorithm
        return made

    def _loaded(self, offered: Mapping[str, Any]) -> None:
        """Called when tensors and options have their new values, before the hooks."""
