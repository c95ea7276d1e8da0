"""Estimates what checkpoints like a stored one cost on any number of ranks, without the app that saved it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from shardopt.checkpoint.arguments import count_problem, refuse
from shardopt.checkpoint.converting.reshard import chunks_over
from shardopt.checkpoint.estimating.kept import kept_over_run
from shardopt.checkpoint.estimating.measure import NOT_MEASURED, measure
from shardopt.checkpoint.estimating.memory import stages_of
from shardopt.checkpoint.estimating.planned import NO_DIGEST, NO_ID, PlannedSave
from shardopt.checkpoint.estimating.report import Estimate
from shardopt.checkpoint.estimating.sample import sizes_of
from shardopt.checkpoint.format.assign import Member
from shardopt.checkpoint.format.constants import file_name
from shardopt.checkpoint.format.values import encode_each
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.saving.commit import make_manifest
from shardopt.checkpoint.saving.planning.describe import Geometry
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan, WriteRequest
from shardopt.checkpoint.sources.open import open as open_checkpoint
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import storage_of, wrap_os_errors
from shardopt.checkpoint.stream.root import StreamRoot
from shardopt.errors import CheckpointError, Problem
from shardopt.ranks import Ranks, call_on
from shardopt.world import world


def estimate_stored(
    ranks: Ranks,
    url: str,
    *,
    world_size: int | None = None,
    steps: int | None = None,
    every: int = 1,
    rules: Retention,
    seconds_per_step: float | None = None,
    measure_seconds: float = 0.0,
) -> Estimate:
    """Estimates the costs of saves and loads of a stored checkpoint by a different number of ranks. Collective.

    Args:
        ranks: that measure, each as the rank that writes the most.
        url: of a checkpoint, or of the root of a run, of which the newest counts. The storage measured is the root's.
        world_size: of the run to be, whose tensors are cut as `reshard` cuts them; None for as many as have saved it.
        steps, every, seconds_per_step, measure_seconds: as for `estimate`.
        rules: of retention.

    Raises:
        OptionError: arguments out of their range.
        CheckpointError: `url` cannot be read, or its root cannot be written.
    """
    refuse([] if world_size is None else count_problem("ranks", world_size, 1))
    if steps is not None:
        kept_over_run(0, rules, steps, every, seconds_per_step)  # which refuses before anything is written
    begin = world().monotonic()
    with open_checkpoint(_newest(url)) as reader:
        opening = world().monotonic() - begin
        size = world_size or reader.manifest.world_size
        planned = _planned(reader, size)
        url = reader.url
        parent = reader.source.storage.parent()
    measured = NOT_MEASURED
    if measure_seconds:
        if parent is None:
            problem = Problem(url, "no directory above it", "the root of a run", "add --measure 0 to measure nothing")
            raise CheckpointError("there is nowhere to measure", [problem], code="run-root")
        call, cpu = call_on("trying the storage", parent[0].url), torch.device("cpu")
        sizes = sizes_of(planned.writes)
        measured = measure(ranks, call, parent[0], sizes, planned.manifest, cpu, measure_seconds)
    nbytes = sum(planned.bytes_by_rank) + planned.manifest_bytes
    kept = None if steps is None else kept_over_run(nbytes, rules, steps, every, seconds_per_step)
    return Estimate.of(url, planned, measured, opening, kept)


def _newest(url: str) -> str:
    """Returns the URL of the newest checkpoint of a run, or the URL itself if it is no root."""
    root = StreamRoot(storage_of(url))
    with wrap_os_errors(f"look into {url}"):
        newest = root.newest()
    return url if newest is None else root.checkpoint(newest.id).url


def _planned(reader: CheckpointReader, world_size: int) -> PlannedSave:
    """Plans a save of a checkpoint's contents by a number of ranks; of values per rank nothing."""
    manifest = reader.manifest
    layout_of, everyone = chunks_over(world_size), tuple(range(world_size))
    members = {
        key: Member(tensor.path, tensor.dtype, layout_of(key, tensor.layout), everyone)
        for key, tensor in manifest.tensors.items()
        if tensor.tied_to is None
    }
    tied = {key: (each.tied_to, each.path) for key, each in manifest.tensors.items() if each.tied_to is not None}
    plan = SavePlan(Geometry(members, {}, tied, manifest.module_versions or {}), world_size)
    writes = _writes_by_rank(plan, world_size)
    nbytes = [{slot: each.file_bytes(slot, 0) for slot in sorted(each.slots)} for each in writes]
    of_files = [
        [[file_name(NO_ID, rank, slot), size, NO_DIGEST] for slot, size in of_rank.items()]
        for rank, of_rank in enumerate(nbytes)
    ]
    noted = {name: getattr(manifest, name) for name in ("seconds", "frozen", "in_eval")}
    _, data = make_manifest(NO_ID, plan, encode_each(manifest.values), of_files, **noted)
    sizes = [sum(map(each.tensor_bytes, each.slots)) for each in writes]
    most = max(range(world_size), key=sizes.__getitem__)
    return PlannedSave(
        writes=writes[most],
        bytes_by_rank=tuple(sum(of_rank.values()) for of_rank in nbytes),
        manifest=data,
        manifest_bytes=len(data),
        tensors=len(manifest.tensors),
        host_bytes=stages_of(len(members), sizes[most], sizes[most], True, reader.source.storage, len(data)),
        seconds=0.0,
    )


def _writes_by_rank(plan: SavePlan, world_size: int) -> Sequence[RankWrites]:
    """Returns the writes of all ranks, by rank; looks at each box once, however many ranks there are."""
    requests: defaultdict[int, dict[int, list[WriteRequest]]] = defaultdict(dict)
    boxes: Mapping[tuple[int, int], Sequence[tuple[str, int]]] = plan.boxes_in_order
    for (rank, slot), of_file in boxes.items():
        requests[rank][slot] = [
            WriteRequest(key, plan.geometry.members[key].dtype, plan.assigned[key].boxes[number], 0, None)
            for key, number in of_file
        ]
    return [RankWrites(plan, rank, {}).only(requests[rank]) for rank in range(world_size)]
