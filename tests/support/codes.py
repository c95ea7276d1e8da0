"""Collects, by `ast`, the codes that the library's source gives: to errors by their class, and to lines of the log."""

from __future__ import annotations

import ast
import re
from functools import cache

from shardopt import errors
from tests.support.source import sources

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ShardoptError)
}
_IN_TEXT = re.compile(r" \[([a-z0-9-]+)\](?=$|:\n)")


@cache
def raised() -> dict[tuple[str, str], str]:
    """Each pair of a class and a code that some place makes an error of, and the first such place.

    An error that takes over the code of another one (`code=error.code`) is none of its own.
    """
    found: dict[tuple[str, str], str] = {}
    for source in sources():
        for node in ast.walk(source.tree):
            name = _called(node)
            if name in CLASSES:
                given = [each.value for each in node.keywords if each.arg == "code"]
                code = given[0] if given else ast.Constant(CLASSES[name].code)
                if isinstance(code, ast.Constant):
                    found.setdefault((name, code.value), f"{source.path}:{node.lineno}")
    return found


@cache
def logged() -> dict[str, str]:
    """Each code in brackets at the end of a text, as lines of the log have it, and the first such place."""
    found: dict[str, str] = {}
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _IN_TEXT.search(node.value):
                found.setdefault(_IN_TEXT.search(node.value)[1], f"{source.path}:{node.lineno}")
    return found


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
