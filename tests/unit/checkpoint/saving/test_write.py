"""How the bytes of a data file pass: each buffer is written, and then hashed while it is in the core's cache."""

import os
from types import SimpleNamespace

import pytest
import torch
import xxhash

from shardopt import checkpoint
from shardopt.checkpoint.saving.writing import write
from shardopt.checkpoint.storage import FLUSH, LocalStorage


def test_what_was_just_written_is_hashed_before_more_is(tmp_path, monkeypatch):
    """The kernel's copy has it in the cache then; the other way round took 1.1 times as much processor time."""
    written, hashed, ahead = 0, 0, set()
    writev = os.writev

    def writing(fd, buffers):
        nonlocal written
        written += (done := writev(fd, buffers))
        return done

    def digest(memory):
        nonlocal hashed
        ahead.add(written - hashed)
        hashed += memory.nbytes
        return xxhash.xxh3_64_digest(memory)

    monkeypatch.setattr(os, "writev", writing)
    hashes = SimpleNamespace(xxh3_64_digest=digest, xxh3_64_hexdigest=xxhash.xxh3_64_hexdigest)
    monkeypatch.setattr(write, "xxhash", hashes)
    checkpoint.save(tmp_path / "a", {"x": torch.arange(1 << 20)}, durable=False)
    header_bytes = 1 << 14  # at most
    assert hashed == 8 << 20 and min(ahead) > 0 and max(ahead) <= LocalStorage.buffer_bytes + header_bytes
    monkeypatch.undo()
    assert checkpoint.verify(tmp_path / "a").ok


def test_small_tensors_are_written_together(tmp_path, monkeypatch):
    """Between large, strided and empty ones; a place to write from for each would cost more than its bytes."""
    write, places = LocalStorage.write_to, []

    def counting(self, fd, buffers):
        return write(self, fd, (places.append(each.nbytes) or each for each in buffers))

    monkeypatch.setattr(LocalStorage, "write_to", counting)
    tensors = {f"small.{i}": torch.full((i % 7, 50), float(i)) for i in range(1000)}
    tensors |= {f"large.{i}": torch.arange(i, i + 300_000) for i in range(2)}
    tensors["strided"] = torch.arange(12.0).view(3, 4).T
    checkpoint.save(tmp_path / "c", tensors)
    assert len(places) < 20
    loaded = {key: torch.full_like(tensor, -1) for key, tensor in tensors.items()}
    checkpoint.load(tmp_path / "c", loaded)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
    assert checkpoint.verify(tmp_path / "c").ok


@pytest.mark.parametrize("buffer_bytes", [0, 100_000, 5_000_000])
def test_a_storage_says_how_large_buffers_are_and_releases_them(tmp_path, monkeypatch, buffer_bytes):
    """Checksums go by segments, whatever the size of buffers is."""
    write = LocalStorage.write_to

    def releasing(self, fd, buffers):
        total = 0
        for each in buffers:
            total += os.write(fd, each)
            if each is not FLUSH:
                each.release()
        return total

    tensors = {"large": torch.arange(1 << 20), "small": torch.ones(3)}
    monkeypatch.setattr(LocalStorage, "buffer_bytes", buffer_bytes)
    monkeypatch.setattr(LocalStorage, "write_to", releasing)
    checkpoint.save(tmp_path / "a", tensors)
    assert checkpoint.verify(tmp_path / "a").ok
    monkeypatch.setattr(LocalStorage, "write_to", write)
    loaded = {key: torch.zeros_like(each) for key, each in tensors.items()}
    checkpoint.load(tmp_path / "a", loaded)
    assert all(torch.equal(loaded[key], each) for key, each in tensors.items())
