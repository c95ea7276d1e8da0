"""A checkpoint of as many data files as a job has ranks, written by one process in their place.

python -m benchmarks.many_files URL RANKS TENSORS
"""

from __future__ import annotations

import sys

import torch

from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.saving.commit import make_manifest, publish_checkpoint
from shardopt.checkpoint.saving.planning.describe import Description, geometry_of
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan, WriteRequest
from shardopt.checkpoint.saving.writing.write import write_files
from shardopt.checkpoint.storage import storage_of
from shardopt.sharding.mesh import Mesh, Split, mesh_layout


def write_checkpoint(url: str, ranks: int, tensors: int, columns: int = 16) -> dict[str, torch.Tensor]:
    """Writes what FSDP over `ranks` would save of some tensors (fp32, one row for each rank); returns them."""
    mesh = Mesh((ranks,), tuple(range(ranks)))
    state = {
        f"layers.{i}.weight": torch.arange(ranks * columns, dtype=torch.float32).reshape(ranks, columns) + i
        for i in range(tensors)
    }
    layout = mesh_layout((ranks, columns), mesh, (Split(0, 0),))
    described = {key: (tuple(key.split(".")), DTYPES["float32"], layout) for key in state}
    description = Description({}, described, {}, {}, {}, {}, "none", {})
    plan = SavePlan(geometry_of(description, ranks), ranks)
    none = SavePlan(geometry_of(Description({}, {}, {}, {}, {}, {}, "none", {}), ranks), ranks)
    storage, save_id = storage_of(url, durable=False), "0123456789ab"
    storage.make()

    def tensor_of(request: WriteRequest) -> torch.Tensor:
        return state[request.key][request.box.offsets[0] : request.box.offsets[0] + request.box.sizes[0]]

    reports = []
    boxes = plan.boxes_in_order
    for rank in range(ranks):
        writes = RankWrites(none, rank)
        for key, number in boxes[rank, 0]:
            writes.slots[0].append(WriteRequest(key, DTYPES["float32"], plan.assigned[key].boxes[number], 0, None))
        files = write_files(storage, save_id, writes, tensor_of, None)
        reports.append([[file.name, file.nbytes, file.digest] for file in files])
    publish_checkpoint(storage, *make_manifest(save_id, plan, {}, reports))
    return state


def main() -> None:
    url, ranks, tensors = sys.argv[1:]
    write_checkpoint(url, int(ranks), int(tensors))


if __name__ == "__main__":
    main()
