"""What the README says of its program, beside that it runs (test_blocks.py): it passes `mypy --strict`."""

import os
import subprocess
import sys

from tests.docs.blocks import ROOT, blocks_of


def test_the_program_passes_mypy(tmp_path):
    program = next(block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    (tmp_path / "train.py").write_text(program.text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache/readme'}"]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    checked = subprocess.run([*command, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
