"""Serves byte ranges of files to proven ranks of other hosts. Writes nothing.

request   4 bytes: the length of what follows, at most 64 KiB; JSON: [directory, name, [[offset, bytes], ...]]
reply     1 byte: 0 where there is such a file; 8 bytes: the length of what follows; the ranges one after the other.
          Otherwise 1, and why there is none.

A connection carries one request at a time, and any number of them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from shardopt.ranks.connections.address import Network
from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.join import Entry
from shardopt.ranks.connections.link import Ended, Link
from shardopt.ranks.connections.proof import Listening, Refused
from shardopt.ranks.connections.unauthenticated import UnauthenticatedPeers
from shardopt.world import READ, SHUT_RDWR, Selector, Socket, Thread, world

OpenFile = Callable[[str, str], int]
"""Opens a file by directory and name; returns the descriptor, which the server closes. Raises OSError."""

LENGTH = struct.Struct("!I")
REPLY = struct.Struct("!BQ")
FOUND, REFUSED = 0, 1
MOST_REQUEST_BYTES = 64 << 10
MOST_RANGES = 512
MOST_REASON_BYTES = 4 << 10
SILENT_SECONDS = 20.0
"""The time for which a peer may send or take nothing within a message before it is given up."""
_CLOSE_SECONDS = 2.0
_NEVER = float("inf")


class Request(NamedTuple):
    """A request for byte ranges of a file; `ranges` are offsets and lengths."""

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
        directory, name, ranges = json.loads(data)
        ranges = [(begin, nbytes) for begin, nbytes in ranges]
    except (ValueError, TypeError, RecursionError) as error:
        raise NoRequest(str(error)) from None
    sizes = [size for each in ranges for size in each]
    if type(directory) is not str or type(name) is not str or len(ranges) > MOST_RANGES:
        raise NoRequest("no names, or too many ranges")
    if any(type(size) is not int or not 0 <= size < 1 << 62 for size in sizes):
        raise NoRequest("a range that is none")
    return Request(directory, name, ranges)


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
        open_file: gives the files; nothing else is ever opened.

    Attributes:
        at: host and port of each address.

    Raises:
        OSError: at none of the addresses can it listen.
    """

    def __init__(self, session: Entry, rank: int, network: Network, open_file: OpenFile) -> None:
        self._session, self._rank, self._open_file = session, rank, open_file
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
        for _, thread in clients:
            thread.join(_CLOSE_SECONDS)

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
        try:
            link = Link(world().accept(listener))
        except BlockingIOError:
            return
        except OSError:
            self._unauthenticated.make_room()
            world().sleep(0.05)  # no descriptor is free: the peer waits in the queue until one is
            return
        self._unauthenticated.add(link, Listening(self._session.name, self._session.key, self._rank))
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
        link.put_message(Message(Kind.WELCOME))
        try:
            link.flush()
            link.socket.settimeout(SILENT_SECONDS)
        except (Ended, OSError):
            link.close()
            return
        socket = link.socket
        thread = world().thread(lambda: self._serve(socket), f"shardopt-files-{self._rank}-client", daemon=True)
        with self._lock:
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

    def _reply(self, socket: Socket, request: Request) -> None:
        try:
            fd = self._open_file(request.directory, request.name)
        except OSError as error:
            reason = str(error).encode()[:4096]
            socket.sendall(REPLY.pack(REFUSED, len(reason)) + reason)
            return
        with open(fd, "rb", buffering=0) as file:
            size = os.fstat(fd).st_size
            if any(begin + nbytes > size for begin, nbytes in request.ranges):
                reason = f"{size} bytes, fewer than are asked for".encode()
                socket.sendall(REPLY.pack(REFUSED, len(reason)) + reason)
                return
            socket.sendall(REPLY.pack(FOUND, sum(nbytes for _, nbytes in request.ranges)))
            for begin, nbytes in request.ranges:
                if nbytes and socket.sendfile(file, begin, nbytes) < nbytes:
                    raise ConnectionAbortedError("the file was cut meanwhile")


def _next_request(socket: Socket) -> Request | None:
    """Waits for the next request, without a limit; None once the peer has closed the connection."""
    socket.settimeout(None)
    head = socket.recv(LENGTH.size)
    if not head:
        return None
    socket.settimeout(SILENT_SECONDS)
    head += receive(socket, LENGTH.size - len(head))
    (length,) = LENGTH.unpack(head)
    if length > MOST_REQUEST_BYTES:
        raise NoRequest(f"a request of {length} bytes")
    return decode(receive(socket, length))
