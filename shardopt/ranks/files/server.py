"""Serves byte ranges of files to proven peers on other hosts. Writes nothing, and removes what its `files` let it.

request   4 bytes: the length of what follows, at most 64 KiB; JSON: [what, directory, name, [[offset, bytes], ...]]
reply     1 byte: 0 where there is such a file; 8 bytes: the length of what follows; the answer.
          Otherwise 1, and why there is none; or 2, and why nothing is served now.

what      "read": the ranges, one after the other. "rest": of one range as much as the file has.
          "names": of a directory, as JSON. "size": of a file, as JSON. "remove": a file, or an empty directory.

A connection carries one request at a time, and any number of them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from shardopt.ranks.connections.address import Network
from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.join import Entry
from shardopt.ranks.connections.link import Ended, Link
from shardopt.ranks.connections.proof import Listening, Refused
from shardopt.ranks.connections.unauthenticated import UnauthenticatedPeers
from shardopt.world import READ, SHUT_RDWR, Selector, Socket, Thread, world

LENGTH = struct.Struct("!I")
REPLY = struct.Struct("!BQ")
FOUND, REFUSED, BUSY = 0, 1, 2
MOST_REQUEST_BYTES = 64 << 10
MOST_RANGES = 512
MOST_REASON_BYTES = 4 << 10
SILENT_SECONDS = 20.0
"""The time for which a peer may send or take nothing within a message before it is given up."""
_CLOSE_SECONDS = 2.0
_BUSY_SECONDS = 2.0  # for which a peer that finds all connections taken may ask, to hear that
_MOST_BUSY = 64  # of whom that many hear it at one time; others are cut off
_CHUNK_BYTES = 1 << 20  # at most sent between two looks at how fast that may be
_PAUSE_SECONDS = 0.5  # between two looks whether the server ends
_NEVER = float("inf")


class Files(Protocol):
    """The files that are served, by directory and name. What raises OSError is refused."""

    def open_file(self, directory: str, name: str) -> int:
        """Opens a file; returns the descriptor, which the server closes."""

    def names(self, directory: str) -> Sequence[str]:
        """Returns the names in a directory."""

    def remove(self, directory: str, name: str) -> None:
        """Removes a file, or with no name a directory that is empty."""


def size_of(files: Files, directory: str, name: str) -> int:
    """Returns the size of a file in bytes. Raises OSError."""
    fd = files.open_file(directory, name)
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


class Limits(NamedTuple):
    """The bounds of what is served; None for no bound.

    Args:
        connections: at one time.
        bytes_per_second: to all peers together.
    """

    connections: int | None = None
    bytes_per_second: float | None = None


NO_LIMITS = Limits()


class Request(NamedTuple):
    """A request; `ranges` are offsets and lengths in bytes."""

    what: str
    directory: str
    name: str
    ranges: Sequence[tuple[int, int]]


class NoRequest(Exception):
    """The received bytes are no request, so the sender is none of the ranks."""


def encode(request: Request) -> bytes:
    """Encodes a request, of at most `MOST_RANGES` ranges."""
    data = json.dumps(request).encode()
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Request:
    """Decodes the bytes after the length. Raises NoRequest."""
    try:
        what, directory, name, ranges = json.loads(data)
        ranges = [(begin, nbytes) for begin, nbytes in ranges]
    except (ValueError, TypeError, RecursionError) as error:
        raise NoRequest(str(error)) from None
    sizes = [size for each in ranges for size in each]
    if any(type(each) is not str for each in (what, directory, name)) or len(ranges) > MOST_RANGES:
        raise NoRequest("no names, or too many ranges")
    if any(type(size) is not int or not 0 <= size < 1 << 62 for size in sizes):
        raise NoRequest("a range that is none")
    return Request(what, directory, name, ranges)


def receive_into(socket: Socket, memory: memoryview) -> None:
    """Fills memory from a socket. Raises ConnectionError if it ends early, TimeoutError if nothing comes."""
    while memory.nbytes:
        got = socket.recv_into(memory)
        if not got:
            raise ConnectionResetError("the connection has ended")
        memory = memory[got:]


def receive(socket: Socket, nbytes: int) -> bytes:
    """Receives this many bytes, as `receive_into`."""
    data = bytearray(nbytes)
    receive_into(socket, memoryview(data))
    return bytes(data)


class FileServer:
    """Listens for ranks of a session: one thread until they have proved themselves, then one for each.

    Unauthenticated peers share the first thread, are given 10 seconds and 4 KiB, and of too many in this process the
    oldest is dropped: none of them holds up a rank.

    Args:
        session: its name and key; `at` is ignored.
        rank: of this end.
        network: where it listens.
        files: nothing else is ever opened.
        limits: of what is served.

    Attributes:
        at: host and port of each address.

    Raises:
        OSError: at none of the addresses can it listen.
    """

    def __init__(self, session: Entry, rank: int, network: Network, files: Files, limits: Limits = NO_LIMITS) -> None:
        self._session, self._rank, self._files, self._limits = session, rank, files, limits
        self._sent_until = world().monotonic()  # to which time what was sent is as much as may be
        self._lock = world().lock()
        self._clients: dict[Socket, Thread] = {}
        self._unauthenticated = UnauthenticatedPeers()
        self._stopping = False
        self._listeners = network.listen()
        self.at = tuple((listener.getsockname()[0], listener.getsockname()[1]) for listener in self._listeners)
        self._wake = world().socket_pair()
        self._thread = world().thread(self._listen, f"shardopt-files-{rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections, and waits for the threads."""
        self._stopping = True
        with suppress(OSError):
            self._wake[1].send(b"\0")
        self._thread.join(_CLOSE_SECONDS)
        with self._lock:
            clients = list(self._clients.items())
        for socket, _ in clients:
            with suppress(OSError):
                socket.shutdown(SHUT_RDWR)  # which wakes its thread
        end = world().monotonic() + _CLOSE_SECONDS
        for _, thread in clients:
            thread.join(max(0.0, end - world().monotonic()))

    def _listen(self) -> None:
        with closing(world().selector()) as selector:
            selector.register(self._wake[0], READ)
            for listener in self._listeners:
                selector.register(listener, READ, listener)
            while not self._stopping:
                due = self._unauthenticated.due()
                for key, _ in selector.select(None if due == _NEVER else max(0.0, due - world().monotonic())):
                    if isinstance(key.data, Link):
                        self._attend(key.data, selector)
                    elif key.data is not None:
                        self._accept(key.data, selector)
                for link in self._unauthenticated.silent(world().monotonic()):
                    self._drop(link, selector)
            for link in self._unauthenticated.links():
                self._drop(link, selector)
        for socket in (*self._listeners, *self._wake):
            socket.close()

    def _accept(self, listener: Socket, selector: Selector) -> None:
        link = self._unauthenticated.accept(listener, Listening(self._session.name, self._session.key, self._rank))
        if link is not None:
            selector.register(link.socket, READ, link)

    def _drop(self, link: Link, selector: Selector) -> None:
        if link in self._unauthenticated:
            selector.unregister(link.socket)
            self._unauthenticated.forget(link)
            link.close()

    def _attend(self, link: Link, selector: Selector) -> None:
        if link not in self._unauthenticated:
            return
        try:
            for message in link.receive():
                if self._unauthenticated.prove(link, message) is not None:
                    self._welcome(link, selector)
                    return
        except (Ended, Refused):
            self._drop(link, selector)

    def _welcome(self, link: Link, selector: Selector) -> None:
        self._unauthenticated.forget(link)
        selector.unregister(link.socket)
        most = self._limits.connections
        if most is not None and len(self._clients) >= most + _MOST_BUSY:
            link.close()
            return
        link.put_message(Message(Kind.WELCOME))
        try:
            link.flush()
            link.socket.settimeout(SILENT_SECONDS)
        except (Ended, OSError):
            link.close()
            return
        socket = link.socket
        with self._lock:
            is_full = most is not None and len(self._clients) >= most
            serve = partial(self._say_busy if is_full else self._serve, socket)
            thread = world().thread(serve, f"shardopt-files-{self._rank}-client", daemon=True)
            self._clients[socket] = thread
        try:
            thread.start()
        except RuntimeError:  # no thread is free: the peer tries elsewhere
            self._forget(socket)

    def _forget(self, socket: Socket) -> None:
        with self._lock:
            self._clients.pop(socket, None)
        socket.close()

    def _serve(self, socket: Socket) -> None:
        try:
            while not self._stopping:
                request = _next_request(socket)
                if request is None:
                    return
                self._reply(socket, request)
        except (OSError, NoRequest):
            return  # the peer has gone, or is none of ours; it hears that the connection has ended
        finally:
            self._forget(socket)

    def _say_busy(self, socket: Socket) -> None:
        try:
            if _next_request(socket, _BUSY_SECONDS) is not None:
                _answer(socket, BUSY, f"{self._limits.connections} connections are served already".encode())
        except (OSError, NoRequest):
            return
        finally:
            self._forget(socket)

    def _reply(self, socket: Socket, request: Request) -> None:
        try:
            if request.what in ("read", "rest"):
                self._send_ranges(socket, request)
            else:
                _answer(socket, FOUND, json.dumps(self._answer_of(request)).encode())
        except _Refused as error:
            _answer(socket, REFUSED, str(error).encode()[:MOST_REASON_BYTES])

    def _answer_of(self, request: Request) -> Any:
        _, directory, name, _ = request
        with _refusing():
            if request.what == "names":
                return [*self._files.names(directory)]
            if request.what == "size":
                return size_of(self._files, directory, name)
            if request.what == "remove":
                return self._files.remove(directory, name)
        raise NoRequest(request.what)

    def _send_ranges(self, socket: Socket, request: Request) -> None:
        with _refusing():
            fd = self._files.open_file(request.directory, request.name)
        with open(fd, "rb", buffering=0) as file:
            size = os.fstat(fd).st_size
            ranges = request.ranges
            if request.what == "rest":
                ranges = [(begin, max(min(nbytes, size - begin), 0)) for begin, nbytes in ranges]
            elif any(begin + nbytes > size for begin, nbytes in ranges):
                raise _Refused(f"{size} bytes, fewer than are asked for")
            socket.sendall(REPLY.pack(FOUND, sum(nbytes for _, nbytes in ranges)))
            for offset, nbytes in self._in_turn(ranges):
                if socket.sendfile(file, offset, nbytes) < nbytes:
                    raise ConnectionAbortedError("the file was cut meanwhile")

    def _in_turn(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yields the ranges; in pieces, each when it may be sent, if there is a limit for that."""
        connections, rate = self._limits
        # So small that each of all peers gets one long before it takes this server for silent.
        most = _CHUNK_BYTES if rate is None else min(_CHUNK_BYTES, rate * SILENT_SECONDS / 4 / (connections or 1))
        for begin, nbytes in ranges:
            step = max(nbytes if rate is None else int(most), 1)
            for offset in range(begin, begin + nbytes, step):
                piece = min(step, begin + nbytes - offset)
                if rate is not None:
                    self._wait_turn(piece / rate)
                yield offset, piece

    def _wait_turn(self, seconds: float) -> None:
        """Waits until a piece may be sent that takes so long, at one rate for all peers."""
        with self._lock:
            self._sent_until = until = max(self._sent_until, world().monotonic()) + seconds
        while (left := until - world().monotonic()) > 0:
            if self._stopping:
                raise ConnectionAbortedError("the server ends")
            world().sleep(min(left, _PAUSE_SECONDS))


class _Refused(Exception):
    """The peer is told why there is no such file."""


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError of what can be no name, as with a zero in it
        raise _Refused(str(error)) from error


def _answer(socket: Socket, status: int, data: bytes) -> None:
    socket.sendall(REPLY.pack(status, len(data)) + data)


def _next_request(socket: Socket, seconds: float | None = None) -> Request | None:
    """Waits for the next request, if need be with a limit; None once the peer has closed the connection."""
    socket.settimeout(seconds)
    head = socket.recv(LENGTH.size)
    if not head:
        return None
    socket.settimeout(SILENT_SECONDS)
    head += receive(socket, LENGTH.size - len(head))
    (length,) = LENGTH.unpack(head)
    if length > MOST_REQUEST_BYTES:
        raise NoRequest(f"a request of {length} bytes")
    return decode(receive(socket, length))
