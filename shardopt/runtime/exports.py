"""The exports of packages, each from one table: lines `from module import name as name`, as type checkers read them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# The first of all modules: so that what it does at a program's end comes after the program's own exit handlers.
import shardopt.runtime.program_end  # noqa: F401  # for what it registers


def exported(module: ModuleType) -> list[str]:
    """Returns the public names in a module that are not modules themselves.

    Sorted as ruff sorts them: constants, classes, then functions, each by the alphabet.
    """
    names = (name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType))
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def offer(package: str) -> None:
    """Sets `__all__` of a package, after its imports, to the names that these brought.

    Type checkers do not see it, and take the imports themselves.
    """
    module = sys.modules[package]
    module.__dict__["__all__"] = exported(module)


def lazily(package: str, table: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package whose names another module imports (PEP 562).

    Modules and folders of the package are imported where they are asked for, so no name may be that of one of them.

    Args:
        package: its dotted name.
        table: that of the module, which is imported when one of its names is first asked for.
    """

    def get(name: str) -> Any:
        if name == "__all__":
            return exported(importlib.import_module(table))
        if not name.startswith("_"):
            if importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            names = importlib.import_module(table)
            if name in exported(names):
                value = getattr(names, name)
                setattr(sys.modules[package], name, value)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    return get, lambda: sorted({*vars(sys.modules[package]), *exported(importlib.import_module(table))})
