"""The command line: what it prints, and the status it ends with."""

import os
import pty
import subprocess
import sys

import pytest
import torch

from shardopt import checkpoint
from shardopt.cli import main


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved"
    app = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 7, "seed": checkpoint.PerRank(3)}
    checkpoint.save(path, app)
    return path


def test_show_lists_what_there_is(saved, capsys):
    assert main(["show", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{saved}: saved by 1 ranks")
    assert lines[1:] == ["model.w  float32 [2, 3]", "step  = 7", "seed  a value of each rank"]


def test_show_prints_one_value(saved, capsys):
    assert main(["show", str(saved), "model.w"]) == 0
    assert capsys.readouterr().out.strip() == str(torch.arange(6.0).view(2, 3))


def test_show_lists_a_run(tmp_path, capsys):
    manager = checkpoint.Manager(tmp_path)
    for step in (100, 200, 300):
        manager.save(step, {"step": step})
    manager.restore({"step": 0}, step=200)
    manager.save(250, {"step": 250})
    capsys.readouterr()
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}: a run of 3 checkpoints, on branch 1",
        "step 100",
        "step 200",
        "step 250  the newest, in step-00000250-b1",
        "set aside, of branch 0: step 300",
    ]


def test_verify_tells_of_damage_by_its_status(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out
    (name,) = (name for name in os.listdir(saved) if name.endswith(".safetensors"))
    with open(saved / name, "r+b") as file:
        file.seek(4096 + 5)
        byte = file.read(1)
        file.seek(4096 + 5)
        file.write(bytes([byte[0] ^ 1]))
    assert main(["verify", str(saved)]) == 1
    output = capsys.readouterr()
    assert "model.w" in output.err and "damaged in 1 places" in output.out


def test_reshard_writes_what_loads(saved, tmp_path, capsys):
    target = tmp_path / "for-three"
    assert main(["reshard", str(saved), str(target), "--world-size", "3"]) == 1
    assert "values of 1 ranks; required 3 ranks" in capsys.readouterr().err
    assert main(["reshard", str(saved), str(target), "--world-size", "3", "--drop-per-rank"]) == 0
    with checkpoint.open(target) as reader:
        assert reader.manifest.world_size == 3
        assert torch.equal(reader.read("model.w"), torch.arange(6.0).view(2, 3))


def test_what_is_not_there_is_an_error_without_a_traceback(tmp_path, capsys):
    assert main(["show", str(tmp_path / "nowhere")]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["reshard", "a", "b"])
    assert caught.value.code == 2


def test_a_terminal_gets_a_progress_bar(saved):
    pytest.importorskip("rich")
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "shardopt.cli", "verify", str(saved)]
    done = subprocess.run(command, stderr=terminal, stdout=subprocess.PIPE, env=environment, timeout=120)
    os.close(terminal)
    assert done.returncode == 0 and b"every byte" in done.stdout
    assert b"verifying" in os.read(controller, 65536)
    os.close(controller)
