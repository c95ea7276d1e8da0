"""Small checkpoints, of every format, that stand for something huge, slow or odd; each is written into a directory."""

import json
import pickle
import struct
import warnings

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardopt import checkpoint
from tests.support.torch_files import saved


def seal(text):
    return text + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}'


def own(path, change):
    """A checkpoint of our own, whose manifest `change` changes."""
    checkpoint.save(path, {"a": torch.zeros(3), "n": 1})
    tree = json.loads((path / "manifest.json").read_bytes())
    del tree["xxh3"]
    change(tree)
    (path / "manifest.json").write_bytes(seal(json.dumps(tree, separators=(",", ":")).encode()[:-1]))


def safetensors(path, header, nbytes=0):
    """A file with this header, and so many bytes of zeros behind it."""
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))


def torch_file(path, state):
    (path / "model.pt").write_bytes(saved(state))


def dcp_value(path, value):
    """A value that DCP stores as one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.zeros(3), "v": value}, checkpoint_id=path, no_dist=True)


def dcp_tensors(path, tensors):
    """Metadata of tensors, by key: shape, and list of (offsets, sizes); all in one file, which is empty."""
    entries, places = {}, {}
    for key, (shape, chunks) in tensors.items():
        entries[key] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
        for chunk in chunks:
            if chunk.sizes.numel():
                places[MetadataIndex(key, chunk.offsets)] = _StorageInfo("__0_0.distcp", 0, 0)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    (path / "__0_0.distcp").write_bytes(b"")


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def doubled(value, times):
    """A list in which a value stands 2 ** times times, by few references."""
    for _ in range(times):
        value = [value, value]
    return value


def pinwheel(levels):
    """The size of a square, and boxes that make it up: four around a square, which is cut so again."""
    boxes, size = [], 2 * levels + 1
    for i in range(levels):
        edge = size - 2 * i - 1
        near, far = i, size - 1 - i
        boxes += [((near, near), (edge, 1)), ((far, near), (1, edge))]
        boxes += [((near + 1, far), (edge, 1)), ((near, near + 1), (1, edge))]
    return size, [*boxes, ((levels, levels), (1, 1))]


def dict_collisions(count):
    """Ints that a dict of CPython finds one after the other in the same places.

    Half of them fill a run of the places that follow one another by its rule, the others come upon its beginning.
    """
    size = 1 << max((2 * count - 1).bit_length(), 3)
    run, at = [], 1
    for _ in range(count - count // 16):
        run.append(at)
        at = (5 * at + 1) % size
    taken, late, number = {*run}, [], 0
    while len(late) < count // 16:
        number += 1
        candidate = run[0] + size * number  # probes with the bits above as well, for a while
        place, bits, fits = candidate % size, candidate, True
        while bits and fits:
            fits = place in taken
            bits >>= 5
            place = (5 * place + bits + 1) % size
        if fits:
            late.append(candidate)
    return run + late


EXPANDED = torch.zeros(1).expand(1 << 28)
SIZE, BOXES = pinwheel(750)
CHUNKS = [chunk((i,), (0,)) for i in range(10_000)]
HUGE = 10**5000 - 1  # more digits than Python makes a text of

CASES = {
    "torch: an option of stride 0": lambda path: torch_file(path, {"param_groups": [{"lr": EXPANDED}]}),
    "torch: a tensor of stride 0": lambda path: torch_file(path, {"a": EXPANDED}),
    "torch: rows of stride 0": lambda path: torch_file(path, {"a": torch.zeros(9).expand(1 << 15, 1 << 10, 9)}),
    "dcp: a value of stride 0": lambda path: dcp_value(path, ({"param_groups": (EXPANDED,)},)),
    "dcp: an option of stride 0": lambda path: dcp_value(path, {"param_groups": (EXPANDED, 1)}),
    "torch: a tensor doubled 18 times": lambda path: torch_file(path, {"a": doubled(torch.zeros(300), 18)}),
    "torch: an option doubled 18 times": lambda path: torch_file(path, {"param_groups": doubled(torch.zeros(300), 18)}),
    "dcp: a tensor doubled 18 times": lambda path: dcp_value(path, (doubled(torch.zeros(300), 18),)),
    "dcp: an option doubled 18 times": lambda path: dcp_value(path, {"param_groups": (doubled(torch.zeros(300), 18),)}),
    "torch: a number doubled 20 times": lambda path: torch_file(path, {"a": doubled(1, 19)}),
    "dcp: numbers doubled": lambda path: dcp_value(path, {f"n{i}": (doubled(1, 15),) for i in range(100)}),
    "dcp: 300 tensors with 10,000 chunks": lambda path: dcp_tensors(
        path, {f"t{i}": ((10_000,), CHUNKS) for i in range(300)}
    ),
    "own: 300 tensors with 10,000 boxes": lambda path: own(path, many_boxes),
    "safetensors: 50,000 dimensions": lambda path: safetensors(
        path, {"a": {"dtype": "F32", "shape": [1] * 50_000, "data_offsets": [0, 4]}}, 4
    ),
    "safetensors: 50,000 dimensions of a box": lambda path: safetensors(
        path,
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0] * 50_000}})},
        },
        4,
    ),
    "own: 50,000 dimensions in a value": lambda path: own(
        path, lambda tree: tree["values"].update(n=[None, {"tensor": ["float32", [1] * 50_000, "AAAAAA=="]}])
    ),
    "own: nested pinwheels": lambda path: own(path, pinwheels),
    "dcp: nested pinwheels": lambda path: dcp_tensors(path, {"a": ((SIZE, SIZE), [chunk(*box) for box in BOXES])}),
    "dcp: nested pinwheels that overlap": lambda path: dcp_tensors(
        path, {"a": ((SIZE, SIZE), [*(chunk(*box) for box in BOXES[:-2]), chunk((0, 1), (1, 1))])}
    ),
    "torch: keys along the probe sequence": lambda path: torch_file(
        path, {"a": dict.fromkeys(dict_collisions(40_000))}
    ),
    "dcp: keys along the probe sequence": lambda path: dcp_value(path, ({7: dict.fromkeys(dict_collisions(40_000))},)),
    "own: keys along the probe sequence": lambda path: own(
        path,
        lambda tree: tree["values"].update(n=[None, {"dict": [[key, 0] for key in dict_collisions(40_000)]}]),
    ),
    "torch: a set along the probe sequence": lambda path: torch_file(path, {"a": {*dict_collisions(40_000)}}),
    "safetensors: sizes that overflow": lambda path: safetensors(
        path, {"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}
    ),
    "dcp: sizes that overflow": lambda path: dcp_tensors(path, {"a": ((0, 2**62, 2**62), [])}),
    "own: sizes that overflow": lambda path: own(path, overflow),
    "own: sizes that overflow in a value": lambda path: own(
        path, lambda tree: tree["values"].update(n=[None, {"tensor": ["float32", [0, 2**62, 2**62], ""]}])
    ),
    "own: an array whose sizes overflow": lambda path: own(
        path, lambda tree: tree["values"].update(n=[None, {"numpy": ["<f4", [0, 2**62, 2**62], ""]}])
    ),
    "torch: an int of 5,000 digits": lambda path: torch_file(path, {"a": torch.zeros(3), "n": HUGE}),
    "dcp: an int of 5,000 digits": lambda path: dcp_value(path, HUGE),
    "own: an int of 5,000 digits": lambda path: own(
        path, lambda tree: tree["values"].update(n=[None, {"int": hex(HUGE)}])
    ),
    "own: a bare int of 5,000 digits": lambda path: own_text(path, b'"n":[null,1', b'"n":[null,' + b"7" * 5000),
    "safetensors: an int of 5,000 digits": lambda path: safetensors_text(
        path, b'{"a":{"dtype":"F32","shape":[' + b"7" * 5000 + b'],"data_offsets":[0,0]}}'
    ),
}


def own_text(path, old, new):
    checkpoint.save(path, {"a": torch.zeros(3), "n": 1})
    text = (path / "manifest.json").read_bytes()
    assert old in text
    (path / "manifest.json").write_bytes(seal(text[: text.rindex(b',"xxh3"')].replace(old, new)))


def safetensors_text(path, text):
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def many_boxes(tree):
    name, _, digest = tree["files"][0]
    stem = name.split("-")[0]
    tree["files"] = [[f"{stem}-r{i:05d}.safetensors", 9, digest] for i in range(10_000)]
    tree["layouts"] = [{"shape": [10_000], "cuts": [[*range(10_001)]], "files": [*range(10_000)]}]
    tree["tensors"] = {f"t{i}": ["float32", 0, None] for i in range(300)}


def pinwheels(tree):
    name, _, digest = tree["files"][0]
    stem = name.split("-")[0]
    tree["files"] = [[f"{stem}-r{i:05d}.safetensors", 9, digest] for i in range(len(BOXES))]
    tree["layouts"] = [{"shape": [SIZE, SIZE], "boxes": BOXES, "files": [*range(len(BOXES))]}]


def overflow(tree):
    tree["layouts"] = [{"shape": [0, 2**62, 2**62], "boxes": [], "files": []}]
