"""One connection with another rank, which may continue over another socket: its queue, what it receives, its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from shardopt.ranks.connections.frames import BadFrame, Decoder, Frame, Kind, Message, Sealer, Unsealer, encode
from shardopt.world import NO_SIGNAL, SHUT_WR, Socket, world

_CHUNK_BYTES = 256 << 10
_UNCONFIRMED_BYTES = 256 << 10  # of frames that have come: so many are confirmed, if nothing is said anyway

LINGER_SECONDS = 0.002
"""The pause between two looks at peers that are waited for."""
_MOST_TIMES_IN_VAIN = 64  # for which a peer comes back, and not one frame passes either way


class Ended(Exception):
    """Nothing more will come from the peer: it has closed the connection, or sent what no rank sends."""


class Closed(Ended):
    """The peer has closed the connection, as its process has ended or is about to."""


class Broken(Ended):
    """The connection broke, or got foreign bytes; nothing is known of the peer."""


class Link:
    """A non-blocking socket with a queue of messages to send. Only one thread sends and receives.

    The queue has no bound of its own: a rank that takes nothing can be due no more than the answer of a round, its
    sections, and some bytes each few seconds, for without its report there is no other round. What was sent is kept
    until the peer has it, and sent once more where the peer comes back over another connection.

    Attributes:
        rank: of the peer; None until it has proved who it is.
        key: by which the peer proves that it is the same process when it comes back; "" before it has proved itself.
        left: whether the peer has said that it ends the connection.
        suspended: whether the connection broke, and the peer is waited for.
        heard: how many times something was received.
        sent_bytes: that were handed to the system since the beginning.
        waits_to_write: whether the thread waits for room to send more.
        stuck_at: `moved_bytes` when the peer was last waited for in vain, to take more; -1 if it never was.
    """

    def __init__(self, socket: Socket, rank: int | None = None) -> None:
        self.socket, self.rank = socket, rank
        self.key = ""
        self.open = True
        self.left = self.suspended = False
        self.heard = self.sent_bytes = 0
        self.waits_to_write = False
        self.stuck_at = -1
        self._decoder = Decoder()
        self._sealer: Sealer | None = None
        self._unsealer: Unsealer | None = None
        self._out: deque[memoryview] = deque()  # of the frame that is being sent
        self._queue: deque[Frame] = deque()
        self._kept: deque[Frame] = deque()  # sent, and not confirmed
        self._confirmed = self._confirmed_bytes = 0  # frames that the peer has
        self._again = 0  # frames at the head of the queue that were sent over an earlier socket, too
        self._said_taken = 0  # frames that the peer has said it has: some of them may still be in the queue
        self._put = self._put_bytes = 0  # frames that were queued since the peer proved itself
        self._passed_before = self._times_in_vain = 0  # frames when the peer last came back; how often without any new

    @property
    def session_under_way(self) -> bytes | None:
        """The session of a partly received message."""
        return self._decoder.session_under_way

    @property
    def taken(self) -> int:
        """The number of the peer's frames taken since it proved itself."""
        return 0 if self._unsealer is None else self._unsealer.taken

    def seal(self, key: str, sends: bytes, receives: bytes) -> None:
        """Seals everything that follows, after the peer has proved itself.

        Args:
            key: by which it comes back.
            sends, receives: the keys of the frames of each direction.
        """
        self.key = key
        self._sealer, self._unsealer = Sealer(sends, 0), Unsealer(receives, 0, 0, self._confirm)
        self._decoder.trust(self._unsealer)

    def suspend(self) -> bool:
        """Waits for the peer to come back; returns whether that may help, which it does not after repeated failures."""
        self.suspended = True
        world().abort(self.socket)
        self._out.clear()
        self.waits_to_write = False
        passed = self.taken + self._confirmed
        self._times_in_vain = self._times_in_vain + 1 if passed == self._passed_before else 0
        self._passed_before = passed
        return self.key != "" and self._times_in_vain < _MOST_TIMES_IN_VAIN

    def resume(self, other: Link, sends: bytes, receives: bytes, said: int, told: int) -> None:
        """Continues over another link's socket, on which the same peer has proved itself.

        Args:
            sends, receives: the keys of the frames of each direction.
            said: how many frames the peer said it has taken.
            told: how many it was told are taken here.

        Raises:
            Ended: it cannot have taken so many, or has thrown away what it has not.
        """
        if not self._confirmed <= said <= self._sent_once or told > self.taken:
            raise Ended("the peer has taken another number of frames than it was sent")
        self.socket, self.suspended = other.socket, False
        self.waits_to_write = other.waits_to_write
        self._queue.extendleft(reversed(self._kept))
        self._again += len(self._kept)
        self._kept.clear()
        while self._confirmed < said:
            self._note_confirmed(self._queue.popleft())
            self._again -= 1
        self._out = other._out
        self._sealer, self._unsealer = Sealer(sends, said), Unsealer(receives, told, self.taken, self._confirm)
        self._decoder.begin_again(other._decoder.unread)
        self._decoder.trust(self._unsealer)

    def take_over(self, other: Link) -> None:
        """Queues what another link had queued for the same peer, which has received none of it."""
        self.put([*other._kept, *other._queue])

    @property
    def _sent_once(self) -> int:
        """The number of frames that the peer may have."""
        return self._confirmed + len(self._kept) + self._again

    def _confirm(self, taken: int) -> None:
        """Notes that the peer has so many frames.

        It may have more of them than it said when it came back: those that were still on the way in the earlier socket.
        They are sent all the same, as it counts them.
        """
        if taken > self._sent_once:
            raise BadFrame("more were confirmed than were sent")
        self._said_taken = taken
        while self._confirmed < taken and self._kept:
            self._note_confirmed(self._kept.popleft())

    def _note_confirmed(self, frame: Frame) -> None:
        self._confirmed += 1
        self._confirmed_bytes += frame.nbytes

    def put(self, frames: Sequence[Frame]) -> None:
        """Queues an encoded message."""
        for frame in frames:
            if self._sealer is None:
                self._out.extend(map(memoryview, frame.buffers))
            else:
                self._put += 1
                self._put_bytes += frame.nbytes
                self._queue.append(frame)

    def put_message(self, message: Message) -> None:
        """Queues a message."""
        self.put(encode(message))

    @property
    def is_empty(self) -> bool:
        """Whether everything queued was handed to the system."""
        return not self._queue and not self._out

    @property
    def is_confirmed(self) -> bool:
        """Whether the peer has confirmed everything that was queued for it."""
        return not self._queue and not self._kept

    @property
    def mark(self) -> tuple[int, int]:
        """The current end of the queue, for `is_handed_over`."""
        return self._put, self._put_bytes

    def is_handed_over(self, mark: tuple[int, int]) -> bool:
        """Whether the peer will get everything up to a mark even if this process ends.

        What was handed to the system arrives, unless the peer says something to a process that has ended: that destroys
        what is on the way. It says something where it confirms, so all is waited for that it is to confirm.
        """
        frames, nbytes = mark
        handed = self._put - len(self._queue) - (len(self._kept) if self.suspended else bool(self._out))
        return handed >= frames and nbytes - self._confirmed_bytes < _UNCONFIRMED_BYTES

    @property
    def moved_bytes(self) -> int:
        """A number that grows while the peer takes anything."""
        return self.sent_bytes + self._confirmed_bytes

    def flush(self) -> None:
        """Hands queued bytes to the system, as many as it accepts.

        Raises:
            Broken: it takes nothing any more.
        """
        if self.suspended:
            return
        try:
            while self._out or self._queue:
                if not self._out:
                    self._begin_frame()
                buffer = self._out.popleft()
                sent = self.socket.send(buffer, NO_SIGNAL)
                self.sent_bytes += sent
                if sent < len(buffer):
                    self._out.appendleft(buffer[sent:])
        except BlockingIOError:
            self._out.appendleft(buffer)
        except OSError as error:
            raise Broken(str(error)) from error

    def _begin_frame(self) -> None:
        assert self._sealer is not None and self._unsealer is not None
        frame = self._queue.popleft()
        seal = self._sealer.seal(frame, self.taken)
        self._kept.append(frame)
        if self._again:
            self._again -= 1
            self._confirm(self._said_taken)
        self._unsealer.unconfirmed_bytes = 0
        if len(frame.buffers) == 1:
            self._out.append(memoryview(b"".join((*frame.buffers, seal))))
        else:
            self._out.extend(map(memoryview, (*frame.buffers, seal)))

    def receive(self) -> list[Message]:
        """Takes received bytes; returns the messages that are complete.

        Raises:
            Ended: nothing more will come, or what came is not what a rank sends. Broken: as far as is known.
        """
        try:
            data = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Broken(str(error)) from error
        if not data:
            raise Closed("end of file")
        self.heard += 1
        return self._decode(data)

    def rest(self) -> list[Message]:
        """Returns the messages that came before this end knew their seals. Raises Ended."""
        return self._decode(b"")

    def check(self) -> None:
        """Raises Ended if the bytes after the last message are nothing that a rank sends."""
        if self._decoder.error is not None:
            self._decode(b"")

    def _decode(self, data: bytes) -> list[Message]:
        try:
            messages = self._decoder.feed(data)
        except BadFrame as error:
            raise (Ended if self._sealer is None else Broken)(str(error)) from error
        if self._unsealer is None:
            return messages
        if self._unsealer.unconfirmed_bytes >= _UNCONFIRMED_BYTES and not self._queue:
            self.put_message(Message(Kind.CONFIRM))
        self.left = self.left or any(message.kind == Kind.BYE for message in messages)
        return [message for message in messages if message.kind not in (Kind.CONFIRM, Kind.BYE)]

    def close(self) -> None:
        """Closes the socket. The system still delivers what it was handed."""
        if self.open:
            self.open = False
            self._queue.clear()
            self._kept.clear()
            self._out.clear()
            self.socket.close()


def take_leave(links: Sequence[Link], seconds: float) -> list[Link]:
    """Sends what is queued, announces the end, and waits for the peers to end; at most so many seconds.

    Returns:
        Those that broke before their peers had all.
    """
    end, broken = world().monotonic() + seconds, []

    def stays_open(link: Link, act: Callable[[], object]) -> bool:
        try:
            act()
        except Broken:
            broken.append(link)
            return False
        except Ended:
            return False
        return True

    links = [link for link in links if not link.suspended]
    if seconds:
        for link in links:
            link.put_message(Message(Kind.BYE))
    while seconds:
        links = [link for link in links if stays_open(link, link.flush)]  # the others still get what is theirs
        left = end - world().monotonic()
        if left <= 0 or all(link.is_empty for link in links):
            break
        world().sleep(min(left, 0.01))
    for link in links:
        with suppress(OSError):
            link.socket.shutdown(SHUT_WR)
    # Bytes that come at a closed socket, or are not read there, destroy those that were sent and have not arrived. So
    # all is read until the peers close too, which they do once they have read to the end.
    while links := [link for link in links if stays_open(link, link.receive)]:
        if world().monotonic() >= end:
            break
        world().sleep(LINGER_SECONDS)
    return broken
