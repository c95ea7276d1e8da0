"""One rank's connections with the others, and the thread that serves them.

The thread waits for all sockets at once, sends what is queued, and shows life while this rank is in a call. It hears
others, and answers them, whatever the program does meanwhile.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from shardopt.ranks.connections.address import Network, network_of
from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.heartbeat import beat_interval
from shardopt.ranks.connections.join import PAUSE_SECONDS, Entry, leader_key, publish, read, unreached_key
from shardopt.ranks.connections.link import LINGER_SECONDS, Broken, Closed, Ended, Link, take_leave
from shardopt.ranks.connections.meeting import CONNECT_SECONDS, NotMet, Place, meet, text_of
from shardopt.ranks.connections.message_hub import MessageHub
from shardopt.ranks.connections.proof import Listening, Meeting, Refused, Side
from shardopt.ranks.connections.tree import Tree
from shardopt.ranks.connections.unauthenticated import UnauthenticatedPeers
from shardopt.world import READ, WRITE, Selector, Socket, Store, Thread, world

_CLOSE_SECONDS = 1.0
_LEAVING_SECONDS = 3.0  # for who has lost the connection just then: longer than it takes to learn of that
_TAKES_NOTHING_SECONDS = 5.0  # after which a rank is not waited for that takes nothing
_RETURN_SECONDS = 5.0  # for which a rank is waited for whose connection broke, and which has not closed it
_RETURN_PAUSE_SECONDS = 0.05
_UNREACHED_SECONDS = 2.0  # after which a rank that does not get to the one above it says so in the store
_NEVER = float("inf")


class Node:
    """The place of one rank in the tree of its job or group.

    Args:
        store: of these ranks; nobody else uses its keys "session", and those below the sessions' names.

    Attributes:
        session: the session that this rank is in, or tries; None before it knows one.
        reached: the rank that this one tries to reach: 0, until it knows of a session.
        unreached: where the rank above was looked for in vain, and why it was not there; "" where it was.
        left: the session of whose leader or rank 0 this rank was taken, and cut off before there was an answer.
        failure: what ended the thread.
        forgotten: sessions that nobody uses here any more; they are dropped by and by.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.tree = store, Tree(rank, size)
        self.changed = world().condition()
        self.hub = MessageHub(self.tree, self.changed)
        self.session: Entry | None = None
        self.reached = 0
        self.unreached = ""
        self.left: Entry | None = None
        self.forgotten: deque[bytes] = deque()
        self.failure: BaseException | None = None
        self._thread: Thread | None = None
        self._selector: Selector | None = None
        self._wake: tuple[Socket, Socket] | None = None
        self._listeners: list[Socket] = []
        self._unauthenticated = UnauthenticatedPeers()
        self._network: Network | None = None
        self._above_at: Place | None = None  # where the rank above was found
        self._broken: dict[Link, float] = {}  # connections that broke, with the times until which they may come back
        self._woken = self._stopping = self._refuses = self._meets_again = False
        self._sleeps_until = self._returns_at = _NEVER
        self._handing_over = 0

    @property
    def was_taken(self) -> bool:
        """Whether the rank above had taken this one in the session that it tries, and is gone: nobody comes twice."""
        return self.left is not None and self.session is not None and self.left.name == self.session.name

    # For the program's threads; those that speak of `changed` are called while it is held.

    def start(self) -> None:
        """Begins to look for the others, where that has not begun. With `changed` held.

        Raises:
            RuntimeError: no thread or descriptor is free.
            OptionError: SHARDOPT_NETWORK names what this host has not.
        """
        if self._thread is not None or self._stopping:
            return
        self._network = network_of(self.store)
        try:
            self._wake = world().socket_pair()
        except OSError as error:
            raise RuntimeError(str(error)) from error
        thread = world().thread(self._run, f"shardopt-ranks-{self.tree.rank}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            for end in self._wake:
                end.close()
            self._wake = None
            raise
        self._thread = thread
        _nodes[next(_numbers)] = self

    def stop(self) -> None:
        """Has the thread close all connections and end. Never waits, so that a finalizer can call it anywhere."""
        self._stopping = True
        self._poke()

    def join(self, seconds: float) -> None:
        """Waits for the end of the thread after `stop`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def wake(self) -> None:
        """Has the thread send what was queued. With `changed` held."""
        if not self._woken:
            self._woken = True
            self._poke()

    def _poke(self) -> None:
        wake = self._wake
        if wake is not None:
            with suppress(OSError):  # full, so that it wakes anyway; or closed
                wake[1].send(b"\0")

    @contextmanager
    def beating(self, name: bytes, seconds: float) -> Iterator[None]:
        """Shows life in a session until the end of the block; blocks may overlap, also in several threads.

        Args:
            seconds: after which others would give this rank up.
        """
        interval = beat_interval(seconds)
        with self.changed:
            self.start()
            session = self.hub.session(name)
            if not session.intervals:
                session.beaten = world().monotonic()
            session.intervals.append(interval)
            if session.beaten + interval < self._sleeps_until:
                self.wake()
        try:
            yield
        finally:
            with self.changed:
                session.intervals.remove(interval)

    def wait_until_handed_over(self, seconds: float) -> None:
        """Waits until the ranks below have all that is queued for them, or get it from the system, or they are gone.

        A process may end after that, in whatever way. Who takes nothing for some seconds is not waited for, nor before
        it takes something again: it is stopped or cut off, and must not stop this rank too. Its messages stay queued.
        """
        now = world().monotonic()
        end, patience = now + seconds, min(seconds, _TAKES_NOTHING_SECONDS)
        with self.changed:
            links = [self.hub.links[rank] for rank in self.tree.children if rank in self.hub.links]
            waited_for = {link: (link.mark, link.moved_bytes, now) for link in links}
            self._handing_over += 1
            try:
                while waited_for:
                    now = world().monotonic()
                    for link, (mark, moved, since) in list(waited_for.items()):
                        if link.moved_bytes > moved:
                            waited_for[link] = mark, link.moved_bytes, now
                        elif now - since >= patience:
                            link.stuck_at = moved
                        if not link.open or link.is_handed_over(mark) or link.moved_bytes == link.stuck_at:
                            del waited_for[link]
                        other = self.hub.links.get(link.rank or 0)
                        if not link.open and other is not None and other.open:  # its peer has begun anew
                            waited_for[other] = other.mark, other.moved_bytes, now
                    if not waited_for or now >= end or self.failure is not None or self._stopping:
                        return
                    gives_up = min(since for _, _, since in waited_for.values()) + patience
                    self.changed.wait(min(end, gives_up) - now)
            finally:
                self._handing_over -= 1

    def refuse(self) -> None:
        """Takes nobody any more: the session has ended. With `changed` held."""
        self._refuses = True

    def exchanged_bytes(self) -> tuple[int, int]:
        """Returns how many bytes were sent and received over the connections that there are."""
        with self.changed:
            links = self.hub.links.values()
            return sum(link.sent_bytes for link in links), sum(link.received_bytes for link in links)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._meet()
                self._serve(lambda: not (self._stopping or self._meets_again))
            until = world().monotonic() + _CLOSE_SECONDS
            self._leave(until)
        except BaseException as error:
            self.failure = error
        finally:
            with self.changed:
                self._close(_CLOSE_SECONDS)
                for end in self._wake or ():
                    end.close()
                self.hub.notify()

    def _meet(self) -> None:
        """Connects with the leader, and listens for those below; returns once that is done, or this rank has gone."""
        with self.changed:
            self._close(0.0)
            self.hub.begin()
            self._meets_again = False
            self._selector = world().selector()
            assert self._wake is not None
            self._selector.register(self._wake[0], READ)
        if self.tree.rank == 0:
            session = Entry(world().random_name(8), world().random_name(32), self._listen())
            self.session = session
            publish(self.store, "session", session)
            return
        begun, told = world().monotonic(), ""
        while not self._stopping:
            waited = world().monotonic() - begun
            # A host that is gone answers nothing; the session that is the last one by then has another.
            if self._connect(most_seconds=min(max(waited / 2, CONNECT_SECONDS[0]), CONNECT_SECONDS[1])):
                if told and self.session is not None:
                    self.store.delete_key(unreached_key(self.session.name, self.tree.rank))
                return
            waited = world().monotonic() - begun
            told = self._say_unreached(waited, told)
            self._pause(min(max(waited / 4, PAUSE_SECONDS[0]), PAUSE_SECONDS[1]))

    def _connect(self, most_seconds: float) -> bool:
        """Tries once to get to the leader; returns whether this rank is connected."""
        session = read(self.store, "session")
        if session is None or self.tree.leader is None:
            return False
        leader: Entry | None = session
        if self.tree.leader != 0:
            leader = read(self.store, leader_key(session.name, self.tree.leader))
        self.session, self.reached = session, self.tree.leader
        if leader is None:
            return False

        def is_last() -> bool:
            last = read(self.store, "session")
            return last is not None and last.name == session.name

        meeting = Meeting(session.name, session.key, self.tree.rank, self.tree.leader)
        try:
            met = meet(leader.at, meeting, lambda: not self._stopping, most_seconds, is_last)
        except NotMet as error:
            if not self.was_taken:
                self.unreached = f"at {text_of(leader.at)} ({error})"
            return False
        self.unreached, self._above_at = "", met.place
        link = met.link
        link.seal(met.side.key, met.side.from_below, met.side.from_above)
        with self.changed:
            assert self._selector is not None
            self._selector.register(link.socket, READ, link)
            self.hub.links[self.tree.leader] = link
            self.hub.repeat()
            self._take_rest(link)
        if self.tree.has_listener:
            publish(self.store, leader_key(session.name, self.tree.rank), Entry(session.name, "", self._listen()))
        return True

    def _listen(self) -> tuple[Place, ...]:
        """Listens at the addresses of this host; returns them."""
        assert self._network is not None
        listeners = self._network.listen()
        with self.changed:
            assert self._selector is not None
            for listener in listeners:
                self._selector.register(listener, READ)
            self._listeners += listeners
        return tuple(listener.getsockname()[:2] for listener in listeners)

    def _say_unreached(self, waited: float, told: str) -> str:
        """Tells rank 0, by the store, why this rank does not get to the one above it; returns what it was told."""
        text = self.unreached if waited >= _UNREACHED_SECONDS else ""
        if text and text != told and self.session is not None:
            self.store.set(unreached_key(self.session.name, self.tree.rank), text)
        return text or told

    def _pause(self, seconds: float) -> None:
        assert self._selector is not None
        self._selector.select(seconds)  # only what wakes this thread is in it now
        with self.changed:
            self._drain_wake()

    def _serve(self, goes_on: Callable[[], bool], most_seconds: float = _NEVER) -> None:
        """Sends and receives, and looks each time, and after so many seconds at most, whether this `goes_on`."""
        while True:
            with self.changed:
                if self._selector is None or not goes_on():
                    return
                now = world().monotonic()
                while self.forgotten:
                    self.hub.forget(self.forgotten.popleft())
                self._beat(now)
                self._flush()
                late = [link for link, end in self._broken.items() if end <= now and link.rank != self.tree.leader]
                for link in [*self._unauthenticated.silent(now), *late]:
                    self._drop(link)
                self._sleeps_until = self._next_due()
                selector, above = self._selector, self._broken_above()
            if above is not None and self._returns_at <= now:
                self._come_back(above)
                continue
            left = min(max(0.0, self._sleeps_until - now), most_seconds)
            events = selector.select(None if left == _NEVER else left)
            with self.changed:
                for key, mask in events:
                    if key.data is None:
                        if key.fileobj in self._listeners:
                            self._accept(key.fileobj)
                        else:
                            self._drain_wake()
                    else:
                        self._attend(key.data, mask)

    def _attend(self, link: Link, mask: int) -> None:
        if link.open and mask & WRITE and link.rank is not None:
            self.hub.to_flush[link.rank] = link
        if link.open and not link.suspended and mask & READ:
            self._take(link, link.receive)

    def _take_rest(self, link: Link) -> None:
        """Takes what came on a connection before this end knew the keys of its frames."""
        self._take(link, link.rest)

    def _take(self, link: Link, receive: Callable[[], list[Message]]) -> None:
        try:
            for message in receive():
                if not link.open:
                    return
                if link.rank is None:
                    self._prove(link, message)
                else:
                    self.hub.take(link.rank, message)
            if link.rank is not None:
                if link.session_under_way is not None:
                    self.hub.sign(link.rank, link.session_under_way)
                if not link.is_empty:
                    self.hub.to_flush[link.rank] = link  # it confirms what has come
            link.check()
        except (Ended, Refused) as error:
            self._end(link, error)

    def _end(self, link: Link, error: Exception) -> None:
        """Drops a connection that has ended; waits for its peer where that may live, and comes back.

        Who listens is told the end of a process by its system, which closes the connection: so that one is lost at
        once. Whoever has connected tries to come back each time: where that process has ended nobody listens.
        """
        is_link = link.rank is not None and self.hub.links.get(link.rank) is link
        may_return = isinstance(error, Broken) or (
            isinstance(error, Closed) and link.rank == self.tree.leader and not link.left
        )
        if not (link.open and is_link and may_return and not self._stopping):
            self._drop(link)
            return
        assert self._selector is not None
        self._selector.unregister(link.socket)
        now = world().monotonic()
        self._broken[link], self._returns_at = now + _RETURN_SECONDS, now
        if not link.suspend():
            self._drop(link)

    def _broken_above(self) -> Link | None:
        """Returns the connection with the leader, where it broke."""
        return next((link for link in self._broken if link.rank == self.tree.leader), None)

    def _come_back(self, link: Link) -> None:
        """Any rank but 0: connects once more with the leader, on whose connection nothing comes any more."""
        assert self.session is not None and self.tree.leader is not None and self._above_at is not None
        until = self._broken[link]
        meeting = Meeting(self.session.name, self.session.key, self.tree.rank, self.tree.leader)
        goes_on, seconds = lambda: not self._stopping, CONNECT_SECONDS[0]
        try:
            met = meet([self._above_at], meeting, goes_on, seconds, key=link.key, taken=link.taken)
        except NotMet as error:
            with self.changed:
                self._returns_at = world().monotonic() + _RETURN_PAUSE_SECONDS
                if error.refused or self._returns_at > until:
                    self._drop(link)
            return
        with self.changed:
            assert self._selector is not None
            self._selector.register(met.link.socket, READ, link)
            self._resume(link, met.link, met.side)

    def _resume(self, link: Link, other: Link, side: Side) -> None:
        """Goes on with a peer over another connection, on which it has proved itself."""
        self._broken.pop(link, None)
        is_below = link.rank == self.tree.leader
        sends, receives = side.from_below, side.from_above
        told, said = side.taken
        if not is_below:
            sends, receives, told, said = receives, sends, said, told
        try:
            link.resume(other, sends, receives, said, told)
        except Ended:
            link.socket, link.suspended = other.socket, False
            self._drop(link)
            return
        assert link.rank is not None
        self.hub.to_flush[link.rank] = link
        self._take_rest(link)

    def _accept(self, listener: Socket) -> None:
        try:
            socket = world().accept(listener)
        except BlockingIOError:
            return
        except OSError:
            self._unauthenticated.make_room()
            world().sleep(0.05)  # no descriptor is free: the peer waits in the queue until one is
            return
        assert self._selector is not None and self.session is not None
        link = Link(socket)
        self._unauthenticated.add(link, Listening(self.session.name, self.session.key, self.tree.rank, self._known))
        self._selector.register(socket, READ, link)

    def _known(self, rank: int) -> Link | None:
        """Returns the connection of a rank below, which may come back."""
        return self.hub.links.get(rank) if rank in self.tree.children else None

    def _prove(self, link: Link, message: Message) -> None:
        side = self._unauthenticated.prove(link, message)
        if side is None:
            return
        before = self._known(side.rank)
        is_waited_for = side.rank in self.tree.children and side.rank not in self.hub.came and not self._refuses
        # Its connection may have broken before it knew that it was taken.
        begins_anew = before is not None and before.suspended and before.taken == 0
        is_waited_for = is_waited_for or begins_anew
        if before is None if side.returns else not is_waited_for:
            raise Refused("nobody is waited for under this number")
        self._unauthenticated.forget(link)
        link.put_message(Message(Kind.WELCOME))
        if side.returns and before is not None:
            self._take_over(before, link, side)
            return
        link.rank = side.rank
        link.seal(side.key, side.from_above, side.from_below)
        if before is None:
            self.hub.welcome(side.rank, link)
            return
        link.take_over(before)
        self._broken.pop(before, None)
        before.close()
        self.hub.links[side.rank] = self.hub.to_flush[side.rank] = link

    def _take_over(self, link: Link, other: Link, side: Side) -> None:
        """Goes on with a rank below that has come back, whether or not this end has noticed that it was gone."""
        assert self._selector is not None
        if not link.suspended:
            self._selector.unregister(link.socket)
            link.suspend()
        self._selector.modify(other.socket, READ, link)
        other.open = False  # it has given its socket away
        self._resume(link, other, side)

    def _drop(self, link: Link) -> None:
        """Closes a connection that has ended, or is to end."""
        if not link.open:
            return
        assert self._selector is not None
        self._broken.pop(link, None)
        if not link.suspended:
            self._selector.unregister(link.socket)
        self._unauthenticated.forget(link)
        link.close()
        rank = link.rank
        if rank is None or self.hub.links.get(rank) is not link:
            return
        if rank == self.tree.leader and not self.hub.answered:
            self._meets_again, self.left = True, self.session  # it may have been an older job's
        else:
            self.hub.lose(rank)

    def _flush(self) -> None:
        while self.hub.to_flush:
            links, self.hub.to_flush = self.hub.to_flush, {}
            for link in links.values():
                if not link.open or link.suspended:
                    continue
                try:
                    link.flush()
                except Ended as error:
                    self._end(link, error)  # which may queue something for others
                    continue
                if link.waits_to_write == link.is_empty:
                    link.waits_to_write = not link.is_empty
                    assert self._selector is not None
                    self._selector.modify(link.socket, READ | WRITE if link.waits_to_write else READ, link)
        if self._handing_over:
            self.hub.notify()

    def _beat(self, now: float) -> None:
        for name, session in self.hub.sessions.items():
            if session.intervals and session.beaten + min(session.intervals) <= now:
                session.beaten = now
                self.hub.beat(name)

    def _next_due(self) -> float:
        beats = [session.beaten + min(session.intervals) for session in self.hub.sessions.values() if session.intervals]
        returns = [self._returns_at if link.rank == self.tree.leader else end for link, end in self._broken.items()]
        return min([*beats, self._unauthenticated.due(), *returns])

    def _drain_wake(self) -> None:
        self._woken = False
        assert self._wake is not None
        with suppress(BlockingIOError):
            self._wake[0].recv(4096)

    def _leave(self, until: float) -> None:
        """Sees that ranks below get what was sent to them, also where their connections break just now."""
        with self.changed:
            if self._selector is None:
                return
            links = dict(self.hub.links)
            broken = take_leave([*links.values()], max(0.0, until - world().monotonic()))
            until = world().monotonic() + _LEAVING_SECONDS
            for rank, link in links.items():
                if not link.suspended:
                    self._selector.unregister(link.socket)
                if link in broken and rank != self.tree.leader and link.suspend():
                    self._broken[link] = until
                elif not link.suspended or rank == self.tree.leader:
                    link.close()
                    self._broken.pop(link, None)
                    del self.hub.links[rank]
        self._serve(
            lambda: any(not link.is_confirmed for link in self._broken) and world().monotonic() < until, LINGER_SECONDS
        )

    def _close(self, seconds: float) -> None:
        """Closes all connections, when their peers have all that was queued for them, or so much time has passed."""
        self._broken.clear()
        if self._selector is not None:
            take_leave([*self.hub.links.values()], seconds)
        for link in (*self.hub.links.values(), *self._unauthenticated.links()):
            self._unauthenticated.forget(link)
            link.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._unauthenticated = UnauthenticatedPeers()
        if self._selector is not None:
            self._selector.close()
            self._selector = None

    def abandon(self) -> None:
        """In a child that was forked, where its sockets are closed and it has no thread: it stays the parent's."""
        self._stopping = True
        if self._selector is not None:
            self._selector.close()


_numbers = count()
_nodes: weakref.WeakValueDictionary[int, Node] = weakref.WeakValueDictionary()


def _abandon_all() -> None:
    for node in list(_nodes.values()):
        node.abandon()


def _stop_all() -> None:
    nodes = list(_nodes.values())
    for node in nodes:
        node.stop()
    for node in nodes:
        node.join(2 * _CLOSE_SECONDS + _LEAVING_SECONDS)


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_stop_all)
