"""Checkpoints whose structure was changed: trees, opcodes, directories of archives and shapes, not bytes alone.

A format is a function of (random numbers, path) that writes a checkpoint there, from one that is sound.
"""

import copy
import functools
import json
import pickle
import pickletools
import struct
import tempfile
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash

from shardopt import checkpoint
from tests.hostile.small_files import chunk, dcp_tensors, pinwheel, safetensors, seal
from tests.hostile.test_fuzz_pickled import PIECES
from tests.support.torch_files import archive_of, saved

STATE = {
    "a": torch.arange(3.0),
    "t": torch.arange(20.0).reshape(5, 4).T,
    "n": 7,
    "param_groups": [{"lr": torch.tensor(0.1), "params": [0, 1], "betas": (0.9, 0.99)}],
    "cfg": {"a": [1, {"b": (2, None)}], "s": {1, 2}, "big": 2**70},
}
SIZES = [0, 1, 2, 3, 7, 64, 65, 2**16, 2**31, 2**32, 2**53, 2**58, 2**61 - 1, 2**62, 2**63 - 1, 2**63, 2**64, -1]
SHAPES = [[], [0], [1] * 64, [1] * 65, [1] * 9999, [0, 2**62, 2**62], [2**40, 2**40], [2**31] * 3, [3, 0, 3], [2**57]]
ODD = [
    *SIZES, *SHAPES, None, True, 0.5, float("inf"), "", "a", "x" * 300, "../a", "/etc/passwd", "\0", "ä\ud7ff", {},
    {"": 0}, [[]], {"int": "7" * 4000}, {"int": "0x" + "f" * 5000}, {"set": [[1], [1]]}, {"dict": [[0, 0]] * 3},
    {"tensor": ["float32", [2**62, 0], ""]}, {"numpy": ["<f8", [0, 2**62], ""]}, {"tuple": [{"float": "nan"}]},
    {"counter": [["a", {"dict": []}]]}, "float8_e4m3fn", "U8", "BF16",
]  # fmt: skip


@functools.cache
def sound():
    """The bytes of sound files, by format and name."""
    root = Path(tempfile.mkdtemp(prefix="sound-"))
    checkpoint.save(root / "own", {**STATE, "mine": checkpoint.PerRank([1])})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": STATE["a"], "v": (STATE["t"], {"x": 1}), "n": 7}, checkpoint_id=root / "dcp", no_dist=True)
    archive = saved(STATE)
    begin = archive.index(b"\x80\x02")
    found = {kind: {file.name: file.read_bytes() for file in (root / kind).iterdir()} for kind in ("own", "dcp")}
    return found | {"archive": archive, "pickle": archive[begin : archive.index(b".PK", begin) + 1]}


# Trees of JSON.


def places_in(tree):
    """Every (container, key) in a tree."""
    todo, places = [tree], []
    while todo:
        node = todo.pop()
        for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
            places.append((node, key))
            if isinstance(child, dict | list):
                todo.append(child)
    return places


def change_tree(tree, numbers):
    """Replaces, removes, grafts, repeats, nests, renames and reorders what is in a tree."""
    for _ in range(numbers.randint(1, 3)):
        places = places_in(tree)
        if not places:
            return
        container, key = numbers.choice(places)
        what = numbers.randrange(8)
        if what <= 1:
            container[key] = copy.deepcopy(numbers.choice(ODD))
        elif what == 2:
            del container[key]
        elif what == 3:
            other, at = numbers.choice(places)
            graft = copy.deepcopy(other[at])
            if len(json.dumps(graft)) < 20_000:
                container[key] = graft
        elif what == 4:
            container[key] = [container[key]] * numbers.choice([1, 2, 100])
        elif what == 5:
            for _ in range(numbers.choice([3, 70, 150])):
                container[key] = {"tuple": [container[key]]} if numbers.random() < 0.5 else [container[key]]
        elif what == 6 and isinstance(container, dict):
            container[str(numbers.choice(ODD))[:300]] = container.pop(key)
        elif isinstance(container, list):
            numbers.shuffle(container)


def as_json(tree):
    return json.dumps(tree, separators=(",", ":")).encode()


def own_manifest(numbers, path):
    files = dict(sound()["own"])
    tree = json.loads(files["manifest.json"])
    del tree["xxh3"]
    change_tree(tree, numbers)
    write(path, files | {"manifest.json": seal(as_json(tree)[:-1])})


def own_header(numbers, path):
    """With a manifest that vouches for it."""
    files = dict(sound()["own"])
    (name,) = (name for name in files if name.endswith(".safetensors"))
    length = struct.unpack("<Q", files[name][:8])[0]
    header, tree = json.loads(files[name][8 : 8 + length]), json.loads(files["manifest.json"])
    (begin, end) = next(each["data_offsets"] for key, each in header.items() if key.startswith("__xxh3__"))
    sums = files[name][8 + length + begin : 8 + length + end]
    change_tree(header, numbers)
    text = as_json(header)
    text = text.ljust(length) if numbers.random() < 0.7 else text
    files[name] = struct.pack("<Q", len(text)) + text + files[name][8 + length :]
    del tree["xxh3"]
    tree["files"][0][1:] = [len(files[name]), xxhash.xxh3_64_hexdigest(files[name][: 8 + len(text)] + sums)]
    write(path, files | {"manifest.json": seal(as_json(tree)[:-1])})


QUANTIZED = {
    "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
    "w.weight": {"dtype": "F8_E4M3", "shape": [3, 4], "data_offsets": [12, 24]},
    "w.weight_scale_inv": {"dtype": "F32", "shape": [2, 2], "data_offsets": [24, 40]},
    "e_blocks": {"dtype": "U8", "shape": [1, 2, 1, 16], "data_offsets": [40, 72]},
    "e_scales": {"dtype": "U8", "shape": [1, 2, 1], "data_offsets": [72, 74]},
}


def safetensors_folder(numbers, path):
    """Header, index, notes on boxes, and config, of which one or two are changed."""
    header, nbytes = copy.deepcopy(QUANTIZED), 74
    method = numbers.choice(["fp8", "mxfp4", "none"])
    quantization = {"quant_method": method, "weight_block_size": [2, 2]}
    config = {"torch_dtype": "bfloat16", "quantization_config": quantization} if method != "none" else {}
    index = {"weight_map": dict.fromkeys(header, "model.safetensors"), "metadata": {"total_size": nbytes}}
    notes = {"a": {"saved_offsets": [0]}, "w.weight": {"saved_offsets": [0, 0]}}
    for tree in numbers.sample([header, index, config, notes], numbers.randint(1, 2)):
        change_tree(tree, numbers)
    header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(notes)}
    safetensors(path, header, nbytes)
    write(path, {"config.json": as_json(config)})
    if numbers.random() < 0.5:
        write(path, {"model.safetensors.index.json": as_json(index)})


# Opcodes of pickles.


@functools.cache
def operations_of(data):
    """The bytes of each operation of a pickle."""
    starts = [at for _, _, at in pickletools.genops(data)]
    return [data[begin:end] for begin, end in zip(starts, [*starts[1:], len(data)], strict=True)]


def changed_pickle(data, numbers):
    """Operations left out, repeated, swapped, moved, put in, or given other arguments."""
    operations = list(operations_of(data))
    for _ in range(numbers.randint(1, 4)):
        at, what = numbers.randrange(1, len(operations) - 1), numbers.randrange(7)
        if what == 0:
            del operations[at]
        elif what == 1:
            end = min(at + numbers.randint(1, 20), len(operations) - 1)
            operations[at:at] = operations[at:end] * numbers.choice([1, 2, 200])
        elif what == 2:
            other = numbers.randrange(1, len(operations) - 1)
            operations[at], operations[other] = operations[other], operations[at]
        elif what == 3:
            operations[at:at] = [numbers.choice(PIECES) for _ in range(numbers.randint(1, 6))]
        elif what == 4:  # a list of what is on the stack, doubled
            operations[at:at] = [b"q\xfa", b"0", *[b"]q\xfb(h\xfah\xfaeq\xfa0"] * numbers.choice([2, 12, 22]), b"h\xfa"]
        elif what == 5:  # another number
            numbered = [i for i, each in enumerate(operations) if each[:1] in b"KMJ"]
            if numbered:
                number = numbers.choice(SIZES)
                operations[numbers.choice(numbered)] = b"\x8a\x0a" + number.to_bytes(10, "little", signed=True)
        else:
            operations[at : at + numbers.randint(2, 30)] = [b"N"]
        if len(operations) < 4:
            break
    return b"".join(operations)


def torch_pickle(numbers, path):
    storages = [STATE["a"].numpy().tobytes(), STATE["t"].T.numpy().tobytes(), bytes(4)]
    data = changed_pickle(sound()["pickle"], numbers)
    write(path, {"model.pt": archive_of(data, storages)})


def dcp_metadata(numbers, path):
    files = sound()["dcp"]
    write(path, files | {".metadata": changed_pickle(files[".metadata"], numbers)})


def dcp_value(numbers, path):
    """A value that was changed, at the end of a file, to which the metadata refers."""
    files = dict(sound()["dcp"])
    metadata = pickle.loads(files[".metadata"])
    (index,) = (index for index in metadata.storage_data if index.fqn == "v")
    place = metadata.storage_data[index]
    archive = archive_of(
        changed_pickle(sound()["pickle"], numbers), [STATE["a"].numpy().tobytes(), bytes(80), bytes(4)]
    )
    place.offset, place.length = len(files[place.relative_path]), len(archive)
    files[place.relative_path] += archive
    write(path, files | {".metadata": pickle.dumps(metadata)})


# Directories of archives.


def zip_directory(numbers, path):
    """Entries of the central directory, and the records at its end, with other numbers, names and orders."""
    data = bytearray(sound()["archive"])
    end = data.rindex(b"PK\x05\x06")
    entries, at = [], data.index(b"PK\x01\x02")
    begin = at
    while data[at : at + 4] == b"PK\x01\x02":
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        stop = at + 46 + name + extra + comment
        entries.append(data[at:stop])
        at = stop
    tail, counts = data[at:end], len(entries)
    for _ in range(numbers.randint(1, 3)):
        entry, what = numbers.choice(entries), numbers.randrange(7)
        if what == 0:
            offset, size = numbers.choice(
                [(8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (34, 2), (42, 4)]
            )
            number = numbers.choice(
                [0, 1, 2**16 - 1, 2**31, 2**32 - 1, numbers.getrandbits(16), numbers.getrandbits(9)]
            )
            entry[offset : offset + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        elif what == 1:
            entries.append(bytearray(entry))
        elif what == 2 and len(entries) > 1:
            entries.remove(entry)
        elif what == 3:
            numbers.shuffle(entries)
        elif what == 4:
            length = struct.unpack_from("<H", entry, 28)[0]
            other = numbers.choice(entries)[46:]
            entry[46 : 46 + length] = other[:length].ljust(length, b"/")
        elif what == 5:  # a number that is in a zip64 field
            entry[20:28] = b"\xff" * 8
            wide = struct.pack("<HHQQ", 1, 16, *(numbers.choice(SIZES[:-3]) for _ in range(2)))
            length = struct.unpack_from("<H", entry, 28)[0]
            entry[30:32] = struct.pack("<H", len(wide))
            entry[46 + length :] = wide
        else:
            entries *= numbers.choice([2, 3])
    directory = b"".join(entries)
    count = len(entries) if numbers.random() < 0.8 else counts
    record = bytearray(data[end:])
    struct.pack_into("<HHII", record, 8, count, count, len(directory), begin)
    write(path, {"model.pt": data[:begin] + directory + (tail if numbers.random() < 0.3 else b"") + record})


def zip_members(numbers, path):
    """An archive with other members beside those of torch, and some left out."""
    pickled, names = sound()["pickle"], ["data.pkl", "data/0", "data/1", "data/2", "version", "byteorder"]
    contents = dict(zip(names, [pickled, bytes(12), bytes(80), bytes(4), b"3\n", b"little"], strict=True))
    for _ in range(numbers.randint(1, 3)):
        name = numbers.choice(names)
        contents[name] = numbers.choice([b"", b"big", bytes(12), pickled, changed_pickle(pickled, numbers)])
        if numbers.random() < 0.4:
            contents.pop(name)
    contents |= {numbers.choice(["data/../x", "data/3", "constants.pkl", "x/data.pkl", "/", "data"]): b"little"}
    data, directory = b"", b""
    for name, content in contents.items():
        raw = f"archive/{name}".encode()
        common = struct.pack("<HHHHHIIIHH", 0, 0, 0, 0, 0, zlib.crc32(content), len(content), len(content), len(raw), 0)
        directory += b"PK\x01\x02" + b"\0\0" + common + struct.pack("<HHHII", 0, 0, 0, 0, len(data)) + raw
        data += b"PK\x03\x04" + common + raw + content
    end = struct.pack("<HHHHIIH", 0, 0, len(contents), len(contents), len(directory), len(data), 0)
    write(path, {"model.pt": data + directory + b"PK\x05\x06" + end})


# Shapes and boxes.


def shapes(numbers, path):
    """DCP's metadata of tensors that are cut in odd ways."""
    size, boxes = pinwheel(numbers.randint(1, 40))
    tensors = {
        "a": ((size, size), [chunk(*box) for box in boxes]),
        "b": (tuple(min(abs(each), 2**63 - 1) for each in numbers.choice(SHAPES[:2] + SHAPES[5:])), []),
        "c": ((8, 8), [chunk((i, 0), (1, 8)) for i in range(8)]),
    }
    for _ in range(numbers.randint(1, 3)):
        cut = tensors[numbers.choice("ac")][1]
        at, what = numbers.randrange(max(len(cut), 1)), numbers.randrange(5)
        if not cut or what == 0:
            cut.append(chunk((0, 0), (numbers.randrange(9), numbers.randrange(9))))
        elif what == 1:
            del cut[at]
        elif what == 2:
            cut.append(cut[at])
        elif what == 3:
            number = numbers.choice([each for each in SIZES if 0 <= each < 2**63])
            cut[at] = chunk(cut[at].offsets, (number, cut[at].sizes[1]))
        else:
            cut[at] = chunk((cut[at].offsets[0], cut[at].offsets[1] + 1), cut[at].sizes)
    if numbers.random() < 0.3:
        shared = [chunk((i, 0), (0, 0)) for i in range(numbers.choice([10, 500]))]
        tensors |= {f"s{i}": ((9, 9), shared) for i in range(50)}
    dcp_tensors(path, tensors)


def safetensors_shapes(numbers, path):
    """Boxes of a tensor in one header, with notes on where they begin."""
    header, notes, end = {}, {}, 0
    for i in range(numbers.randint(1, 6)):
        shape = [numbers.choice([0, 1, 2, 3])] * numbers.choice([0, 1, 2, 3, 64, 65])
        shape = shape if numbers.random() < 0.7 else numbers.choice(SHAPES)
        nbytes = 4
        for each in shape:
            nbytes = min(nbytes * abs(each), 4096)
        header[f"k{i}"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end := end + nbytes]}
        notes[f"k{i}"] = {"saved_offsets": numbers.choice([shape, [0] * len(shape), [2**62] * len(shape), [1]])}
    safetensors(path, {**header, "__metadata__": {"DCP_SHARDING_INFO": json.dumps(notes)}}, end)


def write(path, files):
    for name, data in files.items():
        (path / name).write_bytes(data)


FORMATS = {
    each.__name__: each
    for each in (
        own_manifest, own_header, safetensors_folder, torch_pickle, dcp_metadata, dcp_value, zip_directory, zip_members,
        shapes, safetensors_shapes,
    )
}  # fmt: skip
