"""Rewrites a checkpoint as other ranks would have written it; offline, in one process, a piece at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

from shardopt.checkpoint.commit import commit, discard, refuse_committed
from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.format.manifest import StoredLayout
from shardopt.checkpoint.format.metrics import pack_metrics
from shardopt.checkpoint.format.shared_values import encode_each
from shardopt.checkpoint.format.tensor_bytes import bytes_of
from shardopt.checkpoint.planning.assign import Member, check_covers
from shardopt.checkpoint.planning.describe import Geometry
from shardopt.checkpoint.planning.save_plan import RankWrites, SavePlan, WriteRequest
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reading.fetch import pieces_in_order
from shardopt.checkpoint.reports import SaveReport, emit_report
from shardopt.checkpoint.sources.open import open_checkpoint
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.writing.write import write_files
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from shardopt.values import encode_value
from shardopt.world import world

ChooseLayout = Callable[[str, StoredLayout], Layout]
"""Maps a key and its stored layout to a layout, whose holders are ranks of the job to be."""


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    world_size: int | None = None,
    layout: ChooseLayout | None = None,
    drop_per_rank: bool = False,
    progress: Progress | None = None,
    base_root: str | os.PathLike[str] | None = None,
) -> SaveReport:
    """Writes the checkpoint at `src` to `dst` as other ranks would have written it. Local; needs no accelerator.

    A load reshards anyway: this is for handing a checkpoint on in another shape, or for reading it once instead of at
    every start. At most some 20 MiB of tensors are in memory at a time.

    Args:
        src: of a committed checkpoint.
        dst: a directory that holds no committed checkpoint.
        world_size: of ranks that hold each tensor sharded along the dimension that is stored in the most shards now, in
            this many chunks; a tensor that is stored as one box is whole on every rank, and they share the writing.
        layout: instead of `world_size`, chooses the layout of each tensor.
        drop_per_rank: leave out values per rank; they cannot be kept where the number of ranks changes.
        progress: called with the bytes of tensors that are written and those there are.
        base_root: as for `open`. What `src` refers to is written to `dst` as all else: that one is whole by itself.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: as for `open`.
        CheckpointExistsError: a committed checkpoint stands at `dst`.
        MismatchError: there are values per rank, and neither their number fits nor are they to be dropped.
        LayoutError: a chosen layout does not make up its tensor.
    """
    if (world_size is None) == (layout is None):
        raise ValueError("world_size and layout: found both or neither; required one of them; give one")
    begin = world().monotonic()
    target = storage_of(dst)
    refuse_committed(target)
    with open_checkpoint(src, base_root) as reader:
        choose = layout or chunks_over(world_size or 0)
        stored = reader.manifest.tensors
        tied = {key: (each.tied_to, each.path) for key, each in stored.items() if each.tied_to is not None}
        tensors = {key: tensor for key, tensor in stored.items() if key not in tied}
        layouts = {key: choose(key, tensor.layout) for key, tensor in tensors.items()}
        named = [rank for each in set(layouts.values()) for ranks in each.holders or () for rank in ranks]
        size = world_size or 1 + max(named, default=0)
        everyone = tuple(range(size))
        members = {key: Member(t.path, t.dtype, layouts[key], everyone) for key, t in tensors.items()}
        keep_per_rank = _keeps_per_rank(reader, size, drop_per_rank)
        check_covers(members)
        plan = SavePlan(Geometry(members, reader.manifest.per_rank if keep_per_rank else {}, tied), size)

        target.make()
        save_id = world().random_name(6)
        source = _Source(reader, sum(member.nbytes for member in members.values()), progress)
        try:
            reports = []
            for rank in everyone:
                per_rank = _per_rank(reader, rank) if keep_per_rank else None
                files = write_files(target, save_id, RankWrites(plan, rank), source.chunks_of, per_rank)
                reports.append([[file.name, file.nbytes, file.digest] for file in files])
            values = encode_each(reader.manifest.values)
            metrics = None if reader.manifest.metrics is None else pack_metrics(reader.manifest.metrics)
            total = commit(target, save_id, plan, values, reports, metrics, reader.manifest.saved_at)
        except BaseException:
            discard(target, save_id)
            raise
    report = SaveReport(target.url, save_id, len(stored), total, total, world().monotonic() - begin)
    emit_report("reshard", report)
    return report


def chunks_over(world_size: int) -> ChooseLayout:
    """Returns the choice of `reshard(world_size=)`: chunks of the dimension that is stored in the most shards now."""
    mesh = Mesh((world_size,), tuple(range(world_size)))

    def choose(key: str, stored: StoredLayout) -> Layout:
        cut_counts = [len({box.offsets[dim] for box in stored.boxes}) for dim in range(len(stored.shape))]
        if max(cut_counts, default=1) <= 1:
            return Layout.replicated(stored.shape)
        return mesh_layout(stored.shape, mesh, (Split(0, cut_counts.index(max(cut_counts))),))

    return choose


def _keeps_per_rank(reader: CheckpointReader, size: int, drop: bool) -> bool:
    stored = reader.manifest
    if drop or not stored.per_rank:
        return False
    if stored.world_size != size:
        remedy = "keep the number, or drop_per_rank=True"
        key, stored_ranks = ", ".join(stored.per_rank), f"values of {stored.world_size} ranks"
        problem = Problem(key, stored_ranks, f"{size} ranks", remedy)
        raise MismatchError("values per rank do not fit another number of ranks", [problem])
    return True


def _per_rank(reader: CheckpointReader, rank: int) -> bytes:
    return json.dumps({key: encode_value(value, key) for key, value in reader.per_rank(rank).items()}).encode()


class _Source:
    """The source of a resharded save: the bytes of write requests, read from a checkpoint a piece at a time."""

    def __init__(self, reader: CheckpointReader, total: int, progress: Progress | None) -> None:
        self._reader, self._total, self._progress, self._done = reader, total, progress, 0

    def chunks_of(self, request: WriteRequest) -> Iterator[memoryview]:
        buffered = bytearray()
        for box in pieces_in_order(request.box, request.dtype.itemsize):
            piece = bytes_of(self._reader.read(request.key, box))
            self._done += piece.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
            buffered += piece
            whole_segments = len(buffered) - len(buffered) % SEGMENT_BYTES
            if whole_segments:
                yield memoryview(bytes(buffered[:whole_segments]))
                del buffered[:whole_segments]
        if buffered:
            yield memoryview(bytes(buffered))
