"""A job that changes its ranks without new processes: the same Manager continues in the next process group."""

import os
import threading

import pytest
import torch.distributed as dist

from shardopt import checkpoint
from tests.distributed.test_hosts import app_of, assert_is, manager_of
from tests.harness import run_ranks

SIZES = (4, 3, 2, 4)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def live_through(root, me, stage, rounds):
    """One process of four; takes part in each process group that it is a rank of."""
    manager = None
    seen = []
    for number in range(rounds):
        size = SIZES[number % len(SIZES)]
        if me >= size:
            continue
        dist.init_process_group("gloo", init_method=f"file://{root}/meet-{number}", rank=me, world_size=size)
        if manager is None:
            manager = manager_of(root, range(4), stage=stage, mirrors=[checkpoint.Mirror(f"{root}/mirror")])
        app = app_of(0)
        start = manager.restore(app)
        assert_is(app, start)
        for step in range(start + 1, start + 4):
            app |= app_of(step)
            manager.save(step, app)
        manager.wait()
        dist.barrier()
        dist.destroy_process_group()
        seen.append((start, threading.active_count(), descriptors()))
    manager.close()
    return seen


def rank_of_four(root, stage, rounds):
    return live_through(root, int(os.environ["RANK"]), stage, rounds)


@pytest.mark.parametrize(
    "stage", ["lazy", *[pytest.param(each, marks=pytest.mark.exhaustive) for each in (None, "now")]]
)
def test_the_same_manager_continues_in_another_process_group(tmp_path, stage):
    results = run_ranks(4, rank_of_four, str(tmp_path), stage, len(SIZES), backend=None)
    assert [start for start, _, _ in results[0]] == [0, 3, 6, 9]
    assert [start for start, _, _ in results[3]] == [0, 9]


@pytest.mark.exhaustive
def test_nothing_grows_with_the_groups_that_a_process_was_in(tmp_path):
    results = run_ranks(4, rank_of_four, str(tmp_path), None, 16, backend=None, deadline_seconds=120)
    for seen in results:
        _, threads, files = zip(*seen, strict=True)
        assert max(threads[len(seen) // 2 :]) <= max(threads[: len(seen) // 2]) + 1, threads
        assert max(files[len(seen) // 2 :]) <= max(files[: len(seen) // 2]) + 2, files
