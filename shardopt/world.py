"""The clock, waiting, threads, random names, sockets, the job's store and storage, which a simulator replaces.

Nothing else in the package imports `time`, `threading`, `concurrent.futures`, `random`, `secrets`, `socket` or
`selectors`, or makes a store of torch.distributed (a test holds that; it lists the exceptions). Code asks the current
world at the moment of use:

    begin = world().monotonic()

A test that wants another one derives from `World`, overrides what it is about, and puts it in place with `using`.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shardopt.runtime.late import late
from shardopt.runtime.sockets import (
    OFTEN_SECONDS,
    addresses_of_interfaces,
    bind,
    kept_from_children,
    pair_kept_from_children,
    prepare,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardopt.runtime import stores
    from shardopt.runtime.stores import Store
else:
    stores = late("shardopt.runtime.stores")

__all__ = [
    "NO_SIGNAL",
    "READ",
    "SHUT_RDWR",
    "SHUT_WR",
    "WRITE",
    "Condition",
    "Event",
    "Executor",
    "Future",
    "Lock",
    "Selector",
    "Socket",
    "Thread",
    "World",
    "using",
    "utc_text",
    "world",
]

T = TypeVar("T")

_jitter = random.Random()  # not the program's own generator, from which a store's error would take numbers

Socket = socket.socket
Selector = selectors.BaseSelector

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
"""Events that a selector waits for: something to read, room to write."""

SHUT_WR, SHUT_RDWR = socket.SHUT_WR, socket.SHUT_RDWR
"""Halves of a connection to shut: the sending one; both."""

NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""The flag by which sending to a gone peer is an error, even in a program that SIGPIPE would end."""


class Lock(Protocol):
    """The interface of `threading.Lock`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *exc_info: Any) -> None: ...


class Event(Protocol):
    """The interface of `threading.Event`."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def wait(self, timeout: float | None = ...) -> bool: ...


class Condition(Protocol):
    """The interface of `threading.Condition`."""

    def __enter__(self) -> bool: ...
    def __exit__(self, *exc_info: Any) -> None: ...
    def wait(self, timeout: float | None = ...) -> bool: ...
    def notify(self, n: int = ...) -> None: ...


class Thread(Protocol):
    """The interface of `threading.Thread`; `ident` is None until it is started."""

    name: str

    @property
    def ident(self) -> int | None: ...
    def start(self) -> None: ...
    def join(self, timeout: float | None = ...) -> None: ...


class World:
    """The real world, and the base of simulated ones.

    Locks that modules make when they are imported are of the world of that moment; they guard a few lines each, in
    which nothing waits.
    """

    def monotonic(self) -> float:
        """Returns seconds on a clock that never goes back; only differences have a meaning."""
        return time.monotonic()

    def wall_clock(self) -> float:
        """Returns seconds since 1970, by this host's clock."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Pauses this thread."""
        time.sleep(seconds)

    def lock(self) -> Lock:
        """Returns a new, free lock."""
        return threading.Lock()

    def event(self) -> Event:
        """Returns a new event that is not set."""
        return threading.Event()

    def condition(self) -> Condition:
        """Returns a new condition with a lock of its own."""
        return threading.Condition()

    def thread(self, target: Callable[[], object], name: str | None = None, daemon: bool = False) -> Thread:
        """Returns a thread that is not started; at its end the program waits for threads that are no daemons."""
        return threading.Thread(target=target, name=name, daemon=daemon)

    def lower_priority(self, niceness: int) -> None:
        """Lowers the priority of the calling thread, and of threads that it starts, below training, if possible.

        Args:
            niceness: 10 leaves it a tenth of a core that the training keeps busy, 13 a twentieth, 15 a thirtieth, and
                as much for each thread that it starts. Not less: it may hold what the training waits for.
        """
        if sys.platform == "linux":  # where a thread has a priority of its own, and 0 is the calling one
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))

    def timer(self, seconds: float, function: Callable[[], object], name: str) -> Thread:
        """Returns a daemon thread that calls a function a number of seconds after its start."""
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), function)
        timer.name, timer.daemon = name, True
        return timer

    def current_thread(self) -> Thread:
        """Returns the calling thread."""
        return threading.current_thread()

    def in_main_thread(self) -> bool:
        """Whether the calling thread is the main one."""
        return threading.current_thread() is threading.main_thread()

    def main_thread_lives(self) -> bool:
        """Whether the main thread has not ended; other threads run on for a while after it."""
        return threading.main_thread().is_alive()

    def thread_pool(self, threads: int, name: str) -> Executor:
        """Returns a pool of at most so many threads, whose names begin with `name`."""
        return ThreadPoolExecutor(threads, name)

    def future(self) -> Future[Any]:
        """Returns a future without a result yet."""
        return Future()

    def wait_for_all(self, futures: Iterable[Future[Any]]) -> None:
        """Waits until all futures are done, whether or not they failed."""
        wait(futures)

    def random_name(self, nbytes: int) -> str:
        """Returns a name that nobody else draws, in hexadecimal, two digits per byte."""
        return secrets.token_hex(nbytes)

    def jitter(self, low: float, high: float) -> float:
        """Returns a random number between the two, so that ranks do not all act at once."""
        return _jitter.uniform(low, high)

    def store_of(self, group: ProcessGroup, prefix: str) -> Store:
        """Returns the store of a process group, with a prefix for all keys."""
        return stores.of_group(group, prefix)

    def listen(self, host: str, ports: range | None = None, backlog: int = 1024) -> socket.socket:
        """Returns a non-blocking socket that listens at an address of this host, at a free port.

        Args:
            ports: of which the port is to be one; None for any.

        Raises:
            OSError: this host has no such address, or no port or descriptor is free.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with kept_from_children(lambda: socket.socket(family, socket.SOCK_STREAM)) as listener:
            bind(listener, host, ports)
            listener.listen(backlog)
            listener.setblocking(False)
        return listener

    def begin_connect(self, host: str, port: int) -> socket.socket:
        """Returns a non-blocking socket that connects to a listener; it becomes writable once that is done.

        Args:
            host: an address in digits; of a name only the first address is tried.

        Raises:
            OSError: there is no way there, or no descriptor is free.
        """
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with kept_from_children(lambda: socket.socket(family, kind, protocol)) as connecting:
            connecting.setblocking(False)
            with suppress(BlockingIOError):
                connecting.connect(address)
        return connecting

    def finish_connect(self, connecting: socket.socket) -> None:
        """Makes a connected socket send without delay. Raises OSError: nobody listens there."""
        error = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        if connecting.getsockname() == connecting.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there but this end itself")
        prepare(connecting, OFTEN_SECONDS)

    def accept(self, listener: socket.socket) -> socket.socket:
        """Returns the connection of a listener's next peer; it sends without delay, and does not block.

        Raises:
            OSError: there is none (BlockingIOError), it has gone again, or no descriptor is free.
        """
        with kept_from_children(lambda: listener.accept()[0]) as accepted:
            prepare(accepted)
        return accepted

    def abort(self, connection: socket.socket) -> None:
        """Closes a socket so that its peer sees a broken connection, not the end of this process."""
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def route_to(self, host: str) -> str:
        """Returns this host's address from which packets to another host leave. Sends nothing.

        Raises:
            OSError: the name is unknown, or there is no way to it.
        """
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])

    def interfaces(self) -> list[tuple[str, str]]:
        """Returns the numeric addresses of this host's interfaces that are up, each with the interface's name."""
        return addresses_of_interfaces()

    def store_host(self, store: Store) -> str | None:
        """Returns the host of a store as its clients name it; "" if it is this process; None for a file."""
        return stores.host_of(store)

    def store_file(self, store: Store) -> str | None:
        """Returns the path of a store that is a file; None for any other."""
        return stores.file_of(store)

    def most_descriptors(self) -> int:
        """Returns the number of files and sockets that this process may have open at once."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return soft if soft != resource.RLIM_INFINITY else sys.maxsize

    def main_thread_stack(self, most_lines: int) -> str:
        """Returns the innermost lines of the main thread's stack."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines = "".join(traceback.format_stack(frame)).splitlines() if frame is not None else []
        return "\n".join(lines[-most_lines:])

    def selector(self) -> selectors.BaseSelector:
        """Returns a selector, which waits for several sockets at once."""
        return selectors.DefaultSelector()

    def socket_pair(self) -> tuple[socket.socket, socket.socket]:
        """Returns two connected non-blocking sockets, one of which wakes a thread that waits for the other."""
        return pair_kept_from_children()

    def open_storage(self, url: str, durable: bool, opener: Callable[[str, bool], T]) -> T:
        """Opens the storage at a URL, with the real world's opener."""
        return opener(url, durable)


def utc(seconds: float) -> datetime:
    """Returns a time in seconds since 1970 began as a date with its zone, UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def utc_text(seconds: float) -> str:
    """Returns a time of the wall clock as text: "2026-11-22 15:53:21Z"."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # of no year that the system has
        return f"{seconds:.6g} s"


_current = World()


def world() -> World:
    """Returns the current world of this process."""
    return _current


@contextmanager
def using(other: World) -> Iterator[World]:
    """Replaces the world of the whole process, for tests. Nothing of shardopt may be running."""
    global _current
    before, _current = _current, other
    try:
        yield other
    finally:
        _current = before
