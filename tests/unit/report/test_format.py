"""The page of a report writes numbers as the command line does."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import shardopt.report
from shardopt.checkpoint.text import seconds_text

PAGE = Path(shardopt.report.__file__).parent / "page"
SECONDS = [0.01, 0.5, 12.0, 130.0, 7200.0, 47.6 * 3600, 2 * 86400.0, 9.7 * 86400]
NUMBERS = {16777217: "16777217", 2**53 - 1: "9007199254740991", 0.123456789: "0.123457", 1e300: "1e+300", "nan": "nan"}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_seconds_and_integers(tmp_path):
    module = tmp_path / "format.mjs"
    module.write_text((PAGE / "format.js").read_text())
    given = json.dumps([SECONDS, [*NUMBERS]])
    script = f"const f = await import({json.dumps(str(module))}), [s, n] = {given};"
    script += "console.log(JSON.stringify([s.map(f.secondsText), n.map(f.numberText)]))"
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[*map(seconds_text, SECONDS)], [*NUMBERS.values()]]
