"""torch.distributed's stores, by which ranks find each other; for the real world."""

from __future__ import annotations

from torch.distributed import (  # type: ignore[attr-defined]  # from a compiled module
    DistError,
    FileStore,
    HashStore,
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
)

__all__ = ["Store", "StoreError", "file_of", "host_of", "of_group"]

StoreError = DistError
"""The error that a store raises if it cannot be reached."""


def of_group(group: ProcessGroup, prefix: str) -> Store:
    """Returns the store of a process group, with a prefix for all keys."""
    return PrefixStore(prefix, group.get_group_store())


def host_of(store: Store) -> str | None:
    """Returns the host of a store as its clients name it; "" if it is this process; None for a file."""
    store = _without_prefixes(store)
    if isinstance(store, HashStore):
        return ""
    return str(store.host) if isinstance(store, TCPStore) else None


def file_of(store: Store) -> str | None:
    """Returns the path of a store that is a file; None for any other."""
    store = _without_prefixes(store)
    return str(store.path) if isinstance(store, FileStore) else None  # type: ignore[attr-defined]  # of a compiled class


def _without_prefixes(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
