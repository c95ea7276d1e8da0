"""Opens a checkpoint of any format. If all ranks open it, only rank 0 reads remote storage:

round    rank 0 reads the manifest, or what else a checkpoint of others begins with; packed, it goes down the tree
later    each rank opens the checkpoint from that, in whichever round its caller begins next

Local paths have no such round: a page cache costs nothing, and hosts may have a disk under different paths. What this
process is reading is known by its URL, and not cleared away.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import xxhash

from shardopt.checkpoint.sources.detect_format import open_source
from shardopt.checkpoint.sources.own import manifest_bytes
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import RecordedReads, ReplayStorage, storage_of
from shardopt.errors import CheckpointError, Problem
from shardopt.ranks import Call, Ranks, as_call
from shardopt.world import world

_lock = world().lock()
_readers: Counter[str] = Counter()
loaded_from: set[str] = set()
"""The directories with the checkpoints that this process has loaded, such as the root of a run."""


def open(url: str | os.PathLike[str], base_root: str | os.PathLike[str] | None = None) -> CheckpointReader:
    """Opens a checkpoint for reading; use it in a `with` statement, or `close` it. Local.

    Args:
        url: of a committed checkpoint.
        base_root: the directory that contains the directories of earlier saves that it refers to. None is the
            checkpoint's own parent directory, as for all checkpoints of a run. Nothing is ever read from elsewhere.
    """
    return CheckpointReader(open_source(storage_of(url), base_root))


def opener_of(
    ranks: Ranks,
    what: str,
    url: str | os.PathLike[str],
    base_root: str | os.PathLike[str] | None,
) -> Callable[[], CheckpointReader]:
    """Returns a function by which each rank opens, as `open` does, what rank 0 read from remote storage. Collective.

    The function is local, to be called once, in a round of the caller's: it raises what `open` does, or
    CheckpointError where this rank has not got what rank 0 has read.

    Args:
        what: names the caller's work in errors.
        url, base_root: as for `open`.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError, CheckpointError: rank 0 cannot read it. All ranks raise
            the same. What a manifest has in it is looked at only by the function.
    """
    own = RecordedReads()

    def read() -> tuple[str, list[bytes]]:
        storage = ReplayStorage(storage_of(url), own)
        if manifest_bytes(storage) is None:  # one of our own is decoded by all ranks at one time, rank 0 too
            open_source(storage, base_root)
        packed = own.pack()
        return xxhash.xxh3_64_hexdigest(packed), [packed]

    # Named apart from the round that follows, for ranks that give a local path have none of this.
    call = Call(what, f"{as_call(what).same} from a remote store")
    _, digest, section = ranks.agree_in_sections(
        call,
        work=lambda: storage_of(url),
        report=lambda _: None,
        decide=lambda _: read(),
        section_of=lambda _, rank: 0,
    )
    sections = [section]
    del section

    def open_here() -> CheckpointReader:
        packed = sections.pop()  # not to be held while tensors are read
        if xxhash.xxh3_64_hexdigest(packed) != digest:
            found = f"{len(packed)} other bytes on rank {ranks.rank}"
            problem = Problem(os.fspath(url), found, "what rank 0 has read and sent", "load again")
            raise CheckpointError("ranks do not see the same checkpoint", [problem], code="ranks-see-different")
        if ranks.rank == 0:
            answers = own
            answers.replay()
        else:
            answers = RecordedReads.unpack(packed)
        del packed
        try:
            return CheckpointReader(open_source(ReplayStorage(storage_of(url), answers), base_root))
        finally:
            answers.close()

    return open_here


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether a URL is of remote storage. A URL that cannot be opened here counts, as paths always open; in a round."""
    try:
        return storage_of(url).is_remote
    except Exception:
        return True


@contextmanager
def reading(url: str | os.PathLike[str]) -> Iterator[None]:
    """Counts the checkpoint at `url` as being read while the context is open."""
    try:
        key = storage_of(url).url
    except Exception:  # of a URL that nothing can be read from: it is refused in a round, on all ranks
        key = str(url)
    with _lock:
        _readers[key] += 1
    try:
        yield
    finally:
        with _lock:
            _readers[key] -= 1
            if not _readers[key]:
                del _readers[key]


def urls_being_read() -> set[str]:
    """Returns the URLs of checkpoints being read, as storages spell them."""
    with _lock:
        return set(_readers)


def raise_for_other_checkpoint(urls: Sequence[str], other: int) -> NoReturn:
    """Raises CheckpointError for ranks that see different checkpoints.

    Args:
        urls: what each rank loads from.
        other: the number of one that sees another checkpoint than rank 0.
    """
    remedy = "give all ranks one path" if urls[other] != urls[0] else "check what is mounted there"
    at = f" ({urls[other]})" if urls[other] != urls[0] else ""
    seen = f"another checkpoint on rank {other}{at} than on rank 0"
    problem = Problem(urls[0], seen, "the same on every rank", remedy)
    raise CheckpointError("ranks do not see the same checkpoint", [problem], code="ranks-see-different")


def _unlock_in_child() -> None:
    global _lock
    _lock = world().lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_unlock_in_child)
