"""Finds objects of which nobody keeps a list: those of a class that are alive, and the variables of functions of the
program that have called this library.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any

_OURS = __name__.partition(".")[0]
_PASSED = ("contextlib", "functools", "threading")  # modules whose functions stand between ours

_USES_OF_DICT = frozenset(["locals", "vars", "dir", "exec", "eval", "f_locals", "currentframe", "_getframe"])
_OF_FRAME_AND_HERE = 3  # references: of the frame, the variable and the argument


def instances_of(kind: type) -> list[Any]:
    """Returns the instances of a class, and of classes derived from it.

    All objects that the garbage collector knows are looked at, which takes a tenth of a second where there are two
    million. Those that are frozen are found within `none_frozen` alone.
    """
    kinds = set(map(id, _with_subclasses(kind)))  # no class itself in a search: a metaclass may have no hash
    # `gc.get_referrers` compares what each object refers to with each class: ten times as long with a hundred classes.
    return [each for each in gc.get_objects() if id(type(each)) in kinds]


@contextmanager
def none_frozen() -> Iterator[None]:
    """Lets objects be found that `gc.freeze` keeps out of collections: they are in no list."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        # Else what is in cycles that nobody has any more would stay for good. Before, as it is quick while all else is
        # frozen: with that it takes seconds where there are many millions of objects.
        gc.collect()
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _with_subclasses(kind: type) -> list[type]:
    derived: list[type] = type.__subclasses__(kind)
    return [kind, *(own for each in derived for own in _with_subclasses(each))]


def variables_of_callers() -> dict[str, Any]:
    """Returns the variables by name, those of inner functions first: locals, `self.name` for attributes of `self`, and
    globals that the functions name.

    Runs no code of theirs. Empty where an installed library has called, as its loop is not the program's.
    """
    found: dict[str, Any] = {}
    is_installed = cache(_is_installed)
    for i, frame in enumerate(_callers()):
        if is_installed(str(frame.f_globals.get("__name__")).partition(".")[0]):
            if i == 0:
                break
            continue
        local = _locals_of(frame)
        attributes: dict[str, Any] = {}
        with suppress(AttributeError):  # it has slots, or there is none
            own: dict[str, Any] = object.__getattribute__(local.get("self"), "__dict__")
            attributes = {f"self.{name}": value for name, value in own.copy().items()}
        named = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
        for name, value in (*local.items(), *attributes.items(), *named.items()):
            found.setdefault(name, value)
    return found


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """Returns the variables of a function, or of code that runs in a namespace of its own; else none.

    Before Python 3.13 a function has one dict of them, which each look fills anew. So none is taken of functions that
    may use this dict, as by `locals()`; and it is emptied, as it would keep what the function deletes.
    """
    code, is_function = frame.f_code, frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_function and (sys.gettrace() is not None or not _USES_OF_DICT.isdisjoint(code.co_names)):
        return {}
    values = frame.f_locals
    if values is frame.f_globals:
        return {}
    local = dict(values)
    if is_function and type(values) is dict and sys.getrefcount(values) == _OF_FRAME_AND_HERE:
        values.clear()
    return local


def _callers() -> Iterator[FrameType]:
    """Yields the frames that called this library, the innermost first."""
    frame = inspect.currentframe()
    inside = True
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        inside = inside and (module.partition(".")[0] == _OURS or module in _PASSED)
        if not inside:
            yield frame
        frame = frame.f_back


def _is_installed(name: str) -> bool:
    """Whether a package or module is a library: pip leaves notes of what it has installed beside that."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if path is None or module is sys.modules["__main__"]:
        return False
    folder = os.path.dirname(path)
    try:
        names = os.listdir(os.path.dirname(folder) if hasattr(module, "__path__") else folder)
    except OSError:  # of an archive
        return True
    return any(name.endswith(".dist-info") for name in names)
