"""A served root, as ranks that publish there have it, and as followers have it: its hosts, and how to reach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardopt.checkpoint.arguments import count_problem, refuse
from shardopt.checkpoint.format.constants import FILE_NAME, writer_of
from shardopt.checkpoint.hosts.admission import InStore, Invitation, KeyFile, decode_invitation, invitation_at
from shardopt.checkpoint.hosts.directory import PREFIX
from shardopt.checkpoint.hosts.host_files import HostFiles, ReadOnlyFiles
from shardopt.checkpoint.hosts.hosts import hosts_of
from shardopt.errors import OptionError, Problem
from shardopt.ranks import Ranks
from shardopt.ranks.connections.address import network_of
from shardopt.ranks.connections.join import Entry
from shardopt.ranks.connections.meeting import text_of
from shardopt.ranks.files.client import FileClient
from shardopt.ranks.files.server import FileServer, Limits
from shardopt.world import world

Files = HostFiles | FileClient

_CONNECTIONS = 256


class ServedRoot:
    """A root, and its hosts as this process reaches them.

    Attributes:
        url: of the root.
        number: of this process's own host; None where it publishes nothing there.
        files: of each host.
    """

    number: int | None = None

    def __init__(self, path: str) -> None:
        self.path, self.url = path, PREFIX + path
        self.files: Sequence[Files] = ()
        self.of_rank: Sequence[int] = ()

    def refresh(self) -> None:
        """Learns where the hosts are now. Local."""

    def host_of(self, name: str) -> int:
        """Returns the host that should have a file: that of the rank that writes it, or else the first."""
        rank = writer_of(name) if FILE_NAME.fullmatch(name) else -1
        return self.of_rank[rank] if 0 <= rank < len(self.of_rank) else 0


class PublishedRoot(ServedRoot):
    """A root as the publishing ranks have it.

    Args:
        key_file: of the invitation that followers of other jobs need; None for followers among the job's ranks.
        max_connections: of followers, to each host.
        max_bytes_per_second: that each host sends to followers; None for no limit.

    Raises:
        OptionError: an argument is none.
    """

    def __init__(
        self,
        path: str,
        key_file: Any = None,
        max_connections: Any = _CONNECTIONS,
        max_bytes_per_second: Any = None,
    ) -> None:
        super().__init__(path)
        self._invitation = invitation_at(path, key_file)
        problems = count_problem("max_connections", max_connections, 1)
        rate = max_bytes_per_second
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
            required = "a number of bytes above 0"
            problems = [*problems, Problem("max_bytes_per_second", repr(rate)[:80], required, "give one, or none")]
        refuse(problems)
        self._limits = Limits(max_connections, max_bytes_per_second)
        self._server: FileServer | None = None
        self._has_met = self.is_closed = False

    def meet(self, ranks: Ranks) -> None:
        """Connects the hosts, begins to serve, and invites followers. Collective; the first time only.

        Raises:
            CheckpointError: a host's directory cannot be used, or the invitation cannot be written.
        """
        if self._has_met:
            return
        self._end_serving()  # what an earlier try has left, in which a rank has failed
        hosts = hosts_of(ranks, self.path, serves=HostFiles)
        own = HostFiles(hosts.directory)
        others = [own if number == hosts.number else hosts.client(number) for number in range(hosts.count)]
        self.number, self.of_rank, self.files = hosts.number, hosts.of_rank, others
        what = f"inviting followers to {self.url}"
        name, key = ranks.on_rank_0(what, lambda: [world().random_name(8), world().random_name(32)])

        def serve() -> Sequence[tuple[str, int]]:
            if not hosts.is_leader:
                return ()
            files = ReadOnlyFiles(hosts.directory)
            self._server = FileServer(Entry(name, key, ()), hosts.number, network_of(None), files, self._limits)
            return self._server.at

        def invite(at: Sequence[Any]) -> None:
            places = tuple(tuple((host, port) for host, port in at[leader]) for leader in hosts.leaders)
            self._invitation.write(Invitation(self.path, name, key, places, hosts.of_rank).pack())

        ranks.agree(what, work=serve, report=lambda at: at, decide=invite)
        self._has_met = True

    def close(self) -> None:
        """Ends serving followers. Local."""
        self.is_closed = True
        self._end_serving()

    def _end_serving(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class FollowedRoot(ServedRoot):
    """A root as followers have it: by an invitation, which is read again whenever they look for steps."""

    def __init__(self, path: str, invitation: KeyFile | InStore) -> None:
        super().__init__(path)
        self._invitation, self._read = invitation, b""

    def refresh(self) -> None:
        """Learns where the hosts are now. Local.

        Raises:
            CheckpointError: the invitation cannot be read, or is to another root.
        """
        data = self._invitation.read() or b""
        if data == self._read:
            return
        before, files, of_rank = self.files, list[FileClient](), tuple[int, ...]()
        if data:
            invitation = decode_invitation(data, self._invitation.where)
            if invitation.root != self.path:
                remedy = "give the root and the key_file of one publisher"
                problem = Problem(self._invitation.where, f"hosts://{invitation.root}", self.url, remedy)
                raise OptionError("a key_file is for another root", [problem], code="following")
            of_rank = invitation.of_rank
            for number, at in enumerate(invitation.hosts):
                name = f"host {number} of {self.url} ({text_of(at)})"
                files.append(FileClient(Entry(invitation.name, invitation.key, at), 0, number, name))
        # Other threads read meanwhile. What is no invitation changes nothing, and is read again the next time.
        self._read, self.files, self.of_rank = data, tuple(files), of_rank
        _close(before)

    def close(self) -> None:
        """Closes the connections to the hosts. Who reads on makes others. Local."""
        _close(self.files)


def _close(files: Sequence[Files]) -> None:
    for client in files:
        if isinstance(client, FileClient):
            client.close()
