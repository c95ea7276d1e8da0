"""Which hosts have which files of a checkpoint, what makes it whole, and which copies are lacking. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardopt.checkpoint.format.manifest import Manifest

Holders = Mapping[str, Sequence[int]]
"""File → the numbers of the hosts that have it, ascending."""


def holders_of(manifest: Manifest, files_of_hosts: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Returns who has each of the manifest's files in its full length.

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


class Fetch(NamedTuple):
    """A file that a host is to fetch, and those that have it."""

    name: str
    sources: Sequence[int]


def fetches_of(host: int, holders: Holders, hosts: int, copies: int) -> list[Fetch]:
    """Returns what a host is to fetch, so that each file is on `copies` hosts, or on all if there are fewer.

    A file goes from its first holder to those that follow it in a ring, so that each of n hosts of a job sends and
    receives as much as it has written, and talks to `copies - 1` others.
    """
    fetches = []
    for name, have in holders.items():
        lacking = [(have[0] + step) % hosts for step in range(1, hosts) if (have[0] + step) % hosts not in have]
        if host in lacking[: max(min(copies, hosts) - len(have), 0)]:
            fetches.append(Fetch(name, have))
    return fetches


def survives(holders: Holders) -> int:
    """Returns how many hosts, whichever they are, may be lost without the loss of a file."""
    return min((len(hosts) for hosts in holders.values()), default=1) - 1
