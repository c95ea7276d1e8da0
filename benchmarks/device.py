"""The device of a benchmark, a GPU or the tests' simulated accelerator: how often a call launches there and waits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn

from tests.standin import build

STANDIN = "standin"
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


def lacking(kind: str) -> str:
    """Why there is no such device here; empty where there is."""
    if kind == STANDIN:
        return build.lacking()
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def module_of(kind: str) -> Any:
    """torch's module of the device. A process that has the stand-in has it until it ends."""
    if kind == STANDIN:
        from tests.standin import device  # noqa: F401  # here: it changes torch for the whole process
    return torch.get_device_module(kind)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of a module in a process of its own, and returns its result."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def refusing_waits(kind: str) -> AbstractContextManager[None]:
    """Within it, what makes the host wait for the device raises RuntimeError."""
    if kind == STANDIN:
        from tests.standin import device

        waits: AbstractContextManager[None] = device.no_waits()
        return waits
    return _sync_debug("error")


@contextmanager
def _sync_debug(mode: str) -> Any:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def counted(kind: str, call: Callable[[], Any]) -> tuple[int, int]:
    """How often the host waits for the device in a call, and how many kernels and copies it launches.

    The stand-in counts an operation on lists as CUDA takes it: once, or once for each tensor where they do not suit
    its fast path. On CUDA the call runs twice, under the sync debug mode and under the profiler.
    """
    if kind == STANDIN:
        from tests.standin import device

        library: Any = device.C
        library.reset()
        call()
        counts = library.counts()
        return sum(each for name, each in counts.items() if name.startswith("wait")), counts.get("kernels", 0)
    with _sync_debug("warn"), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    waits = sum("synchronizing CUDA operation" in str(each.message) for each in found)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        call()
        torch.cuda.synchronize()
    return waits, sum(each.count for each in recorded.key_averages() if each.key in LAUNCHES)


MODEL = {False: (16, 8192), True: (2, 64)}  # layers and their width; on a GPU 1.07 B parameters, 12.9 GB with AdamW

Rows = Iterator[tuple[Any, ...]]
"""A table: the header first."""


@dataclass
class Place:
    """Where sections of `on_gpu.py` run.

    Args:
        kind: of the device.
        small: whether all is to be small.
        folder: for checkpoints.
    """

    kind: str
    small: bool
    folder: str

    @property
    def module(self) -> Any:
        return module_of(self.kind)

    def layers(self, count: int, width: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(width, width, device=self.kind) for _ in range(count)))

    def seconds(self, call: Callable[[], Any], times: int = 20) -> tuple[float, float]:
        """Seconds of one call until the device is done, and until the call returns; the mean of several."""
        call()
        self.module.synchronize()
        begin = time.perf_counter()
        call()
        self.module.synchronize()
        most = 1.0 / (time.perf_counter() - begin)  # a second of them is enough
        times = 2 if self.small else max(2, min(times, int(most)))
        begin = time.perf_counter()
        for _ in range(times):
            call()
        returned = time.perf_counter() - begin
        self.module.synchronize()
        return (time.perf_counter() - begin) / times, returned / times
