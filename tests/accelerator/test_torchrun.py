"""The training program under torchrun on a GPU, over NCCL: killed, resumed, and compared with an unbroken run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from compare_runs import compare_losses, differing_keys, read_losses

from shardopt import checkpoint
from tests.accelerator.support import needs_gpu

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, EVERY = 200, 50


def started(out):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [str(REPOSITORY / "examples" / "train_lm.py"), str(REPOSITORY / "configs" / "lm.toml")]
    command += ["--out", str(out), "--set", f"steps={STEPS}", f"checkpoints.every={EVERY}"]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(job):
    with job:
        output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output[-4000:]


def kill_at(job, out):
    """Kills the rank with SIGKILL once the step after a checkpoint is done."""
    deadline = time.monotonic() + 120
    while len(read_losses(out)) < EVERY + 3 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    job.communicate(timeout=60)


@needs_gpu
def test_a_killed_job_resumes_to_the_same_losses(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended(started(whole))
    with started(killed) as job:
        kill_at(job, killed)
    assert job.returncode != 0
    assert len(read_losses(killed)) < STEPS and checkpoint.Manager(killed / "checkpoints").steps()
    ended(started(killed))
    comparison = compare_losses(whole, killed)
    assert not comparison.missing and comparison.holds(1e-5)
    last = [checkpoint.Manager(out / "checkpoints").path(STEPS) for out in (whole, killed)]
    differing, keys = differing_keys(*map(str, last))
    assert not differing and keys > 200
