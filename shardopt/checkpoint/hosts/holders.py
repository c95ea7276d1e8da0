"""Computes which hosts have which files of a checkpoint, whether it is whole, and which copies are missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardopt.checkpoint.format.manifest import Manifest

Holders = Mapping[str, Sequence[int]]
"""File → the numbers of the hosts that have it, ascending."""


def holders_of(manifest: Manifest, files_of_hosts: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Returns the hosts that have each of the manifest's files in full length.

    Args:
        files_of_hosts: of each host, its files and their bytes.
    """
    return {
        file.name: [host for host, files in enumerate(files_of_hosts) if files.get(file.name) == file.nbytes]
        for file in manifest.files
    }


def missing(holders: Holders) -> list[str]:
    """Returns the files that no host has."""
    return [name for name, hosts in holders.items() if not hosts]


def fetches_of(host: int, holders: Holders, domains: Sequence[str | None], copies: int) -> list[str]:
    """Returns the files for a host to fetch, so that each file is on `copies` hosts, or on all if there are fewer.

    A file goes from its first holder to those that follow it in a ring: so each of n alike hosts sends and receives as
    much as it has written, and talks to `copies - 1` others. Hosts of other failure domains than the holders' come
    first.

    Args:
        domains: of each host; None is no domain that two could share.
    """
    return [
        name
        for name, have in holders.items()
        if len(have) < copies and host in _chosen(have, domains, copies - len(have))
    ]


def _chosen(have: Sequence[int], domains: Sequence[str | None], count: int) -> list[int]:
    """Returns the hosts that get a file, beside those that have it: this many, or all others."""
    chosen: list[int] = []
    taken = {domains[each] for each in have} - {None}
    for of_other_domains in (True, False):
        for step in range(1, len(domains)):
            if len(chosen) == count:
                return chosen
            other = (have[0] + step) % len(domains)
            if other in have or other in chosen or (of_other_domains and domains[other] in taken):
                continue
            chosen.append(other)
            taken |= {domains[other]} - {None}
    return chosen


def survives(holders: Holders) -> int:
    """Returns how many hosts, in any combination, can be lost without losing a file."""
    return min((len(hosts) for hosts in holders.values()), default=1) - 1
