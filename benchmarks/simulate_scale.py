"""Plans for single ranks of large jobs without the others.

    python -m benchmarks.simulate_scale [alike] [kinds] [mesh] [agreement] [files]

`alike`: FSDP over 512 ranks × 32 replicas, AdamW. Times what one rank works out alone (layouts, fingerprint,
assignment, its own part), the first time and again, the size of the manifest and the time to read it and hand it on.

`kinds`: a mixture of experts on 16 stages × 32 expert groups × 32 data parallel ranks. Dense parameters are sharded
over the 1,024 ranks of a stage, experts over the 32 of their group. Times what rank 0 does when all descriptions are
there, and what any other rank does with its answer; and the second save of the same layouts.

`mesh`: FSDP over 512 ranks, one dimension of a mesh of 1,024, so that two kinds of ranks hold copies. Both in seconds
of the processor.

`agreement`: all that ranks say to each other in a save, by their real code (`agreement_at_scale.py`), with bounds.

`files`: opening, failing and retention of as many ranks and files (`scale_of_files.py`), with bounds.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import xxhash

from benchmarks import scale_of_files
from benchmarks.agreement_at_scale import LEADER, MEMBER, measure
from benchmarks.bounds import HEADINGS, row
from benchmarks.peers import write_table
from shardopt.checkpoint.format.assign import check_covers
from shardopt.checkpoint.format.constants import DTYPES, MANIFEST_NAME, Dtype, file_name
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.values import Values
from shardopt.checkpoint.saving.agree_plan import KeptPlan, PlanCache, Planning, compare_reports
from shardopt.checkpoint.saving.commit import make_manifest
from shardopt.checkpoint.saving.planning.describe import Description, geometry_of
from shardopt.checkpoint.saving.planning.merge import (
    MergedGeometry,
    merge_geometry,
    merge_values,
    read_section,
    sections_of,
)
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import RecordedReads
from shardopt.ranks import Ranks, as_call
from shardopt.ranks.connections.tree import RANKS_PER_BLOCK
from shardopt.ranks.kinds import compress, decompress
from shardopt.runtime.gc_pause import gc_paused
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from shardopt.state.values import encode_value

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


def describe_parameters(layouts: dict[str, Layout]) -> Description:
    """Parameters in bfloat16 and their AdamW state, as one rank sees them."""
    tensors: dict[str, tuple[tuple[str, ...], Dtype, Layout]] = {}
    bf16, fp32 = DTYPES["bfloat16"], DTYPES["float32"]
    for fqn, layout in layouts.items():
        tensors[f"model.{fqn}"] = (("model", fqn), bf16, layout)
        tensors[f"optimizer.state.{fqn}.exp_avg"] = (("optimizer", "state", fqn, "exp_avg"), fp32, layout)
        tensors[f"optimizer.state.{fqn}.exp_avg_sq"] = (("optimizer", "state", fqn, "exp_avg_sq"), fp32, layout)
        tensors[f"optimizer.state.{fqn}.step"] = (("optimizer", "state", fqn, "step"), fp32, Layout.replicated(()))
    return Description({}, tensors, {}, {"rng": ("rng",)}, {}, {}, "sampled", {})


def describe(mesh: Mesh) -> Description:
    """2,000 parameters."""
    layouts = {
        f"layers.{layer}.{name}": mesh_layout(shape, mesh, (Split(1, 0),))
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    }
    return describe_parameters(layouts)


_kept: dict[str, tuple[SavePlan, RankWrites]] = {}


def plan(mesh: Mesh) -> SavePlan:
    """Plans a save on one rank, up to the first write; the plan is kept as `save` keeps it."""
    description = describe(mesh)
    fingerprint = description.geometry_fingerprint()
    if fingerprint not in _kept:
        planned = SavePlan(geometry_of(description, REPLICAS * SHARDS), REPLICAS * SHARDS)
        _kept[fingerprint] = planned, RankWrites(planned, RANK)
    return _kept[fingerprint][0]


def worked(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Returns seconds of the processor, and the result: one thread works, and others of the machine do not count."""
    with gc_paused():  # as in a save
        begin = time.process_time()
        result = function(*args)
        return time.process_time() - begin, result


STAGES, EXPERT_GROUPS, DATA = 16, 32, 32
LAYERS_OF_STAGE, EXPERT_WIDTH = 2, 4096
OWN_KIND = 147  # of the ranks whose work is timed


def describe_expert_group(stage: int, group: int) -> tuple[tuple[int, ...], Description]:
    """The ranks of one stage and expert group, and the description that they share; a counter is on all ranks."""
    first = stage * EXPERT_GROUPS * DATA
    ranks = tuple(range(first + group * DATA, first + (group + 1) * DATA))
    of_stage = Mesh((EXPERT_GROUPS * DATA,), tuple(range(first, first + EXPERT_GROUPS * DATA)))
    of_group = Mesh((DATA,), ranks, cut=True)
    width = EXPERT_WIDTH
    dense = {
        **dict.fromkeys(("attention.query", "attention.key", "attention.value", "attention.output"), (width, width)),
        **{"attention.norm": (width,), "router": (EXPERT_GROUPS, width)},
    }
    layouts = {}
    for layer in range(stage * LAYERS_OF_STAGE, (stage + 1) * LAYERS_OF_STAGE):
        for name, shape in dense.items():
            layouts[f"layers.{layer}.{name}.weight"] = mesh_layout(shape, of_stage, (Split(0, 0),))
        for name in ("up", "down"):
            fqn = f"layers.{layer}.experts.{group}.{name}.weight"
            layouts[fqn] = mesh_layout((4 * width, width), of_group, (Split(0, 0),))
    description = with_options(describe_parameters(layouts), layouts)
    averaged = {"averages.count": (("averages", "count"), DTYPES["int64"], Layout.replicated(()))}
    return ranks, replace(description, tensors={**description.tensors, **averaged})


def describe_line(line: int) -> tuple[tuple[int, ...], Description]:
    """The ranks of one line of a mesh of 512 × 2, and the description that they share: 180 tensors with their state."""
    ranks = tuple(range(line, 1024, 2))
    mesh = Mesh((512,), ranks, cut=True)
    layouts = {f"layers.{i}.weight": mesh_layout((1024 + 32 * (i % 5), 512), mesh, (Split(0, 0),)) for i in range(45)}
    return ranks, with_options(describe_parameters(layouts), layouts)


def with_options(description: Description, names: Iterable[str]) -> Description:
    """Adds the options of each parameter, of two groups, as an optimizer has them."""
    usual = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "algorithm": "AdamW", "given": {}}
    of_groups = [encode_value(usual | {"weight_decay": decay}, "options") for decay in (0.1, 0.0)]
    values = {
        f"optimizer.param_groups.{name}": (("optimizer", "param_groups", name), of_groups["norm" in name])
        for name in names
    }
    return replace(description, values=values)


def _planning(plans: PlanCache) -> Planning:
    """What one rank of several has to agree with the others."""
    return Planning(cast(Ranks, SimpleNamespace(rank=0, size=2)), as_call("saving"), plans)


def _received(packed: Sequence[str]) -> list[Any]:
    """Decodes reports as rank 0 gets them: equal ones of a block are one object."""
    blocks = [packed[begin : begin + RANKS_PER_BLOCK] for begin in range(0, len(packed), RANKS_PER_BLOCK)]
    return [decoded[each] for of in blocks for decoded in [{each: json.loads(each) for each in {*of}}] for each in of]


def time_kinds(made: Sequence[tuple[tuple[int, ...], Description]], own: int) -> list[tuple[str, str]]:
    """Times a job whose ranks are of many kinds: rank 0, one rank of kind `own`, and the second save."""
    kinds = [ranks for ranks, _ in made]
    size = sum(map(len, kinds))
    rank = kinds[own][0]

    def first_report(description: Description) -> list[Any]:
        return [*_planning({}).report_state(description)]

    report, _ = worked(first_report, made[own][1])
    reports: list[Any] = [None] * size
    for ranks, description in made:
        for each, said in zip(ranks, [first_report(description)] * len(ranks), strict=True):
            reports[each] = said
    packed = [json.dumps(each) for each in reports]
    compare, comparison = worked(lambda: compare_reports(_received(packed)))

    def described(description: Description) -> bytes:
        return compress([description.geometry_json(), description.values_json()])

    encode, sent_by_one = worked(lambda: described(made[own][1]))
    sent = [described(description) for _, description in made]

    def merge() -> tuple[MergedGeometry, Values]:
        received = [decompress(each) for each in sent]
        merged = merge_geometry(kinds, [geometry for geometry, _ in received])
        check_covers(merged.geometry.members)
        values = {ranks[0]: values for ranks, (_, values) in zip(kinds, received, strict=True)}
        return merged, merge_values(values, merged.geometry)

    def cut() -> tuple[list[int], list[bytes]]:
        section_of, made_sections = sections_of(merged, len(kinds), whole.assigned)
        return section_of, [compress(each) for each in made_sections]

    merging, (merged, values) = worked(merge)
    geometry = merged.geometry
    planning, whole = worked(lambda: SavePlan(geometry, size, cut_plain=False))
    answering, (section_of, sections) = worked(cut)

    def plan_own() -> tuple[SavePlan, RankWrites]:
        component, known = read_section(decompress(sections[section_of[own]]))
        planned = SavePlan(component, size, cut_plain=False, known=known)
        return planned, RankWrites(planned, rank)

    planning_own, (plan_of_one, writes) = worked(plan_own)
    assert writes.slots == RankWrites(whole, rank).slots
    written: list[list[list[Any]]] = [[] for _ in range(size)]
    for file in whole.files:
        written[file[0]].append([file_name("0123456789ab", *file), 1 << 30, "0123456789abcdef"])
    building, data = worked(lambda: make_manifest("0123456789ab", whole, values, written)[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    kept = {(comparison.job, 0): KeptPlan(plan_of_one, writes, made[own][1].geometry_fingerprint())}
    again, _ = worked(lambda: _planning(kept).report_state(made[own][1]))
    for each in reports:
        each[5:7] = [comparison.job, [comparison.job]]
    packed = [json.dumps(each) for each in reports]
    compare_again, second = worked(lambda: compare_reports(_received(packed)))
    assert second.kept and second.compared
    late = {ranks[0]: json.dumps(description.values_json()) for ranks, description in made}
    merge_again, _ = worked(lambda: merge_values({first: json.loads(text) for first, text in late.items()}, geometry))
    return [
        ("kinds of ranks, components, tensors", f"{len(kinds):,}, {len(sections)}, {len(geometry.members):,}"),
        ("rank 0, to read and compare fingerprints", f"{compare * 1000:.0f} ms"),
        ("rank 0, to decode, merge, check and answer", f"{merging + answering:.2f} s"),
        ("rank 0, to plan", f"{planning:.2f} s"),
        ("rank 0, to build and encode the manifest", f"{building:.2f} s, {len(data) / 2**20:.1f} MiB"),
        ("rank 0, memory at most (with all descriptions)", f"{peak:.2f} GiB"),
        ("first rank of a kind, report and description", f"{(report + encode) * 1000:.0f} ms"),
        ("any rank, to decode and plan its component", f"{planning_own * 1000:.0f} ms"),
        (
            "a description, an answer (compressed)",
            f"{len(sent_by_one) / 1024:.1f} KiB, {len(sections[0]) / 1024:.1f} KiB",
        ),
        ("second save: any rank, rank 0", f"{again * 1000:.1f} ms, {(compare_again + merge_again) * 1000:.0f} ms"),
    ]


def time_experts() -> None:
    made = [describe_expert_group(stage, group) for stage in range(STAGES) for group in range(EXPERT_GROUPS)]
    title = f"{STAGES * EXPERT_GROUPS * DATA:,} ranks of {len(made)} kinds, simulated"
    print(write_table("scale_kinds", title, ("what", "seconds of the processor"), time_kinds(made, OWN_KIND)))


def time_mesh() -> None:
    made = [describe_line(line) for line in range(2)]
    title = "FSDP over one dimension of a mesh of 1,024 ranks, simulated"
    print(write_table("scale_mesh", title, ("what", "seconds of the processor"), time_kinds(made, 1)))


def time_alike() -> None:
    mesh = Mesh((REPLICAS, SHARDS), tuple(range(REPLICAS * SHARDS)))
    first, planned = worked(plan, mesh)
    again, _ = worked(plan, mesh)
    names = [file_name("0123456789ab", *file) for file in planned.files]
    reports = [
        [[name, 1 << 30, xxhash.xxh3_64_hexdigest(name.encode())]] for name in names
    ]  # digests cannot be compressed
    build, (_, data) = worked(make_manifest, "0123456789ab", planned, {}, reports)
    parse, decoded = worked(decode_manifest, data, "simulated")
    storage = SimpleNamespace(is_remote=False)
    source = SimpleNamespace(manifest=decoded, url="simulated", digest="", storage=storage)
    checking, _ = worked(CheckpointReader, cast(Source, source))
    answers = RecordedReads()
    answers.answer(("", "read", 0, len(data), MANIFEST_NAME), lambda: data)
    packing, packed = worked(answers.pack)
    unpacking, _ = worked(RecordedReads.unpack, packed)
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
        ("manifest, built on rank 0", f"{build:.2f} s"),
        ("manifest, size", f"{len(data) / 2**20:.1f} MiB"),
        ("manifest, parsing, and looking whether its boxes cover its tensors", f"{parse:.2f} s + {checking:.2f} s"),
        ("manifest, as rank 0 hands it on", f"{len(packed) / 2**20:.2f} MiB"),
        ("manifest, packed on rank 0, unpacked", f"{packing * 1000:.0f} ms, {unpacking * 1000:.0f} ms"),
    ]
    title = f"One rank of {REPLICAS * SHARDS:,}, simulated"
    print(write_table("scale", title, ("what", "found, in seconds of the processor"), rows))


def time_agreement() -> None:
    size = REPLICAS * SHARDS
    mesh = Mesh((REPLICAS, SHARDS), tuple(range(size)))
    found = measure(size, lambda: describe(mesh))
    rows = [row("rank 0, to connect with all and agree once", found[0][0]["agreement"], "s")]
    for number, save in ((1, "first"), (2, "repeated")):
        of_0, of_leader, of_member = (found[rank][number] for rank in (0, LEADER, MEMBER))
        everything = of_0["agreement"] + of_0["planning"] + of_0["manifest"]
        rows += [
            row(f"{save} save: rank 0, agreement", of_0["agreement"], "s", 0.3),
            row(f"{save} save: rank 0, plan and manifest", of_0["planning"] + of_0["manifest"], "s"),
            row(f"{save} save: rank 0, all of it", everything, "s", 1),
            row(f"{save} save: a leader, agreement", of_leader["agreement"], "s"),
            row(f"{save} save: any other rank, agreement", of_member["agreement"], "s"),
            row(f"{save} save: bytes of rank 0, for each rank", of_0["bytes"] / size, "B", 1024),
            row(f"{save} save: bytes of a leader, for each of its ranks", of_leader["bytes"] / LEADER, "B", 1024),
            row(f"{save} save: bytes of any other rank", of_member["bytes"], "B", 1024),
        ]
    notes = (
        "Seconds are processor time of all threads of a process; bytes (B) are those sent and received. The longest "
        "path of a save goes through rank 0. Neither data files nor the manifest are written; reports of writes differ."
    )
    print(write_table("scale_agreement", f"A save's agreement among {size:,} ranks", HEADINGS, rows, notes))


JOBS: dict[str, Callable[[], None]] = {
    "alike": time_alike,
    "kinds": time_experts,
    "mesh": time_mesh,
    "agreement": time_agreement,
    "files": lambda: scale_of_files.main([]),
}


def main(names: Sequence[str]) -> None:
    for name in names or JOBS:
        if len(names) == 1:
            JOBS[name]()
        else:  # each in a process of its own, whose memory is measured
            subprocess.run([sys.executable, "-m", "benchmarks.simulate_scale", name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
