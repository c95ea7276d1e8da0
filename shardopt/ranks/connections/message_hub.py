"""Counts and forwards messages between a rank and its neighbours, without parsing them.

message    from          to            what
BEAT       any           its leader    shows life in a session
BEAT       rank 0        all           the same, passed on by leaders
REPORT     member        its leader    what it reports in a round
REPORTS    leader        rank 0        reports by columns, with their ranks: once all are there, or rank 0 asks
ANSWER     rank 0        all           what was decided
ASK        rank 0        leaders       who is missing in a round?
MISSING    leader        rank 0        these are, and so many signs of life came of them
ENDED      leader        rank 0        connections that have closed
CUT_OFF    leader        members       the connection to rank 0 has closed
WHERE      any           any           what is your main thread in?
HERE       any           any           this
RECEIVERS  rank 0        leaders       who gets the section that follows, where it is not the leader alone
SECTION    rank 0        some          what only some ranks need of an answer, before the answer itself

HALT, FREEZE, PASSED and HALT_AT: `session.py`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence

from shardopt.ranks.connections.frames import MAIN, Frame, Kind, Message, encode
from shardopt.ranks.connections.link import Ended, Link
from shardopt.ranks.connections.session import Session
from shardopt.ranks.connections.tree import Tree, pack_runs, unpack_runs
from shardopt.world import Condition, world

_PLACE = struct.Struct("!Q")
_STACK_LINES = 20
_MOST_FORGOTTEN = 256  # names of sessions; beats are late by seconds


Share = tuple[bytes, Sequence[int]]
"""A section of an answer, and the ranks that get it."""


class MessageHub:
    """Counts and forwards messages, and keeps what came in each session. `changed` guards all of it.

    Attributes:
        links: connections with others that have proved who they are, by rank.
        to_flush: those of them that have something to send, or that are to be closed.
        ended: ranks whose connections have closed.
        above: the rank by whose end this one was cut off from rank 0; None where it was not.
        answered: whether an answer has come: from then on this session is the job's, and no older one.
        came: those below that have ever been connected. No other process is taken for one of them.
        early: answers that were given before all below had come; who comes gets them first.
        here: where ranks are that were asked, by session, round and rank.
        forgotten: the last sessions that were dropped here; others may still show life in them.
    """

    def __init__(self, tree: Tree, changed: Condition) -> None:
        self.tree, self.changed = tree, changed
        self.links: dict[int, Link] = {}
        self.to_flush: dict[int, Link] = {}
        self.ended: set[int] = set()
        self.above: int | None = None
        self.answered = False
        self.came: set[int] = set()
        self.early: list[Message] = []
        self.here: dict[tuple[bytes, int, int], str] = {}
        self.sessions: dict[bytes, Session] = {}
        self.forgotten: dict[bytes, None] = {}

    def session(self, name: bytes) -> Session:
        """Returns a session; the first message in it creates it."""
        if name not in self.sessions:
            self.sessions[name] = Session()
        return self.sessions[name]

    def notify(self) -> None:
        """Wakes all threads that wait for a change here."""
        self.changed.notify(1 << 20)

    # Calls of this rank's own threads.

    def begin(self) -> None:
        """Forgets messages of a session that was not this job's, and repeats this rank's own."""
        self.links.clear()
        self.to_flush.clear()
        self.ended.clear()
        self.came.clear()
        self.above = None
        for session in self.sessions.values():
            session.gatherings.clear()
            session.signs.clear()

    def repeat(self) -> None:
        """Repeats reports that were made before there was a connection, or on a lost one."""
        for name, session in self.sessions.items():
            for number, report in session.own.items():
                self._report(name, number, report)

    def report(self, name: bytes, number: int, report: bytes) -> None:
        """Reports in a round; on any rank except 0."""
        self.session(name).own[number] = report
        self._report(name, number, report)

    def _report(self, name: bytes, number: int, report: bytes) -> None:
        if self.tree.leads:
            self._gather(name, number, report, self.tree.rank)
        else:
            self._send_up(Message(Kind.REPORT, name, number, report))

    def answer(self, name: bytes, number: int, answer: bytes, shares: Iterable[Share] = ()) -> None:
        """Sends the answer to all, and before that sections to some; on rank 0."""
        shared = [(encode(Message(Kind.SECTION, name, number, section)), ranks) for section, ranks in shares]
        self.answered = True
        self.session(name).pass_answer(number)
        for section, ranks in shared:
            of_child: dict[int, list[int]] = {}
            for rank in ranks:
                of_child.setdefault(self.tree.next_towards(rank) or 0, []).append(rank)
            for child, receivers in of_child.items():
                if receivers != [child]:
                    runs = json.dumps(pack_runs(receivers)).encode()
                    self._send([child], Message(Kind.RECEIVERS, name, number, runs))
            self._put(of_child, section)
        self._send_answer(Message(Kind.ANSWER, name, number, answer))

    def _send_answer(self, answer: Message) -> None:
        if len(self.came) < len(self.tree.children):
            self.early.append(answer)  # as where rank 0 was interrupted in the first round
        self._send(self.tree.children, answer)

    def welcome(self, rank: int, link: Link) -> None:
        """Takes the connection of a rank below, which has proved its identity."""
        self.came.add(rank)
        self.links[rank] = link
        self.to_flush[rank] = link
        for message in self.early:
            self._send([rank], message)
        if len(self.came) == len(self.tree.children):
            self.early.clear()

    def beat(self, name: bytes) -> None:
        """Sends a sign of life in a session."""
        if self.tree.rank == 0:
            self._send(self.tree.children, Message(Kind.BEAT, name))
        else:
            self._send_up(Message(Kind.BEAT, name))

    def ask(self, name: bytes, number: int, missing: Iterable[int]) -> None:
        """Asks leaders who is missing, and for what they have; on rank 0."""
        blocks = dict.fromkeys(self.tree.block_of(rank)[0] for rank in missing)
        self._send([leader for leader in blocks if leader != 0], Message(Kind.ASK, name, number))

    def ask_where(self, name: bytes, number: int, rank: int) -> None:
        """Asks another rank for its stack; the answer comes to `here`, if the rank can answer."""
        question = json.dumps([self.tree.rank, rank]).encode()
        self._route(rank, Message(Kind.WHERE, name, number, question))

    def halt(self, name: bytes) -> None:
        """Asks all ranks to stop at one place."""
        halting = self.session(name).halting
        if self.tree.rank == 0:
            self._freeze(name)
        elif not halting.wanted:
            self._send_up(Message(Kind.HALT, name))
        halting.wanted = True

    # Messages of others.

    def take(self, rank: int, message: Message) -> None:
        """Handles a message of a neighbour.

        Raises:
            Ended: it is none that this neighbour sends.
        """
        try:
            if rank == self.tree.leader:
                self._take_from_above(message)
            else:
                self._take_from_below(rank, message)
        except (ValueError, TypeError, LookupError, OverflowError, struct.error, RecursionError) as error:
            raise Ended(f"{message.kind.name}: {error}") from error

    def _take_from_above(self, message: Message) -> None:
        kind, name, number, data = message
        if kind == Kind.BEAT:
            self.sign(0, name)
            self._send(self.tree.children, message)
            return
        session = self.session(name)
        if kind == Kind.ANSWER:
            session.sign(0)
            self.answered = True
            session.pass_answer(number)
            session.answers[number] = data
            self._send_answer(message)
            self.notify()
        elif kind == Kind.ASK:
            self._pass_reports_on(name, number)
            self._tell_missing(name, number)
        elif kind == Kind.CUT_OFF:
            self.above = 0
            self.notify()
        elif kind == Kind.RECEIVERS:
            session.receivers = unpack_runs(json.loads(data), self.tree.block_of(self.tree.rank))
        elif kind == Kind.SECTION:
            receivers, session.receivers = session.receivers or [self.tree.rank], []
            if self.tree.rank in receivers:
                session.section = number, data
            self._send(receivers, message)
        elif kind == Kind.FREEZE:
            self._freeze(name)
        elif kind == Kind.HALT_AT:
            (place,) = _PLACE.unpack(data)
            self._halt_at(name, place)
        elif kind in (Kind.WHERE, Kind.HERE):
            self._take_question(message)
        else:
            raise ValueError("not of a leader")

    def _take_from_below(self, rank: int, message: Message) -> None:
        kind, name, number, data = message
        if kind == Kind.BEAT:
            self.sign(rank, name)
            return
        session = self.session(name)
        if kind == Kind.REPORT and rank in self.tree.members:
            session.sign(rank)
            self._gather(name, number, data, rank)
        elif kind == Kind.REPORTS and rank not in self.tree.members:
            runs, _, columns = data.partition(b"\n")
            self._gather(name, number, columns, unpack_runs(json.loads(runs), self.tree.block_of(rank)))
        elif kind == Kind.MISSING and rank not in self.tree.members:
            for signs, runs in json.loads(data):
                for missing in unpack_runs(runs, self.tree.block_of(rank)):
                    session.signs[missing] = int(signs)
            self.notify()
        elif kind == Kind.ENDED and rank not in self.tree.members:
            self.ended.update(unpack_runs(json.loads(data), self.tree.block_of(rank)))
            self.notify()
        elif kind == Kind.HALT:
            self.halt(name)
        elif kind == Kind.PASSED:
            (passed,) = _PLACE.unpack(data)
            session.halting.answer(rank, passed)
            self._tell_foremost(name)
        elif kind in (Kind.WHERE, Kind.HERE):
            self._take_question(message)
        else:
            raise ValueError("not of a member")

    def sign(self, rank: int, name: bytes) -> None:
        """Notes a neighbour's sign of life in a session: a beat, or a part of a long message."""
        if name not in self.forgotten:  # or late beats would make it anew, and it would stay
            self.session(name).sign(0 if rank == self.tree.leader else rank)

    def lose(self, rank: int) -> None:
        """Notes that the connection with a neighbour was closed."""
        del self.links[rank]
        self.to_flush.pop(rank, None)
        if rank == self.tree.leader:
            self.above = rank if self.above is None else self.above
            if self.tree.leads:
                self._send(self.tree.children, Message(Kind.CUT_OFF))
        else:
            self.ended.add(rank)
            if self.tree.rank != 0:
                # Its reports so far go first: it has made those calls.
                for name, session in self.sessions.items():
                    for number, gathering in session.gatherings.items():
                        if rank in gathering.reported:
                            self._pass_reports_on(name, number)
                self._send_up(Message(Kind.ENDED, data=json.dumps(pack_runs([rank])).encode()))
            for name, session in self.sessions.items():
                if rank in session.halting.waits_for:
                    session.halting.answer(rank, 0)  # it passes nothing any more
                    self._tell_foremost(name)
        self.notify()

    def _gather(self, name: bytes, number: int, report: bytes, by: int | list[int]) -> None:
        """Takes the report of a rank, or those of several by columns."""
        session = self.session(name)
        if number <= session.answered:
            return  # it was not waited for
        gathering = session.gatherings[number]
        if isinstance(by, int):
            gathering.add(report, by)
        else:
            gathering.add_packed(report, by)
        if self.tree.rank == 0:
            if len(gathering.reported) == self.tree.size - 1:
                self.notify()
        elif len(gathering.reported) == 1 + len(self.tree.members):
            self._pass_reports_on(name, number)

    def _pass_reports_on(self, name: bytes, number: int) -> None:
        if self.tree.leader not in self.links:
            return  # messages taken now would be lost; `repeat` comes back to it once there is a connection
        for columns, ranks in self.session(name).gatherings[number].take().items():
            runs = json.dumps(pack_runs(ranks)).encode()
            self._send_up(Message(Kind.REPORTS, name, number, b"%b\n%b" % (runs, columns)))

    def _tell_missing(self, name: bytes, number: int) -> None:
        session = self.session(name)
        ranks_with: dict[int, list[int]] = {}
        for rank in session.missing(number, self.tree.members):
            ranks_with.setdefault(session.signs.get(rank, 0), []).append(rank)
        missing = [[signs, pack_runs(ranks)] for signs, ranks in ranks_with.items()]
        self._send_up(Message(Kind.MISSING, name, number, json.dumps(missing).encode()))

    def _freeze(self, name: bytes) -> None:
        halting = self.session(name).halting
        if halting.frozen:
            return
        # A child that is not connected has left: before this session began all were, and nobody comes a second time. A
        # leader that leaves while it is asked is not waited for either (`lose`); its members learn of its end by
        # themselves.
        halting.freeze(rank for rank in self.tree.children if rank in self.links)
        self._send(self.tree.children, Message(Kind.FREEZE, name))
        self._tell_foremost(name)

    def _tell_foremost(self, name: bytes) -> None:
        halting = self.session(name).halting
        if not halting.frozen or halting.waits_for or halting.at is not None:
            return
        if self.tree.rank == 0:
            self._halt_at(name, halting.foremost + 1)
        else:
            self._send_up(Message(Kind.PASSED, name, data=_PLACE.pack(halting.foremost)))

    def _halt_at(self, name: bytes, place: int) -> None:
        halting = self.session(name).halting
        halting.frozen, halting.at = True, place
        self._send(self.tree.children, Message(Kind.HALT_AT, name, data=_PLACE.pack(place)))
        self.notify()

    def _take_question(self, message: Message) -> None:
        asker, asked, *text = json.loads(message.data)
        towards = asked if message.kind == Kind.WHERE else asker
        if towards != self.tree.rank:
            self._route(towards, message)
        elif message.kind == Kind.HERE:
            self.here[message.session, message.round, int(asked)] = str(text[0])
            self.notify()
        else:
            session = self.session(message.session)
            if session.told[0] != message.round or not session.told[1]:  # all who ask are told the same
                session.told = (message.round, world().main_thread_stack(_STACK_LINES))
            answer = json.dumps([asker, asked, session.told[1]]).encode()
            self._route(int(asker), Message(Kind.HERE, message.session, message.round, answer))

    def _route(self, rank: int, message: Message) -> None:
        towards = self.tree.next_towards(rank)
        if towards is not None:
            self._send([towards], message)

    def _send_up(self, message: Message) -> None:
        if self.tree.leader is not None:
            self._send([self.tree.leader], message)

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        """Queues a message for those neighbours that are connected."""
        self._put(ranks, encode(message))

    def _put(self, ranks: Iterable[int], frames: Sequence[Frame]) -> None:
        """Queues frames, as `_send` does: a copy of a section for each rank could take hundreds of MiB."""
        for rank in ranks:
            link = self.links.get(rank)
            if link is not None:
                link.put(frames)
                self.to_flush[rank] = link

    def forget(self, name: bytes) -> None:
        """Drops a session that is no longer used here."""
        if name != MAIN:
            self.sessions.pop(name, None)
            self.forgotten[name] = None
            if len(self.forgotten) > _MOST_FORGOTTEN:
                del self.forgotten[next(iter(self.forgotten))]
