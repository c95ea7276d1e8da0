"""`shardopt fit`: what checkpoints like a stored one would cost a run, on any number of ranks."""

from __future__ import annotations

from typing import Any

from shardopt.checkpoint.estimating.estimate import MEASURE_SECONDS
from shardopt.checkpoint.estimating.stored import estimate_stored
from shardopt.checkpoint.text import plural
from shardopt.cli.joined import joined
from shardopt.cli.output import Output
from shardopt.cli.rules import parse_rules
from shardopt.errors import OptionError, Problem


def fit(
    output: Output,
    *,
    url: str,
    ranks: int | None,
    steps: int | None,
    every: int | None,
    seconds_per_step: float | None,
    measure: float | None,
    **of_rules: Any,
) -> int:
    """Prints the estimate. Under torchrun it is collective: all processes measure at one time, and rank 0 prints."""
    if measure is not None and not measure >= 0:
        problem = Problem("--measure", str(measure), "0 seconds, or more", "give a number")
        raise OptionError("invalid arguments", [problem])
    of_run = {"every": every, **of_rules, "seconds_per_step": seconds_per_step}
    given = [f"--{name.replace('_', '-')}" for name, value in of_run.items() if value is not None]
    if given and steps is None:
        problem = Problem(", ".join(given), "no --steps", "the steps of the run to be", "add --steps N")
        raise OptionError("invalid arguments", [problem])
    rules = parse_rules(**of_rules)
    with joined() as processes:
        found = estimate_stored(
            processes,
            url,
            world_size=ranks,
            steps=steps,
            every=1 if every is None else every,
            rules=rules,
            seconds_per_step=seconds_per_step,
            measure_seconds=MEASURE_SECONDS if measure is None else measure,
        )
        if processes.rank == 0:
            output.line(found.url)
            output.table([["", *row] for row in found.rows()])
            if found.measured_bytes and processes.size < len(found.bytes_by_rank):
                measured, all_ranks = plural(processes.size, "process"), len(found.bytes_by_rank)
                output.line(f"measured by {measured}: {all_ranks} ranks that share a disk or a network take longer")
            output.data(found.to_json())
    return 0
