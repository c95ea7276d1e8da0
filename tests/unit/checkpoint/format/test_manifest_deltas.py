"""Layouts with deltas: which are read, and which are refused."""

import json

import pytest

from shardopt.checkpoint.format import manifest as manifest_module
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import encode_manifest
from shardopt.errors import CorruptionError
from tests.unit.checkpoint.format.test_manifest import wire_of

ENTRY = [[0], [4], False]
TWO_BOXES = {"shape": [4], "cuts": [[0, 2, 4]], "files": [0, 0]}
HALVES = {"shape": [4], "cuts": [[0, 2, 4]], "files": [0, 1]}


def test_deltas_are_read_in_order_and_need_version_5():
    layout = {"shape": [4], "cuts": [[0, 4]], "files": [1], "entries": [[*ENTRY, [2, 0]]]}
    manifest = decode_manifest(wire_of(layout, 3), "m")
    (entry,) = manifest.tensors["x"].layout.entries
    assert entry.deltas == (2, 0) and manifest.tensors["x"].layout.size == 4
    body = json.loads(encode_manifest(manifest))
    assert body["layouts"] == [layout] and body["min_reader_version"] == 5
    of_rows = TWO_BOXES | {"entries": [[*ENTRY, [1]], [*ENTRY, [1]]]}  # rows of one box, whose deltas they share
    assert decode_manifest(wire_of(of_rows, 2), "m").tensors["x"].layout.entries[1].deltas == (1,)


@pytest.mark.parametrize(
    "layout",
    [
        {"shape": [4], "cuts": [[0, 4]], "files": [0], "entries": [[*ENTRY, wrong]]}
        for wrong in ([3], [1, 1], [-1], [1.0], [True], ["1"], 1, "12", None, [[1]], {"1": 2}, [2**64])
    ]
    + [
        {"shape": [4], "cuts": [[0, 4]], "files": [0], "entries": [[*ENTRY, [1], 7]]},
        {"shape": [4], "cuts": [[0, 4]], "files": [0], "entries": [[[0], [4], True, [1]]]},
        {"shape": [0], "boxes": [[[0], [0]]], "files": [0], "entries": [[[0], [0], False, [1]]]},
        HALVES | {"entries": [[[0], [2], False, [2]], [[2], [2], False, [2]]]},  # one key twice in a file
    ],
)
def test_deltas_that_cannot_be_are_refused(layout):
    with pytest.raises(CorruptionError):
        decode_manifest(wire_of(layout, 3), "m")


def test_deltas_count_to_the_limit_of_a_manifest(monkeypatch):
    layout = {"shape": [4], "cuts": [[0, 4]], "files": [0], "entries": [[*ENTRY, [1, 2]]]}
    for most, fits in ((8, True), (7, False)):
        monkeypatch.setattr(manifest_module, "MOST_OFFSETS", most)
        if fits:
            decode_manifest(wire_of(layout, 3), "m")
        else:
            with pytest.raises(CorruptionError):
                decode_manifest(wire_of(layout, 3), "m")
