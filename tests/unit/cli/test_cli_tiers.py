"""`shardopt ls` of tiers: what one host has of each step, and never that this is a checkpoint."""

import json
import shutil

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import Tier
from shardopt.checkpoint.hosts.directory import HostDirectory
from shardopt.checkpoint.hosts.share import Share
from shardopt.checkpoint.run import shares
from shardopt.cli import main
from shardopt.sharding.mesh import Mesh, Split, mesh_layout


@pytest.fixture
def run(tmp_path):
    """Steps 1 to 3 on a tier, of which the root has 2; of step 4, which two ranks saved, this host has a half."""
    tier = tmp_path / "tier"
    with checkpoint.Manager(
        tmp_path / "root", destinations=[Tier(str(tier), every=1, keep_last=3)], every=2
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.arange(5000.0), "step": step})
            manager.wait()
    whole = tmp_path / "whole"
    checkpoint.save(whole, {"w": torch.arange(5000.0), "step": 4})
    halves = (Split(0, 0),)
    checkpoint.reshard(
        whole,
        tier / "step-00000004",
        layout=lambda key, stored: mesh_layout(stored.shape, Mesh((2,), (0, 1)), halves),
    )
    (tier / "step-00000004/manifest.json").rename(tier / "step-00000004/prepared.json")
    next((tier / "step-00000004").glob("*-r00001.safetensors")).unlink()
    (tier / "step-00000005").mkdir()
    return tmp_path


def listed(capsys, *arguments, status=0):
    assert main(["ls", *map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_tier_is_listed_as_what_this_host_has(run, capsys):
    capsys.readouterr()
    document = listed(capsys, run / "tier")
    here = document["here"]
    assert here["run"]["root"] == str(run / "root")
    assert [(each["step"], each["have"], each["files_here"], each["files"]) for each in here["shares"]] == [
        *((step, "all", 1, 1) for step in (1, 2, 3)),
        (4, "some", 1, 2),
        (5, "unfinished", None, None),
    ]
    half = here["shares"][3]
    assert half["ranks"] == [0] and half["world_size"] == 2 and 0 < half["nbytes_here"] < half["nbytes"]
    assert main(["ls", str(run / "tier")]) == 0
    said = capsys.readouterr().out
    assert "what this host has of 4 checkpoints of run" in said and "a share of it" in said and "committed" not in said
    assert listed(capsys, f"hosts://{run}/tier") == document
    assert checkpoint.Manager(run / "tier").steps() == []


def test_a_root_is_listed_with_what_this_host_has_on_its_tiers(run, capsys):
    capsys.readouterr()
    document = listed(capsys, run / "root")
    assert [each["step"] for each in document["checkpoints"]] == [2]
    (tier,) = document["tiers"]
    assert (tier["path"], tier["every"], tier["keep_last"], tier["copies"]) == (str(run / "tier"), 1, 3, 1)
    assert tier["here"] == listed(capsys, run / "tier")["here"]
    shutil.rmtree(run / "root/step-00000002")  # nothing is under the root yet, and the rest still is
    assert len(listed(capsys, run / "root")["tiers"][0]["here"]["shares"]) == 5
    (run / "tier").rename(run / "away")
    assert listed(capsys, run / "root")["tiers"][0]["here"] is None
    assert main(["ls", str(run / "root")]) == 0
    assert "this host has nothing of this run there" in capsys.readouterr().out


def test_the_tier_of_another_run_is_not_listed_with_a_root(run, capsys):
    with checkpoint.Manager(run / "other", destinations=[Tier(str(run / "its"), every=1)], every=2) as manager:
        manager.save(1, {"step": 1})
    (run / "tier").rename(run / "away")
    (run / "its").rename(run / "tier")
    capsys.readouterr()
    assert listed(capsys, run / "root")["tiers"][0]["here"] is None


def test_damage_is_named(run, capsys):
    (file,) = (run / "tier/step-00000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    record = run / "tier/step-00000002/prepared.json"
    record.write_bytes(record.read_bytes()[:-1])
    (file,) = (run / "tier/step-00000003").glob("*.safetensors")
    file.write_bytes(b"short")
    capsys.readouterr()
    have = [each["have"] for each in listed(capsys, run / "tier", status=1)["here"]["shares"]]
    assert have == ["all", "damaged", "damaged", "some", "unfinished"]
    have = [each["have"] for each in listed(capsys, run / "tier", "--verify", status=1)["here"]["shares"]]
    assert have[0] == "damaged"
    assert main(["ls", str(run / "root"), "--verify"]) == 1
    said = capsys.readouterr().err
    assert "step-00000001" in said and "prepared.json" in said and "5 bytes" in said


def test_what_the_run_removes_meanwhile_is_no_damage(run, capsys, monkeypatch):
    """Its files are written over by the next save, while `ls` has them open."""
    open_file = shares.DataFileReader

    def removed_meanwhile(storage, file):
        reader = open_file(storage, file)
        if storage.url.endswith("step-00000001"):
            directory = HostDirectory(str(run / "tier"))
            Share(directory, "step-00000001", True).clear()
            with open(next((run / "tier").glob(".spare-*")), "r+b") as spare:
                spare.write(b"new" * 5000)
                spare.flush()
                # As a descriptor that was open before, the name leads to the same bytes.
                (run / "tier/step-00000001").mkdir()
                (run / "tier/step-00000001" / file.name).hardlink_to(spare.name)
        return reader

    monkeypatch.setattr(shares, "DataFileReader", removed_meanwhile)
    capsys.readouterr()
    assert [each["step"] for each in listed(capsys, run / "tier", "--verify")["here"]["shares"]] == [2, 3, 4, 5]


def test_a_root_is_listed_though_what_tells_of_its_tiers_is_damaged(run, capsys):
    (run / "root/tiers.json").write_bytes(b"{}")
    capsys.readouterr()
    assert main(["ls", str(run / "root"), "--json"]) == 1
    said = capsys.readouterr()
    assert [each["step"] for each in json.loads(said.out)["checkpoints"]] == [2]
    assert "tiers.json" in said.err


def test_a_single_file_is_listed_as_before_there_were_tiers(tmp_path, capsys):
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    assert len(listed(capsys, tmp_path / "model.pt")["checkpoints"]) == 1
