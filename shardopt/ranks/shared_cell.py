"""A word that all ranks see, and that any of them may replace."""

from __future__ import annotations

from shardopt.errors import RankError
from shardopt.world import Store, StoreError


class SharedCell:
    """A word in the job's store, which is replaced in one step. See `Ranks.shared_cell`."""

    def __init__(self, store: Store, key: str, first: str | None = None) -> None:
        self._store, self._key = store, key
        if first is not None:
            store.set(key, first)

    def replace(self, expected: str, wanted: str) -> str:
        """Makes the word `wanted` if it is `expected`; returns what it is then. Local: one question to the store.

        Raises:
            RankError: the store is lost.
        """
        try:
            return self._store.compare_set(self._key, expected, wanted).decode()
        except StoreError as error:
            raise RankError(f"the job's store is lost: {error}") from error
