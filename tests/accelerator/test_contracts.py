"""The contract suites, unmodified, with the accelerator as the default device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.support import needs_standin

pytestmark = needs_standin

ROOT = Path(__file__).parents[2]
WHOLE = [[f"tests/contract/test_{name}.py"] for name in ("optimizer_contract", "optimizer_loading", "storage")]
SOME = ["tests/contract/test_optimizer_contract.py", "-k", "everything"]  # one optimizer around all others


@pytest.mark.parametrize(
    ("suite", "late"),
    [
        (SOME, True),
        *(pytest.param(suite, late, marks=pytest.mark.exhaustive) for suite in WHOLE for late in (False, True)),
    ],
    ids=str,
)
def test_suites_hold_on_the_accelerator(suite, late):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "tests.accelerator.plugin", *suite]
    environment = os.environ | {"LATE": str(int(late)), "DEVICE": "standin"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=140)
    last = ended.stdout.rstrip().splitlines()[-1:]
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    assert int(last[0].split()[0]) > 20, last
