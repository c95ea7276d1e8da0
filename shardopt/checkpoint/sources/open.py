"""Opens a checkpoint, of whatever format: its files tell which it is."""

from __future__ import annotations

import os

from shardopt.checkpoint.format.constants import DATA_SUFFIX, FILE_NAME
from shardopt.checkpoint.sources.dcp import METADATA_NAME, DcpSource
from shardopt.checkpoint.sources.hugging_face import HuggingFaceSource, safetensors_files
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.quantized import with_weights
from shardopt.checkpoint.sources.read_manifest import manifest_bytes, not_found
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.sources.torch_files import TorchSource, is_torch_file, torch_files
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors


def open_source(storage: Storage, base_root: str | os.PathLike[str] | None = None) -> Source:
    """Opens what lies in a storage.

    Args:
        base_root: as for `open`.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: there is nothing to read, or it is damaged, or its
            version is not known.
    """
    data = manifest_bytes(storage)
    if data is not None:
        return OwnSource(storage, data, base_root)
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
        return with_weights(HuggingFaceSource(storage, tensors))
    files = torch_files(storage, names)
    return None if files is None else TorchSource(storage, files)


def _file(directory: Storage, name: str, url: str) -> Source | None:
    if name.endswith(DATA_SUFFIX) and not FILE_NAME.fullmatch(name):
        return with_weights(HuggingFaceSource(directory, {name: None}, url))
    if is_torch_file(directory, name):
        return TorchSource(directory, [name], url)
    return None


def open(url: str | os.PathLike[str], base_root: str | os.PathLike[str] | None = None) -> CheckpointReader:
    """Opens a checkpoint for reading; use it in a `with` statement, or `close` it. Local.

    Args:
        url: of a committed checkpoint.
        base_root: where it refers to files of earlier saves, the directory that has their directories; None for the one
            that it lies in itself, as all checkpoints of a run do. Nothing is ever read from elsewhere.
    """
    return CheckpointReader(open_source(storage_of(url), base_root))
