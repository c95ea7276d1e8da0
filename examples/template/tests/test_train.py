"""The program resumes on a different number of ranks with the same losses, and names what is wrong in its settings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
KILLED = """
import os, signal
import train
from torch import distributed as dist
from shardopt import checkpoint

save = checkpoint.Manager.save

def save_and_die(manager, step, app, **options):
    save(manager, step, app, **options)
    if step == 25:
        manager.wait()  # step 20 is complete
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

checkpoint.Manager.save = save_and_die
train.main()
"""


def run(folder, ranks, program, *arguments):
    """Runs a program on ranks of this machine; returns how it ended, and the losses that it printed by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    variables = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, program, "config.toml", *arguments], cwd=folder, env=variables, capture_output=True, text=True
    )
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}
    return done, losses


@pytest.fixture
def folder(tmp_path):
    text = (HERE / "config.toml").read_text()
    text = re.sub(r"(?m)^steps = \d+", "steps = 40", re.sub(r"(?m)^every = \d+", "every = 10", text))
    (tmp_path / "config.toml").write_text(re.sub(r"(?m)^out = .*", f'out = "{tmp_path}/out"', text))
    return tmp_path


def test_a_run_that_lost_a_rank_resumes_on_three_with_the_same_losses(folder):
    whole, expected = run(folder, 2, HERE / "train.py")
    assert whole.returncode == 0 and list(expected) == [10, 20, 30, 40], whole.stderr
    (folder / "out").rename(folder / "whole")
    (folder / "killed.py").write_text(KILLED)
    killed, _ = run(folder, 2, folder / "killed.py")
    assert killed.returncode != 0
    refused, _ = run(folder, 3, HERE / "train.py")
    assert refused.returncode != 0 and "add --resume" in refused.stderr
    resumed, losses = run(folder, 3, HERE / "train.py", "--resume")
    assert resumed.returncode == 0 and "resumed step 20" in resumed.stderr, resumed.stderr
    assert losses == {step: pytest.approx(expected[step], rel=1e-5) for step in (30, 40)}


def test_wrong_settings_are_named(folder):
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("lr = 1e-3", 'lr = "fast"') + "kep = 3\n")
    done, _ = run(folder, 1, HERE / "train.py")
    assert done.returncode != 0
    assert "optimizer.lr: found 'fast'" in done.stderr and "checkpoints.kep: found 3" in done.stderr
