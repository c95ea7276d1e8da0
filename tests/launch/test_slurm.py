"""launch/slurm.sbatch on a real Slurm of two nodes: stopped in any way that a cluster has, it resumes."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.launch.cluster import PROGRAMS, Cluster, slurm

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 120, 10
TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        os.getuid() != 0 or any(shutil.which(program) is None for program in PROGRAMS),
        reason="needs Slurm, and root: bash launch/test_slurm.sh installs it",
    ),
]


@pytest.fixture(scope="module")
def cluster():
    with slurm() as running:
        yield running


class Run:
    """A training job that was submitted."""

    def __init__(self, cluster: Cluster, out: Path, *options: str, seconds_a_step: float = 0.4, breaks_at: int = 0):
        self.cluster, self.out = cluster, out
        settings = (
            *(f"steps={STEPS}", f"checkpoints.every={EVERY}", "data.batch=12", "data.context=16", "model.layers=1"),
            *("model.width=32", "model.heads=2", "schedule.warmup_steps=3"),
        )
        self.job = cluster.run(
            *("sbatch", "--parsable", f"--chdir={ROOT}", f"--output={out}.log", *options, "launch/slurm.sbatch"),
            *("tests/launch/slow_lm.py", "configs/lm.toml", "--resume", "--out", str(out), "--set", *settings),
            RANKS_PER_NODE="2",
            LOGS=f"{out}/logs",
            PYTHON=sys.executable,
            PYTHONPATH=f"{ROOT}:{ROOT / 'examples'}",
            OMP_NUM_THREADS="1",
            SECONDS_A_STEP=str(seconds_a_step),
            BREAKS_AT=str(breaks_at),
        )

    @property
    def losses(self) -> dict[int, float]:
        """The last loss that was logged for each step."""
        path = self.out / "loss.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}

    @property
    def saved(self) -> int:
        """The newest step that is committed."""
        steps = [int(path.parent.name[5:]) for path in self.out.glob("checkpoints/step-*/*.json")]
        return max(steps, default=0)

    @property
    def log(self) -> str:
        return Path(f"{self.out}.log").read_text()

    def wait_for_step(self, step: int, seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while max(self.losses, default=0) < step:
            assert time.monotonic() < end, f"step {step} does not come:\n{self.log}"
            time.sleep(0.2)

    def ends(self, state: str) -> None:
        ended = self.cluster.wait_for(self.job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        assert ended == state, self.log

    def starts(self) -> int:
        return int(self.cluster.field("job", self.job, "Restarts")) + 1


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory):
    """The losses of a run that nothing interrupted."""
    run = Run(cluster, tmp_path_factory.mktemp("whole") / "out", "--nodes=2", "--time=10", seconds_a_step=0.0)
    run.ends("COMPLETED")
    assert run.starts() == 1 and len(run.losses) == STEPS
    return run.losses


def assert_same(losses: dict[int, float], whole: dict[int, float]) -> None:
    assert losses.keys() == whole.keys()
    assert max(abs(losses[step] - whole[step]) for step in whole) < TOLERANCE


def test_the_time_limit_comes(cluster, whole, tmp_path):
    # Slurm may send the signal a minute earlier than it is asked for.
    run = Run(cluster, tmp_path / "out", "--nodes=2", "--time=4", "--signal=B:TERM@120", seconds_a_step=1.2)
    run.ends("COMPLETED")
    assert run.starts() > 1 and "stop requested" in run.log
    assert_same(run.losses, whole)


def test_it_is_queued_again_by_the_administrator(cluster, whole, tmp_path):
    run = Run(cluster, tmp_path / "out", "--nodes=2", "--time=10")
    run.wait_for_step(EVERY + 3)
    cluster.run("scontrol", "requeue", run.job)
    run.ends("COMPLETED")
    assert run.starts() == 2
    assert_same(run.losses, whole)


def test_a_node_is_set_down(cluster, whole, tmp_path):
    run = Run(cluster, tmp_path / "out", "--nodes=1-2", "--time=10")
    run.wait_for_step(EVERY + 3)
    assert cluster.field("job", run.job, "NumNodes") == "2"
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    try:
        run.ends("COMPLETED")
        assert run.starts() == 2 and cluster.field("job", run.job, "NodeList") == "n1"
        assert_same(run.losses, whole)
    finally:
        cluster.run("scontrol", "update", "nodename=n2", "state=resume")


def test_it_is_cancelled_and_started_by_hand(cluster, whole, tmp_path):
    run = Run(cluster, tmp_path / "out", "--nodes=2", "--time=10")
    run.wait_for_step(EVERY + 3)
    cluster.run("scancel", run.job)
    run.ends("CANCELLED")
    last = max(run.losses)
    assert run.saved == last  # all ranks saved once more before they left
    again = Run(cluster, tmp_path / "out", "--nodes=1", "--time=10", seconds_a_step=0.0)
    again.ends("COMPLETED")
    assert_same(again.losses, whole)


def test_a_bug_is_no_reason_to_start_again(cluster, tmp_path):
    run = Run(cluster, tmp_path / "out", "--nodes=2", "--time=10", breaks_at=7)
    run.ends("FAILED")
    assert run.starts() == 1
    logs = [path.read_text() for path in (tmp_path / "out" / "logs").rglob("stderr.log")]
    assert len(logs) == 4 and all("a bug of the program" in text for text in logs)
