"""The addresses of this host, as its system lists them (getifaddrs)."""

from __future__ import annotations

import ctypes
import socket
import sys
from ctypes import Structure, c_char_p, c_uint, c_void_p

_UP = 0x1
_OFFSETS = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # of the address in a sockaddr, and its bytes


class _Interface(Structure):
    _fields_ = (
        ("next", c_void_p),
        ("name", c_char_p),
        ("flags", c_uint),
        ("address", c_void_p),
        ("rest", c_void_p * 3),
    )


def addresses_of_interfaces() -> list[tuple[str, str]]:
    """Returns names and addresses in digits of the interfaces that are up; none where the system cannot tell.

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
        return _read(first.value)
    finally:
        library.freeifaddrs(first)


def _read(at: int | None) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    while at:
        interface = _Interface.from_address(at)
        if interface.address and interface.flags & _UP:
            # A length and a family of one byte each where the system comes of BSD, elsewhere a family of two.
            head = ctypes.string_at(interface.address, 2)
            family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
            if family in _OFFSETS:
                offset, nbytes = _OFFSETS[socket.AddressFamily(family)]
                digits = ctypes.string_at(interface.address + offset, nbytes)
                if digits[:2] != b"\xfe\x80" or nbytes == 4:
                    found.append((interface.name.decode(), socket.inet_ntop(family, digits)))
        at = interface.next
    return found
