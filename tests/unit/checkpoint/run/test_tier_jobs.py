"""The jobs of tiers: done in turn, superseded where a newer one waits, and what of their failures is raised later."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.run.tiers import promotions, work
from shardopt.checkpoint.run.tiers.promotions import Arrival, Promotions
from shardopt.checkpoint.run.tiers.work import Job, TierWork
from shardopt.errors import CheckpointError, CheckpointExistsError

ALONE = SimpleNamespace(
    beating=nullcontext,
    on_rank_0=lambda what, decide: decide(),
    agree=lambda what, work, report, decide: (None, decide([report(work())])),
    rank=0,
)


def job(step, tier=0, onto=(), to_root=False, is_restored=False):
    return Job(CheckpointId(step), ALONE, (), tier, onto, to_root, lambda: None, is_restored, ALONE)


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


class Away:
    """Promotions to a root that fails until it is back; notes the attempts, and the steps that have arrived."""

    def __init__(self, monkeypatch, error):
        self.tried, self.arrived, self.is_back, self.error = [], [], threading.Event(), error
        self.meanwhile = lambda: None
        monkeypatch.setattr(promotions, "copy_over_ranks", self.copy)
        monkeypatch.setattr(promotions, "_POLL_SECONDS", 0.01)
        self.queue = Promotions(SimpleNamespace(url="s3://a/run", checkpoint=lambda id: id))

    def copy(self, ranks, whole, target, read):
        self.tried.append(target.step)
        if not self.is_back.is_set():
            self.meanwhile()
            raise self.error

    def begin(self, step, from_tier=True):
        manifest = SimpleNamespace(own_files=[SimpleNamespace(nbytes=1_000_000)])
        whole = SimpleNamespace(manifest=manifest, record=b"") if from_tier else None
        self.queue.begin(Arrival(CheckpointId(step), ALONE, whole, lambda: self.arrived.append(step)))


def wait_until(condition):
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it does not come")


def test_while_the_root_is_away_its_newest_step_waits_and_makes_way_for_newer_ones(monkeypatch, caplog):
    """Each that was due for the root stayed on its tier, which had no room for the next saves in the end."""
    monkeypatch.setattr(promotions, "_PAUSE_SECONDS", 0.0)
    away = Away(monkeypatch, CheckpointError("no answer"))
    first = threading.Event()
    away.meanwhile = lambda: first.wait(20)
    for step in (4, 8, 12, 16):
        away.begin(step)
    away.begin(18, from_tier=False)
    assert away.queue.supersede() == []  # it is not known yet
    away.queue.looks_away = True
    wait_until(lambda: away.tried)
    assert away.queue.names() == {CheckpointId(step).name for step in (4, 8, 12, 16)}
    assert [id.step for id in away.queue.supersede()] == [8, 12] and away.queue.supersede() == []
    assert away.queue.names() == {CheckpointId(step).name for step in (4, 16)}  # others may be removed from tiers
    first.set()
    wait_until(lambda: away.tried.count(16) >= 3)  # again and again
    away.is_back.set()
    away.queue.finish()
    assert away.arrived == [16, 18] and set(away.tried) == {4, 16} and away.queue.failures.take() is None
    assert caplog.text.count("does not come to s3://a/run") == 3
    away.queue.looks_away = False
    assert away.queue.supersede() == []


def test_steps_that_wait_for_a_slow_root_are_told_with_their_bytes(monkeypatch, caplog):
    """They filled the tiers, and the first line was of a full disk."""
    away = Away(monkeypatch, None)
    away.is_back.set()
    slowly = threading.Event()
    monkeypatch.setattr(promotions, "copy_over_ranks", lambda *unused: slowly.wait(20))
    for step in range(1, 9):
        away.begin(step)
        wait_until(lambda: away.queue.jobs[0].is_begun)
        assert away.queue.supersede() == []
    slowly.set()
    away.queue.finish()
    assert away.arrived == [*range(1, 9)]
    assert [line.partition(",")[0] for line in caplog.messages] == [
        "3 steps wait for s3://a/run",
        "6 steps wait for s3://a/run",
    ]
    assert "Tiers keep them till then, 3 MB on all hosts together" in caplog.text


def test_a_root_that_never_answers_is_an_error_once_somebody_waits_for_it(monkeypatch):
    away = Away(monkeypatch, CheckpointError("no answer"))
    away.begin(4)
    wait_until(lambda: away.tried)
    assert away.queue.failures.take() is None  # the next save goes on
    away.queue.finish()
    assert str(away.queue.failures.take()) == "no answer [storage-failed]" and away.arrived == []
    assert away.tried == [4, 4]  # once more


def test_what_no_answer_of_the_root_would_change_is_raised_at_once(monkeypatch):
    away = Away(monkeypatch, CheckpointExistsError("another run", code="run-root"))
    away.begin(4)
    wait_until(lambda: away.queue.failures.newest)
    assert isinstance(away.queue.failures.take(), CheckpointExistsError) and away.tried == [4]


def test_a_root_without_an_answer_is_waited_for_once(monkeypatch):
    """Each copy on hosts waited for all attempts to list it, about 23 seconds."""
    answer, asked = threading.Event(), []
    root = SimpleNamespace(url="s3://a/run", ids=lambda: asked.append(1) or answer.wait(20))
    queue = TierWork(SimpleNamespace(root=root, may_remove=lambda: True), ())
    monkeypatch.setattr(work, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(work, "_AWAY_SECONDS", 1e9)
    assert queue._may_remove() and queue._may_remove() and len(asked) == 1 and not queue.promotions.looks_away
    monkeypatch.setattr(work, "_AWAY_SECONDS", 0.0)
    assert queue._may_remove() and len(asked) == 1 and queue.promotions.looks_away
    answer.set()
    wait_until(queue._look.done)
    monkeypatch.setattr(work, "_LOOK_SECONDS", 20.0)
    assert queue._may_remove() and len(asked) == 2 and not queue.promotions.looks_away
