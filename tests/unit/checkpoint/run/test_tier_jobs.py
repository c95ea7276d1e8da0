"""The jobs of tiers: done in turn, superseded where a newer one waits, and what of their failures is raised later."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.run.tiers.work import Job, TierWork

ALONE = SimpleNamespace(beating=nullcontext)


def job(step, tier=0, onto=(), to_root=False, is_restored=False):
    return Job(CheckpointId(step), ALONE, (), tier, onto, to_root, lambda: None, is_restored)


class Held:
    """A queue whose first job runs until it is let go; notes what was done, and what was the newest then."""

    def __init__(self, failing=()):
        self.done, self.begun, self.let_go, self.failing = [], threading.Event(), threading.Event(), failing
        self.queue = TierWork(SimpleNamespace(root=None), ())
        self.queue.do = self.do

    def do(self, job):
        self.begun.set()
        assert self.let_go.wait(20)
        self.done.append((job.id.step, self.queue.is_newest(job) if job.tier is not None else None))
        if job.id.step in self.failing:
            raise OSError(f"step {job.id.step}")

    def begin(self, *jobs):
        for each in jobs:
            self.queue.begin(each)
        assert self.begun.wait(20)

    def finish(self):
        self.let_go.set()
        self.queue.finish()
        return self.done


def test_jobs_are_done_in_the_order_in_which_they_were_begun():
    held = Held()
    held.begin(job(1), job(2), job(3, tier=None))
    assert held.finish() == [(1, False), (2, True), (3, None)]  # what the root alone has is no newer copy
    held.begin(job(4))
    assert held.finish()[3:] == [(4, True)]  # in a new thread, or in the one that was about to end


def test_copies_without_a_turn_are_given_up_once_where_a_newer_one_waits():
    held = Held()
    kept = [job(2, onto=(1,)), job(3, to_root=True), job(4, is_restored=True), job(5, tier=None)]
    held.begin(job(1), *kept, job(6), job(7), job(8))
    assert [each.id.step for each in held.queue.supersede()] == [6, 7]  # not that under way, nor the newest
    assert held.queue.supersede() == []
    held.queue.begin(job(9))
    assert [each.id.step for each in held.queue.supersede()] == [8]
    assert held.queue.promoting() == {CheckpointId(3).name}
    held.finish()
    assert held.queue.promoting() == frozenset()


@pytest.mark.parametrize(
    ("failing", "raised"),
    [(job(1), False), (job(1, onto=(1,)), True), (job(1, to_root=True), True), (job(1, tier=None), True)],
    ids=["a copy", "to a tier", "to the root", "at the root"],
)
def test_the_failure_of_a_promotion_is_taken_once_and_that_of_a_copy_is_not(failing, raised):
    held = Held(failing=(1,))
    held.begin(failing, job(2))
    assert [step for step, _ in held.finish()] == [1, 2]  # what waits is done all the same
    assert (str(held.queue.failures.take()) == "step 1") == raised
    assert held.queue.failures.take() is None
