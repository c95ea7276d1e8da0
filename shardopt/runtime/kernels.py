"""Triton, where it comes with torch and works: `triton` and `tl` are None where it is absent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

triton: Any
tl: Any
try:
    # A program that mypy follows to here has no such override as this project's.
    import triton as triton  # type: ignore[import-untyped,import-not-found,no-redef,unused-ignore]  # untyped, or absent
    import triton.language as tl  # type: ignore[import-untyped,import-not-found,no-redef,unused-ignore]  # as above
except ImportError:  # torch for CPUs has none
    triton = tl = None

_log = logging.getLogger("shardopt")


def can_run(trial: Callable[[torch.device], object], *tensors: Tensor) -> bool:
    """Whether kernels run where tensors are. Elsewhere torch's own operations do the same.

    Args:
        trial: runs each of the kernels once on a device; it is called at the first use there.
    """
    return triton is not None and all(tensor.is_cuda and _works(trial, tensor.device) for tensor in tensors)


@cache
def _works(trial: Callable[[torch.device], object], device: torch.device) -> bool:
    """Whether kernels can be made here: Triton needs a C compiler, Python's headers and a folder that it can write."""
    try:
        trial(device)
    except torch.OutOfMemoryError:
        raise  # which says nothing of kernels: without them this rank would round otherwise than its replicas
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        _log.warning(
            "Triton cannot make kernels for %s (%s). torch's own operations take their place, and are slower. Triton "
            "needs a C compiler and Python's headers",
            device,
            reason,
        )
        return False
    return True
