"""Replays the schedule of a seed: `python -m tests.simulation SEED`.

Prints its trace, and, where it fails, a smaller schedule that fails too, as code: `simulate(Schedule(...))`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time

from tests.simulation.schedule import draw
from tests.simulation.shrink import shrink
from tests.simulation.simulate import Outcome, simulate


def main() -> int:
    """Runs seeds from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="of the schedule")
    parser.add_argument("--count", type=int, default=0, help="run so many seeds from this one on, without traces")
    parser.add_argument("--as-drawn", action="store_true", help="do not look for a smaller schedule")
    arguments = parser.parse_args()
    if arguments.count:
        return _run_many(arguments.seed, arguments.count)
    outcome = simulate(draw(arguments.seed))
    print(outcome)
    print(f"{len(outcome.trace)} operations, digest {outcome.digest}, {len(outcome.problems)} problems")
    if outcome.problems and not arguments.as_drawn:
        wanted = _kind(outcome.problems[0])
        smaller = shrink(outcome.schedule, lambda schedule: wanted in map(_kind, simulate(schedule).problems))
        print("\nA smaller schedule that fails too, and what it does:\n")
        print(simulate(smaller))
    return 1 if outcome.problems else 0


def _run_many(first: int, count: int) -> int:
    begin, digests, failed = time.process_time(), set(), 0
    for seed in range(first, first + count):
        outcome = simulate(draw(seed))
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
