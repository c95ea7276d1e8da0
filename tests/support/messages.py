"""Collects, by `ast`, the messages that the library's source can print: of errors, of their problems, and of warnings.

A message is text in which `…` stands for what varies. That of a problem is `found …; required …; …`, as it is printed.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from shardopt import errors
from tests.support.source import sources

VARIES = "…"
LEAST_LETTERS = 6  # of a message by which it can be found
_MOST_VARIANTS = 8  # of one message; what has more of them varies
_KINDS = {name for name in dir(errors) if name.endswith("Error")} | {
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)
}
_LOGGED = {"warning", "error", "exception", "critical"}
_PROBLEM = "Problem"
_TOLD_IN = {"lost_text", "exit_message", "_give_up"}  # functions that put a text together of parts
_TELLS = {"announce"}
_PRINTED = ("found", "required", "remedy")


@dataclass(frozen=True)
class Message:
    """One message of the source: where it is written, whether it is a problem's, and its text."""

    where: str
    is_problem: bool
    text: str


@cache
def messages() -> tuple[Message, ...]:
    """Every message of the package, in the order of its files."""
    makers = {
        node.name
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef) and node.returns is not None and _is_fault(ast.unparse(node.returns))
    }
    found = [
        Message(f"{source.path}:{line}", is_problem, text.strip().partition("\n")[0])
        for source in sources()
        for line, is_problem, text in sorted(_in_tree(source.tree, makers))
    ]
    return tuple(dict.fromkeys(found))


def _is_fault(annotation: str) -> bool:
    return any(name.strip("'\" ") in {*_KINDS, _PROBLEM} for name in annotation.split("|"))


def _in_tree(tree: ast.Module, makers: set[str]) -> Iterator[tuple[int, bool, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in _TOLD_IN:
            for each in ast.walk(node):
                if isinstance(each, ast.JoinedStr):
                    said = [text for text in _texts(each, ()) if text.count(" ") > 1 and _says_something(text)]
                    yield from ((each.lineno, False, text) for text in said)
    for scopes, call in _calls(tree, (tree,)):
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        logs = (name in _LOGGED and isinstance(function, ast.Attribute)) or name == "warn"
        if name == _PROBLEM or (name == "problem" and len(call.args) == 4):
            parts = dict(zip(("key", *_PRINTED), (_texts(each, scopes) for each in call.args), strict=False))
            parts |= {str(each.arg): _texts(each.value, scopes) for each in call.keywords}
            if set(_PRINTED) <= set(parts):
                found, required, remedy = (_few(parts[part]) for part in _PRINTED)
                texts = [
                    f"found {one}; required {two}; {three}"
                    for one, two, three in itertools.product(found, required, remedy)
                ]
                yield from ((call.lineno, True, text) for text in texts if _says_something(text))
        elif name in _KINDS or name in _TELLS or logs:
            texts = [_without_percents(text) for text in _texts(call.args[0], scopes)] if call.args else []
            yield from ((call.lineno, False, text) for text in texts if _says_something(text))
        elif name in makers:
            of_arguments = ([text for text in _texts(each, scopes) if _is_words(text)] for each in call.args)
            yield from ((call.lineno, True, text) for text in next(filter(None, of_arguments), []))


def _calls(node: ast.AST, scopes: tuple[ast.AST, ...]) -> Iterator[tuple[tuple[ast.AST, ...], ast.Call]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scopes = (*scopes, node)
    if isinstance(node, ast.Call):
        yield scopes, node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, scopes)


def _texts(node: ast.AST, scopes: tuple[ast.AST, ...], depth: int = 0) -> list[str]:
    """The texts that an expression may be, as far as they stand in its scopes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [_texts(each, scopes, depth) for each in node.values]
        return ["".join(each) for each in itertools.product(*map(_few, parts))][:_MOST_VARIANTS]
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.conversion == -1:
        return _few(_texts(node.value, scopes, depth))
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, scopes, depth), *_texts(node.orelse, scopes, depth)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in _texts(node.left, scopes, depth) for b in _texts(node.right, scopes, depth)]
    if isinstance(node, ast.Name) and depth < 3:
        for scope in reversed(scopes):
            values = _assigned(scope, node.id)
            if values:
                return [text for value in values for text in _texts(value, scopes, depth + 1)]
    return [VARIES]


def _assigned(scope: ast.AST, name: str) -> list[ast.expr]:
    """The values that a scope gives to a name; none where it is an argument."""
    return _assignments(scope).get(name, [])


@cache
def _assignments(scope: ast.AST) -> dict[str, list[ast.expr]]:
    values: dict[str, list[ast.expr]] = {}
    for node in scope.body if isinstance(scope, ast.Module) else ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for each, value in zip(target.elts, node.value.elts, strict=False):
                        if isinstance(each, ast.Name):
                            values.setdefault(each.id, []).append(value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            values.setdefault(node.target.id, []).append(node.value)
    return values


def _few(texts: list[str]) -> list[str]:
    texts = list(dict.fromkeys(texts))
    return texts if len(texts) <= _MOST_VARIANTS else [VARIES]


def _without_percents(text: str) -> str:
    for form in ("%s", "%d", "%.3g", "%g"):
        text = text.replace(form, VARIES)
    return text


def _is_words(text: str) -> bool:
    """Whether it is no name of a file or an option."""
    return " " in text and "/…" not in text and _says_something(text)


def _says_something(text: str) -> bool:
    return letters_of(text) >= LEAST_LETTERS


def letters_of(text: str) -> int:
    """Counts the letters of a message that do not vary."""
    return sum(map(str.isalpha, text.removeprefix("found ").replace("; required ", "")))
