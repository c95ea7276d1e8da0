"""Rounds of agreement: what the threads of the program do in them, over the connections of a `Node`.

Reports and decisions travel as JSON over connections of their own, not through a collective: when a peer is dead a
collective fails without a name or hangs, while here it is known who has not answered, and who is connected.
"""

from __future__ import annotations

import hmac
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from shardopt.errors import RankError
from shardopt.ranks.calls import Call
from shardopt.ranks.connections.address import network_of
from shardopt.ranks.connections.frames import MAIN
from shardopt.ranks.connections.heartbeat import DEADLINE_SECONDS, Silence
from shardopt.ranks.connections.join import (
    Entry,
    leader_key,
    read_record,
    record,
    unreached_key,
    withdraw,
    within,
)
from shardopt.ranks.connections.message_hub import Share
from shardopt.ranks.connections.node import Node
from shardopt.ranks.failures import describe, different_calls, merge, names_of, numbered_in_group
from shardopt.ranks.files.client import FileClient
from shardopt.ranks.files.server import FileServer, OpenFile
from shardopt.ranks.lost import Lost, Witness, lost_text
from shardopt.world import Store, StoreError, world

T = TypeVar("T")
Decide = Callable[[list[Any]], tuple[Any, Sequence[Share]]]
"""Gets the reports of all ranks; returns the decision, and what only some ranks get of it."""

_TOGETHER_SECONDS = 0.1
_STORE_SECONDS = 5.0  # for what the store is asked only once something has failed
_LONGEST_PAUSE_SECONDS = 1.0
_MOST_NAMED = 8  # of those for whom the store is asked why they do not come
_RECORD_SECONDS = 3.0  # in which rank 0 asks where those are that it has given up, and writes it down


class Silent(Exception):
    """A rank shows no sign of life."""


class _CutOff(Exception):
    """The way to rank 0 has ended, with the rank that is its argument."""


class Channel:
    """Rounds of `agree` in one session of the ranks of a tree.

    Errors name ranks by their numbers in the job.

    Args:
        members: the numbers in the job, by rank.
        beside: another channel of the same ranks, whose connections this one uses too.
        session: the name of this one then, as 16 hexadecimal digits.
        is_last: whether no other ranks will ever meet at this store.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        beside: Channel | None = None,
        session: str = "",
        is_last: bool = False,
    ) -> None:
        self.store, self.rank, self.size = store, rank, len(members)
        self.reported = False  # whether the others have all that they need of this rank in this round
        self.deadline_seconds = DEADLINE_SECONDS  # of the round that is under way
        self.broken: str | None = None  # why these ranks are out of step, once they are
        self._members, self._is_last = members, is_last
        self._connections: _Connections = (
            _Connections(Node(store, rank, len(members))) if beside is None else beside._connections
        )
        self.node = self._connections.node
        self._session = bytes.fromhex(session) or MAIN
        weakref.finalize(self, _forget, self.node, self._session)
        self._round = 0
        self._witness = Witness(self.node, self._session)
        self._store_error: StoreError | None = None
        self._asks_store = False

    @contextmanager
    def beating(self, seconds: float) -> Iterator[None]:
        """Shows life while this is open, in rounds and between them. Connects with the others where that is not done.

        Raises:
            RankError: this process can have no thread or descriptor more.
        """
        beating = self.node.beating(self._session, seconds)
        try:
            beating.__enter__()
        except RuntimeError as error:
            raise RankError(f"ranks cannot communicate: {error}") from error
        try:
            yield
        finally:
            beating.__exit__(None, None, None)

    def file_server(self, open_file: OpenFile) -> FileServer:
        """As of `Ranks`."""
        return FileServer(self._file_session(()), self.rank, network_of(self.store), open_file)

    def file_client(self, rank: int, at: Sequence[tuple[str, int]]) -> FileClient:
        """As of `Ranks`."""
        return FileClient(self._file_session(at), self.rank, rank)

    def _file_session(self, at: Sequence[tuple[str, int]]) -> Entry:
        """Returns a session with a key of its own, so that no proof for files is one for rounds."""
        session = self.node.session
        assert session is not None  # known since the first round
        key = hmac.new(bytes.fromhex(session.key), b"files", "sha256").hexdigest()
        return Entry(session.name, key, tuple((host, port) for host, port in at))

    def begin_round(self, call: Call, deadline_seconds: float) -> None:
        self._round += 1
        self.reported = False
        self.call, self.deadline_seconds = call, deadline_seconds

    def decide(self, message: dict[str, Any], decide: Decide) -> dict[str, Any]:
        """Rank 0: gathers, decides, answers. An interrupt is raised once the others have the answer."""
        interrupt: BaseException | None = None
        shares: Sequence[Share] = ()
        try:
            answer, shares = self._decided(message, decide)
            data = pack(answer)
        except StoreError as error:
            lost = RankError(f"{self.call}: the job's store is lost: {error}")
            answer = {"error": lost.to_json(), "broken": True}
            data = pack(answer)
        except BaseException as error:
            interrupt = None if isinstance(error, Exception) else error
            failure = numbered_in_group(describe(error), self._members)
            answer = {"error": merge(str(self.call), [(self._members[0], failure)], self.size)}
            data = pack(answer)
        with self.node.changed:
            self.node.hub.answer(self._session, self._round, data, shares)
            if answer.get("broken") and self._session == MAIN:
                self.node.refuse()
            self.node.wake()
        self.reported = True
        self.node.wait_until_handed_over(self.deadline_seconds)
        if answer.get("broken"):
            self._record(answer["error"])
        if interrupt is not None:
            raise interrupt
        return answer

    def follow(self, message: dict[str, Any]) -> dict[str, Any]:
        """Any other rank: reports, and waits for the answer."""
        extra = {"call": self.call.same}
        try:
            data = pack({**message, **extra})
        except Exception as error:  # a report that is not JSON
            data = pack({"error": describe(error, self.size), **extra})
        with self.node.changed:
            self.node.hub.report(self._session, self._round, data)
            self.node.wake()
        self.reported = True
        # Rank 0 waits up to a deadline for the others, and shows life all the while.
        try:
            answer = self._wait(self._take_answer, self._look_for_rank_0)
        except _CutOff as cut:
            (above,) = cut.args
            answer = self._after_cut(above, Lost(self._members[above], ended=True))
        self.node.wait_until_handed_over(self.deadline_seconds)
        return answer

    def take_section(self) -> bytes:
        """Any rank but 0 that has the answer: returns the section of it that this rank got; b"" for none."""
        with self.node.changed:
            session = self.node.hub.session(self._session)
            (number, section), session.section = session.section, (0, b"")
        return section if number == self._round else b""

    def halts_at(self, place: int, wanted: bool) -> int | None:
        """Any rank, before it passes a place: where all stop; None where that is not known, and this one is passed.

        Waits only once some rank wants all to stop.

        Args:
            wanted: whether this rank does.
        """
        hub = self.node.hub

        def look(watch: Silence) -> None:
            if watch.silent({0: 0}):
                with self.node.changed:
                    silent = sorted(self._members[rank] for rank in halting.waits_for)
                who = f"{names_of(silent)} did" if silent else "the others did"
                raise Silent(f"{who} not say for {self.deadline_seconds:g} s how far they have come")

        with self.node.changed:
            # Under the lock, as all else: two threads that begin a session at once would have one each.
            halting = hub.session(self._session).halting
            if not wanted and halting.passes(place):
                return halting.at
            if wanted:
                hub.halt(self._session)
                self.node.wake()
        try:
            at = self._wait(lambda: halting.at, look)
        except _CutOff as cut:
            raise Silent(lost_text([Lost(self._members[cut.args[0]], ended=True)], 0.0)) from None
        self.node.wait_until_handed_over(
            self.deadline_seconds
        )  # this process may end now, and others wait for this yet
        return at

    # Rank 0.

    def _decided(self, message: dict[str, Any], decide: Decide) -> tuple[dict[str, Any], Sequence[Share]]:
        reports, lost = self._gather()
        reports[0] = {**message, "call": self.call.same}
        ranks = sorted(reports)
        others = [(self._members[rank], reports[rank]["call"]) for rank in ranks]
        if any(call != self.call.same for _, call in others):
            return {"error": different_calls(others).to_json()}, ()
        failures = [(self._members[rank], reports[rank]["error"]) for rank in ranks if "error" in reports[rank]]
        if lost:
            also = "".join(f" (on rank {rank}: {error['message']})" for rank, error in failures)
            return {"error": RankError(f"{self.call}: {lost}{also}").to_json(), "broken": True}, ()
        if failures:
            return {"error": merge(str(self.call), failures, self.size)}, ()
        decision, shares = decide([reports[rank]["report"] for rank in ranks])
        return {"decision": decision}, shares

    def _gather(self) -> tuple[dict[int, dict[str, Any]], str]:
        """Gathers the reports of the other ranks, by rank; and an error text for those that were lost, "" for none.

        Reports are missing where ranks were lost, or where one is in another call, for which nobody has to wait.
        """
        hub, first = self.node.hub, self._round == 1 and self._session == MAIN
        reports: dict[int, dict[str, Any]] = {}
        others = range(1, self.size)

        def read() -> bool:
            """Reads reports that have come; returns whether one is of another call."""
            with self.node.changed:
                came = hub.session(self._session).gathering(self._round).take()
            differs = False
            # All at once: where every rank has a report of its own, to begin to decode takes longer than to decode.
            decoded = unpack(b"[" + b",".join(data for data, _ in came) + b"]")
            for report, (_, ranks) in zip(decoded, came, strict=True):
                differs |= report["call"] != self.call.same
                reports.update(dict.fromkeys(ranks, report))
            return differs

        def behind(rank: int) -> Sequence[int]:
            """Returns the ranks that can report no more without this one: a leader's own report may have come first."""
            block = hub.tree.block_of(rank)
            return block if block[0] == rank else (rank,)

        def have() -> str | None:
            reported = hub.session(self._session).gathering(self._round).reported
            if len(reported) == len(others):
                return ""
            ended = sorted(rank for rank in hub.ended if not reported.issuperset(behind(rank)))
            return lost_text([Lost(self._members[rank], ended=True) for rank in ended], 0.0) if ended else None

        def look(watch: Silence) -> str | None:
            # Not in the first round, for whose answer all must be connected.
            if read() and not first:
                return ""
            with self.node.changed:
                missing = hub.session(self._session).missing(self._round, others)
                hub.ask(self._session, self._round, missing)
                self.node.wake()
            if silent := self._witness.silent(watch, missing):
                found = self._witness.ask(self._round, silent, self.deadline_seconds)
                with self.node.changed:  # looked at once more: some may have come meanwhile
                    session = hub.session(self._session)
                    silent = [rank for rank in silent if session.missing(self._round, behind(rank))]
                if silent:
                    unreached = self._unreached(silent) if first else {}
                    lost = [
                        Lost(self._members[rank], stack=found.get(rank), unreached=unreached.get(rank))
                        for rank in silent
                    ]
                    return lost_text(lost, self.deadline_seconds)
            self._ask_store()
            return None

        lost = self._wait(have, look)
        with self.node.changed:
            others_end = bool(have())
        if others_end:  # those that a launcher or a host ends together are named together
            world().sleep(_TOGETHER_SECONDS)
            with self.node.changed:
                lost = have() or lost
        read()
        session = self.node.session
        if first and not lost and session is not None:
            tree = hub.tree
            keys = [leader_key(session.name, rank) for rank in tree.children if rank not in tree.members]
            with suppress(TimeoutError):
                within(_STORE_SECONDS, lambda: withdraw(self.store, keys, session, self._is_last))
        return reports, lost

    def _unreached(self, silent: Sequence[int]) -> dict[int, tuple[int, int, str]]:
        """Returns who of the silent could not reach the one above it, as it says in the store."""
        session, tree = self.node.session, self.node.tree
        if session is None:
            return {}

        def ask() -> dict[int, tuple[int, int, str]]:
            said: dict[int, tuple[int, int, str]] = {}
            for rank in silent[:_MOST_NAMED]:
                key, leader = unreached_key(session.name, rank), tree.block_of(rank)[0]
                if self.store.check([key]):
                    above = 0 if leader == rank else leader
                    said[rank] = self._members[above], self._members[rank], self.store.get(key).decode()
            return said

        with suppress(TimeoutError, StoreError):
            return within(_STORE_SECONDS, ask)
        return {}

    def _record(self, error: dict[str, Any]) -> None:
        """Writes down a failure for those ranks that cannot be told."""
        session = self.node.session
        if session is not None:
            with suppress(TimeoutError, StoreError):
                within(_STORE_SECONDS, lambda: record(self.store, session.name, self._session, error))

    def _ask_store(self) -> None:
        """Finds out in a thread of its own whether the job's store is lost; raises StoreError some looks later."""
        if self._store_error is not None:
            raise self._store_error
        if self._asks_store:
            return
        self._asks_store = True

        def ask() -> None:
            try:
                self.store.check(["session"])
                self._asks_store = False
            except StoreError as error:
                self._store_error = error

        world().thread(ask, "shardopt-store", daemon=True).start()

    # Any other rank.

    def _take_answer(self) -> dict[str, Any] | None:
        """With the lock held: returns the answer, where it has come."""
        session = self.node.hub.session(self._session)
        for number in [number for number in session.answers if number < self._round]:
            del session.answers[number]  # of a round in which this rank was interrupted
        answer = session.answers.pop(self._round, None)
        return None if answer is None else dict(unpack(answer))

    def _look_for_rank_0(self, watch: Silence) -> dict[str, Any] | None:
        node, hub = self.node, self.node.hub
        with node.changed:
            signs = hub.session(self._session).signs.get(0, 0)
            left = node.left
        if left is not None and (answer := self._recorded(left.name)):
            return answer  # rank 0 had taken this rank, and has found another dead
        if not watch.silent({0: signs}):
            return None
        session = node.session if node.tree.leader or not hub.answered else None
        if session is not None and (answer := self._recorded(session.name)):
            return answer
        if not hub.answered:
            lost = Lost(self._members[node.reached], ended=node.was_taken)
            if node.unreached:
                lost = replace(lost, unreached=(lost.member, self._members[self.rank], node.unreached))
            if node.reached:
                return self._after_cut(node.reached, lost)
            if node.session is not None and node.tree.members:
                self._record(RankError(f"{self.call}: {lost_text([lost], self.deadline_seconds)}").to_json())
            return self._give_up(lost)
        leader = node.tree.leader or 0
        found = self._witness.ask(self._round, [0, leader], self.deadline_seconds)
        with node.changed:
            answer = self._take_answer()
            if answer is not None:
                return answer
            self._check_node()  # it may have ended meanwhile, which is more than silence
        if leader and not found[leader]:
            return self._after_cut(leader, Lost(self._members[leader], stack=""))
        return self._give_up(Lost(self._members[0], stack=found[0]))

    def _give_up(self, lost: Lost) -> dict[str, Any]:
        """Returns the answer if it has come after all; else raises Silent."""
        with self.node.changed:
            answer = self._take_answer()
            if not self.node.hub.answered:
                self.node.stop()  # not to report after all, in a round that this rank does not wait for
        if answer is not None:
            return answer
        raise Silent(lost_text([lost], self.deadline_seconds))

    def _recorded(self, name: str) -> dict[str, Any] | None:
        """Returns the answer to all who could not be told, where there is one."""
        with suppress(TimeoutError):
            seconds = min(_STORE_SECONDS, self.deadline_seconds)
            error = within(seconds, lambda: read_record(self.store, name, self._session))
            return None if error is None else {"error": error, "broken": True}
        return None

    def _after_cut(self, above: int, lost: Lost) -> dict[str, Any]:
        """Returns the answer, where the rank is known by whose end or silence this one was cut off.

        Where that is a leader, rank 0 names it to all others, if it is in this call, and writes it down for this one.
        """
        watch = Silence(self.deadline_seconds + _RECORD_SECONDS)
        pause = 0.01
        while above and self.node.session is not None:
            if answer := self._recorded(self.node.session.name):
                return answer
            world().sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if watch.due() and watch.silent({0: 0}):
                break
        return self._give_up(lost)

    def _wait(self, have: Callable[[], T | None], look: Callable[[Silence], T | None]) -> T:
        """Waits until `have` or `look` returns something, and returns that.

        Args:
            have: with the lock held, whenever something has come.
            look: again and again after a while; gets what counts signs of life.
        """
        watch = Silence(self.deadline_seconds)
        while True:
            with self.node.changed:
                found = have()
                if found is None:
                    self._check_node()
                    self.node.changed.wait(max(0.0, watch.left()))
                    found = have()
            if found is None and watch.due():
                found = look(watch)
            if found is not None:
                return found

    def _check_node(self) -> None:
        above, failure = self.node.hub.above, self.node.failure
        if above is not None:
            raise _CutOff(above)
        if failure is not None:
            raise failure if isinstance(failure, StoreError) else Silent(f"this rank cannot communicate: {failure}")


def pack(value: Any) -> bytes:
    """Encodes JSON. Raises TypeError and ValueError."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """Decodes what `pack` encoded."""
    return json.loads(data)


class _Connections:
    """Keeps a node going for as long as any channel uses it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        weakref.finalize(self, node.stop)


def _forget(node: Node, session: bytes) -> None:
    """Drops a session whose channel is gone; wherever that is noticed, so without a lock."""
    node.forgotten.append(session)
