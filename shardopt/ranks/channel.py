"""Rounds of agreement, from the program's threads, over the connections of a `Node`.

Reports and decisions travel as JSON over connections of their own, not through a collective: when a peer is dead a
collective fails without a name or hangs, while here it is known who has not answered, and who is connected.
"""

from __future__ import annotations

import hmac
import json
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from typing import Any, TypeVar

from shardopt.errors import RankError
from shardopt.ranks.calls import Call
from shardopt.ranks.connections.frames import MAIN, require_sendable
from shardopt.ranks.connections.heartbeat import DEADLINE_SECONDS, Silence
from shardopt.ranks.connections.join import STORE_SECONDS, Entry, leader_key, withdraw, within
from shardopt.ranks.connections.message_hub import Share
from shardopt.ranks.connections.node import Node
from shardopt.ranks.failures import BY_VERSION, describe, different_calls, merge, names_of, numbered_in_group
from shardopt.ranks.lost import Lost, Witness, lost_text
from shardopt.runtime.stores import Store, StoreError
from shardopt.version import __version__
from shardopt.world import world

T = TypeVar("T")
Decide = Callable[[list[Any]], tuple[Any, Sequence[Share]]]
"""Takes the reports of all ranks; returns the decision, and the sections that only some ranks get."""

_log = logging.getLogger("shardopt")
_TOGETHER_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_RECORD_SECONDS = 3.0  # in which rank 0 asks where those are that it has given up, and writes it down


class Silent(Exception):
    """A rank shows no sign of life."""


class CutOff(Exception):
    """The connection towards rank 0 has ended, at the rank above this one."""

    def __init__(self, above: int) -> None:
        super().__init__(above)
        self.above = above


class Channel:
    """Rounds of `agree` in one session, between the ranks of a tree.

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
        self.section = b""  # that this rank got with the last answer, which it has taken
        self.broken: str | None = None  # why these ranks are out of step, once they are
        self.members, self._is_last = members, is_last
        self._connections: _Connections = (
            _Connections(Node(store, rank, len(members))) if beside is None else beside._connections
        )
        self.node = self._connections.node
        self.session = bytes.fromhex(session) or MAIN
        weakref.finalize(self, _forget, self.node, self.session)
        self._round = 0
        self._has_told_of_wait = False
        self._witness = Witness(self.node, self.session)

    @property
    def session_of_files(self) -> Entry:
        """Returns a session with a key of its own, so that no proof for files is valid for rounds."""
        session = self.node.session
        assert session is not None  # known since the first round
        return Entry(session.name, hmac.new(bytes.fromhex(session.key), b"files", "sha256").hexdigest(), ())

    def begin_round(self, call: Call, deadline_seconds: float) -> None:
        self.reported = False  # first: who is interrupted between these lines owes the others a report
        self._round += 1
        if self._round == 1 and self.session == MAIN:  # nothing else is to be compared before
            call = replace(call, same=f"{call.same}{BY_VERSION}{__version__}")
        self.call, self.deadline_seconds = call, deadline_seconds

    def decide(self, report: Any, failure: dict[str, Any] | None, decide: Decide) -> dict[str, Any]:
        """Gathers, decides and answers, on rank 0. Raises an interrupt only after the others have the answer."""
        interrupt: BaseException | None = None
        shares: Sequence[Share] = ()
        try:
            answer, shares = self._decided(report, failure, decide)
            data = pack(answer)
            require_sendable([data, *(section for section, _ in shares)])
        except StoreError as error:
            lost = RankError(f"{self.call}: the job's store is lost: {error}")
            answer = {"error": lost.to_json(), "broken": True}
            data = pack(answer)
        except BaseException as error:
            interrupt = None if isinstance(error, Exception) else error
            failure = numbered_in_group(describe(error), self.members)
            answer = {"error": merge(str(self.call), [(self.members[0], failure)], self.size)}
            data, shares = pack(answer), ()
        with self.node.changed:
            self.node.hub.answer(self.session, self._round, data, shares)
            if answer.get("broken") and self.session == MAIN:
                self.node.peers.refuses = True  # the session has ended
            self.node.wake()
        self.reported = True
        self.node.wait_until_handed_over(self.deadline_seconds)
        if answer.get("broken"):
            self._witness.record(answer["error"])
        if interrupt is not None:
            raise interrupt
        return answer

    def follow(self, report: Any, failure: dict[str, Any] | None) -> dict[str, Any]:
        """Reports, or says why this rank's work failed, and waits for the answer, on any other rank."""
        try:
            data = pack([self.call.same, failure], report)
            require_sendable([data])
        except Exception as error:  # a report that is not JSON
            data = pack([self.call.same, describe(error, self.size)], None)
        with self.node.changed:
            self.node.hub.report(self.session, self._round, data)
            self.node.wake()
        self.reported = True
        # Rank 0 waits up to a deadline for the others, and shows life all the while.
        try:
            answer = self.wait(self._take_answer, self._look_for_rank_0)
        except CutOff as cut:
            answer = self._after_cut(cut.above, Lost(self.members[cut.above], ended=True))
        self.node.wait_until_handed_over(self.deadline_seconds)
        return answer

    # Rank 0.

    def _decided(
        self, report: Any, failure: dict[str, Any] | None, decide: Decide
    ) -> tuple[dict[str, Any], Sequence[Share]]:
        reports, unlike, lost = self._gather()
        reports[0], unlike[0] = report, (self.call.same, failure)
        ranks = sorted(reports)
        if any(call != self.call.same for call, _ in unlike.values()):
            calls = [(self.members[rank], unlike.get(rank, unlike[0])[0]) for rank in ranks]
            return {"error": different_calls(calls).to_json()}, ()
        failures = [(self.members[rank], failure) for rank, (_, failure) in sorted(unlike.items()) if failure]
        if lost:
            also = "".join(f" (on rank {rank}: {error['message']})" for rank, error in failures)
            return {"error": RankError(f"{self.call}: {lost}{also}").to_json(), "broken": True}, ()
        if failures:
            return {"error": merge(str(self.call), failures, self.size)}, ()
        decision, shares = decide([reports[rank] for rank in ranks])
        return {"decision": decision}, shares

    def _gather(self) -> tuple[dict[int, Any], dict[int, Any], str]:
        """Gathers the other ranks' reports, by rank.

        Reports are missing where ranks were lost, or where one is in another call, for which nobody has to wait.

        Returns:
            The reports; call and failure, at least of ranks in another call or with one; and an error text for lost
            ranks ("" for none).
        """
        hub, first = self.node.hub, self._round == 1 and self.session == MAIN
        reports: dict[int, Any] = {}
        unlike: dict[int, Any] = {}
        others = range(1, self.size)

        def behind(rank: int) -> Sequence[int]:
            """Returns the ranks whose reports come through this one; a leader's own report may have come first."""
            block = hub.tree.block_of(rank)
            return block if block[0] == rank else (rank,)

        def have() -> str | None:
            reported = hub.session(self.session).gatherings[self._round].reported
            if len(reported) == len(others):
                return ""
            ended = sorted(rank for rank in hub.ended if not reported.issuperset(behind(rank)))
            return lost_text([Lost(self.members[rank], ended=True) for rank in ended], 0.0) if ended else None

        def look(watch: Silence) -> str | None:
            # Not in the first round, for whose answer all must be connected.
            if self._read(reports, unlike) and not first:
                return ""
            with self.node.changed:
                missing = hub.session(self.session).missing(self._round, others)
                hub.ask(self.session, self._round, missing)
                self.node.wake()
            if silent := self._witness.silent(watch, missing):
                found = self._witness.ask(self._round, silent, self.deadline_seconds)
                with self.node.changed:  # looked at once more: some may have come meanwhile
                    session = hub.session(self.session)
                    silent = [rank for rank in silent if session.missing(self._round, behind(rank))]
                if silent:
                    unreached = self._witness.unreached(silent, self.members) if first else {}
                    lost = [
                        Lost(self.members[rank], stack=found.get(rank), unreached=unreached.get(rank))
                        for rank in silent
                    ]
                    return lost_text(lost, self.deadline_seconds)
            self._tell_of_wait(watch, missing)
            self._witness.look_at_store()
            return None

        lost = self.wait(have, look)
        with self.node.changed:
            others_end = bool(have())
        if others_end:  # those that a launcher or a host ends together are named together
            world().sleep(_TOGETHER_SECONDS)
            with self.node.changed:
                lost = have() or lost
        self._read(reports, unlike)
        session = self.node.session
        if first and not lost and session is not None:
            tree = hub.tree
            keys = [leader_key(session.name, rank) for rank in tree.children if rank not in tree.members]
            with suppress(TimeoutError):
                within(STORE_SECONDS, lambda: withdraw(self.store, keys, session, self._is_last))
        return reports, unlike, lost

    def _read(self, reports: dict[int, Any], unlike: dict[int, Any]) -> bool:
        """Reads reports that have come; returns whether one is from another call."""
        with self.node.changed:
            came = self.node.hub.session(self.session).gatherings[self._round].take()
        # All at once: to begin to decode takes longer than to decode. Several blocks may have the same columns.
        decoded = unpack(b"[%b]" % b",".join(came))
        for ((head_of, heads), (report_of, distinct)), ranks in zip(decoded, came.values(), strict=True):
            reports.update(zip(ranks, map(distinct.__getitem__, cycle(report_of)), strict=False))
            if heads != [[self.call.same, None]]:
                unlike.update(zip(ranks, map(heads.__getitem__, cycle(head_of)), strict=False))
        return any(call != self.call.same for call, _ in unlike.values())

    # Any other rank.

    def _take_answer(self) -> dict[str, Any] | None:
        """Returns the answer, if it has come. With the lock held."""
        session = self.node.hub.session(self.session)
        for number in [number for number in session.answers if number < self._round]:
            del session.answers[number]  # of a round in which this rank was interrupted
        answer = session.answers.pop(self._round, None)
        if answer is None:
            return None
        (number, section), session.section = session.section, (0, b"")
        self.section = section if number == self._round else b""
        return dict(unpack(answer))

    def _look_for_rank_0(self, watch: Silence) -> dict[str, Any] | None:
        node, hub = self.node, self.node.hub
        with node.changed:
            signs = hub.session(self.session).signs.get(0, 0)
            left = node.peers.left
        if left is not None and (answer := self._witness.recorded(left.name, self.deadline_seconds)):
            return answer  # rank 0 had taken this rank, and has found another dead
        if not watch.silent({0: signs}):
            self._tell_of_wait(watch, [0])
            return None
        session = node.session if node.tree.leader or not hub.answered else None
        if session is not None and (answer := self._witness.recorded(session.name, self.deadline_seconds)):
            return answer
        if not hub.answered:
            lost = Lost(self.members[node.reached], ended=node.was_taken)
            if node.unreached:
                lost = replace(lost, unreached=(lost.member, self.members[self.rank], node.unreached))
            if node.reached:
                return self._after_cut(node.reached, lost)
            if node.session is not None and node.tree.members:
                self._witness.record(RankError(f"{self.call}: {lost_text([lost], self.deadline_seconds)}").to_json())
            return self._give_up(lost)
        leader = node.tree.leader or 0
        found = self._witness.ask(self._round, [0, leader], self.deadline_seconds)
        with node.changed:
            answer = self._take_answer()
            if answer is not None:
                return answer
            self._check_node()  # it may have ended meanwhile, which is more than silence
        if leader and not found[leader]:
            return self._after_cut(leader, Lost(self.members[leader], stack=""))
        return self._give_up(Lost(self.members[0], stack=found[0]))

    def _give_up(self, lost: Lost) -> dict[str, Any]:
        """Returns the answer if it has come after all; else raises Silent."""
        with self.node.changed:
            answer = self._take_answer()
            if not self.node.hub.answered:
                self.node.stop()  # not to report after all, in a round that this rank does not wait for
        if answer is not None:
            return answer
        raise Silent(lost_text([lost], self.deadline_seconds))

    def _after_cut(self, above: int, lost: Lost) -> dict[str, Any]:
        """Returns the answer, if the rank whose end or silence cut this one off is known.

        Where that is a leader, rank 0 names it to all others, if it is in this call, and writes it down for this one.
        """
        watch = Silence(self.deadline_seconds + _RECORD_SECONDS)
        pause = 0.01
        while above and self.node.session is not None:
            if answer := self._witness.recorded(self.node.session.name, self.deadline_seconds):
                return answer
            world().sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if watch.due() and watch.silent({0: 0}):
                break
        return self._give_up(lost)

    def wait(self, have: Callable[[], T | None], look: Callable[[Silence], T | None]) -> T:
        """Waits until `have` or `look` returns something, and returns it.

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

    def _tell_of_wait(self, watch: Silence, missing: Sequence[int]) -> None:
        """Logs once which ranks have been waited for long, and are in no call of ours: on rank 0, or on 1 for that."""
        if self._has_told_of_wait or self.rank > 1:
            return  # a rank may well be long at something between two calls, such as an evaluation
        long = {abs(each) for each in watch.long_silent()}.intersection(missing)
        if long:
            self._has_told_of_wait = True
            _log.warning(
                "%s: waiting for %s; every rank must make this call. An error follows after %g s without a sign of "
                "life [rank-lost]",
                *(self.call, names_of(sorted(self.members[rank] for rank in long)), self.deadline_seconds),
            )

    def _check_node(self) -> None:
        above, failure = self.node.hub.above, self.node.failure
        if above is not None:
            raise CutOff(above)
        if failure is not None:
            raise failure if isinstance(failure, StoreError) else Silent(f"this rank cannot communicate: {failure}")


def pack(*values: Any) -> bytes:
    """Encodes JSON, each value on a line. Raises TypeError and ValueError."""
    return "\n".join(json.dumps(value, separators=(",", ":")) for value in values).encode()


def unpack(data: bytes) -> Any:
    """Decodes what `pack` encoded of one value."""
    return json.loads(data)


class _Connections:
    """Keeps a node running while any channel uses it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        weakref.finalize(self, node.stop)


def _forget(node: Node, session: bytes) -> None:
    """Drops the session of a channel that is gone; needs no lock, as a finalizer may call it anywhere."""
    node.forgotten.append(session)
