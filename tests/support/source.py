"""The package's source as syntax trees, for the tests that hold its architecture."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shardopt"


@dataclass(frozen=True)
class Source:
    """One file: its path under the package ("checkpoint/format/assign.py") and its tree."""

    path: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Its path without the suffix: "checkpoint/format/assign"; of a package its folder, and "" for the root."""
        return self.path.removesuffix(".py").removesuffix("__init__").rstrip("/")

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, walked once for all rules."""
        return tuple(ast.walk(self.tree))

    def imports(self) -> tuple[tuple[int, str], ...]:
        """(line, dotted name) of everything imported; `from a import b` is a.b, whether b is a module or a name."""
        return self._imports

    @functools.cached_property
    def _imports(self) -> tuple[tuple[int, str], ...]:
        return tuple(self._all_imports())

    def _all_imports(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.lineno, f"{self._base(node)}.{alias.name}") for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        here = ["shardopt", *self.path.split("/")[:-1]]
        return ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple(Source(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_bytes())) for path in paths)
