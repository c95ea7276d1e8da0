"""The scripts in docs/ draw the pictures of the pages, all of them."""

import importlib.util
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT
from tests.support.browser import lacking

DOCS = ROOT / "docs"
FOLDERS = {"pictures/draw.py": "pictures", "plot_warmup.py": ".", "draw_cli.py": "cli", "draw_report.py": "report"}
# examples/draw_runs.py, draw_lost_host.py, draw_stream.py and draw_tables.py draw them, of runs
OF_DEMOS = {"demo.png", "lost_host.png", "stream_demo.png", "tables_demo.png"}


def _pictures(folder, inside="."):
    pictures = [path for path in (folder / inside).glob("*") if path.suffix in {".png", ".svg"}]
    return {path.relative_to(folder).as_posix() for path in pictures} - OF_DEMOS


@pytest.mark.parametrize("script", ["pictures/draw.py", "plot_warmup.py"])
def test_a_script_draws_its_pictures(script, tmp_path):
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py").replace("/", "_"), DOCS / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / FOLDERS[script]).mkdir(exist_ok=True)
    module.main(tmp_path / FOLDERS[script])
    assert _pictures(tmp_path, FOLDERS[script]) == _pictures(DOCS, FOLDERS[script])


@pytest.mark.exhaustive  # it trains a model and reads its checkpoints many times: half a minute
def test_the_script_of_the_command_line_draws_its_pictures(tmp_path):
    subprocess.run([sys.executable, "docs/draw_cli.py", tmp_path / "cli"], cwd=ROOT, check=True)
    assert _pictures(tmp_path, "cli") == _pictures(DOCS, "cli")


@pytest.mark.exhaustive  # it trains the same model
@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_the_script_of_the_report_draws_its_picture(tmp_path):
    subprocess.run([sys.executable, "docs/draw_report.py", tmp_path / "report"], cwd=ROOT, check=True)
    assert _pictures(tmp_path, "report") == _pictures(DOCS, "report")


def test_every_picture_has_a_script():
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.suffix in {".png", ".svg"}}
    assert there - OF_DEMOS == set().union(*(_pictures(DOCS, folder) for folder in FOLDERS.values()))
