"""launch/demo_tables.sh: tables of 2 million rows lose a rank of four, and three resume with the same losses."""

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
        ["bash", "launch/demo_tables.sh", "--out", tmp_path / "run", "--picture", tmp_path / "tables.png"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was killed; torchrun came down" in done.stdout
    assert "planned: letters " in done.stdout and done.stdout.count(": holds.") == 1
    assert (tmp_path / "tables.png").stat().st_size > 10_000
