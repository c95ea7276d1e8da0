"""The architecture as tests: who may import whom, where torch's private parts are touched, what never crosses a wire.

Each rule is a function of one source file, so that it is also shown to catch what it is there for.
"""

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import PACKAGE, ROOT, Source, sources

# Floors, from below. A room is a folder, or a file on another floor than its folder; the longest path that fits counts.
FLOORS = {
    "codes": -1,
    "redaction": -1,
    "runtime/late": -1,
    "runtime/program_end": -1,
    "runtime/sockets": -1,
    "runtime/stores": -1,
    "version": -1,
    "errors": 0,
    "world": 0,
    "runtime/exports": 0,
    "runtime": 1,
    "sharding": 2,
    "sharding/public": 3,
    "sharding/__init__": 4,
    "ranks/connections": 2,
    "ranks/files": 3,
    "ranks": 4,
    "state": 3,
    "data": 5,
    "algorithms": 10,
    "algorithms/adafactor": 11,
    "algorithms/sparse_adam": 11,
    "algorithms/gathering": 11,
    "algorithms/muon": 12,
    "algorithms/elementwise": 11,
    "algorithms/lbfgs": 12,
    "algorithms/row_wise": 11,
    "algorithms/layer_wise": 11,
    "algorithms/low_precision": 11,
    "algorithms/blocked": 12,
    "algorithms/builtin": 13,
    "algorithms/__init__": 14,
    "optim/state_dict": 20,
    "optim/gradients": 21,
    "optim/schedules": 22,
    "optim/local": 22,
    "optim/semi_sync/islands": 22,
    "optim/averages": 22,
    "optim/core": 23,
    "optim": 24,
    "checkpoint/reports": 20,
    "checkpoint/progress": 20,
    "checkpoint/arguments": 20,
    "checkpoint/text": 19,
    "checkpoint/format": 21,
    "checkpoint/storage": 22,
    "checkpoint/sources/pickled": 23,
    "checkpoint/sources/reading": 24,
    "checkpoint/sources": 25,
    "checkpoint/hosts": 26,
    "checkpoint/rearrange": 26,
    "checkpoint/saving/planning": 23,
    "checkpoint/saving/writing": 26,
    "checkpoint/saving": 27,
    "checkpoint/loading": 28,
    "checkpoint/converting": 29,
    "checkpoint/dcp": 31,  # over the front doors, for torch's; imported by nobody
    "checkpoint/run": 30,
    "checkpoint/stream/root": 31,
    "checkpoint/estimating": 32,
    "checkpoint/run/tiers": 31,
    "checkpoint/run/after_commit": 32,
    "checkpoint/run/steps": 33,
    "checkpoint/run/manager": 34,
    "checkpoint/stream": 34,
    "checkpoint/public": 35,
    "checkpoint/__init__": 36,
    "nn": 33,  # over optim, whose optimizers it runs inside of backward
    "nn/plan": 34,  # a plan of the tables below it; its costs and search need no torch
    "nn/public": 35,
    "nn/__init__": 36,
    "public": 37,
    "cli": 37,
    "report": 38,  # a verb of the shell that has a room of its own, over what other verbs read
    "testing": 37,  # over the front doors, for others' tests; imported by nobody
    "integrations": 37,  # loops of frameworks, around all that is here; imported by nobody
    "__init__": 38,
}
# Never import each other, whatever their floors.
STRANGERS = {("nn", "checkpoint"), ("optim", "checkpoint"), ("checkpoint", "optim"), ("checkpoint", "algorithms")}


def room_of(module: str) -> str | None:
    """The room of a module ("checkpoint/run/manager") or of a name in one; None if it is in none."""
    path = module.split("/")
    if path == [""]:
        return "__init__"
    for length in range(len(path), 0, -1):
        room = "/".join(path[:length])
        if length == len(path) and f"{room}/__init__" in FLOORS:
            return f"{room}/__init__"  # the folder itself, which gathers what is above its rooms
        if room in FLOORS:
            return room
    return None


# The files that may touch private parts of torch, or of a framework, and what for.
PRIVATE_PLACES = {
    "sharding/view.py": "the local tensor of a DTensor, the class ShardedTensor",
    "sharding/pieces.py": "only a class: results of collectives that are still on their way",
    "sharding/dtensor.py": "DTensor specs, _StridedShard",
    "sharding/pieces_tensor.py": "a tensor subclass that has no memory of its own",
    "sharding/sharded_tensor.py": "ShardedTensors made without a collective, and their process group",
    "sharding/gradients.py": "DTensor specs and local tensors, torch's search for overrides switched off",
    "sharding/traceable.py": "classes that it is not to see through, and the local tensor of a DTensor",
    "sharding/reduced.py": "only classes: ShardedTensor and its metadata, _StridedShard",
    "checkpoint/converting/pickle_bytes.py": "only by name: the functions by which torch makes tensors of its files",
    "checkpoint/converting/to_dcp.py": "only a class: DCP's record of where a box is",
    "state/versions.py": "the notes of versions in a module's state, which torch keeps there as an attribute",
    "optim/averages/swapping.py": "the places where modules have parameters, which a step looks at without a walk",
    "ranks/groups.py": "how many process groups there are, by which torch names a new one",
    "runtime/partial_loads.py": "the parts of our composites, which rooms above have",
    "runtime/torch_private.py": "hooks, steps, lazy state and kernels of torch.optim; modes of the process",
    "runtime/torch_gradients.py": "hooks of backward, stages of a GradScaler, what reduces gradients",
    "integrations/accelerate.py": "what an Accelerator was given to prepare and to save",
    "integrations/lightning_state.py": "whether Lightning is about to validate, and that it takes an epoch for resumed",
    "integrations/torchdata.py": "the iterator that a loader opens after a load",
    "integrations/trainer.py": "the loss since a Trainer's last log, and the step of that",
}
# Private by name only: torch's multi-tensor operations, a tensor's version counter, what a namedtuple offers, os._exit,
# stacks of other threads.
NOT_PRIVATE = re.compile(r"_current_frames|_foreach_\w+|_version|_exit|_asdict|_replace|_fields|_make")

# The files that may reach for the clock, threads, random names and stores themselves, and why.
WORLD_PLACES = {
    "world.py": "it is what all others ask",
    "runtime/sockets.py": "what the real world makes sockets with",
    "runtime/signals.py": "C writes signals into a pipe that a thread of the system reads, and forks are caught by it",
    "runtime/stores.py": "what the real world makes stores with",
    "data/workers.py": "a worker waits there for the end of its rank's process",
    "data/random_state.py": "the state of Python's own generator is saved and set there, nothing is drawn",
}
WORLD_MODULES = {
    *("time", "datetime", "sched", "threading", "_thread", "queue", "concurrent", "asyncio", "multiprocessing"),
    *("random", "secrets", "uuid", "tempfile"),
    *("socket", "selectors", "select"),
}
WORLD_VALUES = {"datetime.timedelta"}  # a length of time, which asks no clock
WORLD_NAMES = re.compile(r"(.*\.)?(\w*Store|get_group_store|_get_default_store|urandom|getrandom)")

# The files that may make a pickle, and what for. None reads one.
PICKLING_PLACES = {
    "checkpoint/converting/pickle_bytes.py": "torch.load takes plain values in no other form; each is looked at",
    "checkpoint/converting/to_dcp.py": "DCP's own index is a pickle of torch's records",
    "checkpoint/dcp/reader.py": "torch's planners take a plain value in no other form; in memory alone",
}
PICKLING_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_NAMES = re.compile(r"torch\.(load|save)|.*_object(_list)?|allow_pickle")


@functools.cache
def _modules() -> frozenset[str]:
    return frozenset(source.module for source in sources())


def _module_of(name: str) -> str:
    """The module that an import of this dotted name reaches: of `from a import b` that is a/b, or else a."""
    path = "/".join(name.split(".")[1:])
    return path if path in _modules() else path.rpartition("/")[0] if "/" in path or path not in FLOORS else path


def upward_imports(source: Source) -> Iterator[str]:
    """Imports of a room that is not on a lower floor. A room is free within itself."""
    own = room_of(source.module)
    for line, name in source.imports():
        if name.split(".")[0] != "shardopt":
            continue
        room = room_of(_module_of(name))
        upward = room != own and (room is None or own is None or FLOORS[room] >= FLOORS[own])
        if upward or (source.module.split("/")[0], name.split(".")[1:2][0] if "." in name else "") in STRANGERS:
            yield f"{source.path}:{line} imports {name}"


def imports_inside_functions(source: Source) -> Iterator[str]:
    """Imports of the package's own modules that hide in a function: the way around the rule above."""
    for function in source.nodes:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = Source(source.path, ast.Module(function.body, []))
            yield from (f"{source.path}:{line} imports {name}" for line, name in hidden.imports() if "shardopt" in name)


def late_imports_unseen(source: Source) -> Iterator[str]:
    """Modules that `late` names and that are not imported for type checkers too: the other rules would not see them."""
    seen = {name for _, name in source.imports()}
    for node in source.nodes:
        if isinstance(node, ast.Call) and _is_name(node.func, "late") and ast.literal_eval(node.args[0]) not in seen:
            yield f"{source.path}:{node.lineno} imports {ast.unparse(node)}"


def private_parts(source: Source) -> Iterator[str]:
    """Private names of others: imported, reached as an attribute, or by `getattr`.

    A room shares its private names, as a class and its subclasses stand in several of its files; a subclass in another
    room has those of its base's room.
    """
    rooms = {room_of(source.module), *_rooms_of_bases(source)}
    own = {*_names_defined(source), *(name for room in rooms for name in _names_of_room(room))}

    def is_private(name: str) -> bool:
        private = name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
        return private and name not in own and not NOT_PRIVATE.fullmatch(name)

    for line, name in source.imports():
        own_room = name.split(".")[0] == "shardopt" and room_of(_module_of(name)) == room_of(source.module)
        if not own_room and name.split(".")[0] != "__future__" and any(map(is_private, name.split("."))):
            yield f"{source.path}:{line} imports {name}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield f"{source.path}:{node.lineno} reaches for {ast.unparse(node)}"
        if isinstance(node, ast.Call) and _is_name(node.func, "getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name):
                yield f"{source.path}:{node.lineno} reaches for {ast.unparse(node)}"


@functools.cache
def _names_of_room(room: str | None) -> set[str]:
    return {name for source in sources() if room_of(source.module) == room for name in _names_defined(source)}


def _rooms_of_bases(source: Source) -> Iterator[str | None]:
    """The rooms of the package that this file's classes inherit from."""
    bases = {ast.unparse(base) for node in source.nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    for _, name in source.imports():
        if name.startswith("shardopt.") and name.rpartition(".")[2] in bases:
            yield room_of(_module_of(name))


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _names_defined(source: Source) -> Iterator[str]:
    for node in source.nodes:
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
    for node in source.nodes:
        name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        name = node.arg or "" if isinstance(node, ast.keyword) else name
        if PICKLING_NAMES.fullmatch(name):
            yield f"{source.path}:{node.lineno} uses {name}"


def logic_in_init(source: Source) -> Iterator[str]:
    """Anything but a docstring, `from shardopt... import name as name`, and `_offer`, which makes `__all__` of these.

    A package that imports nothing before it is asked for has its table in a `public.py` of its own instead.
    """
    if source.path.split("/")[-1] not in ("__init__.py", "public.py"):
        return
    package = ".".join(["shardopt", *source.path.split("/")[:-1]])
    for index, node in enumerate(source.tree.body):
        match node:
            case ast.Expr(ast.Constant(str())) if index == 0:
                pass
            case ast.ImportFrom("typing", [ast.alias("TYPE_CHECKING", None)], 0):
                pass
            case ast.ImportFrom(names=[*names]) if all(alias.name != "*" for alias in names):
                if not all(name.startswith("shardopt.") for _, name in _only(node, source).imports()):
                    yield f"{source.path}:{node.lineno} imports from elsewhere"
                for alias in names:
                    if alias.asname is None:
                        yield f"{source.path}:{node.lineno} does not say whether {alias.name} is offered"
            case ast.Expr(ast.Call(ast.Name("_offer"))) if node is source.tree.body[-1]:
                pass
            case ast.If(ast.Name("TYPE_CHECKING"), [ast.ImportFrom(shown)], [ast.ImportFrom(), ast.Assign(value=made)]):
                if shown != f"{package}.public" or ast.unparse(made) != f"_lazily(__name__, '{shown}')":
                    yield f"{source.path}:{node.lineno} offers others than type checkers see"
            case _:
                yield f"{source.path}:{node.lineno} does more than re-export"


def _only(node: ast.stmt, source: Source) -> Source:
    return Source(source.path, ast.Module([node], []))


def world_outside(source: Source) -> Iterator[str]:
    """The clock, waiting, threads, random names and the job's store, reached for past `shardopt/world.py`."""
    if source.path in WORLD_PLACES:
        return
    for line, name in source.imports():
        if name in WORLD_VALUES:
            continue
        if name.split(".")[0] in WORLD_MODULES or (name.startswith(("torch", "os")) and WORLD_NAMES.fullmatch(name)):
            yield f"{source.path}:{line} imports {name}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and WORLD_NAMES.fullmatch(f".{node.attr}"):
            yield f"{source.path}:{node.lineno} reaches for {ast.unparse(node)}"


RULES = [
    upward_imports,
    imports_inside_functions,
    late_imports_unseen,
    private_parts,
    pickling,
    logic_in_init,
    world_outside,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule):
    broken = [
        problem
        for source in sources()
        if not (rule is private_parts and source.path in PRIVATE_PLACES)
        and not (rule is pickling and source.path in PICKLING_PLACES)
        for problem in rule(source)
    ]
    assert broken == []


CAUGHT = [
    (upward_imports, "state/state.py", "from shardopt.ranks import Ranks"),
    (upward_imports, "state/state.py", "import shardopt.ranks"),
    (upward_imports, "optim/keyed.py", "from shardopt import checkpoint"),
    (upward_imports, "optim/keyed.py", "import shardopt"),
    (upward_imports, "checkpoint/saving/save.py", "from ..optim.keyed import KeyedOptimizer"),
    (upward_imports, "optim/keyed.py", "from shardopt.nn import Table"),
    (upward_imports, "nn/table.py", "from shardopt.checkpoint import save"),
    (upward_imports, "errors.py", "from . import state"),
    (upward_imports, "ranks/channel.py", "from shardopt.brandnew import thing"),
    (upward_imports, "checkpoint/format/manifest.py", "from shardopt.checkpoint.sources.reader import TensorInfo"),
    (
        upward_imports,
        "checkpoint/sources/pickled/unpickle.py",
        "from shardopt.checkpoint.sources.reading.fetch import fetch",
    ),
    (upward_imports, "checkpoint/sources/reading/fetch.py", "from shardopt.checkpoint.loading.load import load"),
    (upward_imports, "checkpoint/saving/save.py", "from shardopt.checkpoint.run.manager import Manager"),
    (upward_imports, "checkpoint/saving/writing/write.py", "from shardopt import checkpoint"),
    (upward_imports, "checkpoint/saving/writing/write.py", "from shardopt.checkpoint import save"),
    (upward_imports, "algorithms/registry.py", "from shardopt.algorithms.muon.muon import Muon"),
    (upward_imports, "algorithms/muon/muon.py", "from shardopt.algorithms.lbfgs.lbfgs import LBFGS"),
    (upward_imports, "optim/local/local_step.py", "from shardopt.optim.keyed import keyed"),
    (upward_imports, "nn/bags.py", "from shardopt.checkpoint.format.constants import DTYPES"),
    (upward_imports, "checkpoint/run/manager.py", "from shardopt.optim.state_dict.groups import named"),
    (private_parts, "checkpoint/saving/save.py", "from shardopt.checkpoint.format.assign import _lines"),
    (private_parts, "checkpoint/saving/save.py", "def f(plan): return plan._lines"),
    (imports_inside_functions, "optim/keyed.py", "def f():\n    from shardopt.errors import StateError"),
    (late_imports_unseen, "world.py", "stores = late('shardopt.runtime.stores')"),
    (upward_imports, "world.py", "if TYPE_CHECKING:\n    from shardopt.checkpoint import save"),
    (private_parts, "checkpoint/saving/save.py", "def f(t): return t._local_tensor"),
    (private_parts, "checkpoint/saving/save.py", "def f(t): return getattr(t, '_spec', None)"),
    (private_parts, "checkpoint/saving/save.py", "from torch.distributed._shard.sharded_tensor import ShardedTensor"),
    (private_parts, "checkpoint/saving/save.py", "from torch.distributed.tensor.placement_types import _StridedShard"),
    (private_parts, "optim/keyed.py", "def f(o, g): o._init_group(g, [])"),
    (pickling, "ranks/channel.py", "import pickle"),
    (pickling, "checkpoint/sources/pickled/unpickle.py", "from pickle import Unpickler"),
    (pickling, "ranks/channel.py", "from pickle import dumps"),
    (pickling, "ranks/channel.py", "import torch\ntorch.save(1, 'x')"),
    (pickling, "ranks/channel.py", "from torch import load"),
    (pickling, "ranks/channel.py", "import torch.distributed as dist\ndist.broadcast_object_list([])"),
    (pickling, "ranks/channel.py", "from torch.distributed import all_gather_object"),
    (pickling, "ranks/channel.py", "import numpy\nnumpy.load('x', allow_pickle=True)"),
    (world_outside, "ranks/channel.py", "import time"),
    (world_outside, "ranks/channel.py", "from time import monotonic"),
    (world_outside, "optim/backward.py", "def f():\n    from threading import Lock"),
    (world_outside, "checkpoint/saving/save.py", "import secrets"),
    (world_outside, "checkpoint/saving/save.py", "import uuid"),
    (world_outside, "checkpoint/saving/save.py", "import os\nos.urandom(6)"),
    (world_outside, "checkpoint/saving/save.py", "from tempfile import mkdtemp"),
    (world_outside, "checkpoint/storage/retry.py", "import random as r"),
    (world_outside, "ranks/channel.py", "import socket"),
    (world_outside, "checkpoint/sources/reading/fetch.py", "from concurrent.futures import ThreadPoolExecutor"),
    (world_outside, "checkpoint/sources/reading/fetch.py", "import concurrent.futures"),
    (world_outside, "ranks/ranks.py", "from torch.distributed import HashStore"),
    (world_outside, "ranks/ranks.py", "import torch.distributed as dist\ndist.TCPStore('localhost', 1)"),
    (world_outside, "ranks/ranks.py", "def f(group): return group.get_group_store()"),
    (logic_in_init, "optim/__init__.py", "import shardopt.optim.keyed"),
    (logic_in_init, "optim/__init__.py", "from torch import Tensor"),
    (logic_in_init, "optim/__init__.py", "from shardopt.optim.keyed import *"),
    (logic_in_init, "optim/__init__.py", "from shardopt.optim.keyed import keyed"),
    (logic_in_init, "optim/__init__.py", "__all__ = ['a']"),
    (logic_in_init, "optim/__init__.py", "_offer(__name__)\nfrom shardopt.a import b as b"),
    (logic_in_init, "optim/__init__.py", "if TYPE_CHECKING:\n    from shardopt.a import b"),
    (
        logic_in_init,
        "__init__.py",
        "if TYPE_CHECKING:\n    from shardopt.public import *\n"
        "else:\n    from shardopt.runtime.exports import lazily as _lazily\n"
        "    __getattr__ = _lazily(__name__, 'shardopt.optim')",
    ),
]

ALLOWED = [
    (
        upward_imports,
        "checkpoint/saving/save.py",
        "from shardopt.checkpoint.format.assign import Plan\nfrom shardopt.ranks import Ranks",
    ),
    (upward_imports, "__init__.py", "from shardopt.optim import keyed"),
    (upward_imports, "checkpoint/run/manager.py", "from shardopt.checkpoint.run.keeper import Keeper"),
    (private_parts, "checkpoint/run/keeper.py", "from shardopt.checkpoint.run.root import _thing"),
    (upward_imports, "nn/embedding.py", "from shardopt.optim.fused import FusedOptimizer"),
    (
        private_parts,
        "state/state.py",
        "class A:\n    def __init__(self): self._a = 1\ndef f(a): return a._a, a.__dict__",
    ),
    (private_parts, "optim/clipping.py", "import torch\ntorch._foreach_norm([])"),
    (pickling, "state/state.py", "def f(storage): storage.load(), storage.save()"),
    (world_outside, "ranks/channel.py", "from shardopt.world import Lock, world\nworld().sleep(1)"),
    (world_outside, "data/sampler.py", "import numpy\nnumpy.random.SeedSequence(1)"),
    (logic_in_init, "optim/__init__.py", '"""Doc."""\nfrom shardopt.optim.keyed import A as A\n_offer(__name__)'),
    (
        logic_in_init,
        "__init__.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardopt.public import *\n"
        "else:\n    from shardopt.runtime.exports import lazily as _lazily\n"
        "    __getattr__ = _lazily(__name__, 'shardopt.public')",
    ),
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


def test_every_file_has_a_floor():
    assert [source.path for source in sources() if room_of(source.module) is None] == []
    rooms = {room_of(source.module) for source in sources()}
    assert [room for room in FLOORS if room not in rooms] == []


def too_long(path: Path, text: str) -> list[str]:
    """The file if it has more than 400 lines, and its functions that have more than 80, docstrings included."""
    long = [str(path)] if len(text.splitlines()) > 400 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80:
            long.append(f"{path}: {node.name}")
    return long


def test_files_and_functions_are_short():
    long = [each for path in PACKAGE.rglob("*.py") for each in too_long(path, path.read_text())]
    assert long == []


def test_what_is_too_long_is_caught():
    body = "    pass\n" * 79
    assert too_long(Path("a.py"), f"def f():\n{body}") == []
    assert too_long(Path("a.py"), f"def f():\n    pass\n{body}") == ["a.py: f"]
    assert too_long(Path("a.py"), "pass\n" * 400) == []
    assert too_long(Path("a.py"), "pass\n" * 401) == ["a.py"]


def test_no_room_is_crowded():
    """At most twenty files in a folder; beyond that it wants inner walls."""
    count = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    assert {str(folder.relative_to(PACKAGE)): files for folder, files in count.items() if files > 20} == {}


def test_wheel_holds_the_package_alone_and_all_of_it():
    """setuptools leaves out a folder without `__init__.py`, silently."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"] == {"find": {"include": ["shardopt*"]}}
    template = ["cli/template/*", "cli/template/tests/*.py"]  # a link to a folder of examples/
    assert settings["package-data"] == {"shardopt": ["py.typed", "cli/troubleshooting.md", *template, "report/page/*"]}
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
    assert all([*PACKAGE.glob(name)] for name in settings["package-data"]["shardopt"])
