"""`shardopt new`: writes a program to copy.

Its files are those of examples/template in the repository. `template` beside this folder is a link there, and in an
installed package a copy.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from shardopt.cli.output import Output, Span
from shardopt.errors import OptionError, Problem

FILES = ("README.md", "config.toml", "job.slurm", "requirements.txt", "tests/test_train.py", "train.py")
"""The files of the template. Others may lie beside them where pip has compiled these."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MARK = "{{name}}"


def new(output: Output, *, directory: str) -> int:
    """Writes the files of the template to a directory, and prints their paths."""
    root = Path(os.path.expanduser(directory)).resolve()
    problems = []
    if not _NAME.fullmatch(root.name):
        required = "letters, digits, `.`, `_` and `-`, first a letter or digit"
        problems.append(Problem("DIR", repr(root.name), required, "choose such a name, which the files then have too"))
    if root.exists() and not root.is_dir():
        problems.append(Problem("DIR", f"a file at {root}", "a directory that is new or empty", "choose another"))
    elif root.exists() and any(root.iterdir()):
        found = f"{len([*root.iterdir()])} files in {root}"
        problems.append(Problem("DIR", found, "a directory that is new or empty", "choose another, or empty this one"))
    if problems:
        raise OptionError("nothing was written", problems)
    template = resources.files("shardopt.cli").joinpath("template")
    for name in FILES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.joinpath(name).read_text(encoding="utf-8").replace(_MARK, root.name), encoding="utf-8")
        output.line(str(path))
    output.line(Span(f"next: cd {directory}, and read README.md", "bold"))
    output.data({"directory": str(root), "files": list(FILES)})
    return 0
