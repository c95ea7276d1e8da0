"""The contract suites, unmodified, with the accelerator as the default device."""

import contextlib
import os
from pathlib import Path

import pytest

from tests.accelerator.support import needs_standin
from tests.harness import run_ranks

pytestmark = needs_standin

ROOT = Path(__file__).parents[2]
WHOLE = [
    [f"tests/contract/test_{name}.py", "--exhaustive"]
    for name in ("optimizer_contract", "optimizer_loading", "storage")
]
SOME = ["tests/contract/test_optimizer_contract.py", "-k", "everything"]  # one optimizer around all others


@pytest.mark.parametrize(
    ("suite", "late"),
    [
        (SOME, True),
        *(pytest.param(suite, late, marks=pytest.mark.exhaustive) for suite in WHOLE for late in (False, True)),
    ],
    ids=str,
)
def test_suites_hold_on_the_accelerator(suite, late, tmp_path):
    told = tmp_path / "told"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("LATE", str(int(late)))
        monkeypatch.setenv("DEVICE", "standin")
        # Of which hypothesis, imported already, would warn that its assertions cannot be rewritten.
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        (status,) = run_ranks(1, run_suite, suite, told, backend=None, deadline_seconds=140)
    text = told.read_text()
    assert status == 0, text[-4000:]
    last = text.rstrip().splitlines()[-1]
    assert int(last.split()[0]) > 20, last


def run_suite(suite, told):
    """Runs tests in this process, which has torch loaded and is nobody else's; returns pytest's status."""
    os.chdir(ROOT)
    options = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "tests.accelerator.plugin"]
    with open(told, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        return int(pytest.main([*options, *suite]))
