"""Draws the picture of docs/cli.md that a browser takes: the report of a run that is made here, in memory.

python docs/draw_report.py [FOLDER]     # docs/report, if none is given; needs Debian's chromium
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from shardopt.cli.output import Output
from shardopt.report.verb import report

RULES = dict(keep_last=None, keep_every=None, best=None, keep_seconds=None)


def run_of_the_shell(log: Path) -> str:
    """Makes the run that the other pictures of the shell are of; returns its URL."""
    spec = importlib.util.spec_from_file_location("draw_cli", Path(__file__).with_name("draw_cli.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_run(log)
    return str(module.RUN)


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        log, page = Path(scratch) / "run.log", Path(scratch) / "report.html"
        run = run_of_the_shell(log)
        against = f"{run}/step-00000010"
        report(Output(), urls=[run], out=str(page), against=against, values=True, log=[str(log)], **RULES)
        picture = folder.resolve() / "page.png"
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=900,1000"]
        options += [f"--screenshot={picture}", "--virtual-time-budget=3000", f"--user-data-dir={scratch}/profile"]
        subprocess.run(["chromium", *options, page.as_uri()], check=True, capture_output=True, timeout=60)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "report")
