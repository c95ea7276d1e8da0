"""Plans for one rank of a large job without the others: FSDP over 512 ranks × 32 replicas, AdamW.

    python -m benchmarks.simulate_scale

Times what one rank works out alone (layouts, fingerprint, assignment, its own part), the first time and again, the
size of the manifest and the time to read it.
"""

from __future__ import annotations

import time

from benchmarks.peers import write_table
from shardopt.checkpoint.commit import manifest_of
from shardopt.checkpoint.format.constants import DTYPES, file_name
from shardopt.checkpoint.format.manifest import decode_manifest, encode_manifest
from shardopt.checkpoint.planning.describe import Description, geometry_of
from shardopt.checkpoint.planning.save_plan import RankWrites, SavePlan
from shardopt.gc_pause import gc_paused
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout

REPLICAS, SHARDS, LAYERS = 32, 512, 200
WIDTH = 8192
RANK = 4711

SHAPES = {
    "attention.query.weight": (WIDTH, WIDTH),
    "attention.key.weight": (WIDTH // 8, WIDTH),
    "attention.value.weight": (WIDTH // 8, WIDTH),
    "attention.output.weight": (WIDTH, WIDTH),
    "attention.norm.weight": (WIDTH,),
    "feed_forward.gate.weight": (28672, WIDTH),
    "feed_forward.up.weight": (28672, WIDTH),
    "feed_forward.down.weight": (WIDTH, 28672),
    "feed_forward.norm.weight": (WIDTH,),
    "router.bias": (100,),  # fewer elements than shards: most ranks hold nothing of it
}


def describe(mesh: Mesh) -> Description:
    """2,000 parameters in bfloat16 and their AdamW state, as one rank sees them."""
    tensors = {}
    bf16, fp32 = DTYPES["bfloat16"], DTYPES["float32"]
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            fqn = f"layers.{layer}.{name}"
            layout = mesh_layout(shape, mesh, (Split(1, 0),))
            tensors[f"model.{fqn}"] = (("model", fqn), bf16, layout)
            tensors[f"optimizer.state.{fqn}.exp_avg"] = (("optimizer", "state", fqn, "exp_avg"), fp32, layout)
            tensors[f"optimizer.state.{fqn}.exp_avg_sq"] = (("optimizer", "state", fqn, "exp_avg_sq"), fp32, layout)
            tensors[f"optimizer.state.{fqn}.step"] = (("optimizer", "state", fqn, "step"), fp32, Layout.replicated(()))
    return Description({}, tensors, {}, {}, {}, {})


_kept: dict[str, tuple[SavePlan, RankWrites]] = {}


def plan(mesh: Mesh) -> SavePlan:
    """Plans a save on one rank, up to the first write; the plan is kept as `save` keeps it."""
    description = describe(mesh)
    fingerprint = description.geometry_fingerprint()
    if fingerprint not in _kept:
        planned = SavePlan(geometry_of(description, REPLICAS * SHARDS), REPLICAS * SHARDS)
        _kept[fingerprint] = planned, RankWrites(planned, RANK)
    return _kept[fingerprint][0]


def timed(function, *args):
    with gc_paused():  # as in a save
        begin = time.perf_counter()
        result = function(*args)
        return time.perf_counter() - begin, result


def main() -> None:
    mesh = Mesh((REPLICAS, SHARDS), tuple(range(REPLICAS * SHARDS)))
    first, planned = timed(plan, mesh)
    again, _ = timed(plan, mesh)
    reports = [[[file_name("0123456789ab", *file), 1 << 30, "0123456789abcdef"]] for file in planned.files]
    build, manifest = timed(manifest_of, "0123456789ab", planned, {}, reports)
    encode, data = timed(encode_manifest, manifest)
    parse, _ = timed(decode_manifest, data, "simulated")
    loads: dict[int, int] = {}
    for key, each in planned.assigned.items():
        for box, (rank, _) in zip(each.boxes, each.writers, strict=True):
            loads[rank] = loads.get(rank, 0) + box.numel * planned.geometry.members[key].dtype.itemsize
    mean = sum(loads.values()) / (REPLICAS * SHARDS)
    rows = [
        ("tensors", f"{len(planned.assigned):,}"),
        ("plan of one rank, first", f"{first:.2f} s"),
        ("plan of one rank, repeated", f"{again * 1000:.0f} ms"),
        ("the most that one rank writes / the mean", f"{max(loads.values()) / mean:.3f}"),
        ("manifest, built on rank 0", f"{build:.2f} s + {encode:.2f} s"),
        ("manifest, size", f"{len(data) / 2**20:.1f} MiB"),
        ("manifest, parsing", f"{parse:.2f} s"),
    ]
    print(write_table("scale", f"One rank of {REPLICAS * SHARDS:,}, simulated", ("what", "found"), rows))


if __name__ == "__main__":
    main()
