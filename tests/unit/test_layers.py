"""The architecture as tests: who may import whom, where torch's private parts are touched, what never crosses a wire.

Each rule is a function of one source file, so that it is also shown to catch what it is there for.
"""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.support.source import PACKAGE, ROOT, Source, sources

LAYERS = {
    "errors": 0,
    "casts": 1,
    "names": 0,
    "world": 0,
    "staging_fence": 1,
    "streams": 1,
    "gc_pause": 1,
    "torch_private": 1,
    "state": 1,
    "values": 1,
    "sharding": 1,
    "signals": 1,
    "ranks": 2,
    "random_state": 2,
    "sampler": 2,
    "stopping": 3,
    "algorithms": 3,
    "optim": 4,
    "checkpoint": 4,
    "nn": 5,  # over optim, whose optimizers it runs inside of backward
    "cli": 6,
    "": 7,  # shardopt/__init__.py
}
STRANGERS = {("nn", "checkpoint")}  # never import each other, whatever their layers

# The files that may touch private parts of torch, and what for.
PRIVATE_PLACES = {
    "sharding/view.py": "the local tensor of a DTensor, the process group of a ShardedTensor",
    "sharding/pieces.py": "results of collectives that are still on their way",
    "sharding/dtensor.py": "DTensor specs, _StridedShard",
    "sharding/pieces_tensor.py": "a tensor subclass that has no memory of its own",
    "sharding/sharded_tensor.py": "ShardedTensors made without a collective",
    "sharding/gradients.py": "DTensor specs, torch's search for overrides switched off",
    "sharding/reduced.py": "the same classes, for what is left of a tensor when a dimension of it is summed over",
    "ranks/groups.py": "how many process groups there are, by which torch names a new one",
    "torch_private.py": "the lazy state of torch's optimizers, made without a step",
}
# Private by name only: torch's multi-tensor operations, a tensor's version counter, what a namedtuple offers, os._exit.
NOT_PRIVATE = re.compile(r"_foreach_\w+|_version|_exit|_asdict|_replace|_fields|_make")

# The files that may reach for the clock, threads, random names and stores themselves, and why.
WORLD_PLACES = {
    "world.py": "it is what all others ask",
    "signals.py": "C writes signals into a pipe that a thread of the system reads, and forks are caught by it",
    "random_state.py": "the state of Python's own generator is saved and set there, nothing is drawn",
}
WORLD_MODULES = {
    *("time", "datetime", "sched", "threading", "_thread", "queue", "concurrent", "asyncio", "multiprocessing"),
    *("random", "secrets", "uuid", "tempfile"),
}
WORLD_NAMES = re.compile(r"(.*\.)?(\w*Store|get_group_store|_get_default_store|urandom|getrandom)")

PICKLING_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_NAMES = re.compile(r"torch\.(load|save)|.*_object(_list)?|allow_pickle")


def upward_imports(source: Source) -> Iterator[str]:
    """Imports of a part of the package that is not in a lower layer; a part is free within itself."""
    for line, name in source.imports():
        if name.split(".")[0] != "shardopt":
            continue
        part = [*name.split("."), ""][1]
        upward = part != source.part and LAYERS.get(part, LAYERS[""]) >= LAYERS[source.part]
        if upward or (source.part, part) in STRANGERS:
            yield f"{source.path}:{line} imports {name}"


def imports_inside_functions(source: Source) -> Iterator[str]:
    """Imports of the package's own modules that hide in a function: the way around the rule above."""
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = Source(source.path, ast.Module(function.body, []))
            yield from (f"{source.path}:{line} imports {name}" for line, name in hidden.imports() if "shardopt" in name)


def private_parts(source: Source) -> Iterator[str]:
    """Private names of others: imported, reached as an attribute, or by `getattr`.

    A part of the package shares its private names, as a class and its subclasses stand in several of its files.
    """
    own = {*_names_defined(source.tree), *_names_of_part(source.part)}

    def is_private(name: str) -> bool:
        private = name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
        return private and name not in own and not NOT_PRIVATE.fullmatch(name)

    for line, name in source.imports():
        others = name.split(".")[0] != "shardopt"
        if others and name.split(".")[0] != "__future__" and any(map(is_private, name.split("."))):
            yield f"{source.path}:{line} imports {name}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield f"{source.path}:{node.lineno} reaches for {ast.unparse(node)}"
        if isinstance(node, ast.Call) and _is_name(node.func, "getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name):
                yield f"{source.path}:{node.lineno} reaches for {ast.unparse(node)}"


@functools.cache
def _names_of_part(part: str) -> set[str]:
    return {name for source in sources() if source.part == part for name in _names_defined(source.tree)}


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _names_defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _is_name(node.value, "self"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Assign) and _is_name(node.targets[0], "__slots__"):
            yield from ast.literal_eval(node.value)


def pickling(source: Source) -> Iterator[str]:
    """Whatever would store or send objects as pickles."""
    for line, name in source.imports():
        if name.split(".")[0] in PICKLING_MODULES or PICKLING_NAMES.fullmatch(name):
            yield f"{source.path}:{line} imports {name}"
    for node in ast.walk(source.tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        name = node.arg or "" if isinstance(node, ast.keyword) else name
        if PICKLING_NAMES.fullmatch(name):
            yield f"{source.path}:{node.lineno} uses {name}"


def logic_in_init(source: Source) -> Iterator[str]:
    """Anything but a docstring, `from shardopt... import ...` and `__all__`, in an `__init__.py`."""
    if not source.path.endswith("__init__.py"):
        return
    for index, node in enumerate(source.tree.body):
        match node:
            case ast.Expr(ast.Constant(str())) if index == 0:
                pass
            case ast.ImportFrom(names=[*names]) if all(alias.name != "*" for alias in names):
                if not all(name.startswith("shardopt.") for _, name in _only(node, source).imports()):
                    yield f"{source.path}:{node.lineno} imports from elsewhere"
            case ast.Assign([ast.Name("__all__")], ast.List(names)) if all(isinstance(n, ast.Constant) for n in names):
                pass
            case _:
                yield f"{source.path}:{node.lineno} does more than re-export"


def _only(node: ast.stmt, source: Source) -> Source:
    return Source(source.path, ast.Module([node], []))


def world_outside(source: Source) -> Iterator[str]:
    """The clock, waiting, threads, random names and the job's store, reached for past `shardopt/world.py`."""
    if source.path in WORLD_PLACES:
        return
    for line, name in source.imports():
        if name.split(".")[0] in WORLD_MODULES or (name.startswith(("torch", "os")) and WORLD_NAMES.fullmatch(name)):
            yield f"{source.path}:{line} imports {name}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and WORLD_NAMES.fullmatch(f".{node.attr}"):
            yield f"{source.path}:{node.lineno} reaches for {ast.unparse(node)}"


RULES = [upward_imports, imports_inside_functions, private_parts, pickling, logic_in_init, world_outside]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule):
    broken = [
        problem
        for source in sources()
        if not (rule is private_parts and source.path in PRIVATE_PLACES)
        for problem in rule(source)
    ]
    assert broken == []


CAUGHT = [
    (upward_imports, "state.py", "from shardopt.ranks import Ranks"),
    (upward_imports, "state.py", "import shardopt.sharding.box"),
    (upward_imports, "optim/keyed.py", "from shardopt import checkpoint"),
    (upward_imports, "optim/keyed.py", "import shardopt"),
    (upward_imports, "checkpoint/save.py", "from ..optim.keyed import KeyedOptimizer"),
    (upward_imports, "optim/keyed.py", "from shardopt.nn import Table"),
    (upward_imports, "nn/table.py", "from shardopt.checkpoint import save"),
    (upward_imports, "errors.py", "from . import state"),
    (upward_imports, "ranks/channel.py", "from shardopt.brandnew import thing"),
    (imports_inside_functions, "optim/keyed.py", "def f():\n    from shardopt.errors import StateError"),
    (private_parts, "checkpoint/save.py", "def f(t): return t._local_tensor"),
    (private_parts, "checkpoint/save.py", "def f(t): return getattr(t, '_spec', None)"),
    (private_parts, "checkpoint/save.py", "from torch.distributed._shard.sharded_tensor import ShardedTensor"),
    (private_parts, "checkpoint/save.py", "from torch.distributed.tensor.placement_types import _StridedShard"),
    (private_parts, "optim/keyed.py", "def f(o, g): o._init_group(g, [])"),
    (pickling, "ranks/channel.py", "import pickle"),
    (pickling, "ranks/channel.py", "from pickle import dumps"),
    (pickling, "ranks/channel.py", "import torch\ntorch.save(1, 'x')"),
    (pickling, "ranks/channel.py", "from torch import load"),
    (pickling, "ranks/channel.py", "import torch.distributed as dist\ndist.broadcast_object_list([])"),
    (pickling, "ranks/channel.py", "from torch.distributed import all_gather_object"),
    (pickling, "ranks/channel.py", "import numpy\nnumpy.load('x', allow_pickle=True)"),
    (world_outside, "ranks/channel.py", "import time"),
    (world_outside, "ranks/channel.py", "from time import monotonic"),
    (world_outside, "optim/backward.py", "def f():\n    from threading import Lock"),
    (world_outside, "checkpoint/save.py", "import secrets"),
    (world_outside, "checkpoint/save.py", "import uuid"),
    (world_outside, "checkpoint/save.py", "import os\nos.urandom(6)"),
    (world_outside, "checkpoint/save.py", "from tempfile import mkdtemp"),
    (world_outside, "checkpoint/storage/retry.py", "import random as r"),
    (world_outside, "checkpoint/reading/fetch.py", "from concurrent.futures import ThreadPoolExecutor"),
    (world_outside, "checkpoint/reading/fetch.py", "import concurrent.futures"),
    (world_outside, "ranks/ranks.py", "from torch.distributed import HashStore"),
    (world_outside, "ranks/ranks.py", "import torch.distributed as dist\ndist.TCPStore('localhost', 1)"),
    (world_outside, "ranks/ranks.py", "def f(group): return group.get_group_store()"),
    (logic_in_init, "optim/__init__.py", "import shardopt.optim.keyed"),
    (logic_in_init, "optim/__init__.py", "from torch import Tensor"),
    (logic_in_init, "optim/__init__.py", "from shardopt.optim.keyed import *"),
    (logic_in_init, "optim/__init__.py", "__all__ = sorted(['a'])"),
]

ALLOWED = [
    (
        upward_imports,
        "checkpoint/save.py",
        "from shardopt.checkpoint.planning.assign import Plan\nfrom shardopt.ranks import Ranks",
    ),
    (upward_imports, "__init__.py", "from shardopt.optim import keyed"),
    (upward_imports, "nn/embedding.py", "from shardopt.optim.fused import FusedOptimizer"),
    (private_parts, "state.py", "class A:\n    def __init__(self): self._a = 1\ndef f(a): return a._a, a.__dict__"),
    (private_parts, "optim/clipping.py", "import torch\ntorch._foreach_norm([])"),
    (pickling, "state.py", "def f(storage): storage.load(), storage.save()"),
    (world_outside, "ranks/channel.py", "from shardopt.world import Store, world\nworld().sleep(1)"),
    (world_outside, "sampler.py", "import numpy\nnumpy.random.SeedSequence(1)"),
    (logic_in_init, "optim/__init__.py", '"""Doc."""\nfrom shardopt.optim.keyed import keyed\n__all__ = ["keyed"]'),
]


@pytest.mark.parametrize(("rule", "path", "code"), CAUGHT)
def test_rule_catches(rule, path, code):
    assert list(rule(Source(path, ast.parse(code)))) != []


@pytest.mark.parametrize(("rule", "path", "code"), ALLOWED)
def test_rule_allows(rule, path, code):
    assert list(rule(Source(path, ast.parse(code)))) == []


def test_places_outside_of_the_world_are_still_needed():
    for source in sources():
        if source.path in WORLD_PLACES:
            assert list(world_outside(Source("elsewhere.py", source.tree))) != [], source.path


def test_every_part_has_a_layer():
    assert {source.part for source in sources()} <= set(LAYERS)


def test_wheel_holds_the_package_alone_and_all_of_it():
    """setuptools leaves out a folder without `__init__.py`, silently."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings == {"packages": {"find": {"include": ["shardopt*"]}}, "package-data": {"shardopt": ["py.typed"]}}
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
    assert (PACKAGE / "py.typed").exists()
