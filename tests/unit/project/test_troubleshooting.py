"""docs/troubleshooting.md has a section for every code of an error, and none that no error has."""

import copy
import pickle
import re

import pytest

from shardopt import errors
from shardopt.cli.verbs.explain import sections_of_page
from shardopt.codes import CODES
from tests.support.codes import CLASSES, logged, raised
from tests.support.source import PACKAGE, ROOT

PATH = ROOT / "docs" / "troubleshooting.md"
PAGE = PATH.read_text()
MOST_LINES = 500


def test_every_code_has_one_section_and_every_section_a_code():
    assert [*re.findall(r"^### (\S+)$", PAGE, re.MULTILINE)] == [*CODES]
    assert len({*CODES}) == len(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_section_has_the_message_the_cause_and_the_fix(code):
    parts = re.findall(r"^- (\w+): ", sections_of_page()[code], re.MULTILINE)
    assert parts[:3] == ["Message", "Cause", "Fix"]


def test_every_code_is_given_and_every_given_one_is_known():
    given = {code: where for (_, code), where in raised().items()} | logged()
    assert {code: where for code, where in given.items() if code not in CODES} == {}
    assert {*CODES} - given.keys() == set()


def test_the_table_has_each_class_with_the_codes_that_it_is_raised_with():
    rows = {
        row[1]: re.findall(r"\[([\w-]+)\]\(#\1\)", row[2])
        for row in re.finditer(r"^\| `(\w+Error)` \| (.*) \|$", PAGE, re.MULTILINE)
    }
    pairs = {*raised(), *((name, kind.code) for name, kind in CLASSES.items())}
    assert rows == {name: [code for code in CODES if (name, code) in pairs] for name in CLASSES}


def test_an_error_ends_its_first_line_with_its_code_wherever_it_goes():
    problem = errors.Problem("key", "this", "that", "mend it")
    for name, code in raised():
        error = CLASSES[name]("it failed", [problem], code=code)
        assert str(error) == f"it failed [{code}]\n  - {problem}"
        copies = pickle.loads(pickle.dumps(error)), copy.copy(error), errors.ShardoptError.from_json(error.to_json())
        for same in copies:
            assert (type(same), same.code, same.problems) == (type(error), code, error.problems)
        assert CLASSES[name]("it failed").code == CLASSES[name].code


def test_the_package_has_the_page_itself():
    assert (PACKAGE / "cli" / "troubleshooting.md").read_text() == PAGE


def test_the_page_stays_one_that_can_be_read():
    assert len(PAGE.splitlines()) <= MOST_LINES
