"""Hands objects their loaded state.

Until all objects have it, optimizers refuse to step, and errors say how far the load got, and who wrote the checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.codes import Code
from shardopt.errors import CheckpointError, CorruptionError, PartialLoadError, Problem, ShardoptError
from shardopt.state.paths import join
from shardopt.state.state import PartialStateful, RestoreTarget
from shardopt.version import WRITER

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

_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


def mark_partial_load(optimizers: Iterable[Optimizer], what: str) -> None:
    """Makes `step` of these optimizers raise PartialLoadError, until `unmark_partial_load`."""

    def refuse(*unused: Any) -> None:
        raise PartialLoadError(f"{what} did not end well, and left this optimizer partly loaded: load it again, whole")

    for optimizer in optimizers:
        if optimizer not in _hooks:
            _hooks[optimizer] = optimizer.register_step_pre_hook(refuse)


def unmark_partial_load(optimizers: Iterable[Optimizer]) -> None:
    """Lets these optimizers step again."""
    for optimizer in optimizers:
        hook = _hooks.pop(optimizer, None)
        if hook is not None:
            hook.remove()


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
            target.object.load_state_dict(target.filled_state(), **choices)
        except Exception as error:
            done, ahead = (
                ", ".join(join(each.path) for each in those) or "none" for those in (loaded[:number], loaded[number:])
            )
            come = f"tensors are read, objects loaded: {done}; not loaded: {ahead}. {MAY_HAVE_CHANGED}"
            if isinstance(error, ShardoptError):
                error.message = f"{error.message}; {come}"
                error.args = (error.message,)
                raise
            kind, key = type(target.object).__name__, join(target.path)
            problem = Problem(key, f"{type(error).__name__}: {error}", f"a {kind} that takes its state", _REFUSED)
            raise CheckpointError(
                f"an object refused the state that was saved; {come}", [problem], code="object-refused"
            ) from error
