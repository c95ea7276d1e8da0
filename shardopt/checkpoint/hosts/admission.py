"""The invitation by which followers find a publisher's hosts, and prove that they may read there.

It stands in a file that only its owner may read, or in the store of the job:

    {"format": "shardopt-invitation", "root": "/dev/shm/weights", "name": "…", "key": "…",
     "hosts": [[["10.0.0.1", 40001], …], …], "of_rank": [0, 0, 1, 1]}

`hosts` are the addresses of each host's file server, and `of_rank` is the host that has the files of each rank. A
publisher that starts again writes another one, with another key.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardopt.checkpoint.format.constants import pack_record, unpack_record
from shardopt.errors import CheckpointError, CorruptionError, OptionError, Problem
from shardopt.runtime.stores import Store
from shardopt.world import world

_FORMAT = "shardopt-invitation"
_STORE = "shardopt-streams"
_LIMIT_BYTES = 16 << 20  # of one million ranks
_NOTHING = "-"  # is no invitation: the store answers it where there is none


@dataclass(frozen=True, slots=True)
class Invitation:
    """An invitation.

    Args:
        root: the path of the directory on each host.
        name, key: of the session that the servers take part in, in hexadecimal digits.
        hosts: of each host the addresses and ports of its server, in the order in which they are tried.
        of_rank: the number of the host of each publishing rank.
    """

    root: str
    name: str
    key: str = field(repr=False)
    hosts: tuple[tuple[tuple[str, int], ...], ...]
    of_rank: tuple[int, ...]

    def pack(self) -> bytes:
        """Returns the record's bytes."""
        members = {"root": self.root, "name": self.name, "key": self.key, "hosts": self.hosts, "of_rank": self.of_rank}
        return pack_record(_FORMAT, **members)


def decode_invitation(data: bytes, where: str) -> Invitation:
    """Decodes an invitation from untrusted bytes. Raises CheckpointError."""
    try:
        wire = unpack_record(data, where)
        hosts = tuple(tuple((_is(host, str), _is(port, int)) for host, port in at) for at in wire["hosts"])
        of_rank = tuple(_is(each, int) for each in wire["of_rank"])
        texts = [_is(wire[name], str) for name in ("root", "name", "key")]
        bytes.fromhex(texts[2])
        if wire["format"] != _FORMAT or not hosts or not all(0 <= each < len(hosts) for each in of_rank):
            raise ValueError
        if not all(0 < port < 1 << 16 for at in hosts for _, port in at):
            raise ValueError
    except (KeyError, TypeError, ValueError, CorruptionError):
        # No CorruptionError: it is no damage of the step that is being read.
        remedy = "copy the publisher's key_file again, all of it"
        problem = Problem(where, "no invitation, or a part of one", "that of a publisher", remedy)
        raise CheckpointError("an invitation cannot be read", [problem], code="following") from None
    return Invitation(texts[0], texts[1], texts[2], hosts, of_rank)


def _is(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


class KeyFile:
    """An invitation in a file that only this user may read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = os.path.abspath(os.path.expanduser(os.fspath(path)))

    def write(self, data: bytes) -> None:
        """Writes it, in place of an earlier one. Raises CheckpointError."""
        temporary = f"{self.where}.{world().random_name(6)}.tmp"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with open(fd, "wb") as file:
                    self._refuse_others(os.fstat(fd))  # some file systems let others read all the same
                    file.write(data)
                os.replace(temporary, self.where)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            problem = Problem(self.where, str(error.strerror), "a file that can be written", "give another key_file")
            raise CheckpointError("followers cannot be invited", [problem], code="following") from error

    def read(self) -> bytes | None:
        """Reads it; None if there is none. Raises CheckpointError."""
        try:
            fd = os.open(self.where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            remedy = "copy the publisher's key_file, as this user"
            problem = Problem(self.where, str(error.strerror), "a file that this user can read", remedy)
            raise CheckpointError("an invitation cannot be read", [problem], code="following") from error
        try:
            self._refuse_others(os.fstat(fd))  # before a directory, or a FIFO, is read
            with open(fd, "rb", closefd=False) as file:
                return file.read(_LIMIT_BYTES)
        finally:
            os.close(fd)

    def _refuse_others(self, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
            found = f"mode {stat.S_IMODE(status.st_mode):04o}, of user {status.st_uid}"
            required = f"a file of mode 0600, of user {os.geteuid()}"
            problem = Problem(self.where, found, required, "chmod 600, on a file system that keeps modes")
            raise CheckpointError("others may read the key of a publisher", [problem], code="following")


class InStore:
    """An invitation in the store of the job, for followers among its own ranks."""

    def __init__(self, root: str) -> None:
        self.where = root

    def write(self, data: bytes) -> None:
        """Writes it, in place of an earlier one."""
        store = _store()
        if store is not None:
            store.set(self.where, data.decode())

    def read(self) -> bytes | None:
        """Reads it; None if there is none."""
        store = _store()
        data = None if store is None else store.compare_set(self.where, _NOTHING, _NOTHING)
        return None if data is None or data.decode() == _NOTHING else bytes(data)


def invitation_at(root: str, key_file: Any) -> KeyFile | InStore:
    """Returns where the invitation to a root stands: in a file, or with None in the job's store.

    Raises:
        OptionError: there is neither. Or `key_file` is no path.
    """
    if isinstance(key_file, str | os.PathLike) and os.fspath(key_file):
        return KeyFile(key_file)
    remedy = 'give storage_options={"key_file": "~/weights.key"}, or take a path or an object store as root'
    if key_file is not None:
        problem = Problem("key_file", repr(key_file)[:80], "a path", remedy)
        raise OptionError("invalid arguments", [problem])
    if not (dist.is_available() and dist.is_initialized()):
        problem = Problem(f"hosts://{root}", "no key_file, and no process group", "one of them", remedy)
        raise OptionError("nothing says where the hosts of a publisher are", [problem], code="following")
    return InStore(root)


def _store() -> Store | None:
    job = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if job is None else world().store_of(job, _STORE)
