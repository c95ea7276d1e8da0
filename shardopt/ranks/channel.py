"""Rounds of agreement in the job's store.

Reports and decisions travel as JSON through the job's store (the one that `init_process_group` made), not through a
collective: when a peer is dead a collective fails without a name or hangs, while the store, which lives outside the
ranks, still tells who has not answered.

A store may outlive the job that filled it: torchrun restarts ranks on the same one. What is left there must not be
taken for an answer, so every job talks under a random session name, which its ranks agree on in their first round.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # from a compiled module

from shardopt.errors import RankError
from shardopt.ranks.failures import describe, merge, names_of
from shardopt.ranks.life import Heartbeat, SignsOfLife
from shardopt.ranks.parts import are_put, get, pack, put, set_bytes

_POLL_SECONDS = (0.0005, 0.01)  # first pause between two looks at the store, and the longest


class Silent(Exception):
    """Some rank shows no sign of life."""


class Channel:
    """Rounds of `agree` in the store.

    Keys: `session`, `<session>/welcome/<rank>`, `beat/<rank>`; and in parts, as values may be large, the reports
    `<session>/<round>/r<rank>/…` and the answers `<session>/<round>/answer/…`.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.told = False  # whether the others have all that they need of this rank in this round
        self._session = secrets.token_hex(8) if rank == 0 else ""
        self._round = 0
        self._spent: list[str] = []  # keys that all have read once all have reported in the next round

    def round(self, what: str, deadline_seconds: float) -> Heartbeat:
        """Begins a round; within the context that this gives, the rank beats."""
        self._round += 1
        self.told = False
        self.what, self.deadline_seconds = what, deadline_seconds
        return Heartbeat(self.store, f"beat/{self.rank}", deadline_seconds / 5)

    def decide(self, mine: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Rank 0: gathers, decides, answers. What interrupts it is raised when the others have been told."""
        interrupt: BaseException | None = None
        try:
            answer = self._decided(mine, decide)
            data = pack(answer)
        except DistError:
            raise
        except BaseException as error:
            interrupt = None if isinstance(error, Exception) else error
            answer = {"error": merge(self.what, [(0, describe(error))], self.size)}
            data = pack(answer)
        self._spent += put(self.store, self._key("answer"), data)
        self.told = True
        if interrupt is not None:
            raise interrupt
        return answer

    def follow(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Any other rank: reports, and waits for the answer."""
        token = secrets.token_hex(8)
        try:
            data = pack({**mine, "token": token})
        except Exception as error:  # a report that is not JSON
            data = pack({"error": describe(error), "token": token})
        if self._round == 1:
            self._join(data, token.encode())
        else:
            put(self.store, self._key(f"r{self.rank}"), data)
        self.told = True
        # Rank 0 waits up to a deadline for the others, and beats all the while.
        self._wait_for_rank_0(lambda: are_put(self.store, [self._key("answer")]))
        answer: dict[str, Any] = get(self.store, self._key("answer"))[0]
        return answer

    def _decided(self, mine: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        heard, silent = self._gather()
        heard[0] = mine
        failures = [(rank, heard[rank]["error"]) for rank in sorted(heard) if "error" in heard[rank]]
        if silent:
            others = "".join(f" (on rank {rank}: {error['message']})" for rank, error in failures)
            return {"error": RankError(f"{self.what}: {self._silence(silent)}{others}").to_json(), "broken": True}
        if failures:
            return {"error": merge(self.what, failures, self.size)}
        return {"decision": decide([heard[rank]["report"] for rank in range(self.size)])}

    def _gather(self) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """What the other ranks report, by rank; and the silent ranks, for which others may be missing too."""
        if self._round == 1:
            set_bytes(self.store, "session", self._session.encode())
        ranks = range(1, self.size)
        silent = self._wait(ranks, lambda some: are_put(self.store, [self._key(f"r{rank}") for rank in some]))
        arrived = [rank for rank in ranks if not silent or are_put(self.store, [self._key(f"r{rank}")])]
        got = {rank: get(self.store, self._key(f"r{rank}")) for rank in arrived}
        if not silent:
            for key in self._spent:
                self.store.delete_key(key)
            self._spent = [key for _, keys in got.values() for key in keys]
        if self._round == 1:
            for rank, (report, _) in got.items():
                set_bytes(self.store, f"{self._session}/welcome/{rank}", report["token"].encode())
                self._spent.append(f"{self._session}/welcome/{rank}")
        return {rank: report for rank, (report, _) in got.items()}, silent

    def _join(self, data: bytes, token: bytes) -> None:
        """Reports in the session whose rank 0 welcomes this rank; at first it may see one of ranks that are gone."""

        def is_welcome() -> bool:
            welcome = f"{self._session}/welcome/{self.rank}"
            return self.store.check([welcome]) and self.store.get(welcome) == token

        def welcomed() -> bool:
            session = self.store.get("session").decode() if self.store.check(["session"]) else ""
            # Rank 0 may have welcomed this rank, and opened its next session, since the last look: asked again after
            # the session was read, the welcome of the session before is there, and this round belongs to that one.
            if session != self._session and not is_welcome():
                self._session = session
                put(self.store, self._key(f"r{self.rank}"), data)
            return is_welcome()

        self._wait_for_rank_0(welcomed)

    def _wait_for_rank_0(self, there: Callable[[], bool]) -> None:
        silent = self._wait([0], lambda _: there())
        if silent:
            raise Silent(self._silence(silent))

    def _wait(self, ranks: Sequence[int], there: Callable[[Sequence[int]], bool]) -> list[int]:
        """Waits until what is wanted of `ranks` is there; gives up once some whose part is not there are silent."""
        life = SignsOfLife(self.store, self.deadline_seconds)
        pause, longest = _POLL_SECONDS
        while not there(ranks):
            silent = [rank for rank in life.silent(ranks) if not there([rank])] if life.due() else []
            if silent:
                return silent
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return []

    def _silence(self, silent: Sequence[int]) -> str:
        names = names_of(silent)
        return (
            f"{names} gave no sign of life for {self.deadline_seconds:g} s: dead, cut off, "
            "or not in this call (every rank of the group must make it)"
        )

    def _key(self, name: str) -> str:
        return f"{self._session}/{self._round}/{name}"
