"""torch's files read whole, in the slow and obvious way, from what `checkpoint/pickled` says lies where in them."""

import io
import struct
import zipfile
import zlib
from pathlib import Path

import torch

from shardopt.checkpoint.format.constants import damaged
from shardopt.checkpoint.sources.pickled.dcp_metadata import read_metadata
from shardopt.checkpoint.sources.pickled.torch_archive import TensorRecord, read_archive
from tests.support.placement import at


def saved(value, **options):
    """The bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def reader_of(data, requests=None):
    """A function that gives bytes of `data`, and notes what it is asked for."""

    def read(begin, end):
        assert 0 <= begin <= end
        if requests is not None:
            requests.append((begin, end))
        return data[begin:end]

    return read


def read_whole(data, begin=0, end=None):
    """The state in an archive, with its tensors. Raises CorruptionError where the bytes of one fail their checksum."""
    read = reader_of(data)
    return with_tensors(read_archive(read, begin, len(data) if end is None else end, "w"), read)


def with_tensors(value, read):
    match value:
        case TensorRecord():
            return tensor_of(value, read)
        case dict():
            return type(value)({key: with_tensors(item, read) for key, item in value.items()})
        case list() | tuple():
            return type(value)(with_tensors(item, read) for item in value)
    return value


def tensor_of(record, read):
    data = bytearray(read(record.storage_begin, record.storage_begin + record.storage_nbytes))
    if record.crc32 is not None and zlib.crc32(data) != record.crc32:
        raise damaged("w", "bytes of a storage that fail their CRC32")
    dtype = getattr(torch, record.dtype.name)
    if not data:
        return torch.empty(record.sizes, dtype=dtype)
    offset, rest = divmod(record.begin - record.storage_begin, record.dtype.itemsize)
    assert not rest
    return torch.frombuffer(data, dtype=dtype).as_strided(record.sizes, record.strides, offset)


def read_dcp(folder):
    """All tensors and values of a distributed checkpoint, by key."""
    metadata = read_metadata((folder / ".metadata").read_bytes(), "w")
    files = {path.name: path.read_bytes() for path in Path(folder).glob("*.distcp")}
    state = {}
    for key, tensor in metadata.tensors.items():
        full = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype.name))
        for chunk in tensor.chunks:
            full[at(chunk.box)] = read_whole(files[chunk.file], chunk.offset, chunk.offset + chunk.length)
        state[key] = full
    for key, entry in metadata.values.items():
        state[key] = read_whole(files[entry.file], entry.offset, entry.offset + entry.length)
    return state


def archive_of(pickle, storages=(), root="archive", compression=zipfile.ZIP_STORED, **more):
    """An archive made by hand: of a pickle, the bytes of storages by number, and other members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(f"{root}/data.pkl", pickle)
        for number, data in enumerate(storages):
            archive.writestr(f"{root}/data/{number}", data)
        for name, data in more.items():
            archive.writestr(f"{root}/{name}", data)
    return file.getvalue()


END = struct.Struct("<4sHHHHIIH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")


def as_zip64(data):
    """The same archive with all numbers of its directory in the places for large ones."""
    *_, count, size, offset, _ = END.unpack(data[-END.size :])
    directory, at = b"", offset
    while at < offset + size:
        entry = list(CENTRAL.unpack_from(data, at))
        name = data[at + CENTRAL.size :][: entry[10]]
        at += CENTRAL.size + entry[10] + entry[11] + entry[12]
        extra = struct.pack("<HHB", 7, 1, 0) + struct.pack("<HHQQQ", 1, 24, entry[9], entry[8], entry[16])
        entry[8] = entry[9] = entry[16] = 2**32 - 1
        entry[11], entry[12] = len(extra), 0
        directory += CENTRAL.pack(*entry) + name + extra
    end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + len(directory), 1)
    full = END.pack(b"PK\x05\x06", 0, 0, *[2**16 - 1] * 2, *[2**32 - 1] * 2, 0)
    return data[:offset] + directory + end + locator + full
