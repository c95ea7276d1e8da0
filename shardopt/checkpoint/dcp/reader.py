"""The reader by which torch.distributed.checkpoint (DCP) loads shardopt's format.

DCP's planner says which memory is to be filled with which boxes; bytes are read and verified as in `checkpoint.load`.
Each tensor is shown to DCP as one box, whatever boxes it is stored in: they are found here.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from shardopt.checkpoint.dcp.grouping import StoredOptions, in_parts, parts_of
from shardopt.checkpoint.format.tensor_bytes import GIVEN_BACK, has_no_memory
from shardopt.checkpoint.sources.open import open as open_checkpoint
from shardopt.checkpoint.sources.open import raise_for_other_checkpoint, reading
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.fetch import describe_tensor, fill
from shardopt.checkpoint.storage import absolute_url
from shardopt.errors import MismatchError, OptionError, Problem
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece
from shardopt.state.paths import join


class StorageReader(DcpStorageReader):
    """Gives `torch.distributed.checkpoint.load` the contents of a shardopt checkpoint, saved by either library.

        dcp.load(state_dict, storage_reader=StorageReader(url))

    Tensors are read into their own memory, and verified by their checksums. DCP takes plain values apart, and has the
    options of an optimizer by group or by parameter and option; it is given either. Options that say how to compute
    (`foreach`, `fused`, `capturable`, `differentiable`) are not stored, and stay as they are.

    Args:
        url: a path, or a URL that fsspec knows; None where `checkpoint_id` is given to each load.

    Raised within torch's `CheckpointException`, on all ranks:
        CheckpointNotFoundError, FormatError: there is nothing here to load.
        MismatchError: a tensor has another dtype than is stored, of which nothing is cast, or no memory; or options of
            a group differ by parameter. Nothing was changed.
        CorruptionError: stored bytes are not what was written; tensors may have changed by then.
    """

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._url = None if url is None else absolute_url(url)
        self._reader: CheckpointReader | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The URL that it loads from."""
        return self._url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load; from another path, if one is given."""
        if checkpoint_id is not None:
            self._url = absolute_url(checkpoint_id)
        self._reader = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the value is a path or URL, by its type."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def read_metadata(self) -> Metadata:
        """Opens the checkpoint; returns its contents as DCP's metadata."""
        if self._url is None:
            remedy = "pass one to StorageReader, or checkpoint_id to the load"
            raise OptionError("there is no place to load from", [Problem("url", "None", "a path or URL", remedy)])
        self._reader = reader = open_checkpoint(self._url)
        self._options = StoredOptions(reader.manifest.values)
        self._values: dict[str, Any] = {}
        keys = _Keys(self._options)
        paths = {}
        for key, tensor in reader.manifest.tensors.items():
            info = reader.info(key)
            size = torch.Size(info.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            keys[key] = TensorStorageMetadata(TensorProperties(dtype=info.dtype), size, [whole])
            paths[key] = parts_of(tensor.path)
        for path, value in reader.manifest.values.values():
            for at, part in in_parts(path, value):
                key = join(at)
                keys[key], self._values[key], paths[key] = BytesStorageMetadata(), part, parts_of(at)
        return Metadata(keys, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds to this rank's plan a digest of the checkpoint that it sees."""
        return dataclasses.replace(plan, storage_data=(self._opened().digest, str(self._url)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises if ranks see different checkpoints at the path; on the first rank."""
        digests, urls = zip(*(plan.storage_data for plan in plans), strict=True)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise_for_other_checkpoint(urls, other)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for into memory from the planner."""
        reader = self._opened()
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        with reading(str(self._url)), reader:
            values = dict(self._plain_values(plan, planner))
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            _refuse_unfit(reader, tensors, targets)
            into = filter(torch.is_tensor, getattr(planner, "state_dict", {}).values())  # the targets are of these
            fill(reader.requests([*map(_wanted, tensors, targets)], others_follow=False), into)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.dest_index.fqn in values and item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_torch_saves(values[item.dest_index.fqn]))
        done: Future[None] = Future()
        done.set_result(None)
        self._reader = None
        return done

    def _plain_values(self, plan: LoadPlan, planner: LoadPlanner) -> Iterator[tuple[str, Any]]:
        """Yields the plain values that a plan asks for, by destination key; skips those not stored."""
        given = getattr(planner, "state_dict", {})
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                key = item.storage_index.fqn
                stored, value = (True, self._values[key]) if key in self._values else self._options.read(key, given)
                if stored:
                    yield item.dest_index.fqn, value

    def _opened(self) -> CheckpointReader:
        assert self._reader is not None  # DCP reads the metadata first
        return self._reader


class _Keys(dict[str, Any]):
    """The metadata of a checkpoint by key, including the keys of options by group."""

    def __init__(self, options: StoredOptions) -> None:
        super().__init__()
        self._options = options

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and self._options.has(key))

    def __missing__(self, key: str) -> BytesStorageMetadata:
        if not self._options.has(key):
            raise KeyError(key)
        return BytesStorageMetadata()


def _wanted(item: ReadItem, target: Tensor) -> tuple[str, list[Piece]]:
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))  # of the whole tensor, which is one box to DCP
    return item.storage_index.fqn, [Piece(box, target)]


def _refuse_unfit(reader: CheckpointReader, items: list[ReadItem], targets: list[Tensor]) -> None:
    """Raises MismatchError if memory cannot take what is stored."""
    problems = []
    for item, target in zip(items, targets, strict=True):
        key, sizes = item.dest_index.fqn, tuple(item.lengths)
        dtype = reader.info(item.storage_index.fqn).dtype
        if has_no_memory(target):
            problems.append(Problem(key, GIVEN_BACK, "memory to load into", "give it memory first"))
        elif target.dtype != dtype or tuple(target.shape) != sizes:
            remedy = 'convert it first, or load by checkpoint.load(..., strict=Strictness(dtype="cast"))'
            given = describe_tensor(target.shape, target.dtype)
            problems.append(Problem(key, describe_tensor(sizes, dtype), given, remedy))
    if problems:
        raise MismatchError("the checkpoint does not fit; nothing was changed", problems)


def _as_torch_saves(value: Any) -> io.BytesIO:
    """Returns a value in the form that DCP's planners need, in memory only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
