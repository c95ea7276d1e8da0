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

from shardopt.ranks.connections.address import addresses
from shardopt.ranks.connections.centre import Centre
from shardopt.ranks.connections.frames import Message
from shardopt.ranks.connections.heartbeat import interval_seconds
from shardopt.ranks.connections.join import CONNECT_SECONDS, PAUSE_SECONDS, Entry, connect, leader_key, publish, read
from shardopt.ranks.connections.leaving import LINGER_SECONDS, take_leave
from shardopt.ranks.connections.link import Ended, Link
from shardopt.ranks.connections.proof import Listening, Refused
from shardopt.ranks.connections.strangers import Strangers
from shardopt.ranks.connections.tree import Tree
from shardopt.world import READ, WRITE, Selector, Socket, Store, Thread, world

_CLOSE_SECONDS = 1.0
_TAKES_NOTHING_SECONDS = 5.0  # after which a rank is not waited for that takes nothing
_NEVER = float("inf")


class Node:
    """The place of one rank in the tree of its job or group.

    Args:
        store: of these ranks; nobody else uses its keys "session", and those below the sessions' names.

    Attributes:
        session: the session that this rank is in, or tries; None before it knows one.
        reached: the rank that this one tries to reach: 0, until it knows of a session.
        left: the session of whose leader or rank 0 this rank was taken, and cut off before there was an answer.
        failure: what ended the thread.
        forgotten: sessions that nobody uses here any more; they are dropped by and by.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.tree = store, Tree(rank, size)
        self.changed = world().condition()
        self.centre = Centre(self.tree, self.changed)
        self.session: Entry | None = None
        self.reached = 0
        self.left: Entry | None = None
        self.forgotten: deque[bytes] = deque()
        self.failure: BaseException | None = None
        self._thread: Thread | None = None
        self._selector: Selector | None = None
        self._wake: tuple[Socket, Socket] | None = None
        self._listeners: list[Socket] = []
        self._strangers = Strangers()
        self._woken = self._stopping = self._refuses = self._meets_again = False
        self._sleeps_until = _NEVER
        self._handing_over = 0

    # For the program's threads; those that speak of `changed` are called while it is held.

    def start(self) -> None:
        """Begins to look for the others, where that has not begun. With `changed` held.

        Raises:
            RuntimeError: no thread or descriptor is free.
        """
        if self._thread is not None or self._stopping:
            return
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
    def beating(self, name: bytes, deadline_seconds: float) -> Iterator[None]:
        """Shows life in a session until the end of the block; blocks may overlap, also in several threads."""
        interval = interval_seconds(deadline_seconds)
        with self.changed:
            self.start()
            session = self.centre.session(name)
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

    def wait_until_handed_over(self, deadline_seconds: float) -> None:
        """Waits until all that is queued for the ranks below was handed to the system, or they are gone.

        A process may end after that, in whatever way. Who takes nothing for some seconds is not waited for, nor before
        it takes something again: it is stopped or cut off, and must not stop this rank too. Its messages stay queued.
        """
        now = world().monotonic()
        end, patience = now + deadline_seconds, min(deadline_seconds, _TAKES_NOTHING_SECONDS)
        with self.changed:
            links = [self.centre.links[rank] for rank in self.tree.children if rank in self.centre.links]
            waited_for = {link: (link.queued_bytes, link.sent_bytes, now) for link in links}
            self._handing_over += 1
            try:
                while waited_for:
                    now = world().monotonic()
                    for link, (mark, sent, since) in list(waited_for.items()):
                        if link.sent_bytes > sent:
                            waited_for[link] = mark, link.sent_bytes, now
                        elif now - since >= patience:
                            link.stuck_at = sent
                        if not link.open or link.sent_bytes >= mark or link.sent_bytes == link.stuck_at:
                            del waited_for[link]
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
            links = self.centre.links.values()
            return sum(link.sent_bytes for link in links), sum(link.received_bytes for link in links)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._meet()
                self._serve(lambda: not (self._stopping or self._meets_again))
            until = world().monotonic() + _CLOSE_SECONDS
            self._serve(lambda: self.centre.owes_sections() and world().monotonic() < until, LINGER_SECONDS)
        except BaseException as error:
            self.failure = error
        finally:
            with self.changed:
                self._close(_CLOSE_SECONDS)
                for end in self._wake or ():
                    end.close()
                self.centre.notify()

    def _meet(self) -> None:
        """Connects with the leader, and listens for those below; returns once that is done, or this rank has gone."""
        with self.changed:
            self._close(0.0)
            self.centre.begin()
            self._meets_again = False
            self._selector = world().selector()
            assert self._wake is not None
            self._selector.register(self._wake[0], READ)
        if self.tree.rank == 0:
            session = Entry(world().random_name(8), world().random_name(32), self._listen())
            self.session = session
            publish(self.store, "session", session)
            return
        begun = world().monotonic()
        while not self._stopping:
            waited = world().monotonic() - begun
            # A host that is gone answers nothing; the session that is the last one by then has another.
            if self._connect(most_seconds=min(max(waited / 2, CONNECT_SECONDS[0]), CONNECT_SECONDS[1])):
                return
            waited = world().monotonic() - begun
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
        met = connect(
            self.store, leader, session, self.tree.rank, self.tree.leader, lambda: not self._stopping, most_seconds
        )
        if met is None:
            return False
        link, came = met
        with self.changed:
            assert self._selector is not None
            self._selector.register(link.socket, READ, link)
            self.centre.links[self.tree.leader] = link
            self.centre.repeat()
            self._take(link, came)
        if self.tree.has_listener:
            at = self._listen()
            publish(self.store, leader_key(session.name, self.tree.rank), Entry(session.name, session.key, at))
        return True

    def _listen(self) -> tuple[tuple[str, int], ...]:
        """Listens at the addresses of this host; returns them."""
        at: list[tuple[str, int]] = []
        errors: list[OSError] = []
        for host in addresses(self.store):
            try:
                listener = world().listen(host)
            except OSError as error:
                errors.append(error)
                continue
            with self.changed:
                assert self._selector is not None
                self._selector.register(listener, READ)
                self._listeners.append(listener)
            at.append((host, listener.getsockname()[1]))
        if not at:
            raise errors[0]
        return tuple(at)

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
                    self.centre.forget(self.forgotten.popleft())
                self._beat(now)
                self._flush()
                for link in self._strangers.silent(now):
                    self._drop(link)
                self._sleeps_until = self._next_due()
                selector = self._selector
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
            self.centre.to_flush[link.rank] = link
        if link.open and mask & READ:
            try:
                messages = link.receive()
            except Ended:
                self._drop(link)
                return
            self._take(link, messages)

    def _take(self, link: Link, messages: list[Message]) -> None:
        try:
            for message in messages:
                if not link.open:
                    return
                if link.rank is None:
                    self._prove(link, message)
                else:
                    self.centre.take(link.rank, message)
            if link.rank is not None and link.session_under_way is not None:
                self.centre.sign(link.rank, link.session_under_way)
        except (Ended, Refused):
            self._drop(link)

    def _accept(self, listener: Socket) -> None:
        try:
            socket = world().accept(listener)
        except BlockingIOError:
            return
        except OSError:
            self._strangers.make_room()
            world().sleep(0.05)  # no descriptor is free: the peer waits in the queue until one is
            return
        if self._refuses:
            socket.close()
            return
        assert self._selector is not None and self.session is not None
        link = Link(socket)
        self._strangers.add(link, Listening(self.session.name, self.session.key, self.tree.rank))
        self._selector.register(socket, READ, link)

    def _prove(self, link: Link, message: Message) -> None:
        rank = self._strangers.prove(link, message)
        if rank is None:
            return
        if rank not in self.tree.children or rank in self.centre.came or self._refuses:
            raise Refused("nobody is waited for under this number")
        self._strangers.forget(link)
        link.rank = rank
        link.trust()
        self.centre.welcome(rank, link)

    def _drop(self, link: Link) -> None:
        """Closes a connection that has ended, or is to end."""
        if not link.open:
            return
        assert self._selector is not None
        self._selector.unregister(link.socket)
        self._strangers.forget(link)
        link.close()
        rank = link.rank
        if rank is None or self.centre.links.get(rank) is not link:
            return
        if rank == self.tree.leader and not self.centre.answered:
            self._meets_again, self.left = True, self.session  # it may have been an older job's
        else:
            self.centre.lose(rank)

    def _flush(self) -> None:
        while self.centre.to_flush:
            links, self.centre.to_flush = self.centre.to_flush, {}
            for link in links.values():
                if not link.open:
                    continue
                try:
                    link.flush()
                except Ended:
                    self._drop(link)  # which may queue something for others
                    continue
                if link.waits_to_write == link.is_empty:
                    link.waits_to_write = not link.is_empty
                    assert self._selector is not None
                    self._selector.modify(link.socket, READ | WRITE if link.waits_to_write else READ, link)
        if self._handing_over:
            self.centre.notify()

    def _beat(self, now: float) -> None:
        for name, session in self.centre.sessions.items():
            if session.intervals and session.beaten + min(session.intervals) <= now:
                session.beaten = now
                self.centre.beat(name)

    def _next_due(self) -> float:
        beats = [
            session.beaten + min(session.intervals) for session in self.centre.sessions.values() if session.intervals
        ]
        return min([*beats, self._strangers.due()])

    def _drain_wake(self) -> None:
        self._woken = False
        assert self._wake is not None
        with suppress(BlockingIOError):
            self._wake[0].recv(4096)

    def _close(self, seconds: float) -> None:
        """Closes all connections, when their peers have all that was queued for them, or so much time has passed."""
        if self._selector is not None:
            take_leave([*self.centre.links.values()], seconds)
        for link in (*self.centre.links.values(), *self._strangers.links()):
            self._strangers.forget(link)
            link.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._strangers = Strangers()
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
        node.join(2 * _CLOSE_SECONDS)


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_stop_all)
