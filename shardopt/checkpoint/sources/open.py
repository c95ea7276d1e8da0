"""Opens a checkpoint, of whatever format: its files tell which it is."""

from __future__ import annotations

import os

from shardopt.checkpoint.format.constants import DATA_SUFFIX, FILE_NAME
from shardopt.checkpoint.sources.dcp import METADATA_NAME, DcpSource
from shardopt.checkpoint.sources.hugging_face import HuggingFaceSource, safetensors_files
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.read_manifest import manifest_bytes, not_found
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.sources.torch_files import SUFFIXES, TorchSource, is_torch_file, torch_files
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors


def open_source(storage: Storage) -> Source:
    """Opens what lies in a storage.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: there is nothing to read, or it is damaged, or its
            version is not known.
    """
    data = manifest_bytes(storage)
    if data is not None:
        return OwnSource(storage, data)
    with wrap_os_errors(f"look into {storage.url}"):
        file = storage.as_file()
        source = _directory(storage) if file is None else _file(*file, storage.url)
    if source is None:
        raise not_found(storage)
    return source


def _directory(storage: Storage) -> Source | None:
    names = storage.names()
    if METADATA_NAME in names:
        return DcpSource(storage)
    tensors = safetensors_files(storage, names)
    if tensors is not None:
        return HuggingFaceSource(storage, tensors)
    files = torch_files(storage, names)
    return None if files is None else TorchSource(storage, files)


def _file(directory: Storage, name: str, url: str) -> Source | None:
    if name.endswith(DATA_SUFFIX) and not FILE_NAME.fullmatch(name):
        return HuggingFaceSource(directory, {name: None}, url)
    if name.endswith(SUFFIXES) and is_torch_file(directory, name):
        return TorchSource(directory, [name], url)
    return None


def open_checkpoint(url: str | os.PathLike[str]) -> CheckpointReader:
    """Opens a checkpoint for reading; use it in a `with` statement, or `close` it. Local."""
    return CheckpointReader(open_source(storage_of(url)))
