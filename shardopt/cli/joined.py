"""The ranks that run a verb: those that a launcher started, or only this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardopt.ranks import Ranks, ranks_of

_DEADLINE_SECONDS = 60.0


@contextmanager
def joined() -> Iterator[Ranks]:
    """Yields the ranks that the launcher started, or only this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks(None)
        return
    dist.init_process_group("gloo")
    try:
        yield ranks_of(None, _DEADLINE_SECONDS)
    finally:
        dist.destroy_process_group()
