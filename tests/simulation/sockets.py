"""Connections between simulated processes, and selectors: as TCP, with delays, silence and resets.

What is sent arrives in order on one connection, and in any order on several. The end of a process ends its connections;
one that is cut off is silent. A connection that is closed with bytes unread is reset, which destroys what its peer has
not read.
"""

from __future__ import annotations

import errno
import selectors
from typing import Any

from tests.simulation.store import Network
from tests.simulation.tasks import Killed, Process, Scheduler, Task

_SECONDS = 150e-6  # on the way
_ROOM_BYTES = 1 << 16  # that fit between a sender and a reader
_KEEPALIVE_SECONDS = 1.0  # in which who has lost nothing yet is told: half of the deadline; of the real ones a fifth
_PORTS = 12  # of a host: soon one is given again, to somebody else


class Fabric:
    """What joins the hosts: who listens where."""

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self.scheduler, self.network = scheduler, network
        self.listening: dict[tuple[str, int], SimulatedSocket] = {}
        self.descriptors = 10
        self.sockets: list[SimulatedSocket] = []

    def socket(self, process: Process) -> SimulatedSocket:
        self.descriptors += 1
        made = SimulatedSocket(self, process, self.descriptors)
        process.at_end.append(made.close)
        self.sockets.append(made)
        return made

    def reset_one(self, process: Process) -> None:
        """Resets one connection of a process with another, for both, or for one of them alone at first."""
        self.sockets = [each for each in self.sockets if not each.closed]
        chance = self.scheduler.random
        there = [
            each
            for each in self.sockets
            if each.process is process and each.peer is not None and each.peer.process is not process
        ]
        if not there:
            return
        one = chance.choice(there)
        other = one.peer
        assert other is not None
        self.scheduler.note(process.name, f"loses its connection with {other.process.name}")
        if chance.random() < 0.5:
            one, other = other, one
        one._break()
        late = chance.choice((0.0, chance.uniform(0.0, _KEEPALIVE_SECONDS)))
        self.scheduler.at(self.scheduler.now + late, lambda: None if other.closed else other._break())

    def pair(self, process: Process) -> tuple[SimulatedSocket, SimulatedSocket]:
        one, other = self.socket(process), self.socket(process)
        one.peer, other.peer = other, one
        return one, other

    def listen(self, process: Process, host: str) -> SimulatedSocket:
        listener = self.socket(process)
        free = [port for port in range(30000, 30000 + _PORTS) if (host, port) not in self.listening]
        if not free:
            raise OSError(errno.EADDRINUSE, "no port is free")
        listener.address = host, self.scheduler.random.choice(free)
        self.listening[listener.address] = listener
        return listener

    def begin_connect(self, process: Process, host: str, port: int) -> SimulatedSocket:
        scheduler = self.scheduler
        scheduler.operate(f"connect {host}:{port}", 3e-6, looks_only=True)
        connecting = self.socket(process)

        def arrive() -> None:
            if connecting.closed or process.dead:
                return
            listener = self.listening.get((host, port))
            cut = self.network.seconds_cut(process)
            if listener is not None:
                cut = max(cut, self.network.seconds_cut(listener.process))
            if cut:
                scheduler.at(scheduler.now + cut, arrive)
                return
            if listener is None or listener.closed:
                connecting.refused = f"nobody listens at {host}:{port}"
            else:
                other = self.socket(listener.process)
                connecting.peer, other.peer = other, connecting
                listener.accepting.append(other)
                listener.wake()
            connecting.wake()

        scheduler.at(scheduler.now + scheduler.draw(2 * _SECONDS), arrive)
        return connecting


class SimulatedSocket:
    """As a `socket.socket` that does not block."""

    def __init__(self, fabric: Fabric, process: Process, descriptor: int) -> None:
        self.fabric, self.process, self._descriptor = fabric, process, descriptor
        self.peer: SimulatedSocket | None = None
        self.address = (process.address, 0)
        self.accepting: list[SimulatedSocket] = []
        self.inbox = bytearray()
        self.under_way = 0  # bytes that were sent here and have not come
        self.ended = self.reset = self.closed = self.shut = False
        self.refused = ""
        self.watchers: list[SimulatedSelector] = []
        self._arrives = 0.0  # the last of what was sent from here

    def finish_connect(self) -> None:
        if self.refused:
            raise ConnectionRefusedError(errno.ECONNREFUSED, self.refused)

    def fileno(self) -> int:
        return -1 if self.closed else self._descriptor

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def setsockopt(self, *unused: Any) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def getpeername(self) -> tuple[str, int]:
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.peer.address

    def is_readable(self) -> bool:
        return bool(self.accepting or self.inbox or self.ended or self.reset)

    def is_writable(self) -> bool:
        return bool(self.refused) or (self.peer is not None and (self.reset or self._room() > 0))

    def _room(self) -> int:
        assert self.peer is not None
        return _ROOM_BYTES - len(self.peer.inbox) - self.peer.under_way

    def wake(self) -> None:
        """Wakes who waits for this socket."""
        for watcher in self.watchers:
            watcher.wake()

    def accept(self) -> tuple[SimulatedSocket, tuple[str, int]]:
        self._require_open()
        if not self.accepting:
            raise BlockingIOError(errno.EAGAIN, "nobody has come")
        accepted = self.accepting.pop(0)
        return accepted, accepted.getpeername()

    def send(self, data: Any, flags: int = 0) -> int:
        self._require_open()
        if self.reset:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was reset")
        if self.shut or self.peer is None:
            raise BrokenPipeError(errno.EPIPE, "nothing can be sent any more")
        room, chance = self._room(), self.fabric.scheduler.random
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "there is no room")
        taken = bytes(memoryview(data)[:room])
        if len(taken) > 1 and chance.random() < 0.05:
            taken = taken[: chance.randint(1, len(taken))]
        peer = self.peer
        peer.under_way += len(taken)

        def arrive() -> None:
            peer.under_way -= len(taken)
            if peer.closed:
                self._send_off(self._break)  # nobody reads it any more
            elif not peer.reset:
                peer.inbox += taken
                peer.wake()

        self._send_off(arrive)
        if peer.process is not self.process and self.fabric.scheduler.current is not None:
            self.fabric.scheduler.note(self.process.name, f"sends {len(taken)} bytes to {peer.process.name}")
            self.fabric.scheduler.count(self.process)  # killed just here, it has sent them
        return len(taken)

    def recv(self, count: int) -> bytes:
        self._require_open()
        chance = self.fabric.scheduler.random
        if self.inbox:
            if len(self.inbox) > 1 and chance.random() < 0.05:
                count = min(count, chance.randint(1, len(self.inbox)))
            taken = bytes(self.inbox[:count])
            del self.inbox[:count]
            if self.peer is not None:
                self.peer.wake()  # there is room again
            return taken
        if self.reset:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was reset")
        if self.ended:
            return b""
        raise BlockingIOError(errno.EAGAIN, "nothing has come")

    def shutdown(self, how: int) -> None:
        if self.closed or self.peer is None or self.reset:
            raise OSError(errno.ENOTCONN, "not connected")
        self._finish()

    def close(self) -> None:
        """Closes it, as the end of its process does."""
        if self.closed:
            return
        self.closed = True
        self.fabric.listening.pop(self.address, None) if self.peer is None else None
        for waiting in self.accepting:
            waiting.close()
        if self.peer is not None and not self.reset:
            if self.inbox:
                self._send_off(self.peer._break)
            else:
                self._finish()
        self.inbox.clear()

    def abort(self) -> None:
        """Closes it, and resets the connection."""
        if not self.closed and not self.reset and self.peer is not None:
            self._send_off(self.peer._break)
            self.reset = True
        self.close()

    def _finish(self) -> None:
        peer = self.peer
        assert peer is not None
        if not self.shut:
            self.shut = True

            def end() -> None:
                peer.ended = True
                peer.wake()

            self._send_off(end)

    def _break(self) -> None:
        self.reset = True
        self.inbox.clear()
        self.wake()

    def _send_off(self, arrive: Any) -> None:
        """Has something arrive at the peer, after all that was sent before, and not while one of them is cut off."""
        fabric, peer = self.fabric, self.peer
        assert peer is not None
        scheduler = fabric.scheduler
        if peer.process is self.process:
            scheduler.at(scheduler.now, arrive)
            return
        cut = max(fabric.network.seconds_cut(self.process), fabric.network.seconds_cut(peer.process))
        self._arrives = max(self._arrives, scheduler.now + cut + scheduler.draw(_SECONDS))
        scheduler.at(self._arrives, lambda: _unless_cut(fabric, self, peer, arrive))

    def _require_open(self) -> None:
        current = self.fabric.scheduler.current
        if self.process.dead and current is not None and current.process is self.process:
            raise Killed
        if self.closed or self.process.dead:
            raise OSError(errno.EBADF, "the socket is closed")


def _unless_cut(fabric: Fabric, sender: SimulatedSocket, peer: SimulatedSocket, arrive: Any) -> None:
    """Has something arrive now, or after a cut that has begun meanwhile."""
    cut = max(fabric.network.seconds_cut(sender.process), fabric.network.seconds_cut(peer.process))
    if cut:
        scheduler = fabric.scheduler
        sender._arrives = max(sender._arrives, scheduler.now + cut)
        scheduler.at(scheduler.now + cut, lambda: _unless_cut(fabric, sender, peer, arrive))
    else:
        arrive()


class SimulatedSelector:
    """As `selectors.DefaultSelector`; of several that are ready any may come first."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler, self._process = scheduler, process
        self._keys: dict[SimulatedSocket, selectors.SelectorKey] = {}
        self._waiting: Task | None = None

    def register(self, fileobj: SimulatedSocket, events: int, data: Any = None) -> selectors.SelectorKey:
        if fileobj in self._keys:
            raise KeyError(f"{fileobj} is registered already")
        key = selectors.SelectorKey(fileobj, fileobj.fileno(), events, data)
        self._keys[fileobj] = key
        fileobj.watchers.append(self)
        return key

    def unregister(self, fileobj: SimulatedSocket) -> selectors.SelectorKey:
        fileobj.watchers.remove(self)
        return self._keys.pop(fileobj)

    def modify(self, fileobj: SimulatedSocket, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = key = self._keys[fileobj]._replace(events=events, data=data)
        self.wake()  # a change counts also for who is waiting
        return key

    def get_map(self) -> dict[SimulatedSocket, selectors.SelectorKey]:
        return self._keys

    def wake(self) -> None:
        """Has `select` look once more."""
        if self._waiting is not None:
            self._scheduler.wake(self._waiting)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        scheduler = self._scheduler
        scheduler.pause(scheduler.draw(3e-6))
        end = None if timeout is None else scheduler.now + max(timeout, 0.0)
        while not (ready := self._ready()):
            left = None if end is None else end - scheduler.now
            if left is not None and left <= 0:
                return []
            self._waiting = scheduler.current
            try:
                scheduler.block(left)
            finally:
                self._waiting = None
        if len(ready) > 1:
            scheduler.random.shuffle(ready)
        return ready

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        ready = []
        for socket, key in self._keys.items():
            if not socket.closed:
                mask = selectors.EVENT_READ if socket.is_readable() else 0
                if key.events != selectors.EVENT_READ and socket.is_writable():
                    mask |= selectors.EVENT_WRITE
                if mask := mask & key.events:
                    ready.append((key, mask))
        return ready

    def close(self) -> None:
        for socket in self._keys:
            socket.watchers.remove(self)
        self._keys = {}
