"""Copies other hosts' files to this host, so that a checkpoint survives the loss of hosts.

Files are fetched one after the other, in chunks of some MiB that are verified before they are written. A copy has its
name once it is whole; nothing else says that it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from shardopt.checkpoint.format.constants import RECORD_NAME
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.hosts.holders import fetches_of
from shardopt.checkpoint.hosts.hosts import Hosts
from shardopt.checkpoint.hosts.share import Share
from shardopt.checkpoint.hosts.whole import WholeCheckpoint
from shardopt.checkpoint.sources.reading.open_file import DataFileReader
from shardopt.checkpoint.sources.reading.verified_chunks import VerifiedChunks, verify
from shardopt.checkpoint.storage import wrap_os_errors
from shardopt.errors import CheckpointError, CorruptionError
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


def fetch_copies(hosts: Hosts, whole: WholeCheckpoint, copies: int, max_bytes_per_second: float | None) -> bool:
    """Fetches this host's copies of a checkpoint, so that each file is on `copies` hosts. On its leader.

    Args:
        max_bytes_per_second: bytes that are fetched at most; None for no limit.

    Returns:
        Whether it has all of it now. What it could not get or write is logged.
    """
    wanted = fetches_of(hosts.number, whole.holders, hosts.domains, copies)
    files = {file.name: file for file in whole.manifest.files}
    try:
        with wrap_os_errors(f"copy {whole.url} to {whole.share.url}"):
            if whole.share.record() != whole.record:
                if not any(hosts.number in have for have in whole.holders.values()):
                    whole.share.clear()  # its files are of another save
                whole.share.make()
                whole.share.publish(RECORD_NAME, whole.record)
            for name in wanted:
                if whole.share.files().get(name) != files[name].nbytes:
                    copy_file(whole, whole.share, files[name], max_bytes_per_second)
    except CheckpointError as error:
        _log.warning("copies of %s for other hosts were not all made: %s", whole.url, error)
        return False
    return True


def damaged_files(hosts: Hosts, whole: WholeCheckpoint) -> list[str]:
    """Verifies this host's files of a checkpoint; returns the names of damaged ones. On its leader.

    Only what is known to be: a file that cannot be opened now, for want of a descriptor say, is not.
    """
    damaged = []
    for file in whole.manifest.files:
        if hosts.number not in whole.holders[file.name]:
            continue
        try:
            verify(DataFileReader(whole.share, file))
        except CorruptionError as error:
            _log.warning("%s/%s is damaged: %s", whole.share.url, file.name, error)
            damaged.append(file.name)
        except CheckpointError as error:
            _log.warning("%s/%s was not verified: %s", whole.share.url, file.name, error)
    return damaged


def replace_damaged(hosts: Hosts, whole: WholeCheckpoint, damaged: Sequence[Sequence[str]]) -> None:
    """Replaces damaged files on this host by intact ones from other hosts; keeps them until then. On its leader.

    Args:
        damaged: by host, the names of files.
    """
    intact = {name: [host for host in have if name not in damaged[host]] for name, have in whole.holders.items()}
    source = WholeCheckpoint(hosts, whole.name, whole.record, whole.manifest, intact)
    for file in whole.manifest.files:
        if file.name in damaged[hosts.number] and intact[file.name]:
            try:
                with wrap_os_errors(f"write {whole.share.url}/{file.name}"):
                    copy_file(source, whole.share, file)
            except CheckpointError as error:
                _log.warning("%s/%s is not replaced: %s", whole.share.url, file.name, error)


def copy_file(whole: WholeCheckpoint, target: Share, file: DataFile, max_bytes_per_second: float | None = None) -> None:
    """Copies a file of a checkpoint from the first host with an intact copy.

    Raises:
        CheckpointError: there is none. OSError: it cannot be written.
    """
    while True:
        copy = whole.copy_of(file.name)
        try:
            chunks = VerifiedChunks(DataFileReader(whole, file))
            slowed = chunks if max_bytes_per_second is None else _slowed(chunks, max_bytes_per_second)
            target.write_atomically(file.name, slowed)
            return
        except CheckpointError as error:
            if not whole.pass_over(file.name, copy, error):
                raise


def _slowed(chunks: Iterable[memoryview], max_bytes_per_second: float) -> Iterator[memoryview]:
    """Yields chunks, at most so many bytes per second."""
    begin, nbytes = world().monotonic(), 0
    for chunk in chunks:
        yield chunk
        nbytes += chunk.nbytes
        world().sleep(max(0.0, begin + nbytes / max_bytes_per_second - world().monotonic()))
