"""Copies one checkpoint from one root to another, file by file: the steps of each rank, and those of rank 0.

A copy is verified while it is read, and its manifest goes last: so it is as whole as any checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import xxhash

from shardopt.checkpoint.format.constants import FILE_NAME, MANIFEST_NAME, SEGMENT_BYTES, writer_of
from shardopt.checkpoint.format.manifest import DataFile, Manifest
from shardopt.checkpoint.saving.commit import publish_checkpoint
from shardopt.checkpoint.saving.removal import discard, remove_in_the_way
from shardopt.checkpoint.saving.writing.no_space import explain_no_space
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.sources.reading.open_file import DataFileReader
from shardopt.checkpoint.sources.reading.verified_chunks import VerifiedChunks
from shardopt.checkpoint.sources.referred import directory_of, referred_in
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.errors import CheckpointError, CheckpointExistsError, CorruptionError, Problem
from shardopt.ranks import Ranks

_CHUNK_BYTES = 16 * SEGMENT_BYTES
_log = logging.getLogger("shardopt.checkpoint")


def copy_over_ranks(
    ranks: Ranks,
    source: Storage,
    target: Storage,
    read: Callable[[], tuple[Manifest, bytes]],
    is_wanted: Callable[[], bool] = lambda: True,
) -> tuple[Manifest, int] | None:
    """Copies a checkpoint, unless it exists already or is no longer wanted. Collective.

    Args:
        read: reads the manifest; on each rank.
        is_wanted: rank 0's answer counts.

    Returns:
        The manifest, and the bytes that this rank has uploaded; None where nothing was copied.
    """
    what = f"copying {source.url} to {target.url}"
    if not ranks.on_rank_0(what, lambda: is_wanted() and not is_copied(source, target)):
        return None
    (manifest, data), _ = ranks.agree(
        what,
        work=read,
        report=lambda done: xxhash.xxh3_64_hexdigest(done[1]),
        decide=lambda digests: prepare_copy(source, target, read_manifest(source)[0], digests),
    )
    try:
        nbytes, _ = ranks.agree(
            what,
            work=lambda: upload_files(source, target, manifest, ranks),
            decide=lambda _: commit_copy(source, target, manifest, data),
        )
    except BaseException:
        if ranks.rank == 0:  # as a save: it is the one that could still commit, and has now failed to
            discard(target, manifest.save_id)
        raise
    return manifest, nbytes


def is_copied(source: Storage, target: Storage) -> bool:
    """Whether the copy is committed already; raises if another checkpoint is in its place. On rank 0."""
    with wrap_os_errors(f"look into {target.url}"):
        if not target.exists(MANIFEST_NAME):
            return False
    try:
        copied, _ = read_manifest(target)
    except CorruptionError as error:
        _log.warning("%s: it is copied again", error)
        with wrap_os_errors(f"remove {target.url}"):
            remove_in_the_way(target)
        return False
    wanted, _ = read_manifest(source)
    if copied.save_id == wanted.save_id:
        return True
    other = f"another checkpoint, of save {copied.save_id}, where save {wanted.save_id} is to be copied"
    remedy = "remove it, or give each run a root of its own for its copies"
    problem = Problem(target.url, other, "no checkpoint", remedy)
    raise CheckpointExistsError("a copy was not made", [problem], code="run-root")


def prepare_copy(source: Storage, target: Storage, manifest: Manifest, digests: list[str]) -> None:
    """Makes the directories, without leftovers of an earlier copy; raises if ranks see other manifests. On rank 0.

    Files to which other copies refer already are no remains. Nor are those of a copy that is there by now: another
    process of the job, which was not dead, has made it since this one looked.
    """
    if len(set(digests)) > 1:
        problem = Problem(source.url, "not the same checkpoint on every rank", "one", "give all ranks the same path")
        raise CheckpointError("ranks do not see the same checkpoint", [problem], code="ranks-see-different")
    with wrap_os_errors(f"make {target.url}"), explain_no_space(target, "a directory", int, int):
        target.make()
        beside = {file.directory: directory_of(file, target) for file in manifest.referred_files}
        for storage in beside.values():
            storage.make()
        if not target.exists(MANIFEST_NAME):
            _remove_remains(target, manifest)


def _remove_remains(target: Storage, manifest: Manifest) -> None:
    """Removes files of an unfinished copy; and its manifest, if another process has finished it just now."""
    there = set(target.names())
    own = [file.name for file in manifest.own_files if file.name in there]
    referred = referred_in(target) if own else ()
    removed = [name for name in own if name not in referred]
    for name in removed:
        target.remove(name)
    if removed:
        target.remove_durably(MANIFEST_NAME)


def upload_files(source: Storage, target: Storage, manifest: Manifest, ranks: Ranks) -> int:
    """Uploads the files that this rank wrote, and its share of those of former ranks; returns their bytes.

    Files that the checkpoint refers to go into directories beside the copy's, where they are not there yet: then the
    copy refers to them as the checkpoint does.
    """
    own = [file for file in manifest.files if writer_of(file.name) % ranks.size == ranks.rank]
    with (
        wrap_os_errors(f"copy {source.url} to {target.url}"),
        explain_no_space(target, "its files", lambda: sum(file.nbytes for file in own), int),
    ):
        return sum(_upload(file, directory_of(file, source), directory_of(file, target)) for file in own)


def _upload(file: DataFile, source: Storage, target: Storage) -> int:
    """Uploads a file unless it exists; returns the uploaded bytes."""
    if target.exists(file.name):
        try:
            DataFileReader(target, file)  # its size, and the digest of header and checksums
            return 0
        except CorruptionError as error:
            _log.warning("%s: it is copied again", error)
            target.remove(file.name)
    return target.write(file.name, VerifiedChunks(DataFileReader(source, file)))


def commit_copy(source: Storage, target: Storage, manifest: Manifest, data: bytes) -> None:
    """Copies the other files in the checkpoint's directory, and then the manifest. On rank 0."""
    with wrap_os_errors(f"commit {target.url}"), explain_no_space(target, "its manifest", data.__len__, int):
        for name in source.names():
            if name != MANIFEST_NAME and not FILE_NAME.fullmatch(name) and not name.startswith("."):
                _copy_other_file(source, target, name)
        publish_checkpoint(target, manifest, data)


def _copy_other_file(source: Storage, target: Storage, name: str) -> None:
    """Copies a file that is not the checkpoint's own; skips directories and missing files."""
    try:
        nbytes = source.size(name)
    except FileNotFoundError:
        return
    target.remove(name)
    target.write(name, _FileChunks(source, name, nbytes))


class _FileChunks:
    """The bytes of a file, in chunks. Can be iterated again."""

    def __init__(self, storage: Storage, name: str, nbytes: int) -> None:
        self._storage, self._name, self.nbytes = storage, name, nbytes

    def __iter__(self) -> Iterator[memoryview]:
        for begin in range(0, self.nbytes, _CHUNK_BYTES):
            yield memoryview(self._storage.read(self._name, begin, min(begin + _CHUNK_BYTES, self.nbytes)))
