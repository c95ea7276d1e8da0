"""Which checkpoints stay: what no rules and no history may ever do."""

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt import checkpoint
from shardopt.checkpoint.run import metrics
from shardopt.checkpoint.run.keeper import Keeper
from shardopt.checkpoint.run.retention import Best, Retention, reasons_to_keep
from shardopt.checkpoint.run.tiers.tiers import Tiers
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.storage import LocalStorage
from shardopt.world import using
from tests.support.worlds import FakeClock

STEPS_AND_RESUMED = st.sets(st.integers(0, 60), min_size=1, max_size=15).flatmap(
    lambda steps: st.tuples(st.just(steps), st.none() | st.sampled_from(sorted(steps)) | st.just(61))
)
RULES = st.builds(
    Retention,
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 20),
    best=st.none() | st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
    seconds=st.none() | st.sampled_from([0.5, 10, 11.0]),
)
AGES = st.dictionaries(st.integers(0, 60), st.sampled_from([-math.inf, -5.0, 0.0, 0.5, 9.0, 10.0, 11.0]))
LOSSES = st.dictionaries(st.integers(0, 60), st.sampled_from([math.nan, -math.inf, 0.0, 1.0, 2.0, math.inf]))


def with_metric(losses):
    return {step: {"loss": value} for step, value in losses.items()}


@given(STEPS_AND_RESUMED, RULES, LOSSES, AGES)
def test_what_every_choice_holds(steps_and_resumed, rules, losses, ages):
    steps, resumed = steps_and_resumed
    keep = set(reasons_to_keep(steps, rules, with_metric(losses), {resumed: "resumed"}, ages))
    assert keep <= steps
    assert max(steps) in keep
    assert resumed not in steps or resumed in keep
    if rules.last is None and rules.seconds is None:
        assert keep == steps and rules.keeps_all
        return
    newest = set(sorted(steps)[-(rules.last or 1) :])
    young = {step for step in steps & ages.keys() if rules.seconds and ages[step] < rules.seconds}
    assert newest | young <= keep
    multiples = [n * rules.every for n in range(61)] if rules.every else []
    stretches = [[step for step in steps if each <= step < each + rules.every] for each in multiples[1:]]
    by_every = {min(each) for each in stretches if each} | ({0} & steps if rules.every else set())
    assert {step for step in steps if step in multiples} <= by_every
    assert by_every <= keep
    measured = {step: losses[step] for step in steps if not math.isnan(losses.get(step, math.nan))}
    bests = set()
    if rules.best is not None:
        sign = -1 if rules.best.mode == "max" else 1
        bests = set(sorted(measured, key=lambda step: (sign * measured[step], -step))[: rules.best.n])
        assert bests <= keep
    assert keep == newest | young | by_every | bests | ({resumed} & steps)


@given(STEPS_AND_RESUMED, RULES, LOSSES, AGES)
def test_what_was_kept_is_kept_again(steps_and_resumed, rules, losses, ages):
    steps, resumed = steps_and_resumed
    keep = set(reasons_to_keep(steps, rules, with_metric(losses), {resumed: "resumed"}, ages))
    assert set(reasons_to_keep(keep, rules, with_metric(losses), {resumed: "resumed"}, ages)) == keep


def test_rules_without_last_or_seconds_keep_all():
    assert Retention(every=2).keeps_all and Retention(best=("loss", "min", 1)).keeps_all
    assert not Retention(seconds=60).keeps_all and not Retention(last=1).keeps_all


@pytest.fixture
def clock():
    with using(FakeClock(now=1e9)) as clock:
        yield clock


def save(manager, clock, steps, seconds=60):
    """Saves steps, with so much time after each."""
    for step in steps:
        manager.save(step, {"step": step})
        clock.now += seconds


@contextmanager
def manifests_read(monkeypatch):
    """The directories whose manifests retention has read, while the context is open."""
    read, names = metrics.manifest_in, []
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "manifest_in", lambda storage: (names.append(storage.url[-1]), read(storage))[1])
        yield names


def test_what_is_young_stays_however_many_steps_that_are(tmp_path, clock, monkeypatch):
    manager = checkpoint.Manager(tmp_path, keep=Retention(seconds=150))
    with manifests_read(monkeypatch) as names:
        save(manager, clock, range(1, 6))
        assert manager.steps() == [3, 4, 5]
        save(manager, clock, range(6, 16), seconds=10)
        assert manager.steps() == [*range(6, 16)]
        clock.now += 1000
        save(manager, clock, [16])
        assert manager.steps() == [16]
    assert names == []


def test_a_job_that_starts_again_goes_by_the_manifests_and_reads_each_once(tmp_path, clock, monkeypatch):
    save(checkpoint.Manager(tmp_path), clock, range(1, 6))
    manager = checkpoint.Manager(tmp_path, keep=Retention(seconds=200))
    assert manager.restore({"step": 0}) == 5
    with manifests_read(monkeypatch) as names:
        save(manager, clock, [6, 7])
        assert manager.steps() == [4, 5, 6, 7]
        save(manager, clock, [8, 9])
        assert manager.steps() == [5, 6, 7, 8, 9]  # which it was restored from, whatever its age
    assert sorted(names) == ["1", "2", "3", "4", "5"]


def test_a_checkpoint_is_as_old_as_its_save_however_late_it_leaves_its_tier(tmp_path, clock, monkeypatch):
    begin = Tiers.begin

    def begin_late(*args):
        clock.now += 1000
        begin(*args)

    monkeypatch.setattr(Tiers, "begin", begin_late)
    tier = checkpoint.Tier(str(tmp_path / "tier"), every=1)
    with checkpoint.Manager(tmp_path / "root", destinations=[tier], keep=Retention(seconds=2500)) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"step": step})
            manager.wait()
        assert manager.steps() == [2, 3]


def test_tiers_keep_as_many_after_a_start_as_before(tmp_path):
    tiers = [checkpoint.Tier(tmp_path / name, every=every, keep_last=3) for name, every in (("mem", 1), ("disk", 2))]
    memory, disk = (tier.path for tier in tiers)

    def steps_on(manager):
        manager.wait()
        found = manager.where()
        return [[step for step in found if path in found[step]] for path in (memory, disk)]

    for steps, after_restore, then in (
        (range(1, 9), [[], []], [[6, 7, 8], [4, 6, 8]]),
        (range(9, 11), [[6, 7, 8], [4, 6, 8]], [[8, 9, 10], [6, 8, 10]]),
    ):
        with checkpoint.Manager(tmp_path / "root", every=1000, destinations=tiers) as manager:
            manager.restore({"step": 0})
            assert steps_on(manager) == after_restore
            for step in steps:
                manager.save(step, {"step": step})
                manager.wait()
            assert steps_on(manager) == then


def test_metrics_that_come_later_take_no_age_away(tmp_path, clock):
    save(checkpoint.Manager(tmp_path), clock, range(1, 4))
    manager = checkpoint.Manager(tmp_path, keep=Retention(seconds=1000))
    manager.add_metrics(2, {"loss": 1.0})
    save(manager, clock, [4])
    assert manager.steps() == [1, 2, 3, 4]


def test_a_clock_that_goes_back_makes_nothing_old(tmp_path, clock):
    manager = checkpoint.Manager(tmp_path, keep=Retention(seconds=100))
    save(manager, clock, [1, 2])
    clock.now -= 1000
    save(manager, clock, [3, 4])
    assert manager.steps() == [1, 2, 3, 4]
    clock.now += 910
    save(manager, clock, [5], seconds=-5000)  # the newest, whatever its age
    assert manager.steps() == [2, 5]


def test_what_a_damaged_manifest_does_not_tell_counts_as_old(tmp_path, clock, caplog):
    save(checkpoint.Manager(tmp_path), clock, [1, 2], seconds=1)
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    manager = checkpoint.Manager(tmp_path, keep=Retention(seconds=1000))
    assert manager.restore({"step": 0}) == 2
    save(manager, clock, [3, 4])
    assert manager.steps() == [2, 3, 4] and "step-00000001" in caplog.text


def test_the_age_of_what_a_run_has_abandoned_keeps_and_removes_nothing(tmp_path, clock):
    manager = checkpoint.Manager(tmp_path, keep=Retention(seconds=250))
    save(manager, clock, [100, 200, 250, 300])
    assert manager.restore({"step": 0}, step=200) == 200
    save(manager, clock, [210, 220, 300, 310])
    assert manager.steps() == [200, 210, 220, 300, 310]  # 200 is where the run was restored from
    assert manager.abandoned_steps() == {0: [250, 300]}
    again = checkpoint.Manager(tmp_path, keep=Retention(seconds=150))
    assert again.restore({"step": 0}) == 310
    save(again, clock, [320])
    assert again.steps() == [300, 310, 320]
    assert again.abandoned_steps() == {0: [250, 300]}


def test_a_run_from_beginning_to_end():
    there, rules = set(), Retention(last=2, every=50, best=Best("loss", "min", 1))
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.0, 50: math.nan, 60: 4.0, 70: 5.0}
    for step in losses:
        there = set(reasons_to_keep(there | {step}, rules, with_metric(losses)))
    assert there == {20, 50, 60, 70}


@pytest.mark.parametrize("at", range(1, 9))
def test_a_removal_that_ends_early_leaves_no_checkpoint_or_a_whole_one(tmp_path, monkeypatch, at):
    path = tmp_path / "it"
    checkpoint.save(path, {"w": torch.ones(3)})
    calls = 0

    def count(what):
        def call(self, *args):
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt
            return what(self, *args)

        return call

    for name in ("remove_durably", "names", "remove", "remove_if_empty"):
        monkeypatch.setattr(LocalStorage, name, count(getattr(LocalStorage, name)))
    if at <= 7:
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(LocalStorage(str(path)))
        monkeypatch.undo()
        if (path / "manifest.json").exists():
            assert checkpoint.verify(path).ok
    remove_checkpoint(LocalStorage(str(path)))
    assert not path.exists()


def test_only_what_a_save_wrote_is_removed(tmp_path):
    checkpoint.save(tmp_path, {"w": torch.ones(3)})
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".manifest.json.0123456789ab.tmp").write_text("of a save that died in its commit")
    remove_checkpoint(LocalStorage(str(tmp_path)))
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(("metric", "told"), [("lass", 1), ("loss", 0), ("late", 0)])
def test_a_rule_by_a_metric_that_no_checkpoint_has_is_told_once(tmp_path, caplog, metric, told):
    manager = checkpoint.Manager(tmp_path, keep=Retention(last=2, best=(metric, "min", 1)))
    for step in range(1, 15):
        manager.save(step, {"step": step}, metrics={"loss": step})
        if step == 2:
            manager.add_metrics(1, {"late": 0.5})
    messages = [each.message for each in caplog.records if "which no checkpoint has" in each.message]
    assert len(messages) == told and all("required one of" in each and "loss" in each for each in messages)


@pytest.mark.parametrize("mirrored", [False, True])
def test_metrics_that_another_job_adds_count_at_the_next_removal(tmp_path, mirrored):
    root, mirror = tmp_path / "run", tmp_path / "mirror"
    destinations = [checkpoint.Mirror(mirror)] if mirrored else []
    keep = Retention(last=1, best=Best("loss", "min", 1))
    with (
        checkpoint.Manager(root, keep=keep, destinations=destinations) as manager,
        checkpoint.Manager(root, destinations=destinations) as evaluation,
    ):
        for step, loss in enumerate([3.0, 0.5, 2.0, 2.5]):
            manager.save(step, {"x": torch.ones(3)})
            manager.wait()
            evaluation.add_metrics(step, {"loss": loss})
        manager.save(4, {"x": torch.ones(3)})
        manager.wait()
        assert [checkpoint.Manager(url).steps() for url in (root, mirror)] == [[1, 4], [1, 4] if mirrored else []]
        evaluation.add_metrics(4, {"loss": 0.1})
        evaluation.add_metrics(1, {"loss": 9.0})  # it replaces what was known
        manager.save(5, {"x": torch.ones(3)})
        assert manager.steps() == [4, 5]


@pytest.mark.parametrize("rules", [{"last": 2}, {"last": 2, "best": Best("loss", "min", 1)}])
def test_metrics_that_were_added_are_read_again_only_where_a_rule_goes_by_them(tmp_path, monkeypatch, rules):
    read, read_record = [], LocalStorage.read_record
    monkeypatch.setattr(LocalStorage, "read_record", lambda self, name: read.append(name) or read_record(self, name))
    with checkpoint.Manager(tmp_path, keep=Retention(**rules)) as manager:
        for step in range(4):
            manager.save(step, {"x": torch.ones(3)}, metrics={"loss": 1.0 + step})
        manager.add_metrics(2, {"loss": 0.5})
        read.clear()
        manager.save(4, {"x": torch.ones(3)})
    assert read == ["step-00000002.metrics.json"] * ("best" in rules)


def test_a_damaged_file_of_metrics_that_were_added_is_told_once(tmp_path, caplog):
    with checkpoint.Manager(tmp_path, keep=Retention(last=5, best=Best("loss", "min", 1))) as manager:
        manager.save(1, {"x": torch.ones(3)})
        for told in (1, 2):
            manager.add_metrics(1, {"loss": 0.5})
            (tmp_path / "step-00000001.metrics.json").write_text("")
            for step in range(3):
                manager.save(told * 10 + step, {"x": torch.ones(3)})
            assert caplog.text.count("is no record of metrics") == told


def test_nothing_is_removed_where_a_branch_begins_while_metrics_are_read(tmp_path, monkeypatch):
    inner = Keeper._kept

    def with_branch(self, root, whole):
        self._run.is_agreed = False  # as a restore of an earlier step begins
        return inner(self, root, whole)

    with checkpoint.Manager(tmp_path, keep=1) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(Keeper, "_kept", with_branch)
            for step in range(3):
                manager.save(step, {"x": torch.ones(3)})
        assert manager.steps() == [0, 1, 2]
        manager.save(3, {"x": torch.ones(3)})
        assert manager.steps() == [3]


@pytest.mark.parametrize("others", [None, {"train": 1.0}])
def test_a_rule_by_a_metric_that_comes_at_fewer_steps_than_checkpoints_is_not_told(tmp_path, caplog, others):
    manager = checkpoint.Manager(tmp_path, keep=Retention(last=2, best=("loss", "min", 1)))
    for step in range(1, 11):
        manager.save(step, {"step": step}, metrics={"loss": 1 / step} if step % 5 == 0 else others)
    assert not [each for each in caplog.records if "which no checkpoint has" in each.message]
    assert manager.steps() == [9, 10]
