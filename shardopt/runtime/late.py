"""Modules that are imported at first use: torch, whose import takes seconds, and modules that need it.

The shell lists, shows and verifies checkpoints without torch. What lies on that way and works with tensors now and
then takes `torch` from here; what is a module of tensors as a whole stands in `late`:

    if TYPE_CHECKING:
        from shardopt.checkpoint.sources import foreign
    else:
        foreign = late("shardopt.checkpoint.sources.foreign")

The first line is what type checkers and the test of the floors see.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _LateModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._name))


def late(name: str) -> Any:
    """Returns a stand-in for a module, by dotted name, which imports the module at the first attribute access."""
    return _LateModule(name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = late("torch")

__all__ = ["late", "torch"]
