"""Modules that are imported when something of them is first asked for."""

import subprocess
import sys

import pytest

from shardopt.runtime.late import late
from tests.support.source import ROOT


def test_a_module_is_imported_when_it_is_asked_for_something():
    code = """
import sys
from shardopt.runtime.late import late, torch
calendar = late("calendar")
assert "calendar" not in sys.modules and "torch" not in sys.modules
assert calendar.isleap(2028) and "calendar" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_it_stands_for_the_module_as_it_is_now(monkeypatch):
    """What a test puts in a module's place is seen, and all of its names are listed."""
    import calendar

    stand_in = late("calendar")
    assert stand_in.isleap is calendar.isleap and dir(stand_in) == dir(calendar)
    monkeypatch.setattr(calendar, "isleap", 1)
    assert stand_in.isleap == 1
    with pytest.raises(AttributeError):
        _ = stand_in.nothing
