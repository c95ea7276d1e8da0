"""Programs for tests of how a program ends, without the seconds in which a new interpreter imports torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path

from tests.harness.ranks import run_ranks_outcomes


def run_program(
    source: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program, as `python -c` does, in a process of the fork server, whose interpreter then ends as usual.

    Args:
        environment: variables beside those of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("stdout", "stderr")]
        command = ["-c", *arguments]
        (outcome,) = run_ranks_outcomes(1, _run, source, command, paths, dict(environment or {}), backend=None)
        assert outcome.exit_code is not None, f"it did not end: {outcome}"
        return subprocess.CompletedProcess(command, outcome.exit_code, *(path.read_text() for path in paths))


def _run(source: str, command: list[str], paths: list[Path], environment: dict[str, str]) -> None:
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(environment)
    sys.argv = command
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        exec(compile(source, "<string>", "exec"), program.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    del program
    ctypes.pythonapi.Py_Exit(code)  # waits for threads, calls what is to be called at the end, and takes modules down
