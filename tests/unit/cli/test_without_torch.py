"""`ls`, `show` and `verify` of checkpoints of ours, and `plan`: they import no torch, and work where there is none."""

import json
import subprocess
import sys

import pytest
import torch

import shardopt
from shardopt import checkpoint

VERBS = {
    "ls": ["ls", "{run}", "--keep-last", "1"],
    "ls --verify": ["ls", "{run}", "--verify"],
    "ls of a step": ["ls", "{step}"],
    "show": ["show", "{step}", "--boxes"],
    "show of a run": ["show", "{run}"],
    "show of a value": ["show", "{step}", "step"],
    "show of values per rank": ["show", "{step}", "seed"],
    "show --no-stats": ["show", "{step}", "model.weight", "--no-stats"],
    "verify": ["verify", "{step}"],
    "report": ["report", "{run}", "-o", "{run}/report.html", "--json"],
    "plan": [
        "plan",
        "--table",
        "items:1000:64",
        "--ranks",
        "2",
        "--memory",
        "1GB",
        "--batch",
        "8",
        "--algorithm",
        "sgd",
    ],
    "help": ["--help"],
}
CODE = """
import sys
{before}
from shardopt.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
assert not any(name.partition(".")[0] == "torch" for name, module in sys.modules.items() if module is not None)
sys.exit(status)
"""
WITHOUT = "sys.modules['torch'] = None  # an import of it raises ModuleNotFoundError"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    model = torch.nn.Linear(3, 2)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    app = {"model": model, "optimizer": optimizer, "step": 7, "seed": checkpoint.PerRank(3)}
    with checkpoint.Manager(root) as manager:
        for step in (7, 8):
            manager.save(step, app, metrics={"loss": 1.0})
    return root


def shell(*arguments, before=""):
    code = CODE.format(before=before)
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("before", ["", WITHOUT], ids=["not imported", "not there"])
@pytest.mark.parametrize("verb", VERBS)
def test_verb_needs_no_torch(run, verb, before):
    found = shell(*(each.format(run=run, step=run / "step-00000007") for each in VERBS[verb]), before=before)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout


def test_verify_finds_damage_without_torch(run, tmp_path):
    checkpoint.save(tmp_path / "damaged", {"w": torch.arange(5000.0)})
    (file,) = (tmp_path / "damaged").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    found = shell("verify", tmp_path / "damaged", before=WITHOUT)
    assert found.returncode == 1 and "damaged in 1 place" in found.stdout


def test_a_save_that_was_not_finished_is_no_checkpoint_of_others(tmp_path):
    checkpoint.save(tmp_path / "unfinished", {"w": torch.arange(5.0)})
    (tmp_path / "unfinished" / "manifest.json").unlink()
    for verb in ("ls", "show", "verify"):
        found = shell(verb, tmp_path / "unfinished", before=WITHOUT)
        assert found.returncode == 1 and "1 files of a save that was not finished" in found.stderr


def test_what_needs_torch_says_so(run, tmp_path):
    """Statistics of a tensor, and a checkpoint of another format."""
    torch.save({"w": torch.ones(2)}, tmp_path / "other.pt")
    for arguments in (["show", run / "step-00000007", "model.weight"], ["verify", tmp_path / "other.pt"]):
        found = shell(*arguments, "--json", before=WITHOUT)
        assert found.returncode == 1 and found.stderr.startswith("shardopt: this needs torch")
        assert json.loads(found.stdout)["error"]["problems"][0]["key"] == "torch"
