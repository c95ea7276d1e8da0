"""A job with tiers that is preempted: what it saves then is under the root, as the hosts may be taken away."""

import os
import shutil
import signal

import pytest
import torch.distributed as dist

from shardopt import checkpoint
from tests.distributed.test_hosts import app_of, assert_is, manager_of
from tests.harness import run_ranks, run_ranks_outcomes

EXIT_CODE = 85
STOP_SECONDS = 30.0
OPTIONS = {"stop_on": checkpoint.Preemption(signal.SIGTERM, exit_code=EXIT_CODE, seconds=STOP_SECONDS)}


def run_until_told(root, hosts, stage, told_at):
    """Saves at every step to memory, and to the root never by itself; rank 1 gets a signal at a step."""
    manager = manager_of(root, hosts, stage=stage, every=1000, **OPTIONS)
    app = app_of(0)
    start = manager.restore(app)
    assert_is(app, start)
    with manager:
        for step in range(start + 1, start + 50):
            app |= app_of(step)
            if dist.get_rank() == 1 and step == start + told_at:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.save(step, app)
    return start


def resume(root, hosts):
    manager = manager_of(root, hosts, every=1000)
    app = app_of(0)
    start = manager.restore(app)
    assert_is(app, start)
    app |= app_of(start + 1)
    manager.save(start + 1, app)
    manager.close()
    return start


@pytest.mark.parametrize(
    ("stage", "told_at"),
    [("lazy", 3), *[pytest.param(stage, 4, marks=pytest.mark.exhaustive) for stage in (None, "now", "lazy")]],
)
@pytest.mark.parametrize("lost", ["no host", pytest.param("all hosts", marks=pytest.mark.exhaustive)])
def test_the_last_save_comes_to_the_root_and_the_run_resumes_there(tmp_path, stage, told_at, lost):
    root, hosts = str(tmp_path), (0, 1, 2)
    last = 0
    for _ in range(2):  # the second life ends as the first
        outcomes = run_ranks_outcomes(3, run_until_told, root, hosts, stage, told_at)
        assert [getattr(each.error, "code", None) for each in outcomes] == [EXIT_CODE] * 3, outcomes
        (stopped,) = checkpoint.Manager(tmp_path / "root").steps()[-1:]
        assert stopped in (last + told_at, last + told_at + 1)
        assert checkpoint.verify(checkpoint.Manager(tmp_path / "root").path(stopped)).ok
        if lost == "all hosts":
            for path in tmp_path.glob("host-*"):
                shutil.rmtree(path)
        last = stopped
    assert run_ranks(2, resume, root, (1, 7)) == [last] * 2
