"""Runs the code blocks of a page: scripts on ranks, lines of shell, what they print. `blocks.py` says how to use it."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
import types
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import torch.distributed as dist
import yaml

from tests.docs.blocks import ROOT, STORES, Block, Program, blocks_of, programs_of
from tests.harness import RanksFailed, azurite_app, run_ranks
from tests.harness.object_stores import object_server

DEADLINE_SECONDS = 100.0

Stores = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Script:
    """What each rank runs: (file, line, source) one after another under one set of names, or a verb of the shell."""

    ranks: int
    sources: tuple[tuple[str, int, str], ...] = ()
    arguments: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    verb: bool = False  # `arguments` are those of `shardopt`
    stores: Stores = ()  # protocol → options of fsspec with which it leads to a server
    warns: bool = False  # warnings are no errors


def run_page(page: Path, folder: Path, in_full: bool = False) -> None:
    """Runs all blocks of a page in `folder`, in their order.

    Args:
        in_full: also those that are `exhaustive`, and bash blocks by the shell, as a reader would.

    Raises:
        AssertionError: a block failed, did not fail though it should, or printed something else; says which.
    """
    programs = [program for program in programs_of(blocks_of(page)) if not missing_modules(program)]
    programs = [program for program in programs if in_full or not program.has("exhaustive")]
    with ExitStack() as stack:
        used = [protocol for protocol in STORES if any(program.has(protocol) for program in programs)]
        servers = {protocol: stack.enter_context(object_server(protocol)) for protocol in used}
        for program in programs:
            here = {protocol: server for protocol, server in servers.items() if program.has(protocol)}
            for protocol, server in here.items():
                for bucket in filter(None, program.first.words.get(protocol, "").split(",")):
                    server.make_bucket(bucket)
            stores = tuple((protocol, server.options()) for protocol, server in here.items())
            _run_program(program, folder, in_full, stores)


def missing_modules(program: Program) -> list[str]:
    """What the program needs and is not installed here."""
    names = [name for block in program.blocks for name in block.words.get("needs", "").split(",") if name]
    azurite = ["azurite"] if program.has("az") and azurite_app.program() is None else []
    return azurite + [name for name in names if importlib.util.find_spec(name) is None]


def parse(block: Block) -> None:
    """Parses a block of data."""
    {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: [*yaml.safe_load_all(text)]}[block.language](
        block.text
    )


def _run_program(program: Program, folder: Path, in_full: bool, stores: Stores) -> None:
    __tracebackhide__ = True
    first = program.first
    name = first.words.get("file")
    if name:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # At its own line, so that a traceback of the script names the line of the page.
        path.write_text(first.text)
        if "ranks" not in first.words:
            return
    log = folder / ".output"
    log.write_text("")
    failure = ""
    try:
        if first.language == "bash":
            _run_shell(first, folder, log, in_full, stores)
        else:
            pieces = [(str(block.page), *piece) for block in program.blocks for piece in block.pieces]
            _run_script(Script(first.ranks, tuple(pieces), stores=stores, warns=program.has("warns")), folder, log)
    except (RanksFailed, subprocess.SubprocessError) as error:
        failure = str(error)
    output = log.read_text(errors="replace")
    if "fails" in first.words:
        assert failure, f"{first.where} should fail, and did not; it printed\n{output}"
        wanted = first.words["fails"]
        assert wanted in failure + output, f"{first.where} failed without {wanted!r}:\n{failure}\n{output}"
    elif failure:
        raise AssertionError(f"{first.where} failed\n{failure}\n{output[-4000:]}")
    for block in program.prints:
        check_output(block, output)


def check_output(block: Block, output: str) -> None:
    """Looks for the lines of a block in what was printed, in their order."""
    position = 0
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for wanted in block.text.splitlines():
        if not wanted.strip("… "):
            continue
        pattern = re.compile(".*".join(re.escape(" ".join(part.split())) for part in wanted.split("…")))
        while position < len(lines) and not pattern.fullmatch(lines[position]):
            position += 1
        assert position < len(lines), f"{block.where}: was not printed (in this order):\n{wanted}\n--- but\n{output}"
        position += 1


def _run_shell(block: Block, folder: Path, log: Path, in_full: bool, stores: Stores) -> None:
    """A block of bash: by our own ranks where these can run all of its lines but `rm`, else by bash."""
    where = ROOT if "root" in block.words else folder
    lines = block.text.replace("\\\n", " ").splitlines()
    commands = [words for words in (shlex.split(line, comments=True) for line in lines) if words]
    scripts = [] if in_full else [_script_of(command, where) for command in commands]
    others = [command for command, script in zip(commands, scripts, strict=False) if script is None]
    if len(others) < len(scripts) and all(command[0] == "rm" and not _is_of_shell(command) for command in others):
        for command, script in zip(commands, scripts, strict=True):
            if script is None:
                subprocess.run(command, cwd=where, check=True, timeout=DEADLINE_SECONDS)
            else:
                _run_script(replace(script, stores=stores), where, log)
        return
    variables = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables |= {f"FSSPEC_{protocol.upper()}": json.dumps(options) for protocol, options in stores}
    with log.open("ab") as output:
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=where,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_SECONDS,
            check=True,
        )


def _script_of(command: Sequence[str], folder: Path) -> Script | None:
    """A line of shell as a script; None if it is none of those that ranks can run."""
    words = list(command)
    variables = []
    while words and re.fullmatch(r"[A-Z_]+=[^$]*", words[0]):
        variables.append(tuple(words.pop(0).split("=", 1)))
    if not words or _is_of_shell(words):
        return None
    if words[0] == "shardopt":
        return Script(1, arguments=tuple(words[1:]), variables=tuple(variables), verb=True)
    ranks = 1
    if words[:3] == ["torchrun", "--standalone", "--nproc-per-node"]:
        ranks, words = int(words[3]), words[4:]
    elif words[0] == "python" and words[1:] and words[1].endswith(".py"):
        words = words[1:]
    else:
        return None
    source = (str(folder / words[0]), 1, (folder / words[0]).read_text())
    return Script(ranks, (source,), tuple(words[1:]), tuple(variables))


def _is_of_shell(words: Sequence[str]) -> bool:
    """Whether a line has what only a shell understands."""
    return any(re.fullmatch(r"[|&;<>]+.*|.*[$*`].*", word) for word in words)


def _run_script(script: Script, folder: Path, log: Path) -> None:
    # The store that torchrun's agent would hold, at a port that the system has chosen.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(
        script.ranks, _run_on_rank, script, folder, log, store.port, backend=None, deadline_seconds=DEADLINE_SECONDS
    )


def _run_on_rank(script: Script, folder: Path, log: Path, port: int) -> None:
    rank = int(os.environ["RANK"])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"TORCHELASTIC_RESTART_COUNT": "0"} | dict(script.variables)
    os.environ.update(variables)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # of workers, as in a script; ranks have the server's own
    if script.warns:
        warnings.simplefilter("default")
    fsspec.config.conf.update(script.stores)
    if rank == 0:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
    try:
        if script.verb:
            from shardopt.cli import main

            code = main(list(script.arguments))
            if code:
                raise RuntimeError(f"shardopt {shlex.join(script.arguments)} ended with {code}")
            return
        sys.argv = [script.sources[0][0], *script.arguments]
        sys.path.insert(0, str(folder))
        module = types.ModuleType("__main__")
        module.__file__ = script.sources[0][0]
        sys.modules["__main__"] = module
        for file, line, source in script.sources:
            exec(compile("\n" * (line - 1) + source, file, "exec"), module.__dict__)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"ended with {end.code}") from None
    except BaseException:
        traceback.print_exc()  # as the interpreter does with that of a script
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
