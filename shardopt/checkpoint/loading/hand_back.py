"""Hands objects their loaded state. Errors say how far the load got, and who wrote the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch.optim import Optimizer

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.codes import Code
from shardopt.errors import CheckpointError, CorruptionError, Problem, ShardoptError
from shardopt.runtime.torch_private import takes_load_hooks
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
            with _keeping_groups(target.object):
                target.object.load_state_dict(target.filled_state(), **choices)
        except Exception as error:
            told = _refusal(error, loaded, number)
            if told is error:
                raise
            raise told from error


@contextmanager
def _keeping_groups(loaded: object) -> Iterator[None]:
    """Has an optimizer of torch's keep its group dicts, and the list of them, where a load would replace them.

    Others may share them (SAM, Lookahead), or a loop may hold one; what is set in a replaced dict has no effect.
    """
    if not isinstance(loaded, Optimizer) or isinstance(loaded, PartialStateful):  # keyed ones keep them
        yield
        return
    kept, groups = loaded.param_groups, list(loaded.param_groups)

    def keep(_: object) -> None:
        new = loaded.param_groups
        if vars(loaded).get(PARAM_GROUPS) is not new or len(new) != len(groups):
            return  # a property, which finds its own; or it has changed what groups there are
        if isinstance(kept, list) and isinstance(new, list) and {id(each) for each in new}.isdisjoint(map(id, groups)):
            replaced = {id(values): (group, values) for group, values in zip(groups, new, strict=True)}
            for group, values in replaced.values():
                group.clear()
                group.update(values)
            kept[:] = groups
            for each in _with_inner(loaded):  # to which a subclass may have handed on what is new, or the reverse
                own = vars(each).get(PARAM_GROUPS)
                if own is new:
                    each.param_groups = kept
                if isinstance(own, list):
                    own[:] = [replaced.get(id(group), (group,))[0] for group in own]

    # By a hook of torch's load, before what a subclass does then, as hand the list on; again for those without hooks.
    with ExitStack() as after_load:
        if takes_load_hooks(loaded):
            after_load.callback(loaded.register_load_state_dict_post_hook(keep, prepend=True).remove)
        yield
        keep(loaded)


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer, and those that it has as attributes or in containers that are attributes, at any depth."""
    found = [optimizer]
    for each in found:  # it grows
        for value in vars(each).values():
            values = value.values() if isinstance(value, dict) else value
            values = values if isinstance(value, dict | list | tuple) else (value,)
            found += [inner for inner in values if isinstance(inner, Optimizer) and inner not in found]
    return found


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
