"""Hostile manifests and headers: each is read or refused with our error, within bounds; nothing else happens."""

import copy
import json
import random
import struct
import tracemalloc
import warnings

import pytest
import torch
import xxhash

from shardopt import checkpoint
from shardopt.checkpoint.format.data_file import parse_header
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.errors import ShardoptError

MEMORY_LIMIT_BYTES = 64 << 20
MEMORY_PER_INPUT_BYTE = 40

ODD_VALUES = [
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**70), 1e308, 0.5, "", "x", "../../etc/passwd",
    "/etc/passwd", "..\\x.safetensors", "a\0b.safetensors", "F32", "float32", "\ud800", [], [[]], {}, {"": 0}, [0],
    [-1], [2**62] * 3, {"int": "9" * 100}, {"int": "x"}, {"numpy": ["O", None, ""]}, {"numpy": ["<f8", [2**40], ""]},
    {"tensor": ["save", [1], ""]}, {"dict": [[1]]}, {"set": [[]]}, {"bytes": "*"},
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "c"
    big = torch.arange(70_000, dtype=torch.float32).reshape(700, 100)
    tensors = {"big": big, "c": torch.zeros(3, dtype=torch.complex128), "s": torch.tensor(1)}
    tensors["tied"] = tensors["big"]
    values = {"n": 2**70, "t": (1, {"a": [None, 0.5]}), "b": b"xyz"}
    checkpoint.save(path, {"tensors": tensors, "values": values, "mine": checkpoint.PerRank([1])})
    return path


def seal(text):
    return text + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}'


def nodes(tree, places=None):
    """Every (container, key) in a JSON tree."""
    places = [] if places is None else places
    if isinstance(tree, dict | list):
        for key, child in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
            places.append((tree, key))
            nodes(child, places)
    return places


def mutate_json(text, numbers):
    """A JSON text with a few of its values replaced, dropped, repeated or nested."""
    tree = json.loads(text)
    for _ in range(numbers.randint(1, 3)):
        places = nodes(tree)
        if not places:
            break
        container, key = numbers.choice(places)
        what = numbers.randrange(6)
        if what == 0:
            container[key] = copy.deepcopy(numbers.choice(ODD_VALUES))
        elif what == 1:
            del container[key]
        elif what == 2 and isinstance(container[key], int):
            container[key] = container[key] + numbers.choice([-1, 1, 4096, -(2**40), 2**40])
        elif what == 3 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif what == 4:
            container[key] = [container[key]]
        else:
            other, other_key = numbers.choice(places)
            try:
                container[key] = copy.deepcopy(other[other_key])
            except (KeyError, IndexError):
                continue
    try:
        return json.dumps(tree, separators=(",", ":"), ensure_ascii=numbers.random() < 0.5).encode()
    except (UnicodeEncodeError, ValueError):
        return b"{}"


def mutate_bytes(data, numbers):
    """Bytes with some flipped, cut off, repeated or put in."""
    data = bytearray(data)
    for _ in range(numbers.randint(1, 4)):
        place = numbers.randrange(len(data) + 1) if data else 0
        what = numbers.randrange(5)
        if what == 0 and place < len(data):
            data[place] ^= 1 << numbers.randrange(8)
        elif what == 1:
            del data[place:]
        elif what == 2:
            data[place:place] = numbers.randbytes(numbers.randint(1, 9))
        elif what == 3:
            data[place:place] = numbers.choice([b"[", b"{", b'{"a":', b"]", b"null", b"1e999", b"-", b"\xff\xfe"])
        else:
            end = min(len(data), place + numbers.randint(1, 50))
            data[place:place] = data[place:end]
    return bytes(data)


def hostile_manifest(data, numbers):
    body = data[: -len(',"xxh3":"0123456789abcdef"}')]
    what = numbers.randrange(8)
    if what == 0:
        return mutate_bytes(data, numbers)
    if what == 1:
        return seal(mutate_bytes(body, numbers))
    if what == 2:
        depth = numbers.choice([10, 500, 100_000])
        return seal(body[:-1] + b',"values":' + b"[" * depth + b"]" * depth)
    if what == 3:
        return seal(body + b',"tensors":{}')
    return seal(mutate_json(body + b"}", numbers)[:-1])


def hostile_header(data, numbers):
    """A data file's bytes with another header; often of a consistent length, so that it is looked into."""
    length = struct.unpack("<Q", data[:8])[0]
    header, rest = data[8 : 8 + length], data[8 + length :]
    what = numbers.randrange(6)
    if what == 0:
        return struct.pack("<Q", numbers.choice([0, 1, 7, 2**32, 2**63, 2**64 - 1, len(data), length + 1])) + data[8:]
    if what == 1:
        return data[: numbers.randrange(len(data))]
    if what == 2:
        header = mutate_bytes(header, numbers)
    elif what == 3:
        header = b'{"a":' * 50_000
    else:
        header = mutate_json(header, numbers)
    return struct.pack("<Q", len(header)) + header + rest


def use(path):
    """All that a reader can be asked for; returns whether it was refused."""
    try:
        report = checkpoint.verify(path)
        with checkpoint.open(path) as reader:
            for key in reader.keys():  # noqa: SIM118  # not a dict
                value = reader.read(key)
                if isinstance(value, torch.Tensor):
                    reader.info(key)
            if reader.manifest.per_rank:
                reader.per_rank(0)
        app = {
            "tensors": {
                "big": torch.zeros(700, 100),
                "c": torch.zeros(3, dtype=torch.complex128),
                "s": torch.tensor(0),
            },
            "values": {"n": 0, "t": None, "b": b""},
            "mine": checkpoint.PerRank(0, "keep"),
        }
        checkpoint.load(path, app)
    except ShardoptError:
        return True
    return not report.ok


def run(sound, tmp_path, numbers, count, hostile):
    """Feeds `count` inputs; returns how many were refused."""
    (file,) = sound.glob("*.safetensors")
    manifest, data = (sound / "manifest.json").read_bytes(), file.read_bytes()
    where = tmp_path / "outer" / "c"
    where.mkdir(parents=True)
    refused = 0
    tracemalloc.start()
    for _ in range(count):
        new_manifest, new_data = hostile(manifest, data, numbers)
        (where / "manifest.json").write_bytes(new_manifest)
        (where / file.name).write_bytes(new_data)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refused += use(where)
        used = tracemalloc.get_traced_memory()[1] - before
        assert used <= MEMORY_LIMIT_BYTES + MEMORY_PER_INPUT_BYTE * (len(new_manifest) + len(new_data))
        assert sorted(p.name for p in where.iterdir()) == sorted([file.name, "manifest.json"])
        assert [p.name for p in where.parent.iterdir()] == ["c"]
    tracemalloc.stop()
    return refused


def only_manifests(manifest, data, numbers):
    return hostile_manifest(manifest, numbers), data


def only_headers(manifest, data, numbers):
    """With a manifest that vouches for the header, as an attacker would write it."""
    changed = hostile_header(data, numbers)
    tree = json.loads(manifest)
    del tree["xxh3"]
    tree["files"][0][1] = len(changed)
    if numbers.random() < 0.8 and len(changed) > 8:
        length = 8 + struct.unpack("<Q", changed[:8])[0]
        sums = data[len(data) - 8 * 8 :]
        tree["files"][0][2] = xxhash.xxh3_64_hexdigest(changed[:length] + sums[: numbers.choice([8, 64])])
    return seal(json.dumps(tree, separators=(",", ":")).encode()[:-1]), changed


HOSTILE = [only_manifests, only_headers]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda f: f.__name__)
def test_a_sample_of_hostile_inputs(sound, tmp_path, hostile):
    refused = run(sound, tmp_path, random.Random(1), 120, hostile)
    assert 50 < refused <= 120


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda f: f.__name__)
def test_twenty_thousand_hostile_inputs(sound, tmp_path, hostile, seed):
    assert run(sound, tmp_path, random.Random(100 + seed), 2500, hostile) > 1000


@pytest.mark.parametrize("rows", [2**24, 2**40, 2**62])
def test_no_memory_for_a_size_that_no_file_bears_out(sound, tmp_path, rows):
    (file,) = sound.glob("*.safetensors")
    tree = json.loads((sound / "manifest.json").read_bytes())
    del tree["xxh3"]
    number = tree["tensors"]["tensors.big"][1]
    tree["layouts"][number] |= {"shape": [rows, 100], "cuts": [[0, rows], [0, 100]]}
    path = tmp_path / "c"
    path.mkdir()
    (path / "manifest.json").write_bytes(seal(json.dumps(tree, separators=(",", ":")).encode()[:-1]))
    (path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ShardoptError), checkpoint.open(path) as reader:
        reader.read("tensors.big")
    assert not checkpoint.verify(path).ok


def test_parsers_alone_meet_many_more(sound):
    """Without files around them, which makes room for more inputs."""
    (file,) = sound.glob("*.safetensors")
    manifest, data = (sound / "manifest.json").read_bytes(), file.read_bytes()
    numbers = random.Random(2)
    outcomes = {True: 0, False: 0}
    for _ in range(2500):
        for parse in (
            lambda: decode_manifest(hostile_manifest(manifest, numbers), "m"),
            lambda: parse_header(hostile_header(data, numbers)[: len(data) // 2], len(data), "h"),
        ):
            try:
                parse()
                outcomes[True] += 1
            except ShardoptError:
                outcomes[False] += 1
    assert min(outcomes.values()) > 50
