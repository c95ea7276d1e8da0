"""The data files to which checkpoints beside them refer: they stay where they are when their own checkpoint goes.

Who removes a checkpoint takes its manifest away first, then looks here, and leaves the files that are named. Who
commits one that refers to files of others looks, once its manifest is there, whether these files and the manifest by
which it found them still are, and otherwise takes its own back. Of the two one comes last, and sees the other's work.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress

from shardopt.checkpoint.format.constants import MANIFEST_LIMIT_BYTES, MANIFEST_NAME, SEAL_BYTES
from shardopt.checkpoint.format.manifest import references_in
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.errors import CorruptionError
from shardopt.world import world

References = Mapping[str, frozenset[str]]
"""Name of a directory → the names of those of its data files that checkpoints beside it refer to."""

_MOST_KEPT = 4096
_lock = world().lock()
_known: OrderedDict[tuple[str, int, bytes], frozenset[tuple[str, str]]] = OrderedDict()
"""By the manifest's URL, size and seal: manifests do not change, and those of large models are long."""


def references_under(root: Storage, but: str | None = None) -> References:
    """Returns the files to which committed checkpoints in the directories under a root refer.

    Args:
        but: a directory that is not looked into.

    Raises:
        CheckpointError: a manifest that is there cannot be read: nobody knows then what may be removed.
    """
    referred: defaultdict[str, set[str]] = defaultdict(set)
    # Twice, for others may be at work: while one checkpoint is looked at that has not been committed yet, the one that
    # it took its references from may be removed before that is looked at in its turn. The second look sees the first.
    for _ in range(2):
        directories = [name for name in root.names() if name != but]
        for directory in directories:
            for beside, name in _references_of(root.child(directory)):
                referred[beside].add(name)
        if not directories:
            break  # nor was there anything to take references from
    return {directory: frozenset(names) for directory, names in referred.items()}


def referred_in(storage: Storage) -> frozenset[str]:
    """Returns the names of the files in a checkpoint's directory to which checkpoints beside it refer."""
    parent = storage.parent()
    if parent is None:
        return frozenset()
    root, directory = parent
    return references_under(root, but=directory).get(directory, frozenset())


def _references_of(checkpoint: Storage) -> frozenset[tuple[str, str]]:
    """Returns directory and name of each file elsewhere that a checkpoint refers to; none where there is none."""
    # What cannot be read by its permissions is not of this run; a manifest that is damaged gives nothing to anybody.
    with wrap_os_errors(f"read {checkpoint.url}/{MANIFEST_NAME}"), suppress(FileNotFoundError, PermissionError):
        nbytes = checkpoint.size(MANIFEST_NAME)
        if not SEAL_BYTES <= nbytes <= MANIFEST_LIMIT_BYTES:
            return frozenset()
        key = checkpoint.url, nbytes, checkpoint.read(MANIFEST_NAME, nbytes - SEAL_BYTES, nbytes)
        with _lock:
            if key in _known:
                _known.move_to_end(key)
                return _known[key]
        data = checkpoint.read(MANIFEST_NAME, 0, nbytes)
        try:
            references = references_in(data, checkpoint.url)
        except CorruptionError:
            return frozenset()
        with _lock:
            _known[key] = references
            while len(_known) > _MOST_KEPT:
                _known.popitem(last=False)
        return references
    return frozenset()
