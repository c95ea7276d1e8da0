"""Asks a process on another host for byte ranges of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardopt.ranks.connections.join import Entry
from shardopt.ranks.connections.meeting import CONNECT_SECONDS, NotMet, meet
from shardopt.ranks.connections.proof import Meeting
from shardopt.ranks.files.server import (
    BUSY,
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

_MOST_ANSWER_BYTES = 64 << 20  # of names


class FileClient:
    """Connections with one rank's server, made on demand; any thread may ask.

    Args:
        server: the session's name and key, and where it listens.
        below, above: this rank, and that of the server.
        name: of the server in errors; None for its rank.
    """

    def __init__(self, server: Entry, below: int, above: int, name: str | None = None) -> None:
        self._server, self._below, self._above = server, below, above
        self._unreached = f"{name} is not reached" if name else f"rank {below} does not reach rank {above}"
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
            with self._connected() as socket:
                self._ask(socket, directory, name, some)

    def read(self, directory: str, name: str, begin: int, nbytes: int) -> bytes:
        """Returns bytes of a file; otherwise as `read_into`."""
        data = bytearray(nbytes)
        self.read_into(directory, name, [(begin, memoryview(data))])
        return bytes(data)

    def read_rest(self, directory: str, name: str, begin: int, nbytes: int) -> bytes:
        """Returns so many bytes of a file, or as many as it has; otherwise as `read_into`."""
        with self._connected() as socket:
            length = _asked(socket, Request("rest", directory, name, [(begin, nbytes)]))
            if length > nbytes:
                raise ConnectionAbortedError("a reply that is none")
            return receive(socket, length)

    def size(self, directory: str, name: str) -> int:
        """Returns the size of a file in bytes; otherwise as `read_into`."""
        size = self._json(Request("size", directory, name, []))
        if type(size) is not int or size < 0:
            raise ConnectionAbortedError("a reply that is none")
        return size

    def names(self, directory: str) -> list[str]:
        """Returns the names in a directory, "" for that which is served; otherwise as `read_into`."""
        names = self._json(Request("names", directory, "", []))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConnectionAbortedError("a reply that is none")
        return names

    def remove(self, directory: str, name: str) -> None:
        """Removes a file if it exists, or with no name a directory if it is empty; otherwise as `read_into`."""
        self._json(Request("remove", directory, name, []))

    def _json(self, request: Request) -> Any:
        with self._connected() as socket:
            length = _asked(socket, request)
            if length > _MOST_ANSWER_BYTES:
                raise ConnectionAbortedError("a reply that is none")
            data = receive(socket, length)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ConnectionAbortedError("a reply that is none") from error

    @contextmanager
    def _connected(self) -> Iterator[Socket]:
        """Gives a connection, which is kept for the next request unless that is not answered as it should be."""
        socket = self._take()
        try:
            yield socket
        except FileNotFoundError:
            self._put(socket)
            raise
        except BaseException:
            socket.close()
            raise
        self._put(socket)

    def close(self) -> None:
        """Closes the connections that are not in use."""
        with self._lock:
            free, self._free = self._free, []
        for socket in free:
            socket.close()

    def _ask(self, socket: Socket, directory: str, name: str, spans: Sequence[Span]) -> None:
        ranges = [(offset, memory.nbytes) for offset, memory in spans]
        if _asked(socket, Request("read", directory, name, ranges)) != sum(nbytes for _, nbytes in ranges):
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
            raise ConnectionRefusedError(f"{self._unreached}: {error}") from error
        socket = met.link.socket
        socket.settimeout(SILENT_SECONDS)
        return socket

    def _put(self, socket: Socket) -> None:
        with self._lock:
            self._free.append(socket)


def _asked(socket: Socket, request: Request) -> int:
    """Sends a request; returns the length of the answer, which comes next. Raises OSError."""
    socket.sendall(encode(request))
    status, length = REPLY.unpack(receive(socket, REPLY.size))
    if status == FOUND:
        return int(length)
    if length > MOST_REASON_BYTES:
        raise ConnectionAbortedError("a reply that is none")
    reason = receive(socket, length).decode(errors="replace")
    if status == BUSY:
        raise ConnectionRefusedError(reason)
    raise FileNotFoundError(f"{request.name or request.directory}: {reason}")


def _bytes_of(spans: Sequence[Span]) -> Iterator[memoryview]:
    for _, memory in spans:
        yield memory.cast("B") if memory.ndim != 1 or memory.itemsize != 1 else memory
