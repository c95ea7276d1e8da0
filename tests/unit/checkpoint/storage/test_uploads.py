"""Uploads of large files to object stores: what is sent from where it is, and what is copied first."""

import obstore
import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.saving.writing import write as writing
from shardopt.checkpoint.storage import open as opening
from shardopt.checkpoint.storage.object_stores import store as object_store
from shardopt.checkpoint.storage.object_stores.store import ObjectStore
from shardopt.checkpoint.storage.remote import PART_BYTES, RemoteStorage

MIB = 1 << 20
SIZES = (100, 3 * MIB, 5, 0, 2 * MIB + 1, MIB, MIB, MIB - 1, 9 * MIB, 700_000, 700_000, 7)


@pytest.fixture
def storage():
    memory = obstore.store.MemoryStore()
    return RemoteStorage(ObjectStore("mem", lambda **options: memory, may_lack_conditions=False), "b/run")


@pytest.fixture
def sent(monkeypatch):
    """Each buffer that uploads were given."""
    given = []
    write = object_store.Upload.write

    def noting(upload, part):
        given.append(part)
        write(upload, part)

    monkeypatch.setattr(object_store.Upload, "write", noting)
    return given


class Buffers:
    """Buffers of random bytes; those of `reuses_memory` overwrite each one as soon as the next is asked for."""

    def __init__(self, reuses_memory=None):
        generator = torch.Generator().manual_seed(0)
        self.contents = [bytes(torch.randint(256, (n,), dtype=torch.uint8, generator=generator).numpy()) for n in SIZES]
        self.nbytes = sum(SIZES)
        self.memories = [bytearray(each) for each in self.contents]
        if reuses_memory is not None:
            self.reuses_memory = reuses_memory

    def __iter__(self):
        for memory, content in zip(self.memories, self.contents, strict=True):
            memory[:] = content
            yield memoryview(memory)
            if getattr(self, "reuses_memory", True):
                memory[:] = bytes(len(memory))


def test_large_buffers_are_sent_from_where_they_are_if_they_stay(storage, sent):
    buffers = Buffers(reuses_memory=False)
    assert storage.write("a", buffers) == sum(SIZES)
    assert storage.read("a") == b"".join(buffers.contents)
    in_place = [each for each in sent if isinstance(each, memoryview)]
    assert sum(each.nbytes for each in in_place) == sum(size for size in SIZES if size >= MIB)
    assert max(each.nbytes for each in in_place) <= PART_BYTES
    assert all(any(each.obj is memory for memory in buffers.memories) for each in in_place)


@pytest.mark.parametrize("reuses_memory", [True, None])
def test_buffers_that_may_be_used_again_are_copied_first(reuses_memory, storage, sent):
    buffers = Buffers(reuses_memory)
    assert storage.write("a", buffers) == sum(SIZES)
    assert storage.read("a") == b"".join(buffers.contents)
    assert sent and not any(isinstance(each, memoryview) for each in sent)


def test_a_save_copies_none_of_its_large_tensors(storage, sent, monkeypatch):
    monkeypatch.setitem(opening._own, "mem", lambda url: storage)
    app = {"large": torch.randn(3 * MIB), "columns": torch.randn(2, 2 * MIB).t(), "small": torch.ones(3)}
    checkpoint.save("mem://b/run", app)
    assert sum(each.nbytes for each in sent if isinstance(each, memoryview)) == 4 * (3 + 2 * 2) * MIB
    loaded = {key: torch.zeros_like(value) for key, value in app.items()}
    checkpoint.load("mem://b/run", loaded)
    assert all(torch.equal(loaded[key], value) for key, value in app.items())


def test_what_is_streamed_from_an_accelerator_is_copied(monkeypatch):
    """Its buffers on the host are filled again while what they had is on its way."""
    requests = [torch.ones(3), torch.ones(3, device="meta")]
    for given, reuses in ((requests[:1], False), (requests, True)):
        file = writing._File.__new__(writing._File)
        file._requests, file._tensor_of = given, lambda tensor: tensor
        assert file.reuses_memory is reuses
