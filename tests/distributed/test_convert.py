"""Conversions by several processes, and such as are killed: nothing reads as a checkpoint, and the next one resumes."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardopt import checkpoint
from shardopt.errors import CheckpointError
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from tests.harness import Fault, run_ranks, run_ranks_outcomes

RANKS_STAY = True

RANKS = 2
FORMATS = ("shardopt", "dcp", "huggingface", "torch")
OPERATIONS = ("os:writev", "os:fsync", "os:replace", "os:link", "os:unlink", "os:preadv")
COMMITS = {
    "shardopt": "manifest.json",
    "dcp": ".metadata",
    "huggingface": "model.safetensors.index.json",
    "torch": "out",
}


def state():
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(12)}
    return {"model": {**tensors, "embed": torch.randn(700, 33, generator=generator).bfloat16()}, "step": 5}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    checkpoint.save(root / "whole", state())
    mesh = Mesh((4,), (0, 1, 2, 3))
    checkpoint.reshard(root / "whole", root / "src", layout=lambda _, s: mesh_layout(s.shape, mesh, (Split(0, 1),)))
    return str(root / "src")


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """By format, what one process writes that nobody disturbs."""
    root = tmp_path_factory.mktemp("expected")
    return {to: checkpoint.convert(source, root / to, to, **options(to)).digests for to in FORMATS}


def options(to):
    return {"world_size": 4} if to == "shardopt" else {"max_file_bytes": 60_000}


def convert(source, path, to):
    report = checkpoint.convert(source, path, to, **options(to), check=True)
    return dict(report.digests), report.bytes_written, report.bytes_reused, report.bytes_total


def convert_if_it_can(source, path, to):
    """As `convert`; the error of one who learns that the other has died."""
    try:
        return convert(source, path, to)
    except CheckpointError as error:
        return repr(error)


def is_checkpoint(path, to):
    return (path if to == "torch" else path / COMMITS[to]).exists()


@pytest.mark.exhaustive  # of what ranks share when one was killed, a default test is below
def test_processes_share_the_files(source, expected, tmp_path):
    def check(to, results):
        digests, written, _, totals = zip(*results, strict=True)
        assert all(each == expected[to] for each in digests), to
        assert sum(written) == totals[0]
        if to != "torch":
            assert max(written) < 0.65 * sum(written), to

    for to, results in zip(
        FORMATS, zip(*run_ranks(RANKS, convert_all, source, str(tmp_path)), strict=True), strict=True
    ):
        check(to, results)
    loaded = {}
    for file in (tmp_path / "huggingface").glob("*.safetensors"):
        loaded |= load_file(file)
    assert all(torch.equal(loaded[f"model.{key}"], tensor) for key, tensor in state()["model"].items())
    read = torch.load(tmp_path / "torch", weights_only=True)
    assert all(torch.equal(read["model"][key], tensor) for key, tensor in state()["model"].items())
    assert checkpoint.verify(tmp_path / "shardopt").ok


def convert_all(source, root):
    return [convert(source, f"{root}/{to}", to) for to in FORMATS]


def test_a_rank_with_other_arguments_is_named(source, tmp_path):
    outcomes = run_ranks_outcomes(RANKS, convert_differently, source, str(tmp_path / "x"))
    assert all("processes are to convert different things" in outcome.traceback for outcome in outcomes)
    assert not (tmp_path / "x").exists()


def convert_differently(source, path):
    import torch.distributed as dist

    checkpoint.convert(source, path, "dcp", dtype=torch.float64 if dist.get_rank() else None)


@pytest.mark.parametrize("to", ["shardopt", "dcp", "huggingface"])
def test_a_killed_conversion_resumes(source, expected, tmp_path, to):
    path = tmp_path / "out"
    fault = Fault(1, "os:replace", at=4)  # two of its files, and their receipts, are there
    outcomes = run_ranks_outcomes(RANKS, convert, source, str(path), to, faults=[fault])
    assert outcomes[1].signal == signal.SIGKILL
    assert not is_checkpoint(path, to)
    results = run_ranks(RANKS, convert, source, str(path), to)
    assert all(digests == expected[to] for digests, *_ in results)
    assert results[0][2] > 0  # bytes that were not written again
    assert sum(written for _, written, *_ in results) + results[0][2] == results[0][3]
    assert_nothing_beside(path, to)


def assert_nothing_beside(path, to):
    if to == "torch":
        assert [each.name for each in path.parent.iterdir()] == ["out"]
        return
    names = {each.name for each in path.iterdir()}
    assert not [name for name in names if name.startswith(".") and name != ".metadata"]
    if to == "huggingface":
        index = json.loads((path / COMMITS[to]).read_text())
        assert names == {*index["weight_map"].values(), COMMITS[to]}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", FORMATS)
def test_kills_at_every_operation(source, expected, tmp_path, to):
    """One process, killed at each call of each operation that touches files: there is a checkpoint, whole, or none."""
    traced = run_ranks_outcomes(1, convert, source, str(tmp_path / "traced"), to, trace=OPERATIONS, backend=None)
    kills = 0
    for operation, count in Counter(traced[0].calls).items():
        for at in range(1, count + 1):
            path = Path(tmp_path / f"{operation[3:]}-{at}") / "out"
            path.parent.mkdir()
            fault = Fault(0, operation, at=at)
            (outcome,) = run_ranks_outcomes(1, convert, source, str(path), to, faults=[fault], backend=None)
            assert outcome.signal == signal.SIGKILL
            kills += 1
            if is_checkpoint(path, to):
                assert_whole(path, to, expected, tmp_path)
            else:
                (result,) = run_ranks(1, convert, source, str(path), to, backend=None)
                assert result[0] == expected[to], fault
                assert_nothing_beside(path, to)
    print(f"{to}: {kills} kills")
    assert kills > 10


def assert_whole(path, to, expected, tmp_path):
    if to == "torch":
        read = torch.load(path, weights_only=True)
        assert all(torch.equal(read["model"][key], tensor) for key, tensor in state()["model"].items())
    elif to == "shardopt":
        assert checkpoint.verify(path).ok
    elif to == "huggingface":
        index = json.loads((path / COMMITS[to]).read_text())
        loaded = {}
        for name in set(index["weight_map"].values()):
            loaded |= load_file(path / name)
        assert all(torch.equal(loaded[f"model.{key}"], tensor) for key, tensor in state()["model"].items())
    else:
        import torch.distributed.checkpoint as dcp

        found = {"model": {key: torch.zeros_like(tensor) for key, tensor in state()["model"].items()}, "step": 0}
        dcp.load(found, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(found["model"][key], tensor) for key, tensor in state()["model"].items())
