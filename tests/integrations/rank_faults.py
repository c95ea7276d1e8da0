"""Faults of one rank at a step, for `on_step=` of the examples; and how a rank of a job ended."""

import os
import signal
from collections.abc import Callable

import torch.distributed as dist


def at_step(rank: int, step: int, signal_number: int) -> Callable[[int], None]:
    """Returns a callback by which a rank sends itself a signal after a step."""

    def strike(now: int) -> None:
        if dist.get_rank() == rank and now == step:
            os.kill(os.getpid(), signal_number)

    return strike


def exit_code_of(train: Callable[[], object]) -> int | None:
    """Runs a training; returns the code with which it left by SystemExit, or None where it came to its end."""
    try:
        train()
    except SystemExit as left:
        return int(left.code or 0)
    return None


KILL, TERMINATE = signal.SIGKILL, signal.SIGTERM
