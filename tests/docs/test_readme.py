"""What the README says of its program, beside that it runs (test_blocks.py): it passes `mypy --strict`."""

import subprocess
import sys

from tests.docs.blocks import ROOT, blocks_of


def test_the_program_passes_mypy(tmp_path):
    program = next(block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    (tmp_path / "train.py").write_text(program.text)
    # The project's cache has torch and shardopt in it, which take half a minute: launch/test.sh fills it.
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir=.mypy_cache", tmp_path / "train.py"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
