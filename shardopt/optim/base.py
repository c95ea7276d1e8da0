"""The base of every optimizer here: state by parameter names, loaded in place."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import chain
from typing import Any, cast

from torch import Tensor

from shardopt.errors import MismatchError, Problem, ShardoptError, StateError
from shardopt.optim.by_position import ByPosition
from shardopt.optim.related import RelatedOptimizer
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
    refuse_unknown,
)
from shardopt.optim.state_dict.load_plan import LoadPlan, Unmatched
from shardopt.optim.state_dict.offered_form import with_named_groups
from shardopt.optim.state_dict.options import (
    saved_options,
    warn_of_another_algorithm,
    warn_of_conversions,
    warn_of_overridden,
    warn_of_rounding,
)
from shardopt.optim.state_dict.saved_form import KeyedGroup, as_saved, plan_all
from shardopt.param_groups import ALGORITHM, PARAM_GROUPS, PARAMS, STATE
from shardopt.ranks import Group, SharedGroup, ranks_of
from shardopt.sharding.view import is_held
from shardopt.staging_fence import wait_for_copies
from shardopt.state import Tied
from shardopt.torch_private import (
    after_load_state_dict,
    after_state_dict,
    before_load_state_dict,
    before_state_dict,
    changes_what_is_loaded,
    is_torchs_getter_asking,
    out_of_inference_mode,
)

StateDict = dict[str, Any]


class KeyedOptimizer(RelatedOptimizer):
    """A torch optimizer whose `state_dict` goes by fully qualified parameter names, and which loads it in place.

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
        self._dropped = ""  # of names that are added
        self._tied: Tied = {}
        self._kept_options: frozenset[str] = frozenset()
        self._elsewhere: tuple[int, frozenset[str]] | None = None  # with how many parameters there were
        if not isinstance(params, NamedParameters):  # which were looked at
            refuse_flattened(self._params)
        refuse_non_leaf_tensors(self._params, param_groups)
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

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN → parameter, every name of a tied one."""
        return self._params

    @property
    def state(self) -> Any:
        """Parameter → its state, live."""
        self._refuse_torchs_getters()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def as_torch(self) -> ByPosition:
        """Returns a view of this optimizer by position, for torch's `get_optimizer_state_dict` and its kin.

        It is a `torch.optim.Optimizer` over the same parameters, state and groups:

            get_optimizer_state_dict(model, optimizer.as_torch(), options=StateDictOptions(full_state_dict=True))

        Names are then those that the model has. State is made as by `init_state` where torch would take a step with
        gradients of zeros to make it, so that no counter moves.
        """
        return ByPosition(self)

    def state_dict(self) -> StateDict:
        """`{"state": {fqn: {name: value}}}`, and with `save_param_groups(True)` also "param_groups".

        The tensors are the optimizer's own (sharded ones put together without a copy), so writing into them changes
        it. Groups are a list in the order of `param_groups`: `[{"params": [sorted fqns], option: value, ...}, ...]`,
        with the algorithm's name and the options that the code gave; options that say how to compute (`foreach`,
        `fused`, `capturable`, `differentiable`) are left out, and a tensor of one element is a number. Local to the
        rank.

        Raises:
            StateError: groups are saved, and one has an option that cannot be stored; or torch's
                `get_optimizer_state_dict` asks, which needs positions and so the optimizer's `as_torch()`.
        """
        self._refuse_torchs_getters()
        before_state_dict(self)
        return after_state_dict(self, self._gather())

    @out_of_inference_mode()
    def load_state_dict(  # type: ignore[override]  # torch returns None; keys that were passed over must be reported
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        convert_dtype: bool = False,
        convert_state: bool = False,
    ) -> Unmatched:
        """Loads state in place and all or nothing: each tensor keeps its memory; its own tensors are not copied.

        Nothing is broadcast or moved to another placement, and nothing cast unasked. Local to the rank; what differs
        between ranks is for `checkpoint.load` to find. Options are those of the state from then on; where the code that
        made the optimizer gives another value than it gave when the state was saved, rank 0 logs a warning that lists
        both (`keep_options` goes on with the code's).

        Args:
            state_dict: as from `state_dict()`, of this version or of an earlier one; or from a torch optimizer that was
                made of `named_parameters()`, and so has "param_names" in its groups. Options go by parameter: each
                group takes those that all of its parameters have, in whatever groups they were saved.
            strict: whether parameters, state and options on one side only, and groups that another algorithm
                has saved, are errors. Otherwise keys on both sides are loaded, and of another algorithm's groups no
                options; the rest stays as it is and is returned.
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
        wait_for_copies()  # a save in the background may still be copying tensors that this changes
        plan.apply()
        noted = plan.overridden or plan.algorithms or plan.conversions or plan.rounded_anew
        if noted and self._shared_group.ranks.rank == 0:
            warn_of_overridden(plan.overridden)
            warn_of_rounding(plan.rounded_anew)
            warn_of_another_algorithm(plan.algorithms)
            warn_of_conversions(plan.conversions)
        self.post_load_state_dict()
        self._after_load()
        return plan.unmatched

    def check_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, convert_dtype: bool = False) -> None:
        """Raises what `load_state_dict` would, and changes nothing.

        Tensors on the meta device stand for stored ones: only their dtypes and global shapes are compared. The hooks of
        `register_load_state_dict_pre_hook` run here as they do in a load, since they may change what is loaded; they
        get a copy. `checkpoint.load` checks before it reads anything, and loads afterwards, so that it
        runs each hook in both: first with descriptions in the place of tensors, which may be renamed, moved and left
        out, but not looked into, then with the tensors that it has read.

        Raises:
            MismatchError: lists everything that does not fit; or a hook fails with a description.
        """
        plan = LoadPlan(strict, convert_dtype, descriptions=True)
        self.plan_load(plan, state_dict)
        plan.check()

    def held_state_names(self) -> set[str]:
        """Returns the names under "state" that belong on this rank, whether there is state for them or not.

        Not those of sharded parameters of which it holds no elements.
        """
        return self._state_names().difference(self._names_elsewhere())

    def keep_options(self, *names: str) -> None:
        """From now on loads leave these options of all groups as they are here: those that the code gives.

        With "lr", "initial_lr" is kept as well. A schedule that is loaded beside the optimizer has rates of its own
        ("base_lrs"), and sets them again: leave it out of the app, load with `Strictness(unexpected="ignore")`, and
        make it anew afterwards.

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
            raise StateError("an option is not known", [problem])
        self._keep_options({*names, *(f"initial_{name}" for name in names)})

    def train(self, mode: bool = True) -> None:
        """Puts the weights to train into the model, or without `mode` their averages, to evaluate and to ship.

        Of algorithms with weights of two kinds (Schedule-Free); of others it does nothing, so that a loop may always
        call it. Local; every rank has to call. While averages are in the model steps are refused, in any wrapper. The
        mode is saved with the groups, and a load takes it from there: so model and optimizer are to be loaded together.
        Unsharded parameters that a forward of `fully_shard` has left are freed.
        """

    def eval(self) -> None:
        """Puts averages of the weights into the model, as `train(False)`."""
        self.train(False)

    @property
    def evaluating(self) -> bool:
        """Whether averages are in the model in place of the weights to train."""
        return False

    def unshared_tensors(self) -> list[tuple[tuple[str, ...], list[Tensor]]]:
        """Returns parameters that other ranks have by the same names with other values, by intent; here none.

        And before them the parts of a path below which a save takes them, so that each has a key of its own.
        """
        return []

    @property
    def group(self) -> Group | None:
        """The ranks that train these parameters, as given to `keyed`; None is the whole job."""
        return self._shared_group.group

    def work_with(self, group: SharedGroup) -> None:
        """From now on takes these for the ranks that train the parameters."""
        self._shared_group = group

    def _refuse_torchs_getters(self) -> None:
        """Refuses functions of torch's that would take names for positions; called by what they call first."""
        if is_torchs_getter_asking():
            required = "positions, of which they make names"
            remedy = "pass optimizer.as_torch() in its place"
            problem = Problem(type(self).__name__, "an optimizer whose state goes by name", required, remedy)
            raise StateError("torch's getters and setters of optimizer state go by position", [problem])

    def _keep_options(self, names: set[str]) -> None:
        self._kept_options |= names

    @property
    def algorithm(self) -> str:
        """The name of the algorithm that steps, which is saved with each group; "" where that is not known.

        State that another one has saved is not loaded.
        """
        return ""

    def note_patterns(self, places: Places, unmatched: Iterable[Problem]) -> None:
        """Records the patterns of groups, of which some may match no parameter on this rank, and some on another."""
        self._places, self._unmatched = places, tuple(unmatched)

    def unmatched_patterns(self) -> list[Problem]:
        """Returns a problem for each pattern of groups that matches no parameter on this rank."""
        return list(self._unmatched)

    def _note_given(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Records options of a group as given by the code."""

    def post_load_state_dict(self) -> None:
        """Called after state was loaded; does nothing here."""

    def init_state(
        self, sparse_grad_parameter_names: Iterable[str] | None = None, *, names: Iterable[str] | None = None
    ) -> None:
        """Makes state before the first step; here there is none to make.

        Args:
            sparse_grad_parameter_names: parameters whose gradients will be sparse.
            names: the state to make, as named in `state_dict()["state"]`; None for every trained parameter.

        Raises:
            StateError: a name is not known.
        """
        refuse_unknown("sparse_grad_parameter_names", sparse_grad_parameter_names or (), self.params)
        refuse_unknown("names", names or (), self._state_names())

    def unstepped_state(self, names: Iterable[str]) -> set[str]:
        """Returns those of the names whose state is there and as `init_state` makes it, so that it is as good as none.

        Local to the rank, and so of the elements that it holds. Here nothing is known of initial values.

        Args:
            names: as in `state_dict()["state"]`; others are passed over.
        """
        return set()

    def drop_state(self, names: Iterable[str]) -> None:
        """Removes the state of these names, as before the first step.

        Args:
            names: as in `state_dict()["state"]`; those without state are passed over.
        """
        state: Any = self.state
        for name in names:
            key = self._params.get(name, name)
            if key in state:
                del state[key]

    def _init_named(self, sparse: Collection[str], names: Collection[str] | None) -> None:
        """Calls `init_state` for another optimizer, also of a class whose `init_state` has no `names`."""
        if names is None or "names" in inspect.signature(self.init_state).parameters:
            self.init_state(sparse, **({} if names is None else {"names": names}))
        elif names:
            there = self._gather()[STATE].keys()
            self.init_state(sparse)
            self.drop_state(self._gather()[STATE].keys() - there - set(names))

    def check_agreement(self, group: Group | None = None) -> None:
        """Finds options and counters that ranks no longer share. Collective; to be called now and then.

        Compared are learning rates and all other options (but those that say how to compute), step counters and other
        numbers in state, of every parameter that several ranks have.

        Args:
            group: the ranks that compare: a process group, or a device mesh. None is the optimizer's own group, or the
                whole job.

        Raises:
            StateError: for each option and each number that differs, names the first parameter, with the values of each
                rank; or a pattern of groups matches no parameter on any rank. Every rank raises.
        """
        names = first_names(self.params)

        def groups() -> Any:
            refuse_unfit_groups(self.param_groups, names)
            return self.param_groups

        ranks = ranks_of(group if group is not None else self.group)
        drifted = differences(ranks, names, groups, lambda: self._gather()[STATE], self.unmatched_patterns())
        if drifted:
            raise StateError("ranks have drifted apart", drifted)

    def save_param_groups(self, save: bool) -> None:
        """Whether `state_dict` has the groups, and `load_state_dict` needs them."""
        self._save_param_groups = save

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group `{"params": {fqn: parameter}, option: value, ...}`.

        Raises:
            StateError: the parameters have no names, or a name or a parameter is there already; nothing was changed.
            AlgorithmError: a parameter is sharded, and the algorithm may not step on shards; or it has no such option.
        """
        if "_names" not in self.__dict__:  # torch's constructor calls this for the groups that it is given
            super().add_param_group(param_group)
            return
        options = dict(param_group)
        params = self._new_params(options.pop(PARAMS))
        refuse_non_leaf_tensors(params, [self.defaults, options])
        self._add_group(first_names(params), options)
        self._params.update(params)
        self._names.update(first_names(params))

    def _add_group(self, names: Mapping[Tensor, str], options: Mapping[str, Any]) -> None:
        """Adds parameters that are new, under options that may not be complete."""
        self.param_groups.append({PARAMS: list(names), **self.defaults, **options})

    def __getstate__(self) -> dict[str, Any]:
        names = (
            "_params",
            "_names",
            "_save_param_groups",
            "_dropped",
            "_tied",
            "_kept_options",
            "_places",
            "_unmatched",
            "_shared_group",
        )
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own, "_elsewhere": None}

    # An optimizer made of others overrides the four below, and calls those of its children.

    def _gather(self) -> StateDict:
        """Returns the state as `state_dict` does, before its hooks see it."""
        state_dict: StateDict = {STATE: {name: as_saved(entries) for name, entries in self._named_state()}}
        groups = self._keyed_groups()
        if groups is not None:
            state_dict[PARAM_GROUPS] = [group.saved for group in groups]
        return state_dict

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        """Plans to load a state dict that the hooks have seen."""
        offered = with_named_groups(offered)
        state = offered.get(STATE)
        elsewhere = self._names_elsewhere()
        if elsewhere and isinstance(state, Mapping):
            offered = {**offered, STATE: {name: entries for name, entries in state.items() if name not in elsewhere}}
        groups = self._keyed_groups()
        plan_all(plan, dict(self._named_state()), groups, offered)
        filled: dict[int, Any] = {}
        for group in groups or ():
            plan.then(partial(group.take, filled))
        plan.then(lambda: self._loaded(offered))

    def _after_load(self) -> None:
        """Fires the hooks that wait for a whole load."""
        after_load_state_dict(self)

    def _unlike(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
        """Returns the options of a saved group under which state would lie otherwise than here: name, stored, own."""
        return ()

    @property
    def _later_options(self) -> frozenset[str]:
        """Options that the algorithm did not always have."""
        return frozenset()

    @property
    def _saves_groups(self) -> bool:
        """Whether `save_param_groups(True)` was called."""
        return self._save_param_groups

    @property
    def _needs_closure(self) -> bool:
        """Whether a step has to evaluate the model itself, maybe several times."""
        return False

    @property
    def _has_state(self) -> bool:
        """Whether `state_dict()["state"]` has anything."""
        return any(True for _ in self._named_state())

    def _names_elsewhere(self) -> Collection[str]:
        """Returns the names of parameters of which this rank holds no elements; computed once."""
        if self._elsewhere is None or self._elsewhere[0] != len(self._params):
            names = frozenset(name for name, parameter in self._params.items() if not is_held(parameter))
            self._elsewhere = len(self._params), names
        return self._elsewhere[1]

    def _state_names(self) -> set[str]:
        """Returns every name that `state_dict()["state"]` has or may get."""
        return {*self._params, *(key for key in cast(Any, self.state) if isinstance(key, str))}

    def plan_load(self, plan: LoadPlan, state_dict: Mapping[str, Any]) -> None:
        """Fires the hooks that may change the loaded state, and plans to load it."""
        if not plan.descriptions or not changes_what_is_loaded(self):
            self._plan(plan, before_load_state_dict(self, state_dict))
            return
        try:
            # A copy, as plain values that hooks change would be changed again by the load.
            offered = before_load_state_dict(self, as_saved(state_dict))
        except ShardoptError:
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            required = "a hook that leaves tensors on the meta device, which stand for stored ones, as they are"
            remedy = "look at tensor.is_meta, and change values in a load_state_dict_post_hook"
            problem = Problem("register_load_state_dict_pre_hook", failure, required, remedy)
            raise MismatchError("a hook fails with what is to be loaded; nothing was changed", [problem]) from error
        self._plan(plan, offered)

    def _named_state(self) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
        """Yields name and live state of each parameter that has any, then of state under names of its own.

        Of a parameter that lies on other ranks alone there is none: a counter on a rank that cannot see the gradients
        would drift from theirs.
        """
        state, elsewhere = self.state, self._names_elsewhere()
        for parameter, name in self._names.items():
            entries = state.get(parameter)
            if entries and name not in elsewhere:
                yield name, entries
        for key in list(cast(Any, state)):
            if isinstance(key, str):
                yield key, cast(Any, state)[key]
            elif isinstance(key, Tensor) and key not in self._names:
                required = f"that of {listed(self._names.values())}"
                problem = Problem("state", described(key), required, "take it out of optimizer.state")
                raise StateError("state of a tensor without a name cannot be saved or loaded", [problem])

    def _keyed_groups(self) -> list[KeyedGroup] | None:
        """Returns the groups in their order, those without parameters too, if groups are saved; else None."""
        if not self._save_param_groups:
            return None
        keyed_groups = []
        for position, (names, group) in enumerate(self._names_in_groups()):
            saved = {PARAMS: names}
            where = KeyedGroup(group, saved).where(PARAM_GROUPS, position)
            saved |= {**saved_options(group, where), **self._saved_besides(group, names)}
            has = partial(self._places.has, position)
            unlike = partial(self._unlike, group)
            keyed_groups.append(KeyedGroup(group, saved, self._kept_options, has, self._later_options, unlike))
        return keyed_groups

    def _names_in_groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Returns the sorted names of each group, and the group.

        Raises:
            StateError: something that somebody has put there is no group, no parameter, or stands in two groups.
        """
        try:
            names = [sorted([self._names[parameter] for parameter in group[PARAMS]]) for group in self.param_groups]
        except (LookupError, TypeError):
            refuse_unfit_groups(self.param_groups, self._names)
            raise
        if len(set(chain.from_iterable(names))) < sum(map(len, names)):
            refuse_unfit_groups(self.param_groups, self._names)
        return list(zip(names, self.param_groups, strict=True))

    def _saved_besides(self, group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        """Returns the entries that are saved with a group besides its options."""
        return {ALGORITHM: self.algorithm} if self.algorithm else {}

    def _loaded(self, offered: Mapping[str, Any]) -> None:
        """Called when tensors and options have their new values, before the hooks."""

    def _new_params(self, params: Any) -> dict[str, Tensor]:
        new = named(params if isinstance(params, Mapping) else list(params), self._dropped, tied=self._tied)
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
        return new
