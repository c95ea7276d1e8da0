"""Checkpoints of our own format as a source."""

from __future__ import annotations

from collections.abc import Mapping
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
from shardopt.checkpoint.format.manifest import decode_manifest
from shardopt.checkpoint.reading.data_file_reader import DataFileReader
from shardopt.checkpoint.reading.fetch import fetch
from shardopt.checkpoint.reading.open_file import ReadRequest, form_of
from shardopt.checkpoint.sources.read_manifest import read_manifest
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage
from shardopt.errors import StateError
from shardopt.sharding.box import whole
from shardopt.values import decode_value


class OwnSource(Source):
    """A committed checkpoint.

    Args:
        data: the bytes of its manifest; None where they are yet to be read.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: see `read_manifest`.
    """

    format_name = FORMAT_NAME
    is_foreign = False

    def __init__(self, storage: Storage, data: bytes | None = None) -> None:
        super().__init__(storage)
        if data is None:
            self.manifest, data = read_manifest(storage)
        else:
            self.manifest = decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}")
        self.digest = xxhash.xxh3_64_hexdigest(data)

    def open_file(self, number: int) -> DataFileReader:
        return DataFileReader(self.storage, self.manifest.files[number])

    def per_rank(self, rank: int) -> Mapping[str, Any]:
        name = file_name(self.manifest.save_id, rank, 0)
        number = next((i for i, file in enumerate(self.manifest.files) if file.name == name), None)
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
