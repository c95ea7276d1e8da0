"""Threads that use weights while they are updated, and what they are told."""

import threading
import time

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.stream import staged
from shardopt.errors import CheckpointError, StateError
from shardopt.runtime.staging_fence import Event, copying_until
from tests.support.streams import zeros_like


def weights_of(step):
    """Tensors of which each element is the step, with few that change from one to the next."""
    return {f"w{i}": torch.full((400, 100), float(step)) for i in range(6)}


@pytest.fixture
def publisher(tmp_path):
    with checkpoint.Publisher(tmp_path, durable=False) as made:
        yield made


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_serving_sees_weights_of_one_step_and_is_told_which(tmp_path, publisher, memory_bytes):
    app = zeros_like(weights_of(0))
    follower = checkpoint.Follower(tmp_path, app, memory_bytes=memory_bytes)
    publisher.publish(1, weights_of(1)).result()
    follower.update()
    ended, seen, failures = threading.Event(), set(), []

    def serve():
        while not ended.is_set():
            with follower.serving() as step:
                for name, each in app.items():
                    if not each.eq(step).all():
                        failures.append((step, name, each.unique().tolist()))
                seen.add(step)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(2, 25):
            publisher.publish(step, weights_of(step)).result()
            assert follower.update().step == step
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)
    assert not failures, failures[:3]
    assert len(seen) > 5


def test_who_serves_right_after_the_pause_is_told_the_new_step(tmp_path, publisher, monkeypatch):
    """While the follower still hashes what it has applied."""
    app = zeros_like(weights_of(0))
    follower = checkpoint.Follower(tmp_path, app)
    publisher.publish(1, weights_of(1)).result()
    told = []
    held = staged.Staged.held

    def serving_before(self):
        with follower.serving() as step:
            told.append((step, float(app["w0"][0, 0])))
        return held(self)

    monkeypatch.setattr(staged.Staged, "held", serving_before)
    follower.update()
    publisher.publish(2, weights_of(2)).result()
    follower.update()
    assert told == [(1, 1.0), (2, 2.0)]


def test_an_update_reads_beside_serving_and_waits_with_applying(tmp_path, publisher):
    app = zeros_like(weights_of(0))
    follower = checkpoint.Follower(tmp_path, app)
    publisher.publish(1, weights_of(1)).result()
    follower.update()
    publisher.publish(2, weights_of(2)).result()
    reports = []
    thread = threading.Thread(target=lambda: reports.append(follower.update()))
    with follower.serving() as step:
        thread.start()
        time.sleep(0.3)
        assert step == 1 and not reports and all(each.eq(1).all() for each in app.values())
    thread.join(30)
    assert reports[0].step == 2 and reports[0].pause_seconds < 0.3 <= reports[0].seconds


def test_an_update_that_waits_for_serving_in_vain_ends_with_an_error(tmp_path, publisher):
    app = zeros_like(weights_of(0))
    follower = checkpoint.Follower(tmp_path, app, deadline_seconds=0.3)
    publisher.publish(1, weights_of(1)).result()
    follower.update()
    publisher.publish(2, weights_of(2)).result()
    with follower.serving():
        with pytest.raises(CheckpointError, match=r"waited 0.3 s; required serving to end") as raised:
            follower.update()
        assert raised.value.code == "following"
        assert follower.step == 1 and all(each.eq(1).all() for each in app.values())
    with follower.serving() as step:
        assert step == 1
    assert follower.update().step == 2


def test_serving_that_waits_for_an_update_in_vain_ends_with_an_error(tmp_path, publisher, monkeypatch):
    follower = checkpoint.Follower(tmp_path, zeros_like(weights_of(0)), deadline_seconds=0.3)
    publisher.publish(1, weights_of(1)).result()
    follower.update()
    publisher.publish(2, weights_of(2)).result()
    began, may_end = threading.Event(), threading.Event()
    apply = staged.Staged.apply

    def slow(self):
        began.set()
        may_end.wait(30)
        apply(self)

    monkeypatch.setattr(staged.Staged, "apply", slow)
    thread = threading.Thread(target=follower.update)
    thread.start()
    began.wait(30)
    try:
        with pytest.raises(CheckpointError, match="required an update to end"), follower.serving():
            pass
    finally:
        may_end.set()
        thread.join(30)
    with follower.serving() as step:
        assert step == 2


def test_weights_that_a_save_still_copies_are_changed_after_it(tmp_path, publisher):
    app = zeros_like(weights_of(0))
    follower = checkpoint.Follower(tmp_path, app)
    publisher.publish(1, weights_of(1)).result()
    copied = Event()
    copying_until(copied)
    thread = threading.Thread(target=follower.update)
    thread.start()
    try:
        time.sleep(0.3)
        assert all(each.eq(0).all() for each in app.values())
    finally:
        copied.set()
        thread.join(30)
    assert follower.step == 1 and all(each.eq(1).all() for each in app.values())


def test_nobody_serves_before_the_first_update(tmp_path, publisher):
    follower = checkpoint.Follower(tmp_path, zeros_like(weights_of(0)))
    with pytest.raises(StateError, match="no published weights yet") as raised, follower.serving():
        pass
    assert raised.value.code == "following"


def test_serving_that_raises_is_over(tmp_path, publisher):
    follower = checkpoint.Follower(tmp_path, zeros_like(weights_of(0)), deadline_seconds=1.0)
    publisher.publish(1, weights_of(1)).result()
    follower.update()
    with pytest.raises(ZeroDivisionError), follower.serving():
        raise ZeroDivisionError
    publisher.publish(2, weights_of(2)).result()
    assert follower.update().step == 2
