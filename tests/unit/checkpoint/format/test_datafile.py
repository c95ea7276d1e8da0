"""A data file's header: safetensors' own, with our checksums; parsed as if an enemy had written it."""

import json
import struct
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as safetensors_load

from shardopt import checkpoint
from shardopt.checkpoint.format import data_file as datafile
from shardopt.checkpoint.format.constants import DTYPES, HEADER_LIMIT_BYTES, SEGMENT_BYTES, segment_count, stored_shape
from shardopt.checkpoint.format.data_file import build_header, header_length, parse_header
from shardopt.errors import CorruptionError, StateError
from shardopt.sharding.box import Box, whole

SIZES = st.lists(st.integers(0, 2**17), max_size=3).map(tuple)
MEMBERS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.sampled_from([DTYPES[name] for name in sorted(DTYPES)]),
        SIZES,
        st.integers(0, 2**40),
    ),
    max_size=6,
    unique_by=lambda member: member[0],
)


@given(MEMBERS)
def test_what_is_built_is_parsed(drawn):
    again = [(f"{key} elsewhere", dtype, sizes, offset + 1) for key, dtype, sizes, offset in drawn]
    members = [(key, dtype, Box((offset,) * len(sizes), sizes)) for key, dtype, sizes, offset in drawn + again]
    header = build_header("r00003-1", members)
    assert len(header) % 4096 == 0
    total = sum(prod(box.sizes) * dtype.itemsize for _, dtype, box in members)
    segments = sum(segment_count(prod(box.sizes) * dtype.itemsize) for _, dtype, box in members)
    file_bytes = len(header) + total + 8 * segments
    assert header_length(header[:8], file_bytes, "f") == len(header)
    entries = parse_header(header, file_bytes, "f")
    assert list(entries) == [*(key for key, _, _ in members), "__xxh3__.r00003-1"]
    begin, segment = len(header), 0
    for (_, dtype, box), entry in zip(members, entries.values(), strict=False):
        nbytes = prod(box.sizes) * dtype.itemsize
        assert (entry.begin, entry.end, entry.segment) == (begin, begin + nbytes, segment)
        assert (entry.dtype, entry.shape) == (dtype.safetensors or "U8", tuple(stored_shape(dtype, box.sizes)))
        begin, segment = entry.end, segment + segment_count(nbytes)
    assert entries["__xxh3__.r00003-1"].begin == begin and entries["__xxh3__.r00003-1"].segment == segment
    notes = json.loads(header[8:])["__metadata__"]
    offsets = json.loads(notes["DCP_SHARDING_INFO"])
    assert all(len(offsets[key]["saved_offsets"]) == len(entry.shape) for key, entry in entries.items())
    assert all(offsets[key]["saved_offsets"][: len(box.offsets)] == [*box.offsets] for key, _, box in members)
    text = header[8:].decode().rstrip()
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "c"
    big = torch.arange(SEGMENT_BYTES // 4 + 7, dtype=torch.float32)
    checkpoint.save(
        path, {"big": big, "b": torch.tensor([True]), "c": torch.zeros(0, 3), "z": torch.ones(2, dtype=torch.cfloat)}
    )
    (data_file,) = path.glob("*.safetensors")
    return data_file.read_bytes()


def parse(data):
    length = header_length(data[:8], len(data), "here")
    return parse_header(data[:length], len(data), "here")


def test_safetensors_reads_it(file):
    tensors = safetensors_load(file)
    assert set(tensors) == {"big", "b", "c", "z", "__xxh3__.r00000"} == set(parse(file))
    assert torch.equal(tensors["big"], torch.arange(SEGMENT_BYTES // 4 + 7, dtype=torch.float32))
    assert [entry.segment for entry in parse(file).values()] == [0, 1, 3, 3, 4]


def test_every_truncation_is_found(file):
    length = header_length(file[:8], len(file), "here")
    for size in [*range(0, length + 64), *range(length + 64, len(file), 4099), len(file) - 1]:
        with pytest.raises(CorruptionError, match="here: found"):
            parse(file[:size])
    with pytest.raises(CorruptionError):
        parse(file + b"\0")


def test_a_flipped_bit_of_the_header_is_parsed_or_refused(file):
    """Whether it is what was written is for the digest in the manifest to say."""
    length = len(json.loads(file[8 : header_length(file[:8], len(file), "here")].decode())) and file.index(b" ", 8)
    for at in range(length):
        for bit in range(8):
            changed = bytearray(file)
            changed[at] ^= 1 << bit
            try:
                parse(bytes(changed))
            except CorruptionError as error:
                assert "here: found" in str(error)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, HEADER_LIMIT_BYTES + 1, 1 << 40])
def test_no_header_is_read_that_is_longer_than_the_file_or_the_limit(length):
    with pytest.raises(CorruptionError, match="a header of"):
        header_length(struct.pack("<Q", length), 1 << 50, "here")


def header_of(table):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text


SOUND = {
    "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]},
    "__xxh3__.r0": {"dtype": "U8", "shape": [16], "data_offsets": [16, 32]},
}


def changed(key, **members):
    return SOUND | {key: SOUND[key] | members}


DEEP = json.loads("[" * 900 + "]" * 900)
HOSTILE = {
    "gap": changed("b", data_offsets=[9, 16]),
    "overlap": changed("b", data_offsets=[7, 16]),
    "same place": changed("b", data_offsets=[0, 8]),
    "backwards": changed("b", data_offsets=[8, 0]),
    "negative": changed("a", data_offsets=[-8, 8]),
    "huge": changed("b", data_offsets=[8, 2**63]),
    "beyond": changed("__xxh3__.r0", data_offsets=[16, 2**62]),
    "floats": changed("b", data_offsets=[8.0, 16.0]),
    "bools": changed("a", data_offsets=[False, 8]),
    "texts": changed("a", data_offsets="08"),
    "a dict": changed("a", data_offsets={"0": 1, "1": 2}),
    "three": changed("a", data_offsets=[0, 8, 16]),
    "no offsets": SOUND | {"a": {"dtype": "U8", "shape": [8]}},
    "no dict": SOUND | {"a": 3},
    "none": SOUND | {"a": None},
    "negative size": changed("a", shape=[-8]),
    "huge size": changed("a", shape=[2**64]),
    "text size": changed("a", shape="8"),
    "no shape": changed("a", shape=None),
    "no dtype": changed("a", dtype=None),
    "list dtype": changed("a", dtype=["U8"]),
    "deep dtype": changed("a", dtype=DEEP),
    "deep shape": changed("a", shape=DEEP),
    "deep offsets": changed("a", data_offsets=[DEEP, DEEP]),
    "no checksums": {key: SOUND[key] for key in ("a", "b")},
    "checksums not last": {
        "__xxh3__.r0": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
        "a": {"dtype": "U8", "shape": [16], "data_offsets": [16, 32]},
    },
    "checksums too short": changed("__xxh3__.r0", data_offsets=[16, 24]),
    "empty": {},
    "a list": [],
    "deep": b"[" * 100_000,
    "twice": b'{"a":1,"a":1}',
    "utf-16": json.dumps(SOUND).encode("utf-16"),
    "no utf-8": b'{"a\xff":1}',
    "surrogates": b'{"a\xed\xa0\x80":1}',
    "nan": b'{"a":NaN}',
    "torn": b'{"a":',
}  # fmt: skip


def test_a_sound_table_is_read():
    header = header_of(SOUND)
    assert list(parse_header(header, len(header) + 32, "here")) == list(SOUND)


@pytest.mark.parametrize("table", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_table_is_refused(table):
    header = header_of(table)
    with pytest.raises(CorruptionError, match="here: found") as caught:
        parse_header(header, len(header) + 32, "here")
    assert len(str(caught.value)) < 1000


def test_a_header_over_the_limit_is_not_written(monkeypatch):
    monkeypatch.setattr(datafile, "HEADER_LIMIT_BYTES", 8191)
    build_header("r00000", [("a", DTYPES["int8"], whole((3,)))])
    with pytest.raises(StateError, match="have fewer tensors"):
        build_header("r00000", [("a" * 5000, DTYPES["int8"], whole((3,)))])
