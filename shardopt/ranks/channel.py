"""Rounds of agreement in the job's store.

Reports and decisions travel as JSON through the job's store (the one that `init_process_group` made), not through a
collective: when a peer is dead a collective fails without a name or hangs, while the store, which lives outside the
ranks, still shows who has not answered.

A store may outlive the job that filled it: torchrun restarts ranks on the same one. What is left there must not be
taken for an answer, so every job talks under a random session name, which its ranks agree on in their first round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardopt.errors import RankError
from shardopt.ranks.calls import Call
from shardopt.ranks.failures import describe, different_calls, merge, names_of, numbered_in_group
from shardopt.ranks.heartbeat import Heartbeat, PeerHeartbeats
from shardopt.ranks.parts import are_put, get, get_bytes, pack, put, set_bytes
from shardopt.ranks.process import Processes, this_process
from shardopt.world import Store, StoreError, world

_POLL_SECONDS = (0.0005, 0.01)  # first pause between two looks at the store, and the longest


class Silent(Exception):
    """A rank shows no sign of life."""


class Channel:
    """Rounds of `agree` in the store.

    Keys: `session`, `<session>/welcome/<rank>`, `beat/<rank>`; and in parts, as values may be large, reports
    `<session>/<round>/r<rank>/…`, answers `<session>/<round>/answer/…` and sections of them that only some ranks need,
    `<session>/<round>/section<number>/…`.

    Errors name ranks by their numbers in the job.

    Args:
        members: the numbers in the job, by rank.
        session: the name of a session that all ranks know already; "" where they have to agree on one.
        processes: those of the ranks, where they are known already.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        session: str = "",
        processes: Processes | None = None,
    ) -> None:
        self.store, self.rank, self.size = store, rank, len(members)
        self._members = members
        self.reported = False  # whether the others have all that they need of this rank in this round
        self._joined = bool(session)
        self._session = session or (world().random_name(8) if rank == 0 else "")
        self._round = 0
        self._spent: list[str] = []  # keys that all have read once all have reported in the next round
        self._heartbeat = Heartbeat(store, f"beat/{rank}")
        self._introduces = processes is None
        self.processes = Processes() if processes is None else processes

    def beating(self, deadline_seconds: float) -> AbstractContextManager[None]:
        """Shows life while this is open, in rounds and between them."""
        return self._heartbeat.beating(deadline_seconds)

    def begin_round(self, call: Call, deadline_seconds: float) -> None:
        self._round += 1
        self.reported = False
        self.call, self.deadline_seconds = call, deadline_seconds

    def decide(self, message: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Rank 0: gathers, decides, answers. An interrupt is raised once the others have the answer."""
        interrupt: BaseException | None = None
        try:
            answer = self._decided(message, decide)
            data = pack(self._introduced(answer))
        except StoreError:
            raise
        except BaseException as error:
            interrupt = None if isinstance(error, Exception) else error
            failure = numbered_in_group(describe(error), self._members)
            answer = {"error": merge(str(self.call), [(self._members[0], failure)], self.size)}
            data = pack(self._introduced(answer))
        self._spent += put(self.store, self._key("answer"), data)
        self.reported = True
        if interrupt is not None:
            raise interrupt
        return answer

    def follow(self, message: dict[str, Any]) -> dict[str, Any]:
        """Any other rank: reports, and waits for the answer."""
        extra = {"call": self.call.same}
        if not self._joined:
            extra["token"] = world().random_name(8)
        try:
            data = pack(self._introduced({**message, **extra}))
        except Exception as error:  # a report that is not JSON
            data = pack(self._introduced({"error": describe(error, self.size), **extra}))
        if self._joined:
            put(self.store, self._key(f"r{self.rank}"), data)
        else:
            self._join(data, extra["token"].encode())
        self.reported = True
        # Rank 0 waits up to a deadline for the others, and beats all the while.
        self._wait_for_rank_0(lambda: are_put(self.store, [self._key("answer")]))
        answer: dict[str, Any] = get(self.store, self._key("answer"))[0]
        self._meet(0, answer)
        return answer

    def put_section(self, number: int, data: bytes) -> None:
        """Rank 0, while it decides: posts what only some ranks need of the answer; not empty."""
        self._spent += put(self.store, self._key(f"section{number}"), data)

    def get_section(self, number: int) -> bytes:
        """Any rank that has the answer: reads a section of it, until the next round begins."""
        return get_bytes(self.store, self._key(f"section{number}"))[0]

    def _decided(self, message: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        reports, lost = self._gather()
        reports[0] = {**message, "call": self.call.same}
        ranks = sorted(reports)
        others = [(self._members[rank], reports[rank]["call"]) for rank in ranks]
        if any(call != self.call.same for _, call in others):
            return {"error": different_calls(others).to_json()}
        failures = [(self._members[rank], reports[rank]["error"]) for rank in ranks if "error" in reports[rank]]
        if lost:
            also = "".join(f" (on rank {rank}: {error['message']})" for rank, error in failures)
            return {"error": RankError(f"{self.call}: {lost}{also}").to_json(), "broken": True}
        if failures:
            return {"error": merge(str(self.call), failures, self.size)}
        return {"decision": decide([reports[rank]["report"] for rank in ranks])}

    def _gather(self) -> tuple[dict[int, dict[str, Any]], str]:
        """Gathers the reports of the other ranks, by rank; and an error text for those that were lost, "" for none.

        Reports are missing where ranks were lost, or where one is in another call, for which nobody has to wait.
        """
        if not self._joined:
            set_bytes(self.store, "session", self._session.encode())
        got: dict[int, tuple[dict[str, Any], list[str]]] = {}

        def are_there(ranks: Sequence[int]) -> bool:
            return are_put(self.store, [self._key(f"r{rank}") for rank in ranks])

        def read(ranks: Iterable[int]) -> bool:
            """Reads reports that are there; returns whether there is no need to wait for the others."""
            new = {rank: get(self.store, self._key(f"r{rank}")) for rank in ranks if rank not in got}
            got.update(new)
            # Not in the first round, in which each rank waits to be welcomed.
            return self._joined and any(report["call"] != self.call.same for report, _ in new.values())

        ranks = range(1, self.size)
        lost = self._wait(ranks, are_there, read)
        missing = [rank for rank in ranks if rank not in got]
        if not missing:
            for key in self._spent:
                self.store.delete_key(key)
            self._spent = []
        self._spent += [key for _, keys in got.values() for key in keys]
        self._spent += [f"{self._key(f'r{rank}')}/0" for rank in missing]
        for rank, (report, _) in got.items():
            self._meet(rank, report)
            if not self._joined:
                set_bytes(self.store, f"{self._session}/welcome/{rank}", report["token"].encode())
                self._spent.append(f"{self._session}/welcome/{rank}")
        self._joined = True
        return {rank: report for rank, (report, _) in got.items()}, lost

    def _join(self, data: bytes, token: bytes) -> None:
        """Reports in the session whose rank 0 welcomes this rank; the first one may be of a job that is gone."""

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
        self._joined = True

    def _wait_for_rank_0(self, there: Callable[[], bool]) -> None:
        lost = self._wait([0], lambda _: there(), lambda _: False)
        if lost:
            raise Silent(lost)

    def _wait(
        self,
        ranks: Sequence[int],
        are_there: Callable[[Sequence[int]], bool],
        read: Callable[[Iterable[int]], bool],
    ) -> str:
        """Waits for messages of `ranks`, and has them read; gives up once some will not come.

        Args:
            are_there: whether what is wanted of some ranks is there.
            read: gets ranks of which it is, again and again; where it is true, the others are waited for no longer.

        Returns:
            The error text for those that will not come; "" where all have come, or need not be waited for.
        """
        heartbeats = PeerHeartbeats(self.store, self.deadline_seconds)
        pause, longest = _POLL_SECONDS
        while not are_there(ranks):
            if heartbeats.due():
                missing = _missing(ranks, are_there)
                if read(rank for rank in ranks if rank not in missing):
                    return ""
                silent, ended = heartbeats.silent(sorted(missing)), self.processes.ended(missing)
                # Looked at once more: what a rank has put may be there although nothing more will ever come of it.
                missing = _missing(ranks, are_there) if silent or ended else set()
                if not missing.isdisjoint([*silent, *ended]):
                    read(rank for rank in ranks if rank not in missing)
                    return self._lost_text(missing.intersection(ended), missing.intersection(silent))
            world().sleep(pause)
            pause = min(2 * pause, longest)
        read(ranks)
        return ""

    def _introduced(self, message: dict[str, Any]) -> dict[str, Any]:
        """Adds what the others need to know the process of this rank, in the first round."""
        return {**message, "process": this_process()} if self._round == 1 and self._introduces else message

    def _meet(self, rank: int, message: dict[str, Any]) -> None:
        if "process" in message:
            self.processes.meet(rank, message["process"])

    def _lost_text(self, ended: set[int], silent: set[int]) -> str:
        """Returns the error text for ranks that will not come."""
        ended, silent = ({self._members[rank] for rank in ranks} for ranks in (ended, silent))
        texts = []
        if ended:
            texts.append(f"{names_of(sorted(ended))} died, or ended before this call")
        if silent - ended:
            texts.append(
                f"{names_of(sorted(silent - ended))} gave no sign of life for {self.deadline_seconds:g} s: dead, cut "
                "off, or not in this call (every rank of the group must make it)"
            )
        return "; ".join(texts)

    def _key(self, name: str) -> str:
        return f"{self._session}/{self._round}/{name}"


def _missing(ranks: Sequence[int], are_there: Callable[[Sequence[int]], bool]) -> set[int]:
    """Finds the ranks of which something is not there, by halves: of many ranks a few are late."""
    if are_there(ranks):
        return set()
    if len(ranks) == 1:
        return set(ranks)
    middle = len(ranks) // 2
    return _missing(ranks[:middle], are_there) | _missing(ranks[middle:], are_there)
