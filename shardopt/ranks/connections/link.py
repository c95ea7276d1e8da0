"""One connection with another rank: what waits to be sent, and what has been heard."""

from __future__ import annotations

from collections import deque

from shardopt.ranks.connections.frames import BadFrame, Decoder, Message, encode
from shardopt.world import NO_SIGNAL, Socket

_CHUNK_BYTES = 256 << 10


class Ended(Exception):
    """The peer has closed the connection, or it broke."""


class Link:
    """A socket that does not block, with a queue before it. One thread alone sends and receives.

    The queue has no bound of its own: a rank that takes nothing can be due no more than the answer of a round, its
    sections, and some bytes each few seconds, for without its report there is no other round.

    Attributes:
        rank: of the peer; None until it has proved who it is.
        heard: how many times something was received.
        queued_bytes, sent_bytes, received_bytes: since the beginning; `sent_bytes` were handed to the system.
        waits_to_write: whether the thread waits for room to send more.
        stuck_at: how much was sent when the peer was last waited for in vain, to take more; -1 if it never was.
    """

    def __init__(self, socket: Socket, rank: int | None = None) -> None:
        self.socket, self.rank = socket, rank
        self.open = True
        self.heard = self.queued_bytes = self.sent_bytes = self.received_bytes = 0
        self.waits_to_write = False
        self.stuck_at = -1
        self._decoder = Decoder()
        self._queue: deque[memoryview] = deque()

    @property
    def session_under_way(self) -> bytes | None:
        """The session of a message of which a part has come."""
        return self._decoder.session_under_way

    def trust(self) -> None:
        """Takes longer messages from now on."""
        self._decoder.trust()

    def put(self, buffers: list[bytes | memoryview]) -> None:
        """Queues a message that was encoded."""
        for buffer in buffers:
            self._queue.append(memoryview(buffer))
            self.queued_bytes += len(buffer)

    def put_message(self, message: Message) -> None:
        """Queues a message."""
        self.put(encode(message))

    @property
    def is_empty(self) -> bool:
        """Whether all that was queued has been handed to the system."""
        return not self._queue

    def flush(self) -> None:
        """Hands to the system what it takes.

        Raises:
            Ended: it takes nothing any more.
        """
        try:
            while self._queue:
                buffer = self._queue.popleft()
                sent = self.socket.send(buffer, NO_SIGNAL)
                self.sent_bytes += sent
                if sent < len(buffer):
                    self._queue.appendleft(buffer[sent:])
        except BlockingIOError:
            self._queue.appendleft(buffer)
        except OSError as error:
            raise Ended(str(error)) from error

    def receive(self) -> list[Message]:
        """Takes what has come; returns the messages that are complete.

        Raises:
            Ended: nothing more will come, or what came is not what a rank sends.
        """
        try:
            data = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Ended(str(error)) from error
        if not data:
            raise Ended("end of file")
        self.heard += 1
        self.received_bytes += len(data)
        try:
            return self._decoder.feed(data)
        except BadFrame as error:
            raise Ended(str(error)) from error

    def close(self) -> None:
        """Closes the socket. What was handed to the system is still delivered."""
        if self.open:
            self.open = False
            self._queue.clear()
            self.socket.close()
