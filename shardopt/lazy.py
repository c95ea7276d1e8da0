"""Re-exports that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for the `__init__.py` of a package.

    No name may be that of a module or folder in the package, which the import of that would put in its place.

    Args:
        package: its dotted name.
        names: dotted name of a module → what the package offers of it.
    """
    module_of = {name: module for module, offered in names.items() for name in offered}

    def get(name: str) -> Any:
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        # The package's own modules, such as `optim`, which an eager import of all names would have left here.
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    def names_there() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get, names_there
