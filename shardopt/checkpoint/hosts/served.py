"""A root in the memory of the hosts that publish there, and the same root as followers elsewhere read it.

Each rank writes its files to the directory of its own host, and rank 0 also the manifests. Whoever reads a file asks
the host that has it. So the root is one storage for all, of which no byte is sent before somebody needs it.

    hosts:///dev/shm/weights                     the root, on each host
    hosts:///dev/shm/weights/step-00000003       a checkpoint, over all hosts
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from shardopt.checkpoint.hosts.admission import decode_invitation, invitation_at
from shardopt.checkpoint.hosts.directory import PREFIX
from shardopt.checkpoint.hosts.host_files import HostFiles
from shardopt.checkpoint.hosts.served_roots import Files, FollowedRoot, PublishedRoot, ServedRoot
from shardopt.checkpoint.storage import LocalStorage, ReadInto, Span, Storage, register_storage
from shardopt.errors import OptionError, Problem

KEY_FILE = "SHARDOPT_KEY_FILE"
"""The environment variable with the key file of what is opened by its URL alone, as by the shell."""

T = TypeVar("T")
_log = logging.getLogger("shardopt.checkpoint")


class ServedStorage(Storage):
    """A directory of a served root: of each file, the host that has it is asked.

    Args:
        directory: its name; "" for the root itself.
    """

    buffer_bytes = LocalStorage.buffer_bytes

    def __init__(self, root: ServedRoot, directory: str = "") -> None:
        self._root, self._directory = root, directory
        self.url = f"{root.url}/{directory}" if directory else root.url
        self._where: Mapping[str, int] = {}  # as of the last listing
        self._silent = False

    @property
    def is_remote(self) -> bool:  # type: ignore[override]  # of a publisher it is not known before its hosts have met
        return self._root.number is None or len(self._root.files) > 1

    @property
    def place(self) -> Mapping[str, str]:
        return {}  # the URL says all of it

    @property
    def _own(self) -> LocalStorage:
        """The storage of this host, to write to."""
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
        """Asks the host that has a file. Again, if hosts are elsewhere now: not every rank looks for steps."""
        known = self._root.files
        try:
            return self._ask_known(name, ask)
        except FileNotFoundError:
            raise
        except OSError:
            self._root.refresh()
            if self._root.files is known:
                raise
            self._where = {}
            return self._ask_known(name, ask)

    def _ask_known(self, name: str, ask: Callable[[Files], T]) -> T:
        """Asks the host that should have a file, and if it has not, that which has."""
        hosts = self._root.files
        if not hosts:
            raise ConnectionRefusedError(f"{self.url}/{name}: nobody publishes there")
        first = self._where.get(name, self._root.host_of(name))
        try:
            return ask(hosts[min(first, len(hosts) - 1)])
        except FileNotFoundError:
            self.names()
            found = self._where.get(name, first)
            if found == first or hosts is not self._root.files:
                raise
            return ask(hosts[found])

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


def follow_at(url: str, options: Mapping[str, Any] | None) -> ServedRoot | None:
    """Makes this process open a root in memory of hosts, if its URL is of one, and returns it; else None.

    Args:
        options: `key_file`, if it is not in the job's store.

    Raises:
        OptionError: the URL has no absolute path, or an option is none.
    """
    if not url.startswith(PREFIX):
        return None
    path = _path_of(url)
    known = _roots.get(path)
    if not isinstance(known, PublishedRoot) or known.is_closed:  # whose files here may not be those of the next one
        known = FollowedRoot(path, invitation_at(path, **_known(options, "key_file") or {"key_file": None}))
        _roots[path] = known
    return known


def _open(url: str, key_file: Any = None, max_connections: Any = None, max_bytes_per_second: Any = None) -> Storage:
    # A publisher's options may be given for its URL too; its bounds count where it serves.
    found, key_file = _found(url), key_file or os.environ.get(KEY_FILE)
    if found is None and key_file is not None:
        invitation = invitation_at(url, key_file)
        data = invitation.read()
        if data is not None:
            root = decode_invitation(data, invitation.where).root
            if f"{url}/".startswith(f"{PREFIX}{root}/"):
                _roots[root] = FollowedRoot(root, invitation)
                found = _found(url)
    if found is None:
        remedy = f'give storage_options={{"key_file": ...}} of its publisher, or set {KEY_FILE} to it; '
        remedy += "load shares in a job on these hosts, or from the root that they were promoted to"
        problem = Problem(url, "no publisher of it", "one that this process knows", remedy)
        raise OptionError("nothing is known of memory of hosts", [problem], code="following")
    return found


def _found(url: str) -> ServedStorage | None:
    for path, root in sorted(_roots.items(), reverse=True):  # of two roots that which is below the other comes first
        if url.rstrip("/") == root.url:
            return ServedStorage(root)
        directory = url.removeprefix(f"{PREFIX}{path}/").rstrip("/")
        if directory != url.rstrip("/") and "/" not in directory:
            return ServedStorage(root, directory)
    return None


def _path_of(url: str) -> str:
    path = url.removeprefix(PREFIX).rstrip("/")
    if not path.startswith("/") or path != f"/{os.path.normpath(path).lstrip('/')}":
        required = 'hosts://, and an absolute path without "//" and ".."'
        problem = Problem("root", url, required, 'give it as in "hosts:///dev/shm/weights"')
        raise OptionError("invalid arguments", [problem])
    return path


def _known(options: Mapping[str, Any] | None, *names: str) -> dict[str, Any]:
    others = [str(name) for name in options or {} if name not in names]
    if others:
        problem = Problem("storage_options", ", ".join(others), " and ".join(names), "give these alone")
        raise OptionError("invalid arguments", [problem])
    return dict(options or {})


register_storage("hosts", _open)
