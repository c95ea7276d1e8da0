"""The command line: parses arguments, runs a verb, and returns an exit status.

0, 1 where something is wrong (a checkpoint is damaged, two differ, one is not there), 2 for a wrong call, 130 after
Ctrl-C, 141 where the reader of a pipe has ended: as shells have these.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from shardopt.cli.output import Output, ReaderGone, Unwritten
from shardopt.cli.parser import parse, put_flags
from shardopt.cli.table import Verb
from shardopt.errors import OptionError, Problem, ShardoptError
from shardopt.version import __version__

_WITHOUT_TORCH = "install it (pytorch.org), or add --no-stats to `show URL KEY`; `ls` and `verify` need none"
_WRONG, _WRONG_CALL, _INTERRUPTED, _READER_GONE = 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: without the name of the program; None for those of this process.

    Raises:
        SystemExit: a wrong call (2), or help or the version was printed.
    """
    if sys.stdout is None:  # the shell has closed it; no file may take its number
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            return main(arguments)
    try:
        verb, values = parse(sys.argv[1:] if arguments is None else arguments, __version__)
        return _call(verb, **values)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _call(verb: Verb, json: bool, modules: Sequence[str], **values: Any) -> int:
    """Runs a verb; returns the exit status. Prints errors of this package and of the system as one line."""
    output = Output(json)
    try:
        try:
            _import([*modules, *_openers_of(values)])
            module, _, name = verb.function.partition(":")
            status: int = getattr(importlib.import_module(module), name)(output, **values)
            output.finish()
        except (ShardoptError, OSError, ModuleNotFoundError) as error:
            output.fail(_as_said(error, verb))
            output.finish()
            status = _WRONG_CALL if isinstance(error, OptionError) else _WRONG
        return status
    except (ReaderGone, BrokenPipeError, Unwritten) as error:
        # The bytes still in buffers must not fail once more when the interpreter writes them out.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, Unwritten):
            return _READER_GONE
        output.error(error)
        return _WRONG


def _openers_of(values: Mapping[str, Any]) -> list[str]:
    """Returns the modules that open URLs in the arguments, and that no other needs."""
    texts = (text for value in values.values() for text in (value if isinstance(value, list) else [value]))
    return ["shardopt.checkpoint.hosts.served"] if any(str(text).startswith("hosts://") for text in texts) else []


def _import(modules: Sequence[str]) -> None:
    """Imports modules by name, also from the working directory. Raises OptionError."""
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            remedy = "give a module of this directory, of PYTHONPATH, or of an installed package"
            problem = Problem("--import", f"{name!r}, at which: {error}", "a module that can be imported", remedy)
            raise OptionError("invalid arguments", [problem]) from error


def _as_said(error: Exception, verb: Verb) -> Exception:
    """Returns an error as the shell prints it; raises one that is a bug of this package."""
    if isinstance(error, ModuleNotFoundError):
        if error.name != "torch":
            raise error
        problem = Problem("torch", "not installed", "torch, to read tensors", _WITHOUT_TORCH)
        return ShardoptError("this needs torch", [problem], code="missing-package")
    if isinstance(error, ShardoptError):
        put_flags(error, verb.arguments)
    return error
