"""Hostile files of torch: each is read as data, or refused with our error, within bounds; nothing in them is run."""

import functools
import pickle
import pickletools
import random
import sys
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch

from shardopt.checkpoint.sources.pickled.dcp_metadata import DcpMetadata, read_metadata
from shardopt.checkpoint.sources.pickled.torch_archive import KNOWN_GLOBALS
from shardopt.checkpoint.sources.pickled.unpickle import unpickle
from shardopt.errors import CorruptionError, FormatError, ShardoptError
from shardopt.state.values import encode_value
from tests.hostile.test_fuzz import mutate_bytes
from tests.support.torch_files import archive_of, read_whole, saved

MEMORY_LIMIT_BYTES = 8 << 20
MEMORY_PER_INPUT_BYTE = 400

GLOBALS = [name.rpartition(".") for name in (*KNOWN_GLOBALS, "posix.system", "builtins.eval", "builtins.bytearray")]
PIECES = [
    *(opcode.code.encode("latin1") for opcode in pickletools.opcodes),
    *(f"c{module}\n{name}\n".encode() for module, _, name in GLOBALS),
    *(b"h" + bytes([place]) for place in range(12)),
    *(b"K" + bytes([number]) for number in (0, 1, 255)),
    *(b"\x8b\xff\xff\xff\x7f", b"B\xff\xff\xff\xff", b"\x8a\x09" + (2**63).to_bytes(9, "little"), b"M\x00\x40"),
    *(b"\x8c\x01x", b"\x8c\x08__dict__", b")R", b"\x85R", b"\x86R", b"}b", b"Ns", b"(lp", b"q\x05", b"\x86" * 9),
]  # fmt: skip


def mutate_pickle(data, numbers):
    """A pickle with bytes changed, or with a few random operations put in, repeated or made up."""
    what = numbers.randrange(4)
    if what == 0:
        return mutate_bytes(data, numbers)
    pieces = b"".join(numbers.choice(PIECES) for _ in range(numbers.randint(1, 12 if what < 3 else 60)))
    place = numbers.randrange(2, len(data))
    if what == 1:
        return data[:place] + pieces + data[place:]
    if what == 2:
        return data[:place] + pieces * numbers.choice([1, 2, 100]) + b"."
    return b"\x80\x04" + b"".join([b"(", pieces, b"t", b"."])


SOUND = {
    "t": [torch.arange(6.0).reshape(2, 3), torch.nn.Parameter(torch.ones(2))],
    "v": {"n": 2**70, "s": {1, 2}, "b": b"\xff", "x": (1, "a")},
}


@pytest.fixture(scope="module")
def sound():
    data = saved(SOUND)
    golden = Path(__file__).parents[1] / "golden" / "dcp" / "adamw_nested"
    begin = data.index(b"\x80\x02")
    return {
        "archive": data,
        "pickle": data[begin : data.index(b".PK", begin) + 1],
        "storages": [SOUND["t"][0].numpy().tobytes(), b"\0\0\x80?" * 2],
        "metadata": (golden / ".metadata").read_bytes(),
        "plain": pickle.dumps(SOUND["v"], 2),
    }


def archives(sound, numbers):
    data = mutate_bytes(sound["archive"], numbers)
    return data, lambda: encode_all(read_whole(data))


def pickles_in_archives(sound, numbers):
    data = archive_of(mutate_pickle(sound["pickle"], numbers), sound["storages"])
    return data, lambda: encode_all(read_whole(data))


def plain_pickles(sound, numbers):
    data = mutate_pickle(sound["plain"], numbers)
    return data, lambda: encode_all(unpickle(data, "w", KNOWN_GLOBALS))


def metadata(sound, numbers):
    data = (mutate_bytes if numbers.random() < 0.5 else mutate_pickle)(sound["metadata"], numbers)
    return data, lambda: read_again(read_metadata(data, "w"))


def read_again(found):
    assert isinstance(found, DcpMetadata)
    for tensor in found.tensors.values():
        for chunk in tensor.chunks:
            assert "/" not in chunk.file and chunk.offset >= 0 and chunk.length >= 0
            assert all(0 <= end <= size for end, size in zip(chunk.box.ends, tensor.shape, strict=True))


def encode_all(value):
    """Goes through all of a value by recursion, as users of it may."""
    match value:
        case dict():
            for key, item in value.items():
                assert hash(key) is not None
                encode_all(item)
        case list() | tuple() | set():
            for item in value:
                encode_all(item)
        case int() | float() | str() | bytes():
            encode_value(value)


HOSTILE = [archives, pickles_in_archives, plain_pickles, metadata]


class Watch:
    """Notes whatever Python reports that it does for others, while it is on."""

    FORBIDDEN = ("import", "exec", "compile", "open", "os.system", "os.mkdir", "subprocess.Popen", "socket.connect")

    def __init__(self):
        self.on, self.seen = False, []
        sys.addaudithook(self.hear)

    def hear(self, event, _):
        if self.on and event in self.FORBIDDEN:
            self.seen.append(event)


_watch = functools.cache(Watch)  # once: there is no way to take a hook off


def run(sound, numbers, count, hostile):
    """Feeds `count` inputs; returns how many were refused."""
    watch = _watch()
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(count):
            data, read = hostile(sound, numbers)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                watch.on = True
                try:
                    read()
                except ShardoptError as error:
                    assert type(error) in (CorruptionError, FormatError), data
                    refused += 1
                finally:
                    watch.on = False
            used = tracemalloc.get_traced_memory()[1] - before
            assert used <= MEMORY_LIMIT_BYTES + MEMORY_PER_INPUT_BYTE * len(data), data
            assert not watch.seen, (watch.seen, data)
    finally:
        tracemalloc.stop()
    return refused


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda f: f.__name__)
def test_a_sample_of_hostile_inputs(sound, hostile):
    assert 50 < run(sound, random.Random(1), 250, hostile) <= 250


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda f: f.__name__)
def test_twenty_thousand_hostile_inputs(sound, hostile):
    assert run(sound, random.Random(100), 5000, hostile) > 1000
