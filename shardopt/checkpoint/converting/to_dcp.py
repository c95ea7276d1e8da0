"""Writes a checkpoint of torch.distributed.checkpoint: archives of boxes, then their index in ".metadata".

    __<n>_0.distcp     archives one behind the other: one for each box of a tensor, one for each distinct plain value
    .metadata          a pickle of torch's own records

Keys are those that torch gives nested state: "optimizer.state.<name>.exp_avg". The options of an optimizer stand there
twice, small as they are: by parameter, as torch flattens them ("optimizer.param_groups.<name>.lr"), and by group
("optimizer.param_groups.0.lr"), so that `dcp.load` fills either form of torch's `get_optimizer_state_dict`.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardopt.checkpoint.converting.choosing import Choice, ChosenTensor
from shardopt.checkpoint.converting.nested_values import groups_of_equal, split_options
from shardopt.checkpoint.converting.out_files import OutFile, Written, pack
from shardopt.checkpoint.converting.pickle_bytes import StoredElsewhere, pickle_of
from shardopt.checkpoint.converting.plan import OutOptions, OutPlan
from shardopt.checkpoint.converting.streaming import Part
from shardopt.checkpoint.converting.to_huggingface import natural_order
from shardopt.checkpoint.converting.to_torch import raw_bytes, refuse_per_rank
from shardopt.checkpoint.converting.zip_bytes import Take, ZipArchive, torch_members
from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.tensor_bytes import stored_dtype, torch_dtype
from shardopt.checkpoint.storage import Storage, storage_of
from shardopt.errors import MismatchError, Problem
from shardopt.runtime.late import late
from shardopt.sharding.box import Box, whole
from shardopt.state.paths import PARAM_GROUPS, Index, Path, join

if TYPE_CHECKING:
    from torch.distributed.checkpoint import filesystem, metadata
else:  # slow to import
    filesystem = late("torch.distributed.checkpoint.filesystem")
    metadata = late("torch.distributed.checkpoint.metadata")

_METADATA = ".metadata"


def plan_dcp(choice: Choice, dst: str, durable: bool, options: OutOptions) -> OutPlan:
    """Plans a directory of archives.

    Raises:
        StateError: a plain value has no form in them. MismatchError: values per rank, or two values under one key.
    """
    refuse_per_rank(choice, options)
    written = sorted(choice.written, key=lambda tensor: natural_order(tensor.key))
    groups = pack(written, options.most_bytes)
    values = _flattened(choice)
    files = [DcpFile(f"__{i}_0.distcp", group, values if i == 0 else {}) for i, group in enumerate(groups)]
    return DcpPlan(storage_of(dst, durable), choice, files, values)


class DcpPlan(OutPlan):
    """Archives that `dcp.load` reads once ".metadata" exists."""

    def __init__(self, storage: Storage, choice: Choice, files: Sequence[DcpFile], values: Mapping[Path, Any]) -> None:
        super().__init__(storage, choice, files, [_METADATA])
        self._archives, self._values = files, values

    def commit(self, written: Sequence[Written]) -> None:
        self.storage.publish(_METADATA, pickle.dumps(self._metadata(), protocol=2))  # as torch

    def _metadata(self) -> metadata.Metadata:
        of_boxes = {key: place for file in self._archives for key, place in file.places_of_boxes.items()}
        of_values = {path: place for file in self._archives for path, place in file.places_of_values.items()}
        entries: dict[str, Any] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        stored: dict[metadata.MetadataIndex, Any] = {}
        for key, tensor in self.choice.tensors.items():
            entries[key], paths[key] = _tensor_record(tensor.dtype, tensor.shape, tensor.boxes), _plain(tensor.path)
            for number, box in enumerate(tensor.boxes):
                index = metadata.MetadataIndex(key, box.offsets, number)
                stored[index] = filesystem._StorageInfo(*of_boxes[tensor.tied_to or key, box])
        for path, value in self._values.items():
            key = join(path)
            paths[key] = _plain(path)
            if isinstance(value, Tensor):
                all_of_it = whole(value.shape)
                entries[key] = _tensor_record(stored_dtype(value.dtype, key), all_of_it.sizes, (all_of_it,))
                index = metadata.MetadataIndex(key, all_of_it.offsets, 0)
            else:
                entries[key], index = metadata.BytesStorageMetadata(), metadata.MetadataIndex(key)
            stored[index] = filesystem._StorageInfo(*of_values[path])
        return metadata.Metadata(entries, paths, stored)


Place = tuple[str, int, int]
"""File, offset and bytes of an archive."""


class DcpFile(OutFile):
    """Archives in one file: first those of plain values, one per distinct value, then those of boxes."""

    def __init__(self, name: str, tensors: Sequence[ChosenTensor], values: Mapping[Path, Any]) -> None:
        self._archives: list[ZipArchive] = []
        self.places_of_boxes: dict[tuple[str, Box], Place] = {}
        self.places_of_values: dict[Path, Place] = {}
        parts, begins, known = [], [], []
        nbytes = 0
        places: dict[bytes, Place] = {}
        for path, value in values.items():
            archive = _archive_of_value(value, join(path))
            data = b"".join(archive.body(_nothing))
            if data not in places:
                places[data] = (name, nbytes, archive.nbytes)
                self._archives.append(archive)
                known.append(data)
                nbytes += archive.nbytes
            self.places_of_values[path] = places[data]
        for tensor in tensors:
            for box in tensor.boxes:
                part = Part(tensor.key, tensor.stored, tensor.dtype, box)
                data_pkl = pickle_of(StoredElsewhere("0", tensor.dtype, box.sizes), tensor.key, _no_record)
                archive = ZipArchive(torch_members(data_pkl, [("0", part.nbytes)]))
                begin = next(at for at, each in zip(archive.begins, archive.members, strict=True) if each.data is None)
                self.places_of_boxes[tensor.key, box] = (name, nbytes, archive.nbytes)
                self._archives.append(archive)
                parts.append(part)
                begins.append(nbytes + begin)
                nbytes += archive.nbytes
        super().__init__(name, parts, begins, nbytes, b"".join(known))

    def body(self, take: Take) -> Iterator[memoryview]:
        for archive in self._archives:
            yield from archive.body(take)


def _archive_of_value(value: Any, key: str) -> ZipArchive:
    records: list[tuple[str, bytes | int]] = []

    def keep(tensor: Tensor) -> str:
        records.append((str(len(records)), raw_bytes(tensor)))
        return records[-1][0]

    return ZipArchive(torch_members(pickle_of(value, key, keep), records))


def _flattened(choice: Choice) -> dict[Path, Any]:
    """Returns plain values by path as torch flattens them: it descends dicts, and lists that hold dicts or tensors.

    An element of a list that has only empty dicts stays, which torch leaves out: the others would move up.

    Raises:
        MismatchError: two values get one key.
    """
    others, options = split_options(choice.values)
    flat: dict[Path, Any] = {}
    for path, value in others.items():
        flat.update(_leaves(path, value))
    for root, by_member in options.items():
        by_name = {
            (*root, f"{PARAM_GROUPS}.{name}.{option}"): value
            for name, each in by_member.items()
            for option, value in each.items()
        }
        names = {join(path) for path in by_name}
        groups = dict(_leaves((*root, PARAM_GROUPS), groups_of_equal(by_member, choice.tensors)))
        # A parameter may be called as the number of a group is; what goes by names goes before.
        flat |= by_name | {path: value for path, value in groups.items() if join(path) not in names}
    empty = {path for path, value in flat.items() if isinstance(value, Mapping) and not value}
    others_than_empty = (*(flat.keys() - empty), *(tensor.path for tensor in choice.tensors.values()))
    filled = {element for path in others_than_empty for element in _elements(path)}
    flat = {path: value for path, value in flat.items() if path not in empty or filled.isdisjoint(_elements(path)[-1:])}
    uses = Counter([*map(join, flat), *choice.tensors])
    problems = [
        Problem(key, "two values, or a value and a tensor", "one of a key", "rename or skip one of them")
        for key, count in sorted(uses.items())
        if count > 1
    ]
    if problems:
        raise MismatchError("what was chosen cannot be flattened", problems, code="cannot-convert")
    return flat


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and (value or not any(isinstance(part, Index) for part in path)):
        for name, each in value.items():
            yield from _leaves((*path, str(name)), each)
    elif isinstance(value, list) and _has_branches(value):
        for i, each in enumerate(value):
            yield from _leaves((*path, Index(i)), each)
    else:
        yield path, value


def _elements(path: Path) -> list[Path]:
    """Returns the paths of the elements of lists that a path is at or within, from the outermost on."""
    return [path[: i + 1] for i, part in enumerate(path) if isinstance(part, Index)]


def _has_branches(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(each, Mapping | Tensor) or _has_branches(each) for each in value)
    return False


def _plain(path: Path) -> tuple[str | int, ...]:
    """Returns a path as torch writes it: positions in lists are ints, all keys of dicts are str."""
    return tuple(int(part) if isinstance(part, Index) else str(part) for part in path)


def _tensor_record(dtype: Dtype, shape: tuple[int, ...], boxes: Sequence[Box]) -> metadata.TensorStorageMetadata:
    chunks = [metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return metadata.TensorStorageMetadata(metadata.TensorProperties(torch_dtype(dtype)), torch.Size(shape), chunks)


def _nothing() -> Iterator[memoryview]:
    raise AssertionError("all bytes of a value are known")


def _no_record(tensor: Tensor) -> str:
    raise AssertionError("a tensor where there are only descriptions")
