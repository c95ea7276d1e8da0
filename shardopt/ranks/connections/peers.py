"""The connections of a node with its neighbours, each of which continues over another socket after a break."""

from __future__ import annotations

from collections.abc import Callable

from shardopt.ranks.connections.address import Network
from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.join import Entry
from shardopt.ranks.connections.link import Broken, Closed, Ended, Link, take_leave
from shardopt.ranks.connections.meeting import CONNECT_SECONDS, Met, NotMet, Place, meet
from shardopt.ranks.connections.message_hub import MessageHub
from shardopt.ranks.connections.proof import Listening, Meeting, Refused, Side
from shardopt.ranks.connections.tree import Tree
from shardopt.ranks.connections.unauthenticated import UnauthenticatedPeers
from shardopt.world import READ, WRITE, Selector, Socket, world

_RETURN_SECONDS = 5.0  # for which a rank is waited for whose connection broke, and which has not closed it
_RETURN_PAUSE_SECONDS = 0.05
_NEVER = float("inf")


class Peers:
    """The sockets of one rank. Only the node's thread uses them, and changes them with the hub's `changed` held.

    Attributes:
        session: the session that this rank is in, or tries; None before it knows one.
        left: the session of whose leader or rank 0 this rank was taken, and cut off before there was an answer.
        refuses: whether nobody is taken any more: the session has ended.
        stopping: whether this rank leaves.
        meets_again: whether the way up was lost before there was an answer: it may have been an older job's.
    """

    def __init__(self, tree: Tree, hub: MessageHub) -> None:
        self._tree, self._hub = tree, hub
        self.session: Entry | None = None
        self.left: Entry | None = None
        self.refuses = self.stopping = self.meets_again = False
        self.unauthenticated = UnauthenticatedPeers()
        self._selector: Selector | None = None
        self._listeners: list[Socket] = []
        self._above_at: Place | None = None  # where the rank above was found
        self._broken: dict[Link, float] = {}  # connections that broke, with the times until which they may come back
        self._returns_at = _NEVER

    @property
    def selector(self) -> Selector:
        """The selector that waits for all sockets, while they are open."""
        assert self._selector is not None
        return self._selector

    @property
    def are_open(self) -> bool:
        """Whether the sockets are open."""
        return self._selector is not None

    def open(self, wake: Socket) -> None:
        """Starts again with only the socket that wakes the thread."""
        self.close(0.0)
        self.meets_again = False
        self._selector = world().selector()
        self._selector.register(wake, READ)

    def listen(self, network: Network) -> tuple[Place, ...]:
        """Listens at this host's addresses; returns them."""
        listeners = network.listen()
        with self._hub.changed:
            for listener in listeners:
                self.selector.register(listener, READ)
            self._listeners += listeners
        return tuple(listener.getsockname()[:2] for listener in listeners)

    def add_above(self, met: Met) -> None:
        """Takes the connection with the rank above, on which both have proved themselves."""
        assert self._tree.leader is not None
        self._above_at, link = met.place, met.link
        link.seal(met.side.key, met.side.from_below, met.side.from_above)
        self.selector.register(link.socket, READ, link)
        self._hub.links[self._tree.leader] = link
        self._hub.repeat()
        self._take(link, link.rest)

    def attend(self, socket: object, link: Link | None, mask: int) -> bool:
        """Handles a ready socket; returns whether it is one of these."""
        if link is None:
            if socket not in self._listeners:
                return False
            self._accept(socket)
            return True
        if link.open and mask & WRITE and link.rank is not None:
            self._hub.to_flush[link.rank] = link
        if link.open and not link.suspended and mask & READ:
            self._take(link, link.receive)
        return True

    def _take(self, link: Link, receive: Callable[[], list[Message]]) -> None:
        """Takes received messages; with `Link.rest`, those that came before this end knew the frames' keys."""
        try:
            for message in receive():
                if not link.open:
                    return
                if link.rank is None:
                    self._prove(link, message)
                else:
                    self._hub.take(link.rank, message)
            if link.rank is not None:
                if link.session_under_way is not None:
                    self._hub.sign(link.rank, link.session_under_way)
                if not link.is_empty:
                    self._hub.to_flush[link.rank] = link  # it confirms what has come
            link.check()
        except (Ended, Refused) as error:
            self._end(link, error)

    def _end(self, link: Link, error: Exception) -> None:
        """Drops an ended connection; waits for its peer if that may live and come back.

        Who listens is told the end of a process by its system, which closes the connection: so that one is lost at
        once. Whoever has connected tries to come back each time: where that process has ended nobody listens.
        """
        is_link = link.rank is not None and self._hub.links.get(link.rank) is link
        may_return = isinstance(error, Broken) or (
            isinstance(error, Closed) and link.rank == self._tree.leader and not link.left
        )
        # One below is waited for also where this rank leaves: it may not have the last answer.
        leaves = self.stopping and link.rank == self._tree.leader
        if not (link.open and is_link and may_return) or leaves:
            self._drop(link)
            return
        self.selector.unregister(link.socket)
        now = world().monotonic()
        self._broken[link], self._returns_at = now + _RETURN_SECONDS, now
        if not link.suspend():
            self._drop(link)

    def due(self) -> float:
        """Returns when the next peer has waited too long, or is to come back."""
        leader = self._tree.leader
        returns = [self._returns_at if link.rank == leader else end for link, end in self._broken.items()]
        return min([self.unauthenticated.due(), *returns])

    def drop_late(self, now: float) -> None:
        """Drops peers that have waited too long to prove themselves, or have not come back."""
        late = [link for link, end in self._broken.items() if end <= now and link.rank != self._tree.leader]
        for link in [*self.unauthenticated.silent(now), *late]:
            self._drop(link)

    def comes_back(self, now: float) -> Link | None:
        """Returns the connection with the rank above, if it broke and is due for another try."""
        above = next((link for link in self._broken if link.rank == self._tree.leader), None)
        return above if above is not None and self._returns_at <= now else None

    def come_back(self, link: Link) -> None:
        """Connects again with the leader; on any rank except 0. Without `changed`, as it waits."""
        assert self.session is not None and self._tree.leader is not None and self._above_at is not None
        until = self._broken[link]
        meeting = Meeting(self.session.name, self.session.key, self._tree.rank, self._tree.leader)
        waits_on, seconds = lambda: not self.stopping, CONNECT_SECONDS[0]
        try:
            met = meet([self._above_at], meeting, waits_on, seconds, key=link.key, taken=link.taken)
        except NotMet as error:
            with self._hub.changed:
                self._returns_at = world().monotonic() + _RETURN_PAUSE_SECONDS
                if error.refused or self._returns_at > until:
                    self._drop(link)
            return
        with self._hub.changed:
            self.selector.register(met.link.socket, READ, link)
            self._resume(link, met.link, met.side)

    def _resume(self, link: Link, other: Link, side: Side) -> None:
        """Continues with a peer over another connection, on which it has proved itself."""
        self._broken.pop(link, None)
        sends, receives = side.from_below, side.from_above
        told, said = side.taken
        if link.rank != self._tree.leader:
            sends, receives, told, said = receives, sends, said, told
        try:
            link.resume(other, sends, receives, said, told)
        except Ended:
            link.socket, link.suspended = other.socket, False
            self._drop(link)
            return
        assert link.rank is not None
        self._hub.to_flush[link.rank] = link
        self._take(link, link.rest)

    def _accept(self, listener: Socket) -> None:
        assert self.session is not None
        side = Listening(self.session.name, self.session.key, self._tree.rank, self._known)
        link = self.unauthenticated.accept(listener, side)
        if link is not None:
            self.selector.register(link.socket, READ, link)

    def _known(self, rank: int) -> Link | None:
        """Returns the connection of a rank below that may come back."""
        return self._hub.links.get(rank) if rank in self._tree.children else None

    def _prove(self, link: Link, message: Message) -> None:
        side = self.unauthenticated.prove(link, message)
        if side is None:
            return
        before = self._known(side.rank)
        is_waited_for = side.rank in self._tree.children and side.rank not in self._hub.came and not self.refuses
        # Its connection may have broken before it knew that it was taken.
        is_waited_for = is_waited_for or (before is not None and before.suspended and before.taken == 0)
        if before is None if side.returns else not is_waited_for:
            raise Refused("nobody is waited for under this number")
        self.unauthenticated.forget(link)
        link.put_message(Message(Kind.WELCOME))
        if side.returns and before is not None:
            # This end may not have noticed that it was gone.
            if not before.suspended:
                self.selector.unregister(before.socket)
                before.suspend()
            self.selector.modify(link.socket, READ, before)
            link.open = False  # it has given its socket away
            self._resume(before, link, side)
            return
        link.rank = side.rank
        link.seal(side.key, side.from_above, side.from_below)
        if before is None:
            self._hub.welcome(side.rank, link)
            return
        link.take_over(before)
        self._broken.pop(before, None)
        before.close()
        self._hub.links[side.rank] = self._hub.to_flush[side.rank] = link

    def _drop(self, link: Link) -> None:
        """Closes a connection that has ended, or is to end."""
        if not link.open:
            return
        self._broken.pop(link, None)
        if not link.suspended:
            self.selector.unregister(link.socket)
        self.unauthenticated.forget(link)
        link.close()
        rank = link.rank
        if rank is None or self._hub.links.get(rank) is not link:
            return
        if rank == self._tree.leader and not self._hub.answered:
            self.meets_again, self.left = True, self.session
        else:
            self._hub.lose(rank)

    def flush(self) -> None:
        """Hands queued bytes to the system."""
        while self._hub.to_flush:
            links, self._hub.to_flush = self._hub.to_flush, {}
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
                    self.selector.modify(link.socket, READ | WRITE if link.waits_to_write else READ, link)

    def leave(self, seconds: float, end: float) -> None:
        """Delivers what was sent to ranks below, and closes their connections but for those that break just then.

        Args:
            seconds: for all of them to take it.
            end: until when they may come back.
        """
        links = dict(self._hub.links)
        broken = take_leave([*links.values()], max(0.0, min(seconds, end - world().monotonic())))
        for rank, link in links.items():
            if not link.suspended:
                self.selector.unregister(link.socket)
            if link in broken and rank != self._tree.leader and link.suspend():
                self._broken[link] = end
            elif not link.suspended or rank == self._tree.leader:
                link.close()
                self._broken.pop(link, None)
                del self._hub.links[rank]

    def are_awaited(self, end: float) -> bool:
        """Whether a rank below that lacks something may still come back, until `end`."""
        return any(not link.is_confirmed for link in self._broken) and world().monotonic() < end

    def close(self, seconds: float) -> None:
        """Closes all connections, once their peers have everything queued, or after a time limit."""
        self._broken.clear()
        if self._selector is not None:
            take_leave([*self._hub.links.values()], seconds)
        for link in (*self._hub.links.values(), *self.unauthenticated.links()):
            self.unauthenticated.forget(link)
            link.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self.unauthenticated = UnauthenticatedPeers()
        self.abandon()

    def abandon(self) -> None:
        """Closes the selector in a forked child, whose sockets are closed already and stay the parent's."""
        if self._selector is not None:
            self._selector.close()
            self._selector = None
