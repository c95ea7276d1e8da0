"""Jobs that are killed at any moment, and started again: nothing is lost but the steps since the last checkpoint."""

import functools
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from compare_runs import differing_keys

from shardopt import checkpoint
from tests.harness import Fault, run_ranks, run_ranks_outcomes
from tests.support.killed_job import OF_RANK_0, PHASES, STEPS, train, train_until_a_rank_dies

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 2
STAGES = ("lazy", "now", None)
SAVES_TRACED = STEPS // 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody killed."""
    root = str(tmp_path_factory.mktemp("whole") / "root")
    assert run_ranks(RANKS, train, root, None, None) == [STEPS] * RANKS
    return root


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """By stage: by rank and operation, how often it is called around a save."""

    @functools.cache
    def counted(stage):
        counts = {}
        root = str(tmp_path_factory.mktemp("traced") / "root")
        trace = [operation for operations in PHASES.values() for operation in operations]
        for outcome in run_ranks_outcomes(RANKS, train, root, stage, 1, trace=trace):
            assert outcome.ok, outcome
            for operation, count in Counter(outcome.calls).items():
                counts[outcome.rank, operation] = max(1, round(count / SAVES_TRACED))
        return counts

    return counted


class Watch:
    """Looks all the time whether there is a committed checkpoint, once there was one."""

    def __init__(self, root):
        self._manager = checkpoint.Manager(root)
        self.looks, self.gaps = 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self):
        seen = False
        while not self._stop.wait(0.001):
            there = bool(self._manager.steps())
            # One listed may be gone when it is asked for, where a newer one has come in between: that is listed then.
            if seen and not there and not self._manager.steps():
                self.gaps += 1
            seen, self.looks = seen or there, self.looks + 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *unused):
        self._stop.set()
        self._thread.join()


def a_fault(draw, calls, stage, phase):
    """A random call around one of the next two saves, of a random rank."""
    possible = [
        (rank, operation, count)
        for (rank, operation), count in sorted(calls(stage).items(), key=str)
        if operation in PHASES[phase] and (rank == 0 or phase not in OF_RANK_0)
    ]
    rank, operation, count = draw.choice(possible)
    return Fault(rank, operation, at=draw.randint(1, 2 * count))


def survive(root, whole, calls, stage, keep_last, draw, phases, most):
    """Kills one job up to `most` times, lets it come to its end, and compares it; the kills by phase."""
    kills = Counter()
    manager = checkpoint.Manager(root)
    with Watch(root) as watch:
        while sum(kills.values()) < most:
            phase = next(phases)
            if phase == "staging" and stage is None:
                continue
            (newest, *_) = manager.steps()[::-1] or [0]
            if newest >= STEPS - 4:
                break  # too near to the end for every fault to be reached
            fault = a_fault(draw, calls, stage, phase)
            outcomes = run_ranks_outcomes(
                RANKS, train_until_a_rank_dies, root, stage, keep_last, newest, faults=[fault], deadline_seconds=60
            )
            assert outcomes[fault.rank].signal is not None, (fault, outcomes)
            kills[phase] += 1
            left = manager.steps()
            assert not newest or left, fault
            assert all(checkpoint.verify(manager.path(step)).ok for step in left), fault
        resumes_at = max(manager.steps(), default=0)
        assert run_ranks(RANKS, train_until_a_rank_dies, root, stage, keep_last, resumes_at) == [STEPS] * RANKS
    assert watch.gaps == 0 and watch.looks > 0
    assert manager.steps()[-1] == STEPS
    assert len(manager.steps()) <= keep_last + 1  # and the one that it was resumed from
    left = {each.name for each in Path(root).iterdir()} - {f"step-{step:08d}" for step in manager.steps()}
    # Killed in what follows its last commit, a job has no other save, which would clear what is left of old ones.
    assert left == set() or resumes_at == STEPS
    is_that_of(root, whole)
    return kills


def is_that_of(root, whole):
    ends = [checkpoint.Manager(each).path(STEPS) for each in (root, whole)]
    differing, keys = differing_keys(*ends)
    assert differing == [] and keys > 10
    with checkpoint.open(ends[0]) as one, checkpoint.open(ends[1]) as other:
        for rank in range(RANKS):
            assert str(one.per_rank(rank)) == str(other.per_rank(rank))


@pytest.mark.parametrize(("stage", "keep_last"), [("lazy", 1), (None, 2)])
def test_a_sample_of_kills(tmp_path, whole, calls, stage, keep_last):
    phases = ["writing", "retention", *(["staging"] if stage else []), "commit"]
    draw = random.Random(keep_last)
    kills = survive(str(tmp_path / "root"), whole, calls, stage, keep_last, draw, itertools.cycle(phases), len(phases))
    assert kills == Counter(phases)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_300_kills(tmp_path_factory, whole, calls):
    kills, number, begin = Counter(), 0, time.monotonic()
    phases = itertools.cycle(PHASES)
    while sum(kills.values()) <= 300:
        root = str(tmp_path_factory.mktemp("kills") / "root")
        stage, keep_last = STAGES[number % 3], 1 + number % 2
        kills += survive(root, whole, calls, stage, keep_last, random.Random(number), phases, 10)
        number += 1
    print(f"{sum(kills.values())} kills in {number} jobs and {time.monotonic() - begin:.0f} s: {dict(kills)}")
    assert set(kills) == set(PHASES) and min(kills.values()) >= 10


def torchrun(root, plan, ranks=RANKS):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={len(plan)}", "--monitor-interval=0.1"]
    command += [str(REPOSITORY / "tests" / "support" / "killed_job.py"), root, json.dumps(plan)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    # A store of its own for each start: in one that is shared gloo finds the addresses of processes that are gone.
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 + 60 * len(plan))


@pytest.mark.exhaustive  # launch/demo.sh and test_moe_job.py resume under torchrun too
def test_torchrun_starts_it_again_after_a_kill(tmp_path, whole, calls):
    root = str(tmp_path / "root")
    plan = [[1, "os:writev", 2 * calls("lazy")[1, "os:writev"]]]
    ended = torchrun(root, plan)
    assert ended.returncode == 0, ended.stderr
    is_that_of(root, whole)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_12_kills_and_a_word_to_stop_under_torchrun(tmp_path, whole, calls):
    root, draw, phases = str(tmp_path / "root"), random.Random(7), itertools.cycle(PHASES)
    faults = [a_fault(draw, calls, "lazy", next(phases)) for _ in range(12)]
    plan = [[fault.rank, fault.operation, (fault.at + 1) // 2] for fault in faults]
    plan.insert(5, [1, "SIGTERM", 0.05])
    with Watch(root) as watch:
        ended = torchrun(root, plan)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("Signal 9 (SIGKILL)") >= 12 or ended.stderr.count("exitcode: -9") >= 12, ended.stderr
    assert watch.gaps == 0
    is_that_of(root, whole)
