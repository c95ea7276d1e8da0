"""Distributed checkpoints of torch are read without running a pickle, and refused by name where they are crafted."""

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardopt import checkpoint
from shardopt.checkpoint.sources.pickled.dcp_metadata import DcpEntry, read_metadata
from shardopt.errors import CorruptionError, FormatError, ShardoptError
from shardopt.sharding.box import cover_faults
from shardopt.state.values import encode_value
from tests.golden.dcp_state import DTYPES, KINDS, VALUES, filled, whole
from tests.support.torch_files import read_dcp

GOLDEN = Path(__file__).parents[3] / "golden" / "dcp"
OLDER = sorted(GOLDEN.parent.glob("dcp_of_torch_*"))
FOLDERS = sorted(folder for each in (GOLDEN, *OLDER) for folder in each.iterdir())


def same(loaded, tensor):
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
    left, right = (each.reshape(-1).contiguous().view(torch.uint8) for each in (loaded, tensor))
    assert torch.equal(left, right)


@pytest.mark.parametrize("golden", [GOLDEN, *OLDER], ids=lambda golden: golden.name)
def test_every_kind_of_tensor_and_value(golden):
    state = read_dcp(golden / "kinds")
    for name in (*DTYPES, *KINDS):
        same(state.pop("nested.0" if name == "listed" else f"tensors.{name}"), whole(name))
    prefix = "nested.1.values."
    flat = {key: value for key, value in VALUES.items() if key != "dict"} | {"dict.a.b": True}
    assert {key.removeprefix(prefix): encode_value(value) for key, value in state.items()} == {
        key: encode_value(value) for key, value in flat.items()
    }


PARAMETERS = {"0.weight": (6, 4), "0.bias": (6,)}


@pytest.mark.parametrize(
    "folder", [folder for folder in FOLDERS if folder.name != "kinds"], ids=lambda f: f"{f.parent.name}-{f.name}"
)
def test_states_of_adamw(folder):
    state = read_dcp(folder)
    for name, shape in PARAMETERS.items():
        same(state.pop(f"model.{name}"), filled(name, shape, torch.float32))
        for entry, size in {"step": (), "exp_avg": shape, "exp_avg_sq": shape}.items():
            key = f"state.{name}.{entry}"
            same(state.pop(f"optim.{key}"), filled(key, size, torch.float32))
    if folder.name == "adamw_flat":
        assert all(state[f"optim.param_groups.{name}.lr"] == 0.125 for name in PARAMETERS)
    else:
        assert state["optim.param_groups.0.lr"] == 0.125
        assert state["optim.param_groups.0.params"] == list(PARAMETERS)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_as_torch_reads_it(folder):
    theirs = FileSystemReader(folder).read_metadata()
    metadata = read_metadata((folder / ".metadata").read_bytes(), "w")
    assert metadata.unsupported == {} and metadata.paths == theirs.planner_data
    assert {*metadata.tensors, *metadata.values} == set(theirs.state_dict_metadata)
    for key, tensor in metadata.tensors.items():
        properties = theirs.state_dict_metadata[key]
        assert (tensor.shape, f"torch.{tensor.dtype.name}") == (
            tuple(properties.size),
            str(properties.properties.dtype),
        )
        assert not cover_faults(tensor.shape, [chunk.box for chunk in tensor.chunks])
        for chunk in tensor.chunks:
            info = theirs.storage_data[MetadataIndex(key, chunk.box.offsets)]
            assert (chunk.file, chunk.offset, chunk.length) == (info.relative_path, info.offset, info.length)
    for key, entry in metadata.values.items():
        info = theirs.storage_data[MetadataIndex(key)]
        assert entry == DcpEntry(info.relative_path, info.offset, info.length)


@pytest.mark.parametrize("golden", [GOLDEN, *OLDER], ids=lambda golden: golden.name)
def test_what_any_version_has_written_is_loaded(golden):
    tensors = {name: torch.zeros_like(whole(name)) for name in (*DTYPES, *KINDS) if name != "listed"}
    values = {name: type(value)() for name, value in VALUES.items() if name not in ("none", "dict")}
    values |= {"none": 1, "dict": {"a": {"b": False}}}
    app = {"tensors": tensors, "nested": [torch.zeros(4, dtype=torch.int64), {"values": values}]}
    checkpoint.load(golden / "kinds", app)
    for name, tensor in tensors.items():
        same(tensor, whole(name))
    same(app["nested"][0], whole("listed"))
    assert app["nested"][1]["values"] == VALUES
    assert checkpoint.verify(golden / "kinds").ok


def index(**changes):
    """Metadata of a tensor in two boxes and of a value, with changes."""
    made = {
        "dtype": torch.float32,
        "layout": torch.strided,
        "shape": (4, 3),
        "boxes": [((0, 0), (2, 3)), ((2, 0), (2, 3))],
        "file": "__0_0.distcp",
        "offset": 10,
        "length": 5,
        "descriptors": None,
        "paths": {"t": ("t",), "a.0": ("a", 0)},
        "more": {},
        "version": "1.0.0",
        "without": (),
    } | changes
    chunks = [ChunkStorageMetadata(size(offsets), size(sizes)) for offsets, sizes in made["boxes"]]
    properties = TensorProperties(dtype=made["dtype"], layout=made["layout"])
    info = _StorageInfo(made["file"], made["offset"], made["length"], made["descriptors"])
    places = {MetadataIndex("t", offsets, i): info for i, (offsets, _) in enumerate([((0, 0), 0), ((2, 0), 0)])}
    places[MetadataIndex("a.0")] = _StorageInfo("__1_0.distcp", 0, 7)
    state = {"t": TensorStorageMetadata(properties, size(made["shape"]), chunks), "a.0": BytesStorageMetadata()}
    metadata = Metadata(state, made["paths"], places, StorageMeta(Path("x/y"), "save"), made["version"])
    for name, value in made["more"].items():
        setattr(metadata, name, value)
    for name in made["without"]:
        delattr(metadata, name)
    return metadata


def size(numbers):
    return torch.Size(numbers) if all(type(n) is int and abs(n) < 2**63 for n in numbers) else list(numbers)


def read(metadata, protocol=4, replace=()):
    data = pickle.dumps(metadata, protocol)
    for old, new in replace:
        assert old in data
        data = data.replace(old, new)
    return read_metadata(data, "w")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_what_earlier_torch_leaves_out(protocol):
    expected = read_metadata(pickle.dumps(index()), "w")
    assert read(index(), protocol) == expected
    assert read(index(without=["version", "storage_meta"]), protocol) == expected
    assert read(index(more={"storage_meta": None, "version": None}), protocol) == expected
    assert read(index(paths=None), protocol).paths == {}


def test_what_other_versions_of_python_write():
    expected = read_metadata(pickle.dumps(index()), "w")
    names = {"pathlib", "pathlib._local"}  # the second is that of 3.13
    here = Path.__module__
    (there,) = names - {here}
    here, there = f"c{here}\n".encode(), f"c{there}\n".encode()
    assert read(index(), 2, [(here, there)]) == expected
    by_value = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    data = pickle.dumps(index(), 2)
    at = data.index(by_value)
    number = data.index(b"K\x00\x85", at)  # the argument
    named = data[at:number] + b"X\x17\x00\x00\x00TORCH_CONTIGUOUS_FORMAT\x86" + data[number + 3 :]
    assert read_metadata(data[:at] + b"c__builtin__\ngetattr\n" + named, "w") == expected


def test_what_is_not_read_is_named():
    assert read(index(dtype=torch.qint8)).unsupported == {"t": "dtype torch.qint8"}
    assert read(index(layout=torch.sparse_coo)).unsupported == {"t": "layout torch.sparse_coo"}
    assert read(index(descriptors=["zstd"])).unsupported == {"t": "its bytes went through zstd"}
    assert read(index(descriptors=[])).unsupported == {}
    assert read(index(dtype=torch.qint8)).values.keys() == {"a.0"}


def test_empty_boxes_have_no_place():
    metadata = read(index(boxes=[((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (0, 3)), ((4, 0), (0, 3))]))
    assert [chunk.box.offsets for chunk in metadata.tensors["t"].chunks] == [(0, 0), (2, 0)]


def shared_lists():
    node = ["x"]
    for _ in range(60):
        node = [node, node]
    return node


CRAFTED = {
    "another directory": {"file": "../secret"},
    "the root": {"file": "/etc/passwd"},
    "a folder": {"file": "a/b"},
    "a folder of Windows": {"file": "a\\b"},
    "a zero": {"file": "a\0b"},
    "no name": {"file": ""},
    "this folder": {"file": "."},
    "a name without end": {"file": "x" * 256},
    "no text": {"file": shared_lists()},
    "a negative offset": {"offset": -1},
    "a huge offset": {"offset": 2**63},
    "no offset": {"offset": shared_lists()},
    "true": {"offset": True},
    "a fraction": {"length": 0.5},
    "a negative length": {"length": -1},
    "a box beyond": {"boxes": [((0, 0), (2, 3)), ((2, 0), (3, 3))]},
    "a box before": {"boxes": [((-2, 0), (2, 3))]},
    "a box of other dimensions": {"boxes": [((0,), (2,))]},
    "a box without a place": {"boxes": [((1, 0), (1, 3))]},
    "a huge box": {"boxes": [((0, 0), (2**64, 3))]},
    "a negative shape": {"shape": (-4, 3)},
    "a huge shape": {"shape": (2**40, 2**40)},
    "many dimensions": {"shape": (1,) * 65, "boxes": []},
    "another path": {"paths": {"t": ("a", "t")}},
    "a path of nothing": {"paths": {"t": None}},
    "a path of lists": {"paths": {"t": (shared_lists(),)}},
    "paths that are a list": {"paths": [("t",)]},
    "a number as a key": {"more": {"state_dict_metadata": {1: BytesStorageMetadata()}}},
    "a value without a place": {"more": {"state_dict_metadata": {"b": BytesStorageMetadata()}}},
    "a number as an entry": {"more": {"state_dict_metadata": {"a.0": 1}}},
    "no places": {"more": {"storage_data": None}},
    "places by name": {"more": {"storage_data": {"t": _StorageInfo("x", 0, 1)}}},
    "no state": {"without": ["state_dict_metadata"]},
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_index_is_refused(name):
    with pytest.raises(CorruptionError, match="a checkpoint is damaged") as caught:
        read(index(**CRAFTED[name]))
    assert caught.value.problems[0].key == "w" and len(str(caught.value)) < 1000


def test_other_versions_and_classes_are_refused_by_name():
    with pytest.raises(FormatError, match=r"version '2\.0\.0'"):
        read(index(version="2.0.0"))
    for value, name in {
        print: "builtins.print",
        torch.nn.Linear: "torch.nn.modules.linear.Linear",
        complex(1): "builtins.complex",
    }.items():
        for more in ({"storage_meta": value}, {"planner_data": [value]}):
            with pytest.raises(FormatError, match=name):
                read(index(more=more))
    for root in (3, {}, BytesStorageMetadata(), [index()]):
        with pytest.raises(CorruptionError):
            read(root)
    with pytest.raises(CorruptionError):
        read_metadata(b"", "w")


def test_every_damage_is_an_error_or_other_metadata():
    data = pickle.dumps(index())
    refused = 0
    for place in range(len(data)):
        for changed in (data[:place], data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]):
            try:
                read_metadata(changed, "w")
            except ShardoptError as error:
                assert type(error) in (CorruptionError, FormatError)
                refused += 1
    assert refused > 1.5 * len(data)
