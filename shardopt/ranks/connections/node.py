"""One rank's connections with the others, and the thread that runs them.

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

from shardopt.errors import RankError
from shardopt.ranks.connections.address import Network, network_of
from shardopt.ranks.connections.heartbeat import beat_interval
from shardopt.ranks.connections.join import PAUSE_SECONDS, Entry, leader_key, publish, read, unreached_key
from shardopt.ranks.connections.link import LINGER_SECONDS
from shardopt.ranks.connections.meeting import CONNECT_SECONDS, NotMet, Place, meet, text_of
from shardopt.ranks.connections.message_hub import MessageHub
from shardopt.ranks.connections.peers import Peers
from shardopt.ranks.connections.proof import Meeting
from shardopt.ranks.connections.tree import Tree
from shardopt.runtime.stores import Store
from shardopt.world import Socket, Thread, world

_CLOSE_SECONDS = 1.0
_LEAVING_SECONDS = 3.0  # for who has lost the connection just then: longer than it takes to learn of that
_TAKES_NOTHING_SECONDS = 5.0  # after which a rank is not waited for that takes nothing
_UNREACHED_SECONDS = 2.0  # after which a rank that does not get to the one above it says so in the store
_NEVER = float("inf")


class Node:
    """One rank's node in the tree of its job or group.

    Args:
        store: of these ranks; nobody else uses its keys "session", and those below the sessions' names.

    Attributes:
        peers: the connections.
        reached: the rank that this one tries to reach: 0, until it knows of a session.
        unreached: where the rank above was looked for in vain, and why it was not there; "" where it was.
        failure: what ended the thread.
        forgotten: sessions that nobody uses here any more; they are dropped by and by.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.tree = store, Tree(rank, size)
        self.changed = world().condition()
        self.hub = MessageHub(self.tree, self.changed)
        self.peers = Peers(self.tree, self.hub)
        self.reached = 0
        self.unreached = ""
        self.forgotten: deque[bytes] = deque()
        self.failure: BaseException | None = None
        self._thread: Thread | None = None
        self._wake: tuple[Socket, Socket] | None = None
        self._network: Network | None = None
        self._woken = False
        self._sleeps_until = _NEVER
        self._handing_over = 0

    @property
    def session(self) -> Entry | None:
        """The session that this rank is in, or tries to join; None before it knows one."""
        return self.peers.session

    @property
    def was_taken(self) -> bool:
        """Whether the rank above accepted this one in the session that it tries, and is gone: no rank joins twice."""
        left, session = self.peers.left, self.peers.session
        return left is not None and session is not None and left.name == session.name

    # For the program's threads; those that speak of `changed` are called while it is held.

    def start(self) -> None:
        """Begins to look for the others, unless that has begun. With `changed` held.

        Raises:
            RankError: no thread or descriptor is free.
            OptionError: SHARDOPT_NETWORK names what this host has not.
        """
        if self._thread is not None or self.peers.stopping:
            return
        self._network = network_of(self.store)
        try:
            self._wake = world().socket_pair()
        except OSError as error:
            raise RankError(f"ranks cannot communicate: {error}", code="rank-network") from error
        thread = world().thread(self._run, f"shardopt-ranks-{self.tree.rank}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            for end in self._wake:
                end.close()
            self._wake = None
            raise RankError(f"ranks cannot communicate: {error}", code="rank-network") from error
        self._thread = thread
        _nodes[next(_numbers)] = self

    def stop(self) -> None:
        """Makes the thread close all connections and end. Never waits, so a finalizer can call it anywhere."""
        self.peers.stopping = True
        self._poke()

    def join(self, seconds: float) -> None:
        """Waits for the end of the thread after `stop`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def wake(self) -> None:
        """Makes the thread send what was queued. With `changed` held."""
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
        """Sends signs of life in a session until the block ends; blocks may overlap, even in several threads.

        Connects with the others where that is not done.

        Args:
            seconds: after which others would give this rank up.

        Raises:
            RankError, OptionError: as `start`.
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
        """Waits until ranks below have all that is queued for them, will get it from the system, or are gone.

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
                    if not waited_for or now >= end or self.failure is not None or self.peers.stopping:
                        return
                    gives_up = min(since for _, _, since in waited_for.values()) + patience
                    self.changed.wait(min(end, gives_up) - now)
            finally:
                self._handing_over -= 1

    # The thread.

    def _run(self) -> None:
        try:
            while not self.peers.stopping:
                self._meet()
                self._serve(lambda: not (self.peers.stopping or self.peers.meets_again))
            self._leave()
        except BaseException as error:
            self.failure = error
        finally:
            with self.changed:
                self.peers.close(_CLOSE_SECONDS)
                for end in self._wake or ():
                    end.close()
                self.hub.notify()

    def _leave(self) -> None:
        """Delivers what ranks below are due, however often their connections break; for a limited time."""
        end = world().monotonic() + _CLOSE_SECONDS + _LEAVING_SECONDS
        while True:
            with self.changed:
                self.peers.leave(_CLOSE_SECONDS, end)
            if not self.peers.are_awaited(end):
                return
            self._serve(lambda: self.peers.are_awaited(end), LINGER_SECONDS)

    def _meet(self) -> None:
        """Connects with the leader, and listens for ranks below; returns when done, or when this rank has left."""
        with self.changed:
            assert self._wake is not None
            self.peers.open(self._wake[0])
            self.hub.begin()
        if self.tree.rank == 0:
            session = Entry(world().random_name(8), world().random_name(32), self._listen())
            self.peers.session = session
            publish(self.store, "session", session)
            return
        begun, told = world().monotonic(), ""
        while not self.peers.stopping:
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
        """Tries once to connect with the leader; returns whether it succeeded."""
        session = read(self.store, "session")
        if session is None or self.tree.leader is None:
            return False
        leader: Entry | None = session
        if self.tree.leader != 0:
            leader = read(self.store, leader_key(session.name, self.tree.leader))
        self.peers.session, self.reached = session, self.tree.leader
        if leader is None:
            return False

        def is_last() -> bool:
            last = read(self.store, "session")
            return last is not None and last.name == session.name

        meeting = Meeting(session.name, session.key, self.tree.rank, self.tree.leader)
        try:
            met = meet(leader.at, meeting, lambda: not self.peers.stopping, most_seconds, is_last)
        except NotMet as error:
            if not self.was_taken:
                self.unreached = f"at {text_of(leader.at)} ({error})"
            return False
        self.unreached = ""
        with self.changed:
            self.peers.add_above(met)
        if self.tree.has_listener:
            publish(self.store, leader_key(session.name, self.tree.rank), Entry(session.name, "", self._listen()))
        return True

    def _listen(self) -> tuple[Place, ...]:
        """Listens at this host's addresses; returns them."""
        assert self._network is not None
        return self.peers.listen(self._network)

    def _say_unreached(self, waited: float, told: str) -> str:
        """Tells rank 0, through the store, why this rank cannot reach the one above it; returns that text."""
        text = self.unreached if waited >= _UNREACHED_SECONDS else ""
        if text and text != told and self.session is not None:
            self.store.set(unreached_key(self.session.name, self.tree.rank), text)
        return text or told

    def _pause(self, seconds: float) -> None:
        self.peers.selector.select(seconds)  # only what wakes this thread is in it now
        with self.changed:
            self._drain_wake()

    def _serve(self, continues: Callable[[], bool], most_seconds: float = _NEVER) -> None:
        """Sends and receives while `continues`, which it checks each time, and after a limited number of seconds."""
        peers = self.peers
        while True:
            with self.changed:
                if not peers.are_open or not continues():
                    return
                now = world().monotonic()
                while self.forgotten:
                    self.hub.forget(self.forgotten.popleft())
                self._beat(now)
                peers.flush()
                if self._handing_over:
                    self.hub.notify()
                peers.drop_late(now)
                self._sleeps_until = min([self._next_beat(), peers.due()])
                above = peers.comes_back(now)
            if above is not None:
                peers.come_back(above)
                continue
            left = min(max(0.0, self._sleeps_until - now), most_seconds)
            events = peers.selector.select(None if left == _NEVER else left)
            with self.changed:
                for key, mask in events:
                    if not peers.attend(key.fileobj, key.data, mask):
                        self._drain_wake()

    def _beat(self, now: float) -> None:
        for name, session in self.hub.sessions.items():
            if session.intervals and session.beaten + min(session.intervals) <= now:
                session.beaten = now
                self.hub.beat(name)

    def _next_beat(self) -> float:
        sessions = [session for session in self.hub.sessions.values() if session.intervals]
        return min((session.beaten + min(session.intervals) for session in sessions), default=_NEVER)

    def _drain_wake(self) -> None:
        self._woken = False
        assert self._wake is not None
        with suppress(BlockingIOError):
            self._wake[0].recv(4096)

    def abandon(self) -> None:
        """Abandons the node in a forked child, which has no thread and closed sockets; they stay the parent's."""
        self.peers.stopping = True
        self.peers.abandon()


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
