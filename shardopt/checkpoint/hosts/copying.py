"""Copies of other hosts' files on this host: a checkpoint then survives the loss of hosts.

Files are fetched one after the other, in chunks of some MiB that are verified before they are written. A copy has its
name once it is whole; nothing else says that it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.hosts.holders import fetches_of
from shardopt.checkpoint.hosts.hosts import Hosts
from shardopt.checkpoint.hosts.share import RECORD_NAME, Share
from shardopt.checkpoint.hosts.whole import WholeCheckpoint
from shardopt.checkpoint.reading.data_file_reader import DataFileReader
from shardopt.checkpoint.reading.verified_chunks import VerifiedChunks
from shardopt.checkpoint.storage import wrap_os_errors
from shardopt.errors import CheckpointError

_log = logging.getLogger("shardopt.checkpoint")


def fetch_copies(hosts: Hosts, whole: WholeCheckpoint, copies: int, goes_on: Callable[[], bool]) -> bool:
    """Fetches what this host is to have of a checkpoint, so that each file is on `copies` hosts. On its leader.

    Args:
        goes_on: asked between files; what was fetched until then stays.

    Returns:
        Whether it has all of it now. What it could not get or write is logged.
    """
    fetches = fetches_of(hosts.number, whole.holders, hosts.count, copies)
    files = {file.name: file for file in whole.manifest.files}
    try:
        with wrap_os_errors(f"copy {whole.url} to {whole.share.url}"):
            if whole.share.record() is None:
                whole.share.make()
                whole.share.publish(RECORD_NAME, whole.record)
            for name, _ in fetches:
                if not goes_on():
                    return False
                if name not in whole.share.files():
                    copy_file(whole, whole.share, files[name])
    except CheckpointError as error:
        _log.warning("copies of %s for other hosts were not all made: %s", whole.url, error)
        return False
    return True


def copy_file(whole: WholeCheckpoint, target: Share, file: DataFile) -> None:
    """Copies a file of a checkpoint from the first host of which the copy is intact.

    Raises:
        CheckpointError: there is none. OSError: it cannot be written.
    """
    while True:
        copy = whole.copy_of(file.name)
        try:
            target.write_atomically(file.name, VerifiedChunks(DataFileReader(whole, file)))
            return
        except CheckpointError as error:
            if not whole.pass_over(file.name, copy, error):
                raise
