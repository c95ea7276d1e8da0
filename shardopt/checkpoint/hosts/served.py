"""A root in the memory of the hosts that publish there, and the same root as followers elsewhere read it.

Each rank writes its files to the directory of its own host, and rank 0 also the manifests. Whoever reads a file asks
the host that has it. So the root is one storage for all, of which no byte is sent before somebody needs it.

    hosts:///dev/shm/weights                     the root, on each host
    hosts:///dev/shm/weights/step-00000003       a checkpoint, over all hosts
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from shardopt.checkpoint.arguments import count_problem, refuse
from shardopt.checkpoint.format.constants import FILE_NAME, writer_of
from shardopt.checkpoint.hosts.admission import InStore, Invitation, KeyFile, decode_invitation, invitation_at
from shardopt.checkpoint.hosts.directory import PREFIX
from shardopt.checkpoint.hosts.host_files import HostFiles, ReadOnlyFiles
from shardopt.checkpoint.hosts.hosts import Hosts, hosts_of
from shardopt.checkpoint.storage import LocalStorage, ReadInto, Span, Storage, register_storage
from shardopt.errors import OptionError, Problem
from shardopt.ranks import Ranks
from shardopt.ranks.connections.address import network_of
from shardopt.ranks.connections.join import Entry
from shardopt.ranks.files.client import FileClient
from shardopt.ranks.files.server import FileServer, Limits
from shardopt.world import world

T = TypeVar("T")
Files = HostFiles | FileClient

_CONNECTIONS = 256
_log = logging.getLogger("shardopt.checkpoint")


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

    def meet(self, ranks: Ranks) -> None:
        """Connects the hosts, begins to serve, and invites followers. Collective; the first time only.

        Raises:
            CheckpointError: a host's directory cannot be used, or the invitation cannot be written.
        """
        if self.files:
            return
        hosts = hosts_of(ranks, self.path, serves=HostFiles)
        self._reach(hosts)
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

    def _reach(self, hosts: Hosts) -> None:
        own = HostFiles(hosts.directory)
        others = [own if number == hosts.number else hosts.client(number) for number in range(hosts.count)]
        self.number, self.of_rank, self.files = hosts.number, hosts.of_rank, others

    def close(self) -> None:
        """Ends serving followers. Local."""
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
        self._read, before = data, self.files
        self.files, self.of_rank = (), ()
        for client in before:
            if isinstance(client, FileClient):
                client.close()
        if not data:
            return
        invitation = decode_invitation(data, self._invitation.where)
        if invitation.root != self.path:
            remedy = "give the root and the key_file of one publisher"
            problem = Problem(self._invitation.where, f"hosts://{invitation.root}", self.url, remedy)
            raise OptionError("a key_file is for another root", [problem], code="following")
        self.of_rank = invitation.of_rank
        self.files = tuple(
            FileClient(Entry(invitation.name, invitation.key, at), 0, number, f"host {number} of {self.url}")
            for number, at in enumerate(invitation.hosts)
        )


class ServedStorage(Storage):
    """A directory of a served root: of each file, the host that has it is asked.

    Args:
        directory: its name; "" for the root itself.
    """

    def __init__(self, root: ServedRoot, directory: str = "") -> None:
        self._root, self._directory = root, directory
        self.url = f"{root.url}/{directory}" if directory else root.url
        self._where: Mapping[str, int] = {}  # as of the last listing
        self._silent = False

    @property
    def is_remote(self) -> bool:  # type: ignore[override]
        return self._root.number is None or len(self._root.files) > 1

    @property
    def _own(self) -> LocalStorage:
        """What is on this host, to write to."""
        number = self._root.number
        files = None if number is None else self._root.files[number]
        if not isinstance(files, HostFiles):
            raise PermissionError(f"{self.url} is written by its publisher alone")
        return files.storage(self._directory)

    def make(self) -> None:
        self._own.make()

    def names(self) -> list[str]:
        if not self._directory:
            self._root.refresh()
        where: dict[str, int] = {}
        try:
            for number, files in enumerate(self._root.files):
                for name in files.names(self._directory):
                    where.setdefault(name, number)
        except OSError as error:
            if self._root.number is not None or self._directory:
                raise
            # The trainers start again, or have ended: for those who look for steps nothing is there meanwhile.
            if not self._silent:
                _log.warning("%s cannot be reached, looking again later: %s [following]", self.url, error)
            self._silent, where = True, {}
        else:
            self._silent = False
        self._where = where
        return sorted(where)

    def size(self, name: str) -> int:
        return self._ask(name, lambda files: files.size(self._directory, name))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        nbytes = (self.size(name) if end is None else end) - begin
        return self._ask(name, lambda files: files.read_rest(self._directory, name, begin, max(nbytes, 0)))

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadInto]:
        yield partial(self._read_into, name)

    def _read_into(self, name: str, spans: Sequence[Span]) -> None:
        self._ask(name, lambda files: files.read_into(self._directory, name, spans))

    def _ask(self, name: str, ask: Callable[[Files], T]) -> T:
        """Asks the host that should have a file, and if it has not, that which has."""
        if not self._root.files:
            self._root.refresh()
        if not self._root.files:
            raise FileNotFoundError(f"{self.url}/{name}: nobody publishes there")
        first = self._where.get(name, self._root.host_of(name))
        try:
            return ask(self._root.files[min(first, len(self._root.files) - 1)])
        except FileNotFoundError:
            self.names()
            found = self._where.get(name, first)
            if found == first:
                raise
            return ask(self._root.files[found])

    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        self._own.make()
        return self._own.write(name, buffers)

    def publish(self, name: str, data: bytes) -> None:
        self._own.publish(name, data)

    def publish_new(self, name: str, data: bytes) -> bool:
        return self._own.publish_new(name, data)

    def remove(self, name: str) -> None:
        have = [self._where[name]] if name in self._where else range(len(self._root.files))
        for number in have:
            self._root.files[number].remove(self._directory, name)

    def remove_if_empty(self) -> None:
        for files in self._root.files:
            files.remove(self._directory, "")

    def child(self, name: str) -> Storage:
        if self._directory:
            raise FileNotFoundError(f"{self.url}/{name}: a root has no deeper directories")
        return ServedStorage(self._root, name)

    def parent(self) -> tuple[Storage, str] | None:
        return (ServedStorage(self._root), self._directory) if self._directory else None

    def as_file(self) -> None:
        return None

    def free_bytes(self) -> int | None:
        with suppress(PermissionError):
            return self._own.free_bytes()
        return None


_roots: dict[str, ServedRoot] = {}  # by path


def is_on_hosts(url: Any) -> bool:
    """Whether a URL is of a checkpoint in shares on the hosts of this job, and not in a served root."""
    return str(url).startswith(PREFIX) and _found(str(url)) is None


def publish_at(url: str, options: Mapping[str, Any] | None) -> PublishedRoot | None:
    """Returns the root to publish at, if its URL is of memory of hosts; this process then opens it as such.

    Args:
        options: the arguments of `PublishedRoot` by name.

    Raises:
        OptionError: the URL has no absolute path, or an argument is none.
    """
    if not url.startswith(PREFIX):
        return None
    root = PublishedRoot(_path_of(url), **_known(options, "key_file", "max_connections", "max_bytes_per_second"))
    _roots[root.path] = root
    return root


def follow_at(url: str, options: Mapping[str, Any] | None) -> bool:
    """Makes this process open a root in memory of hosts, if its URL is of one; returns whether it is.

    Args:
        options: `key_file`, if it is not in the job's store.

    Raises:
        OptionError: the URL has no absolute path, or an option is none.
    """
    if not url.startswith(PREFIX):
        return False
    path = _path_of(url)
    if not isinstance(_roots.get(path), PublishedRoot):
        _roots[path] = FollowedRoot(path, invitation_at(path, **_known(options, "key_file") or {"key_file": None}))
    return True


def _open(url: str, key_file: Any = None, **limits: Any) -> Storage:
    found = _found(url)
    if found is None and key_file is not None:
        invitation = invitation_at(url, key_file)
        data = invitation.read()
        if data is not None:
            root = decode_invitation(data, invitation.where).root
            if f"{url}/".startswith(f"{PREFIX}{root}/"):
                _roots[root] = FollowedRoot(root, invitation)
                found = _found(url)
    if found is None:
        remedy = 'give storage_options={"key_file": ...} of its publisher; load shares of this job by checkpoint.load'
        problem = Problem(url, "no publisher of it", "one that this process knows", remedy)
        raise OptionError("nothing is known of memory of hosts", [problem], code="following")
    return found


def _found(url: str) -> ServedStorage | None:
    for path, root in _roots.items():
        if url.rstrip("/") == root.url:
            return ServedStorage(root)
        directory = url.removeprefix(f"{PREFIX}{path}/").rstrip("/")
        if directory != url.rstrip("/") and "/" not in directory:
            return ServedStorage(root, directory)
    return None


def _path_of(url: str) -> str:
    path = url.removeprefix(PREFIX).rstrip("/")
    if not path.startswith("/"):
        problem = Problem("root", url, "hosts://, and an absolute path", 'give it as in "hosts:///dev/shm/weights"')
        raise OptionError("invalid arguments", [problem])
    return path


def _known(options: Mapping[str, Any] | None, *names: str) -> dict[str, Any]:
    others = [str(name) for name in options or {} if name not in names]
    if others:
        problem = Problem("storage_options", ", ".join(others), " and ".join(names), "give these alone")
        raise OptionError("invalid arguments", [problem])
    return dict(options or {})


register_storage("hosts", _open)
