"""Reading: any part of anything stored, into any memory, each byte checked, and few bytes more than are wanted."""

import importlib
import random
import time
import tracemalloc
from functools import partial
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardopt import checkpoint
from shardopt.checkpoint.format.assign import Member
from shardopt.checkpoint.format.constants import DTYPES, SEGMENT_BYTES
from shardopt.checkpoint.saving.commit import make_manifest, publish_checkpoint
from shardopt.checkpoint.saving.planning.describe import Geometry
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan
from shardopt.checkpoint.saving.writing.write import memory_of, write_files
from shardopt.checkpoint.sources import reader as reader_module
from shardopt.checkpoint.sources.reading import checking as checking_module
from shardopt.checkpoint.sources.reading import read_plan as plan_module
from shardopt.checkpoint.sources.reading.checking import ReadSizes, pieces_in_order
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.checkpoint.storage import LocalStorage, storage_of
from shardopt.errors import CheckpointError, CorruptionError, LayoutError, MismatchError
from shardopt.sharding.box import Box, whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import Piece, View
from tests.support.boxes import partitions
from tests.support.drawn import examples
from tests.support.fake_rank import fake_rank, shard, sharded_tensor

TYPES = ["float32", "bfloat16", "int64", "bool", "complex128", "float8_e5m2", "float8_e8m0fnu", "uint16", "complex64"]


def numbers(shape, dtype, seed=0):
    """A tensor of random bytes, so that nothing is equal to its neighbour."""
    itemsize = DTYPES[dtype].itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (prod(shape) * itemsize,), generator=generator)
    return raw.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )


def at(box):
    return tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))


def store(path, tensors, boxes, ranks=1):
    """Stores tensors in these boxes, dealt out to ranks: a save by ranks that are not there."""
    layouts = {
        key: Layout.from_holders(tuple(tensors[key].shape), {box: [i % ranks] for i, box in enumerate(boxes[key])})
        for key in tensors
    }
    members = {
        key: Member((key,), DTYPES[str(t.dtype).removeprefix("torch.")], layouts[key], tuple(range(ranks)))
        for key, t in tensors.items()
    }
    plan, storage, reports = SavePlan(Geometry(members, {}), ranks), storage_of(path), []
    storage.make()
    for rank in range(ranks):
        views = {
            key: View(
                tuple(t.shape),
                t.dtype,
                tuple(
                    Piece(box, t[at(box)])
                    for box, by in zip(layouts[key].boxes, layouts[key].holders, strict=True)
                    if rank in by
                ),
                layouts[key],
            )
            for key, t in tensors.items()
        }
        files = write_files(storage, "0a", RankWrites(plan, rank, views), partial(memory_of, views=views), None)
        reports.append([[file.name, file.nbytes, file.digest] for file in files])
    publish_checkpoint(storage, *make_manifest("0a", plan, {}, reports))
    return path


MEMORIES = ["contiguous", "turned", "strided", "offset"]


def destination(sizes, dtype, memory):
    """Memory of that kind for a box, and the tensor over all of it, to see that nothing else is touched."""
    dtype = str(dtype).removeprefix("torch.")
    if memory == "turned" and len(sizes) > 1:
        base = numbers(tuple(reversed(sizes)), dtype, 7)
        return base.permute(*reversed(range(len(sizes)))), base
    if memory == "strided" and sizes:
        base = numbers((*sizes[:-1], 2 * sizes[-1] + 1), dtype, 7)
        return base[..., : 2 * sizes[-1] : 2], base
    base = numbers((prod(sizes) + 3,), dtype, 7)
    return base[1 : 1 + prod(sizes)].view(sizes), base


@st.composite
def wanted_boxes(draw, shape):
    sizes = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(tuple(draw(st.integers(0, size - n)) for size, n in zip(shape, sizes, strict=True)), sizes)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    segment=st.sampled_from([16, 64, SEGMENT_BYTES]),
    segments=st.tuples(st.sampled_from([1, 4, 32]), st.sampled_from([1, 4, 32]), st.sampled_from([1, 3, 32])),
)
def test_any_part_into_any_memory(tmp_path_factory, data, segment, segments):
    """Against slices of the whole. Segments and batches of a few bytes, so that all their borders are met."""
    patch = pytest.MonkeyPatch()
    # All that take the length of segments.
    names = ("format.constants", "sources.reading.open_file", "sources.reading.read_plan", "saving.writing.write")
    for there in [importlib.import_module(f"shardopt.checkpoint.{name}") for name in names]:
        patch.setattr(there, "SEGMENT_BYTES", segment)
    patch.setattr(plan_module, "_SMALL_READ_BYTES", min(segment, plan_module._SMALL_READ_BYTES))
    patch.setattr(checking_module, "_DISK_SIZES", ReadSizes(*[segment * count for count in segments]))
    try:
        tensors, boxes = {}, {}
        for key in data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)):
            shape, parts = data.draw(partitions())
            tensors[key] = numbers(shape, data.draw(st.sampled_from(TYPES)), ord(key))
            boxes[key] = parts
        path = store(tmp_path_factory.mktemp("read") / "c", tensors, boxes, data.draw(st.integers(1, 3)))
        with checkpoint.open(path) as reader:
            requests, expected = [], []
            for key in data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=4)):
                tensor = tensors[key]
                box = data.draw(wanted_boxes(tensor.shape))
                memory = data.draw(st.sampled_from(MEMORIES))
                target, base = destination(box.sizes, tensor.dtype, memory)
                requests += reader.requests([(key, [Piece(box, target)])])
                shown, expected_base = destination(box.sizes, tensor.dtype, memory)
                shown.copy_(tensor[at(box)])
                expected.append((base, expected_base))
            fetch(requests)
            assert all(same(base, expected_base) for base, expected_base in expected)  # and nothing beside it changed
            for key, tensor in tensors.items():
                assert same(reader.read(key), tensor)
    finally:
        patch.undo()


def test_pieces_follow_one_another():
    """Pieces in which reshard and the comparison of tied tensors walk through a box."""
    sizes = (3, 5, 1 << 19)
    for box in (Box((1, 2, 3), sizes), Box((0, 0, 0), (0, 5, 3)), Box((), ()), whole((1 << 22,))):
        parts = list(pieces_in_order(box, 8))
        assert sum(part.numel for part in parts) == box.numel
        assert all(part.numel * 8 <= 8 << 20 and box.contains(part) for part in parts)
        assert all(one.offsets < other.offsets for one, other in pairwise(parts))


# Bytes read.


ROWS, COLUMNS = 4096, 1024  # 16 MiB of float32
FIRST = 3072


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    value = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    parts = [Box((0, 0), (FIRST, COLUMNS)), Box((FIRST, 0), (ROWS - FIRST, COLUMNS))]  # the first is of 12 MiB
    return store(tmp_path_factory.mktemp("big") / "c", {"x": value}, {"x": parts}, 2), value


@pytest.mark.parametrize(("first", "rows"), [(0, ROWS), (17, 3000), (1000, 2000), (3072, 1), (17, 4000), (4095, 1)])
def test_rows_cost_their_own_bytes_and_the_ends_of_segments(big, first, rows):
    path, value = big
    target = torch.zeros(rows, COLUMNS)
    with checkpoint.open(path) as reader:
        nbytes = fetch(reader.requests([("x", [Piece(Box((first, 0), (rows, COLUMNS)), target)])]))
    assert torch.equal(target, value[first : first + rows])
    expected = 0
    for start, end in ((0, FIRST), (FIRST, ROWS)):
        begin, stop = ((min(max(row, start), end) - start) * COLUMNS * 4 for row in (first, first + rows))
        if stop > begin:
            upward = -(-stop // SEGMENT_BYTES) * SEGMENT_BYTES
            expected += min(upward, (end - start) * COLUMNS * 4) - begin // SEGMENT_BYTES * SEGMENT_BYTES
    assert nbytes == expected <= target.nbytes + 4 * SEGMENT_BYTES


def test_columns_take_bounded_memory(big):
    """A tensor's worth of bytes is read, but never held: 64 MiB are allowed for tensors of any size."""
    path, value = big
    target = torch.zeros(ROWS, 8)
    with checkpoint.open(path) as reader:
        requests = reader.requests([("x", [Piece(Box((0, 100), (ROWS, 8)), target)])])
        fetch(requests)  # warm
        tracemalloc.start()
        nbytes = fetch(requests * 8)  # as if it were 128 MiB
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert torch.equal(target, value[:, 100:108])
    assert nbytes == 8 * ROWS * COLUMNS * 4
    assert peak <= 64 << 20


def test_columns_of_many_tensors_take_bounded_memory(tmp_path, monkeypatch):
    """Of just under the size of a batch each, which two of them make too large; on a slow disk, so that all wait."""
    read_into = LocalStorage._read_into
    monkeypatch.setattr(LocalStorage, "_read_into", lambda *args: [time.sleep(0.05), read_into(*args)])
    value = numbers((1900, 1024), "float32")
    keys = [f"t{i}" for i in range(16)]
    path = store(tmp_path / "c", dict.fromkeys(keys, value), {key: [whole((1900, 1024))] for key in keys})
    targets = {key: torch.zeros(1900, 4) for key in keys}
    with checkpoint.open(path) as reader:
        requests = reader.requests([(key, [Piece(Box((0, 9), (1900, 4)), targets[key])]) for key in keys])
        tracemalloc.start()
        fetch(requests)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert all(same(target, value[:, 9:13]) for target in targets.values())
    assert peak <= 64 << 20


def test_rows_wider_than_the_scratch_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(checking_module, "_DISK_SIZES", ReadSizes(2 * SEGMENT_BYTES, 2 * SEGMENT_BYTES, SEGMENT_BYTES))
    value = numbers((3, 4, SEGMENT_BYTES), "float32")
    path = store(tmp_path / "c", {"x": value}, {"x": [whole((3, 4, SEGMENT_BYTES))]})
    target = torch.zeros(2, 2, 100)
    with checkpoint.open(path) as reader:
        nbytes = fetch(reader.requests([("x", [Piece(Box((1, 1, 7), (2, 2, 100)), target)])]))
    assert same(target, value[1:3, 1:3, 7:107])
    assert nbytes <= 4 * 2 * SEGMENT_BYTES


# Damage.


def damage_everywhere(path, wanted, count, seed=0):
    """Flips one byte after the other at random places of all files; gives the errors of loading `wanted`."""
    pick = random.Random(seed)
    files = sorted(path.glob("*.safetensors"))
    for _ in range(count):
        file = pick.choice(files)
        data = file.read_bytes()
        at = pick.randrange(len(data))
        file.write_bytes(data[:at] + bytes([data[at] ^ pick.randrange(1, 256)]) + data[at + 1 :])
        try:
            checkpoint.load(path, {key: torch.zeros_like(value) for key, value in wanted.items()})
        except CorruptionError as error:
            yield file, at, data, error
        else:
            yield file, at, data, None
        file.write_bytes(data)


def test_each_flipped_byte_is_found_and_named(tmp_path):
    tensors = {
        "big": numbers((300, 1000), "float32"),
        "small": numbers((7,), "int64"),
        "turned": numbers((100, 9), "bool"),
    }
    boxes = {"big": [Box((0, 0), (111, 1000)), Box((111, 0), (189, 1000))]}
    boxes |= {key: [whole(tuple(tensors[key].shape))] for key in ("small", "turned")}
    path = store(tmp_path / "c", tensors, boxes, 2)
    with checkpoint.open(path) as reader:
        entries = {path / reader.source.open_file(i).file.name: reader.source.open_file(i).entries for i in range(2)}
    named = 0
    for file, at, data, error in damage_everywhere(path, tensors, 60):
        assert error is not None, (file, at)
        entry = next((each for each in entries[file].values() if each.begin <= at < each.end), None)
        (problem,) = error.problems
        assert problem.key == str(file)
        if entry is not None and not entry.key.startswith("__xxh3__"):
            assert f"segment {(at - entry.begin) // SEGMENT_BYTES} of {entry.key!r}" in problem.found
            named += 1
        else:
            assert at < 4096 or "header" in problem.found, (at, len(data))
    assert named > 40


def test_damage_of_a_small_box_among_its_neighbours_is_named(tmp_path):
    """Neighbours in the file are verified at once: also behind a gap, and with one that is read twice."""
    tensors = {f"x{i:02}": numbers((i % 5, 3), "float32", i) for i in range(40)}
    path = store(tmp_path / "c", tensors, {key: [whole(tuple(each.shape))] for key, each in tensors.items()})
    (file,) = path.glob("*.safetensors")
    keys = [*sorted(tensors.keys() - {"x12", "x33"}), "x02"]
    with checkpoint.open(path) as reader:
        entries = reader.source.open_file(0).entries
    for damaged in (None, "x01", "x14", "x39", "x12"):
        sound, targets = file.read_bytes(), [torch.zeros_like(tensors[key]) for key in keys]
        data = bytearray(sound)
        if damaged is not None:
            data[entries[damaged].begin + 5] ^= 1
        file.write_bytes(data)
        with checkpoint.open(path) as reader:
            reads = reader.requests(
                [(key, [Piece(whole(tuple(each.shape)), each)]) for key, each in zip(keys, targets, strict=True)]
            )
            if damaged in keys:
                with pytest.raises(CorruptionError, match=f"segment 0 of '{damaged}'"):
                    fetch(reads)
            else:
                fetch(reads)
                assert all(same(each, tensors[key]) for key, each in zip(keys, targets, strict=True))
        file.write_bytes(sound)


def test_only_what_is_read_is_checked(tmp_path):
    value = numbers((2000, 200), "float32")
    path = store(tmp_path / "c", {"x": value, "y": value}, {"x": [whole((2000, 200))], "y": [whole((2000, 200))]})
    (file,) = path.glob("*.safetensors")
    with checkpoint.open(path) as reader:
        begin = reader.source.open_file(0).entries["x"].begin
    data = bytearray(file.read_bytes())
    data[begin + 3 * SEGMENT_BYTES] ^= 1
    file.write_bytes(data)
    with checkpoint.open(path) as reader:
        assert same(reader.read("y"), value)
        assert same(reader.read("x", Box((0, 0), (900, 200))), value[:900])
        with pytest.raises(CorruptionError, match="segment 3 of 'x'"):
            reader.read("x", Box((1000, 0), (1000, 200)))
        with pytest.raises(CorruptionError, match="segment 3 of 'x'"):
            reader.read("x", Box((0, 5), (2000, 1)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file, other: file.unlink(), "no such file"),
        (lambda file, other: file.write_bytes(file.read_bytes()[:-1]), "bytes where"),
        (lambda file, other: file.write_bytes(b""), "0 bytes where"),
        (lambda file, other: file.write_bytes(file.read_bytes() + b"\0"), "bytes where"),
        (lambda file, other: file.write_bytes(other.read_bytes()), "header or checksums"),
        (lambda file, other: (file.unlink(), file.mkdir()), "no such file"),
    ],
    ids=["gone", "shorter", "empty", "longer", "of another save", "a directory"],
)
def test_a_file_that_is_not_the_one_that_was_written_is_named(tmp_path, damage, said):
    """And nothing has been changed: all files that are needed are opened first."""
    for name, seed in (("c", 0), ("d", 1)):
        boxes = {"x": [Box((0,), (500,)), Box((500,), (500,))]}
        store(tmp_path / name, {"x": numbers((1000,), "int64", seed)}, boxes, 2)
    file = tmp_path / "c" / "0a-r00001.safetensors"
    damage(file, tmp_path / "d" / file.name)
    app = {"x": torch.zeros(1000, dtype=torch.int64)}
    with pytest.raises(CorruptionError) as caught:
        checkpoint.load(tmp_path / "c", app)
    (problem,) = caught.value.problems
    assert problem.key == str(file) and said in problem.found
    assert not app["x"].any()


def test_a_file_that_goes_while_it_is_read_is_named(tmp_path):
    path = store(tmp_path / "c", {"x": numbers((9,), "int64")}, {"x": [whole((9,))]})
    with checkpoint.open(path) as reader:
        requests = reader.requests([("x", [Piece(whole((9,)), torch.zeros(9, dtype=torch.int64))])])
        (file,) = path.glob("*.safetensors")
        file.rename(path / "elsewhere")
        with pytest.raises(CorruptionError, match=r"0a-r00000\.safetensors: found no such file"):
            fetch(requests)
        file.mkdir()
        with pytest.raises(CheckpointError, match="cannot read"):
            fetch(requests)


def test_what_a_rank_has_for_itself_may_be_hostile(tmp_path):
    """Its text is JSON that only its own checksums vouch for."""
    app = {"mine": checkpoint.PerRank({"a": (1, b"x")}), "x": torch.ones(2)}
    checkpoint.save(tmp_path / "sound", app)
    with checkpoint.open(tmp_path / "sound") as reader:
        assert reader.per_rank(0) == {"mine": {"a": (1, b"x")}}
        with pytest.raises(CorruptionError, match="no such file in the manifest"):
            reader.per_rank(1)
    hostile = [
        b"",
        b"[]",
        b"{",
        b'{"mine":',
        b'{"a":1,"a":1}',
        b'{"mine":{"int":"x"}}',
        b"\xff",
        b'{"a":' + b"[" * 9000,
    ]
    for number, text in enumerate(hostile):
        path = tmp_path / str(number)
        storage = storage_of(path)
        storage.make()
        plan = SavePlan(Geometry({}, {"mine": ("mine",)}), 1)
        files = write_files(storage, "0a", RankWrites(plan, 0), torch.empty, text)
        reports = [[[file.name, file.nbytes, file.digest] for file in files]]
        publish_checkpoint(storage, *make_manifest("0a", plan, {}, reports))
        with checkpoint.open(path) as reader, pytest.raises(CorruptionError):
            reader.per_rank(0)


def test_what_progress_raises_is_not_taken_for_damage(tmp_path):
    value = numbers((4, 3), "float32")
    path = store(tmp_path / "c", {"x": value}, {"x": [whole((4, 3))]})

    def progress(done, total):
        raise FileNotFoundError("a log that is gone")

    with checkpoint.open(path) as reader:
        requests = reader.requests([("x", [Piece(whole((4, 3)), torch.zeros(4, 3))])])
        with pytest.raises(FileNotFoundError, match="a log that is gone"):
            fetch(requests, progress)


def test_damage_does_not_make_the_files_after_it_wait(tmp_path):
    """More files than batches can be under way, the first of them damaged."""
    boxes = [Box((i, 0), (1, 3000)) for i in range(20)]
    value = numbers((20, 3000), "float32")
    path = store(tmp_path / "c", {"x": value}, {"x": boxes}, 20)
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-2000] ^= 1  # of the tensor: behind it are eight bytes of checksum
        file.write_bytes(data)
    with checkpoint.open(path) as reader, pytest.raises(CorruptionError):
        reader.read("x")


def test_what_is_kept_of_boxes_that_were_read_does_not_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "_MOST_OVERLAPS", 100)
    value = torch.arange(6000.0).reshape(2000, 3)
    checkpoint.save(tmp_path / "c", {"x": value})
    most = 0
    with checkpoint.open(tmp_path / "c") as reader:
        for i in range(1000):
            assert torch.equal(reader.read("x", Box((i, 0), (2, 3))), value[i : i + 2])
            most = max(most, len(reader._overlaps), sum(map(len, reader._overlaps.values())))
            assert reader._overlaps_kept == len(reader._overlaps) + sum(map(len, reader._overlaps.values()))
    assert 30 < most <= 100


# Into given memory.


@pytest.fixture(scope="module")
def stored_matrix(tmp_path_factory):
    """A matrix of 7 × 6, a number, and a tensor without elements, in two boxes where there are rows to cut."""
    tensors = {
        "x": numbers((7, 6), "float32"),
        "number": numbers((), "int64"),
        "empty": numbers((0, 3), "bfloat16"),
    }
    boxes = {"x": [Box((0, 0), (3, 6)), Box((3, 0), (4, 6))], "number": [whole(())], "empty": [whole((0, 3))]}
    return store(tmp_path_factory.mktemp("into") / "c", tensors, boxes, 2), tensors


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("key", ["x", "number", "empty"])
def test_a_tensor_is_read_into_memory_of_any_strides(stored_matrix, key, memory):
    path, tensors = stored_matrix
    target, base = destination(tuple(tensors[key].shape), tensors[key].dtype, memory)
    expected, expected_base = destination(tuple(tensors[key].shape), tensors[key].dtype, memory)
    expected.copy_(tensors[key])
    with checkpoint.open(path) as reader:
        reader.read_into(key, target)
    assert same(base, expected_base)  # and nothing beside it changed


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_box_is_read_into_memory_of_any_strides(stored_matrix, memory):
    path, tensors = stored_matrix
    with checkpoint.open(path) as reader:
        for box in (Box((2, 1), (3, 4)), ((6, 0), (1, 6)), ([0, 5], [7, 1]), Box((3, 3), (0, 2))):
            target, base = destination(tuple(box[1]), torch.float32, memory)
            expected, expected_base = destination(tuple(box[1]), torch.float32, memory)
            expected.copy_(tensors["x"][at(Box(tuple(box[0]), tuple(box[1])))])
            reader.read_into("x", target, box)
            assert same(base, expected_base), box


PLACEMENTS = [[Shard(0)], [Shard(1)], [Replicate()]]


@pytest.mark.parametrize("ranks", [2, 3, 5, 9])
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_dtensor_gets_its_own_boxes(stored_matrix, ranks, placements):
    """Uneven ones, and on more ranks than there are rows; of the whole, and of a box of it."""
    path, tensors = stored_matrix
    with checkpoint.open(path) as reader:
        for rank in range(ranks):
            with fake_rank(rank, ranks) as mesh:
                for box in (whole((7, 6)), Box((2, 1), (4, 5))):
                    expected = shard(tensors["x"][at(box)].contiguous(), mesh, *placements)
                    target = shard(torch.zeros(box.sizes), mesh, *placements)
                    reader.read_into("x", target, None if box == whole((7, 6)) else box)
                    assert same(target.to_local(), expected.to_local()), (rank, box)


def test_a_sharded_tensor_gets_its_own_shards(stored_matrix):
    path, tensors = stored_matrix
    rows = [(2, 0), (4, 1), (1, 0)]
    with checkpoint.open(path) as reader:
        for rank in range(3):
            with fake_rank(rank, 3):
                target = sharded_tensor(torch.zeros(7, 6), rows, rank)
                reader.read_into("x", target)
                expected = sharded_tensor(tensors["x"], rows, rank)
                read, wanted = ([each.tensor for each in one.local_shards()] for one in (target, expected))
                assert len(read) == len(wanted) and all(map(same, read, wanted))


@pytest.mark.parametrize(
    ("tensor", "box", "said"),
    [
        (torch.zeros(7, 5), None, r"found a tensor of float32 \[7, 5\]; required a tensor of float32 \[7, 6\]"),
        (torch.zeros(42), None, r"found a tensor of float32 \[42\]"),
        (torch.zeros(7, 6), Box((0, 0), (6, 6)), r"required a tensor of float32 \[6, 6\]"),
        (torch.zeros(7, 6, dtype=torch.float64), None, "found a tensor of float64"),
        (torch.zeros(7, 6, device="meta"), None, "found a tensor on the meta device"),
        (torch.zeros(1, 6).expand(7, 6), None, "found elements that share memory"),
        (torch.zeros(3, 6), Box((5, 0), (3, 6)), r"found the offsets \[5, 0\] and sizes \[3, 6\]"),
        (torch.zeros(3), Box((5,), (3,)), "required a box within"),
        (torch.zeros(3, 6), Box((5, 0), (-1, 6)), "required a box within"),
        (torch.zeros(3, 6), ((0, 0), (3,)), "required a box within"),
        (torch.zeros(3, 6), (slice(0, 3), slice(0, 6)), r"found \(slice.*no box.*required a box within"),
        (torch.zeros(3, 6), (slice(0, 3),), r"found \(slice.*no box.*required a box within"),
        (torch.zeros(3, 6), (3, 6), r"found \(3, 6\), which is no box"),
        (torch.zeros(3, 6), ((0, 0), (3, 6), (1, 1)), "which is no box"),
        (torch.zeros(3, 6), 3, "found 3, which is no box"),
    ],
    ids=[
        "shape",
        "rank",
        "box's shape",
        "dtype",
        "meta",
        "expanded",
        "beyond",
        "dimensions",
        "negative",
        "uneven box",
        *("slices", "slice", "sizes", "strides", "int"),
    ],
)
def test_memory_that_does_not_fit_is_refused(stored_matrix, tensor, box, said):
    with checkpoint.open(stored_matrix[0]) as reader, pytest.raises(MismatchError, match=said) as caught:
        reader.read_into("x", tensor, box)
    (problem,) = caught.value.problems
    assert problem.key == "x" and problem.remedy
    assert tensor.is_meta or not tensor.any()


def test_what_is_no_stored_tensor_is_refused(stored_matrix, tmp_path):
    checkpoint.save(tmp_path / "c", {"step": 3, "x": torch.ones(2)})
    with checkpoint.open(tmp_path / "c") as reader:
        for key in ("step", "y"):
            with pytest.raises(MismatchError, match="a tensor of the checkpoint"):
                reader.read_into(key, torch.zeros(2))
        with fake_rank(0, 2) as mesh, pytest.raises(LayoutError):
            reader.read_into("x", DTensor.from_local(torch.zeros(2), mesh, [Partial()]))


def test_damage_is_found_while_reading_into_memory(stored_matrix, tmp_path):
    value = numbers((40, 30), "float32")
    path = store(tmp_path / "c", {"x": value}, {"x": [whole((40, 30))]})
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    with checkpoint.open(path) as reader:
        data[reader.source.open_file(0).entries["x"].begin] ^= 1
    file.write_bytes(data)
    with checkpoint.open(path) as reader, pytest.raises(CorruptionError, match="segment 0 of 'x'"):
        reader.read_into("x", torch.zeros(40, 30))


def test_autograd_sees_that_memory_was_read_into(stored_matrix):
    """A backward through values that are gone must not pass; parameters can be read into without a `no_grad`."""
    path, tensors = stored_matrix
    weight = torch.nn.Parameter(torch.ones(7, 6))
    loss = (weight * weight).sum()
    with checkpoint.open(path) as reader:
        reader.read_into("x", weight)
        with torch.inference_mode():
            frozen = torch.zeros(7, 6)
        reader.read_into("x", frozen)
    assert same(weight.detach(), tensors["x"]) and same(frozen, tensors["x"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_holds_others_is_read_nested_as_it_was_saved(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    arguments = {"layers": 2, "bias": False, "sizes": [1, 2], "none": {}}
    app = {"model": model, "model_args": arguments, "list": [torch.ones(2), {"x": torch.zeros(1)}], "step": 3}
    checkpoint.save(tmp_path / "c", app)
    with checkpoint.open(tmp_path / "c") as reader:
        assert reader.read("model_args") == arguments
        assert reader.read("model_args.sizes") == [1, 2]
        state = reader.read("model")
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert reader.read("model.1").keys() == {"weight", "bias"}
        assert reader.read("list")[1]["x"].tolist() == [0]
        assert reader.read("list.0").tolist() == [1, 1]
        for key in ("mode", "model_arg", "model.2", "list.2"):
            with pytest.raises(MismatchError, match="no such key"):
                reader.read(key)
