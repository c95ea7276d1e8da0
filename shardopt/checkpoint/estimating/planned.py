"""The plan of a save that is not made: the bytes of every file, by the stages of a save. Collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardopt.checkpoint.estimating.memory import host_bytes, largest
from shardopt.checkpoint.format.constants import file_name
from shardopt.checkpoint.saving.agree_plan import Comparison, Planning, compare_reports
from shardopt.checkpoint.saving.commit import make_manifest
from shardopt.checkpoint.saving.options import SaveOptions
from shardopt.checkpoint.saving.planning.describe import Description, describe
from shardopt.checkpoint.saving.planning.save_plan import RankWrites
from shardopt.checkpoint.saving.writing.write import values_by_slot
from shardopt.checkpoint.storage import Storage
from shardopt.ranks import Call, Ranks
from shardopt.state.state import FlatState
from shardopt.world import world

NO_ID, NO_DIGEST = "0" * 12, "0" * 16  # in the place of what is as long
_SECONDS = 0.1234567890123456  # as many digits as the seconds of a save mostly have


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A planned save.

    Args:
        writes: of this rank.
        bytes_by_rank: of data files, with headers and checksums.
        manifest: its bytes, on rank 0; b"" elsewhere.
        tensors: how many the checkpoint would hold.
        host_bytes: of the rank that takes the most, by stage.
        seconds: on the slowest rank, for what is no work of the storage, in a save after the first one.
    """

    writes: RankWrites
    bytes_by_rank: tuple[int, ...]
    manifest: bytes
    manifest_bytes: int
    tensors: int
    host_bytes: Mapping[str, int]
    seconds: float


def plan_save(
    ranks: Ranks, call: Call, flat: FlatState, options: SaveOptions, storage: Storage, seconds: float
) -> PlannedSave:
    """Plans a save as `save` does, up to its first written byte. Collective.

    Args:
        flat: this rank's state; tensors may be on the meta device.
        seconds: that it took to take the state.

    Raises:
        ShardoptError: as `save`, for state that cannot be stored or differs between ranks. Replicas are not compared.
    """
    begin = world().monotonic()
    planning = Planning(ranks, call, {})
    check_replicas = options.check_replicas if ranks.size > 1 else "none"

    def described() -> Description:
        found = describe(flat, "none", ranks.job_numbers, ranks.size == 1, needs_bytes=False)
        return replace(found, check_replicas=check_replicas)

    description, compared = ranks.agree(call, described, planning.report_state, lambda got: [*compare_reports(got)])
    seconds += world().monotonic() - begin
    error = planning.plan(Comparison(*compared))

    def files() -> list[list[Any]]:
        if error is not None:
            raise error
        writes, rank = planning.planned.writes, ranks.rank
        values = values_by_slot(writes, planning.per_rank())
        return [
            [file_name(NO_ID, rank, slot), writes.file_bytes(slot, len(values[slot])), NO_DIGEST] for slot in values
        ]

    data = [b""]

    def merge(reports: Sequence[Any]) -> dict[str, Any]:
        of_files, states = zip(*reports, strict=True)
        values, frozen, _, _ = planning.judge(states)
        plan = planning.planned.plan
        began = world().monotonic()
        for _ in range(2):  # at the second time as in later saves: what does not change is kept
            began = world().monotonic()
            _, data[0] = make_manifest(NO_ID, plan, values, of_files, seconds=_SECONDS, frozen=frozen)
        return {
            "bytes": [sum(nbytes for _, nbytes, _ in of_rank) for of_rank in of_files],
            "manifest": len(data[0]),
            "tensors": len(plan.geometry.members) + len(plan.geometry.tied),
            "seconds": world().monotonic() - began,
        }

    _, found = ranks.agree(call, files, lambda own: [own, planning.report()], merge)
    writes, several = planning.planned.writes, ranks.size > 1
    _, (memory, slowest) = ranks.agree(
        call,
        work=lambda: host_bytes(description, writes, storage, found["manifest"] if ranks.rank == 0 else 0, several),
        report=lambda own: [own, seconds],
        decide=lambda reports: [largest([own for own, _ in reports]), max(took for _, took in reports)],
    )
    return PlannedSave(
        writes=writes,
        bytes_by_rank=tuple(found["bytes"]),
        manifest=data[0],
        manifest_bytes=found["manifest"],
        tensors=found["tensors"],
        host_bytes=memory,
        seconds=slowest + found["seconds"],
    )
