"""`verify` finds every kind of damage and names it; whole checkpoints pass."""

import random
import shutil

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.run.listing import condition_of, look_at
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.reading.open_file import OpenFile
from shardopt.checkpoint.storage import storage_of
from shardopt.cli.entry import main
from shardopt.errors import CheckpointNotFoundError, CorruptionError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "whole"
    big = torch.arange(200_000, dtype=torch.float64).reshape(400, 500)
    app = {"big": big, "small": {str(i): torch.full((3, i), i) for i in range(20)}, "step": 3}
    checkpoint.save(path, app | {"mine": checkpoint.PerRank([1, 2])})
    return path


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def data_file(path):
    (file,) = path.glob("*.safetensors")
    return file


def test_a_whole_checkpoint_is_ok(whole):
    seen = []
    report = checkpoint.verify(whole, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    report.raise_if_damaged()
    assert (report.tensors, report.files) == (21, 1)
    assert seen[-1][0] == report.bytes_read > 1_600_000


def test_every_flipped_byte_is_found_and_named(whole, tmp_path):
    numbers = random.Random(0)
    size = data_file(whole).stat().st_size
    places = [0, 7, 8, 100, size - 1, *(numbers.randrange(size) for _ in range(60))]
    for place in places:
        path = shutil.copytree(whole, tmp_path / str(place), dirs_exist_ok=True)
        data = bytearray(data_file(path).read_bytes())
        data[place] ^= 1 << numbers.randrange(8)
        data_file(path).write_bytes(data)
        report = checkpoint.verify(path)
        assert not report.ok, place
        assert data_file(path).name in report.problems[0].key
        with pytest.raises(CorruptionError):
            report.raise_if_damaged()
        shutil.rmtree(path)


def test_a_flipped_byte_of_a_tensor_is_named_by_key_and_segment(copy):
    data = bytearray(data_file(copy).read_bytes())
    data[4096 + 300_000] ^= 1
    data_file(copy).write_bytes(data)
    (problem,) = checkpoint.verify(copy).problems
    assert "segment 1 of 'big'" in problem.found


def test_every_flipped_byte_of_the_manifest_is_found(copy):
    manifest = copy / "manifest.json"
    whole = manifest.read_bytes()
    for place in range(0, len(whole), 7):
        manifest.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert not checkpoint.verify(copy).ok, place


@pytest.mark.parametrize("damage", ["truncated", "longer", "missing"])
def test_files_that_are_not_as_they_were(copy, damage):
    file = data_file(copy)
    data = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(data[:-1])
    if damage == "longer":
        file.write_bytes(data + b"\0")
    if damage == "missing":
        file.unlink()
    report = checkpoint.verify(copy)
    assert len(report.problems) == 1
    assert ".safetensors" in report.problems[0].key


def test_files_of_other_saves_are_told_and_no_damage(copy):
    (copy / "ffffffffffff-r00000.safetensors").write_bytes(data_file(copy).read_bytes())
    report = checkpoint.verify(copy)
    assert report.ok
    assert report.remains == ("ffffffffffff-r00000.safetensors",)


def test_all_damage_is_reported_not_only_the_first(copy):
    data = bytearray(data_file(copy).read_bytes())
    for place in (4096, 4096 + 300_000, 4096 + 1_000_000):
        data[place] ^= 1
    data_file(copy).write_bytes(data)
    assert len(checkpoint.verify(copy).problems) == 3


def test_a_file_of_another_save_is_found(copy, tmp_path):
    checkpoint.save(tmp_path / "other", {"big": torch.zeros(400, 500, dtype=torch.float64)})
    data_file(copy).write_bytes(data_file(tmp_path / "other").read_bytes())
    assert not checkpoint.verify(copy).ok


@pytest.mark.parametrize("at", ["open_file", "opened"])
def test_one_that_is_removed_while_it_is_read_is_not_damaged(copy, monkeypatch, at):
    kind = OwnSource if at == "open_file" else OpenFile
    inner = getattr(kind, at)

    def removed_before(self, *args, **options):
        shutil.rmtree(copy, ignore_errors=True)
        return inner(self, *args, **options)

    def read(of):
        shutil.copytree(saved, copy, dirs_exist_ok=True)
        monkeypatch.setattr(kind, at, removed_before)
        try:
            return of(copy)
        finally:
            monkeypatch.setattr(kind, at, inner)

    saved = shutil.copytree(copy, copy.parent / "saved")
    app = {"big": torch.zeros(400, 500, dtype=torch.float64)}
    with pytest.raises(CheckpointNotFoundError):
        read(checkpoint.verify)
    with pytest.raises(CorruptionError, match=r"a checkpoint was removed while it was read.*no-checkpoint"):
        read(lambda path: checkpoint.load(path, app, select="big"))
    assert read(lambda path: look_at(storage_of(path), verify_bytes=True)).condition == "unfinished"


def test_nothing_to_verify(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.verify(tmp_path)


def test_bytes_without_a_checksum_are_counted_and_not_said_to_be_as_they_were(whole, tmp_path, capsys):
    for format in ("huggingface", "dcp", "torch"):
        checkpoint.convert(whole, tmp_path / format, format, select="big")
    with_sums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        tied = torch.ones(100)
        torch.save({"w": tied, "tied": tied, "view": torch.ones(8)[2:4], "n": 3}, tmp_path / "unsummed.pt")
        torch.save({"n": 3}, tmp_path / "plain.pt")
    finally:
        torch.serialization.set_crc32_options(with_sums)
    unsummed, plain = ((tmp_path / name).stat().st_size for name in ("unsummed.pt", "plain.pt"))
    (file,) = (tmp_path / "huggingface").glob("*.safetensors")
    metadata = (tmp_path / "dcp" / ".metadata").stat().st_size
    expected = {"huggingface": file.stat().st_size, "dcp": metadata, "torch": 0}
    expected |= {"unsummed.pt": unsummed, "plain.pt": plain}
    for name, nbytes in expected.items():
        report = checkpoint.verify(tmp_path / name)
        assert report.ok and report.bytes_without_checksum == nbytes
        no_sums = f"the structure is right; no checksum covers {nbytes:,} bytes"
        assert report.verdict == (no_sums if nbytes else "every byte is as it was written")
        assert condition_of(report) == ("committed" if nbytes else "whole", ())
    assert main(["ls", str(tmp_path / "huggingface"), "--verify"]) == 0
    assert "  committed" in capsys.readouterr().out
    assert checkpoint.verify(whole).bytes_without_checksum == 0
