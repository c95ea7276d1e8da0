"""Benchmarks can be imported, all of them, and do nothing by that."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SHARED = ("peers", "bounds", "agreement_at_scale")  # by several benchmarks, or run by another
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_it_is_imported_and_prints_nothing(name, capfd):
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.__doc__
    assert name in SHARED or callable(module.main)
    assert capfd.readouterr().out == ""


def test_tables_have_the_names_of_benchmarks():
    """Or of one that a benchmark says: each table of `results/` is written by a file that is still there."""
    code = "".join((FOLDER / f"{name}.py").read_text() for name in MODULES)
    tables = [path.stem for path in (FOLDER / "results").glob("*.md") if path.stem != "README"]
    assert [name for name in tables if name not in MODULES and f'write_table("{name}"' not in code] == []
