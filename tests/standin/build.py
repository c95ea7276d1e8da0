"""Builds the stand-in's library into the environment's own folder, once for each source and torch: some 30 s.

python -m tests.standin.build
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).with_name("standin.cpp")
NAME = "standin_C"


def library() -> Path:
    """Returns where the library is, or is to be."""
    made_from = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode() + sys.version.encode()).hexdigest()[:16]
    return Path(sys.prefix) / "standin" / made_from / f"{NAME}.so"


def lacking() -> str:
    """Returns what the stand-in lacks here, to be used; empty where it is built."""
    return "" if library().exists() else f"the stand-in is not built (bash launch/setup.sh): no {library()}"


def build() -> None:
    """Builds the library if it is not there; without a compiler a line says so."""
    compiler = os.environ.get("CXX", "g++")
    if not lacking():
        return
    if shutil.which(compiler) is None:
        print(f"setup: no {compiler} here: tests on the accelerator's stand-in will be skipped")
        return
    from torch.utils import cpp_extension  # slow to import

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # PyPI's ninja
    os.environ.setdefault("MAX_JOBS", "2")
    folder = library().parent.with_suffix(".building")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cpp_extension.load(
        NAME, [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O1", "-g0"], is_python_module=False
    )
    library().parent.mkdir(parents=True, exist_ok=True)
    os.replace(folder / f"{NAME}.so", library())
    shutil.rmtree(folder, ignore_errors=True)


def loaded() -> ModuleType:
    """Returns the library's module."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    build()
