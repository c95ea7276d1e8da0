"""Finds the data files that checkpoints beside them refer to, and that stay when their own checkpoint is removed.

Who removes a checkpoint takes its manifest away first, then looks here, and leaves the files that are named. Who
commits one that refers to files of others looks, once its manifest is there, whether these files and the manifest by
which it found them still are, and otherwise takes its own back. Of the two one comes last, and sees the other's work.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from shardopt.checkpoint.format.constants import (
    FILE_NAME,
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    RECORD_NAME,
    SEAL_BYTES,
    damaged,
    save_id_in,
)
from shardopt.checkpoint.format.decoding import references_in
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.checkpoint.storage.marker import is_marker
from shardopt.errors import CheckpointError, CorruptionError, Problem, UnreadableError
from shardopt.redaction import without_secrets
from shardopt.world import world

References = Mapping[str, frozenset[str]]
"""Name of a directory → the names of its data files that checkpoints beside it refer to."""

K = TypeVar("K")
T = TypeVar("T")

_MANY = 4  # directories, which are looked at by several threads
_FAR_THREADS = 32
_MOST_KEPT = 4096
_RECORD = re.compile(r"(run|stream|tiers|branch-\d+|step-.+\.metrics)\.json", re.ASCII)
_lock = world().lock()
_known: OrderedDict[tuple[str, int, bytes], frozenset[tuple[str, str]]] = OrderedDict()
"""References by a manifest's URL, size and seal: manifests do not change, and those of large models are long."""
_bytes_of: dict[str, int] = {}
"""The size of the manifest last read at a URL."""


def directory_of(file: DataFile, checkpoint: Storage) -> Storage:
    """Returns the directory of one of a checkpoint's files: its own, or one beside it.

    Where the checkpoint is a symbolic link, such as `latest`, and the file is not beside that, it is one beside the
    directory that the link leads to.

    Raises:
        CorruptionError: there can be none beside it.
    """
    if file.directory is None:
        return checkpoint
    parent = checkpoint.parent()
    if parent is None:
        raise damaged(checkpoint.url, f"a reference to {file.path}, where no directory is above")
    beside = parent[0].child(file.directory)
    if checkpoint.is_link() and not beside.exists(file.name):
        return directory_of(file, storage_of(os.path.realpath(checkpoint.url)))
    return beside


def files_by_directory(of: Iterable[DataFile], checkpoint: Storage) -> list[tuple[Storage, list[DataFile]]]:
    """Returns each directory with some of a checkpoint's files, and these files. Raises CorruptionError."""
    files: defaultdict[str | None, list[DataFile]] = defaultdict(list)
    for file in of:
        files[file.directory].append(file)
    return [(directory_of(each[0], checkpoint), each) for each in files.values()]


def references_under(root: Storage, but: str | None = None) -> References:
    """Returns the files that committed checkpoints in the directories under a root refer to.

    Args:
        but: a directory that is not looked into.

    Raises:
        CheckpointError: a manifest that is there cannot be read: nobody knows then what may be removed.
    """
    referred: defaultdict[str, set[str]] = defaultdict(set)
    # Twice, for others may be at work: while one checkpoint is looked at that has not been committed yet, the one that
    # it took its references from may be removed before that is looked at in its turn. The second look sees the first.
    for _ in range(2):
        directories = _directories(root, [but])
        for found in look_at_each(lambda name: references_of(root.child(name)), directories, root.is_remote):
            for beside, name in found:
                referred[beside].add(name)
        if not directories:
            break  # nor was there anything to take references from
    return {directory: frozenset(names) for directory, names in referred.items()}


def require_readable(root: Storage, but: Collection[str]) -> None:
    """Raises what `references_under` would, before anything is removed. Reads only manifests that were not read before.

    Args:
        but: directories that are not looked into.
    """
    with _lock:
        known = set(_bytes_of)
    unread = [name for name in _directories(root, but) if root.child(name).url not in known]
    look_at_each(lambda name: references_of(root.child(name)), unread, root.is_remote)


def _directories(root: Storage, but: Collection[str | None]) -> list[str]:
    """Returns the names under a root except those of a run's records, which may be as many as its checkpoints."""
    return [name for name in root.names() if not (name in but or _RECORD.fullmatch(name))]


def referred_in(storage: Storage) -> frozenset[str]:
    """Returns the names of the files in a checkpoint's directory that checkpoints beside it refer to."""
    parent = storage.parent()
    if parent is None:
        return frozenset()
    root, directory = parent
    return references_under(root, but=directory).get(directory, frozenset())


def leftovers_in(storage: Storage, seconds: float = 0.0) -> list[str]:
    """Returns the names of the data files in a directory without a manifest, to which no checkpoint beside it refers.

    They are those of saves that broke off, or are under way. A host's share of a checkpoint has none.

    Args:
        seconds: only of saves none of whose files was written, or copied here, for so long, by the clock of this host.
            Where the storage does not know when there are none then.
    """
    files = [name for name in storage.names() if FILE_NAME.fullmatch(name) and not is_marker(name)]
    if not files or storage.is_link() or any(map(storage.exists, (MANIFEST_NAME, RECORD_NAME))):
        return []
    referred = referred_in(storage)
    if seconds:
        since = world().wall_clock() - seconds
        times = {name: storage.written_at(name) for name in files}
        busy = {save_id_in(name) for name, time in times.items() if time is None or time > since}
        files = [name for name in files if save_id_in(name) not in busy]
    return [name for name in files if name not in referred]


def references_of(checkpoint: Storage) -> frozenset[tuple[str, str]]:
    """Returns directory and name of each file elsewhere that a checkpoint refers to; none without a checkpoint.

    Raises:
        CheckpointError: its manifest cannot be read.
    """
    with wrap_os_errors(f"read {checkpoint.url}/{MANIFEST_NAME}"), suppress(FileNotFoundError, NotADirectoryError):
        try:
            return _look_up(checkpoint)
        except (OSError, CheckpointError) as error:  # of a store, which may be well again at the next look
            with _lock:
                _bytes_of.pop(checkpoint.url, None)  # `require_readable` looks at it from now on
            if not isinstance(error, UnreadableError | PermissionError):
                raise
            if isinstance(error, UnreadableError) or not _is_hidden(checkpoint):
                raise _unknown(checkpoint, error) from without_secrets(error)
    return frozenset()


def _unknown(checkpoint: Storage, error: OSError | UnreadableError) -> CheckpointError:
    """Returns the error for a manifest that may refer to anything."""
    found = error.problems[0].found if isinstance(error, UnreadableError) else str(error.strerror or error)
    remedy = "make it readable, or move this checkpoint away"
    problem = Problem(f"{checkpoint.url}/{MANIFEST_NAME}", found, "a manifest that can be read", remedy)
    kind = UnreadableError if isinstance(error, UnreadableError) else CheckpointError
    return kind("nobody knows which files of others a checkpoint needs", [problem])


def _is_hidden(checkpoint: Storage) -> bool:
    """Whether permissions hide a whole directory: it is not of this run."""
    try:
        checkpoint.names()
    except PermissionError:
        return True
    return False


def _look_up(checkpoint: Storage) -> frozenset[tuple[str, str]]:
    """Returns what `_references_of` does, or raises an error of the storage. A damaged manifest refers to nothing."""
    with _lock:
        known_bytes = _bytes_of.get(checkpoint.url) if checkpoint.is_remote else None
    if known_bytes is not None:  # one request: its end shows whether it is the same, and as long
        seal = checkpoint.read_rest(MANIFEST_NAME, known_bytes - SEAL_BYTES, known_bytes)
        known = _looked_up((checkpoint.url, known_bytes, seal))
        if known is not None:
            return known
    nbytes = checkpoint.size(MANIFEST_NAME)
    if not SEAL_BYTES <= nbytes <= MANIFEST_LIMIT_BYTES:
        return frozenset()
    key = checkpoint.url, nbytes, checkpoint.read(MANIFEST_NAME, nbytes - SEAL_BYTES, nbytes)
    known = _looked_up(key)
    if known is not None:
        return known
    data = checkpoint.read(MANIFEST_NAME, 0, nbytes)
    try:
        references = references_in(data, checkpoint.url)
    except CorruptionError:
        return frozenset()
    with _lock:
        _known[key] = references
        _bytes_of[checkpoint.url] = nbytes
        while len(_known) > _MOST_KEPT:
            (url, *_), _ = _known.popitem(last=False)
            _bytes_of.pop(url, None)
    return references


def _looked_up(key: tuple[str, int, bytes]) -> frozenset[tuple[str, str]] | None:
    """Returns the references of a manifest that was read before; None otherwise."""
    url, nbytes, _ = key
    with _lock:
        if key in _known:
            _known.move_to_end(key)
            _bytes_of[url] = nbytes  # also where a look had failed meanwhile
            return _known[key]
    return None


def look_at_each(look: Callable[[K], T], names: Sequence[K], is_remote: bool) -> list[T]:
    """Returns the result of `look` for each name; over a network it looks at several names at once."""
    if not is_remote or len(names) < _MANY:
        return [look(name) for name in names]
    with world().thread_pool(_FAR_THREADS, "shardopt-look") as pool:
        return list(pool.map(look, names))


def _unlock_in_child() -> None:
    global _lock
    _lock = world().lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_unlock_in_child)
