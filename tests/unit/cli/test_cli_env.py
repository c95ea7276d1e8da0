"""`shardopt env`: what it says of this machine, and of storage that ranks share or do not."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

import shardopt
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
