"""The root of a run: the directories of its checkpoints, and the records of its branches and its identity."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from shardopt.checkpoint.format.constants import (
    DCP_METADATA_NAME,
    FILE_NAME,
    MANIFEST_NAME,
    damaged,
    pack_record,
    unpack_record,
)
from shardopt.checkpoint.hosts.directory import PREFIX
from shardopt.checkpoint.reports import announce
from shardopt.checkpoint.run.branches import (
    Branch,
    Branches,
    CheckpointId,
    branches_of,
    ids_in,
    is_a_checkpoint,
    read_records,
    record_file,
    runs_near,
)
from shardopt.checkpoint.sources.own import is_committed, read_manifest
from shardopt.checkpoint.sources.referred import look_at_each
from shardopt.checkpoint.storage import LocalStorage, Storage, held_urls, wrap_os_errors
from shardopt.checkpoint.storage.mounts import unwritable
from shardopt.errors import CheckpointError, CorruptionError, Problem
from shardopt.world import world

T = TypeVar("T")

RUN_NAME = "run.json"
"""The name of the record of a run, in its root and in its mirror."""
LABEL_NAME = ".run"
"""The name of the record in a host's directory of a tier."""
STREAM_NAME = "stream.json"
"""The name of the record in the root of a publisher, where no run is kept."""

ID_BYTES = 16
"""Of the identity of a run, or of what is published under a root."""
ID = re.compile(r"[0-9a-f]{32}")
"""Such an identity, as records have it."""

_log = logging.getLogger("shardopt.checkpoint")
_FORMAT = "shardopt-run"


class RunIdentity(NamedTuple):
    """The identity of a run.

    Args:
        id: 32 hexadecimal digits.
        root: its URL when the run began, for messages alone: roots may be moved.
    """

    id: str
    root: str

    def pack(self) -> bytes:
        """Returns the record's bytes."""
        return pack_record(_FORMAT, id=self.id, root=self.root)


class Listing(NamedTuple):
    """The names directly under a root, the checkpoints among them (ascending), and branch records by file name.

    Args:
        number: of the listing, in the order in which they begin.
    """

    number: int = 0
    names: frozenset[str] = frozenset()
    ids: Sequence[CheckpointId] = ()
    records: Mapping[str, Branch] = MappingProxyType({})


def decode_run(data: bytes, where: str) -> RunIdentity:
    """Decodes a record from untrusted bytes. Raises CorruptionError."""
    wire = unpack_record(data, where)
    number, root = wire.get("id"), wire.get("root")
    is_whole = isinstance(number, str) and ID.fullmatch(number) and isinstance(root, str)
    if wire.get("format") != _FORMAT or not is_whole:
        raise damaged(where, "no record of a run")
    return RunIdentity(str(number), str(root))


def run_at(storage: Storage, name: str = RUN_NAME) -> RunIdentity | None:
    """Returns the run whose record is in a directory; None if there is none.

    Raises:
        CheckpointError: it cannot be read. CorruptionError: it is damaged.
    """
    data = record_in(storage, name)
    return None if data is None else decode_run(data, f"{storage.url}/{name}")


def record_in(storage: Storage, name: str) -> bytes | None:
    """Returns the bytes of a record; None if it is not there. Raises CheckpointError with its URL."""
    with wrap_os_errors(f"read {storage.url}/{name}"):
        try:
            return storage.read_record(name)
        except FileNotFoundError:
            return None


def refuse_seen_by_some(url: str, ranks_see: Sequence[bool]) -> None:
    """Raises CheckpointError if some ranks see checkpoints under a root, and others none; on rank 0."""
    if any(ranks_see) and not all(ranks_see):
        seen = f"checkpoints on rank {ranks_see.index(True)}, and none on rank {ranks_see.index(False)}"
        problem = Problem(url, seen, "the same on every rank", "check what is mounted there")
        raise CheckpointError("ranks do not see the same root", [problem], code="ranks-see-different")


def _committed_among(
    items: Sequence[T], look: Callable[[T], bool], is_remote: bool
) -> tuple[list[T], dict[T, CheckpointError]]:
    """Returns those of some directories that are committed checkpoints, and the errors of those that do not say.

    So one that is out of reach is no obstacle to the others. Who takes it for a checkpoint has its error at the load.
    """
    unread: dict[T, CheckpointError] = {}

    def look_at(item: T) -> bool:
        try:
            return look(item)
        except CheckpointError as error:
            unread[item] = error
            return False

    found = look_at_each(look_at, items, is_remote)
    return [item for item, is_there in zip(items, found, strict=True) if is_there], unread


def committed_or_unread(root: Storage, names: Sequence[str]) -> list[str]:
    """Returns those of some directories that a restore may take: checkpoints, and what is out of reach, with a warning.

    There is no harm in an older one. If it is the newest its load raises an error, and nothing older is taken.
    """
    found, unread = _committed_among(names, lambda name: is_committed(root.child(name)), root.is_remote)
    for name, error in sorted(unread.items()):
        _log.warning("nobody knows whether %s/%s is a checkpoint: %s", root.url, name, error)
    return [*found, *unread]


_in_use: WeakValueDictionary[str, Root] = WeakValueDictionary()
"""Those of this process, by URL: a root that is still empty is of neither kind to see."""


class Root:
    """Reads and writes the files directly under the root of a run. Local to the calling rank."""

    publishes = False
    """Whether it is that of a publisher."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.url = storage, storage.url
        self.is_on_hosts = self.url.startswith(PREFIX)
        """Whether it is in the memory of hosts, where no run is kept, and the host that had the records may be lost."""
        self._has_stream = False  # at any listing: one that was emptied since may have lost the record first
        self.seen = Listing()
        """The last listing: of those that ended, the one that began last."""
        self._numbers, self._lock = count(1), world().lock()
        self._committed: frozenset[CheckpointId] = frozenset()  # that were found to be, where to look costs a request

    def is_there(self) -> bool:
        """Whether the directory exists; on an object store, whether the prefix has files."""
        if isinstance(self.storage, LocalStorage):
            return os.path.isdir(self.url)
        return bool(self.storage.names())

    def tell_none(self) -> str:
        """Returns the line for a run that begins without a checkpoint, which names one of another format beside it.

        Warns of a run one level up or down on a disk, unless the program has a Manager of it.
        """
        if isinstance(self.storage, LocalStorage) and (others := runs_near(self.url, but=held_urls())):
            text = "no checkpoint is in %s, and a run is in %s: if that is meant, give Manager that path [run-root]"
            _log.warning(text, self.url, " and ".join(others[:3]))
        if not self.is_there():
            return f"starting fresh: {self.url} does not exist"
        line = f"starting fresh: no checkpoint in {self.url}"
        numbered = sorted((name for name in self.seen.names if name[-1].isdigit()), key=lambda name: (len(name), name))
        with contextlib.suppress(OSError, CheckpointError):  # a hint alone, which only one rank looks for
            if numbered and self.storage.child(numbered[-1]).exists(DCP_METADATA_NAME):
                line += f"; {numbered[-1]} is one of torch.distributed.checkpoint: checkpoint.load(url, app) reads it"
        return line

    def ids(self) -> list[CheckpointId]:
        """Lists the checkpoints with a directory under the root, even an empty one, ascending; none without a root.

        Raises:
            CheckpointError: it cannot be read.
            CorruptionError: the record of a branch is damaged.
        """
        number = next(self._numbers)
        with wrap_os_errors(f"look into {self.url}"):
            names = self.storage.names()
            ids = ids_in(names)
            if (branch := max((id.branch for id in ids), default=0)) and record_file(branch) not in names:
                # It was written before the branch's first step, but maybe after the listing had passed its name.
                names = self.storage.names()
                ids = ids_in(names)
            self._has_stream = self._has_stream or STREAM_NAME in names
            records = read_records(self.storage, names, self.seen.records)
            with self._lock:  # other threads list too, and one that hangs may end long after others
                self.seen = max(self.seen, Listing(number, frozenset(names), tuple(ids), records))
        return ids

    def branches(self) -> Branches:
        """Returns the branches as of the last listing.

        Of a stream only those up to the first whose record is missing: it begins again where its root is emptied, or a
        host lost.

        Raises:
            CorruptionError: the record of one is missing in a run.
        """
        seen = self.seen
        if self.is_on_hosts or self._has_stream:
            records = sorted(seen.records.values())
            return branches_of(each for number, each in enumerate(records, 1) if each.number == number)
        return branches_of(seen.records.values(), seen.ids, self.url)

    def claim(self, reads_first: bool = False) -> None:
        """Makes this the root of a run, after a listing.

        Args:
            reads_first: whether nothing is written yet: tells where nothing could be.

        Raises:
            CheckpointError: it is that of the other, which would remove what this one saves, or a checkpoint itself.
        """
        names = self.seen.names
        is_checkpoint = MANIFEST_NAME in names and any(map(FILE_NAME.fullmatch, names))
        if is_checkpoint or DCP_METADATA_NAME in names:
            raise is_a_checkpoint(self.url, "" if is_checkpoint else " of torch.distributed.checkpoint")
        if reads_first and isinstance(self.storage, LocalStorage) and (path := unwritable(self.url)):
            announce(f"{path} cannot be written to: a save to {self.url} would fail [storage-failed]")
        beside = _in_use.get(self.url)
        if self._is_other_kind() or (beside is not None and beside.publishes != self.publishes):
            kinds = "the root of a run", "the root of a publisher"
            found, required = kinds[not self.publishes], kinds[self.publishes]
            problem = Problem(self.url, found, required, self._remedy())
            raise CheckpointError("a run and a publisher cannot share a root", [problem], code="run-root")
        _in_use[self.url] = self

    def _is_other_kind(self) -> bool:
        """Whether what was listed is a publisher's; in a publisher's root, a run's."""
        return STREAM_NAME in self.seen.names

    def _remedy(self) -> str:
        return "give each of them a directory of its own"

    def checkpoint(self, id: CheckpointId) -> Storage:
        """Returns the storage of a checkpoint's directory."""
        return self.storage.child(id.name)

    def is_committed(self, id: CheckpointId) -> bool:
        """Whether there is a manifest. An unreadable one counts, too; a load then finds the damage.

        A link that leads nowhere does not: retention would keep it instead of a checkpoint. To a restore it is a
        candidate all the same (`sources.own.is_committed`).
        """
        try:
            with wrap_os_errors(f"look into {self.url}"):
                return self.checkpoint(id).exists(MANIFEST_NAME)
        except CorruptionError:
            return True

    def look_at(self, ids: Sequence[CheckpointId]) -> tuple[list[CheckpointId], dict[CheckpointId, CheckpointError]]:
        """Returns the committed checkpoints among some, and the errors of those that cannot be looked at."""
        return _committed_among(ids, self.is_committed, self.storage.is_remote)

    def committed_or_unread(self, ids: Sequence[CheckpointId]) -> list[CheckpointId]:
        """Returns those of some checkpoints that a restore may take, ascending."""
        return ids_in(committed_or_unread(self.storage, [id.name for id in ids]))

    def committed_of(
        self, ids: Sequence[CheckpointId]
    ) -> tuple[list[CheckpointId], dict[CheckpointId, CheckpointError]]:
        """Returns as `look_at` those among checkpoints that `ids` has just listed.

        On a store, what was found committed before is not asked for again while its directory is listed: a commit is to
        cost one request, however many checkpoints are kept. What others take away there without its directory is
        noticed when the program starts again.
        """
        known = self._committed.intersection(ids) if self.storage.is_remote else frozenset()
        found, unread = self.look_at([id for id in ids if id not in known])
        committed = self._committed = known.union(found)
        return [id for id in ids if id in committed], unread

    def is_unfinished(self, id: CheckpointId) -> bool:
        """Whether the directory of a step that is not committed has data files. A store makes one only for files."""
        with contextlib.suppress(OSError):
            names = [] if self.storage.is_remote else self.checkpoint(id).names()
            return self.storage.is_remote or (MANIFEST_NAME not in names and any(map(FILE_NAME.fullmatch, names)))
        return False

    def saved_at(self, id: CheckpointId) -> float | None:
        """Reads when a checkpoint was saved, in seconds since 1970 began; None where that cannot be known."""
        with contextlib.suppress(OSError, CheckpointError):
            return read_manifest(self.checkpoint(id))[0].saved_at
        return None

    def forget(self, ids: Iterable[CheckpointId]) -> None:
        """Forgets that checkpoints were committed, before they are removed or saved again."""
        self._committed -= frozenset(ids)

    def add(self, record: Branch) -> None:
        """Writes the record of a branch, unless it exists. Raises CheckpointError if it differs."""
        with wrap_os_errors(f"write {self.url}/{record.file_name}"):
            self.storage.make()
            self.storage.publish_new(record.file_name, record.pack())
