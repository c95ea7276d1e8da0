"""The remedies in the library's source that name a call or an argument, as far as load, restore and keyed give them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.support.source import sources

VARIES = "…"  # in a text, for what varies
WHERE = re.compile(
    r"checkpoint/(loading/|sources/(?!pickled/)|rearrange/|saving/planning/tied\.py"
    r"|run/(options|steps|manager|context|root)\.py)"
    r"|state/(flatten|state|param_groups)\.py|optim/|sharding/|algorithms/(registry\.py|low_precision/)"
)
NAMES_A_CALL = re.compile(r"\w\(|\w=(?!=)|`")
_WORDS = 2  # of a text that advises; what has fewer is a name or a part of one


@cache
def remedies() -> dict[str, str]:
    """Each remedy by its text, in which "…" stands for what varies, and the first place where it stands."""
    found: dict[str, str] = {}
    for source in sources():
        if WHERE.match(str(source.path)):
            for line, text in _texts(source.tree):
                found.setdefault(text, f"{source.path}:{line}")
    return {text: where for text, where in found.items() if not _stands_for_another(text, found)}


@cache
def pattern(text: str) -> re.Pattern[str]:
    """Returns what finds a remedy, or a part of one, in which "…" stands for what varies."""
    return re.compile(".*".join(map(re.escape, text.split(VARIES))), re.DOTALL)


def _stands_for_another(text: str, others: dict[str, str]) -> bool:
    """Whether a text is a part of another one, or the same with less known of it."""
    found = pattern(text.strip(f"{VARIES} "))
    return any(text != other and found.search(other) for other in others)


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the texts in a tree that are no docstrings, and name a call or an argument."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = _text(node)
        if text is None:
            yield from _texts(node)
        elif len(text.split()) >= _WORDS and NAMES_A_CALL.search(text):
            yield getattr(node, "lineno", 0), text


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(s|d|\.\dg)", VARIES, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else VARIES for each in node.values)
    return None
