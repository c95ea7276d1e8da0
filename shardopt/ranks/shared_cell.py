"""A cell in the job's store: a text that all ranks read and replace, by compare-and-set."""

from __future__ import annotations

from shardopt.errors import RankError
from shardopt.world import Store, StoreError


class SharedCell:
    """A text in the job's store, replaced by compare-and-set. See `Ranks.shared_cell`."""

    def __init__(self, store: Store, key: str, first: str | None = None) -> None:
        self._store, self._key = store, key
        if first is not None:
            store.set(key, first)

    def replace(self, expected: str, wanted: str) -> str:
        """Sets the text to `wanted` if it is `expected`; returns what it is then. Local: one request to the store.

        Raises:
            RankError: the store is lost.
        """
        try:
            return self._store.compare_set(self._key, expected, wanted).decode()
        except StoreError as error:
            raise RankError(f"the job's store is lost: {error}") from error
