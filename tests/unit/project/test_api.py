"""The public surface: what `__all__` says is what can be imported, so that a change of it shows in the diff."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import shardopt

INTEGRATIONS = "shardopt.integrations."  # their frameworks need not be installed
MODULES = [
    "shardopt",
    *sorted(
        info.name
        for info in pkgutil.walk_packages(shardopt.__path__, "shardopt.")
        if not info.name.startswith(INTEGRATIONS)
    ),
]
PACKAGES = [name for name in MODULES if hasattr(importlib.import_module(name), "__path__")]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_what_a_package_offers(name):
    """A submodule is an attribute of its package too, once imported; it is offered only where `__all__` has it."""
    package = importlib.import_module(name)
    offered = getattr(package, "__all__", [])
    assert {*offered} <= {*dir(package)}
    assert [public for public in offered if not hasattr(package, public)] == []  # and so the lazy ones are there
    public_names = {
        public
        for public, value in vars(package).items()
        if not public.startswith("_")
        and public != "TYPE_CHECKING"
        and (public in offered or not isinstance(value, ModuleType))
    }
    assert sorted(offered) == sorted(public_names)
    assert offered == sorted(offered, key=_as_ruff_sorts)


def test_what_all_names_exists():
    modules = map(importlib.import_module, MODULES)
    offered = [(module, public) for module in modules for public in getattr(module, "__all__", [])]
    assert [f"{module.__name__}.{public}" for module, public in offered if not hasattr(module, public)] == []


def test_the_root_has_the_names_of_a_first_page():
    """All else is one step down, in the package that it belongs to."""
    assert len(shardopt.__all__) <= 20
    assert {*shardopt.__all__} <= {"keyed", *shardopt.optim.__all__, *shardopt.data.__all__}


def test_star_imports_bring_what_is_offered():
    for name in ("shardopt", "shardopt.optim", "shardopt.checkpoint"):
        brought = {}
        exec(f"from {name} import *", brought)
        assert sorted(brought.keys() - {"__builtins__"}) == sorted(importlib.import_module(name).__all__)


def _as_ruff_sorts(name):
    """Constants, then classes, then functions, each by the alphabet (its rule RUF022)."""
    return (not name.isupper(), not name[0].isupper(), name)
