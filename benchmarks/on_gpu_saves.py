"""Saves and loads of what a GPU has, beside a plain copy, a raw read and DCP: a section of `on_gpu.py`."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardopt
from benchmarks import dcp
from benchmarks.device import MODEL, Place, Rows
from benchmarks.peers import drop_from_cache
from shardopt import checkpoint
from shardopt.checkpoint.sources.reading import checking
from shardopt.runtime.accelerator import pin, unpin
from shardopt.runtime.host_memory import Block


def saves(at: Place) -> Rows:
    """What do saves in the background stall, and what do saves and loads reach of the machine's copies to the host?"""
    yield "what", "seconds", "GB/s", "steps of training that it stalls"
    count, width = MODEL[at.small]
    model = at.layers(count, width)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=1e-4)
    inputs = torch.randn(64 if at.small else 4096, width).to(at.kind)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    a_step, _ = at.seconds(step)
    app = {"model": model, "optimizer": optimizer}
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())

    def row(what: str, seconds: float, stall: float | None = None) -> tuple[str, ...]:
        speed = f"{nbytes / seconds / 1e9:.2f}" if seconds else ""
        return what, f"{seconds:.4f}", speed, "" if stall is None else f"{stall / a_step:.2f}"

    host = torch.empty(min(nbytes, 4 << 30), dtype=torch.uint8, device="cpu", pin_memory=True)
    device = torch.zeros(host.numel(), dtype=torch.uint8, device=at.kind)
    copied, _ = at.seconds(lambda: host.copy_(device, non_blocking=True), 5)
    yield row("a plain copy of as many bytes to pinned memory", copied * nbytes / host.nbytes)
    yield "a step of training", f"{a_step:.4f}", "", ""
    block = Block(nbytes)
    for what, call in (("populated", block.populate), ("then pinned", partial(pin, block.memory, device.device))):
        begin = time.perf_counter()
        call()
        yield row(f"as many bytes of new host memory, {what}", time.perf_counter() - begin)
    unpin(block.memory, device.device)
    stages: tuple[Any, ...] = ("now", "lazy")
    for stage, name in itertools.product(stages, ("first", "again")):
        at.module.synchronize()
        begin = time.perf_counter()
        pending = checkpoint.async_save(f"{at.folder}/{stage}-{name}", app, stage=stage)
        for _ in range(5):
            step()
        at.module.synchronize()
        stall = time.perf_counter() - begin - 5 * a_step
        report = pending.result(600)
        yield row(f"async_save, stage={stage!r}, {name}: to host memory", report.staging_seconds, stall)
        yield row(f"async_save, stage={stage!r}, {name}: whole", report.seconds)
        shutil.rmtree(f"{at.folder}/{stage}-{name}")
    state = {"model": dict(model.named_parameters()), "optimizer": optimizer.state_dict()["state"]}
    ways: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
        "ours": (lambda path: checkpoint.save(path, app), lambda path: checkpoint.load(path, app)),
        "DCP": (partial(dcp_call, dcp.save, state), partial(dcp_call, dcp.load, state)),
    }
    for name, (save, load) in ways.items():
        path = f"{at.folder}/whole-{name}"
        calls: dict[str, Callable[[], Any]] = {
            "save": partial(save, path),
            "load of what is in no cache": partial(load, path),
            "raw read of it": partial(read_files, path),
            "load of what is in the page cache": partial(load, path),
        }
        for what, call in calls.items():
            if "page cache" not in what:
                drop_from_cache(Path(path))
            at.module.synchronize()
            begin = time.perf_counter()
            call()
            at.module.synchronize()
            seconds = time.perf_counter() - begin
            yield row(f"{name}: {what}", seconds, None if "raw" in what else seconds)
        shutil.rmtree(path)


def threads(at: Place) -> Rows:
    """How many threads should read a checkpoint from the page cache to the device?"""
    yield "threads", "seconds of a load", "GB/s"
    count, width = MODEL[at.small]
    model = at.layers(count, width)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    checkpoint.save(f"{at.folder}/warm", {"model": model}, durable=False)
    chosen = checking._DISK_SIZES
    try:
        for number in (2, 4, 8, 16):
            checking._DISK_SIZES = chosen._replace(threads=number, most_threads=number)
            seconds, _ = at.seconds(lambda: checkpoint.load(f"{at.folder}/warm", {"model": model}), 3)
            yield (
                f"{number}{' (default)' if number == chosen.threads else ''}",
                f"{seconds:.4f}",
                f"{nbytes / seconds / 1e9:.2f}",
            )
    finally:
        checking._DISK_SIZES = chosen


def dcp_call(function: Callable[..., Any], state: dict[str, Any], path: str) -> None:
    """Saves, or loads in place, with torch.distributed.checkpoint in one process."""
    function(state, checkpoint_id=path, no_dist=True)


def read_files(folder: str, threads: int = 16, request_bytes: int = 8 << 20) -> None:
    """Reads files into memory that each thread uses again."""
    own = threading.local()

    def read(path: Path, begin: int) -> None:
        if not hasattr(own, "memory"):
            own.memory = bytearray(request_bytes)
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            file.readinto(own.memory)

    with ThreadPoolExecutor(threads) as pool:
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        places = [(path, at) for path in files for at in range(0, path.stat().st_size, request_bytes)]
        list(pool.map(read, *zip(*places, strict=True)))
