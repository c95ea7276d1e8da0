"""The real world's sockets, and the addresses of its network interfaces; only for `world.py`."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import Structure, c_char_p, c_uint, c_void_p

_KEEPALIVE_SECONDS = 60
OFTEN_SECONDS = 2  # in which who has connected learns of it where the other end has lost the connection
_PROBE_SECONDS, _PROBES = 6, 127  # after the first one: a network may be cut for 12 minutes

_draw = random.SystemRandom()  # not the program's own generator, which also is the same on all ranks
_forking = threading.RLock()
_not_of_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@contextmanager
def kept_from_children(make: Callable[[], socket.socket]) -> Iterator[socket.socket]:
    """Makes a socket that a forked child closes; while it had it open, no peer would see this end close.

    A fork by another thread waits until it is known which socket that is; so nothing is done here that may take long.
    Where the block fails the socket is closed.
    """
    with _forking:
        made = make()
        _not_of_children.add(made)
    try:
        yield made
    except BaseException:
        made.close()
        raise


def pair_kept_from_children() -> tuple[socket.socket, socket.socket]:
    """Makes two connected non-blocking sockets, which a forked child closes too."""
    with _forking:
        one, other = socket.socketpair()
        _not_of_children.update((one, other))
    one.setblocking(False)
    other.setblocking(False)
    return one, other


def _close_in_child() -> None:
    for each in list(_not_of_children):
        with suppress(OSError):
            each.close()  # and nothing else: what waits in it is shared with the parent
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)


def bind(listener: socket.socket, host: str, ports: range | None) -> None:
    """Binds a socket to an address of this host, at one of these ports, or any. Raises OSError: none is free."""
    for port in [0] if ports is None else _draw.sample(ports, len(ports)):
        try:
            listener.bind((host, port))
            return
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"none of the ports {ports[0]} to {ports[-1]} is free" if ports else "no ports")


def prepare(connection: socket.socket, seconds: int = _KEEPALIVE_SECONDS) -> None:
    """Makes a socket send without delay, not block, and send keep-alives, as firewalls drop silent connections."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setblocking(False)


_UP = 0x1
_FAMILIES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # of the address in a sockaddr, and its bytes


class _Interface(Structure):
    _fields_ = (
        ("next", c_void_p),
        ("name", c_char_p),
        ("flags", c_uint),
        ("address", c_void_p),
        ("rest", c_void_p * 3),
    )


def addresses_of_interfaces() -> list[tuple[str, str]]:
    """Returns names and numeric addresses of the interfaces that are up; none if the system cannot tell.

    Addresses that mean nothing without the name of an interface of the host that uses them (IPv6 ones of a link) are
    left out.
    """
    try:
        library = ctypes.CDLL(None, use_errno=True)
        listed, first = library.getifaddrs, c_void_p()
    except (OSError, AttributeError):
        return []
    if listed(ctypes.byref(first)) != 0:
        return []
    try:
        return _read_addresses(first.value)
    finally:
        library.freeifaddrs(first)


def _read_addresses(at: int | None) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    while at:
        interface = _Interface.from_address(at)
        if interface.address and interface.flags & _UP:
            # A length and a family of one byte each where the system comes of BSD, elsewhere a family of two.
            head = ctypes.string_at(interface.address, 2)
            family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
            if family in _FAMILIES:
                offset, nbytes = _FAMILIES[socket.AddressFamily(family)]
                digits = ctypes.string_at(interface.address + offset, nbytes)
                if digits[:2] != b"\xfe\x80" or nbytes == 4:
                    found.append((interface.name.decode(), socket.inet_ntop(family, digits)))
        at = interface.next
    return found
