"""The addresses and ports at which a rank listens: those of its host that other ranks can reach.

SHARDOPT_NETWORK       interfaces of this host, and ports: "ib0", "eth0,eth1", "eth0:30000-30100", ":30000-30100"
GLOO_SOCKET_IFNAME     interfaces, as gloo takes them: names
NCCL_SOCKET_IFNAME     interfaces, as NCCL takes them: beginnings of names; "=" names, "^" all others, "^=" both

The first that is set counts; of the last two only if this host has such an interface.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from shardopt.errors import OptionError, Problem
from shardopt.runtime.stores import Store
from shardopt.world import Socket, world

LOOPBACK = "127.0.0.1"
NETWORK = "SHARDOPT_NETWORK"
# Of nobody (RFC 5737, RFC 3849): the way to it is the way to any host that is not near.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_MOST_ADDRESSES = 16
_PORTS = re.compile(r"(.*?)(?::([0-9]{1,5})-([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Network:
    """The addresses at which a rank listens.

    Args:
        addresses: of this host, in the order in which others should try them.
        ports: of which it takes any that is free; None for all.
    """

    addresses: tuple[str, ...]
    ports: range | None = None

    def listen(self) -> list[Socket]:
        """Listens at as many of these addresses as possible. Raises OSError if it can listen at none."""
        listeners: list[Socket] = []
        errors: list[OSError] = []
        for address in self.addresses:
            try:
                listeners.append(world().listen(address, self.ports))
            except OSError as error:
                errors.append(error)
        if not listeners:
            raise errors[0]
        return listeners


def network_of(store: Store | None) -> Network:
    """Returns where this rank listens, for ranks that share a store with it; with None, for anybody.

    Raises:
        OptionError: SHARDOPT_NETWORK is not written like that, or names what this host has not.
    """
    text = os.environ.get(NETWORK, "")
    names, ports = _parsed(text)
    if names:
        here = world().interfaces()
        chosen = _usable(address for name, address in here if name in names)
        if not chosen:
            there = ", ".join(dict.fromkeys(name for name, _ in here)) or "none"
            raise _refused(text, f"no interface {' or '.join(names)} that is up and has an address; here are {there}")
        return Network(chosen, ports)
    return Network(_usable(_addresses(store)), ports)


def _addresses(store: Store | None) -> list[str]:
    """Returns at least one address of this host, in the order in which others should try them.

    Whoever reaches the store's host from here is reached by the same address. Where the name of that host means this
    one itself, as on the host of the store, other hosts may know it by another address; and of a store in a file
    nothing says on which hosts it is read. There all of this host's addresses are tried: at a wrong one nobody answers,
    or nobody who has the key.
    """
    host = None if store is None else world().store_host(store)
    if host == "":
        return [LOOPBACK]
    towards = [] if host is None else _towards(host)
    if host is not None and _means_this_host_alone(host):
        return towards or [LOOPBACK]
    if chosen := _chosen_for_torch():
        return chosen
    if towards and not _is_loopback(towards[0]):
        return towards
    outside = [address for host in _ELSEWHERE for address in _towards(host)]
    outside += [address for _, address in world().interfaces()]
    return [*(towards or [LOOPBACK]), *(each for each in outside if not _is_loopback(each))]


def _chosen_for_torch() -> list[str]:
    """Returns the addresses of the interfaces configured for torch's own backends; none if not configured."""
    here = world().interfaces() if {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys() else []
    gloo = _names(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if chosen := [address for name, address in here if name in gloo]:
        return chosen
    text = os.environ.get("NCCL_SOCKET_IFNAME", "")
    others, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    wanted = _names(text.lstrip("^").lstrip("="))

    def is_named(name: str) -> bool:
        return name in wanted if exact else name.startswith(wanted)

    return [
        address
        for name, address in here
        if wanted and is_named(name) != others and not (others and _is_loopback(address))
    ]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for each in text.split(",") if (name := each.strip()))


def _parsed(text: str) -> tuple[tuple[str, ...], range | None]:
    found = _PORTS.fullmatch(text.strip())
    names, low, high = ("", None, None) if found is None else found.groups()
    if low is None or high is None:
        if ":" in names and not any(name == names for name, _ in world().interfaces()):
            raise _refused(text, "no range of ports after the colon")
        return _names(names), None
    if not 0 < int(low) <= int(high) < 1 << 16:
        raise _refused(text, f"the ports {low} to {high}")
    return _names(names), range(int(low), int(high) + 1)


def _refused(text: str, found: str) -> OptionError:
    required = 'interfaces of this host, separated by commas, and a range of ports: "eth0", "eth0,ib0:30000-30100"'
    problem = Problem(f"{NETWORK}={text}", found, required, f"set {NETWORK} on each host, or unset it")
    return OptionError("ranks cannot listen for one another", [problem], code="rank-network")


def _usable(addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(addresses))[:_MOST_ADDRESSES]


def _towards(host: str) -> list[str]:
    with suppress(OSError):
        return [world().route_to(host)]
    return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _means_this_host_alone(host: str) -> bool:
    """Whether a name means this host wherever it is read, so that all ranks must be here."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return _is_loopback(host)
    return False
