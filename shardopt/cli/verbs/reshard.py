"""`shardopt reshard`: rewrites a checkpoint as another number of ranks would have written it."""

from __future__ import annotations

from dataclasses import asdict

from shardopt import checkpoint
from shardopt.cli.output import Output
from shardopt.errors import OptionError, Problem


def reshard(output: Output, *, src: str, dst: str, world_size: int, drop_per_rank: bool) -> int:
    """Writes the checkpoint at `src` to `dst`."""
    if world_size < 1:
        problem = Problem("--world-size", str(world_size), "at least 1 rank", "give the number of ranks")
        raise OptionError("there is no such job", [problem])
    with checkpoint.progress_bar("resharding") as progress:
        report = checkpoint.reshard(src, dst, world_size=world_size, drop_per_rank=drop_per_rank, progress=progress)
    output.line(
        f"{report.url}: {report.tensors} tensors, {report.bytes_total:,} bytes, as {world_size} ranks write them"
    )
    output.data(asdict(report))
    return 0
