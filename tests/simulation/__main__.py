"""Replays the schedule of a seed: `python -m tests.simulation SEED`; with `--stream` one of publishers and followers.

Prints its trace, and, where it fails, a smaller schedule that fails too, as code: `simulate(Schedule(...))`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.simulation import schedule, simulate
from tests.simulation.shrink import shrink
from tests.simulation.simulate import Outcome
from tests.simulation.streams import schedule as stream_schedule
from tests.simulation.streams import simulate as stream_simulate

Simulate = Callable[[Any], Outcome]


def main() -> int:
    """Runs seeds from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="of the schedule")
    parser.add_argument("--stream", action="store_true", help="a schedule of publishers and followers")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds from this one on, without traces")
    parser.add_argument("--as-drawn", action="store_true", help="do not look for a smaller schedule")
    arguments = parser.parse_args()
    draw: Callable[[int], Any] = stream_schedule.draw if arguments.stream else schedule.draw
    run: Simulate = stream_simulate.simulate if arguments.stream else simulate.simulate
    if arguments.count:
        return _run_many(draw, run, arguments.seed, arguments.count)
    outcome = run(draw(arguments.seed))
    print(outcome)
    print(f"{len(outcome.trace)} operations, digest {outcome.digest}, {len(outcome.problems)} problems")
    if outcome.problems and not arguments.as_drawn:
        wanted = _kind(outcome.problems[0])
        smaller = shrink(outcome.schedule, lambda schedule: wanted in map(_kind, run(schedule).problems))
        print("\nA smaller schedule that fails too, and what it does:\n")
        print(run(smaller))
    return 1 if outcome.problems else 0


def _run_many(draw: Callable[[int], Any], run: Simulate, first: int, count: int) -> int:
    begin, digests, failed = time.process_time(), set(), 0
    for seed in range(first, first + count):
        outcome = run(draw(seed))
        digests.add(outcome.digest)
        if outcome.problems:
            failed += 1
            print(f"seed {seed}: {_first_problem(outcome)}", flush=True)
    rate = count / (time.process_time() - begin)
    print(f"{count} schedules, {len(digests)} distinct, {failed} failed, {rate:.0f} a second of CPU")
    return 1 if failed else 0


def _kind(problem: str) -> str:
    """Returns what a problem has in common with others that have the same cause, as far as its text tells."""
    return re.sub(r"\S*[\d/]\S*", "", problem.partition("\n")[0])[:120]


def _first_problem(outcome: Outcome) -> str:
    return outcome.problems[0][:2000]


sys.exit(main())
