"""Thousands of schedules of jobs and faults, each judged by what must always hold; and faults of old, found again.

`python -m tests.simulation SEED` replays one.
"""

import json
import os
import subprocess
import sys

import pytest

from shardopt.checkpoint.saving.writing import low_priority
from tests.simulation.schedule import DEADLINE_SECONDS, Fault, Job, Schedule, draw
from tests.simulation.shrink import shrink
from tests.simulation.simulate import simulate
from tests.simulation.world import SimulatedWorld
from tests.support.source import ROOT

FEW, DEFAULT, PART = 50, 200, 50  # in parts, for as many workers as there are
CHUNK, CHUNKS = 4000, 25


def run_seeds(first, count):
    """Runs schedules; returns how many of them were distinct. Fails with the first that has a problem."""
    digests = set()
    for seed in range(first, first + count):
        outcome = simulate(draw(seed))
        problems = "\n".join(outcome.problems)
        assert not problems, f"python -m tests.simulation {seed}\n{problems}"
        digests.add(outcome.digest)
    return len(digests)


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.exhaustive][: first >= FEW]) for first in range(0, DEFAULT, PART)]
)
def test_schedules_hold_what_is_promised(first):
    assert run_seeds(first, PART) > 0.9 * PART


def test_so_does_what_is_written_in_a_thread_of_its_own(monkeypatch):
    """As large tensors are, beside training."""
    for name in ("_LEAST_BYTES", "_LEAST_MEAN_BYTES"):
        monkeypatch.setattr(low_priority, name, 0)
    started, thread = [], SimulatedWorld.thread

    def noting(world, target, name=None, daemon=False):
        started.append(name)
        return thread(world, target, name, daemon)

    monkeypatch.setattr(SimulatedWorld, "thread", noting)
    assert run_seeds(7000, PART // 2) > 0.9 * PART // 2
    assert started.count("shardopt-write") > PART // 2


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_schedules_hold_what_is_promised(chunk):
    distinct = run_seeds(DEFAULT + chunk * CHUNK, CHUNK)
    print(f"{CHUNK} schedules, {distinct} distinct")
    assert distinct > 0.95 * CHUNK


SEEDS = range(20, 22)
DIGESTS = """
import json
from tests.simulation.schedule import draw
from tests.simulation.simulate import simulate
print(json.dumps([simulate(draw(seed)).digest for seed in range(20, 22)]))
"""


def test_a_seed_gives_the_same_trace_again():
    here = [simulate(draw(seed)).digest for seed in SEEDS]
    assert [simulate(draw(seed)).digest for seed in reversed(SEEDS)] == here[::-1]


@pytest.mark.exhaustive
def test_a_seed_gives_the_same_trace_in_another_process():
    here = [simulate(draw(seed)).digest for seed in SEEDS]
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", DIGESTS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == here


def test_a_schedule_is_printed_as_code():
    for seed in range(50):
        schedule = draw(seed)
        assert eval(str(schedule), {"Schedule": Schedule, "Job": Job, "Fault": Fault}) == schedule


def test_a_failing_schedule_shrinks_to_what_it_takes():
    def fails(schedule):
        return any(job.ranks > 1 and job.mirror for job in schedule.jobs) and any(
            fault.kind == "kill" for fault in schedule.faults
        )

    large = Schedule(
        7,
        jobs=(Job(ranks=4, saves=3, keep_last=2), Job(ranks=3, mirror=True, stage="lazy"), Job(ranks=2)),
        faults=(Fault("stop", 0, seconds=DEADLINE_SECONDS), Fault("kill", 1, rank=1), Fault("cut", 2, seconds=1.0)),
    )
    assert shrink(large, fails) == Schedule(7, (Job(saves=1, mirror=True),), (Fault("kill", 0, rank=1),))
