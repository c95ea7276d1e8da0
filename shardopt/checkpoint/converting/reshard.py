"""Rewrites a checkpoint as a different number of ranks would have written it, offline, in one process."""

from __future__ import annotations

import os
from collections.abc import Callable

from shardopt.checkpoint.converting.choosing import choose
from shardopt.checkpoint.converting.out_files import write_file
from shardopt.checkpoint.converting.plan import refuse_checkpoints
from shardopt.checkpoint.converting.to_own import chunked_layout, plan_own
from shardopt.checkpoint.format.manifest import StoredLayout
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.reports import SaveReport, emit_report
from shardopt.checkpoint.saving.commit import refuse_committed
from shardopt.checkpoint.saving.removal import discard
from shardopt.checkpoint.sources.open import open as open_checkpoint
from shardopt.checkpoint.storage import storage_of
from shardopt.sharding.layout import Layout
from shardopt.world import world

ChooseLayout = Callable[[str, StoredLayout], Layout]
"""Maps a key and its stored layout to a layout whose holders are the ranks of the new job."""


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
    """Writes the checkpoint at `src` to `dst` as a different number of ranks would have written it. Local.

    Needs no accelerator. A load reshards anyway: this is for handing a checkpoint on in another shape, or for reading
    it once instead of at every start. At most some 40 MiB of tensors are in memory at a time.

    Args:
        src: of a committed checkpoint.
        dst: a directory that holds no checkpoint of any format.
        world_size: the number of new ranks. Each tensor is cut into so many chunks along the dimension that has the
            most shards now. A tensor stored as one box is whole on every rank, and they share the writing.
        layout: instead of `world_size`, chooses the layout of each tensor.
        drop_per_rank: leave out values per rank; they cannot be kept where the number of ranks changes.
        progress: called with the bytes that are written and those there are.
        base_root: as for `open`. What `src` refers to is written to `dst` as all else: that one is whole by itself.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: as for `open`.
        CheckpointExistsError: a checkpoint stands at `dst`.
        MismatchError: there are values per rank, and neither their number fits nor are they to be dropped.
        LayoutError: a chosen layout does not make up its tensor.
    """
    if (world_size is None) == (layout is None):
        raise ValueError("world_size and layout: found both or neither; required one of them; give one")
    begin = world().monotonic()
    target = storage_of(dst)
    refuse_committed(target)
    refuse_checkpoints(target)
    with open_checkpoint(src, base_root) as reader:
        stored = reader.manifest.tensors
        choose_layout = layout or chunks_over(world_size or 0)
        layouts = {key: choose_layout(key, tensor.layout) for key, tensor in stored.items() if tensor.tied_to is None}
        named = [rank for each in set(layouts.values()) for ranks in each.holders or () for rank in ranks]
        size = world_size or 1 + max(named, default=0)
        save_id = world().random_name(6)
        plan = plan_own(choose(reader, may_be_empty=True), target, layouts.__getitem__, size, save_id, drop_per_rank)
        target.make()
        done = Counter(sum(file.nbytes for file in plan.files), progress)
        try:
            written = [write_file(target, file, reader, plan.shapes, done.add) for file in plan.files]
            plan.commit(written)
        except BaseException:
            discard(target, save_id)
            raise
    total = sum(file.nbytes for file in written)
    report = SaveReport(target.url, save_id, len(stored), total, total, world().monotonic() - begin)
    emit_report("reshard", report)
    return report


def chunks_over(world_size: int) -> ChooseLayout:
    """Returns the layouts for `reshard(world_size=)`: chunks along the dimension that has the most shards now."""
    return lambda key, stored: chunked_layout(stored.shape, stored.boxes, world_size)
