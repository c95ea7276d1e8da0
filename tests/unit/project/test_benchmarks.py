"""Benchmarks can be imported, all of them, and do nothing by that; and each one runs, in small and on one rank."""

import importlib
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.standin import build as standin
from tests.support.hosts import namespaces_are_allowed
from tests.support.source import ROOT

FOLDER = Path(__file__).parents[3] / "benchmarks"
SHARED = (
    "peers",
    "bounds",
    "dcp",
    "device",
    "agreement_at_scale",
    "raw_io",
    "on_gpu_saves",
    "linked_hosts",
)  # run by others
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
# What is not run here: these want frameworks that are not installed, or several hosts.
NOT_RUN = {"frameworks", "frameworks_sharded"}


def first(count):
    """Makes a table of a benchmark small: its first entries."""
    return lambda table: dict(list(table.items())[:count])


# Benchmark → arguments, and its own constants, made small.
ROUND = "--repetitions 1 --rounds 1"
SMALL = {
    "agreement": ("--ranks 3 --rounds 1", {}),
    "algorithms": (f"{ROUND} --steps 1", {"WIDTH": 8, "BLOCKS": 1}),
    "async_save": ("--ranks 1 --megabytes 1 --repetitions 1", {"WIDTH": 128}),
    "checkpoint": ("--repetitions 1", {"SMALL": 3, "ROWS": 16, "COLUMNS": 4}),
    "convert": ("--gib 1 --repetitions 1", {"WIDTH": 8, "SMALL": 100}),
    "estimates": (
        "--ranks 1 --repetitions 1",
        {"ROWS": 64, "COLUMNS": 8, "SMALL": 5, "WIDTH": 16, "LAYERS": 1, "TABLES": (9, 3), "STATES": first(4)}
        | {"LATENCY": 0.0},
    ),
    "frontier": (f"{ROUND} --steps 1", {"WIDTH": 8, "RANKS": 1, "PEERS": first(3)}),
    "in_backward": ("--repetitions 1", {"WIDTH": 16, "TIMED": ((2, 4), (1, 8))}),
    "interop": ("--repetitions 1 --gib 0.07", {"ROWS": 8, "COLUMNS": 4}),
    "interop_phases": ("--repetitions 1 --gib 0.07", {}),
    "launches": ("", {"PEERS": first(3), "COUNTS": (1, 2)}),
    "lost_hosts": ("", {"HOSTS": 64, "MONTHS": 3}),
    "muon": ("--ranks 1 --repetitions 1", {"CASES": {"2 of 8 × 8": [(8, 8)] * 2}}),
    "object_stores": (
        "--mib 1 --repetitions 1",
        {"TENSOR_BYTES": 1 << 20, "NETWORKS": first(1), "CLIENTS": ("obstore",)},
    ),
    "optimizer_overhead": (ROUND, {"PARAMETERS": 3, "ELEMENTS": 64, "RANKS": 1}),
    "published_rows": ("--rows 2000 --repetitions 1", {}),
    "report_pages": ("--steps 6 --tensors 12", {"ROUNDS": 1, "WIDTHS": (1280,)}),
    "recovery": ("stall --megabytes 1 --repetitions 1", {"WIDTH": 128}),
    "remote": ("--megabytes 1", {"LATENCY_SECONDS": 0.0, "BYTES_PER_SECOND": 1e12}),
    "sparse": (ROUND, {"SIZES": (2000, 4000), "TOUCHED": 16}),
    "state_memory": (
        "--rounds 1",
        {"WIDTH": 64, "RANKS": 1, "LAYERS_OF_RANKS": (1,), "STORED": first(1), "ALGORITHMS": first(1)},
    ),
    "stream_bytes": ("--width 32 --layers 1", {"VOCABULARY": 50, "TOKENS": 4, "RATES": (1e-4,)}),
    "streams": (
        "--gib 0.001 --trainers 1 --receivers 1 --repetitions 3",
        {"TENSOR_BYTES": 1 << 16, "COLUMNS": 64, "RATES": (0.02,)},
    ),
    "tables": (ROUND, {"ROWS": 50, "WIDTH": 4, "BAGS": 3, "POOLING": 2}),
    "table_plans": ("", {"SETS": ((3, 2),), "LARGE": ((9, 4),)}),
    "step": (f"{ROUND} --only AdamW", {"SIZES": {"400 × 4k": (2, 64)}, "COUNTS": (2, 3), "STEPS_A_TURN": 1}),
    "touched_rows": ("--rows 4000 --repetitions 1", {"SHARES": (0.01,)}),
}
SIMULATED = {
    "alike": {"REPLICAS": 2, "SHARDS": 4, "LAYERS": 1, "RANK": 3},
    "kinds": {"STAGES": 2, "EXPERT_GROUPS": 2, "DATA": 2, "EXPERT_WIDTH": 64, "OWN_KIND": 1},
    "mesh": {},
    "agreement": {"REPLICAS": 2, "SHARDS": 80, "LAYERS": 1},
}


@pytest.mark.parametrize("name", MODULES)
def test_it_is_imported_and_prints_nothing(name, capfd):
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.__doc__
    assert name in SHARED or callable(module.main)
    assert capfd.readouterr().out == ""


def test_tables_have_the_names_of_benchmarks():
    """Or of one that a benchmark says: each table of `results/` is written by a file that is still there."""
    code = "".join((FOLDER / f"{name}.py").read_text() for name in MODULES)
    tables = [path.stem for path in (FOLDER / "results").glob("*.md") if path.stem != "README"]
    assert [name for name in tables if name not in MODULES and f'write_table("{name}"' not in code] == []


@pytest.fixture
def here(monkeypatch, tmp_path):
    """What a benchmark would start in other processes runs in this one, and its tables go to another folder."""

    def on_ranks(n, function, *args):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return function(*args)
        finally:
            dist.destroy_process_group()

    def run(name, **constants):
        module = importlib.import_module(f"benchmarks.{name}")
        replaced = {"on_ranks": on_ranks, "RESULTS": tmp_path} | constants
        for constant, value in replaced.items():
            if hasattr(module, constant) or constant in constants:
                is_small = callable(value) and isinstance(getattr(module, constant), dict)
                monkeypatch.setattr(module, constant, value(getattr(module, constant)) if is_small else value)
        return module

    run("peers")
    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


# What takes half a second or more. Their calls are type-checked in every run, as those of all benchmarks.
TAKES_LONG = {"agreement", "async_save", "checkpoint", "estimates", "launches", "object_stores", "recovery"}
TAKES_LONG |= {"state_memory"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive][: name in TAKES_LONG]) for name in SMALL]
)
@pytest.mark.filterwarnings("ignore")  # of torch's own saving, which is measured beside ours
def test_it_runs(name, here, monkeypatch, tmp_path, capsys):
    arguments, constants = SMALL[name]
    if name == "launches" and standin.lacking():
        pytest.skip(standin.lacking())
    module = here(name, **constants)
    apart = {
        "convert": ("measure_apart", lambda peer, folder: module.measure(peer, folder)),
        "in_backward": ("in_a_child", lambda kind, algorithm, counts: module.measure(kind, algorithm, bool(counts))),
    }
    if name in apart:
        monkeypatch.setattr(module, *apart[name])
    if name == "interop_phases":
        here("interop", ROWS=8, COLUMNS=4)
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    module.main()
    assert "|" in capsys.readouterr().out or (tmp_path / f"{name}.md").exists()


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(standin.lacking()), reason=standin.lacking() or "it is there")
def test_all_of_what_is_run_on_a_gpu(here, monkeypatch, capfd):
    module = here("on_gpu")
    sections = [*module.SECTIONS]
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--device", "standin", "--section", *sections])
    module.main()
    printed = capfd.readouterr().out
    for name in sections:
        _, _, table = printed.partition(f"## {name}\n")
        assert table.partition("\n## ")[0].count("\n|") > 2, name
    assert "False" not in printed and "| error" not in printed


@pytest.mark.parametrize("name", SIMULATED)
def test_large_jobs_are_simulated(name, here, tmp_path):
    module = here("simulate_scale", **SIMULATED[name])
    module.main([name])
    assert len(list(tmp_path.glob("scale*.md"))) == 1


@pytest.mark.parametrize("name", ["opening", "failing", "retention"])
def test_many_files(name, here):
    module = here("scale_of_files", PROBLEMS=3)
    many_files = here("many_files")
    here("scale_of_files", write_many=lambda path, ranks: many_files.write_checkpoint(path, ranks, 2))
    rows = module.retention(8, 2) if name == "retention" else module.JOBS[name](8)
    assert rows and all(len(row) == len(module.HEADINGS) for row in rows)


def test_a_bucket_is_served(tmp_path):
    (tmp_path / "file").write_bytes(b"0123")
    with importlib.import_module("benchmarks.s3_files").served(str(tmp_path), 1e9) as options:
        assert urllib.request.urlopen(f"{options['endpoint_url']}/bucket/file", timeout=30).read() == b"0123"


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not namespaces_are_allowed() or shutil.which("tc") is None, reason="hosts are namespaces, which cannot be made here"
)
def test_ranks_run_on_hosts_with_cables():
    program = """
from benchmarks.linked_hosts import in_namespaces, on_hosts
in_namespaces()
print(on_hosts(2, 100, "torch.distributed:get_world_size"))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_each_benchmark_is_run():
    run = {*SMALL, "simulate_scale", "scale_of_files", "many_files", "s3_files", "plot_results", "on_gpu"}
    assert {*MODULES} - {*SHARED} - NOT_RUN == run
