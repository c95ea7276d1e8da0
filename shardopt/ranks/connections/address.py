"""The addresses at which a rank listens for others: those of its host by which they can reach it, never all of them."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

from shardopt.world import Store, world

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # of nobody (RFC 5737): the way to it is the way to any host that is not near


def addresses(store: Store) -> list[str]:
    """Returns one address of this host or more, in the order in which others should try them.

    Whoever reaches the store's host from here is reached by the same address. Where the name of that host means this
    one itself, as on the host of the store, other hosts may know it by another address; and of a store in a file
    nothing says on which hosts it is read. There the way out of this host says more, or else its own name, and the
    addresses are tried one after the other: at a wrong one nobody answers, or nobody who has the key.
    """
    host = world().store_host(store)
    if host == "":
        return [LOOPBACK]
    towards = [] if host is None else _towards(host)
    if towards and not _is_loopback(towards[0]):
        return towards
    if host is not None and _means_this_host_alone(host):
        return towards or [LOOPBACK]
    outside = [each for each in _towards(_ELSEWHERE) if not _is_loopback(each)]
    if not outside:  # a network without a way out of it; names may be looked up for long, so they come last
        outside = [each for each in _towards(world().host_name()) if not _is_loopback(each)]
    return [*(towards or [LOOPBACK]), *outside]


def _towards(host: str) -> list[str]:
    with suppress(OSError):
        return [world().route_to(host)]
    return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _means_this_host_alone(host: str) -> bool:
    """Whether a name means this host on whichever host it is read, so that all ranks must be here."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return _is_loopback(host)
    return False
