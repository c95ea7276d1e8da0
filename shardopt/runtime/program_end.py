"""Ends a program with an error code, once its own exit handlers have run and its files are flushed.

Imported with the package, so that what is asked for here runs after the handlers that the program registers later.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

_last: list[Callable[[], bool]] = []


def fail_at_end_if(failed: Callable[[], bool]) -> None:
    """Has the program end with code 1 if a function returns True at its end."""
    _last.append(failed)


class _ExitCode:
    def __del__(self, end: Callable[[int], object] = os._exit) -> None:
        end(1)


def _ask() -> None:
    # An exception in an exit handler does not change the code. `os._exit` here would drop earlier handlers, and what
    # open files still buffer. The interpreter clears `sys` after all that and other modules, newest names last.
    if any([failed() for failed in _last]):
        vars(sys)["shardopt_exit_code"] = _ExitCode()


atexit.register(_ask)
