"""A job that is asked to stop before its torchrun runs, or before torchrun has ranks, stops; each is asked once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 60.0

pytestmark = pytest.mark.exhaustive

# In the place of torchrun: it counts signals, and ends a while after the first, as one whose ranks save.
TORCHRUN = """#!{python}
import signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGTERM}})
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    time.sleep(0.1)
    if len(signals) == 1:
        end = min(end, time.monotonic() + 7)
        signals.append(0)
print("signals:", sum(signals), flush=True)
sys.exit(0 if signals else 3)
"""
# Its ranks come late, and get a signal that was sent earlier once they have a handler.
WITH_RANKS = """#!{python}
import signal, subprocess, time
time.sleep(2)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
for rank in [subprocess.Popen(["{rank}"]) for _ in range(2)]:
    rank.wait()
"""


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_multi_host(tmp_path):
    torchrun = program(tmp_path / "torchrun", TORCHRUN.format(python=sys.executable, seconds=40))
    transport = program(
        tmp_path / "transport", '#!/bin/bash\nshift\nmkdir "$0.used" 2>/dev/null && sleep 3\nexec "$@"\n'
    )
    settings = {"HOSTS": "a", "LOGS": f"{tmp_path}/logs", "TRANSPORT": str(transport), "PYTHON": str(torchrun)}
    job = subprocess.Popen(["bash", "launch/multi_host.sh", "any.py"], cwd=ROOT, env=os.environ | settings)
    try:
        time.sleep(1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
    finally:
        job.kill()
    assert (tmp_path / "logs/a.log").read_text() == "signals: 1\n"


def test_slurm(tmp_path):
    """The function that Slurm runs on a node."""
    _, begin, rest = (ROOT / "launch/slurm.sbatch").read_text().partition("on_node() {\n")
    function = begin + rest.partition("\n}\n")[0] + "\n}\n"
    rank = program(tmp_path / "rank", TORCHRUN.format(python=sys.executable, seconds=20))
    torchrun = program(tmp_path / "torchrun", WITH_RANKS.format(python=sys.executable, rank=rank))
    names = "SLURM_JOB_NUM_NODES SLURM_JOB_ID SLURMD_NODENAME RANKS_PER_NODE MASTER_ADDR MASTER_PORT LOGS"
    settings = dict.fromkeys(names.split(), "1") | {"PYTHON": str(torchrun)}
    task = subprocess.Popen(
        ["bash", "-uc", function + "on_node any.py"], env=os.environ | settings, stdout=subprocess.PIPE, text=True
    )
    try:
        time.sleep(0.5)
        task.send_signal(signal.SIGTERM)
        out, _ = task.communicate(timeout=DEADLINE_SECONDS)
    finally:
        task.kill()
    assert (task.returncode, out) == (0, "signals: 1\n" * 2)


@pytest.mark.parametrize(("requeue", "status"), [("exit 0", 0), ("echo no controller >&2; exit 1", 143)])
def test_slurm_that_cannot_queue_a_job_again_ends_it_as_the_program_ended(tmp_path, requeue, status):
    program(tmp_path / "scancel", "#!/bin/bash\n")
    program(tmp_path / "srun", "#!/bin/bash\nsleep 2\nexit 143\n")
    program(
        tmp_path / "scontrol",
        f'#!/bin/bash\ncase "$1" in requeue) {requeue};; show) echo "NodeAddr=1 JobState=RUNNING Reason=None";; esac\n',
    )
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "LOGS": f"{tmp_path}/logs"}
    settings = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(
        ["bash", str(ROOT / "launch/slurm.sbatch"), "any.py"],
        cwd=tmp_path,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=DEADLINE_SECONDS)
    finally:
        job.kill()
    assert job.returncode == status, out
    assert ("not queued again: scontrol requeue failed" in out) == bool(status)
