"""The key of a session where the job's store is a file, which everybody may read: it lies in another one beside it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from shardopt.world import Store, world


def has_secrets(store: Store) -> bool:
    """Whether what others must not read lies beside the store, and not in it."""
    return world().store_file(store) is not None


def keep_secret(store: Store, name: str, key: str) -> None:
    """Writes the key of a session that has just begun, for this user alone, where it lies beside the store.

    Raises:
        OSError: that cannot be done there.
    """
    path = _path(store, name)
    if path is None:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            os.unlink(path)
            raise PermissionError(
                f"{path}: this file system lets others read what is made for its owner alone; use a store that is "
                "no file there (init_method env:// or tcp://)"
            )
        file.write(key)


def read_secret(store: Store, name: str) -> str | None:
    """Reads the key of a session; None where it is over by now. Raises OSError: it is another user's."""
    path = _path(store, name)
    if path is None:
        return ""
    try:
        with open(path) as file:
            return file.read(1 << 10)
    except FileNotFoundError:
        return None


def forget_secret(store: Store, name: str) -> None:
    """Removes the key of a session that all have joined, where it lies beside the store."""
    path = _path(store, name)
    if path is not None:
        with suppress(OSError):
            os.unlink(path)


def _path(store: Store, name: str) -> str | None:
    file = world().store_file(store)
    return None if file is None else f"{file}.{name}.key"
