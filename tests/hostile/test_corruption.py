"""Any byte of any file flipped, any file cut, gone or of another save: found by `verify` and by a load, and named."""

import random
import shutil

import pytest
import torch

from shardopt import checkpoint
from shardopt.errors import CorruptionError, FormatError
from tests.distributed import test_reshard_matrix as matrix
from tests.harness import run_ranks

MANIFEST = "manifest.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of three ranks with every layout and dtype, and another save of the same."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("one", "other"):
        run_ranks(3, matrix.save, str(folder / name))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved / "one", tmp_path / "copy")


def wanted():
    return {"/".join(name): torch.zeros_like(matrix.full(*name[1:])) for name in matrix.names()}


def found_by_load(path):
    """The error of a load of everything."""
    with pytest.raises((CorruptionError, FormatError)) as caught:
        checkpoint.load(path, {"state": wanted()})
    return str(caught.value)


def found_by_verify(path):
    report = checkpoint.verify(path)
    assert not report.ok
    return "; ".join(map(str, report.problems))


def places(path, count):
    """File, offset, and what to flip there; by size, but each file at least at its ends."""
    pick = random.Random(5)
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        yield from ((file, 0, 0x80), (file, size - 1, 0x01))
    for _ in range(count - 2 * len(files)):
        (chosen,) = pick.choices(range(len(files)), sizes)
        yield files[chosen], pick.randrange(sizes[chosen]), 1 << pick.randrange(8)


def check_flips(path, count):
    named = 0
    with checkpoint.open(path) as reader:
        opened = [reader.source.open_file(number) for number in range(len(reader.manifest.files))]
        entries = {file.name: file.entries.values() for file in opened}
    for file, offset, flip in places(path, count):
        whole = file.read_bytes()
        file.write_bytes(whole[:offset] + bytes([whole[offset] ^ flip]) + whole[offset + 1 :])
        texts = found_by_verify(path), found_by_load(path)
        assert all(file.name in text for text in texts), (file.name, offset)
        here = [each for each in entries.get(file.name, ()) if each.begin <= offset < each.end]
        if here and not here[0].key.startswith("__"):
            assert all(repr(here[0].key) in text for text in texts), (file.name, offset, here[0].key)
            named += 1
        file.write_bytes(whole)
    assert checkpoint.verify(path).ok
    return named


def test_some_flipped_bytes_are_found_by_verify_and_by_load(copy):
    assert check_flips(copy, 20) > 0


@pytest.mark.exhaustive
def test_five_hundred_flipped_bytes_are_found_by_verify_and_by_load(copy):
    assert check_flips(copy, 500) > 100


@pytest.mark.parametrize("damage", ["truncated", "deleted", "swapped"])
def test_every_file_that_is_not_as_it_was_is_found(saved, copy, damage):
    """Swapped with the file of the same rank of another save of the same state."""
    others = sorted((saved / "other").glob("*.safetensors"))
    files = sorted(copy.glob("*.safetensors"))
    assert len(files) == len(others) > 3
    for file, other in zip(files, others, strict=True):
        whole = file.read_bytes()
        if damage == "truncated":
            file.write_bytes(whole[: len(whole) // 2])
        elif damage == "deleted":
            file.unlink()
        else:
            file.write_bytes(other.read_bytes())
        if file.read_bytes() != whole if file.exists() else True:
            assert file.name in found_by_verify(copy)
            assert file.name in found_by_load(copy)
        file.write_bytes(whole)
    manifest = copy / MANIFEST
    whole = manifest.read_bytes()
    if damage == "deleted":
        return  # then there is no checkpoint, which is another matter
    manifest.write_bytes(whole[:-40] if damage == "truncated" else (saved / "other" / MANIFEST).read_bytes())
    assert found_by_verify(copy)
    assert found_by_load(copy)
