"""torch.save archives are read as torch reads them, and whatever is wrong with one is a named error."""

import argparse
import collections
import os
import pathlib
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.sources.pickled.stand_ins import Unknown
from shardopt.checkpoint.sources.pickled.torch_archive import TensorRecord, read_archive
from shardopt.checkpoint.sources.pickled.zip_archive import zip_members
from shardopt.errors import CorruptionError, FormatError, ShardoptError
from shardopt.state.values import encode_value
from tests.support.torch_files import CENTRAL, END, archive_of, as_zip64, read_whole, reader_of, saved


def same(loaded, tensor):
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape and loaded.stride() == tensor.stride()
    left, right = (each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (loaded, tensor))
    assert torch.equal(left, right)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_tensors_of_every_dtype(protocol):
    numbers = torch.arange(1, 13).reshape(3, 4)
    tensors = {name: numbers.to(getattr(torch, name)) for name in DTYPES if name != "complex32"}
    tensors["complex32"] = torch.arange(12, dtype=torch.int32).view(torch.complex32)
    loaded = read_whole(saved(tensors, pickle_protocol=protocol))
    assert loaded.keys() == DTYPES.keys()
    for name, tensor in tensors.items():
        same(loaded[name], tensor)


def test_views_parameters_and_attributes():
    base = torch.arange(24.0).reshape(4, 6)
    with_attributes = torch.nn.Parameter(torch.ones(2))
    with_attributes.tag = "x"
    state = [
        *(base, base.t(), base[1:3, 2:5], base[2], base[3, 5], base[::2, ::3], base[:0], base[1:1, 2:]),
        base[0, :1].expand(3, 1),
        *(torch.tensor(2.5), torch.zeros(0, 3), torch.nn.Parameter(base[1:]), with_attributes, torch.nn.Buffer(base)),
    ]  # fmt: skip
    records = read_archive(reader_of(data := saved(state)), 0, len(data), "w")
    assert len({record.storage_key for record in records if record.storage_nbytes == base.nbytes}) == 1
    for loaded, tensor in zip(read_whole(data), state, strict=True):
        same(loaded, tensor)


def test_states_of_modules_and_optimizers():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    loaded = read_whole(saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}))
    assert loaded["step"] == 3 and loaded["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    for key, tensor in model.state_dict().items():
        same(loaded["model"][key], tensor)
    for number, entries in optimizer.state_dict()["state"].items():
        for name, tensor in entries.items():
            same(loaded["optimizer"]["state"][number][name], tensor)


PLAIN = {
    "texts": ["", "ü", "x" * 300],
    "bytes": [b"", b"\x00\xff" * 300],
    "numbers": [0, -1, 2**70, 0.1, float("inf"), True, None],
    "containers": [(), (1,), [[]], {1: {"a": ()}}, {1, "b"}, set(), collections.Counter("aab")],
    "scalars": [np.float64(0.1), np.int16(-3), np.bool_(True), np.complex64(1 + 2j), np.uint8(255)],
    "arrays": [np.arange(6).reshape(2, 3), np.arange(6.0).reshape(2, 3).T, np.array(1.5), np.zeros((0, 2))],
    "orders": [np.arange(3, dtype=">i4"), np.arange(3, dtype="<f2"), np.array([True]), np.arange(300.0)],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back_with_their_types(protocol):
    loaded = read_whole(saved(PLAIN, pickle_protocol=protocol))
    assert encode_value(loaded) == encode_value(PLAIN)


OTHERS = {
    "Size": torch.Size([2, 3]),
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
    "layout": torch.strided,
    "complex": 1 + 2j,
    "bytearray": bytearray(b"x"),
    "frozenset": frozenset([1]),
    "range": range(3),
    "path": pathlib.PurePosixPath("a"),
    "Namespace": argparse.Namespace(a=1),
    "module": torch.nn.Linear(1, 1),
    "storage": torch.zeros(2).untyped_storage(),
    "sparse": torch.eye(2).to_sparse(),
    "conj": torch.zeros(2, dtype=torch.complex64).conj(),
    "neg": torch.zeros(2, dtype=torch.complex64).conj().imag,
    "meta": torch.zeros(2, device="meta"),
    "objects": np.array([None, 1]),
    "strings": np.array(["a"]),
    "string": np.str_("a"),
    "dates": np.array(["2020-01-01"], dtype="M8[D]"),
    "records": np.zeros(2, dtype=[("a", "i4")]),
    "matrix": np.ma.masked_array([1, 2]),
}


@pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:.*quantized")
@pytest.mark.parametrize("protocol", [2, 5])
def test_all_else_is_unknown_by_name_and_the_rest_is_there(protocol):
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    loaded = read_whole(saved({"a": 1, **OTHERS, "quantized": quantized, "z": torch.ones(1)}, pickle_protocol=protocol))
    assert loaded.pop("a") == 1 and torch.equal(loaded.pop("z"), torch.ones(1))
    assert {key for key, value in loaded.items() if not (isinstance(value, Unknown) and value.name)} == set()
    assert loaded["quantized"].name == "torch._utils._rebuild_qtensor"


def test_an_archive_in_the_midst_of_a_file():
    data = saved({"a": torch.arange(5.0)})
    loaded = read_whole(b"x" * 37 + data + b"y" * 9, 37, 37 + len(data))
    assert torch.equal(loaded["a"], torch.arange(5.0))


def test_few_bytes_are_read_of_an_archive_of_many_tensors():
    requests = []
    data = saved({str(i): torch.zeros(400) for i in range(1000)})
    records = read_archive(reader_of(data, requests), 0, len(data), "w")
    assert len(records) == 1000
    assert len(requests) == 3 and sum(end - begin for begin, end in requests) < 0.2 * len(data)


VARIANTS = {
    "zip64": as_zip64,
    "by hand": lambda data: rewritten(data, zipfile.ZIP_STORED),
}


def rewritten(data, compression):
    members = zip_members(reader_of(data), 0, len(data), "w")
    raw = {name.partition("/")[2]: data[m.begin : m.begin + m.nbytes] for name, m in members.items()}
    storages = [raw.pop(f"data/{i}") for i in range(sum(name.startswith("data/") for name in raw))]
    return archive_of(raw.pop("data.pkl"), storages, compression=compression, **raw)


@pytest.mark.parametrize("name", VARIANTS)
def test_archives_that_others_write(name):
    state = {"a": torch.arange(50.0), "b": torch.zeros(0), "c": [1, torch.ones(3)]}
    loaded = read_whole(VARIANTS[name](saved(state)))
    assert torch.equal(loaded["a"], state["a"]) and torch.equal(loaded["c"][1], torch.ones(3))


def test_options_of_torch():
    state = {"a": torch.arange(50.0), "b": torch.ones(3)}
    with torch.utils.serialization.config.patch("save.storage_alignment", 4096):
        loaded = read_whole(saved(state))
    assert torch.equal(loaded["a"], state["a"]) and torch.equal(loaded["b"], state["b"])
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(state)
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_archive(reader_of(data), 0, len(data), "w")["a"].crc32 is None
    assert torch.equal(read_whole(data)["a"], state["a"])


class Sink:
    """A file that keeps what is small, and of the rest the length alone."""

    def __init__(self):
        self.at, self.kept = 0, []

    def write(self, data):
        if len(data) < 1 << 20:
            self.kept.append((self.at, bytes(data)))
        self.at += len(data)
        return len(data)

    def read(self, begin, end):
        out = bytearray(end - begin)
        for at, data in self.kept:
            low, high = max(begin, at), min(end, at + len(data))
            if low < high:
                out[low - begin : high - begin] = data[low - at : high - at]
        return bytes(out)


@pytest.mark.exhaustive
def test_archives_of_nine_gigabytes():
    sink = Sink()
    small, large = torch.arange(10, dtype=torch.uint8), torch.zeros(2**32 + 5, dtype=torch.uint8)
    writer = torch._C.PyTorchFileWriter(sink, True, 64)
    for number, tensor in enumerate([small, large, small, large, small]):
        writer.write_record(f"data/{number}", tensor.untyped_storage(), tensor.nbytes)
    writer.write_end_of_file()
    members = zip_members(sink.read, 0, sink.at, "w")
    for number in (0, 2, 4):
        member = members[f"archive/data/{number}"]
        assert sink.read(member.begin, member.begin + member.nbytes) == bytes(range(10))
    assert members["archive/data/3"].nbytes == 2**32 + 5 and sink.at > 2 * 2**32


def refused(data, kind, match):
    with pytest.raises(kind, match=match) as caught:
        read_whole(data)
    assert caught.value.problems[0].key == "w"


def test_other_kinds_of_files_are_refused_by_name():
    state = {"a": torch.ones(3)}
    data = saved(state)
    refused(saved(state, _use_new_zipfile_serialization=False), FormatError, r"torch before 1\.6.*weights_only=True")
    refused(rewritten(data, zipfile.ZIP_DEFLATED), FormatError, "the compressed member")
    refused(archive_of(b"N.", byteorder="big"), FormatError, "big-endian")
    refused(archive_of(b"N.", byteorder="middle"), CorruptionError, "byte order")
    refused(archive_of(b"N.", **{"constants.pkl": b"N."}), FormatError, "TorchScript")
    encrypted = bytearray(data)
    encrypted[data.index(b"PK\x01\x02") + 8] |= 1
    refused(bytes(encrypted), FormatError, "encrypted")
    disks = bytearray(archive_of(b"N."))
    disks[-END.size + 4] = 1
    refused(bytes(disks), FormatError, "several disks")
    refused(pickle.dumps(state["a"].tolist()), CorruptionError, "no sound zip archive")
    refused(b"", CorruptionError, "no sound zip archive")


def pickled_tensor(sizes=(2,), strides=(1,), offset=0, key="0", count=4, kind="torch FloatStorage", tag="storage"):
    def text(value):
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def number(value):
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    storage = b"(" + text(tag) + b"c" + kind.replace(" ", "\n").encode() + b"\n" + text(key) + text("cpu")
    shape = b"(" + b"".join(map(number, sizes)) + b"t(" + b"".join(map(number, strides)) + b"t"
    function = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    return function + storage + number(count) + b"tQ" + number(offset) + shape + b"\x89NtR."


def test_tensors_lie_within_their_storage():
    storage = np.arange(4, dtype=np.float32).tobytes()
    assert torch.equal(read_whole(archive_of(pickled_tensor(offset=1), [storage])), torch.tensor([1.0, 2.0]))
    for wrong in (
        {"sizes": (5,)},
        {"offset": 3},
        {"offset": -1},
        {"sizes": (-1,)},
        {"strides": (-1,), "offset": 3},
        {"strides": (2**62,)},
        {"sizes": (2**62, 2**62), "strides": (0, 0)},
        {"sizes": (2, 2)},
        {"sizes": (1,) * 65, "strides": (1,) * 65},
        {"count": 5},
        {"count": 2**62},
        {"key": "1"},
        {"key": "../data.pkl"},
        {"kind": "torch DoubleStorage"},
        {"tag": "module"},
    ):
        refused(archive_of(pickled_tensor(**wrong), [storage]), CorruptionError, "no valid pickle")
    assert read_whole(archive_of(pickled_tensor(kind="torch QInt8Storage"), [storage])).name == "torch.QInt8Storage"


def with_entry(data, number, change):
    """The archive with other numbers in one entry of its directory."""
    at = END.unpack(data[-END.size :])[6]
    for _ in range(number):
        entry = CENTRAL.unpack_from(data, at)
        at += CENTRAL.size + entry[10] + entry[11] + entry[12]
    entry = list(CENTRAL.unpack_from(data, at))
    change(entry)
    return data[:at] + CENTRAL.pack(*entry) + data[at + CENTRAL.size :]


def test_directories_that_contradict_themselves():
    data = archive_of(b"N.", [b"x" * 40, b"y" * 40])

    def change(position, value):
        def set_it(entry):
            entry[position] = value

        return set_it

    sizes = (8, 9)
    for number in range(3):
        for position, value in [
            (16, 10),
            (16, 2**32 - 2),
            (16, 2**32 - 1),
            (11, 65535),
            (10, 65535),
            (13, 1),
            (7, 1),
            *((s, 41) for s in sizes),
        ]:
            refused(with_entry(data, number, change(position, value)), CorruptionError, "no sound zip|fail their CRC32")

        def longer(entry):
            entry[8] = entry[9] = 2**31

        refused(with_entry(data, number, longer), CorruptionError, "no sound zip")
    with pytest.warns(UserWarning, match="Duplicate"):
        double = archive_of(b"N.", **{"data.pkl": b"K\x01."})
    refused(double, CorruptionError, "some of one name")
    refused(archive_of(b"N.", root="a/b"), CorruptionError, "data.pkl")


def outcome(data):
    try:
        return repr(read_whole(data))
    except ShardoptError as error:
        assert type(error) in (CorruptionError, FormatError) and error.problems
        return None


def test_a_flipped_bit_or_a_lost_end_is_an_error_or_changes_nothing():
    numbers = random.Random(5)
    data = saved({"a": torch.arange(20.0), "n": 7})
    right = repr(read_whole(data))
    errors = 0
    for place in range(len(data)):
        flipped = data[:place] + bytes([data[place] ^ 1 << numbers.randrange(8)]) + data[place + 1 :]
        found = outcome(flipped)
        assert found in (None, right), place
        errors += found is None
        if place % 5 == 0:
            assert outcome(data[:place]) is None
    assert errors > 300


def test_nothing_is_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    data = saved({"a": torch.ones(2), "it": Hostile()})
    loaded = read_whole(data)
    assert loaded["it"].name == "posix.mkdir" and not (tmp_path / "made").exists()
    assert isinstance(read_archive(reader_of(data), 0, len(data), "w")["a"], TensorRecord)


def test_members_that_overlap_are_refused():
    """Where sizes follow the bytes, so that a local header does not contradict the directory."""
    data = bytearray(archive_of(b"N.", [b"x" * 40, b"y" * 40]))
    data[6] |= 1 << 3

    def longer(entry):
        entry[3] |= 1 << 3
        entry[8] = entry[9] = 60

    changed = with_entry(bytes(data), 0, longer)
    with pytest.raises(CorruptionError, match="beyond its place"):
        zip_members(reader_of(changed), 0, len(changed), "w")


def test_the_digest_tells_other_parts_of_one_storage(tmp_path):
    both = torch.arange(16.0).view(4, 4)
    digests = set()
    for tensor in (both, both.t(), both[0], both[1]):
        torch.save({"w": tensor}, tmp_path / "x.pt")
        with checkpoint.open(tmp_path / "x.pt") as reader:
            digests.add(reader.digest)
    assert len(digests) == 4
