"""The changes of an update: read and checked beside the program that uses the weights, then applied at once."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardopt.checkpoint.format.tensor_bytes import is_plain_memory, torch_dtype
from shardopt.checkpoint.loading.tied import extent
from shardopt.checkpoint.saving.writing.earlier import TensorBytes
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.checkpoint.sources.reading.open_file import Form, ReadRequest
from shardopt.checkpoint.sources.reading.scratch import check_cast
from shardopt.checkpoint.stream.chains import Chain, Link, ProvedDeltaFile
from shardopt.checkpoint.stream.changes import Scatter, digest_of_memory, is_scattered, scatters
from shardopt.errors import CheckpointError, MismatchError
from shardopt.runtime.accelerator import has_streams, on_stream, synchronize, wait_for_reads
from shardopt.runtime.staging_fence import wait_for_copies
from shardopt.runtime.torch_gradients import reshard_before_writing
from shardopt.runtime.torch_private import changeable
from shardopt.sharding.pieces import View

_log = logging.getLogger("shardopt.checkpoint")

Place = tuple[Any, ...]
"""A part of a stored box and the memory that it goes to: the same in the next step, if neither has moved."""


class Held(NamedTuple):
    """A part that was updated: the state of its box, and how its memory is known again.

    That is by the checksums of the box where the memory has all of it as it is stored, else by a hash of its own.
    """

    state: bytes
    sums: bytes | None
    digest: bytes | None

    def is_in(self, memory: Tensor) -> bool:
        """Whether memory is as the update has left it."""
        return (
            digest_of_memory(memory) == self.digest if self.sums is None else TensorBytes(memory).checksums == self.sums
        )


class Part(NamedTuple):
    """A part to update.

    Args:
        request: what is read of it, and to where.
        place: by which it is found again.
        state: of its box after the update; None if no deltas can be applied to it.
        links: the deltas that lead there; None where all of it is read.
    """

    request: ReadRequest
    place: Place
    state: bytes | None
    links: list[Link] | None


def part_of(request: ReadRequest, held: Mapping[Place, Held]) -> Part:
    """Returns what is to be read for a request, from what is held by place."""
    file, entry, _, sizes, wanted, target = request
    place = (entry.key, sizes, wanted, target.device, target.data_ptr(), target.dtype, target.stride())
    if not isinstance(file, Chain) or not is_scattered(request):
        return Part(request, place, None, None)
    state, known = file.state_of(entry), held.get(place)  # in any case: after the update nothing more is to be read
    links = None if known is None else file.since(entry, known.state)
    if links is not None and known is not None and not known.is_in(target):
        _log.warning("%s was changed since the last update: all of it is read again [following]", entry.key)
        links = None
    return Part(request, place, state, links)


class Staged:
    """The changes of all parts, read as far as host memory allows.

    Args:
        parts: of the weights of this rank.
        into: the weights as the program has them, also those of which this rank has no part.
        memory_bytes: that may be taken.
    """

    def __init__(
        self, parts: Sequence[Part], into: Sequence[Tensor], files: Collection[ProvedDeltaFile], memory_bytes: int
    ) -> None:
        self.parts = parts
        self._into = into
        self.whole = sum(part.links is None for part in parts)
        self._files, self._bytes_read = files, 0
        self._room = memory_bytes
        self._scatters: list[Scatter] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._late: list[Part] = []

    @property
    def bytes_read(self) -> int:
        """The bytes that were read of data files."""
        return self._bytes_read + sum(file.bytes_read for file in self._files)

    def read(self) -> None:
        """Reads and checks what has room.

        Raises:
            MismatchError: the app's dtype cannot hold a number.
        """
        try:
            self._read()
        except CheckpointError as error:
            if error.code != "cast-overflow":
                raise
            message = "the checkpoint has numbers that the app's dtypes cannot hold; nothing was changed"
            raise MismatchError(message, error.problems, code="cast-overflow") from None

    def _read(self) -> None:
        reads: list[ReadRequest] = []
        for parts in _by_box(self.parts):
            for part in parts:
                reads += self._whole_read(part) if part.links is None else self._read_changes(part)
            self._forget(boxes_only=True)
        self._forget()
        self._bytes_read += fetch(reads)
        for (target, memory), request in zip(self._copies, reads, strict=True):
            check_cast(request.entry, target, memory)

    def apply(self) -> None:
        """Changes the weights."""
        wait_for_copies()  # a save in the background may still be copying what this changes
        targets = [part.request.target for part in self.parts]
        devices = {target.device for target in targets} - {torch.device("cpu")}
        for device in devices:  # what was queued within `serving`, on whatever stream, may still read them
            synchronize(device)
        wait_for_reads(targets)
        reshard_before_writing(self._into)
        increment_version(targets)
        with changeable(targets):
            for target, memory in self._copies:
                target.copy_(memory)
            for each in self._scatters:
                each.apply()
            for parts in _by_box(self._late):
                self._bytes_read += fetch([_whole(part) for part in parts if part.links is None])
                for part in parts:
                    self._apply_late_changes(part)
                self._forget(boxes_only=True)
        self._forget()
        for device in devices:
            if has_streams(device):
                stream = torch.get_device_module(device).current_stream(device)
                with on_stream(stream):
                    stream.synchronize()
            else:
                synchronize(device)

    def held(self) -> dict[Place, Held]:
        """Returns what is known of the parts, once they were changed. Reads no file."""
        return {
            part.place: _held(part.request.file, part.request, part.state)
            for part in self.parts
            if part.state is not None and isinstance(part.request.file, Chain)
        }

    def written_in(self, into: Mapping[str, View]) -> tuple[str, ...]:
        """Returns the names of tensors in whose memory something was written.

        Parts are of stored boxes, which rules may have put anywhere: they are found by their addresses. Of tensors that
        interleave in one memory, such as columns, too many may be named, never too few.
        """
        targets = [part.request.target for part in self.parts if part.links != []]
        begins = sorted(target.data_ptr() for target in targets if target.numel())

        def is_written(memory: Tensor) -> bool:
            at = bisect_left(begins, memory.data_ptr())
            return at < len(begins) and begins[at] < memory.data_ptr() + extent(memory)

        return tuple(name for name, view in into.items() if any(is_written(memory) for _, memory in view.pieces))

    def _whole_read(self, part: Part) -> list[ReadRequest]:
        """Returns the read of all of a part into memory of its own, if there is room."""
        request = _whole(part)
        nbytes = request.wanted.numel * request.dtype.itemsize
        if nbytes > self._room:
            self._late.append(part)
            return []
        self._room -= nbytes
        memory = torch.empty(request.wanted.sizes, dtype=torch_dtype(request.dtype), device="cpu")
        self._copies.append((request.target, memory))
        return [request._replace(target=memory)]

    def _read_changes(self, part: Part) -> list[ReadRequest]:
        """Reads the deltas of a part, if there is room; returns the read of all of it if it is needed instead."""
        made: list[Scatter] = []
        room, links = self._room, part.links or []
        for link in links:
            try:
                for each in scatters(part.request, [link]):
                    made.append(each)
                    self._room -= each.nbytes
                    if self._room < 0:
                        self._room = room
                        self._late.append(part)
                        return []
            except CheckpointError as error:
                if link is links[-1]:
                    raise  # after it no step has another number there
                self._room = room
                self._read_all_for(error)
                return self._whole_read(part._replace(links=None))
        self._scatters += made
        return []

    def _apply_late_changes(self, part: Part) -> None:
        try:
            for each in scatters(part.request, part.links or ()):
                each.apply()
        except CheckpointError as error:
            self._read_all_for(error)
            self._bytes_read += fetch([_whole(part)])

    def _read_all_for(self, error: CheckpointError) -> None:
        """Raises an error, except of a number that cannot be cast: a step in between may have had it, and not this."""
        if error.code != "cast-overflow":
            raise error
        self.whole += 1

    def _forget(self, boxes_only: bool = False) -> None:
        for file in self._files:
            if boxes_only:
                file.forget_box()
            else:
                file.forget()


def _held(chain: Chain, request: ReadRequest, state: bytes) -> Held:
    _, entry, dtype, sizes, wanted, target = request
    if wanted.sizes == sizes and target.dtype == torch_dtype(dtype) and is_plain_memory(target):
        return Held(state, chain.sums_of(entry), None)
    return Held(state, None, digest_of_memory(target))


def _whole(part: Part) -> ReadRequest:
    file, entry, *_ = part.request
    if not isinstance(file, Chain):
        return part.request
    file.whole.entry(entry.key, Form(entry.dtype, entry.shape, entry.end - entry.begin))  # which looks at its deltas
    return part.request._replace(file=file.whole)


def _by_box(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yields the parts of each stored box, in the order of the boxes in their files, which are read ahead."""

    def place(part: Part) -> tuple[str, int]:
        return part.request.file.where, part.request.entry.begin

    return (list(of_box) for _, of_box in groupby(sorted(parts, key=place), place))
