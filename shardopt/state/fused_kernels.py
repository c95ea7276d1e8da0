"""FBGEMM's kernels of torchrec's fused tables: they have a rate, and a count of steps, beside what optimizers save."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

_COUNTED = ("_used_rowwise_adagrad_with_counter", "_used_rowwise_adagrad_with_global_weight_decay")


def kernels_in(optimizer: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yields the fused optimizers in an optimizer's attributes, and in theirs, each with its kernel.

    Args:
        above: those around this one, which it may know.
    """
    if not isinstance(optimizer, Optimizer) or "fbgemm_gpu" not in sys.modules:
        return
    if any(each is optimizer for each in above):
        return
    kernel = vars(optimizer).get("_emb_module")
    if kernel is not None:
        yield optimizer, kernel
        return
    for value in vars(optimizer).values():
        for each in value if isinstance(value, list | tuple) else (value,):
            for inner in each if isinstance(each, tuple) else (each,):
                yield from kernels_in(inner, (*above, optimizer))


def has_other_rate(optimizer: Any, kernel: Any) -> bool:
    """Whether the next backward would move tables by another rate than the optimizer's group has."""
    rate = getattr(kernel, "get_learning_rate", None)
    if rate is None:
        return False
    wanted, found = float(optimizer.param_groups[0]["lr"]), float(rate())
    return abs(found - wanted) > 1e-6 * abs(wanted)  # it is kept in fp32


def counts_steps(kernel: Any) -> bool:
    """Whether a step depends on how many there were: by a correction of the bias, or a decay by counts."""
    algorithm = getattr(getattr(kernel, "optimizer", None), "name", "")
    return "ADAM" in algorithm or "LAMB" in algorithm or any(getattr(kernel, each, False) for each in _COUNTED)


def has_counted(kernel: Any, steps: int) -> bool:
    """Whether a kernel has counted so many steps: one that began anew in a resumed run, and was not told, has not.

    It counts forwards on the CPU, and begins there from the buffer that `set_optimizer_step` sets.
    """
    counts = (int(each) for each in (getattr(kernel, name, None) for name in ("iter_cpu", "iter")) if each is not None)
    return next(filter(None, counts), 0) >= steps
