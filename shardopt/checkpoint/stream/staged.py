"""What an update changes: read and checked beside the program that uses the weights, then applied at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardopt.checkpoint.format.tensor_bytes import is_plain_memory, torch_dtype
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.checkpoint.sources.reading.open_file import Form, OpenFile, ReadRequest
from shardopt.checkpoint.stream.chains import Chain, Link
from shardopt.checkpoint.stream.changes import Scatter, digest_of_memory, has_sums, is_scattered, scatters

_log = logging.getLogger("shardopt.checkpoint")

Place = tuple[Any, ...]
"""A part of a stored box and the memory that it goes to: the same in the next step, if neither has moved."""


class Held(NamedTuple):
    """What is known of a part that was updated: the state of its box, and how its memory is known again.

    That is by the checksums of the box where the memory has all of it as it is stored, else by a hash of its own.
    """

    state: bytes
    sums: bytes | None
    digest: bytes | None

    def is_in(self, memory: Tensor) -> bool:
        """Whether memory is as the update has left it."""
        return digest_of_memory(memory) == self.digest if self.sums is None else has_sums(memory, self.sums)


class Part(NamedTuple):
    """A part to update: its chain and request, and the deltas; None where all of it is read."""

    chain: OpenFile
    request: ReadRequest
    place: Place
    links: list[Link] | None


def part_of(file: OpenFile, request: ReadRequest, held: Mapping[Place, Held]) -> Part:
    """Returns what is to be read for a request, from what is held by place."""
    entry, _, sizes, wanted, target = request
    place = (entry.key, sizes, wanted, target.device, target.data_ptr(), target.dtype, target.stride())
    known = held.get(place)
    if not isinstance(file, Chain) or known is None or not is_scattered(request):
        return Part(file, request, place, None)
    links = file.since(entry, known.state)
    if links is not None and not known.is_in(target):
        _log.warning("%s was changed since the last update: all of it is read again [following]", entry.key)
        links = None
    return Part(file, request, place, links)


class Staged:
    """The changes of all parts, read as far as host memory allows.

    Args:
        parts: of the weights of this rank.
        memory_bytes: that may be taken.
    """

    def __init__(self, parts: Sequence[Part], memory_bytes: int) -> None:
        self.parts, self.bytes_read, self.whole = parts, 0, 0
        self._room = memory_bytes
        self._scatters: list[Scatter] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._late: list[Part] = []

    def read(self) -> None:
        """Reads and checks what has room."""
        reads: list[tuple[OpenFile, ReadRequest]] = []
        for part in self.parts:
            _, request, _, links = part
            if links is None:
                self.whole += 1
                nbytes = request.wanted.numel * request.dtype.itemsize
                if nbytes <= self._room:
                    self._room -= nbytes
                    memory = torch.empty(request.wanted.sizes, dtype=torch_dtype(request.dtype), device="cpu")
                    self._copies.append((request.target, memory))
                    reads.append((_whole(part), request._replace(target=memory)))
                else:
                    self._late.append(part)
            elif links:
                self.bytes_read += _bytes_of(part)
                made: list[Scatter] = []
                for each in scatters(request, links):
                    made.append(each)
                    self._room -= each.nbytes
                    if self._room < 0:
                        break
                if self._room < 0:
                    self._room += sum(each.nbytes for each in made)
                    self._late.append(part)
                else:
                    self._scatters += made
        self.bytes_read += fetch(reads)

    def apply(self) -> None:
        """Changes the weights."""
        increment_version([part.request.target for part in self.parts])
        for target, memory in self._copies:
            target.copy_(memory)
        for each in self._scatters:
            each.apply()
        for part in self._late:
            if part.links is None:
                self.bytes_read += fetch([(_whole(part), part.request)])
            else:
                for each in scatters(part.request, part.links):
                    each.apply()
        for device in {part.request.target.device for part in self.parts} - {torch.device("cpu")}:
            torch.get_device_module(device).synchronize(device)

    def held(self) -> dict[Place, Held]:
        """Returns what is known of the parts, once they were changed."""
        return {part.place: _held(part.chain, part.request) for part in self.parts if isinstance(part.chain, Chain)}


def _held(chain: Chain, request: ReadRequest) -> Held:
    entry, dtype, sizes, wanted, target = request
    is_as_stored = wanted.sizes == sizes and target.dtype == torch_dtype(dtype) and is_plain_memory(target)
    if is_as_stored:
        return Held(chain.state_of(entry), chain.sums_of(entry), None)
    return Held(chain.state_of(entry), None, digest_of_memory(target))


def _whole(part: Part) -> OpenFile:
    if not isinstance(part.chain, Chain):
        return part.chain
    whole, entry = part.chain.whole, part.request.entry
    whole.entry(entry.key, Form(entry.dtype, entry.shape, entry.end - entry.begin))  # which looks at its deltas
    return whole


def _bytes_of(part: Part) -> int:
    links = part.links or ()
    word = part.request.dtype.itemsize
    return sum(each.index.nbytes(word) + len(each.index.encode()) for each in links)
