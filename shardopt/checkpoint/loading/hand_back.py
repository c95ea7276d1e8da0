"""Hands objects their loaded state. Errors say how far the load got, and who wrote the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

from torch.optim import Optimizer

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.loading.torchs.kept_dtypes import keeping_dtypes
from shardopt.codes import Code
from shardopt.errors import CheckpointError, CorruptionError, Problem, ShardoptError
from shardopt.state.containers import attributes_of, entries_of
from shardopt.state.paths import PARAM_GROUPS, join
from shardopt.state.state import PartialStateful, RestoreTarget
from shardopt.version import WRITER

_log = logging.getLogger("shardopt.checkpoint")

CHANGED_NOTHING = "this load changed nothing"
MAY_HAVE_CHANGED = "the app may be loaded in part, and optimizers in it refuse to step until a load is whole"

_REFUSED = (
    "mend what it says, and load again, which loads everything anew; or leave the object out of the app, and load with "
    'Strictness(unexpected="ignore")'
)
_FEW = 64
"""Of as many entries a container shows whether it has optimizers; one with data may have millions."""
_FEW_WITHIN = 16
"""Of as many a container within another one shows it."""
_DEPTH = 3
"""So many containers and objects may be around an optimizer, each within the next."""
_REFUSALS: frozenset[Code] = frozenset(
    ("damaged", "does-not-fit", "optimizer-state", "by-position", "object-refused", "cast-overflow")
)
"""The codes of errors whose cause may be that another version wrote the checkpoint."""


@contextmanager
def damage_told(state: str) -> Iterator[None]:
    """Adds to errors about damage in which state the app is: `CHANGED_NOTHING` or `MAY_HAVE_CHANGED`."""
    try:
        yield
    except CorruptionError as error:
        error.message = f"{error.message}; {state}"
        error.args = (error.message,)
        raise


@contextmanager
def earlier_told(changed_by: list[str], url: str | None = None) -> Iterator[None]:
    """Adds to errors that the app may be loaded in part by loads before, which failed: of these URLs.

    Args:
        url: of what is loaded now; it is added to the others if its own error says so.
    """
    try:
        yield
    except ShardoptError as error:
        if MAY_HAVE_CHANGED in error.message:
            changed_by += [] if url is None else [url]
        elif changed_by:
            said = error.message.replace("nothing was changed", CHANGED_NOTHING)
            error.message = f"{said}; the load of {changed_by[-1]} before it failed: {MAY_HAVE_CHANGED}"
            error.args = (error.message,)
        raise


@contextmanager
def writer_told(manifest: Manifest) -> Iterator[None]:
    """Adds to a refusal who wrote the checkpoint, if that was another version.

    To be entered where this rank has read the manifest, and either in the work of a round or where all ranks have it.
    Elsewhere only some ranks could say it, and their errors would differ.
    """
    try:
        yield
    except ShardoptError as error:
        if error.code in _REFUSALS and manifest.written_by not in (None, WRITER):
            first, *others = error.message.split("\n")
            first += f" (written by {manifest.written_by:.80}; this is {WRITER})"
            error.message = "\n".join([first, *others])
            error.args = (error.message,)
        raise


def hand_back(loaded: Sequence[RestoreTarget], lenient: bool) -> None:
    """Gives objects their state by `load_state_dict`, in turn.

    Args:
        lenient: whether differences within plain values pass.

    Raises:
        CheckpointError: an object refused its state; an error of this library as it is. Both say how far the load came.
    """
    for number, target in enumerate(loaded):
        choices = {"strict": False} if lenient and isinstance(target.object, PartialStateful) else {}
        try:
            with _keeping_groups(target.object), keeping_dtypes(target.object, _with_inner):
                target.object.load_state_dict(target.filled_state(), **choices)
        except Exception as error:
            told = _refusal(error, loaded, number)
            if told is error:
                raise
            raise told from error


@contextmanager
def _keeping_groups(loaded: object) -> Iterator[None]:
    """Has torch's optimizers keep their group dicts, and the list of them, where a load would replace them.

    Others may share them (SAM, Lookahead), or a loop may hold one; what is set in a replaced dict has no effect.

    An optimizer does so in `__setstate__`, before anything else gets the dicts that its load has made. One that is not
    found within another has new dicts, and the other gets them from it, as without this.
    """
    with ExitStack() as after_load:
        if isinstance(loaded, Optimizer) and not isinstance(loaded, PartialStateful):  # keyed ones keep them
            for each in _with_inner(loaded):
                vars(each)["__setstate__"] = partial(_set_state, each)  # by which loads end, torch's and others'
                after_load.callback(_by_class_again, each)
        yield


def _by_class_again(optimizer: Optimizer) -> None:
    vars(optimizer).pop("__setstate__", None)  # asked for now: a load may replace the dict of attributes


def _set_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Sets the state of an optimizer as its `__setstate__` does, with the new groups' values in its own group dicts."""
    finds_them = hasattr(type(optimizer), PARAM_GROUPS)  # by a property
    kept, new = () if finds_them else getattr(optimizer, PARAM_GROUPS, ()), state.get(PARAM_GROUPS)
    old: list[dict[str, Any]] | None = None
    before: list[dict[str, Any]] = []
    if isinstance(kept, list) and isinstance(new, list) and _are_others(kept, new):
        if PARAM_GROUPS in vars(optimizer):
            before = [dict(group) for group in kept]
            vars(optimizer)[PARAM_GROUPS] = old = [*map(dict, before)]  # a class may read what it had
        for group, values in zip(kept, new, strict=True):
            group.clear()
            group.update(values)
        state = {**state, PARAM_GROUPS: kept}
    failed = True
    try:
        type(optimizer).__setstate__(optimizer, state)
        failed = False
    finally:
        was_set = vars(optimizer).get(PARAM_GROUPS) is not old
        if old is not None and not was_set:  # by the class, which may write there
            assert isinstance(kept, list)
            vars(optimizer)[PARAM_GROUPS] = kept
            _take_written(optimizer, kept, [] if failed else before, old)


def _take_written(
    optimizer: Optimizer, kept: list[Any], before: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]]
) -> None:
    """Gives group dicts, which have loaded options, what a class that has not taken these has written instead.

    One that has written nothing has had another optimizer take them, with which it shares its dicts.

    Args:
        before: the options of each group before; none where it has failed, so that all go back.
        old: what the class has had as its groups.
    """
    written: list[dict[str, Any]] = [
        {name: value for name, value in group.items() if name not in had or value is not had[name]}
        for group, had in zip(old, before or [{}] * len(old), strict=False)
    ]
    if before and not any(written) and len(old) == len(before):
        return
    own = {*map(id, kept)} if before else set()
    shares = any(id(group) in own for each in _with_inner(optimizer)[1:] for group in each.param_groups)
    for group, values, changes in zip(kept, old, written, strict=False):
        if not shares:
            group.clear()
        group.update(changes if shares else values)
    kept[len(old) :] = []
    kept += old[len(kept) :]


def _are_others(groups: list[Any], new: list[Any]) -> bool:
    """Whether as many group dicts replace these; not where an optimizer keeps them itself."""
    return len(groups) == len(new) and {id(each) for each in groups}.isdisjoint(map(id, new))


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer, and those that it has as attributes, or in containers and objects that are attributes.

    Another object may be given too.
    """
    found, seen = [optimizer], {id(optimizer)}
    for each in found:  # it grows
        for inner in chain.from_iterable(_optimizers_in(value, _DEPTH) for value in [*vars(each).values()]):
            if id(inner) not in seen:
                seen.add(id(inner))
                found.append(inner)
    return found


def _optimizers_in(value: Any, depth: int) -> list[Optimizer]:
    """Returns an optimizer itself, or those in a container or an object of the program's."""
    if isinstance(value, Optimizer):
        return [value]
    within = entries_of(value) if depth else None
    entries = attributes_of(value) if depth and within is None else within
    if entries is None:
        return []
    few = _FEW if within is None or depth == _DEPTH else _FEW_WITHIN
    first = [*islice(entries, few)]  # at once, as a thread may add some
    found = [inner for each in first for inner in _optimizers_in(each, depth - 1)]
    return found + [inner for each in (entries if found else ()) for inner in _optimizers_in(each, depth - 1)]


def _refusal(error: Exception, loaded: Sequence[RestoreTarget], number: int) -> ShardoptError:
    """Returns the error to raise for one of the object with this number: it says how far the load came."""
    done, ahead = (
        ", ".join(join(each.path) for each in those) or "none" for those in (loaded[:number], loaded[number:])
    )
    come = f"tensors are read, objects loaded: {done}; not loaded: {ahead}. {MAY_HAVE_CHANGED}"
    if isinstance(error, ShardoptError):
        error.message = f"{error.message}; {come}"
        error.args = (error.message,)
        return error
    kind, key = type(loaded[number].object).__name__, join(loaded[number].path)
    problem = Problem(key, f"{type(error).__name__}: {error}", f"a {kind} that takes its state", _REFUSED)
    return CheckpointError(f"an object refused the state that was saved; {come}", [problem], code="object-refused")


def warn_of_what_is_left(what: str, is_undone: bool, marked: Sequence[str]) -> None:
    """Warns of what a load that has ended well has left out.

    Args:
        what: the load.
        is_undone: whether the next step undoes it, by masters.
        marked: the keys of optimizers that may still be half changed by what came before.
    """
    if is_undone:
        _log.warning(
            "%s: parameters were loaded without their fp32 masters. The next step makes them of the masters that are "
            "here. To train on from what was loaded, load the optimizer of that checkpoint too, or make a new one "
            "[optimizer-state]",
            what,
        )
    if marked:
        _log.warning(
            "%s: an earlier load or outer step did not end well, and this load leaves out some of what that may have "
            "changed. So %s will raise PartialLoadError when stepped or saved. Load all of it; or start again, with "
            "transactional=True, by which a load of damaged data changes nothing [partial-load]",
            *(what, ", ".join(dict.fromkeys(marked)) or "the optimizer"),
        )
