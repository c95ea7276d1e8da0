"""launch/demo_stream.sh: trainers and samplers at once, a rank of each is killed, and every sample is proved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_demo_holds(tmp_path):
    done = subprocess.run(
        ["bash", "launch/demo_stream.sh", "--out", tmp_path / "run", "--picture", tmp_path / "stream.png"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" gets SIGKILL after step ") == 2
    assert done.stdout.count(": holds.") == 6
    assert (tmp_path / "stream.png").stat().st_size > 10_000
