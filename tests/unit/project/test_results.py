"""The picture and the table at the top of benchmarks/results/README.md have the numbers of the tables beside them."""

import re
import shutil

import pytest

from benchmarks import plot_results


@pytest.fixture
def results(tmp_path):
    for path in plot_results.RESULTS.glob("*.md"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_the_page_is_what_the_script_writes(results):
    plot_results.write_overview(results)
    assert (results / "README.md").read_text() == (plot_results.RESULTS / "README.md").read_text()
    assert (results / "overview.png").stat().st_size > 10_000
    assert (plot_results.RESULTS / "overview.png").exists()


def test_a_number_that_changes_in_a_table_changes_on_the_page(results):
    table = results / "checkpoint.md"
    first_figure = re.compile(r"(save \| )\d+\.\d+ \|")
    table.write_text(first_figure.sub(r"\g<1>0.777 |", table.read_text(), count=1))
    plot_results.write_overview(results)
    assert "| 0.777 s |" in (results / "README.md").read_text()


def test_every_panel_has_its_cases():
    cases = plot_results.cases_of(plot_results.RESULTS)
    found = [sum(case.panel == panel for case in cases) for panel in plot_results.UNITS]
    assert found == [5, 8, 4, 5] and sum(found) == len(cases)


def test_a_page_without_a_table_is_an_error(results):
    (results / "step.md").write_text("# Nothing was measured\n")
    with pytest.raises(ValueError, match=r"step\.md: no table"):
        plot_results.cases_of(results)
