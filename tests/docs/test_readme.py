"""What the README says of its program, beside that it runs (test_blocks.py): it passes `mypy --strict`."""

import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, blocks_of


@pytest.mark.timeout(600)
def test_the_program_passes_mypy(tmp_path):
    program = next(block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    (tmp_path / "train.py").write_text(program.text)
    # With the project's cache, where launch/test.sh runs mypy meanwhile, under this lock. Without it: half a minute.
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir=.mypy_cache", tmp_path / "train.py"]
    command = ["flock", "pyproject.toml", *mypy]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
