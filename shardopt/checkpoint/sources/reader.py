"""An open checkpoint: its keys, and any box of any tensor. Needs no process group and no optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import add, index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.format.constants import DELTA_INDEX_PREFIX, DELTA_PREFIX, DTYPES, Dtype
from shardopt.checkpoint.format.manifest import StoredEntry, StoredLayout
from shardopt.checkpoint.format.tensor_bytes import torch_dtype
from shardopt.checkpoint.sources.contents import CheckpointContents
from shardopt.checkpoint.sources.reading.fetch import describe_tensor, fetch, fill, memory_problem
from shardopt.checkpoint.sources.reading.open_file import Form, OpenFile, ReadRequest, form_of
from shardopt.checkpoint.sources.reading.with_deltas import FileWithDeltas, open_with_deltas
from shardopt.checkpoint.sources.source import Source
from shardopt.errors import MismatchError, Problem
from shardopt.runtime.torch_private import out_of_inference_mode
from shardopt.sharding.box import Box, whole
from shardopt.sharding.pieces import Piece, narrowed
from shardopt.sharding.swapped import LOAD_IN_SWAP, refuse_swapped
from shardopt.sharding.view import view_of
from shardopt.state.paths import nest
from shardopt.world import world

_MOST_OVERLAPS = 1 << 16  # that are kept, some 20 MB
_FEW_FILES = 2  # that are opened before a thread has started
_THREADS = 4  # that open files
_FAR_THREADS = 32  # where they wait for answers all the time


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, dtype and stored boxes of a tensor.

    Args:
        shape: the global one.
        dtype: as stored.
        boxes: in the order in which they are stored; together they are the whole tensor.
        tied_to: the key with which it was one memory when it was saved, and under which it is stored; None if none is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    tied_to: str | None = None


class _Overlap(NamedTuple):
    """The overlap of a stored box and a wanted one: its place in the stored one, and in the wanted one (None: all).

    `entry` is what the file has, of which the stored box is all or some, under a key that begins with `prefix`.
    """

    numbers: tuple[int, ...]  # of the file, and of those with deltas that reads need
    entry: StoredEntry
    prefix: str
    form: Form
    dtype: Dtype
    stored: Box
    wanted: Box | None


class CheckpointReader(CheckpointContents):
    """An open checkpoint: lists its keys, and reads any box of a tensor. Local: involves no other rank.

    Args:
        source: the checkpoint as it lies in its storage; `open` finds out which kind it is of.

    Raises:
        CorruptionError: its boxes do not make up its tensors.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._files: dict[int, OpenFile] = {}
        self._with_deltas: dict[tuple[int, ...], FileWithDeltas] = {}
        self._overlaps: dict[tuple[StoredLayout, str, Box], list[_Overlap]] = {}
        self._overlaps_kept = 0

    def info(self, key: str) -> TensorInfo:
        """Returns shape, dtype and stored boxes of a tensor. Raises MismatchError if the key is none of a tensor's."""
        tensor = self.manifest.tensors.get(key)
        if tensor is None:
            raise self.unknown(key, self.manifest.tensors, "a tensor")
        return TensorInfo(tensor.layout.shape, torch_dtype(tensor.dtype), tensor.layout.boxes, tensor.tied_to)

    def read(self, key: str, box: Box | None = None) -> Any:
        """Returns a plain value, or a new CPU tensor with a whole stored tensor or a box of it.

        Of what holds others, such as "model", it returns all below it, nested as it was saved: a module's as its
        `state_dict`.

        Raises:
            MismatchError: there is no such key, or the tensor has no such box.
            CorruptionError: what is stored is not what was written.
        """
        if key in self.manifest.values:
            return self.manifest.values[key][1]
        if key not in self.manifest.tensors:
            if box is None and (within := self.below(key)):
                return nest({path: self.read(each) for path, each in within.items()})
            raise self.unknown(key, self.keys(), "a key")
        box, dtype = self._box_of(key, box), self.info(key).dtype
        # Without memory at first: the files must have the size that the manifest gives before any is allocated for it.
        self.requests([(key, [Piece(box, torch.empty(box.sizes, dtype=dtype, device="meta"))])])
        with out_of_inference_mode():  # the caller's, in which a tensor could never be changed
            target = torch.empty(box.sizes, dtype=dtype, device="cpu")
        fetch(self.requests([(key, [Piece(box, target)])]))
        return target

    def read_into(self, key: str, tensor: Tensor, box: Box | None = None) -> None:
        """Reads a stored tensor, or a box of it, into the memory of `tensor`, in place. Local.

        `tensor` stands for the whole of the box: its global shape is the box's sizes. It may be plain, of any strides
        and on any device, or sharded (DTensor, ShardedTensor, LocalShardsWrapper). If it is sharded, this rank's own
        shards are filled, and each rank calls for itself. Stored bytes are verified by their checksums before they are
        copied, or, where they are read straight into contiguous memory, afterwards. Autograd counts it as a change in
        place.

        Args:
            key: of a stored tensor.
            tensor: of the stored dtype; nothing is cast. Only its elements are changed.
            box: offsets and sizes in the stored tensor; None for all of it.

        Raises:
            MismatchError: there is no such tensor or box; `tensor` is of another shape or dtype, has no memory, or
                elements that share it. Nothing was changed.
            LayoutError: a kind of tensor that the library does not know, or a placement such as `Partial`.
            StateError: averages stand in the tensor (`EMA.swap`). Nothing was changed.
            CorruptionError: stored bytes are not what was written; `tensor` may have changed by then.
        """
        box, dtype = self._box_of(key, box), self.info(key).dtype
        view = view_of(tensor, key)
        # A rank without a shard of a LocalShardsWrapper cannot know its dtype.
        known_dtype = view.dtype if view.pieces or not view.layout.local else dtype
        if view.shape != box.sizes or known_dtype != dtype:
            given, required = describe_tensor(view.shape, view.dtype), describe_tensor(box.sizes, dtype)
            remedy = "pass a tensor of the shape and dtype that are stored, or name the box that is to go into this one"
            raise MismatchError(
                "the tensor does not fit", [Problem(key, given, required, remedy)], code="cannot-read-tensor"
            )
        problem = memory_problem(key, *(memory for _, memory in view.pieces))
        if problem is not None:
            raise MismatchError("the tensor cannot be read into", [problem], code="cannot-read-tensor")
        refuse_swapped(LOAD_IN_SWAP, [tensor])
        pieces = [
            Piece(Box(tuple(map(add, local.offsets, box.offsets)), local.sizes), memory)
            for local, memory in view.pieces
        ]
        fill(self.requests([(key, pieces)]), [tensor])

    def _box_of(self, key: str, box: Box | None) -> Box:
        """Returns a box of a tensor; None stands for the whole. Raises MismatchError if the tensor has no such box."""
        everything = whole(self.info(key).shape)
        if box is None:
            return everything
        try:
            box = Box(*(tuple(map(index, each)) for each in box))
            fits = len(box.offsets) == len(box.sizes) == len(everything.sizes)
            given = f"the offsets {list(box.offsets)} and sizes {list(box.sizes)}"
        except TypeError:  # slices, or one of the two alone
            fits, given = False, f"{box!r}, which is no box"
        if not fits or not everything.contains(box) or min(box.sizes, default=0) < 0:
            required = f"a box within {list(everything.sizes)}"
            raise MismatchError(
                "the tensor has no such box",
                [Problem(key, given, required, "give a Box(offsets, sizes) within it")],
                code="cannot-read-tensor",
            )
        return box

    def requests(self, wanted: Sequence[tuple[str, Sequence[Piece]]], others_follow: bool = True) -> list[ReadRequest]:
        """Returns the reads that fill these pieces of tensors.

        Opens the files, several at a time.

        Args:
            wanted: pieces by the keys of their tensors.
            others_follow: whether other tensors of these files may be wanted later: keeps all entries of the headers.
                Otherwise keeps those of these tensors, and would read a header again for others.

        Raises:
            CorruptionError: a file is missing, damaged, or not what the manifest says of it.
        """
        alike: defaultdict[tuple[StoredLayout, str, Box], list[tuple[str, Tensor]]] = defaultdict(list)
        for key, pieces in wanted:
            _, dtype, layout, tied_to, stored_as = self.manifest.tensors[key]
            name = key if tied_to is stored_as is None else self.key_in_files(key)
            for box, tensor in pieces:
                alike[layout, dtype.name, box].append((name, tensor))
        reads = [(each, members) for of, members in alike.items() for each in self._find_overlaps(*of)]
        names = {overlap.prefix + name for overlap, members in reads for name, _ in members}
        if any(len(overlap.numbers) > 1 for overlap, _ in reads):
            names |= {prefix + name for name in names for prefix in (DELTA_INDEX_PREFIX, DELTA_PREFIX)}
        used = dict.fromkeys(number for overlap, _ in reads for number in overlap.numbers)
        self._open_all(used, None if others_follow else names)
        requests: list[ReadRequest] = []
        for (numbers, entry, prefix, form, dtype, stored, part), members in reads:
            if prefix or part is not None:
                members = [(prefix + name, each if part is None else narrowed(each, part)) for name, each in members]
            requests += self._file_of(numbers[0], entry).requests(members, form, dtype, entry.box.sizes, stored)
        return requests

    def close(self) -> None:
        """Forgets the files, none of which is kept open between reads."""
        self._files.clear()
        self._with_deltas.clear()
        self._overlaps.clear()
        self._overlaps_kept = 0

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _delta_files(self, entry: StoredEntry) -> tuple[int, ...]:
        """Returns the numbers of the files with deltas that reads of an entry need."""
        return entry.deltas

    def _file_of(self, number: int, entry: StoredEntry) -> OpenFile:
        """Returns the open file that an entry is read from."""
        if not entry.deltas:
            return self._files[number]
        numbers = number, *entry.deltas
        if numbers not in self._with_deltas:
            self._with_deltas[numbers] = open_with_deltas(
                self._files[number], [self._files[each] for each in entry.deltas]
            )
        return self._with_deltas[numbers]

    def _open_all(self, numbers: Iterable[int], keys: Collection[str] | None) -> None:
        """Opens files by number, in several threads, unless they are open. Keeps these keys of each; None: all."""
        closed = [number for number in numbers if number not in self._files]
        if len(closed) <= _FEW_FILES:
            self._files |= {number: self.source.open_file(number, keys) for number in closed}
            return
        threads = min(len(closed), _FAR_THREADS if self.is_remote else _THREADS)
        with world().thread_pool(threads, "shardopt-open") as pool:
            opened = pool.map(lambda number: self.source.open_file(number, keys), closed)
            self._files |= dict(zip(closed, opened, strict=True))

    def _find_overlaps(self, layout: StoredLayout, dtype_name: str, box: Box) -> list[_Overlap]:
        """Returns the overlaps of the stored boxes with `box`, and keeps them, as layouts are few."""
        found = self._overlaps.get((layout, dtype_name, box))
        if found is not None:
            return found
        overlaps, dtype = [], DTYPES[dtype_name]
        for i, stored in enumerate(layout.boxes):
            common = stored.intersect(box)
            if common is None:
                continue
            wanted = None if common == box else common.within(box)
            entry = layout.entry(i)
            form, within = form_of(dtype, entry.box), common.within(entry.box)
            numbers = layout.files[i], *self._delta_files(entry)
            overlaps.append(_Overlap(numbers, entry, entry.key(""), form, dtype, within, wanted))
        if self._overlaps_kept + 1 + len(overlaps) > _MOST_OVERLAPS:  # of one who reads it all box by box
            self._overlaps.clear()
            self._overlaps_kept = 0
        self._overlaps_kept += 1 + len(overlaps)
        self._overlaps[layout, dtype_name, box] = overlaps
        return overlaps
