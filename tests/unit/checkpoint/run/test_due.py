"""Saves every so much time: by rank 0's clock, and after the same step on all ranks."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.world import World, using, world
from tests.harness import run_ranks


class Clock(World):
    """A clock that is set."""

    def __init__(self):
        self.seconds = 1000.0

    def monotonic(self):
        return self.seconds


def saved_by_time(manager, clock, app, steps, each=60.0):
    for step in steps:
        clock.seconds += each
        manager.save(step, app)


def test_a_step_is_saved_after_so_much_time(tmp_path):
    clock, app = Clock(), {"x": torch.ones(1)}
    with using(clock), checkpoint.Manager(tmp_path, every=timedelta(minutes=5)) as manager:
        assert manager.restore(app) == 0
        saved_by_time(manager, clock, app, range(1, 12))
        assert manager.steps() == [5, 11]  # the time begins anew at the first step after a save
        assert manager.should_save(12) is manager.should_save(12) is False
        manager.save(13, app, force=True)
        clock.seconds += 300
        assert manager.should_save(14) is manager.should_save(14) is True
        manager.save(14, app)
        assert manager.steps() == [5, 11, 13, 14]


def test_what_a_tier_has_goes_to_the_root_where_it_is_time(tmp_path):
    clock, app = Clock(), {"x": torch.ones(1)}
    tiers = [checkpoint.Tier(str(tmp_path / "tier"), every=1)]
    with using(clock), checkpoint.Manager(tmp_path / "root", destinations=tiers, every=timedelta(minutes=3)) as manager:
        saved_by_time(manager, clock, app, range(1, 6))
        manager.wait()
        assert manager.steps() == [3]


def test_steps_that_jump_over_multiples_are_saved_at_the_first_after_each(tmp_path):
    app = {"step": 0}

    def run(upto, by=2048, **options):
        with checkpoint.Manager(tmp_path, every=5000, **options) as manager:
            manager.restore(app)
            while app["step"] < upto:
                app["step"] += by
                due = manager.should_save(app["step"])
                assert (manager.save(app["step"], app) is not None) is due is manager.should_save(app["step"])
            manager.wait()
            return manager.steps()

    assert run(6144) == [6144]
    assert run(12288) == [6144, 10240]  # from the restored step on
    assert run(20480, stage="now") == [6144, 10240, 16384, 20480]
    assert run(26_000, keep=checkpoint.Retention(last=1, every=10_000)) == [10240, 20480, 26624]
    assert run(30_001, by=1) == [10240, 20480, 26624, 30_000]


def test_tiers_count_steps_that_jump_as_the_root_does(tmp_path):
    tiers = [checkpoint.Tier(str(tmp_path / name), every=every, keep_last=9) for name, every in (("a", 3), ("b", 8))]
    with checkpoint.Manager(tmp_path / "root", destinations=tiers, every=10) as manager:
        for step in range(0, 28, 2):
            if manager.should_save(step):
                manager.save(step, {"x": step})
                manager.wait()
        where = manager.where()
    on = {name: [step for step, places in where.items() if str(tmp_path / name) in places] for name in ("a", "b")}
    assert on == {"a": [0, 4, 6, 10, 12, 16, 18, 22, 24], "b": [0, 8, 16, 24]}
    assert manager.steps() == [0, 10, 20]


def test_a_due_step_that_only_a_tier_has_comes_to_the_root_after_a_restart(tmp_path):
    app = {"step": 0}

    def run(every, steps, **options):
        tiers = [checkpoint.Tier(str(tmp_path / "tier"), every=64)]
        with checkpoint.Manager(tmp_path / "root", destinations=tiers, every=every) as manager:
            manager.restore(app, **options)
            for app["step"] in steps:
                manager.save(app["step"], app)
            manager.wait()
            return manager.steps()

    assert run(5000, range(64, 1025, 64)) == []  # as if it was killed before the promotion
    assert run(1000, [1088]) == [1024]
    assert run(1000, []) == [1024]  # 1088 is none
    assert run(5000, range(1152, 2049, 64)) == [1024]
    assert run(1000, [], step=2048) == [1024, 2048]  # by all steps under the root


class Own(World):
    """A clock of each rank's own, and for all but rank 0 one on which it is always time."""

    def __init__(self, begin):
        self.begin, self.added = begin, 0.0

    def monotonic(self):
        return time.monotonic() + (self.added if dist.get_rank() == 0 else 1e6 * self.added)


def saves_of_ranks(root):
    own = Own(world().monotonic())
    due = []
    with using(own), checkpoint.Manager(root, every=timedelta(hours=1)) as manager:
        for step in range(1, 40):
            dist.barrier()  # as a step has
            own.added += 600.0 if dist.get_rank() == 0 else 1.0
            if manager.should_save(step):
                due.append(step)
            manager.save(step, {"x": torch.ones(1)})
    return due, manager.steps()


def test_ranks_save_after_the_same_step_by_the_clock_of_rank_0(tmp_path):
    (first, steps), *others = run_ranks(3, saves_of_ranks, str(tmp_path))
    assert first == steps
    assert 4 <= len(first) <= 7
    for due, _ in others:
        assert due == first
