"""Removes checkpoints, and the files of failed saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from shardopt.checkpoint.format.constants import FILE_NAME, MANIFEST_NAME, save_id_in
from shardopt.checkpoint.sources.own import manifest_in
from shardopt.checkpoint.sources.referred import (
    References,
    leftovers_in,
    references_of,
    references_under,
    referred_in,
    require_readable,
)
from shardopt.checkpoint.storage import Storage, is_temporary
from shardopt.errors import CheckpointError, Problem
from shardopt.world import world

_FEW_FILES = 16  # that are removed one after the other
_THREADS = 4
_FAR_THREADS = 32  # where they wait for answers all the time


def discard(storage: Storage, save_id: str) -> None:
    """Removes the files of a failed save only, unless it is committed after all, or may still be.

    Of a copy there may be a second process that makes it again, and commits it now: then its manifest is removed too.
    """
    with suppress(Exception):  # the error that is being raised must not be hidden by another
        if committed_id(storage) != save_id and not storage.may_appear(MANIFEST_NAME):
            own = [name for name in storage.names() if FILE_NAME.fullmatch(name) and name.startswith(f"{save_id}-")]
            referred = referred_in(storage) if own else ()  # to the first copies of what is copied again
            removed = [name for name in own if name not in referred]
            for name in removed:
                storage.remove(name)
            if removed and committed_id(storage) == save_id:
                storage.remove_durably(MANIFEST_NAME)


def remove_leftovers(storage: Storage, seconds: float) -> None:
    """Removes the data files in a directory without a manifest, as killed saves leave them, unless others need them.

    A save that was taken for dead, and still commits here, finds that its files are gone, or loses its manifest.

    Args:
        seconds: for which a save must have written nothing: there may be one that is under way, of another job.
    """
    names = leftovers_in(storage, seconds)
    if not names or storage.exists(MANIFEST_NAME):  # committed while references were looked for
        return
    _remove_each(storage, names)
    if committed_id(storage) in {save_id_in(name) for name in names}:
        storage.remove_durably(MANIFEST_NAME)


def committed_id(storage: Storage) -> str | None:
    """Returns the id of the committed save; None if there is none."""
    found = manifest_in(storage)
    return None if found is None else found[0].save_id


def remove_checkpoint(storage: Storage) -> None:
    """Removes a checkpoint, or its leftovers. Killed at any point, it leaves either none or a whole one.

    Only files that saves write are removed; the directory too, unless somebody else has put something there. Data files
    to which checkpoints beside it refer stay, without a manifest, until the last of these is removed. Of a symbolic
    link to a directory only the link is removed.

    Raises:
        OSError, CheckpointError: it could not be removed, or not all of it. It stays whole where a manifest beside it
            cannot be read.
    """
    if storage.exists(MANIFEST_NAME):
        referred_in(storage)  # which raises before anything has changed
    remove_in_the_way(storage)


def remove_in_the_way(storage: Storage) -> None:
    """Removes a checkpoint that counts for nothing, as `remove_checkpoint` does.

    But where a manifest beside it cannot be read it loses its own: its data stays, and is in nobody's way.
    """
    for error in _remove([storage]).values():
        raise error


def remove_checkpoints(storages: Sequence[Storage]) -> Mapping[Storage, Exception]:
    """Removes several checkpoints under one run's root as `remove_checkpoint` does; looks for references once.

    Returns:
        The error of each that could not be removed. The others are removed all the same.

    Raises:
        CheckpointError: a manifest beside them cannot be read. They stay then. If it was readable a moment ago, they
            are no checkpoints any more, and have all their data files.
    """
    roots: dict[str, tuple[Storage, set[str]]] = {}
    for storage in storages:
        parent = storage.parent()
        if parent is not None:
            roots.setdefault(parent[0].url, (parent[0], set()))[1].add(parent[1])
    for root, names in roots.values():
        with suppress(FileNotFoundError):
            require_readable(root, names)
    return _remove(storages)


def _remove(storages: Sequence[Storage]) -> Mapping[Storage, Exception]:
    """Removes as `remove_checkpoints` does, without a look at the manifests beside them first."""
    failed: dict[Storage, Exception] = {}
    names: dict[Storage, list[str] | None] = {}  # of files to remove; None of links
    for storage in storages:
        with _noted(failed, storage):
            names[storage] = None if storage.is_link() else _files_without_manifest(storage)
        if storage in failed and len(storages) > 1:
            references_of(storage)  # it stays, and is one of those beside the others
    # After the manifests: from now on no save can refer to what only they had.
    referred = _referred_in([storage for storage in names if names[storage] != []])
    for storage, files in names.items():
        with _noted(failed, storage):
            if files is None:
                _remove_link(storage, referred[storage])
                continue
            _remove_each(storage, [name for name in files if name not in referred[storage]])
            storage.remove_durably(MANIFEST_NAME)  # of a save that was taken for dead, and committed what is gone now
            storage.remove_if_empty()
    return failed


def _files_without_manifest(storage: Storage) -> list[str]:
    """Removes the manifest, and returns the names of the other files of saves."""
    storage.remove_durably(MANIFEST_NAME)  # durably first: without it nobody takes the rest for a checkpoint
    return [name for name in storage.names() if FILE_NAME.fullmatch(name) or is_temporary(name)]


@contextmanager
def _noted(failed: dict[Storage, Exception], storage: Storage) -> Iterator[None]:
    """Notes the error of one checkpoint, so that the others are removed."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        failed[storage] = error


def _remove_link(storage: Storage, referred: frozenset[str]) -> None:
    """Removes a link to a directory. What is in that was put elsewhere to be kept, the manifest too."""
    if referred:
        found = "a link to a directory whose files other checkpoints need"
        problem = Problem(storage.url, found, "a link that nothing needs", "keep it while these checkpoints are kept")
        raise CheckpointError(f"cannot remove {storage.url}", [problem])
    parent = storage.parent()
    assert parent is not None  # which has the link
    parent[0].remove_durably(parent[1])


def _remove_each(storage: Storage, names: Sequence[str]) -> None:
    """Removes files, as many in parallel as the storage can take; each rank of a job leaves at least one."""
    if len(names) <= _FEW_FILES:
        for name in names:
            storage.remove(name)
        return
    threads = _FAR_THREADS if storage.is_remote else _THREADS
    with world().thread_pool(threads, "shardopt-remove") as pool:
        try:
            removals = pool.map(storage.remove, names)
        except RuntimeError:  # Python's for a limit of the system: this thread does what no other can
            removals = map(storage.remove, names)
        for _ in removals:
            pass


def _referred_in(storages: Sequence[Storage]) -> dict[Storage, frozenset[str]]:
    """Returns the names of files in these directories that checkpoints beside them refer to."""
    if len(storages) == 1:
        return {storages[0]: referred_in(storages[0])}
    of_roots: dict[str, References] = {}
    referred: dict[Storage, frozenset[str]] = {}
    for storage in storages:
        parent = storage.parent()
        if parent is not None and parent[0].url not in of_roots:
            of_roots[parent[0].url] = references_under(parent[0])
        referred[storage] = frozenset() if parent is None else of_roots[parent[0].url].get(parent[1], frozenset())
    return referred
