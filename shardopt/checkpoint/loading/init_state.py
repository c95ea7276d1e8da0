"""Initializes optimizers before a load: makes state for exactly the parameters with stored state.

State that was made before the first step and never stepped means the same as none. So state that was made for a
parameter that the checkpoint has none for is dropped, and what was stepped is left for the comparison to refuse. But
where a run is taken back (`Manager.restore`) to before a parameter's first gradient, the checkpoint has the parameter
in its groups, and no state of it: then it has none again.

Stored state of a parameter that lacks some is left out before (`without_incomplete_state`). Another algorithm has
entries of the same names ("step", "exp_avg_sq") and lacks others (the base weights of Schedule-Free, the roots of
Shampoo). A step counter alone says that the first step has made those: the next one would go on from zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from shardopt.checkpoint.format.manifest import Manifest, StoredTensors
from shardopt.checkpoint.loading.names import Names, owner_of, saved_by_another, stored_paths
from shardopt.checkpoint.loading.object_state import lacks_state_alone
from shardopt.checkpoint.loading.torchs.made_state import (
    TorchsState,
    of_other_algorithms,
    refuse_lost_wrappers,
    stored_dtypes,
    stored_state,
    torchs_state,
    torchs_within,
)
from shardopt.ranks import Call, Ranks, as_call
from shardopt.runtime.signatures import signature
from shardopt.runtime.torch_private import lazy_state, makes_lazy_state_as_torch
from shardopt.sharding.view import view_of
from shardopt.state.param_groups import PARAMS, other_class
from shardopt.state.paths import Path, join, keys_below
from shardopt.state.state import FlatState, RestoreTarget, UnsteppedStateful

_log = logging.getLogger("shardopt.checkpoint")

_MAXIMA = ("max_exp_avg_sq",)
"""Entries of torch's algorithms that are right from zeros on at any step."""


@dataclass(slots=True)
class _Change:
    """The names for which an optimizer lacks state that the checkpoint has, or has state that the checkpoint lacks.

    Args:
        optimizer: an `UnsteppedStateful`, or another one that has `init_state`; `TorchsState` of torch's own.
        make: names to make state for; None for all of an optimizer that knows of no names.
        drop: names whose state was never stepped on this rank.
        keep: names whose state was, of which the checkpoint knows nothing.
        forget: name → parameter whose state was, and which had none, or of another form, when it was saved.
        extend: name → parameter, of those in `make` that have state, which lacks entries; what they have stays.
        entries: name → the names of what is stored of it, where it gets the stored options.
        forgotten: parameter → its state until then.
    """

    optimizer: Any
    make: list[str] | None
    drop: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    forget: dict[str, Tensor] = field(default_factory=dict)
    extend: dict[str, Any] = field(default_factory=dict)
    entries: Mapping[str, Sequence[str]] = field(default_factory=dict)
    forgotten: dict[Any, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether there is anything to change."""
        return self.make is None or bool(self.make or self.drop or self.forget)


def init_unstepped(
    ranks: Ranks,
    what: str,
    look: Callable[[], tuple[Any, FlatState, Names]],
    takes_back: bool = False,
    extends: bool = True,
) -> Callable[[], None] | None:
    """Makes state where the checkpoint has some, and drops unstepped state where it has none. Collective.

    Args:
        what: names the load in errors.
        look: opens the checkpoint; returns it, the app as it is, and the checkpoint under the app's names.
        takes_back: whether state goes that was stepped since a step at which the run had none.
        extends: whether state that is there gets what it lacks of the stored, also of classes that are not torch's.

    Returns:
        A function that drops the state which was made here, and makes what was dropped as it was; to be called where
        the load has failed. None where no rank had to change anything, so that what was looked at is still so.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: there is no manifest to be read.
        MismatchError: the rules of `rename` do not work.
        LayoutError: a parameter is lazy: it has no shape yet.
        ShardoptError: an optimizer cannot make its state.
    """

    def compare() -> dict[str, _Change]:
        reader, flat, names = look()
        changes = dict(_Comparison(flat, names, reader.manifest, takes_back, extends).changes())
        if any(each.is_due for each in changes.values()):
            for key, tensor in flat.tensors().items():
                if key in names.chosen and is_lazy(tensor):
                    view_of(tensor, key)  # raises: for a parameter without a shape no state can be made
        return changes

    def merge(reports: list[Any]) -> dict[str, Any]:
        stepped: dict[str, set[str]] = {}
        for kept, _ in reports:
            for key, names in kept.items():
                stepped.setdefault(key, set()).update(names)
        return {
            "stepped": {key: sorted(names) for key, names in stepped.items()},
            "any": any(due for _, due in reports),
        }

    call = Call(what, f"{as_call(what).same} with init_state")  # which not all of them may have asked for
    changes, decision = ranks.agree(
        call,
        work=compare,
        report=lambda changes: [
            {key: each.keep for key, each in changes.items() if each.keep},
            any(each.is_due for each in changes.values()),
        ],
        decide=merge,
    )
    if not decision["any"]:
        return None
    begun: list[_Change] = []
    try:
        # A round of its own: what is made may communicate by itself, so that all must have got here.
        ranks.agree(call, work=lambda: _carry_out(changes, decision["stepped"], begun))
    except BaseException:  # also Ctrl-C
        _take_back(begun)
        raise
    return partial(_take_back, begun)


def _carry_out(changes: Mapping[str, _Change], stepped: Mapping[str, Collection[str]], begun: list[_Change]) -> None:
    """Makes and drops state. Notes each change in `begun` before it: what fails is to be taken back, and no more."""
    for key, change in changes.items():
        if change.make is None:
            change.optimizer.init_state()
            continue
        # State that one rank has stepped stays on all ranks.
        change.drop = [name for name in change.drop if name not in stepped.get(key, ())]
        begun.append(change)
        changed = (*change.forget.values(), *change.extend.values())
        change.forgotten = {each: dict(change.optimizer.state[each]) for each in changed}
        if change.drop or change.forget:
            change.optimizer.drop_state([*change.drop, *change.forget])
        if change.make:
            change.optimizer.init_state(names=change.make)
            if change.entries and hasattr(change.optimizer, "init_entries"):
                change.optimizer.init_entries(change.entries)


def _take_back(begun: Sequence[_Change]) -> None:
    """Drops the state that these changes have made, and makes what they have dropped."""
    for change in begun:
        if change.make and isinstance(change.optimizer, UnsteppedStateful | TorchsState):
            change.optimizer.drop_state([name for name in change.make if name not in change.extend])
        if change.drop:
            change.optimizer.init_state(names=change.drop)
        for parameter, state in change.forgotten.items():
            change.optimizer.state[parameter] = state


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The state of optimizers in an app, and in a checkpoint under the app's names.

    Args:
        stored_all: the manifest under its own keys, also with what is not selected.
        takes_back, extends: as for `init_unstepped`.
    """

    flat: FlatState
    names: Names
    stored_all: Manifest
    takes_back: bool
    extends: bool

    def changes(self) -> Iterator[tuple[str, _Change]]:
        """Yields the key of each optimizer that has something stored, with the change that it needs."""
        flat, manifest, chosen = self.flat, self.names.manifest, self.names.chosen
        saved_as = cache(partial(stored_dtypes, flat, manifest, self.stored_all))  # once for all, and if at all
        roots = [each.path for each in flat.targets if isinstance(each.object, Optimizer)]
        stored_below = keys_below(stored_paths(manifest), roots)
        here_below = keys_below({key: leaf.path for key, leaf in flat.leaves.items()}, roots)
        for each in flat.targets:
            key, optimizer, own = join(each.path), each.object, stored_below.get(each.path, [])
            here = here_below.get(each.path, [])
            whole = {key, each.state_key}  # the keys of state that is one plain value, of which names are not in keys
            if not own or (set(own) == set(here) and whole.isdisjoint(own) and chosen >= set(own)):
                continue  # each has what the other has
            torchs = torchs_state(each, own, manifest, flat.tied, saved_as)
            made = torchs_within(each, own, manifest, flat.tied, saved_as) if torchs is None else [torchs]
            live = set(_live_names(each, flat, here, chosen))
            for number, torchs in enumerate(made):
                yield f"{key}.{number}", self._of_torchs(each, torchs, live)
            if made or not hasattr(optimizer, "init_state"):
                continue
            if isinstance(optimizer, UnsteppedStateful) and "names" in signature(optimizer.init_state).parameters:
                yield key, self._of_unstepped(each, optimizer, own, live)
            elif lacks_state_alone(each, flat, here, manifest.tensors.keys() & own):
                yield key, _Change(optimizer, None)

    def _of_unstepped(
        self, target: RestoreTarget, optimizer: UnsteppedStateful, keys: Sequence[str], live: Set[str]
    ) -> _Change:
        """Returns the change that an optimizer needs which has these keys in the checkpoint."""
        manifest, tied = self.names.manifest, self.flat.tied
        known = optimizer.held_state_names()
        name_here = {tied.get(name, name): name for name in known}
        saved = {name_here[name] for name in _saved_names(join(target.path), keys, manifest, name_here)}
        live = live & set(known)
        surplus = live - saved
        unstepped = set(optimizer.unstepped_state(surplus)) if surplus else set()
        since = surplus - unstepped if self.takes_back else set()
        forget = self._known_without_state(target, since, getattr(optimizer, "params", {}))
        kept, make = sorted(surplus - unstepped - forget.keys()), sorted(saved - live)
        stored = stored_state(target, keys, manifest, name_here) if make else {}
        entries = self._known_entries(target, {name: stored.get(tied.get(name, name), {}) for name in make})
        return _Change(optimizer, make, sorted(unstepped), kept, forget, entries=entries)

    def _of_torchs(self, target: RestoreTarget, torchs: TorchsState, live: Set[str]) -> _Change:
        """Returns the change that one of torch's optimizers needs, of an object with state of `live` names."""
        absent_names = sorted(torchs.stored.keys() - live - set(torchs.strange))
        refuse_lost_wrappers(target.state_key, torchs.optimizer, {name: torchs.stored[name] for name in absent_names})
        since = live - torchs.stored.keys() if self.takes_back else set()
        forget = self._known_without_state(target, since, torchs.parameters)
        if isinstance(torchs.optimizer, LBFGS):  # made again: its history grows, and has other parts at each step
            forget |= {name: torchs.parameters[name] for name in live & torchs.stored.keys()}
        others = of_other_algorithms(target, self.names.manifest, self.flat.tied, other_class)
        # torch's own classes step with what the stored options ask for, which a load takes in any case.
        is_due = self.extends or makes_lazy_state_as_torch(torchs.optimizer)
        extend = torchs.lacking(live - forget.keys() - set(others)) if is_due else {}
        absent = torchs.stored.keys() - (live - forget.keys())
        return _Change(torchs, sorted(absent | extend.keys()), forget=forget, extend=extend)

    def _known_entries(self, target: RestoreTarget, stored: Mapping[str, Mapping[Path, Any]]) -> dict[str, list[str]]:
        """Returns name → its stored entries, of those that get stored options of the algorithm that they have here.

        Args:
            stored: name → path within its state → what is stored there.
        """
        flat, manifest, known = self.flat, self.names.manifest, {}
        for name, entries in stored.items():
            key = target.options_key(name, flat.tied)
            has_options = key in flat.leaves and isinstance(manifest.values.get(key, ((), None))[1], Mapping)
            if has_options and not saved_by_another(key, flat, manifest):
                known[name] = [str(path[0]) for path in entries if len(path) == 1]
        return known

    def _known_without_state(
        self, target: RestoreTarget, names: Iterable[str], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the parameters, of these, that have no stored state but are in the stored groups of the optimizer."""
        values, tied = self.names.manifest.values, self.flat.tied
        known = [name for name in sorted(names) if target.options_key(name, tied) in values]
        return {name: parameters[name] for name in known if name in parameters}


def _saved_names(key: str, stored: Iterable[str], manifest: Manifest, known: Collection[str]) -> Iterator[str]:
    """Yields the names, of those an optimizer knows, for which a checkpoint has state."""
    prefix = f"{key}.state."
    for name in stored:
        if name.startswith(prefix):
            owner, _ = owner_of(name.removeprefix(prefix), known)
            yield from [owner] if owner else []
        elif name in (key, f"{key}.state") and name in manifest.values:  # state without a tensor is one plain value
            value = manifest.values[name][1]
            state = value.get("state") if name == key and isinstance(value, Mapping) else value
            yield from [each for each, entries in state.items() if entries] if isinstance(state, Mapping) else []


def _live_names(target: RestoreTarget, flat: FlatState, keys: Iterable[str], chosen: Collection[str]) -> Iterator[str]:
    """Yields the names for which an optimizer, with these keys, has state to be loaded."""
    root = target.path
    for key in keys:
        leaf = flat.leaves[key]
        for path in leaf.paths_here if key in chosen else ():
            within = path[len(root) :]
            if len(within) > 1 and within[0] == "state":
                yield str(within[1])
            elif within in ((), ("state",)) and isinstance(leaf.value, Mapping):
                state = leaf.value if within else leaf.value.get("state")
                yield from [each for each, entries in state.items() if entries] if isinstance(state, Mapping) else []


def without_incomplete_state(names: Names, flat: FlatState) -> Names:
    """Returns a checkpoint without the state of parameters for which it lacks too much, where that passes."""
    targets = [each for each in flat.targets if isinstance(each.object, Optimizer) and each.groups is not None]
    below = keys_below(stored_paths(names.manifest), [each.path for each in targets])
    incomplete: dict[str, str] = {}
    for target in targets:
        stored = _stored_entries(target, below[target.path], flat)
        keys = {name: target.options_key(name, flat.tied) for name in stored}
        strange = {name for name, key in keys.items() if saved_by_another(key, flat, names.manifest)}
        torchs = torchs_state(target, below[target.path], names.manifest, flat.tied)
        if torchs is not None:
            found = _incomplete_of_torchs(torchs, stored, strange)
        elif hasattr(target.object, "incomplete_state"):
            found = target.object.incomplete_state(stored, strange)
        else:
            continue
        for name, absent in found.items():
            reason = f"{join(target.path)}: {name}, without {', '.join(absent)}"
            incomplete |= dict.fromkeys(stored[name].values(), reason)
    if not incomplete:
        return names
    manifest = names.manifest
    tensors = StoredTensors((key, each) for key, each in manifest.tensors.items() if key not in incomplete)
    values = {key: each for key, each in manifest.values.items() if key not in incomplete}
    return replace(names, manifest=replace(manifest, tensors=tensors, values=values), incomplete=incomplete)


def warn_of_incomplete(incomplete: Mapping[str, str]) -> None:
    """Logs whose stored state a load has left out; `incomplete` as in `Names`."""
    first, *others = dict.fromkeys(incomplete.values())
    _log.warning(
        "stored state that does not fit was left out, and that of its parameters stays as it is: it lacks entries that "
        "the algorithm here needs with the others [optimizer-state]:\n  %s%s",
        first,
        f" and {len(others)} more" if others else "",
    )


def _incomplete_of_torchs(
    torchs: TorchsState, stored: Mapping[str, Collection[str]], strange: Collection[str]
) -> dict[str, list[str]]:
    """Returns the names of parameters of torch's own optimizer whose state is of no use to it, with what it lacks."""
    lacking: dict[str, list[str]] = {}
    names = {id(torchs.parameters[name]): name for name in stored if name in strange and name in torchs.parameters}
    for group in torchs.optimizer.param_groups if names else ():
        made: set[str] = set()  # the same for all of a group
        for parameter in [each for each in group[PARAMS] if id(each) in names]:
            if not made and makes_lazy_state_as_torch(torchs.optimizer):
                made = {*lazy_state(torchs.optimizer, group, parameter)}
            name = names[id(parameter)]
            lacking[name] = sorted({*made, *torchs.state.get(parameter, {})}.difference(stored[name], _MAXIMA))
    return {name: absent for name, absent in lacking.items() if absent}


def _stored_entries(target: RestoreTarget, keys: Iterable[str], flat: FlatState) -> dict[str, dict[str, str]]:
    """Returns the stored state of an optimizer's parameters: name here → name of an entry → its key."""
    held = target.held_names() if target.held_names is not None else ()
    name_here = {flat.tied.get(name, name): name for name in held}
    prefix = f"{target.state_key}."
    stored: dict[str, dict[str, str]] = {}
    for key in keys:
        if key.startswith(prefix):
            name, entry = owner_of(key.removeprefix(prefix), name_here)
            if name:
                stored.setdefault(name_here[name], {})[entry] = key
    return stored
