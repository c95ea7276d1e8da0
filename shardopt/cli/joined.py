"""The ranks that run a verb: those that a launcher started, or only this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from shardopt.errors import Problem, RankError
from shardopt.ranks import Ranks, ranks_of

_DEADLINE_SECONDS = 60.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # which launchers set together


@contextmanager
def joined() -> Iterator[Ranks]:
    """Yields the ranks that the launcher started, or only this process.

    Raises:
        RankError: the others did not come, as where the variables are those of an earlier job.
    """
    rank, size, host, port = (os.environ.get(name, "") for name in _VARIABLES)
    if not all((rank, size, host, port)) or size == "1":
        yield Ranks(None)
        return
    others = f"the other ranks of WORLD_SIZE={size} at MASTER_ADDR={host}, MASTER_PORT={port}"
    timeout = None  # torch's own: torchrun starts the others itself, and ends all if one fails
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        timeout = timedelta(seconds=_DEADLINE_SECONDS)
        print(f"RANK={rank} waits up to {_DEADLINE_SECONDS:g} s for {others}", file=sys.stderr, flush=True)
    try:
        dist.init_process_group("gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:  # torch's for a store or ranks that are not there, and for no number
        remedy = f"start all ranks by one launcher; for this process alone unset {', '.join(_VARIABLES)}"
        problem = Problem(f"RANK={rank}", str(error).partition("\n")[0], others, remedy)
        raise RankError("the ranks of the launcher were not found", [problem], code="process-group") from None
    try:
        yield ranks_of(None, _DEADLINE_SECONDS)
    finally:
        dist.destroy_process_group()
