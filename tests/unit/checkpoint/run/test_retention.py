"""Which checkpoints stay: what no rules and no history may ever do."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt import checkpoint
from shardopt.checkpoint.run.retention import Best, Retention, reasons_to_keep
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.storage import LocalStorage

STEPS_AND_RESUMED = st.sets(st.integers(0, 60), min_size=1, max_size=15).flatmap(
    lambda steps: st.tuples(st.just(steps), st.none() | st.sampled_from(sorted(steps)) | st.just(61))
)
RULES = st.builds(
    Retention,
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 20),
    best=st.none() | st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
)
LOSSES = st.dictionaries(st.integers(0, 60), st.sampled_from([math.nan, -math.inf, 0.0, 1.0, 2.0, math.inf]))


def with_metric(losses):
    return {step: {"loss": value} for step, value in losses.items()}


@given(STEPS_AND_RESUMED, RULES, LOSSES)
def test_what_every_choice_holds(steps_and_resumed, rules, losses):
    steps, resumed = steps_and_resumed
    keep = set(reasons_to_keep(steps, rules, with_metric(losses), {resumed: "resumed"}))
    assert keep <= steps
    assert max(steps) in keep
    assert resumed not in steps or resumed in keep
    if rules.last is None:
        assert keep == steps
        return
    assert set(sorted(steps)[-rules.last :]) <= keep
    by_every = {step for step in steps if rules.every and step % rules.every == 0}
    assert by_every <= keep
    measured = {step: losses[step] for step in steps if not math.isnan(losses.get(step, math.nan))}
    bests = set()
    if rules.best is not None:
        sign = -1 if rules.best.mode == "max" else 1
        bests = set(sorted(measured, key=lambda step: (sign * measured[step], -step))[: rules.best.n])
        assert bests <= keep
    assert keep == set(sorted(steps)[-rules.last :]) | by_every | bests | ({resumed} & steps)


@given(STEPS_AND_RESUMED, RULES, LOSSES)
def test_what_was_kept_is_kept_again(steps_and_resumed, rules, losses):
    steps, resumed = steps_and_resumed
    keep = set(reasons_to_keep(steps, rules, with_metric(losses), {resumed: "resumed"}))
    assert set(reasons_to_keep(keep, rules, with_metric(losses), {resumed: "resumed"})) == keep


def test_a_run_from_beginning_to_end():
    there, rules = set(), Retention(last=2, every=50, best=Best("loss", "min", 1))
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.0, 50: math.nan, 60: 4.0, 70: 5.0}
    for step in losses:
        there = set(reasons_to_keep(there | {step}, rules, with_metric(losses)))
    assert there == {20, 50, 60, 70}


@pytest.mark.parametrize("at", range(1, 8))
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
    if at <= 6:
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
