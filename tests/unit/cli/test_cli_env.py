"""`shardopt env`: what it says of this machine, and of storage that ranks share or do not."""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import version

import pytest

import shardopt
from shardopt.cli import joined
from shardopt.cli.entry import main
from shardopt.cli.verbs.env import probe
from shardopt.errors import CheckpointError
from shardopt.ranks import ranks_of
from tests.harness import run_ranks
from tests.support.source import ROOT


def test_what_it_says_of_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    secrets = ("NCCL_API_KEY", "SLURM_JWT", "SLURM_PMIX_COOKIE", "TORCH_OF_TOMORROW")
    for name in secrets:
        monkeypatch.setenv(name, "hush")
    assert main(["env", str(tmp_path / "a" / "b"), "--mib", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["shardopt"] == shardopt.__version__
    assert found["packages"]["torch"] == version("torch") and "gloo" in found["torch"]["backends"]
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert {found["variables"][name] for name in secrets} == {"(not shown)"} and "hush" not in json.dumps(found)
    assert [place["pid"] for place in found["ranks"]] == [os.getpid()]
    assert found["storage"]["bytes"] == 1 << 20 and found["storage"]["write_bytes_per_second"] > 0
    assert found["storage"]["free_bytes"] > 1 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_world_size_that_an_earlier_job_has_left_is_no_launcher(monkeypatch, capsys):
    """It used to wait for ranks that nobody starts, without a word."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["env", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 1
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joined, "_DEADLINE_SECONDS", 0.2)
    assert main(["env"]) == 1
    said = capsys.readouterr().err
    assert "RANK=0 waits up to 0.2 s for the other ranks of WORLD_SIZE=2 at MASTER_ADDR=localhost" in said
    assert "the ranks of the launcher were not found" in said and "unset RANK, WORLD_SIZE" in said


def test_ranks_that_torchrun_starts_may_come_late(monkeypatch):
    asked = []
    monkeypatch.setattr(joined.dist, "init_process_group", lambda *given, **options: asked.append(options["timeout"]))
    monkeypatch.setattr(joined.dist, "destroy_process_group", lambda: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with joined.joined():
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with joined.joined():
        pass
    assert asked == [timedelta(seconds=60), None]  # torch's own


def test_nothing_to_write(tmp_path, capsys):
    assert main(["env", str(tmp_path / "a"), "--mib", "0"]) == 2
    assert "--mib" in capsys.readouterr().err and not (tmp_path / "a").exists()


def _probe(url):
    return probe(ranks_of(None), url, 1 << 20)


def _probe_own(folder):
    ranks = ranks_of(None)
    with pytest.raises(CheckpointError, match="ranks do not share the storage"):
        probe(ranks, f"{folder}/{ranks.rank}/run", 1 << 20)


def test_ranks_that_share_a_directory(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        found = run_ranks(2, _probe, str(tmp_path / name))
        assert found[0]["bytes"] == 2 << 20 and [path.name for path in tmp_path.rglob("*")] == ["there"]


@pytest.mark.exhaustive  # other hosts may take their time to see a file: it is looked for ten seconds
def test_ranks_that_do_not(tmp_path):
    run_ranks(2, _probe_own, str(tmp_path))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.exhaustive
def test_under_torchrun(tmp_path):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardopt.cli")
    done = subprocess.run(
        [sys.executable, *command, "env", str(tmp_path), "--mib", "1", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ranks"]) == 2
