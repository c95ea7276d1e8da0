"""`help` of every public call says what each of its parameters is."""

import ast
import enum
import importlib
import inspect
import re

import pytest

from shardopt.errors import ShardoptError
from tests.docs.blocks import ROOT
from tests.docs.test_site import ENTRY
from tests.support.source import PACKAGE

ENTRIES = re.compile(r"^Args:\n((?:    .*\n|\n)+)", re.MULTILINE)
NAMES = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ?\S?", re.MULTILINE)
WRITTEN = sorted({name for page in (ROOT / "docs/reference").glob("*.md") for name in ENTRY.findall(page.read_text())})
OF_FRAMEWORKS = [name for name in WRITTEN if name.startswith("shardopt.integrations.")]  # which need not be installed


def explained(docstring: str | None) -> set[str]:
    """The names at the beginning of entries under "Args:": `a: …`, or `a, b: as for …`."""
    entries = "".join(ENTRIES.findall(f"{inspect.cleandoc(docstring or '')}\n\n"))
    return {name.lstrip("*") for names in NAMES.findall(entries) for name in names.split(", ")}


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in OF_FRAMEWORKS])
def test_each_parameter_is_explained(name):
    """In the docstring of the function or class itself, or of its `__init__`: none is left to a base class."""
    module, _, attribute = name.rpartition(".")
    call = getattr(importlib.import_module(module), attribute, None)
    if not callable(call) or (inspect.isclass(call) and is_not_called(call)):
        return
    taken = inspect.signature(call).parameters.keys()
    of_init = vars(call).get("__init__") if inspect.isclass(call) else None
    assert taken - explained(call.__doc__) - explained(getattr(of_init, "__doc__", None)) == set()


def is_not_called(kind: type) -> bool:
    """Enums, protocols, and errors that programs catch; how all errors are made says their base."""
    is_error = issubclass(kind, ShardoptError) and kind is not ShardoptError
    return issubclass(kind, enum.Enum) or getattr(kind, "_is_protocol", False) or is_error


@pytest.mark.parametrize("name", OF_FRAMEWORKS)
def test_each_parameter_of_an_integration_is_explained(name):
    module, attribute = name.split(".")[2:]
    tree = ast.parse((PACKAGE / "integrations" / f"{module}.py").read_text())
    (node,) = [node for node in tree.body if getattr(node, "name", "") == attribute]
    inner = node.body if isinstance(node, ast.ClassDef) else ()
    calls = [node, *(each for each in inner if getattr(each, "name", "") == "__init__")]
    arguments = [each.args for each in calls if isinstance(each, ast.FunctionDef)]
    taken = {
        given.arg
        for each in arguments
        for given in (*each.posonlyargs, *each.args, *each.kwonlyargs, each.vararg, each.kwarg)
        if given is not None and given.arg != "self"
    }
    assert taken - {name for each in calls for name in explained(ast.get_docstring(each))} == set()


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Does it.\n\nArgs:\n    a: one.\n    b, c: as for `d`.\n\nRaises:\n    e: f.", {"a", "b", "c"}),
        ("Does it.\n\nArgs:\n    a: one\n        b: of its text.\n    **options: more.", {"a", "options"}),
        ("Does it with `a`.", set()),
        (None, set()),
    ],
)
def test_what_counts_as_explained(docstring, found):
    assert explained(docstring) == found
