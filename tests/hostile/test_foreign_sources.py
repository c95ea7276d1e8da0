"""Damaged and crafted checkpoints of others: refused by name, or read as they were written; within bounds of memory."""

import json
import random
import shutil
import struct
import tracemalloc
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardopt import checkpoint
from shardopt.errors import ShardoptError
from tests.hostile.test_fuzz import mutate_json

MEMORY_LIMIT_BYTES = 64 << 20
STATE = {
    "x": torch.arange(700.0).reshape(7, 100),
    "t": torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).T,
    "h": torch.arange(6, dtype=torch.bfloat16),
    "n": 7,
    "cfg": {"a": [1, {"b": (2, None)}]},
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("foreign")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(STATE), checkpoint_id=root / "dcp", no_dist=True)
    (root / "pt").mkdir()
    torch.save(STATE, root / "pt" / "a.pt")
    (root / "hf").mkdir()
    tensors = {key: value.contiguous() for key, value in STATE.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, root / "hf" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (root / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def read_all(path):
    """All that is read, by key; None where it is refused. Any other error is one of ours to mend."""
    tracemalloc.start()
    try:
        with checkpoint.open(path) as reader:
            if reader.source.unread:
                return None  # a load refuses these by name
            return dict(map(reader_item(reader), reader.keys()))
    except ShardoptError as error:
        str(error).encode()
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_LIMIT_BYTES


def reader_item(reader):
    return lambda key: (key, reader.read(key))


def flipped(data, numbers):
    """Bytes with a few changed, cut off, put in or taken out."""
    data = bytearray(data)
    for _ in range(numbers.randint(1, 3)):
        at = numbers.randrange(len(data))
        kind = numbers.choice(["flip", "flip", "flip", "set", "cut", "insert", "remove", "move"])
        if kind == "flip":
            data[at] ^= 1 << numbers.randrange(8)
        elif kind == "set":
            data[at : at + 4] = numbers.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])[
                : len(data) - at
            ]
        elif kind == "cut":
            del data[max(at, 1) :]
        elif kind == "insert":
            data[at:at] = numbers.randbytes(numbers.randint(1, 40))
        elif kind == "remove":
            del data[at : min(at + numbers.randint(1, 40), len(data) - 1)]
        else:
            data[at : at + 16] = data[at // 2 : at // 2 + 16]
    return bytes(data)


def mutated_header(data, numbers):
    """A safetensors file with another header."""
    length = struct.unpack("<Q", data[:8])[0]
    header = mutate_json(data[8 : 8 + length], numbers)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


TARGETS = {
    "metadata": ("dcp", ".metadata", flipped),
    "distcp": ("dcp", "__0_0.distcp", flipped),
    "torch": ("pt", "a.pt", flipped),
    "header": ("hf", "model.safetensors", mutated_header),
    "safetensors": ("hf", "model.safetensors", flipped),
    "index": ("hf", "model.safetensors.index.json", mutate_json),
}
CHECKED = ("distcp", "torch")
"""Of these each byte counts: what is read is what was written."""


def check_inputs(sound, tmp_path, target, count):
    folder, name, mutate = TARGETS[target]
    shutil.copytree(sound / folder, tmp_path / folder)
    file = tmp_path / folder / name
    original, whole = file.read_bytes(), read_all(sound / folder)
    refused = 0
    for seed in range(count):
        numbers = random.Random(seed)
        try:
            data = mutate(original, numbers)
        except (ValueError, RecursionError, UnicodeEncodeError):
            continue  # the mutation is no text
        file.write_bytes(data)
        read = read_all(tmp_path / folder)
        refused += read is None
        if target in CHECKED and read is not None:
            assert read.keys() == whole.keys(), seed
            assert all(is_equal(read[key], whole[key]) for key in whole), seed
    assert refused > count // 4
    print(f"{target}: {refused} of {count} refused")


def is_equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_hundred_inputs(sound, tmp_path, target):
    check_inputs(sound, tmp_path, target, 60)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_twenty_thousand_inputs(sound, tmp_path, target):
    check_inputs(sound, tmp_path, target, 20_000)
