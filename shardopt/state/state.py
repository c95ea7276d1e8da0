"""The flat form of an app's nested state: leaves by key with their paths, and the objects to hand state back to.

The protocols here are what objects in an app may have beside `state_dict` and `load_state_dict`. `flatten` (in
`state/flatten.py`) makes the flat form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardopt.errors import OptionError, Problem, StateError
from shardopt.state.names import ParameterNames
from shardopt.state.param_groups import Groups, Numbered, OptionsByMember, as_grouped, groups_elsewhere, with_options
from shardopt.state.paths import PARAM_GROUPS, STATE, Path, join, keys_below
from shardopt.state.versions import Noted

Tied = Mapping[str, str]
"""Name of a parameter → the name it is tied to, possibly on another rank, which stands for both."""


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`, as torch's modules, optimizers, schedulers and scalers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def is_stateful(node: Any) -> TypeGuard[Stateful]:
    """Whether it is a Stateful, and no class; faster than isinstance, which takes microseconds for a plain value.

    Of a dict its class says so: attributes of the dict itself may be its entries.
    """
    owner = type(node) if isinstance(node, dict) else node
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict") and not isinstance(node, type)


def like(sequence: Any, elements: Iterable[Any]) -> Any:
    """Makes a list or (named) tuple of the same kind with other elements."""
    return type(sequence)(*elements) if hasattr(sequence, "_fields") else type(sequence)(elements)


@runtime_checkable
class CheckedStateful(Stateful, Protocol):
    """A Stateful that can check whether a state would fit before it is loaded.

    `check_state_dict` gets tensors that have a shape and a dtype but no memory (device `meta`), and real plain
    values, of all that it has a place for and of what belongs on this rank (`PartialStateful`). It raises
    MismatchError and changes nothing.
    """

    def check_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@runtime_checkable
class PartialStateful(Stateful, Protocol):
    """A Stateful whose "state", a dict by name, is spread over ranks; each has some names, maybe without a place yet.

    `held_state_names` gives the names that belong on this rank. What is stored under others is left to the ranks that
    hold them; what is stored under these and has no place is an error. Its keys do not depend on whether this rank has
    any: the outermost entries of its state always have keys of their own, and those of "state" too. Its
    `check_state_dict` and `load_state_dict` take `strict=False`, to pass over what is on one side only within plain
    values, too.
    """

    def held_state_names(self) -> Collection[str]: ...


@runtime_checkable
class UnsteppedStateful(PartialStateful, Protocol):
    """A PartialStateful, an optimizer, that can make state before its first step, for chosen names.

    `init_state` makes it if there is none; `unstepped_state` gives those of some names whose state is as it was made
    so, which to training is the same as none; `drop_state` leaves names without state.
    """

    def init_state(self, *, names: Iterable[str]) -> None: ...
    def unstepped_state(self, names: Iterable[str]) -> Collection[str]: ...
    def drop_state(self, names: Iterable[str]) -> None: ...


@runtime_checkable
class GroupedStateful(Stateful, Protocol):
    """A Stateful with groups by pattern, each of which must match on some rank of the job.

    `unmatched_patterns` gives a problem for each that matches nothing on this rank, with the same key on every rank.
    Its `load_state_dict` takes groups that carry options of parameters on other ranks (`param_groups.ELSEWHERE`).
    """

    def unmatched_patterns(self) -> list[Problem]: ...


def takes_any_state(node: Stateful, state: Any) -> bool:
    """Whether an object that is none of torch's may have more in its state than it has now.

    Not if an optimizer's state is within: its parameters would have to be compared with those of the stored one.
    """
    known = torch.nn.Module | torch.optim.Optimizer | LRScheduler | CheckedStateful | PartialStateful
    return not isinstance(node, known) and not has_optimizer(state)


def takes_any_part(optimizer: Stateful, part: Any, state: Any) -> bool:
    """Whether an optimizer may have more in this part of its state: a part of a subclass, if it is none of ours."""
    is_ours = isinstance(optimizer, CheckedStateful | PartialStateful)
    return not is_ours and part not in (STATE, PARAM_GROUPS) and not has_optimizer(state)


def has_optimizer(state: Any) -> bool:
    """Whether it is the state of an optimizer that is not known, or has one within."""
    if isinstance(state, Mapping) and not is_stateful(state):
        return (PARAM_GROUPS in state and STATE in state) or any(map(has_optimizer, state.values()))
    return isinstance(state, list | tuple) and any(map(has_optimizer, state))


@dataclass(frozen=True, slots=True)
class PerRank:
    """A plain value that differs between ranks by intent, such as a random state; each rank gets its own back.

    A load replaces `value`, also where it is a tensor, which is not filled in place.

    Args:
        value: plain values and small CPU tensors, nested.
        on_resize: what loading does when the number of ranks is another than when it was saved: "raise", or
            "keep" the value that is there.
    """

    value: Any
    on_resize: Literal["raise", "keep"] = "raise"

    def check(self, key: str, stored: Any) -> Problem | None:
        """Returns why the value that this rank has stored cannot replace this one; before anything is changed."""
        return None


@dataclass(slots=True)
class Leaf:
    """One value of the flat state, and a function that replaces it.

    `names_here` has its paths in the app where these are others than `path`: it is under a name that another stands
    for, or under both.
    """

    path: Path
    value: Any
    replace: Callable[[Any], None]
    names_here: tuple[Path, ...] = ()

    @property
    def paths_here(self) -> tuple[Path, ...]:
        return self.names_here or (self.path,)


@dataclass(slots=True)
class RestoreTarget:
    """An object of `app`, and the state that it gave; a load fills that, and passes it to `load_state_dict`.

    `taker` takes it: the object, a wrapper of an optimizer whose own state says more than the optimizer's, or the place
    of the optimizer's in the state of an object around it. The app, or that object, has `outer`: the object, or the
    outermost wrapper of an optimizer.

    `plain_names` has the outermost names in its state that stand otherwise in the paths of its leaves, and how.
    `groups` are those of its state where their parameters are names, and so have leaves of their own; `options` gets
    what a load has for these leaves, and `elsewhere` what it has for parameters of other ranks. `numbered` is there
    where the object's own state has numbers in place of the names that `state` has. `unnamed` says why numbers that a
    checkpoint has are not known to be which of the names, and `in_doubt` whether another order of them would fit too.
    """

    path: Path
    object: Stateful
    taker: Stateful
    outer: Stateful
    state: dict[str, Any]
    plain_names: Mapping[str, str] = field(default_factory=dict)
    groups: Groups | None = None
    options: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    elsewhere: OptionsByMember = field(default_factory=dict)
    numbered: Numbered | None = None
    unnamed: Problem | None = None
    in_doubt: bool = False

    @property
    def held_names(self) -> Callable[[], Collection[str]] | None:
        """A function that returns the names whose state belongs on this rank; None if these are unknown.

        Besides a `PartialStateful`, an optimizer tells it that has its parameters by name in `params`, as torchrec's
        have: of a table that is on another rank it has nothing.
        """
        numbered = self.numbered
        if numbered is not None and not numbered.in_order:
            return lambda: numbered.names
        if isinstance(self.object, PartialStateful):
            return self.object.held_state_names
        params = getattr(self.object, "params", None) if isinstance(self.object, torch.optim.Optimizer) else None
        return params.keys if isinstance(params, Mapping) and all(isinstance(name, str) for name in params) else None

    @property
    def keeps_groups(self) -> bool:
        """Whether it is another library's optimizer by names, whose load wants the groups that it has."""
        is_others = isinstance(self.object, torch.optim.Optimizer) and not isinstance(self.object, PartialStateful)
        return is_others and self.groups is not None and self.numbered is None

    @property
    def state_key(self) -> str:
        """The key of an optimizer's state in an app."""
        return join((*self.path, STATE))

    def options_key(self, name: str, tied: Tied) -> str:
        """Returns the key in an app of a parameter's options, by the name that the optimizer has for it."""
        return join((*self.path, PARAM_GROUPS, tied.get(name, name)))

    def replace_state(self, value: Mapping[str, Any]) -> None:
        """Replaces the whole state by one whose names are those of the paths."""
        own = {name: part for part, name in self.plain_names.items()}
        self.state.clear()
        self.state.update({own.get(part, part): child for part, child in value.items()})

    def filled_state(self) -> dict[Any, Any]:
        """Returns the state to hand back, with groups built from the loaded options of their members."""
        own = self.state
        if self.numbered is not None:
            own = self.numbered.numbered(own, self.options)
        elif self.groups is not None and (self.options or self.elsewhere):
            if self.keeps_groups:
                own[PARAM_GROUPS] = as_grouped(self.groups, self.options)
            else:
                elsewhere = groups_elsewhere(self.elsewhere) if self.elsewhere else []
                own[PARAM_GROUPS] = with_options(self.groups, self.options) + elsewhere
        return own


@dataclass(slots=True)
class FlatState:
    """The flat form of an `app`: its leaves by key, and the objects to hand state back to.

    `tied` has the names that stand for others, as declared, and `aliases` the key that a leaf would have under such a
    name → the key that it has, and its path under that name. `twins` has the tensors that stand under both on this
    rank: the key under the other name → the key, and the tensor. `names` gives parameters their names. `plain` has the
    values and containers that hold no place for a tensor, by path, with what replaces them: outside of objects, and in
    the state of those that take any. `filled` has what a load has filled containers of the app with, by their ids.
    `unselected` has the paths of the objects of which `selected` has left nothing. `noted` has the states with torch's
    notes of versions.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    targets: list[RestoreTarget] = field(default_factory=list)
    tied: Tied = field(default_factory=dict)
    aliases: dict[str, tuple[str, Path]] = field(default_factory=dict)
    twins: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    names: ParameterNames = field(default_factory=lambda: ParameterNames({}))
    plain: dict[Path, tuple[Any, Callable[[Any], None]]] = field(default_factory=dict)
    filled: dict[int, Any] = field(default_factory=dict)
    unselected: frozenset[Path] = frozenset()
    noted: list[Noted] = field(default_factory=list)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {key: leaf.value for key, leaf in self.leaves.items() if isinstance(leaf.value, torch.Tensor)}

    def values(self) -> dict[str, Any]:
        return {
            key: leaf.value for key, leaf in self.leaves.items() if not isinstance(leaf.value, torch.Tensor | PerRank)
        }

    def per_rank(self) -> dict[str, PerRank]:
        return {key: leaf.value for key, leaf in self.leaves.items() if isinstance(leaf.value, PerRank)}

    def schedules(self) -> list[tuple[RestoreTarget, LRScheduler]]:
        """Returns the objects that are torch's schedules, or of a library's class that contains one."""
        within = [(each, (each.object, getattr(each.object, "scheduler", None))) for each in self.targets]
        found = (
            (each, next((own for own in objects if isinstance(own, LRScheduler)), None)) for each, objects in within
        )
        return [(each, schedule) for each, schedule in found if schedule is not None]

    def selected(self, regex: str | None) -> FlatState:
        """Returns the flat state with only those leaves whose keys match a regex; all for None. Keeps all targets."""
        if regex is None:
            return self
        found = re.compile(regex).search
        leaves = {key: leaf for key, leaf in self.leaves.items() if found(key)}
        below = keys_below({key: leaf.path for key, leaf in leaves.items()}, [each.path for each in self.targets])
        return replace(self, leaves=leaves, unselected=frozenset(path for path, keys in below.items() if not keys))

    def name_here(self, part: Any, names: Collection[Any]) -> Any:
        """Returns the object's own name that a part of a path stands for; the part itself if there is none."""
        if part in names or not self.tied:
            return part
        return next((alias for alias, name in self.tied.items() if name == part and alias in names), part)

    def unmatched_patterns(self) -> list[dict[str, str]]:
        """Returns a problem for each pattern without a match on this rank, as JSON for `refuse_unmatched`."""
        return [
            asdict(replace(problem, key=f"{join(each.path)}: {problem.key}"))
            for each in self.targets
            if isinstance(each.object, GroupedStateful)
            for problem in each.object.unmatched_patterns()
        ]


def refuse_no_regex(name: str, regex: str | None) -> None:
    """Raises OptionError if an argument of this name is no regex."""
    try:
        if regex is not None:
            re.compile(regex)
    except (re.error, TypeError) as error:
        raise OptionError("invalid arguments", [Problem(name, repr(regex), "a regex", str(error))]) from None


def refuse_chains(tied: Tied) -> None:
    """Raises StateError if `tied` is no mapping of names, or leads from one name over another."""
    required = 'alias → name: {"output.weight": "embed.weight"}'
    if not isinstance(tied, Mapping) or not all(isinstance(name, str) for pair in tied.items() for name in pair):
        problem = Problem("tied", repr(tied), required, "pass such a dict")
        raise StateError("tied parameters", [problem], code="tied-parameters")
    problems = [
        Problem(f"tied[{alias!r}]", f"{name!r}, which stands for another itself", required, "name the first of them")
        for alias, name in tied.items()
        if name in tied
    ]
    if problems:
        raise StateError("tied parameters", problems, code="tied-parameters")
