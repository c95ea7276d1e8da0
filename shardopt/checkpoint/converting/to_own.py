"""Writes a checkpoint of our own format, as a different number of ranks would have written it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import xxhash

from shardopt.checkpoint.converting.choosing import Choice
from shardopt.checkpoint.converting.out_files import OutFile, Written, files_of_earlier
from shardopt.checkpoint.converting.plan import OutPlan, refuse_checkpoints
from shardopt.checkpoint.converting.streaming import Part
from shardopt.checkpoint.converting.zip_bytes import Take
from shardopt.checkpoint.format.assign import Member, check_covers
from shardopt.checkpoint.format.constants import MANIFEST_NAME, SEGMENT_BYTES, file_name
from shardopt.checkpoint.format.values import encode_each
from shardopt.checkpoint.saving.commit import make_manifest, publish_checkpoint, refuse_committed
from shardopt.checkpoint.saving.planning.describe import Geometry
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import Storage
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.box import Box
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from shardopt.state.values import encode_value

LayoutOf = Callable[[str], Layout]
"""Maps the new key of a tensor to its layout."""


def plan_own(
    choice: Choice, storage: Storage, layout_of: LayoutOf, world_size: int, save_id: str | None, drop_per_rank: bool
) -> OwnPlan:
    """Plans a checkpoint.

    Args:
        layout_of: gives each written tensor a layout, whose holders are ranks of the job to be.
        world_size: of that job.
        save_id: the name of the save; None for one that follows from what is written, so that a conversion that was
            killed can resume.
        drop_per_rank: leave out values per rank.

    Raises:
        MismatchError: there are values per rank, and neither their number fits nor are they to be dropped.
        LayoutError: a layout does not make up its tensor.
    """
    everyone = tuple(range(world_size))
    members = {each.key: Member(each.path, each.dtype, layout_of(each.key), everyone) for each in choice.written}
    tied = {key: (each.tied_to, each.path) for key, each in choice.tensors.items() if each.tied_to is not None}
    keeps_per_rank = _keeps_per_rank(choice, world_size, drop_per_rank)
    check_covers(members)
    per_rank = choice.per_rank if keeps_per_rank else {}
    plan = SavePlan(Geometry(members, per_rank, tied, choice.module_versions or {}), world_size)
    values = {rank: _per_rank(choice, rank) if keeps_per_rank else b"" for rank in everyone}
    if save_id is None:
        assigned = [(key, each.boxes, each.writers) for key, each in plan.assigned.items()]
        paths = [(key, each.path, each.stored, each.dtype.name) for key, each in choice.tensors.items()]
        text = repr((choice.reader.digest, world_size, assigned, paths, values))
        save_id = xxhash.xxh3_64_hexdigest(text.encode())[:12]
    return OwnPlan(storage, choice, plan, save_id, values)


class OwnPlan(OutPlan):
    """A checkpoint that is whole once its manifest exists."""

    def __init__(
        self, storage: Storage, choice: Choice, plan: SavePlan, save_id: str, values: Mapping[int, bytes]
    ) -> None:
        writes = {rank: RankWrites(plan, rank) for rank in values}
        stored = {tensor.key: tensor.stored for tensor in choice.written}
        files = [
            OwnFile(file_name(save_id, rank, slot), writes[rank], slot, stored, values[rank] if slot == 0 else b"")
            for rank, slot in plan.files
        ]
        super().__init__(storage, choice, files, [MANIFEST_NAME])
        self.plan, self.save_id, self._world_size = plan, save_id, len(values)

    def refuse_taken(self) -> None:
        refuse_committed(self.storage)
        refuse_checkpoints(self.storage, files_of_earlier(self.storage))

    def commit(self, written: Sequence[Written]) -> None:
        reports: list[list[list[object]]] = [[] for _ in range(self._world_size)]
        for (rank, _), file in zip(self.plan.files, written, strict=True):
            reports[rank].append([file.name, file.nbytes, file.note])
        source = self.choice.reader.manifest
        manifest, data = make_manifest(
            self.save_id,
            self.plan,
            encode_each(self.choice.values),
            reports,
            metrics=source.metrics,
            saved_at=source.saved_at,
            renamed=self.choice.renamed,
        )
        publish_checkpoint(self.storage, manifest, data)


class OwnFile(OutFile):
    """A data file of a rank, with its checksums."""

    def __init__(self, name: str, writes: RankWrites, slot: int, stored: Mapping[str, str], per_rank: bytes) -> None:
        requests = writes.slots.get(slot, [])
        parts = [Part(each.key, stored[each.key], each.dtype, each.box) for each in requests]
        self._header, self._per_rank = writes.header(slot, len(per_rank)), per_rank
        begins, begin = [], len(self._header)
        for part in parts:
            begins.append(begin)
            begin += part.nbytes
        super().__init__(name, parts, begins, writes.file_bytes(slot, len(per_rank)), self._header + per_rank)
        self._digest = ""

    def body(self, take: Take) -> Iterator[memoryview]:
        yield memoryview(self._header)
        sums = b""
        for _ in self.parts:
            sums_of_part = SegmentSums()
            for chunk in take():
                sums_of_part.add(chunk)
                yield chunk
            sums += sums_of_part.all()
        if self._per_rank:
            sums_of_values = SegmentSums()
            sums_of_values.add(memoryview(self._per_rank))
            sums += sums_of_values.all()
            yield memoryview(self._per_rank)
        self._digest = xxhash.xxh3_64_hexdigest(self._header + sums)
        yield memoryview(sums)

    def note(self) -> str:
        """Returns the digest of header and checksums, which the manifest stores."""
        return self._digest


class SegmentSums:
    """Computes the checksums of the segments of an entry whose bytes come in chunks of any size."""

    def __init__(self) -> None:
        self._sums: list[bytes] = []
        self._segment, self._room = xxhash.xxh3_64(), SEGMENT_BYTES

    def add(self, chunk: memoryview) -> None:
        begin = 0
        while begin < chunk.nbytes:
            piece = chunk[begin : begin + self._room]
            self._segment.update(piece)
            begin, self._room = begin + piece.nbytes, self._room - piece.nbytes
            if not self._room:
                self._end()

    def all(self) -> bytes:
        """Returns the checksums, concatenated."""
        if self._room < SEGMENT_BYTES:
            self._end()
        return b"".join(self._sums)

    def _end(self) -> None:
        self._sums.append(self._segment.digest())
        self._segment, self._room = xxhash.xxh3_64(), SEGMENT_BYTES


def chunked_layout(shape: tuple[int, ...], boxes: Sequence[Box], world_size: int) -> Layout:
    """Returns a layout sharded along the dimension that the tensor is stored in the most shards along now.

    A tensor that is stored as one box gets the layout of a tensor that is whole on every rank.
    """
    cut_counts = [len({box.offsets[dim] for box in boxes}) for dim in range(len(shape))]
    if max(cut_counts, default=1) <= 1:
        return Layout.replicated(shape)
    mesh = Mesh((world_size,), tuple(range(world_size)))
    return mesh_layout(shape, mesh, (Split(0, cut_counts.index(max(cut_counts))),))


def _keeps_per_rank(choice: Choice, world_size: int, drop: bool) -> bool:
    source = choice.reader.manifest
    if drop or not choice.per_rank:
        return False
    if source.world_size != world_size:
        remedy = "keep the number, or pass drop_per_rank=True"
        key, stored_ranks = ", ".join(choice.per_rank), f"values of {source.world_size} ranks"
        problem = Problem(key, stored_ranks, f"{world_size} ranks", remedy)
        raise MismatchError("values per rank do not fit another number of ranks", [problem], code="cannot-convert")
    return True


def _per_rank(choice: Choice, rank: int) -> bytes:
    reader: CheckpointReader = choice.reader
    stored = reader.per_rank(rank)
    chosen = {key: stored[choice.stored_per_rank[key]] for key in choice.per_rank}
    return json.dumps({key: encode_value(value, key) for key, value in chosen.items()}).encode()
