"""Hands objects their loaded state. Errors say how far the load got, and who wrote the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.loading.torchs.kept import keeping_groups_and_dtypes
from shardopt.codes import Code
from shardopt.errors import CheckpointError, CorruptionError, Problem, ShardoptError
from shardopt.state.paths import join
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
            with keeping_groups_and_dtypes(target.object):
                target.object.load_state_dict(target.filled_state(), **choices)
        except Exception as error:
            told = _refusal(error, loaded, number)
            if told is error:
                raise
            raise told from error


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
