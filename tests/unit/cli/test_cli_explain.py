"""`shardopt explain`: every code has its section, in a shell without torch."""

import json
import subprocess
import sys

import pytest

from shardopt.cli import main
from shardopt.codes import CODES
from tests.support.source import ROOT

WITHOUT_TORCH = """
import sys
from shardopt.cli import main
assert main(["explain", "does-not-fit"]) == main(["explain"]) == 0
assert not {"torch", "numpy", "fsspec"} & sys.modules.keys()
"""


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_explained(code, capsys):
    assert main(["explain", code]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = "- Message: ", "- Cause: ", "- Fix: "
    assert lines[0] == code and [label for line in lines for label in labels if line.startswith(label)] == [*labels]
    assert not any("**" in line or "](" in line for line in lines)


def test_without_a_code_each_has_a_line(capsys):
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*CODES] and all(len(line.split()) > 2 for line in lines)
    assert main(["explain", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["codes"]] == [*CODES]


def test_a_code_may_be_given_as_it_is_printed(capsys):
    assert main(["explain", "[path-taken]", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["code"] == "path-taken" and document["text"].startswith("- Message: the path is taken.")


def test_a_misspelt_code_is_answered_with_the_one_that_is_near(capsys):
    assert main(["explain", "path-taking"]) == 2
    assert "did you mean path-taken?" in capsys.readouterr().err
    assert main(["explain", "xyzzy"]) == 2
    assert "`shardopt explain` lists all of them" in capsys.readouterr().err


def test_it_needs_no_torch_and_no_repository(tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("does-not-fit\n- Message: ")
