"""`ls`, `show` and `verify` of checkpoints of ours, `plan` and `new` import no torch, and work where there is none."""

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
    "new": ["new", "{new}"],
    "help": ["--help"],
}
CODE = """
import contextlib, io, json, sys
{before}
from shardopt.cli import main
found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    torchs = [name for name, module in sys.modules.items() if name.split(".")[0] == "torch" and module is not None]
    found.append((status, out.getvalue(), err.getvalue(), torchs))
print(json.dumps(found))
"""
# An import of torch, or of the extra `cli`, raises ModuleNotFoundError.
WITHOUT = "sys.modules |= dict.fromkeys(['torch', 'rich', 'argcomplete'])"


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


def shells(calls, before=WITHOUT):
    """What each call of the program does, one after the other in one process: (status, output, errors)."""
    given = json.dumps([[str(each) for each in arguments] for arguments in calls])
    done = subprocess.run([sys.executable, "-c", CODE.format(before=before), given], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [call for call, (*_, torchs) in zip(calls, found, strict=True) if torchs] == []
    return [tuple(each[:3]) for each in found]


@pytest.mark.parametrize("before", ["", WITHOUT], ids=["not imported", "not there"])
def test_verbs_need_no_torch(run, before, tmp_path):
    places = {"run": run, "step": run / "step-00000007", "new": tmp_path / "my-run"}
    calls = [[each.format(**places) for each in arguments] for arguments in VERBS.values()]
    for verb, (status, output, errors) in zip(VERBS, shells(calls, before), strict=True):
        assert (verb, status or 0, errors) == (verb, 0, "")
        assert output, verb


def test_verify_finds_damage_without_torch(run, tmp_path):
    checkpoint.save(tmp_path / "damaged", {"w": torch.arange(5000.0)})
    (file,) = (tmp_path / "damaged").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    ((status, output, _),) = shells([["verify", tmp_path / "damaged"]])
    assert status == 1 and "damaged in 1 place" in output


def test_a_save_that_was_not_finished_is_no_checkpoint_of_others(tmp_path):
    checkpoint.save(tmp_path / "unfinished", {"w": torch.arange(5.0)})
    (tmp_path / "unfinished" / "manifest.json").unlink()
    for status, _, errors in shells([[verb, tmp_path / "unfinished"] for verb in ("ls", "show", "verify")]):
        assert status == 1 and "1 files of a save that was not finished" in errors


def test_what_needs_torch_says_so(run, tmp_path):
    """Statistics of a tensor, and a checkpoint of another format."""
    torch.save({"w": torch.ones(2)}, tmp_path / "other.pt")
    calls = [["show", run / "step-00000007", "model.weight"], ["verify", tmp_path / "other.pt"]]
    for status, output, errors in shells([[*call, "--json"] for call in calls]):
        assert status == 1 and errors.startswith("shardopt: this needs torch")
        assert json.loads(output)["error"]["problems"][0]["key"] == "torch"
