"""What a function leaves in the process of a rank that another function is to run in.

A function is found to leave nothing if no step of it has failed, and threads, handlers, torch's defaults and the group
are as before. Otherwise its rank ends with it. With `names`, so must be all that the names of modules and classes of
this project stand for; to look at them takes a rank as long as to start, and so only `--exhaustive` does.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no type hints
import numpy as np
import torch
import torch.distributed as dist

from shardopt.runtime.deferred_checks import failed_steps_remain

_OURS = ("shardopt", "tests", "examples")
_OTHERS = ("os", "time", "threading", "socket", "random", "torch", "torch.distributed", "torch.optim", "fsspec")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_THREADS = ("shardopt-ranks-",)  # of the process group, as long as that is there
_MOST_FILES = 300  # each group that a function makes has some, which stay


class Traces:
    """What there is before each function of a rank, and what differs after it."""

    def __init__(self, names: bool) -> None:
        self._looks_at_names = names
        self._owners: dict[str, list[_Owner]] = {}  # by module: it, and the classes that it defines
        self._kept: dict[str, Any] = {}
        self._threads: set[threading.Thread] = set()
        self._random: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Notes what there is; random numbers are those that the first function began with."""
        if self._random is None:
            self._random = torch.get_rng_state(), np.random.get_state()
            self._kept, self._threads = _kept(), {*threading.enumerate()}
            self._note_new_modules()
            gc.freeze()
            return
        torch.set_rng_state(self._random[0])
        np.random.set_state(self._random[1])

    def left(self) -> str:
        """Returns something that was left; nothing for nothing."""
        gc.collect()
        for owners in self._owners.values():
            for owner in owners:
                if name := owner.replaced():
                    return name
        self._note_new_modules()
        others = {*threading.enumerate()} - self._threads
        if strange := [thread.name for thread in others if not thread.name.startswith(_THREADS)]:
            return f"threads {strange}"
        kept = _kept()
        if differing := [name for name, value in self._kept.items() if kept[name] != value]:
            return str(differing)
        return "files" if len(os.listdir("/proc/self/fd")) > _MOST_FILES else ""

    def _note_new_modules(self) -> None:
        if not self._looks_at_names:
            return
        for name, module in [*sys.modules.items()]:
            if name in self._owners or not isinstance(module, ModuleType):
                continue
            if name in _OTHERS:
                self._owners[name] = [_Owner(name, vars(module))]
            elif name.partition(".")[0] in _OURS:
                classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
                self._owners[name] = [_Owner(name, vars(module))]
                self._owners[name] += [_Owner(f"{name}.{each.__name__}", vars(each)) for each in classes]


class _Owner:
    """A module or class, and what its names stood for."""

    def __init__(self, called: str, names: Mapping[str, Any]) -> None:
        self.called, self.names = called, names
        self.note()

    def note(self) -> None:
        self.before = dict(self.names)
        self.values = [*map(id, self.before.values())]

    def replaced(self) -> str:
        """Returns a name that stands for something else; what is added, as a lazy import or a memo is, may stay."""
        if [*map(id, self.names.values())] == self.values:
            return ""
        for name, value in self.before.items():
            now = self.names.get(name)
            if now is not value and not hasattr(now, "hooked"):  # torch wraps the step of a class at its first use
                return f"{self.called}.{name}"
        self.note()
        return ""


def _kept() -> dict[str, Any]:
    """What a function can set for all that follows."""
    loggers = {name: logging.getLogger(name) for name in ("root", "shardopt")}
    return {
        "group": id(dist.group.WORLD) if dist.is_initialized() else None,
        "failed steps": failed_steps_remain(),  # of which the next save would tell
        "signals": [signal.getsignal(number) for number in _SIGNALS],
        "logging": [(each.level, each.propagate, [*each.handlers]) for each in loggers.values()],
        "fsspec": dict(fsspec.config.conf),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "switch interval": sys.getswitchinterval(),
    }
