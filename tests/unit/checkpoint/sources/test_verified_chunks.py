"""Chunks of a data file: small tensors are read together, and no damage is handed on, wherever it is."""

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.hosts.directory import HostDirectory
from shardopt.checkpoint.hosts.share import Share
from shardopt.checkpoint.sources.reading.open_file import DataFileReader
from shardopt.checkpoint.sources.reading.verified_chunks import VerifiedChunks, verify
from shardopt.errors import CorruptionError

SIZES = {"a": 7, "b": 0, "c": 3 << 20, "d": 65536, "e": 65537, "f": 1}  # fp32; the third is of several chunks


@pytest.fixture(scope="module")
def share(tmp_path_factory):
    path = tmp_path_factory.mktemp("host")
    values = {key: torch.arange(float(size)) for key, size in SIZES.items()}
    checkpoint.save(f"hosts://{path}/run/step-1", values)
    return Share(HostDirectory(str(path / "run")), "step-1", True)


def opened(share):
    (file,) = decode_manifest(share.record(), share.url).files
    return DataFileReader(share, file)


def test_they_are_the_file_in_few_pieces(share):
    file = opened(share)
    chunks = [bytes(chunk) for chunk in VerifiedChunks(file)]
    with open(f"{share.url}/{file.name}", "rb") as written:
        assert b"".join(chunks) == written.read()
    assert len(chunks) == 5  # header, what is before the large one, most of it, its end with what follows, checksums
    verify(file)


@pytest.mark.parametrize("key", [key for key, size in SIZES.items() if size])
@pytest.mark.parametrize("end", ["first", "last"])
def test_damage_is_found_in_each_tensor(share, key, end):
    file = opened(share)
    entry = file.entries[key]
    at = entry.begin if end == "first" else entry.end - 1
    with open(f"{share.url}/{file.name}", "r+b") as damaged:
        damaged.seek(at)
        byte = damaged.read(1)
        damaged.seek(at)
        damaged.write(bytes([byte[0] ^ 1]))
    try:
        with pytest.raises(CorruptionError, match=f"of '{key}' with bytes that fail"):
            verify(file)
        handed_on = 0
        with pytest.raises(CorruptionError, match=f"of '{key}' with bytes that fail"):
            for chunk in VerifiedChunks(file):
                handed_on += chunk.nbytes
        assert handed_on <= at
    finally:
        with open(f"{share.url}/{file.name}", "r+b") as mended:
            mended.seek(at)
            mended.write(byte)
    verify(file)
