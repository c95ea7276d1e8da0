"""Compares the state of one object with what is stored, and finds what does not fit as a whole, before any read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from shardopt.checkpoint.format.tensor_bytes import TORCH_DTYPES
from shardopt.checkpoint.loading.names import Names, owner_of, saved_by_another
from shardopt.checkpoint.loading.options import Strictness
from shardopt.errors import Problem, ShardoptError
from shardopt.sharding.gradients import is_moved_by_backward
from shardopt.state.param_groups import (
    ALGORITHM,
    PARAMS,
    SAVED_BY,
    Groups,
    groups_elsewhere,
    groups_of,
    with_options,
)
from shardopt.state.paths import PARAM_GROUPS, STATE, Path, join, nest
from shardopt.state.state import CheckedStateful, FlatState, GroupedStateful, Leaf, PartialStateful, RestoreTarget
from shardopt.state.values import canonical, encode_value

_ONE_GROUP = "are in one group of another library's optimizer"
_SKIP_GROUPS = r'load with select=r"^(?!{}\.)", and set the options of the groups in the code'


@dataclass(frozen=True, slots=True)
class StateOfObject:
    """One object of the app, and what is stored for it.

    Args:
        stored: the path of each key of the checkpoint, under the app's names.
        own: the leaves of the object in the app.
        there: the keys of the object in the checkpoint.
    """

    target: RestoreTarget
    flat: FlatState
    names: Names
    stored: Mapping[str, Path]
    own: Mapping[str, Leaf]
    there: Sequence[str]

    def one_sided(self) -> Problem | None:
        """Returns the problem of an optimizer with state in the checkpoint and none in the app, or the reverse.

        Where another algorithm has saved it, that is the problem: no way to initialize it would help.
        """
        target, chosen = self.target, self.names.chosen
        if not isinstance(target.object, torch.optim.Optimizer):
            return None
        if chosen.isdisjoint(self.own) or not self.there:
            return None  # the whole object is on one side only, which is another matter
        prefix = f"{target.state_key}."
        live = any(
            key.startswith(prefix) and key in chosen and isinstance(leaf.value, torch.Tensor)
            for key, leaf in self.own.items()
        )
        saved = [key for key in self.there if key.startswith(prefix) and key in self.names.manifest.tensors]
        if live == bool(saved if live else self._belonging(saved)):
            # Of ours, and of torch's, the parameters are compared one by one.
            is_others = target.numbered is None and not isinstance(target.object, PartialStateful)
            return self._no_state_of_some(saved) if live and is_others else None
        if live and any(key.startswith(prefix) for key in self.names.incomplete):
            return None  # there is some, which was left out
        return self._another_algorithm() or self._no_state_on_one_side(live)

    def _no_state_on_one_side(self, live: bool) -> Problem:
        """Returns the problem of an optimizer with state on one side alone: in the app, if it is `live` there."""
        if live:
            found, required = "no state in the checkpoint", "state in the app"
            remedy = (
                "load it into an optimizer that was just made and has none yet, or call init_state() before saving "
                "(where there is none, take a step)"
            )
        else:
            found, required = "state in the checkpoint", "none: it was never initialized in the app"
            remedy = (
                "load with init_state=True, or call init_state() before loading (where there is none, take a step; in "
                "place of an optimizer around another, give the app the inner one, which loads this under the same key)"
            )
        return Problem(self.target.state_key, found, required, remedy)

    def _no_state_of_some(self, saved: Iterable[str]) -> Problem | None:
        """Returns the problem of another library's optimizer that lacks stored state, and has that of others."""
        target = self.target
        if target.held_names is None:
            return None
        _, lacking = _names_with_state(target, self.flat, self.own, saved)
        if not lacking:
            return None
        key, found = f"{target.state_key}.{min(lacking)}", f"state of {len(lacking)} parameters in the checkpoint"
        remedy = "call init_state() before loading (where there is none, take a step)"
        return Problem(key, found, "none: it was never initialized in the app", remedy)

    def _another_algorithm(self) -> Problem | None:
        """Returns the problem of the first stored options that another algorithm than the app's has saved."""
        section = (*self.target.path, PARAM_GROUPS)
        for key in [key for key, leaf in self.own.items() if leaf.path[:-1] == section]:
            if saved_by := saved_by_another(key, self.flat, self.names.manifest):
                own = str(self.own[key].value[ALGORITHM])
                remedy = (
                    f"resume with {saved_by}; or begin anew with {own}: leave the optimizer out of the app, and load "
                    'with Strictness(unexpected="ignore"); or, if it has state of the same names, load with '
                    "strict=False and init_state=True, which takes that and no options"
                )
                return Problem(f"{key}.{ALGORITHM}", f"{saved_by}, {SAVED_BY}", own, remedy)
        return None

    def regrouped(self) -> Problem | None:
        """Returns the problem of another library's optimizer that has parameters with several options in one group.

        Its own load finds that too, and the app is half loaded then.
        """
        target, values = self.target, self.names.manifest.values
        if not target.keeps_groups:
            return None
        section = (*target.path, PARAM_GROUPS)
        keys = {str(leaf.path[-1]): key for key, leaf in self.own.items() if leaf.path[:-1] == section}
        for group in target.groups or ():
            stored: dict[bytes | str, tuple[str, Any]] = {}
            for name in group[PARAMS]:
                key = keys.get(self.flat.tied.get(name, name), "")
                if key in self.names.chosen and key in values:
                    options = values[key][1]
                    stored.setdefault(canonical(encode_value(options, key)), (name, options))
            if len(stored) > 1:
                (one, first), (other, second) = [*stored.values()][:2]
                unlike = {each for each in first if first[each] != second.get(each)}
                found = "; ".join(
                    f"{', '.join(f'{each}={options.get(each)!r}' for each in sorted(unlike))} of {name}"
                    for name, options in ((one, first), (other, second))
                )
                return Problem(
                    join(section),
                    found,
                    f"one for both, which {_ONE_GROUP}",
                    _SKIP_GROUPS.format(re.escape(join(section))),
                )
        return None

    def refused(self, strictness: Strictness) -> Iterator[Problem]:
        """Yields the problems that the object's `check_state_dict` reports for the stored state."""
        target, own, checked = self.target, self.own, self.target.object
        assert isinstance(checked, CheckedStateful)
        if isinstance(checked, GroupedStateful):
            section, values, tied = (*target.path, PARAM_GROUPS), self.names.manifest.values, self.flat.tied
            target.elsewhere = {  # the stored options of parameters that only other ranks have
                tied.get(str(path[-1]), str(path[-1])): value
                for key, (path, value) in ((key, values[key]) for key in self.there if key in values)
                if path[:-1] == section and key not in self.flat.leaves and isinstance(value, Mapping)
            }
        if own.keys().isdisjoint(self.there) and not target.elsewhere:
            return  # nothing of it is loaded; its keys are reported one by one
        choices = {"strict": False} if strictness.lets_objects_differ and isinstance(checked, PartialStateful) else {}
        try:
            checked.check_state_dict(self._described(strictness), **choices)
        except ShardoptError as error:
            problems = error.problems or [Problem("", error.message, "a state that fits", "see the message")]
            prefix = join(target.path)
            yield from (replace(p, key=f"{prefix}.{p.key}" if p.key else prefix) for p in problems)

    def _described(self, strictness: Strictness) -> Any:
        """Returns the stored state for `check_state_dict`: tensors on the meta device, values as they are."""
        target, own, root = self.target, self.own, len(self.target.path)
        keys = [key for key in self.there if key in own]
        if strictness.unexpected == "raise" and len(keys) < len(self.there):
            keys += self._belonging([key for key in self.there if key not in own])
        may_lack = strictness.missing != "raise" or not self.names.chosen.issuperset(own)
        outline = cache(partial(torch.empty, device="meta"))  # one for all alike: to make it takes microseconds
        described: dict[Path, Any] = {}
        if may_lack:
            described |= {at[root:]: leaf.value for leaf in own.values() for at in leaf.paths_here}
        for key in keys:
            for at in (key in own and own[key].names_here) or [self._path_here(key)]:
                described[at[root:]] = self._description(key, own.get(key), strictness, outline)
        if target.plain_names:
            own_names: dict[str | int, str] = {plain: name for name, plain in target.plain_names.items()}
            described = {(own_names.get(at[0], at[0]), *at[1:]): value for at, value in described.items()}
        state = nest(described)
        if target.groups is not None:
            groups = self._groups(target.groups, may_lack)
            if groups is None:
                state.pop(PARAM_GROUPS, None)
            else:
                state[PARAM_GROUPS] = groups
        return state

    def _description(
        self, key: str, leaf: Leaf | None, strictness: Strictness, outline: Callable[..., torch.Tensor]
    ) -> Any:
        tensor = self.names.manifest.tensors.get(key)
        if tensor is None:
            return self.names.manifest.values[key][1] if key in self.names.manifest.values else None
        dtype = TORCH_DTYPES[tensor.dtype.name]
        if strictness.dtype == "cast" and leaf is not None and isinstance(leaf.value, torch.Tensor):
            dtype = leaf.value.dtype if can_cast(dtype, leaf.value.dtype) else dtype
        return outline(tensor.layout.shape, dtype=dtype)

    def _groups(self, groups: Groups, may_lack: bool) -> list[Any] | None:
        """Returns the groups of the object's state with the stored options; None if none are stored.

        Args:
            may_lack: whether parameters for which no options are stored may go with others.
        """
        section, values = (*self.target.path, PARAM_GROUPS), self.names.manifest.values
        options = {
            str(at[-1]): values[key][1]
            for key, leaf in self.own.items()
            if key in values
            for at in leaf.names_here or (leaf.path,)
            if at[:-1] == section
        }
        malformed = [each for each in options.values() if not isinstance(each, Mapping)]
        if malformed:
            return malformed
        elsewhere = groups_elsewhere(self.target.elsewhere) if self.target.elsewhere else []
        if may_lack or not any(group[PARAMS] for group in groups):
            return with_options(groups, options) + elsewhere if options or elsewhere else groups
        return groups_of(options) + elsewhere if options else None

    def _belonging(self, keys: Iterable[str]) -> list[str]:
        """Returns the stored keys that belong on this rank, whether or not it has a place for them."""
        held_names, root = self.target.held_names, len(self.target.path)
        if held_names is not None:
            names = held_names()
            within = ((key, self._path_here(key)[root:]) for key in keys)
            # Options are for the ranks that have their parameter.
            return [
                key
                for key, path in within
                if len(path) < 2 or (path[1] in names if path[0] == STATE else path[0] != PARAM_GROUPS)
            ]
        return [] if isinstance(self.target.object, CheckedStateful) else list(keys)

    def _path_here(self, key: str) -> Path:
        """Returns the path of a stored key on this rank, which may name the parameter differently."""
        path, at = self.stored[key], len(self.target.path) + 1
        if not self.flat.tied or len(path) <= at or (held_names := self.target.held_names) is None:
            return path
        return *path[:at], self.flat.name_here(path[at], held_names()), *path[at + 1 :]


def _names_with_state(
    target: RestoreTarget, flat: FlatState, own: Iterable[str], stored: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Returns the names under which an optimizer has tensors as state, and those of its own with stored state alone.

    All that is stored has no name ("") where the optimizer's own are unknown.
    """
    prefix, at = f"{target.state_key}.", len(target.path) + 1
    here = (flat.leaves[key] for key in own if key.startswith(prefix))
    live = {str(path[at]) for leaf in here if isinstance(leaf.value, torch.Tensor) for path in leaf.paths_here}
    there = [key.removeprefix(prefix) for key in stored if key.startswith(prefix)]
    if target.held_names is None:
        return live, {""} if there else set()
    names = {flat.tied.get(name, name): name for name in target.held_names()}
    owners = (owner_of(key, names)[0] for key in there)
    return live, {names[name] for name in owners if name} - live


def lacks_state_alone(target: RestoreTarget, flat: FlatState, own: Iterable[str], stored: Iterable[str]) -> bool:
    """Whether an optimizer lacks stored state, and has none that a step changes, by which others make theirs.

    Steps do not change that of tables which are moved by backward.

    Args:
        own: the keys that it has in the app.
        stored: the keys of its tensors in the checkpoint.
    """
    live, lacking = _names_with_state(target, flat, own, stored)
    params = getattr(target.object, "params", {})
    return bool(lacking) and all(name in params and is_moved_by_backward(params[name]) for name in live)


def can_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a conversion loses only digits, for numbers of moderate size."""
    if wanted is torch.float8_e8m0fnu:  # powers of two alone, without a sign or a zero
        return False
    if stored.is_complex:
        return wanted.is_complex
    return stored.is_floating_point and (wanted.is_floating_point or wanted.is_complex)
