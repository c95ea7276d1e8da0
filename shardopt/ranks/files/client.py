"""Asks a rank of another host for byte ranges of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardopt.ranks.connections.join import Entry
from shardopt.ranks.connections.meeting import CONNECT_SECONDS, NotMet, meet
from shardopt.ranks.connections.proof import Meeting
from shardopt.ranks.files.server import (
    FOUND,
    MOST_RANGES,
    MOST_REASON_BYTES,
    REPLY,
    SILENT_SECONDS,
    Request,
    encode,
    receive,
    receive_into,
)
from shardopt.world import Socket, world

Span = tuple[int, memoryview]
"""An offset in a file, and the memory for the bytes from there on."""


class FileClient:
    """Connections with one rank's server, made on demand; any thread may ask.

    Args:
        server: the session's name and key, and where it listens.
        below, above: this rank, and that of the server.
    """

    def __init__(self, server: Entry, below: int, above: int) -> None:
        self._server, self._below, self._above = server, below, above
        self._lock = world().lock()
        self._free: list[Socket] = []

    def read_into(self, directory: str, name: str, spans: Sequence[Span]) -> None:
        """Fills the memory of spans from a file.

        Raises:
            FileNotFoundError: the other rank has no such file for this one, or not so many bytes of it.
            OSError: the other rank cannot be reached, or has gone.
        """
        for begin in range(0, len(spans), MOST_RANGES):
            some = spans[begin : begin + MOST_RANGES]
            socket = self._take()
            try:
                self._ask(socket, directory, name, some)
            except FileNotFoundError:
                self._put(socket)
                raise
            except BaseException:
                socket.close()
                raise
            self._put(socket)

    def read(self, directory: str, name: str, begin: int, nbytes: int) -> bytes:
        """Returns bytes of a file; otherwise as `read_into`."""
        data = bytearray(nbytes)
        self.read_into(directory, name, [(begin, memoryview(data))])
        return bytes(data)

    def close(self) -> None:
        """Closes the connections that are not in use."""
        with self._lock:
            free, self._free = self._free, []
        for socket in free:
            socket.close()

    def _ask(self, socket: Socket, directory: str, name: str, spans: Sequence[Span]) -> None:
        ranges = [(offset, memory.nbytes) for offset, memory in spans]
        socket.sendall(encode(Request(directory, name, ranges)))
        status, length = REPLY.unpack(receive(socket, REPLY.size))
        if status != FOUND:
            if length > MOST_REASON_BYTES:
                raise ConnectionAbortedError("a reply that is none")
            raise FileNotFoundError(f"{name}: {receive(socket, length).decode(errors='replace')}")
        if length != sum(nbytes for _, nbytes in ranges):
            raise ConnectionAbortedError("a reply that is none")
        for memory in _bytes_of(spans):
            receive_into(socket, memory)

    def _take(self) -> Socket:
        with self._lock:
            while self._free:
                socket = self._free.pop()
                if socket.fileno() >= 0:  # in a child that was forked they are closed, and stay the parent's
                    return socket
        end = world().monotonic() + SILENT_SECONDS
        meeting = Meeting(self._server.name, self._server.key, self._below, self._above)
        try:
            met = meet(self._server.at, meeting, lambda: world().monotonic() < end, CONNECT_SECONDS[1])
        except NotMet as error:
            raise ConnectionRefusedError(f"rank {self._below} does not reach rank {self._above}: {error}") from error
        socket = met.link.socket
        socket.settimeout(SILENT_SECONDS)
        return socket

    def _put(self, socket: Socket) -> None:
        with self._lock:
            self._free.append(socket)


def _bytes_of(spans: Sequence[Span]) -> Iterator[memoryview]:
    for _, memory in spans:
        yield memory.cast("B") if memory.ndim != 1 or memory.itemsize != 1 else memory
