"""Opening the files of a checkpoint: few requests each, several at a time, and no more of them than is wanted."""

import pytest
import torch

from benchmarks.many_files import write_checkpoint
from shardopt import checkpoint
from shardopt.checkpoint.sources import reader as reader_module
from shardopt.checkpoint.sources.reading import open_file
from shardopt.checkpoint.sources.reading.open_file import DataFileReader
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import CorruptionError
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece

RANKS = 12


@pytest.fixture(scope="module")
def of_many_files(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "c"
    return path, write_checkpoint(str(path), RANKS, 6)


class Counting:
    """A storage that counts its calls."""

    def __init__(self, storage):
        self._storage, self.calls = storage, []

    def __getattr__(self, name):
        found = getattr(self._storage, name)
        if name in ("size", "read", "read_rest"):

            def counted(*args):
                self.calls.append((name, args))
                return found(*args)

            return counted
        return found


def opened(path, number=0, **choices):
    with checkpoint.open(path) as reader:
        file = reader.manifest.files[number]
    storage = Counting(storage_of(path))
    return DataFileReader(storage, file, **choices), [name for name, _ in storage.calls]


def test_a_small_file_takes_one_request_and_a_large_one_two(of_many_files):
    path, _ = of_many_files
    whole, calls = opened(path)
    assert calls == ["read_rest"]
    in_two, calls = opened(path, head_bytes=whole.header_bytes)
    assert calls == ["read", "read_rest"]
    in_three, calls = opened(path, head_bytes=1000)
    assert calls == ["read", "read", "read_rest"]
    for other in (in_two, in_three):
        assert (other.entries, other.sums) == (whole.entries, whole.sums)


@pytest.mark.parametrize("head_bytes", [1 << 16, 4096, 100])
@pytest.mark.parametrize("change", [-5000, -1, 1, 5000])
def test_another_size_is_named_whatever_is_read_first(of_many_files, tmp_path, change, head_bytes):
    path, _ = of_many_files
    with checkpoint.open(path) as reader:
        file = reader.manifest.files[0]
    data = (path / file.name).read_bytes()
    (tmp_path / file.name).write_bytes(data[:change] if change < 0 else data + b"x" * change)
    size = max(len(data) + change, 0)
    with pytest.raises(CorruptionError, match=f"{size} bytes where {len(data)} were written"):
        DataFileReader(storage_of(tmp_path), file, head_bytes=head_bytes)


def test_entries_that_were_not_wanted_are_read_when_they_are_asked_for(of_many_files):
    path, _ = of_many_files
    every, _ = opened(path)
    names = [name for name in every.entries if name.startswith("layers")]
    some, _ = opened(path, wanted=names[:1])
    assert some._kept.keys() == set(names[:1]) and some._all is None
    assert some.entries == every.entries


def test_only_wanted_files_are_opened_and_by_several_threads(of_many_files, monkeypatch):
    path, state = of_many_files
    monkeypatch.setattr(reader_module, "_FEW_FILES", 1)
    with checkpoint.open(path) as reader:
        target = torch.zeros(3, 16)
        piece = Piece(Box((1, 0), (3, 16)), target)
        reader.requests([("layers.2.weight", [piece]), ("layers.3.weight", [piece])], others_follow=False)
        assert len(reader._files) == 3
        assert all(each._kept.keys() == {"layers.2.weight", "layers.3.weight"} for each in reader._files.values())
        reader.read_into("layers.2.weight", target, piece.box)
        assert torch.equal(target, state["layers.2.weight"][1:4]) and len(reader._files) == 3
        assert torch.equal(reader.read("layers.5.weight"), state["layers.5.weight"])
        assert len(reader._files) == RANKS


@pytest.fixture
def calls(monkeypatch):
    """The names of the files whose headers are read, in order."""
    names = []
    read = open_file.DataFileReader._read
    monkeypatch.setattr(
        open_file.DataFileReader, "_read", lambda self, head: names.append(self.name) or read(self, head)
    )
    return names


def test_reading_tensor_by_tensor_reads_each_header_once(of_many_files, calls):
    path, state = of_many_files
    with checkpoint.open(path) as reader:
        assert all(torch.equal(reader.read(key), tensor) for key, tensor in state.items())
    assert len(calls) == len(set(calls)) == RANKS


@pytest.mark.parametrize("count", [1, 2])
def test_a_load_keeps_the_entries_of_its_own_tensors(of_many_files, monkeypatch, count):
    path, state = of_many_files
    kept = []
    open_all = reader_module.CheckpointReader._open_all

    def opened_all(self, *args):
        open_all(self, *args)
        kept.extend(each._kept.keys() for each in self._files.values())

    monkeypatch.setattr(reader_module.CheckpointReader, "_open_all", opened_all)
    app = {key: torch.zeros_like(state[key]) for key in list(state)[:count]}
    checkpoint.load(path, app, strict=False)
    assert len(kept) == RANKS and all(keys == app.keys() for keys in kept)


def test_a_load_takes_as_many_reads_as_files(of_many_files, calls):
    path, state = of_many_files
    app = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    checkpoint.load(path, app)
    assert all(torch.equal(app[key], state[key]) for key in state)
    assert len(calls) == len(set(calls)) == RANKS


def test_the_first_damaged_file_is_named(of_many_files, tmp_path):
    path, state = of_many_files
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with checkpoint.open(path) as reader:
        name = reader.manifest.files[7].name
    data = bytearray((tmp_path / name).read_bytes())
    data[20] ^= 1
    (tmp_path / name).write_bytes(data)
    app = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with pytest.raises(CorruptionError, match=name):
        checkpoint.load(tmp_path, app)
    assert not any(tensor.any() for tensor in app.values())
