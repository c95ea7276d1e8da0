"""Signatures: annotations with names that are imported for type checking alone are left as they are."""

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import shardopt
from shardopt.runtime import signatures

PACKAGE = Path(shardopt.__file__).parent


def test_annotations_are_not_evaluated(monkeypatch):
    """Before 3.14 none is, and there is no such argument."""
    if sys.version_info < (3, 14):
        asked = []
        with monkeypatch.context() as later:
            later.setattr(sys, "version_info", (3, 14, 0))
            later.setitem(sys.modules, "annotationlib", SimpleNamespace(Format=SimpleNamespace(STRING="as text")))
            later.setattr(inspect, "signature", lambda function, annotation_format: asked.append(annotation_format))
            importlib.reload(signatures).signature(ast.parse)
        importlib.reload(signatures)
        assert asked == ["as text"]
        return
    namespace = {}
    exec("class Own:\n    def __init__(self, params: Unknown, lr: float = 1.0): ...", namespace)
    assert [*signatures.signature(namespace["Own"]).parameters] == ["params", "lr"]


@pytest.mark.parametrize("name", ["signature", "get_annotations", "getfullargspec", "get_type_hints"])
def test_nothing_else_evaluates_any(name):
    said = {path for path in PACKAGE.rglob("*.py") if name in path.read_text() and path.name != "signatures.py"}
    trees = [(path, node) for path in said for node in ast.walk(ast.parse(path.read_text()))]
    assert not [path for path, node in trees if isinstance(node, ast.Attribute) and node.attr == name]
    imports = [(path, node) for path, node in trees if isinstance(node, ast.ImportFrom)]
    assert not [
        path for path, node in imports if node.module in ("inspect", "typing") and name in {a.name for a in node.names}
    ]
