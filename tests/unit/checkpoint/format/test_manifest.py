"""The manifest: what is written is what is read, and what was not written is refused with our error."""

import json
import math
import tracemalloc
from collections import Counter

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardopt.checkpoint.format import constants as format_module
from shardopt.checkpoint.format import decoding as decoding_module
from shardopt.checkpoint.format import manifest as manifest_module
from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import (
    DataFile,
    Manifest,
    StoredLayout,
    StoredTensor,
    StoredTensors,
    encode_manifest,
)
from shardopt.checkpoint.format.values import decode_path, encode_path
from shardopt.errors import CorruptionError, FormatError, ShardoptError, StateError
from shardopt.sharding.box import Box, grid_boxes
from shardopt.state.paths import Index, join
from tests.support.boxes import partitions

PARTS = st.text(max_size=3) | st.integers(0, 3) | st.integers(0, 3).map(Index)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(tuple)
VALUES = st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary(max_size=3)


@st.composite
def manifests(draw):
    layouts = []
    parts = [draw(partitions()) for _ in range(draw(st.integers(1, 3)))]
    count = draw(st.integers(0, 2)) + max(len(boxes) for _, boxes in parts)
    files = tuple(DataFile(f"0a-r{i:05d}.safetensors", 100 + i, f"{i:016x}") for i in range(count))
    for shape, boxes in parts:
        where = draw(st.permutations(range(count)))[: len(boxes)]
        layouts.append(StoredLayout(tuple(shape), tuple(boxes), tuple(where)))
    tensors, values, per_rank = StoredTensors(), {}, {}
    for path in draw(st.lists(PATHS, max_size=6, unique_by=join)):
        kind = draw(st.integers(0, 2))
        if kind == 0:
            dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
            tensors[join(path)] = StoredTensor(path, dtype, draw(st.sampled_from(layouts)))
        elif kind == 1:
            values[join(path)] = (path, draw(VALUES))
        else:
            per_rank[join(path)] = path
    stored = sorted(tensors)
    for path in draw(st.lists(PATHS, max_size=2, unique_by=join)) if stored else ():
        if join(path) not in {*tensors, *values, *per_rank}:
            first = draw(st.sampled_from(stored))
            tensors[join(path)] = tensors[first]._replace(path=path, tied_to=first)
    saved_at = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    metrics = draw(st.none() | st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3))
    seconds = draw(st.none() | st.floats(allow_nan=False, allow_infinity=False))
    writer = draw(st.none() | st.just("shardopt 0.1.0"))
    noted = {"written_by": writer, "frozen": draw(st.none() | st.lists(st.text(max_size=3), max_size=2).map(tuple))}
    layers = st.dictionaries(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=2).map(tuple), max_size=2)
    noted["in_eval"] = draw(st.none() | layers)
    return Manifest("0a", len(files), files, tensors, values, per_rank, saved_at, metrics, seconds, **noted)


def plain(manifest):
    """The manifest in terms that can be compared, kinds of parts included."""
    tensors = {
        key: (path, [type(part) for part in path], dtype, layout.shape, layout.boxes, layout.files, tied_to)
        for key, (path, dtype, layout, tied_to, _) in manifest.tensors.items()
    }
    values = {key: (path, [type(part) for part in path], value) for key, (path, value) in manifest.values.items()}
    beside = (
        manifest.saved_at,
        manifest.metrics,
        manifest.seconds,
        manifest.written_by,
        manifest.frozen,
        manifest.in_eval,
    )
    return manifest.save_id, manifest.world_size, manifest.files, tensors, values, dict(manifest.per_rank), beside


@given(manifests())
def test_what_is_written_is_read(manifest):
    try:
        data = encode_manifest(manifest)
    except StateError:  # a text that is no Unicode, as a value
        return
    assert plain(decode_manifest(data, "m")) == plain(manifest)
    body = json.loads(data)
    ties = any(tensor.tied_to is not None for tensor in manifest.tensors.values())
    refers = any(file.directory for file in manifest.files)
    assert (body["version"], body["min_reader_version"]) == (5, 4 if refers else 2 if ties else 1)
    assert ("tied" in body) == ties


def test_text_beyond_the_basic_plane_comes_back():
    manifest = Manifest(
        "0a", 1, (), StoredTensors(), {"\N{GRINNING FACE}": (("\N{GRINNING FACE}",), "\U0010ffff\ud7ff\ue000")}
    )
    assert plain(decode_manifest(encode_manifest(manifest), "m")) == plain(manifest)


@given(PATHS)
def test_paths_come_back_with_their_kinds(path):
    wire = json.loads(json.dumps(encode_path(join(path), path)))
    back = decode_path(join(path), wire)
    assert back == path and [type(part) for part in back] == [type(part) for part in path]


def test_a_layout_of_many_boxes_is_as_small_as_its_edges():
    boxes = grid_boxes([range(0, 513, 1), range(0, 9, 1)])
    files = tuple(DataFile(f"0a-r{i:05d}.safetensors", 1, "0" * 16) for i in range(4096))
    layout = StoredLayout((512, 8), boxes, tuple(range(4096)))
    tensors = StoredTensors(
        (f"layer.{i}", StoredTensor(("layer", str(i)), DTYPES["float32"], layout)) for i in range(50)
    )
    assert len(json.dumps(json.loads(encode_manifest(Manifest("0a", 4096, files, tensors)))["layouts"])) < 40_000


def wire_of(layout, files):
    body = {"format": "shardopt", "version": 3, "min_reader_version": 1, "save_id": "0a", "world_size": 1}
    body |= {"files": [[f"0a-r{i:05d}.safetensors", 1, "0" * 16] for i in range(files)], "layouts": [layout]}
    return sealed(body | {"tensors": {"x": ["float32", 0, None]}, "values": {}, "per_rank": {}})


@pytest.mark.parametrize(
    ("layout", "files", "said"),
    [
        pytest.param(
            {"shape": [3000, 3000], "cuts": [[*range(3001)]] * 2, "files": [0] * 9_000_000},
            1,
            "27000000 offsets",
            marks=pytest.mark.exhaustive,
        ),
        (
            {"shape": [530, 530] + [1] * 58, "cuts": [[*range(531)]] * 2 + [[0, 1]] * 58, "files": [0] * 280_900},
            1,
            "17134900 offsets",
        ),
        ({"shape": [3], "cuts": [[0, 1, 2, 3]], "files": [0, 1, 0]}, 2, "two boxes of a tensor in one file"),
        ({"shape": [3], "boxes": [[[0], [1]], [[1], [2]]], "files": [1, 1]}, 2, "two boxes of a tensor in one file"),
        ({"shape": [3], "cuts": [[0, 1, 1, 3]], "files": [0, 1, 2]}, 3, "cells of nothing"),
        ({"shape": [3], "cuts": [[0, 2, 1, 3]], "files": [0, 1, 2]}, 3, "cells of nothing"),
        ({"shape": [1] * 65, "cuts": [[0, 1]] * 65, "files": [0]}, 1, "a layout of 65 dimensions"),
        ({"shape": [9000] + [1] * 63, "cuts": [[*range(9001)]] + [[0, 1]] * 63, "files": [0] * 9000}, 1, "two boxes"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_would_become_more_than_one_has_is_refused_before_it_does(layout, files, said):
    data = wire_of(layout, files)
    tracemalloc.start()
    with pytest.raises(CorruptionError, match=said):
        decode_manifest(data, "m")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(data) + (1 << 20)  # what JSON takes


def test_what_no_reader_would_take_is_not_written(monkeypatch):
    layout = StoredLayout((1,) * 65, (Box((0,) * 65, (1,) * 65),), (0,))
    tensors = StoredTensors({"x": StoredTensor(("x",), DTYPES["float32"], layout)})
    with pytest.raises(StateError, match="65 dimensions, more than the limit of 64"):
        encode_manifest(Manifest("0a", 1, (DataFile("0a-r00000.safetensors", 1, "0"),), tensors))
    monkeypatch.setattr(manifest_module, "MOST_OFFSETS", 7)
    grid = StoredLayout((4,), grid_boxes([(0, 1, 2, 3, 4)]), (0, 1, 2, 3))
    with pytest.raises(StateError, match="8 offsets of boxes, more than the limit of 7"):
        encode_manifest(Manifest("0a", 1, (), StoredTensors({"x": StoredTensor(("x",), DTYPES["float32"], grid)})))


@pytest.fixture(scope="module")
def sound():
    files = (DataFile("0a-r00000.safetensors", 9000, "0" * 16), DataFile("0a-r00001-1.safetensors", 9000, "1" * 16))
    grid = StoredLayout((4, 2), grid_boxes([(0, 3, 4), (0, 2)]), (0, 1))
    odd = StoredLayout((3,), (Box((0,), (2,)), Box((2,), (1,))), (1, 0))
    tensors = StoredTensors(
        {
            "a.b": StoredTensor(("a", "b"), DTYPES["float32"], grid),
            "l.0": StoredTensor(("l", Index(0)), DTYPES["bool"], odd),
            "t.0": StoredTensor(("t", "0"), DTYPES["float32"], grid, "a.b"),
        }
    )
    values = {"v.x": (("v", "x"), [1, (2**60, Counter("a"), float("inf"))])}
    metrics = {"loss": 0.5, "worst": float("inf")}
    return encode_manifest(Manifest("0a", 2, files, tensors, values, {"rng": ("rng",)}, 1.5e9, metrics, 2.5))


def test_every_truncation_is_found(sound):
    for length in range(len(sound)):
        with pytest.raises(CorruptionError, match="torn or changed"):
            decode_manifest(sound[:length], "here/manifest.json")


def test_every_flipped_bit_is_found(sound):
    for at in range(len(sound)):
        for bit in range(8):
            changed = bytearray(sound)
            changed[at] ^= 1 << bit
            with pytest.raises(CorruptionError, match=r"here/manifest\.json: found"):
                decode_manifest(bytes(changed), "here/manifest.json")


def test_what_comes_behind_the_seal_is_found(sound):
    with pytest.raises(CorruptionError):
        decode_manifest(sound + b" ", "m")
    with pytest.raises(CorruptionError):
        decode_manifest(sound + sound, "m")


def sealed(body):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()[:-1]
    return text + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}'


def nested(levels, inside="1"):
    return json.loads("[" * levels + inside + "]" * levels)


ODD = [
    None,
    True,
    -1,
    1.5,
    math.inf,
    math.nan,
    2**63,
    2**80,
    "x",
    "\ud800",
    [],
    {},
    [None],
    {"x": 1},
    nested(60),
    nested(900),
]
PLACES = [
    *(("save_id",), ("world_size",), ("files",), ("layouts",), ("tensors",), ("values",), ("per_rank",)),
    *(("files", 0), ("files", 0, 0), ("files", 0, 1), ("files", 0, 2), ("layouts", 0), ("layouts", 1)),
    *(("layouts", 0, name) for name in ("shape", "cuts", "files")),
    *(("layouts", 1, name) for name in ("shape", "cuts", "files")),
    *(("layouts", 0, "cuts", 0), ("layouts", 0, "cuts", 0, 1), ("layouts", 0, "shape", 0), ("layouts", 0, "files", 0)),
    *(
        ("tensors", "a.b"),
        ("tensors", "a.b", 0),
        ("tensors", "a.b", 1),
        ("tensors", "l.0", 2),
        ("tensors", "l.0", 2, 1),
    ),
    *(("values", "v.x"), ("values", "v.x", 0), ("values", "v.x", 1), ("values", "v.x", 1, 1), ("per_rank", "rng")),
    *(("tied",), ("tied", "t.0"), ("tied", "t.0", 0), ("tied", "t.0", 1)),
    ("min_reader_version",),
    ("format",),
    *(
        ("saved_at",),
        ("seconds",),
        ("metrics",),
        ("metrics", "loss"),
        ("metrics", "worst"),
        ("metrics", "worst", "float"),
    ),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_odd_values_anywhere_are_read_or_refused(sound, place):
    for odd in ODD:
        body = json.loads(sound)
        del body["xxh3"]
        node = body
        for part in place[:-1]:
            node = node[part]
        node[place[-1]] = odd
        try:
            decode_manifest(sealed(body), "m")
        except ShardoptError as error:
            assert len(str(error)) < 2000


@pytest.mark.parametrize(
    "name",
    [
        *("../0a-r00000.safetensors", "/0a-r00000.safetensors", "a/0a-r00000.safetensors", "..\\0a-r00000.safetensors"),
        *(
            "0a-r00000.safetensors\0",
            "0a-r00000.safetensors/..",
            "0a-r00000",
            "manifest.json",
            "",
            ".",
            "C:0a.safetensors",
        ),
        *(
            "0a-r00000.safetensors?x",
            "0a-r*.safetensors",
            "\ud800-r00000.safetensors",
            "a" * 300 + "-r00000.safetensors",
        ),
        *(
            "0a-r00000.safetensors\n",
            "0a-r" + "\N{ARABIC-INDIC DIGIT ZERO}" * 5 + ".safetensors",
            "0a-r00000-0.safetensors",
            "0a-r00001-1.safetensors",
        ),
    ],
)
def test_only_names_of_data_files_are_names(sound, name):
    """No file outside the directory, nor one of another kind, is ever opened because a manifest names it."""
    body = json.loads(sound)
    del body["xxh3"]
    body["files"][0][0] = name
    with pytest.raises(CorruptionError):
        decode_manifest(sealed(body), "m")


@pytest.mark.parametrize(
    "text",
    [
        b'{"format":"shardopt","format":"shardopt","min_reader_version":1',
        b'{"format":"shardopt","min_reader_version":1,"files":[],"layouts":[],"tensors":{"a":1,"a":1}',
        '{"format":"shardopt"'.encode("utf-16"),
        b'{"format":"\xff"',
        b'{"format":"\xed\xa0\x80"',
        rb'{"format":"\ud800"',
        rb'{"format":"shardopt","min_reader_version":1,"tensors":{"\uDFFF":1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"9" * 5000,
        b"{",
        b"",
        b"[1",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_no_plain_json_object_is_refused(text):
    with pytest.raises(CorruptionError):
        decode_manifest(sealed(text), "m")


def test_other_formats_and_newer_ones_are_told_apart_from_damage(sound):
    for change, said in (
        ({"format": "other"}, "is not a manifest"),
        ({"min_reader_version": 6}, "needs a newer reader"),
        ({"min_reader_version": None}, "is not a manifest"),
    ):
        body = json.loads(sound) | change
        del body["xxh3"]
        with pytest.raises(FormatError, match=said):
            decode_manifest(sealed(body), "m")
    body = json.loads(sound) | {"min_reader_version": 6, "written_by": "shardopt 9.0.0"}
    del body["xxh3"]
    with pytest.raises(FormatError, match=r"version 6, written by shardopt 9\.0\.0; required at most 5, which"):
        decode_manifest(sealed(body), "m")
    body = json.loads(sound) | {"version": 7, "new": {"x": [1]}}
    del body["xxh3"]
    assert decode_manifest(sealed(body), "m").save_id == "0a"


def test_a_reader_of_version_1_refuses_what_it_would_miss(sound, monkeypatch):
    body = json.loads(sound)
    del body["xxh3"]
    without = sealed({key: value for key, value in body.items() if key != "tied"} | {"min_reader_version": 1})
    monkeypatch.setattr(decoding_module, "FORMAT_VERSION", 1)
    assert decode_manifest(without, "m").save_id == "0a"
    with pytest.raises(FormatError, match=r"version 2; required at most 1, which shardopt .* reads; install"):
        decode_manifest(sound, "m")


@pytest.mark.parametrize(
    "tied",
    [
        {"x": ["none", None]},
        {"x": ["t.0", None], "t.0": ["a.b", None]},
        {"a.b": ["l.0", None]},
        {"v.x": ["a.b", None]},
        {"rng": ["a.b", None]},
        {"x": ["x", None]},
        {"x": [["a.b"], None]},
        {"x": ["a.b", ["y"]]},
        {"x": ["a.b"]},
        ["a.b"],
    ],
    ids=str,
)
def test_ties_that_cannot_be_are_refused(sound, tied):
    body = json.loads(sound) | {"tied": tied}
    del body["xxh3"]
    with pytest.raises(CorruptionError):
        decode_manifest(sealed(body), "m")


def test_a_manifest_over_the_limit_is_neither_written_nor_read(monkeypatch):
    manifest = Manifest("0a", 1, (), StoredTensors(), {"big": (("big",), b"x" * 3000)})
    data = encode_manifest(manifest)
    for module in (format_module, manifest_module, decoding_module):
        monkeypatch.setattr(module, "MANIFEST_LIMIT_BYTES", 2000)
    with pytest.raises(StateError, match="store large values as tensors"):
        encode_manifest(manifest)
    with pytest.raises(CorruptionError, match="more than the limit"):
        decode_manifest(data, "m")
