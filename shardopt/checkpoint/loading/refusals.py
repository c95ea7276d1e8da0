"""What errors of a load say besides: what was changed, who wrote the checkpoint, which rules and loads came before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.loading.rules_due import RulesDue, passed_by_text
from shardopt.codes import Code
from shardopt.errors import CorruptionError, MismatchError, ShardoptError
from shardopt.version import WRITER

CHANGED_NOTHING = "this load changed nothing"
MAY_HAVE_CHANGED = "the app may be loaded in part, and optimizers in it refuse to step until a load is whole"

_REFUSALS: frozenset[Code] = frozenset(
    ("damaged", "does-not-fit", "optimizer-state", "by-position", "object-refused", "cast-overflow")
)
"""The codes of errors whose cause may be that another version wrote the checkpoint."""


@contextmanager
def damage_says_state(state: str) -> Iterator[None]:
    """Adds to errors about damage in which state the app is: `CHANGED_NOTHING` or `MAY_HAVE_CHANGED`."""
    try:
        yield
    except CorruptionError as error:
        error.restate(f"{error.message}; {state}")
        raise


@contextmanager
def errors_name_failed_loads(changed_by: list[str], url: str | None = None) -> Iterator[None]:
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
            error.restate(f"{said}; the load of {changed_by[-1]} before it failed: {MAY_HAVE_CHANGED}")
        raise


@contextmanager
def errors_name_writer(manifest: Manifest) -> Iterator[None]:
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
            error.restate("\n".join([first, *others]))
        raise


@contextmanager
def refusals_name_rules(rules: RulesDue) -> Iterator[None]:
    """Adds to a refusal which rules of `rename` were passed by, on all ranks alike."""
    try:
        yield
    except MismatchError as error:
        error.restate("\n".join([error.message, *passed_by_text(rules)]))
        raise
