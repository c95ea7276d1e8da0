"""The training program under torchrun on a GPU, over NCCL: killed, resumed, and compared with an unbroken run."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from compare_runs import compare_losses, differing_keys, read_losses

from shardopt import checkpoint
from tests.accelerator.support import needs_gpu

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, EVERY = 400, 50
SECONDS = 120  # of a job, at most


@contextmanager
def job_in(out):
    """The job under torchrun; it and its rank are killed if they are left in the block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [str(REPOSITORY / "examples" / "train_lm.py"), str(REPOSITORY / "configs" / "lm.toml")]
    command += ["--resume", "--out", str(out), "--set", f"steps={STEPS}", f"checkpoints.every={EVERY}"]
    out.mkdir(exist_ok=True)
    with open(out / "log", "a") as log:
        job = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def run(out):
    with job_in(out) as job:
        assert job.wait(SECONDS) == 0, (out / "log").read_text()[-4000:]


def run_and_kill(out):
    """Kills the rank with SIGKILL once a checkpoint is committed and a step after it done."""
    committed, deadline = checkpoint.Manager(out / "checkpoints").steps, time.monotonic() + SECONDS
    with job_in(out) as job:
        while not (len(read_losses(out)) >= EVERY + 3 and committed()):
            assert job.poll() is None and time.monotonic() < deadline, (out / "log").read_text()[-4000:]
            time.sleep(0.01)
        for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        assert job.wait(SECONDS) != 0


@needs_gpu
@pytest.mark.timeout(5 * SECONDS)
def test_a_killed_job_resumes_to_the_same_losses(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole)
    run_and_kill(killed)
    assert len(read_losses(killed)) < STEPS
    run(killed)
    comparison = compare_losses(whole, killed)
    assert not comparison.missing and comparison.holds(1e-5)
    last = [checkpoint.Manager(out / "checkpoints").path(STEPS) for out in (whole, killed)]
    differing, keys = differing_keys(*map(str, last))
    assert not differing and keys > 200
