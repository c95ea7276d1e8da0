"""Copies for saves in the background are at the place within a page that they get in their file, once that is known.

So a disk takes them from there: a durable save copies no large tensor again, but for parts of pages at its ends.
"""

import os

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.storage import direct, local, mounts
from tests.harness.ranks import run_ranks

PAGE = 4096


def counted_copies():
    """Has any file system written past the page cache; returns the sizes of what is copied to blocks for that."""
    sizes, copy = [], direct._Request.copy

    def counting(request, source):
        sizes.append(len(source))
        copy(request, source)

    direct._Request.copy = counting
    direct.direct_alignment = lambda fd: mounts.Alignment(512, 512)
    direct.file_system_type = lambda device: "ext4"
    local._DIRECT_BYTES = 1
    return sizes


@pytest.fixture
def copies(monkeypatch):
    for module, names in ((direct, ("direct_alignment", "file_system_type")), (local, ("_DIRECT_BYTES",))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    monkeypatch.setattr(direct._Request, "copy", direct._Request.copy)
    monkeypatch.setattr(direct, "_types", {})
    return counted_copies()


def taken(sizes):
    nbytes = sum(sizes)
    sizes.clear()
    return nbytes


def app_of():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(257, 301), nn.Linear(301, 211).bfloat16(), nn.Embedding(70_001, 3)])
    optimizer = shardopt.keyed("adam", model.named_parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "mine": checkpoint.PerRank("mine")}


@pytest.mark.parametrize("stage", ["now", "lazy"])
@pytest.mark.parametrize("base", [False, True])
def test_from_the_second_save_on_nothing_large_is_copied_again(tmp_path, copies, stage, base):
    app, saver = app_of(), AsyncSaver()
    large = [each for each in checkpoint_tensors(app) if each.nbytes >= 64 << 10]
    small = sum(each.nbytes for each in checkpoint_tensors(app)) - sum(each.nbytes for each in large)
    for number in range(3):
        with torch.no_grad():
            for parameter in app["model"].parameters():
                parameter.add_(1)
        options = SaveTerms(base=str(tmp_path / f"{number - 1}") if base and number else None)
        saver.save(str(tmp_path / f"{number}"), app, options, stage=stage).result()
        copied = taken(copies)
        if number:
            ends = 2 * len(large) + sum(each.nbytes // local.LocalStorage.buffer_bytes for each in large)  # of buffers
            assert copied <= PAGE * ends + small + (1 << 16)  # that of header and checksums too
        assert checkpoint.verify(tmp_path / f"{number}").ok
        with checkpoint.open(tmp_path / f"{number}") as reader:
            assert torch.equal(reader.read("model.2.weight"), app["model"][2].weight)
    saver.close()


def checkpoint_tensors(app):
    state = app["optimizer"].state_dict()["state"]
    moments = [value for of_parameter in state.values() for value in of_parameter.values()]
    return [*app["model"].parameters(), *(each for each in moments if isinstance(each, torch.Tensor))]


def test_other_shapes_get_other_places(tmp_path, copies):
    saver = AsyncSaver()
    for number, width in enumerate((1000, 1000, 777, 777)):
        app = {"a": torch.rand(width, 333), "b": torch.rand(width, 129, dtype=torch.float64), "c": torch.rand(5)}
        saver.save(str(tmp_path / f"{number}"), app).result()
        assert (taken(copies) < 6 * PAGE) == (number in (1, 3))
        with checkpoint.open(tmp_path / f"{number}") as reader:
            assert all(torch.equal(reader.read(key), app[key]) for key in app)
    saver.close()


NARROW = {"first": torch.ones(3, dtype=torch.bfloat16), "weight": torch.randn(512, 512).bfloat16()}
BYTES = {"codes": torch.ones(5, dtype=torch.uint8), "weight": torch.ones(301, 997, dtype=torch.uint8)}


@pytest.mark.parametrize(("before", "after"), [(NARROW, torch.float32), (BYTES, torch.float32), (BYTES, torch.float64)])
@pytest.mark.parametrize("stage", ["now", "lazy"])
def test_another_dtype_at_an_odd_place(tmp_path, copies, before, after, stage):
    """A place of the narrower dtype is none for the wider one: 4102 is no multiple of 4."""
    saver = AsyncSaver()
    for number, app in enumerate((before, {key: each.to(after) for key, each in before.items()}) * 2):
        saver.save(str(tmp_path / f"{number}"), app, stage=stage).result()
        with checkpoint.open(tmp_path / f"{number}") as reader:
            assert all(torch.equal(reader.read(key), app[key]) for key in app)
    saver.close()


def test_files_of_what_has_changed_have_places_too(tmp_path, copies):
    """What does not change comes first in the order of files, so that what does is elsewhere in a file of its own."""
    saver = AsyncSaver()
    app = {"a": torch.randn(1001, 513), "b": torch.randn(777, 333), "c": torch.randn(123, 1001)}
    copied = []
    for number in range(4):
        options = SaveTerms(base=str(tmp_path / f"{number - 1}") if number else None)
        saver.save(str(tmp_path / f"{number}"), app, options).result()
        copied.append(taken(copies))
        with checkpoint.open(tmp_path / f"{number}") as reader:
            assert all(torch.equal(reader.read(key), app[key]) for key in app)
        app["b"] += 1
        app["c"] += 1
    assert max(copied[2:]) < 5 * PAGE
    saver.close()


def test_memory_is_allocated_once(tmp_path, copies):
    """It has room for the places that are known only after the first save."""
    saver = AsyncSaver()
    app = {f"{i}": torch.randn(20_011) for i in range(50)}
    blocks = []
    for number in range(4):
        saver.save(str(tmp_path / f"{number}"), app).result()
        blocks.append(saver._memories[0][0]._plain)
    assert taken(copies) and all(block is blocks[0] for block in blocks)
    saver.close()


def save_shares(folder):
    copies = counted_copies()
    copied = []
    app = {f"{i}": torch.full((5 << 20,), i, dtype=torch.float32) for i in range(2)} | {"few": torch.ones(3)}
    for number in range(2):
        checkpoint.async_save(f"{folder}/{number}", app).result()
        copied.append(taken(copies))
    return copied, checkpoint.verify(f"{folder}/1").ok


def test_boxes_that_several_ranks_hold_have_their_places_too(tmp_path):
    for (_, second), ok in run_ranks(2, save_shares, str(tmp_path)):
        assert ok and second < 6 * PAGE


def test_places_are_kept_for_large_boxes_alone(tmp_path):
    saver = AsyncSaver()
    app = {f"{i}": torch.ones(100) for i in range(500)} | {"large": torch.ones(1 << 16)}
    saver.save(os.fspath(tmp_path / "a"), app).result()
    assert saver._offsets == {}  # too few bytes for the time that it takes
    saver.save(os.fspath(tmp_path / "b"), {"few": torch.ones(5), "large": torch.ones(1 << 16)}).result()
    assert [key for key, _ in saver._offsets] == ["large"]
    saver.close()
