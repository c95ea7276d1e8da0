"""Reads a checkpoint as rules rearrange it: gives boxes of new tensors, and reads boxes of stored ones."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.manifest import Manifest, StoredLayout, StoredTensor, StoredTensors
from shardopt.checkpoint.rearrange.binding import bind, unequal
from shardopt.checkpoint.rearrange.reads import reads_of, views_of
from shardopt.checkpoint.rearrange.rules import AnyRule, Tie
from shardopt.checkpoint.rearrange.ties import names_to_leave_out, second_names
from shardopt.checkpoint.sources.equality import bytes_are_equal
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.checkpoint.sources.reading.open_file import ComputedFile, ReadRequest, form_of
from shardopt.checkpoint.storage import Span
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.box import Box, whole
from shardopt.sharding.pieces import Piece
from shardopt.state.versions import renamed_versions


def rearranged(reader: CheckpointReader, rules: Sequence[AnyRule]) -> CheckpointReader:
    """Returns a reader of a checkpoint as rules rearrange it; the same reader if there are no rules. Local.

    Nothing is held in memory: whatever box of a new tensor is read, its elements come from the stored boxes that have
    them. Keys that no rule names are as they were. All rules are applied at once, each key goes with the first that
    names it; reversed ties come before that, other ties after it.

    Args:
        reader: of an open checkpoint, which the new one reads, and closes.
        rules: as for `load(rearrange=)`.

    Raises:
        MismatchError: the checkpoint does not fit the rules; every difference is listed.
        CorruptionError: counters that were read to be compared are not what was written.
    """
    return RearrangedReader(reader, rules) if rules else reader


class RearrangedReader(CheckpointReader):
    """The reader that `rearranged` returns."""

    def __init__(self, reader: CheckpointReader, rules: Sequence[AnyRule]) -> None:
        super().__init__(reader.source)
        self._reader = reader
        self.digest = f"{reader.digest} {xxhash.xxh3_64_hexdigest(repr(list(rules)).encode())}"
        stored = reader.manifest
        tied = {key for rule in rules if isinstance(rule, Tie) and rule.reverse for key in self._same(rule, rules)}
        if tied:
            stored = replace(
                stored, tensors=StoredTensors((key, each) for key, each in stored.tensors.items() if key not in tied)
            )
        self._binding = bind(stored, rules)
        self.left_out = (*reader.left_out, *self._binding.left_out)
        self._refuse_unequal_counters()
        self.manifest = self._new_manifest(stored)
        for rule in rules:
            if isinstance(rule, Tie) and not rule.reverse:
                self._tie(rule)
        self._zeros = Zeros(reader.source.storage, "zeros")

    def key_in_files(self, key: str) -> str:
        stored = self._binding.keys.get(key)
        if stored is not None:
            return self._reader.key_in_files(stored)
        return f"{super().key_in_files(key)} (rearranged)"  # no file has it, and it is no other one of that name

    def requests(self, wanted: Sequence[tuple[str, Sequence[Piece]]], others_follow: bool = True) -> list[ReadRequest]:
        keys = self._binding.keys
        unchanged = [(keys[key], pieces) for key, pieces in wanted if key in keys]
        requests = self._reader.requests(unchanged, others_follow)
        for key, pieces in wanted:
            if key not in keys:  # the files of rearranged tensors are opened tensor by tensor
                requests += self._requests_of_made(key, pieces)
        return requests

    def _requests_of_made(self, key: str, pieces: Sequence[Piece]) -> Iterator[ReadRequest]:
        """Yields the reads of a tensor that is made of others."""
        tensor = self._binding.tensors[key]
        for piece in pieces:
            for component in tensor.components:
                if component.key is not None:
                    yield from reads_of(component, piece, self._reader)
                else:
                    for _, memory in views_of(component, piece):
                        yield self._zeros.request(key, tensor.dtype, memory)

    def close(self) -> None:
        self._reader.close()
        super().close()

    def _new_manifest(self, stored: Manifest) -> Manifest:
        """Returns the manifest with the new keys, in which a tensor made of others is one box."""
        bound = self._binding
        tensors = StoredTensors()
        new_of = {old: new for new, old in bound.keys.items()}
        layouts: dict[tuple[int, ...], StoredLayout] = {}
        for new, path in bound.paths.items():
            old = stored.tensors.get(bound.keys.get(new, ""))
            if old is not None:
                tied_to = None if old.tied_to is None else new_of.get(old.tied_to)
                tensors[new] = old._replace(path=path, tied_to=tied_to)
            elif new in bound.tensors:
                made = bound.tensors[new]
                layout = layouts.setdefault(made.shape, StoredLayout.in_one_box(made.shape, 0))
                tensors[new] = StoredTensor(path, made.dtype, layout)
        values = {
            new: (path, stored.values[bound.keys[new]][1])
            for new, path in bound.paths.items()
            if bound.keys.get(new) in stored.values
        }
        per_rank = {new: path for new, path in bound.paths.items() if bound.keys.get(new) in stored.per_rank}
        versions = renamed_versions(stored.module_versions or {}, new_of) or None
        return replace(stored, tensors=tensors, values=values, per_rank=per_rank, module_versions=versions)

    def _refuse_unequal_counters(self) -> None:
        """Reads the counters that are joined; raises MismatchError if they differ."""
        if not self._binding.equal:
            return
        targets = {
            key: torch.empty((), dtype=self._reader.info(key).dtype, device="cpu")
            for _, keys in self._binding.equal
            for key in keys
        }
        fetch(self._reader.requests([(key, [Piece(Box((), ()), target)]) for key, target in targets.items()]))
        problems = [
            unequal(key, keys[0], rule)
            for rule, keys in self._binding.equal
            for key in keys[1:]
            if not torch.equal(targets[key], targets[keys[0]])
        ]
        if problems:
            raise MismatchError(
                "the checkpoint does not fit the rules for rearranging; nothing was changed", problems, code="bad-rules"
            )

    def _tie(self, rule: Tie) -> None:
        """Adds the second name of each parameter that a rule ties."""
        tensors = StoredTensors(self.manifest.tensors)
        for also, key, path in second_names(rule, {key: tensor.path for key, tensor in self.manifest.tensors.items()}):
            tensors[also] = self.manifest.tensors[key]._replace(path=path, tied_to=key)
            self._binding.tensors |= {also: self._binding.tensors[key]} if key in self._binding.tensors else {}
            self._binding.keys |= {also: self._binding.keys[key]} if key in self._binding.keys else {}
        self.manifest = replace(self.manifest, tensors=tensors)

    def _same(self, rule: Tie, rules: Sequence[AnyRule]) -> Iterator[str]:
        """Yields the other stored keys of a parameter; raises MismatchError if one holds another parameter."""
        reader, stored = self._reader, self._reader.manifest.tensors
        for key, name in names_to_leave_out(rule, {key: tensor.path for key, tensor in stored.items()}, rules):
            shape = stored[key].layout.shape
            alike = shape == reader.info(name).shape and bytes_are_equal(reader, key, name, whole(shape))
            if not alike:
                problem = Problem(key, f"other values than {name}", f"the same, for {rule}", "leave the tie out")
                raise MismatchError(
                    "the checkpoint does not fit the rules; nothing was changed", [problem], code="bad-rules"
                )
            yield key


class Zeros(ComputedFile):
    """A file of zeros, which has any box that is asked for."""

    def request(self, key: str, dtype: Dtype, target: Tensor) -> ReadRequest:
        """Returns the read that fills a whole target with zeros."""
        box = whole(target.shape)
        return ReadRequest(self, self.entry(key, form_of(dtype, box)), dtype, box.sizes, box, target)

    def fill(self, spans: Sequence[Span]) -> None:
        for _, memory in spans:
            if memory.nbytes:
                ctypes.memset(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), 0, memory.nbytes)
