"""Checkpoints of our own format as a source."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
import xxhash

from shardopt.checkpoint.format.constants import (
    DTYPES,
    FORMAT_NAME,
    MANIFEST_NAME,
    PER_RANK_PREFIX,
    damaged,
    file_name,
    file_stem,
    load_json,
    without_duplicates,
)
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.sources.read_manifest import read_manifest
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.checkpoint.sources.reading.open_file import HEAD_BYTES, DataFileReader, ReadRequest, form_of
from shardopt.checkpoint.sources.referred import directory_of
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.errors import CheckpointError, CorruptionError, Problem, StateError
from shardopt.sharding.box import whole
from shardopt.state.values import decode_value


class OwnSource(Source):
    """A committed checkpoint.

    Args:
        data: the bytes of its manifest; None where they are yet to be read.
        base_root: the directory that has the checkpoints which this one refers to; None for the one that it is in.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: see `read_manifest`.
    """

    format_name = FORMAT_NAME
    is_foreign = False

    def __init__(
        self, storage: Storage, data: bytes | None = None, base_root: str | os.PathLike[str] | None = None
    ) -> None:
        self.storage, self.url = storage, storage.url
        if data is None:
            self.manifest, data = read_manifest(storage)
        else:
            self.manifest = decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}")
        self._head_bytes = HEAD_BYTES
        self.digest = xxhash.xxh3_64_hexdigest(data)
        self._base_root = None if base_root is None else storage_of(base_root)

    def open_file(self, number: int, keys: Collection[str] | None = None) -> DataFileReader:
        file = self.manifest.files[number]
        directory = self.directory_of(file)
        copy = directory.copy_of(file.name)
        try:
            opened = DataFileReader(directory, file, keys, self._head_bytes)
            self._head_bytes = max(self._head_bytes, opened.header_bytes)  # as ranks mostly write alike
            return opened
        except CheckpointError as error:
            if directory.pass_over(file.name, copy, error):
                return self.open_file(number, keys)
            if not isinstance(error, CorruptionError):
                raise
            with wrap_os_errors(f"read {directory.url}/{file.name}"):
                if file.directory is None or directory.exists(file.name):
                    raise
        remedy = "name the directory that has its directory by base_root=, or restore from another checkpoint"
        problem = Problem(f"{directory.url}/{file.name}", "no such file", f"what {self.url} refers to", remedy)
        raise CorruptionError("a checkpoint lacks what it refers to", [problem])

    def directory_of(self, file: DataFile) -> Storage:
        """Returns the directory that has one of the manifest's files: the checkpoint's own, or one beside it."""
        if file.directory is None:
            return self.storage
        return directory_of(file, self.storage) if self._base_root is None else self._base_root.child(file.directory)

    def per_rank(self, rank: int) -> Mapping[str, Any]:
        name = file_name(self.manifest.save_id, rank, 0)
        number = next((i for i, file in enumerate(self.manifest.files) if file.path == name), None)
        if number is None:
            raise damaged(f"{self.url}/{name}", "no such file in the manifest")
        file = self.open_file(number)
        key = PER_RANK_PREFIX + file_stem(rank, 0)
        nbytes = file.entries[key].end - file.entries[key].begin if key in file.entries else 0
        target = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        box = whole((nbytes,))
        entry = file.entry(key, form_of(DTYPES["uint8"], box))
        fetch([(file, ReadRequest(entry, DTYPES["uint8"], box.sizes, box, target))])
        where = f"{file.where}: {key}"
        try:
            values = load_json(target.numpy().tobytes(), where, without_duplicates)
            return {name: decode_value(value) for name, value in values.items()}
        except (StateError, RecursionError) as error:
            raise damaged(where, "a malformed value") from error
