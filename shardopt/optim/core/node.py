"""A node of the tree of optimizers: a leaf owns parameters, any other node consists of parts, which it steps.

    CombinedOptimizer                        sees the names of each part with its key before them
    ├── "dense", WarmupOptimizer             has state of its own, "__warmup"; names of its part stay
    │   └── "", KeyedOptimizerWrapper        a leaf: parameters with their state, and groups
    └── "sparse", KeyedOptimizer             another

What is asked about state (which names, which of them here, make it, drop it, give it) is asked here, once for all kinds
of nodes: of the node itself and then of its parts. Nodes that are made of others keep nothing that is theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.communicating import refuse_capture
from shardopt.algorithms.elementwise.schedule_free import refusal_to_step
from shardopt.errors import Problem, StateError
from shardopt.optim.gradients.scaler import refuse_scaled_backward, refuse_torchs_scaler, share_unscaled
from shardopt.optim.state_dict.groups import refuse_unknown
from shardopt.optim.state_dict.offered import with_key
from shardopt.optim.state_dict.saved_form import KeyedGroup, as_saved, put_state
from shardopt.ranks import SharedGroup
from shardopt.runtime.deferred_checks import DeferredChecks
from shardopt.runtime.partial_loads import refuse_backward_of_partly_loaded
from shardopt.runtime.signatures import signature
from shardopt.runtime.torch_gradients import scaler_that_steps
from shardopt.runtime.torch_private import (
    after_state_dict,
    before_state_dict,
    before_step,
    is_torchs,
    is_torchs_getter_asking,
    take_torchs_attributes,
)
from shardopt.state.param_groups import renamed_group
from shardopt.state.paths import PARAM_GROUPS, STATE

StateDict = dict[str, Any]
OwnState = dict[str, MutableMapping[str, Any]]


@dataclass
class Held:
    """State, groups and defaults of a leaf that stores them itself, as it has no optimizer that steps.

    The rest is what `Node` asks of homes: this one has weights of one kind, and no step.
    """

    state: Any
    param_groups: Any
    defaults: dict[str, Any]
    evaluating: ClassVar[bool] = False
    needs_closure: ClassVar[bool] = False
    deferred: ClassVar[DeferredChecks | None] = None

    def train(self, mode: bool) -> None:
        """Does nothing."""

    def work_with(self, group: SharedGroup) -> None:
        """Does nothing."""


class Node(Optimizer):
    """A torch optimizer in a tree, whose state goes by name: its own state and that of its parts.

    Args:
        home: has its state, groups and defaults as attributes of these names: `Held`, or what it steps with; none where
            subclasses look into all parts.
        parts: each with the key that stands before its names; none of a leaf.
    """

    def __init__(self, home: Any, parts: Collection[tuple[str, Node]] = ()) -> None:
        take_torchs_attributes(self)
        self._home = home
        self._keys, self._children = [key for key, _ in parts], tuple(part for _, part in parts)
        self._params: dict[str, Tensor] = {}
        self._save_param_groups = False
        self._join_children()

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN → parameter, under every name of a tied one."""
        return self._params

    @property
    def state(self) -> Any:
        """Parameter → its live state."""
        self._refuse_torchs_getters()
        return self._home.state

    @state.setter
    def state(self, state: Any) -> None:
        self._home.state = state

    @property
    def param_groups(self) -> Any:
        """The live groups."""
        return self._home.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self._home.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options for groups that are added."""
        defaults: dict[str, Any] = self._home.defaults
        return defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._home.defaults = defaults

    @property
    def updates_in_backward(self) -> bool:
        """Whether backward itself updates parameters, whose gradients then are gone, and not clipped or unscaled."""
        return any(child.updates_in_backward for child in self._children)

    def train(self, mode: bool = True) -> None:
        """Switches the model to the weights to train or, with `mode=False`, to their averages, for evaluation.

        This is for algorithms with weights of two kinds (Schedule-Free); for others it does nothing, so that a loop may
        always call it. Local; every rank has to call. While averages are in the model steps are refused, in any
        wrapper. The mode is saved with the groups, and a load takes it from there: so model and optimizer are to be
        loaded together. Unsharded parameters that a forward of `fully_shard` has left are freed.
        """
        for each in self._below:
            each.train(mode)

    def eval(self) -> None:
        """Switches the model to averages of the weights, as `train(False)` does."""
        self.train(False)

    @property
    def evaluating(self) -> bool:
        """Whether the model holds averages instead of the weights to train."""
        return any(each.evaluating for each in self._below)

    def state_dict(self) -> StateDict:
        """Returns `{"state": {fqn: {name: value}}}`, and after `save_param_groups(True)` also "param_groups".

        The tensors are the optimizer's own (sharded ones put together without a copy), so writing into them changes
        it. Groups are a list in the order of `param_groups`: `[{"params": [sorted fqns], option: value, ...}, ...]`,
        with the algorithm's name and the options that the code gave. Options that say how to compute (`foreach`,
        `fused`, `capturable`, `differentiable`) are left out. A tensor of one element becomes a number. Local to the
        rank.

        Raises:
            StateError: groups are saved, and one has an option that cannot be stored; or torch's
                `get_optimizer_state_dict` asks, which needs positions and so the optimizer's `as_torch()`.
            GradientError: an accelerator's step lacked a gradient; until loads have replaced what it has changed.
        """
        self._refuse_torchs_getters()
        if not self._children and self._home.deferred is not None:
            self._home.deferred.settle()
        before_state_dict(self)
        return after_state_dict(self, self._gather())

    def save_param_groups(self, save: bool) -> None:
        """Sets whether `state_dict` has the groups, and `load_state_dict` needs them."""
        self._save_param_groups = save
        for child in self._children:
            child.save_param_groups(save)

    def held_state_names(self) -> set[str]:
        """Returns the names under "state" that belong on this rank, whether or not they have state.

        Names of sharded parameters without elements on this rank are left out.
        """
        of_parts = (with_key(name, key) for key, part in self._parts for name in part.held_state_names())
        return self._own_names().difference(self._names_elsewhere()).union(of_parts)

    def init_state(
        self, sparse_grad_parameter_names: Iterable[str] | None = None, *, names: Iterable[str] | None = None
    ) -> None:
        """Makes the state of every part before the first step.

        Args:
            sparse_grad_parameter_names: parameters whose gradients will be sparse.
            names: the state to make, as named in `state_dict()["state"]`; None for every trained parameter.

        Raises:
            StateError: a name is not known; no state was made.
            AlgorithmError: state cannot be made without a step.
        """
        sparse, chosen = set(sparse_grad_parameter_names or ()), None if names is None else set(names)
        refuse_unknown("sparse_grad_parameter_names", sparse, self.params)
        refuse_unknown("names", chosen or (), self._state_names())
        for key, part in self._parts:
            own = [name for name in part.params if with_key(name, key) in sparse]
            part._init_named(own, None if chosen is None else _seen_as(key, part, chosen))

    def init_entries(self, entries: Mapping[str, Collection[str]]) -> None:
        """Makes entries of the algorithm's state that the options here leave out: a load brings options that have them.

        Args:
            entries: name, as for `init_state` → names of entries; the algorithm's others are passed over.
        """
        for key, part in self._parts:
            part.init_entries({inner: entries[name] for inner, name in _seen_as(key, part, set(entries)).items()})

    def unstepped_state(self, names: Iterable[str]) -> set[str]:
        """Returns the names whose state equals what `init_state` makes, and so can be made again.

        Local to the rank, and so of the elements that it holds. Here nothing is known of initial values.

        Args:
            names: as in `state_dict()["state"]`; others are passed over.
        """
        chosen, unstepped = set(names), set[str]()
        for key, part in self._parts:
            seen_as = _seen_as(key, part, chosen)
            unstepped |= {seen_as[inner] for inner in part.unstepped_state(seen_as)}
        return unstepped

    def drop_state(self, names: Iterable[str]) -> None:
        """Removes the state of these names, as if before the first step.

        Args:
            names: as in `state_dict()["state"]`; those without state are passed over.
        """
        chosen = set(names)
        for key, part in self._parts:
            part.drop_state(_seen_as(key, part, chosen))
        state = {} if self._children else self.state
        for own in [self._params.get(name, name) for name in chosen]:
            if own in state:
                del state[own]

    def _init_named(self, sparse: Collection[str], names: Collection[str] | None) -> None:
        """Calls `init_state` of another optimizer, even if its class has no argument `names`."""
        if names is None or "names" in signature(self.init_state).parameters:
            self.init_state(sparse, **({} if names is None else {"names": names}))
        elif names:
            there = self._gather()[STATE].keys()
            self.init_state(sparse)
            self.drop_state(self._gather()[STATE].keys() - there - set(names))

    # Saved state.

    def _own_state(self) -> OwnState:
        """Returns this node's own state, beside that of its parts: `{name: {key: tensor or plain value}}`.

        It is saved under that name in `state_dict()["state"]`. The inner mappings must be the live ones: loading
        replaces plain values in them, copies into their tensors, and then calls `post_load_state_dict`.
        """
        return {}

    def _own_names(self) -> set[str]:
        """Returns the names that `_own_state` has or may get, on any rank."""
        return {*self._own_state()}

    def _names_elsewhere(self) -> Collection[str]:
        """Returns the names of this node's own parameters without elements on this rank; computed once."""
        return ()

    def _own_groups(self) -> list[KeyedGroup] | None:
        """Returns the groups of this node itself, if they are saved."""
        return None

    def _gather(self) -> StateDict:
        """Returns the state as `state_dict` does, without its hooks."""
        gathered: StateDict = {STATE: {}}
        for key, part in self._parts:
            of_part = part.state_dict()
            if self._is_around_one:
                gathered = {**of_part, STATE: {}}  # with what hooks have added
            elif PARAM_GROUPS in of_part:
                seen_from_here = partial(with_key, key=key)
                groups = [renamed_group(group, seen_from_here) for group in of_part[PARAM_GROUPS]]
                gathered.setdefault(PARAM_GROUPS, []).extend(groups)
            seen_as = {with_key(name, key): entries for name, entries in of_part[STATE].items()}
            put_state(gathered[STATE], seen_as, "two optimizers")
        own = {name: as_saved(entries) for name, entries in self._own_state().items()}
        put_state(gathered[STATE], own, f"{type(self).__name__} and of what it wraps")
        own_groups = self._own_groups()
        if own_groups is not None:
            gathered[PARAM_GROUPS] = [group.saved for group in own_groups]
        return gathered

    def _state_names(self) -> set[str]:
        """Returns every name that `state_dict()["state"]` has or may get, on any rank."""
        return self._own_names().union(with_key(name, key) for key, part in self._parts for name in part._state_names())

    @property
    def _has_state(self) -> bool:
        """Whether `state_dict()["state"]` is not empty."""
        return bool(self._own_state()) or any(child._has_state for child in self._children)

    @property
    def _saves_groups(self) -> bool:
        """Whether `save_param_groups(True)` was called."""
        return any(child._saves_groups for child in self._children) if self._children else self._save_param_groups

    def _refuse_torchs_getters(self) -> None:
        """Raises if one of torch's functions that takes names for positions is asking; for what those call first."""
        if is_torchs_getter_asking():
            required = "positions, of which they make names"
            remedy = "pass optimizer.as_torch() in its place"
            problem = Problem(type(self).__name__, "an optimizer whose state goes by name", required, remedy)
            raise StateError(
                "torch's getters and setters of optimizer state go by position", [problem], code="by-position"
            )

    # The tree.

    @property
    def _parts(self) -> list[tuple[str, Node]]:
        """The parts with their keys."""
        return list(zip(self._keys, self._children, strict=True))

    @property
    def _is_around_one(self) -> bool:
        """Whether there is a single part, whose names stay unchanged."""
        return self._keys == [""]

    @property
    def _below(self) -> Sequence[Any]:
        """The parts, or a leaf's home, which together answer for this node."""
        return self._children or (self._home,)

    @property
    def needs_closure(self) -> bool:
        """Whether a step evaluates the model itself, possibly several times."""
        return any(each.needs_closure for each in self._below)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raises where torch's GradScaler must not step this optimizer; GradScaler asks for this just before a step."""
        if self.updates_in_backward:
            refuse_scaled_backward()
        refuse_torchs_scaler(self.param_groups)
        refuse_capture("GradScaler", "capture forward and backward alone")  # it asks the device whether to step
        scaler = scaler_that_steps()
        if scaler is not None:
            share_unscaled(scaler, self)
        return False

    def _leaves(self) -> list[Node]:
        """Returns the leaves of the tree below this node."""
        return [leaf for child in self._children for leaf in child._leaves()] if self._children else [self]

    def _atoms(self) -> tuple[Optimizer, ...]:
        """Returns the innermost optimizers, each once, whose gradients a GradScaler unscales."""
        return (self,) if not self._children else tuple(chain.from_iterable(each._atoms() for each in self._children))

    def _owners_of(self) -> list[Node]:
        """Returns the optimizers that this one is a direct part of."""
        return list(self.__dict__.get("_part_of", ()))

    def _family(self) -> list[Optimizer]:
        """Returns every optimizer that this one is part of, or consists of, at any depth, itself included."""
        members: dict[int, Node] = {}
        ahead: list[Node] = [self]
        while ahead:
            each = ahead.pop()
            if id(each) not in members:
                members[id(each)] = each
                ahead += [*each._children, *each._owners_of()]
        atoms = {id(atom): atom for each in members.values() for atom in each._atoms()}
        return list((atoms | members).values())

    def _join_children(self) -> None:
        """Registers this optimizer with its parts, as weak references: those that update in backward call its hooks."""
        for child in self._children:
            child.__dict__.setdefault("_part_of", WeakSet()).add(self)

    def _before_backward(self) -> None:
        """Fires the step-pre-hooks of all optimizers that this one is part of, and then its own; they may raise."""
        refuse_backward_of_partly_loaded(self)
        if self.evaluating:
            raise refusal_to_step(type(self).__name__)
        for owner in self._owners_of():
            owner._before_backward()
        before_step(self)

    def __getstate__(self) -> dict[str, Any]:
        # As torch's: hooks, and wrappers that schedules have put around `step`, stay with this instance.
        return {name: value for name, value in vars(self).items() if not is_torchs(name) and name != "_part_of"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        take_torchs_attributes(self)
        self._join_children()


def _seen_as(key: str, part: Node, names: Collection[str]) -> dict[str, str]:
    """Returns those of the names that belong to a part: name in the part → name in the whole."""
    pairs = ((inner, with_key(inner, key)) for inner in part._state_names())
    return {inner: name for inner, name in pairs if name in names}
