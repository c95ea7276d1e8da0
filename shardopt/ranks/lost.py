"""Finds ranks that do not answer, asks where they are, and words the error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardopt.ranks.connections.heartbeat import Silence
from shardopt.ranks.connections.join import STORE_SECONDS, read_record, record, unreached_key, within
from shardopt.ranks.connections.node import Node
from shardopt.ranks.failures import names_of
from shardopt.runtime.stores import StoreError
from shardopt.world import world

_ASK_SECONDS = 2.0
_MOST_ASKED = 4
_MOST_NAMED = 8  # of those for whom the store is asked why they do not come


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank that is no longer waited for.

    Args:
        member: its number in the job.
        ended: whether its connection has closed.
        unreached: who listens, who could not reach it, and where and why, if that is the reason.
        stack: where its main thread is; "" where the process did not say so when it was asked, None where it was not.
    """

    member: int
    ended: bool = False
    stack: str | None = None
    unreached: tuple[int, int, str] | None = None


def lost_text(lost: Sequence[Lost], silent_seconds: float) -> str:
    """Returns the error text for lost ranks."""
    ended = sorted(each.member for each in lost if each.ended)
    silent = sorted(each.member for each in lost if not each.ended and each.unreached is None)
    texts = []
    for each in lost:
        if each.unreached is not None:
            listens, comes, where = each.unreached
            texts.append(
                f"rank {listens} listens {where}, and rank {comes} could not reach it for {silent_seconds:g} s: name "
                "interfaces by which they reach each other in SHARDOPT_NETWORK"
            )
    if ended:
        texts.append(f"{names_of(ended)} died, or ended before this call")
    if silent:
        texts.append(
            f"{names_of(silent)} gave no sign of life for {silent_seconds:g} s: dead, cut "
            "off, or not in this call (every rank of the group must make it)"
        )
    stopped = sorted(each.member for each in lost if each.stack == "")
    if stopped:
        whose = "its process does" if len(stopped) == len(lost) == 1 else f"the processes of {names_of(stopped)} do"
        texts.append(f"{whose} not answer: stopped, or cut off")
    texts += [f"rank {each.member} is elsewhere:\n{each.stack}" for each in lost if each.stack]
    return "; ".join(texts)


class Witness:
    """Judges other ranks by what a node learns of them in one session, and by entries in the job's store."""

    def __init__(self, node: Node, session: bytes) -> None:
        self._node, self._session = node, session
        self._store_error: StoreError | None = None
        self._asks_store = False

    def silent(self, watch: Silence, missing: Sequence[int]) -> list[int]:
        """Returns those of the missing ranks that are silent, or their leader if that is silent; on rank 0.

        What leaders said of their members since the last look counts. Of a leader that says nothing any more, or has
        never come, the members are not known: one that comes late is not to find its members given up in its place, so
        their time begins with it.
        """
        hub, tree = self._node.hub, self._node.tree
        with self._node.changed:
            signs = hub.session(self._session).signs
            counts: dict[int, int] = {}
            for rank in missing:
                leader = tree.block_of(rank)[0]
                if leader not in (0, rank):
                    counts[-leader] = hub.links[leader].heard if leader in hub.links else 0
                if leader in (0, rank) or leader in hub.links:
                    counts[rank] = signs.get(rank, 0)
        silent = watch.silent(counts)
        cut = {-each for each in silent if each < 0}
        return sorted(cut.union(each for each in silent if each > 0 and tree.block_of(each)[0] not in cut))

    def ask(self, number: int, ranks: Sequence[int], seconds: float) -> dict[int, str]:
        """Asks some ranks for their stacks; returns those of a few that were connected, "" for no answer.

        Who has ended is not waited for, and nobody longer than so many seconds.
        """
        hub = self._node.hub
        end = world().monotonic() + min(_ASK_SECONDS, seconds)
        with self._node.changed:
            asked = [rank for rank in dict.fromkeys(ranks) if hub.answered or rank in hub.links][:_MOST_ASKED]
            keys = [(self._session, number, rank) for rank in asked]
            for late in [key for key in hub.here if key[0] == self._session]:
                del hub.here[late]
            for key in keys:
                hub.ask_where(*key)
            self._node.wake()
            while any(key not in hub.here and not self._has_ended(key[2]) for key in keys):
                left = end - world().monotonic()
                if left <= 0 or hub.above is not None:
                    break
                self._node.changed.wait(left)
            return {key[2]: hub.here.pop(key, "") for key in keys}

    def _has_ended(self, rank: int) -> bool:
        return not self._node.hub.ended.isdisjoint((rank, self._node.tree.block_of(rank)[0]))

    def unreached(self, silent: Sequence[int], members: Sequence[int]) -> dict[int, tuple[int, int, str]]:
        """Returns the silent ranks that could not reach the one above, from the store; see `Lost`. On rank 0."""
        session, store, tree = self._node.session, self._node.store, self._node.tree
        if session is None:
            return {}

        def ask() -> dict[int, tuple[int, int, str]]:
            said: dict[int, tuple[int, int, str]] = {}
            for rank in silent[:_MOST_NAMED]:
                key, leader = unreached_key(session.name, rank), tree.block_of(rank)[0]
                if store.check([key]):
                    above = 0 if leader == rank else leader
                    said[rank] = members[above], members[rank], store.get(key).decode()
            return said

        with suppress(TimeoutError, StoreError):
            return within(STORE_SECONDS, ask)
        return {}

    def record(self, error: dict[str, Any]) -> None:
        """Writes down a failure for ranks that no message reaches."""
        session = self._node.session
        if session is not None:
            with suppress(TimeoutError, StoreError):
                within(STORE_SECONDS, lambda: record(self._node.store, session.name, self._session, error))

    def recorded(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Returns the recorded answer for ranks that no message reaches, if any; waits for a limited time."""
        with suppress(TimeoutError):
            error = within(min(STORE_SECONDS, seconds), lambda: read_record(self._node.store, name, self._session))
            return None if error is None else {"error": error, "broken": True}
        return None

    def look_at_store(self) -> None:
        """Checks in a thread of its own whether the job's store is lost; raises StoreError at a later call."""
        if self._store_error is not None:
            raise self._store_error
        if self._asks_store:
            return
        self._asks_store = True

        def ask() -> None:
            try:
                self._node.store.check(["session"])
                self._asks_store = False
            except StoreError as error:
                self._store_error = error

        try:
            world().thread(ask, "shardopt-store", daemon=True).start()
        except RuntimeError:  # no thread can be had now: a later look asks
            self._asks_store = False
