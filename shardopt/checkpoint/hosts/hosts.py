"""The hosts of a job: which ranks share a directory, who serves its files, and how to reach them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from shardopt.checkpoint.format.constants import DIRECTORY_NAME
from shardopt.checkpoint.hosts.directory import PREFIX, HostDirectory
from shardopt.checkpoint.hosts.host_files import SharesOnly
from shardopt.checkpoint.hosts.share import Share
from shardopt.errors import OptionError, Problem
from shardopt.ranks import Ranks
from shardopt.ranks.files.client import FileClient
from shardopt.ranks.files.server import Files, FileServer

At = Sequence[tuple[str, int]]


def split(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Splits the URL of a checkpoint on hosts into the directory's path on each host, and the checkpoint's name.

    Raises:
        OptionError: it has no such name.
    """
    root, _, name = os.fspath(url).removeprefix(PREFIX).rstrip("/").rpartition("/")
    if not root.startswith("/") or not DIRECTORY_NAME.fullmatch(name):
        required = "hosts://, an absolute path, and a name of ASCII letters, digits and =+,@~_-. below it"
        problem = Problem(os.fspath(url), repr(f"{root}/{name}"), required, "mend the URL")
        raise OptionError("this is no place for a checkpoint on hosts", [problem], code="host-directory")
    return root, name


class Hosts:
    """The directories at one path on all hosts of some ranks.

    The first rank of each host is its leader: it serves the host's files, and fetches copies.

    Attributes:
        of_rank: the number of each rank's host; hosts are numbered in the order of their first ranks.
        number: of this rank's host.
        leaders: the leader of each host.
        at: the addresses of the leaders' servers, once the hosts have met.
        domains: the failure domain of each host: those of one are lost together. None where none was given. Tiers give
            them, once the hosts have met.
    """

    def __init__(self, ranks: Ranks, root: str, directory: HostDirectory, of_rank: Sequence[int]) -> None:
        # Weak: these ranks keep this, for as long as there are such.
        self._ranks, self._rank = weakref.ref(ranks), ranks.rank
        self.root, self.directory = root, directory
        self.of_rank = tuple(of_rank)
        self.number = self.of_rank[ranks.rank]
        leaders: dict[int, int] = {}
        for rank, host in enumerate(of_rank):
            leaders.setdefault(host, rank)
        self.leaders = tuple(leaders.values())
        self.domains: Sequence[str | None] = [None] * len(leaders)
        self._server: FileServer | None = None
        self.at: Sequence[At] = ()
        self._clients: dict[int, FileClient] = {}

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.leaders)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader of its host."""
        return self.leaders[self.number] == self._rank

    def url(self, name: str) -> str:
        """Returns the URL of a checkpoint by name."""
        return f"{PREFIX}{self.root}/{name}"

    def share(self, name: str, durable: bool = True) -> Share:
        """Returns this host's share of a checkpoint."""
        return Share(self.directory, name, durable)

    def client(self, host: int) -> FileClient:
        """Returns the client that asks another host's leader for files. Raises ConnectionError: the job has ended."""
        if host not in self._clients:
            ranks = self._ranks()
            if ranks is None:
                raise ConnectionAbortedError("the process group was destroyed")
            self._clients[host] = ranks.file_client(self.leaders[host], self.at[host])
        return self._clients[host]

    @property
    def is_gone(self) -> bool:
        """Whether the process group of the ranks was destroyed."""
        ranks = self._ranks()
        return ranks is None or ranks.is_gone

    def serve(self, ranks: Ranks, serves: Callable[[HostDirectory], Files]) -> At | None:
        """Starts to serve files on the leader of a host, if there are other hosts; returns its address."""
        if self.is_leader and self.count > 1:
            self._server = ranks.file_server(serves(self.directory))
        return None if self._server is None else self._server.at

    def close(self) -> None:
        """Ends all connections."""
        for client in self._clients.values():
            client.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        self.directory.close()


_met: list[Hosts] = []


def hosts_of(ranks: Ranks, root: str, serves: Callable[[HostDirectory], Files] = SharesOnly) -> Hosts:
    """Returns the hosts of these ranks at a path; the first call connects them. Collective.

    Args:
        root: of the directory on each host; ranks may give other paths for it.
        serves: what others of these ranks may ask a host for.

    Raises:
        CheckpointError: a host's directory cannot be used.
    """
    met: Hosts | None = ranks.kept.get(("hosts", root, serves))
    if met is not None:
        return met
    for hosts in [each for each in _met if each.is_gone]:  # of a job that this process was in before
        _met.remove(hosts)
        hosts.close()
    what = f"meeting at {root} on each host"
    directory, of_rank = ranks.agree(
        what,
        work=partial(HostDirectory, root),
        report=lambda opened: opened.identity,
        decide=_numbered,
    )
    hosts = Hosts(ranks, root, directory, of_rank)
    try:
        _, at = ranks.agree(
            what,
            work=partial(hosts.serve, ranks, serves),
            report=lambda served: served,
            decide=lambda reports: [reports[leader] or [] for leader in hosts.leaders],
        )
    except BaseException:
        hosts.close()
        raise
    hosts.at = at
    ranks.kept["hosts", root, serves] = hosts
    _met.append(hosts)
    return hosts


def _numbered(identities: Sequence[str]) -> list[int]:
    """Returns the number of each rank's host, in the order of their first ranks."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(identity, len(numbers)) for identity in identities]
