"""Runs a test's function where there is an accelerator: the stand-in, on ranks that end with the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from tests.standin import build

needs_standin = pytest.mark.skipif(bool(build.lacking()), reason=build.lacking() or "it is there")


def on_accelerator(
    ranks: int, function: Callable[..., Any], *args: Any, deadline_seconds: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Runs a function on ranks that have the stand-in; on several, within a process group that spans it."""
    backend = None if ranks == 1 else "gloo"
    return run_ranks(ranks, _with_device, function, args, kwargs, deadline_seconds=deadline_seconds, backend=backend)


def _with_device(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from tests.standin import device  # here: it changes torch for the whole process

    if dist.is_initialized():
        from tests.standin import group  # noqa: F401  # registers the backend

        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        store = dist.PrefixStore("standin", store)
        dist.init_process_group("cpu:gloo,standin:standin_gloo", store=store, rank=rank, world_size=size)
    result = function(device, *args, **kwargs)
    assert not device.C.violations(), device.C.violations()
    return result
