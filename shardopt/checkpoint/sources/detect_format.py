"""Detects the format of a checkpoint by the names of its files, and opens it. Our own format needs no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardopt.checkpoint.format.constants import DATA_SUFFIX, DCP_METADATA_NAME, FILE_NAME, INDEX_SUFFIX, TORCH_SUFFIXES
from shardopt.checkpoint.sources.own import OwnSource, manifest_bytes, not_found
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.runtime.late import late

if TYPE_CHECKING:
    from shardopt.checkpoint.sources import foreign
else:
    foreign = late("shardopt.checkpoint.sources.foreign")

_OF_OTHERS = (DATA_SUFFIX, INDEX_SUFFIX, DCP_METADATA_NAME, *TORCH_SUFFIXES)
"""Suffixes of file names: `foreign` is asked only for a directory that has one of them."""


def open_source(storage: Storage, base_root: str | os.PathLike[str] | None = None) -> Source:
    """Detects and opens the checkpoint in a storage.

    Args:
        base_root: where it refers to files of earlier saves, the directory that has their directories; None for the one
            that it lies in itself.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: there is nothing to read, or it is damaged, or its
            version is not known.
    """
    data = manifest_bytes(storage)
    if data is not None:
        return OwnSource(storage, data, base_root)
    source = None
    with wrap_os_errors(f"look into {storage.url}"):
        file = storage.as_file()
        if file is not None:
            source = foreign.in_file(*file, storage.url)
        else:
            names = storage.names()
            if any(name.endswith(_OF_OTHERS) and not FILE_NAME.fullmatch(name) for name in names):
                source = foreign.in_directory(storage, names)
    if source is None:
        raise not_found(storage)
    return source
