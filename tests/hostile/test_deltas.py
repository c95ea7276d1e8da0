"""Damage in a chain of deltas: found by `load` and by `verify`, which name the file; nothing is restored wrongly."""

import json
import random
import shutil

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import seal
from shardopt.errors import CorruptionError, FormatError

STEPS = 3


def app_of(step, other=0):
    """Two tensors that have deltas, of which one is of several segments."""
    app = {"x": torch.arange(150_000, dtype=torch.int32), "y": torch.arange(200_000, dtype=torch.int32).to(torch.int16)}
    for name, tensor in app.items():
        for each in range(1, step + 1):
            tensor[each + len(name) + other :: 997] += each
    return app


def save_chain(root, other=0):
    for step in range(STEPS + 1):
        base = root / str(step - 1) if step else None
        checkpoint.save(root / str(step), app_of(step, other), base=base, durable=False)
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_chain(tmp_path_factory.mktemp("chain") / "it")


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "it")


def zeros():
    return {name: torch.zeros_like(each) for name, each in app_of(0).items()}


def is_whole(root, step=STEPS):
    checkpoint.verify(root / str(step)).raise_if_damaged()
    app = zeros()
    checkpoint.load(root / str(step), app)
    return all(torch.equal(app[key], value) for key, value in app_of(step).items())


def found(root, step=STEPS):
    """The texts of the errors of a load and of `verify`."""
    report = checkpoint.verify(root / str(step))
    assert not report.ok
    with pytest.raises((CorruptionError, FormatError)) as caught:
        checkpoint.load(root / str(step), zeros())
    return str(caught.value), "; ".join(map(str, report.problems))


def data_file(root, step):
    (file,) = (root / str(step)).glob("*.safetensors")
    return file


def entries_of(file):
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    header.pop("__metadata__")
    return data, {key: tuple(length + each for each in info["data_offsets"]) for key, info in header.items()}


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << (at % 8)
    file.write_bytes(data)


def test_the_chain_is_one(saved):
    assert is_whole(saved)
    _, entries = entries_of(data_file(saved, STEPS))
    assert [*entries][:4] == ["__delta__.x", "__delta__.y", "__delta_index__.x", "__delta_index__.y"]


@pytest.mark.parametrize("step", range(STEPS + 1))
def test_any_flipped_byte_is_found_and_its_file_named(copy, step):
    file, pick = data_file(copy, step), random.Random(step)
    data, entries = entries_of(file)
    keys = {key for key in entries if step == 0 or key.startswith("__delta")}
    places = [each for key in keys for each in (entries[key][0], entries[key][1] - 1, pick.randrange(*entries[key]))]
    for at in (0, 9, pick.randrange(len(data)), *places):
        flip(file, at)
        of_load, of_verify = found(copy)
        assert f"{step}/{file.name}" in of_verify
        assert f"{step}/{file.name}" in of_load
        file.write_bytes(data)
    assert is_whole(copy)


def changed_manifest(root, step, change):
    path = root / str(step) / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["xxh3"]
    change(body)
    path.write_bytes(seal(json.dumps(body, separators=(",", ":"))[:-1].encode()))


def change_deltas(change):
    def of_body(body):
        for layout in body["layouts"]:
            for entry in layout["entries"]:
                entry[3] = change(entry[3])

    return of_body


@pytest.mark.parametrize(
    "change",
    [lambda deltas: deltas[::-1], lambda deltas: deltas[:-2] + deltas[-1:], lambda deltas: deltas[1:]],
    ids=["order", "gap", "begin"],
)
def test_deltas_in_another_order_or_not_all_are_refused(copy, change):
    changed_manifest(copy, STEPS, change_deltas(change))
    assert all("does not belong on" in text for text in found(copy))


def test_deltas_twice_are_refused(copy):
    changed_manifest(copy, STEPS, change_deltas(lambda deltas: deltas + deltas[-1:]))
    with pytest.raises(CorruptionError, match="malformed"):
        checkpoint.open(copy / str(STEPS))


def test_a_shorter_chain_is_an_earlier_state(copy):
    """Each manifest names its chain: nobody reads deltas that it does not name."""
    assert all(is_whole(copy, step) for step in range(STEPS + 1))


def test_a_delta_of_another_chain_is_refused(copy, tmp_path):
    other = save_chain(tmp_path / "other", other=5)
    theirs, own = data_file(other, 2), data_file(copy, 2)
    own.write_bytes(theirs.read_bytes())  # in its place: it is not the file that the manifest has
    assert all(f"2/{own.name}" in text for text in found(copy))
    (copy / "other").mkdir()
    shutil.copy(theirs, copy / "other" / theirs.name)
    of_theirs = json.loads((other / str(2) / "manifest.json").read_bytes())["files"]
    (file,) = (each for each in of_theirs if "/" not in each[0])

    def change(body):
        numbers = [number for number, each in enumerate(body["files"]) if each[0].startswith("../2/")]
        body["files"][numbers[0]] = [f"../other/{file[0]}", *file[1:]]

    changed_manifest(copy, STEPS, change)
    texts = found(copy)
    assert all("does not belong on" in text and f"other/{theirs.name}" in text for text in texts)


@pytest.mark.parametrize("step", range(STEPS))
def test_a_file_that_is_gone_is_named(copy, step):
    file = data_file(copy, step)
    file.unlink()
    of_load, of_verify = found(copy)
    assert f"{step}/{file.name}" in of_load and f"{step}/{file.name}" in of_verify
    assert len(checkpoint.verify(copy / str(STEPS)).problems) <= 2


def test_a_save_on_a_damaged_chain_writes_what_it_cannot_compare(copy):
    """Also where the header is intact, and only the words of a delta are not."""
    for step in (0, 1, 3):
        data, entries = entries_of(data_file(copy, step))
        flip(data_file(copy, step), entries["x" if step == 0 else "__delta__.x"][0] + 40)
        changed = app_of(4)
        checkpoint.save(copy / "4", changed, base=copy / "3", durable=False)
        deltas = checkpoint.open(copy / "4").manifest.tensors
        of_x, of_y = ([len(each.deltas) for each in deltas[key].layout.entries] for key in "xy")
        assert max(of_x, default=0) <= 3 and of_y == [4]
        data_file(copy, step).write_bytes(data)
        assert is_whole(copy, 4)
        shutil.rmtree(copy / "4")


def test_damage_in_the_deltas_of_a_large_box_names_their_file(tmp_path, monkeypatch):
    """Windows of a delta are read without its own checksums."""
    monkeypatch.setattr("shardopt.checkpoint.sources.reading.with_deltas._WINDOW_BYTES", 1 << 10)
    x = torch.zeros(65 << 18, dtype=torch.uint8)
    for step in (0, 1):
        x[::99_999] += step
        checkpoint.save(tmp_path / str(step), {"x": x}, base=tmp_path / "0" if step else None, durable=False)
    file = data_file(tmp_path, 1)
    data, entries = entries_of(file)
    begin, end = entries["__delta__.x"]
    for at in (begin, begin + 20, end - 30, end - 1):
        flip(file, at)
        report = checkpoint.verify(tmp_path / "1")
        assert not report.ok and any(f"1/{file.name}" in str(each) for each in report.problems)
        with pytest.raises(CorruptionError, match=file.name):
            checkpoint.load(tmp_path / "1", {"x": torch.zeros_like(x)})
        file.write_bytes(data)
    app = {"x": torch.zeros_like(x)}
    checkpoint.load(tmp_path / "1", app)
    assert torch.equal(app["x"], x)
