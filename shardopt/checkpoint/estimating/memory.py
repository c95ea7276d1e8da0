"""Host memory of a save and a load by stage, beside the state itself and what the process has anyway."""

from __future__ import annotations

from collections.abc import Mapping

from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.saving.planning.describe import Description
from shardopt.checkpoint.saving.planning.save_plan import RankWrites
from shardopt.checkpoint.saving.writing.device_stream import BUFFER_BYTES
from shardopt.checkpoint.saving.writing.staging import LEAST_SHARED_BYTES, held_by_several
from shardopt.checkpoint.sources.reading.checking import sizes_for
from shardopt.checkpoint.storage import Storage
from shardopt.checkpoint.storage.direct import BLOCK_BYTES
from shardopt.checkpoint.storage.remote import PART_BYTES

STAGES = ("plan", "stage", "write", "load")
_BUFFERS = 2  # of accelerators: one fills while the other is written
_BLOCKS = 3  # of a direct writer: two are written while one fills
_PARTS = 9  # of an upload: eight are on their way
_PLAN_BYTES_PER_TENSOR = 3000  # views, layouts, requests and text, measured over 10,000 tensors
_COPIES_OF_MANIFEST = 3  # text, bytes, and what it is made of


def host_bytes(
    description: Description, writes: RankWrites, storage: Storage, manifest_bytes: int, several: bool
) -> dict[str, int]:
    """Returns this rank's host memory in bytes at its peak, by stage.

    Args:
        several: whether more than one rank saves.
    """
    own = {key: view for key, view in description.views.items() if key not in description.tied}
    pieces = [piece.tensor for view in own.values() for piece in view.pieces]
    requests = [each for slot in writes.slots.values() for each in slot]
    held = held_by_several(own, description.tied, own.keys())
    shared = sum(piece.tensor.nbytes for view in held.values() for piece in view.pieces)
    staged = sum(tensor.nbytes for tensor in pieces)
    if several and description.check_replicas != "all" and shared >= LEAST_SHARED_BYTES:
        staged += sum(each.nbytes for each in requests if each.key in held) - shared
    written = sum(each.nbytes for each in requests)
    devices = {tensor.device.type for tensor in pieces}
    on_device = bool(devices - {"cpu", "meta"}) or devices == {"meta"}
    copied = max((tensor.nbytes for tensor in pieces if tensor.is_cpu and not tensor.is_contiguous()), default=0)
    found = stages_of(len(own), staged, written, on_device, storage, manifest_bytes)
    return {**found, "write": found["write"] + copied}


def stages_of(
    tensors: int, staged: int, written: int, on_device: bool, storage: Storage, manifest_bytes: int
) -> dict[str, int]:
    """Returns a rank's host memory in bytes by stage.

    "plan" is for descriptions, plan and manifest; "stage" for the copy of the state that `async_save` keeps; "write"
    and "load" for the buffers of each.

    Args:
        tensors: that the rank holds.
        staged, written: bytes of these that are copied, and that the rank writes.
        on_device: whether they are on an accelerator.
        manifest_bytes: on rank 0; 0 elsewhere.
    """
    blocks = _PARTS * PART_BYTES if storage.is_remote else _BLOCKS * BLOCK_BYTES
    buffers = min(_BUFFERS * BUFFER_BYTES, _BUFFERS * written) if on_device else 0
    sizes = sizes_for(storage)
    read = sizes.most_threads * (sizes.batch + 2 * SEGMENT_BYTES)
    return {
        "plan": _COPIES_OF_MANIFEST * manifest_bytes + _PLAN_BYTES_PER_TENSOR * tensors,
        "stage": staged,
        "write": buffers + min(blocks, written),
        "load": buffers + min(read, written),
    }


def largest(of_ranks: list[Mapping[str, int]]) -> dict[str, int]:
    """Returns the host memory of the rank that takes the most, by stage."""
    return {stage: max(each[stage] for each in of_ranks) for stage in STAGES}
