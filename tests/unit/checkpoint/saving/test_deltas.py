"""Saves that write changed elements: one process; the codec is in format/test_delta.py, damage in tests/hostile."""

import random
import shutil

import numpy as np
import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import DTYPES, SEGMENT_BYTES
from shardopt.checkpoint.format.delta import Delta
from shardopt.checkpoint.format.tensor_bytes import torch_dtype
from shardopt.checkpoint.saving.writing import unchanged
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.sources.reading import with_deltas
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import FormatError

BYTES = 200_000  # of a box: enough for a few deltas


def save(root, step, app, base=None, **options):
    base = None if base is None else f"{root}/{base}"
    return checkpoint.save(f"{root}/{step}", app, base=base, durable=False, **options)


def manifest_of(root, step):
    return read_manifest(storage_of(f"{root}/{step}"))[0]


def deltas_of(root, step, key):
    """How many deltas are on each box of a tensor."""
    layout = manifest_of(root, step).tensors[key].layout
    return [len(layout.entry(number).deltas) for number in range(len(layout.boxes))]


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def change(tensor, rate, pick=None, noise=1):
    """Flips bits in some bytes, at least one."""
    assert tensor.is_contiguous()
    view, pick = tensor.reshape(-1).view(torch.uint8), pick or random.Random(0)
    count = max(1, int(rate * view.numel()))
    places = torch.from_numpy(np.random.default_rng(pick.randrange(2**30)).integers(0, view.numel(), count))
    view[places] ^= noise


def is_as_saved(path, app):
    checkpoint.verify(path).raise_if_damaged()
    target = {name: torch.zeros_like(each, memory_format=torch.contiguous_format) for name, each in app.items()}
    checkpoint.load(path, target)
    for name, value in app.items():
        assert same(target[name], value), name
    return True


def filled(dtype, shape, seed=0):
    """Any bits that the dtype can have: NaNs with payloads and negative zeros among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count, np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_comes_back_bit_for_bit(tmp_path, name):
    dtype = torch_dtype(DTYPES[name])
    app = {"x": filled(dtype, (BYTES // dtype.itemsize,))}
    save(tmp_path, 0, app)
    for step in (1, 2):
        change(app["x"], 0.001, random.Random(step))
        report = save(tmp_path, step, app, base=step - 1)
        assert deltas_of(tmp_path, step, "x") == [step]
        assert report.bytes_total < 20_000
        assert is_as_saved(tmp_path / str(step), app)


def test_negative_zeros_and_nans_are_changes(tmp_path):
    x = torch.zeros(BYTES // 4)
    save(tmp_path, 0, {"x": x})
    x[::1000] = -0.0
    x[1::1000] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    save(tmp_path, 1, {"x": x}, base=0)
    x[1::1000] = torch.tensor(0x7FC00002, dtype=torch.int32).view(torch.float32)
    save(tmp_path, 2, {"x": x}, base=1)
    assert deltas_of(tmp_path, 2, "x") == [2]
    assert is_as_saved(tmp_path / "2", {"x": x})


def test_many_boxes_beside_one_another_are_read_at_once(tmp_path):
    """Boxes of less than 64 KiB are read many at a time: one span has the bytes of several."""
    app = {f"p{i:02}": filled(torch.int16, (30_000,), i) for i in range(20)}
    app |= {f"q{i}": filled(torch.int16, (50_000,), i) for i in range(3)}
    save(tmp_path, 0, app)
    for each in app.values():
        change(each, 0.0005)
    save(tmp_path, 1, app, base=0)
    assert all(deltas_of(tmp_path, 1, key) == [1] for key in app)
    assert is_as_saved(tmp_path / "1", app)
    with checkpoint.open(tmp_path / "1") as reader:
        for key in reversed(app):
            assert same(reader.read(key), app[key])
    some = {key: torch.zeros_like(app[key]) for key in ("p03", "p04", "p11", "q1")}
    checkpoint.load(tmp_path / "1", some, strict=False)
    assert all(same(some[key], app[key]) for key in some)


def test_small_boxes_are_written_whole(tmp_path):
    """Of thousands a restore would take longer for deltas than for the bytes."""
    app = {f"p{i}": torch.zeros(16_000, dtype=torch.int16) for i in range(3)} | {"s": torch.zeros(())}
    save(tmp_path, 0, app)
    for each in app.values():
        each.reshape(-1)[:1] += 1
    save(tmp_path, 1, app, base=0)
    assert all(deltas_of(tmp_path, 1, key) == [0] for key in app)
    assert is_as_saved(tmp_path / "1", app)


def test_a_chain_ends_at_64_deltas(tmp_path):
    x = torch.zeros(300_000, dtype=torch.float64)
    save(tmp_path, 0, {"x": x})
    for step in range(1, 67):
        x[(step * 7919) % len(x)] += 1
        save(tmp_path, step, {"x": x}, base=step - 1)
    assert deltas_of(tmp_path, 64, "x") == [64]
    assert max(deltas_of(tmp_path, 65, "x")) <= 64  # rows, and what is left of the chain
    for step in (64, 65, 66):
        assert is_as_saved(tmp_path / str(step), {"x": x}) if step == 66 else checkpoint.verify(tmp_path / str(step)).ok


def test_a_chain_ends_where_its_deltas_have_the_bytes_of_the_box(tmp_path):
    x = torch.zeros(1 << 20, dtype=torch.int16)
    save(tmp_path, 0, {"x": x})
    written, lengths = [], []
    for step in range(1, 14):
        x[torch.from_numpy(np.random.default_rng(step).integers(0, len(x), len(x) // 10))] += 1
        written.append(save(tmp_path, step, {"x": x}, base=step - 1).bytes_total)
        lengths += deltas_of(tmp_path, step, "x")
    assert max(lengths) in (5, 6) and lengths.count(0) >= 1
    begin = lengths.index(0)
    assert sum(written[:begin]) < x.nbytes <= written[begin]
    assert is_as_saved(tmp_path / "13", {"x": x})


def test_memory_that_is_not_contiguous_and_targets_that_are_not(tmp_path):
    whole = filled(torch.int32, (300, 500))
    app = {"columns": whole[:, ::2], "turned": whole.T}
    save(tmp_path, 0, app)
    for row in range(0, 300, 17):
        whole[row, (row * 31) % 500] ^= 5
        whole[row, (row * 31) % 500 - 1] ^= 5
    save(tmp_path, 1, app, base=0)
    assert deltas_of(tmp_path, 1, "columns") == deltas_of(tmp_path, 1, "turned") == [1]
    assert is_as_saved(tmp_path / "1", app)
    target = {"columns": torch.zeros(250, 300, dtype=torch.int32).T, "turned": torch.zeros(300, 500).int().T}
    checkpoint.load(tmp_path / "1", target)
    assert all(same(target[key], app[key]) for key in app)


def test_other_dtypes_boxes_and_columns_are_read(tmp_path):
    x = torch.arange(400 * 301, dtype=torch.float32).reshape(400, 301)
    save(tmp_path, 0, {"x": x})
    x.reshape(-1)[::199] += 0.5
    save(tmp_path, 1, {"x": x}, base=0)
    assert deltas_of(tmp_path, 1, "x") == [1]
    for dtype in (torch.float64, torch.bfloat16):
        target = {"x": torch.zeros(400, 301, dtype=dtype)}
        checkpoint.load(tmp_path / "1", target, strict=checkpoint.Strictness(dtype="cast"))
        assert torch.equal(target["x"], x.to(dtype))
    with checkpoint.open(tmp_path / "1") as reader:
        pick = random.Random(1)
        for _ in range(30):
            (a, b), (c, d) = (sorted(pick.sample(range(size + 1), 2)) for size in x.shape)
            assert torch.equal(reader.read("x", checkpoint.Box((a, c), (b - a, d - c))), x[a:b, c:d])


def test_a_large_box_is_read_in_windows_each_once(tmp_path, monkeypatch):
    """Its deltas are read as its bytes are, by several threads."""
    monkeypatch.setattr(with_deltas, "_WINDOW_BYTES", 1 << 10)  # so that a window is of 16 segments
    made = []
    monkeypatch.setattr(with_deltas, "Delta", lambda *args: made.append(args[2]) or Delta(*args))
    x = torch.zeros(66 * SEGMENT_BYTES + 1000, dtype=torch.uint8).reshape(-1, 8)
    save(tmp_path, 0, {"x": x})
    for step in (1, 2):
        x.reshape(-1)[step :: 9973 * step] += 1
        save(tmp_path, step, {"x": x}, base=step - 1)
    assert deltas_of(tmp_path, 2, "x") == [2]
    made.clear()
    target = {"x": torch.zeros_like(x)}
    checkpoint.load(tmp_path / "2", target)
    assert torch.equal(target["x"], x)
    assert (
        sorted(made) == [2 * SEGMENT_BYTES + 1000] * 2 + [16 * SEGMENT_BYTES] * 8
    )  # nothing thrown away and read again
    assert is_as_saved(tmp_path / "2", {"x": x})
    begin = 64 * SEGMENT_BYTES // 8 - 5
    with checkpoint.open(tmp_path / "2") as reader:
        assert torch.equal(reader.read("x", checkpoint.Box((begin, 3), (10, 4))), x[begin : begin + 10, 3:7])


def test_rows_are_taken_from_a_box_with_deltas(tmp_path):
    """Of a box with deltas, a save may refer to some rows, and one with other boxes to what overlaps."""
    x = torch.zeros(8 * 256, 256, dtype=torch.int32)
    save(tmp_path, 0, {"x": x})
    x.reshape(-1)[::999] += 1
    save(tmp_path, 1, {"x": x}, base=0)
    x[256:512] += 7
    report = save(tmp_path, 2, {"x": x}, base=1)
    assert report.bytes_unchanged == 7 * SEGMENT_BYTES and deltas_of(tmp_path, 2, "x") == [1, 0, 1]
    assert is_as_saved(tmp_path / "2", {"x": x})
    longer = torch.cat([x, torch.ones(256, 256, dtype=torch.int32)])
    assert save(tmp_path, 3, {"x": longer}, base=1).bytes_unchanged == 7 * SEGMENT_BYTES
    assert is_as_saved(tmp_path / "3", {"x": longer})


def test_names_ties_and_selections(tmp_path):
    x, y = filled(torch.int16, (60_000,)), filled(torch.int16, (60_000,), 1)
    save(tmp_path, 0, {"x": x, "tied": x, "y": y})
    change(x, 0.001)
    change(y, 0.001)
    save(tmp_path, 1, {"x": x, "tied": x, "y": y}, base=0)
    assert deltas_of(tmp_path, 1, "x") == [1] and is_as_saved(tmp_path / "1", {"x": x, "tied": x, "y": y})
    change(x, 0.001, noise=2)
    save(tmp_path, 2, {"x": x.clone(), "tied": x, "y": y}, base=1)  # no longer tied
    assert deltas_of(tmp_path, 2, "x") == [2] and is_as_saved(tmp_path / "2", {"x": x, "tied": x, "y": y})
    save(tmp_path, 3, {"x": x, "y": y}, base=2, select="^y")
    assert is_as_saved(tmp_path / "3", {"y": y})
    save(tmp_path, 4, {"renamed": y, "x": y}, base=3)
    assert deltas_of(tmp_path, 4, "x") == [0] and is_as_saved(tmp_path / "4", {"renamed": y, "x": y})


def test_a_base_on_a_remote_store_is_not_read_for_deltas(tmp_path):
    root = f"memory://shardopt-deltas/{tmp_path.name}"
    app = {"x": filled(torch.int16, (60_000,))}
    save(root, 0, app)
    change(app["x"], 0.001)
    save(root, 1, app, base=0)
    assert deltas_of(root, 1, "x") == [0]
    assert is_as_saved(f"{root}/1", app)


def test_a_mirror_has_the_files_with_deltas(tmp_path):
    local, there = tmp_path / "local", f"memory://shardopt-deltas/{tmp_path.name}"
    app = {"x": filled(torch.int16, (120_000,))}
    destinations = [checkpoint.Mirror(there)]
    with checkpoint.Manager(local, keep=1, incremental=True, destinations=destinations) as manager:
        for step in range(1, 5):
            change(app["x"], 0.001, noise=step)
            manager.save(step, app)
    name = "step-00000004"
    assert deltas_of(local, name, "x") == [3]
    shutil.rmtree(local)
    assert is_as_saved(f"{there}/{name}", app)
    with checkpoint.Manager(local, keep=1, incremental=True, destinations=destinations) as manager:
        target = {"x": torch.zeros_like(app["x"])}
        assert manager.restore(target) == 4 and same(target["x"], app["x"])
        change(app["x"], 0.001, noise=9)
        manager.save(5, app)
        assert is_as_saved(manager.path(5), app)


def test_a_reader_of_version_4_is_told(tmp_path, monkeypatch):
    app = {"x": filled(torch.int16, (60_000,))}
    save(tmp_path, 0, app)
    change(app["x"], 0.001)
    save(tmp_path, 1, app, base=0)
    monkeypatch.setattr("shardopt.checkpoint.format.decoding.FORMAT_VERSION", 4)
    checkpoint.open(tmp_path / "0").close()
    with pytest.raises(FormatError, match=r"found version 5, written by shardopt .*; required at most 4"):
        checkpoint.open(tmp_path / "1")


def test_memory_that_changes_during_a_save_in_the_background_is_what_it_was(tmp_path):
    """What a save compares and writes is its copy, which steps of the program do not reach."""
    x = torch.nn.Parameter(torch.zeros(1 << 20))
    optimizer = torch.optim.SGD([x], lr=1.0)
    pending = checkpoint.async_save(tmp_path / "0", {"x": x}, durable=False)
    saved = []
    for step in range(1, 6):
        pending.result()
        saved.append(x.detach().clone())
        pending = checkpoint.async_save(f"{tmp_path}/{step}", {"x": x}, base=f"{tmp_path}/{step - 1}", durable=False)
        x.grad = torch.zeros_like(x)
        x.grad[step::1000] = 1.0
        optimizer.step()
    pending.result()
    for step, value in enumerate(saved, 1):
        assert is_as_saved(tmp_path / str(step), {"x": value})
    assert deltas_of(tmp_path, 5, "x") == [4]  # step 1 changed nothing


def test_boxes_are_compared_in_threads_where_there_are_many_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(unchanged, "_THREADS", 3)
    app = {f"x{i}": torch.randn(300, 400) for i in range(7)}
    checkpoint.save(tmp_path / "a", app, durable=False)
    for tensor in app.values():
        tensor[7, 5:9] += 1
    checkpoint.save(tmp_path / "b", app, base=tmp_path / "a", durable=False)
    with checkpoint.open(tmp_path / "b") as reader:
        assert all(torch.equal(reader.read(key), tensor) for key, tensor in app.items())
    assert all(deltas_of(tmp_path, "b", key) == [1] for key in app)
