"""Replays the schedule of a seed: `python -m tests.simulation SEED`. Prints its trace, and shrinks it where it fails."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.schedule import draw
from tests.simulation.simulate import simulate


def main() -> int:
    """Runs seeds from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=0, help="run so many seeds from this one on, without traces")
    arguments = parser.parse_args()
    if not arguments.count:
        outcome = simulate(draw(arguments.seed))
        print(outcome)
        print(f"digest {outcome.digest}, {len(outcome.trace)} operations, {len(outcome.problems)} problems")
        return 1 if outcome.problems else 0
    begin, digests, failed = time.process_time(), set(), 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        outcome = simulate(draw(seed))
        digests.add(outcome.digest)
        if outcome.problems:
            failed += 1
            print(f"seed {seed}: {outcome.problems[0][:2000]}")
    rate = arguments.count / (time.process_time() - begin)
    print(f"{arguments.count} schedules, {len(digests)} distinct, {failed} failed, {rate:.0f} a second of CPU")
    return 1 if failed else 0


sys.exit(main())
