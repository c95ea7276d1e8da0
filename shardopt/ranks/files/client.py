"""Asks a process on another host for byte ranges of its files."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

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

T = TypeVar("T")

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
        self._name = name or f"rank {above}"
        self._unreached = f"{name} is not reached" if name else f"rank {below} does not reach rank {above}"
        self._changed = world().condition()
        self._used = 0
        self._free: list[Socket] = []
        # Followers have no end: a client that nobody has any more, as of a publisher that has gone, leaves nothing.
        weakref.finalize(self, _close_each, self._free).atexit = False

    def read_into(self, directory: str, name: str, spans: Sequence[Span]) -> None:
        """Fills the memory of spans from a file.

        Raises:
            FileNotFoundError: the other rank has no such file for this one, or not so many bytes of it.
            OSError: the other rank cannot be reached, or has gone.
        """
        for begin in range(0, len(spans), MOST_RANGES):
            some = spans[begin : begin + MOST_RANGES]
            self._on_connection(partial(_read_into, directory=directory, name=name, spans=some))

    def read(self, directory: str, name: str, begin: int, nbytes: int) -> bytes:
        """Returns bytes of a file; otherwise as `read_into`."""
        data = bytearray(nbytes)
        self.read_into(directory, name, [(begin, memoryview(data))])
        return bytes(data)

    def read_rest(self, directory: str, name: str, begin: int, nbytes: int) -> bytes:
        """Returns so many bytes of a file, or as many as it has; otherwise as `read_into`."""
        return self._on_connection(
            partial(_answer, request=Request("rest", directory, name, [(begin, nbytes)]), most=nbytes)
        )

    def size(self, directory: str, name: str) -> int:
        """Returns the size of a file in bytes; otherwise as `read_into`."""
        size: int = self._json(Request("size", directory, name, []), lambda size: type(size) is int and size >= 0)
        return size

    def names(self, directory: str) -> list[str]:
        """Returns the names in a directory, "" for that which is served; otherwise as `read_into`."""
        names: list[str] = self._json(Request("names", directory, "", []), _are_names)
        return names

    def remove(self, directory: str, name: str) -> None:
        """Removes a file if it exists, or with no name a directory if it is empty; otherwise as `read_into`."""
        self._json(Request("remove", directory, name, []), lambda nothing: nothing is None)

    def _json(self, request: Request, is_right: Callable[[Any], bool]) -> Any:
        def ask(socket: Socket) -> Any:
            try:
                answer = json.loads(_answer(socket, request, _MOST_ANSWER_BYTES))
            except (ValueError, RecursionError) as error:
                raise ConnectionAbortedError("a reply that is none") from error
            if not is_right(answer):
                raise ConnectionAbortedError("a reply that is none")
            return answer

        return self._on_connection(ask)

    def _on_connection(self, ask: Callable[[Socket], T]) -> T:
        """Asks on a connection, which is kept for the next request unless that is not answered as it should be.

        Where the server has no more connections for anybody, it waits for one of those that this client has.
        """
        while True:
            socket = self._take()
            is_kept = False
            try:
                answer = ask(socket)
                is_kept = True
                return answer
            except FileNotFoundError:
                is_kept = True
                raise
            except _Busy as error:
                busy = error
            except OSError as error:
                raise ConnectionAbortedError(f"{self._name}: {error}") from error
            finally:
                self._put(socket, is_kept)
            with self._changed:
                while self._used and not self._free:
                    self._changed.wait(None)
                if not self._free:
                    raise ConnectionRefusedError(f"{self._name}: {busy}") from busy

    def close(self) -> None:
        """Closes the connections that are not in use."""
        with self._changed:
            _close_each(self._free)

    def _take(self) -> Socket:
        with self._changed:
            self._used += 1
            while self._free:
                socket = self._free.pop()
                if socket.fileno() >= 0:  # in a child that was forked they are closed, and stay the parent's
                    return socket
        try:
            return self._connected()
        except BaseException:
            self._release()
            raise

    def _connected(self) -> Socket:
        end = world().monotonic() + SILENT_SECONDS
        meeting = Meeting(self._server.name, self._server.key, self._below, self._above)
        try:
            met = meet(self._server.at, meeting, lambda: world().monotonic() < end, CONNECT_SECONDS[1])
        except NotMet as error:
            raise ConnectionRefusedError(f"{self._unreached}: {error}") from error
        socket = met.link.socket
        socket.settimeout(SILENT_SECONDS)
        return socket

    def _put(self, socket: Socket, is_kept: bool) -> None:
        if not is_kept:
            socket.close()
        self._release(*([socket] if is_kept else []))

    def _release(self, *free: Socket) -> None:
        with self._changed:
            self._used -= 1
            self._free += free
            self._changed.notify(1 << 30)


class _Busy(ConnectionRefusedError):
    """The server serves as many as it may."""


def _answer(socket: Socket, request: Request, most: int) -> bytes:
    """Sends a request; returns the answer, of at most so many bytes. Raises OSError."""
    length = _asked(socket, request)
    if length > most:
        raise ConnectionAbortedError("a reply that is none")
    return receive(socket, length)


def _read_into(socket: Socket, directory: str, name: str, spans: Sequence[Span]) -> None:
    ranges = [(offset, memory.nbytes) for offset, memory in spans]
    if _asked(socket, Request("read", directory, name, ranges)) != sum(nbytes for _, nbytes in ranges):
        raise ConnectionAbortedError("a reply that is none")
    for memory in _bytes_of(spans):
        receive_into(socket, memory)


def _close_each(sockets: list[Socket]) -> None:
    while sockets:
        sockets.pop().close()


def _are_names(answer: Any) -> bool:
    return isinstance(answer, list) and all(isinstance(name, str) for name in answer)


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
        raise _Busy(reason)
    raise FileNotFoundError(f"{request.name or request.directory}: {reason}")


def _bytes_of(spans: Sequence[Span]) -> Iterator[memoryview]:
    for _, memory in spans:
        yield memory.cast("B") if memory.ndim != 1 or memory.itemsize != 1 else memory
