"""Runs a test's function where there is an accelerator: the stand-in, on ranks that end with the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.standin import build

needs_standin = pytest.mark.skipif(bool(build.lacking()), reason=build.lacking() or "it is there")


def each_kind(ranks: int) -> pytest.MarkDecorator:
    """Runs a test with `kind` on the stand-in, and on GPUs where there is one for each rank."""
    lacking = pytest.mark.skipif(torch.cuda.device_count() < ranks, reason=f"{ranks} GPUs")
    return pytest.mark.parametrize(
        "kind", [pytest.param("standin", marks=needs_standin), pytest.param("cuda", marks=lacking)]
    )


def on_accelerator(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    kind: str = "standin",
    deadline_seconds: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Runs a function on ranks that have an accelerator; on several, within a process group that spans it."""
    backend = None if ranks == 1 else "gloo"
    task = kind, function, args, kwargs
    return run_ranks(ranks, _with_device, *task, deadline_seconds=deadline_seconds, backend=backend)


def _with_device(kind: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device: Any
    if kind == "cuda":
        from tests.accelerator import on_cuda as device
    else:
        from tests.standin import device  # here: it changes torch for the whole process

    if dist.is_initialized():
        if kind == "cuda":
            torch.cuda.set_device(dist.get_rank())
        else:
            from tests.standin import group  # noqa: F401  # registers the backend

        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        store = dist.PrefixStore("standin", store)
        backends = "cpu:gloo,cuda:nccl" if kind == "cuda" else "cpu:gloo,standin:standin_gloo"
        dist.init_process_group(backends, store=store, rank=rank, world_size=size)
    result = function(device, *args, **kwargs)
    assert not device.C.violations(), device.C.violations()
    return result
