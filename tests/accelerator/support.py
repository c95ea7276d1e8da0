"""Runs a test's function where there is an accelerator: the stand-in, on ranks that end with the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import run_ranks
from tests.standin import build

needs_standin = pytest.mark.skipif(bool(build.lacking()), reason=build.lacking() or "it is there")


needs_gpu = pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param("standin", marks=needs_standin), pytest.param("cuda", marks=needs_gpu)]
)
"""Runs a test with `kind` on the stand-in, and on a GPU where there is one."""


class CopiesToHost(TorchDispatchMode):
    """Counts what this thread copies from accelerators to the host.

    Attributes:
        sizes: the bytes of each copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name, pairs = func.__name__.split(".")[0], []
        if name == "_to_copy":
            pairs = [(made, args[0])]
        elif name in ("copy_", "_foreach_copy_"):
            pairs = [(args[0], args[1])] if name == "copy_" else [*zip(*args[:2], strict=True)]
        self.sizes += [to.nbytes for to, source in pairs if to.is_cpu and not source.is_cpu]
        return made


def on_accelerator(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    kind: str = "standin",
    group: bool = False,
    deadline_seconds: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Runs a function on ranks that have an accelerator; on several, within a process group that spans it.

    Args:
        group: one rank has a process group too.
    """
    backend = "gloo" if group or ranks > 1 else None
    task = kind, function, args, kwargs
    return run_ranks(ranks, _with_device, *task, deadline_seconds=deadline_seconds, backend=backend)


def _with_device(kind: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device: Any
    if kind == "cuda":
        from tests.accelerator import on_cuda as device
    else:
        from tests.standin import device  # here: it changes torch for the whole process

    if dist.is_initialized():
        from tests.standin import group  # noqa: F401  # registers the backends

        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        store = dist.PrefixStore("standin", store)
        through_host = "standin_gloo" if kind == "standin" else "cuda_gloo"
        backend = through_host if kind == "standin" or size > torch.cuda.device_count() else "nccl"
        if kind == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(f"cpu:gloo,{kind}:{backend}", store=store, rank=rank, world_size=size)
    result = function(device, *args, **kwargs)
    assert not device.C.violations(), device.C.violations()
    return result
