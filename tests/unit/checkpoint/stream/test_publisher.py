"""Publishers: steps in order, other storages, silence, and the arguments of both sides."""

import math
import os
import shutil
import time

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.saving import commit
from shardopt.checkpoint.saving import save as save_module
from shardopt.errors import CheckpointError, OptionError
from shardopt.world import using
from tests.harness import Fault
from tests.harness.faults import watched
from tests.harness.object_stores import object_server
from tests.support.streams import is_step, same_bits, train, zeros_like
from tests.support.worlds import FakeClock


@pytest.fixture
def weights():
    return {"wide": torch.randn(300, 500), "rows": torch.randn(2000, 64), "small": torch.randn(7)}


@pytest.fixture
def app(weights):
    return zeros_like(weights)


@pytest.mark.parametrize("step", [5, 4, 0])
def test_steps_only_count_up(tmp_path, weights, step):
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(3, weights).result()
        publisher.publish(5, weights)
        with pytest.raises(OptionError, match=rf"step: found {step}; required more than 5") as raised:
            publisher.publish(step, weights)
        assert raised.value.code == "invalid-argument"
        publisher.publish(6, weights).result()
    assert sorted(os.listdir(tmp_path)) == [*(f"step-{i:08d}" for i in (3, 5, 6)), "stream.json"]


def test_a_step_that_failed_is_raised_once_and_can_be_published_again(tmp_path, weights, app):
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
        follower.update()
        train(weights, 2)
        full = [Fault(0, f"os:{call}", action="ENOSPC", times=99) for call in ("pwritev", "writev", "open")]
        with watched(full, []):
            pending = publisher.publish(2, weights)
            pending.done.wait()
        with pytest.raises(CheckpointError):
            publisher.publish(3, weights)
        assert follower.update() is None
        for step in (2, 3):
            publisher.publish(step, weights).result()
            assert is_step(follower, app, follower.update(), step) and same_bits(app, weights)


def test_a_closed_publisher_publishes_nothing(tmp_path, weights):
    publisher = checkpoint.Publisher(tmp_path, durable=False)
    publisher.publish(1, weights)
    publisher.close()
    publisher.close()
    assert (tmp_path / "step-00000001" / "manifest.json").exists()
    with pytest.raises(RuntimeError, match="was closed"):
        publisher.publish(2, weights)


def test_what_is_published_is_committed_when_the_block_ends(tmp_path, weights, app):
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights)
        publisher.wait()
        assert (tmp_path / "step-00000001" / "manifest.json").exists()
        publisher.publish(2, weights)
    assert checkpoint.Follower(tmp_path, app).update().step == 2


def test_an_error_in_the_block_is_the_one_that_is_raised(tmp_path, weights):
    with pytest.raises(ZeroDivisionError), checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights)
        raise ZeroDivisionError
    assert (tmp_path / "step-00000001" / "manifest.json").exists()


def test_retention_is_by_number_or_by_rules_over_metrics(tmp_path, weights):
    rules = checkpoint.Retention(last=1, best=("score", "max", 1))
    with checkpoint.Publisher(tmp_path, durable=False, keep=rules) as publisher:
        for step, score in ((1, 3.0), (2, 1.0), (3, 2.0)):
            train(weights, step)
            publisher.publish(step, weights, metrics={"score": score}).result()
    kept = {int(each.parent.name[5:]) for each in tmp_path.glob("step-*/manifest.json")}
    assert kept == {1, 3}


def test_followers_find_what_was_published_in_the_last_seconds_across_a_restart(tmp_path, weights, app):
    def kept():
        return sorted(int(each.parent.name[5:13]) for each in tmp_path.glob("step-*/manifest.json"))

    with using(FakeClock(now=1e9)) as clock:
        for first in (1, 6):
            with checkpoint.Publisher(tmp_path, durable=False, keep=checkpoint.Retention(seconds=35)) as publisher:
                for step in range(first, first + 5):
                    train(weights, step)
                    publisher.publish(step, weights)
                    publisher.wait()  # for what follows the commit, too
                    clock.now += 10
            assert kept() == [first + 1, first + 2, first + 3, first + 4]
        follower = checkpoint.Follower(tmp_path, app)
        for step in (7, 10):
            assert is_step(follower, app, follower.update(step), step)
    assert same_bits(app, weights)


def life_on(root, weights, app):
    follower = checkpoint.Follower(root, app)
    with checkpoint.Publisher(root, anchor_every=3) as publisher:
        for step in range(1, 7):
            train({"wide": weights["wide"]}, step)
            weights["rows"][step * 100 : step * 100 + 70] += 1
            publisher.publish(step, weights).result()
            report = follower.update()
            assert (report.step, follower.step) == (step, step) and same_bits(app, weights)
    late = zeros_like(weights)
    assert checkpoint.Follower(root, late).update().step == 6 and same_bits(late, weights)


def test_weights_flow_through_memory(tmp_path, weights, app):
    life_on(f"memory://shardopt-streams/{tmp_path.name}", weights, app)


def test_weights_flow_through_a_store(weights, app):
    with object_server() as server, server.reached():
        life_on(server.new_root(), weights, app)


def test_a_silent_publisher_is_logged_once_until_it_is_heard_of(tmp_path, weights, app, caplog):
    def warned():
        return [each.message for each in caplog.records if "was published in" in each.message]

    follower = checkpoint.Follower(tmp_path, app, silence_seconds=0.05)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        assert follower.update() is None and not warned()
        time.sleep(0.06)
        assert follower.update() is None and follower.poll() is None
        assert [each.startswith("no step was published") for each in warned()] == [True]
        for step in (1, 2):
            publisher.publish(step, weights).result()
            follower.update()
            time.sleep(0.06)
            for _ in range(2):
                assert follower.update() is None
            assert len(warned()) == 1 + step
            assert f"nothing after step {step} was published" in warned()[-1] and "[following]" in warned()[-1]


def test_a_root_that_does_not_exist_yet_is_waited_for(tmp_path, weights, app):
    follower = checkpoint.Follower(tmp_path / "later", app)
    assert follower.update() is None and follower.poll() is None
    with checkpoint.Publisher(tmp_path / "later", durable=False) as publisher:
        publisher.publish(1, weights).result()
    assert follower.update().step == 1


BAD_OF_BOTH = [
    {"deadline_seconds": 0},
    {"deadline_seconds": math.nan},
    {"deadline_seconds": "5"},
    {"root": None},
    {"root": 3},
    {"root": ""},
    {"rename": {"(": "x"}},
    {"rename": "x"},
    {"rearrange": "x"},
    {"rearrange": ["x"]},
]


@pytest.mark.parametrize(
    "given",
    [
        *BAD_OF_BOTH,
        {"anchor_every": 0},
        {"anchor_every": 1.5},
        {"anchor_every": True},
        {"keep": 0},
        {"keep": "all"},
        {"dtype": torch.int8},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_bad_arguments_of_a_publisher_are_refused_by_name(tmp_path, given):
    with pytest.raises(OptionError, match=next(iter(given))):
        checkpoint.Publisher(**{"root": tmp_path, **given})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given",
    [
        *BAD_OF_BOTH,
        {"memory_bytes": -1},
        {"memory_bytes": 1e9},
        {"memory_bytes": True},
        {"silence_seconds": 0},
        {"silence_seconds": None},
        {"strict": "yes"},
        {"app": None},
    ],
    ids=str,
)
def test_bad_arguments_of_a_follower_are_refused_by_name(tmp_path, given):
    with pytest.raises(OptionError, match=next(iter(given))):
        checkpoint.Follower(**{"root": tmp_path, "app": {"a": torch.ones(2)}, **given})


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
def test_bad_steps_are_refused_by_name(tmp_path, weights, app, step):
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        with pytest.raises(OptionError, match="step"):
            publisher.publish(step, weights)
        publisher.publish(1, weights).result()
    with pytest.raises(OptionError, match="step"):
        checkpoint.Follower(tmp_path, app).update(step)


def test_a_report_says_what_was_read_and_how_long_it_took(tmp_path, weights, app):
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
        report = follower.update()
    assert report.url == str(tmp_path / "step-00000001") and report.age_seconds >= 0
    assert 0 <= report.pause_seconds <= report.seconds and report.parts == 3
    assert report.bytes_read == sum(each.nbytes for each in weights.values())


@pytest.mark.parametrize("failing", ["writing", "committing"])
def test_what_is_kept_of_a_step_stays_while_the_next_ones_fail(tmp_path, weights, app, monkeypatch, failing):
    """The previous step is in host memory, beside that which is being published: neither may be taken for the other."""
    follower = checkpoint.Follower(tmp_path, app)
    place = save_module if failing == "writing" else commit
    name = "write_files" if failing == "writing" else "publish_checkpoint"

    def fail(*args, **kwargs):
        raise CheckpointError("it fails")

    with checkpoint.Publisher(tmp_path, durable=False, anchor_every=100) as publisher:
        for step in (1, 2):
            train(weights, step)
            publisher.publish(step, weights).result()
            follower.update()
        for step in (3, 4, 5):
            train(weights, step)
            with monkeypatch.context() as patch:
                patch.setattr(place, name, fail)
                publisher.publish(step, weights).done.wait()
            with pytest.raises(CheckpointError, match="it fails"):
                publisher.wait()
        train(weights, 6)
        publisher.publish(6, weights).result()
        report = follower.update()
        assert is_step(follower, app, report, 6) and same_bits(app, weights)
        assert report.whole <= (1 if failing == "writing" else 3)  # what was kept still serves


def test_a_run_and_a_publisher_refuse_each_others_root(tmp_path):
    """Each would remove what the other has saved, by its own rules."""
    model = {"w": torch.arange(4.0)}
    with checkpoint.Manager(tmp_path / "run", every=1) as run:
        run.save(1, {"model": model})
    with checkpoint.Publisher(tmp_path / "run", keep=1) as publisher:
        with pytest.raises(CheckpointError, match="found the root of a run; required the root of a publisher") as error:
            publisher.publish(5, model)
        assert error.value.code == "run-root"
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000001"]

    with checkpoint.Publisher(tmp_path / "stream") as publisher:
        publisher.publish(5, model)
    with checkpoint.Manager(tmp_path / "stream", every=1) as run:
        for call in (lambda: run.restore({"model": model}), lambda: run.save(6, {"model": model})):
            with pytest.raises(CheckpointError, match="found the root of a publisher; required the root of a run"):
                call()
        assert run.latest_step == 5  # it lists what is there
    assert sorted(os.listdir(tmp_path / "stream")) == ["step-00000005", "stream.json"]
    with checkpoint.Publisher(tmp_path / "stream") as publisher:
        publisher.publish(6, model)


def test_a_record_that_a_rule_of_the_store_removes_is_written_again(tmp_path):
    """The next publisher took the root for that of a run."""
    model, record = {"w": torch.arange(4.0)}, tmp_path / "stream.json"
    with checkpoint.Publisher(tmp_path) as publisher:
        publisher.publish(1, model).result()
        had = record.read_bytes()
        record.unlink()
        for step in (2, 3):
            publisher.publish(step, model).result()
        assert record.read_bytes() == had
    with checkpoint.Publisher(tmp_path) as publisher:
        publisher.publish(4, model).result()
    record.unlink()
    with checkpoint.Publisher(tmp_path) as publisher, pytest.raises(CheckpointError) as caught:
        publisher.publish(5, model)
    assert "whose stream.json something else has removed, remove the rest" in str(caught.value)
    shutil.rmtree(tmp_path)
    with checkpoint.Publisher(tmp_path) as publisher:
        publisher.publish(5, model)


@pytest.mark.parametrize("publisher_first", [True, False])
def test_a_run_and_a_publisher_of_one_program_refuse_each_others_root_while_it_is_empty(tmp_path, publisher_first):
    model = {"w": torch.arange(4.0)}
    with checkpoint.Manager(tmp_path, every=1) as run, checkpoint.Publisher(tmp_path) as publisher:
        calls = [lambda: run.restore({"model": model}), lambda: publisher.publish(1, model)]
        first, second = reversed(calls) if publisher_first else calls
        first()
        with pytest.raises(CheckpointError, match="a run and a publisher cannot share a root"):
            second()


def test_steps_before_those_that_a_job_was_taken_back_to_are_followed(tmp_path, weights, app, monkeypatch):
    """Also where that job has published nothing, and no step before it is left."""
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, keep=2, anchor_every=1) as publisher:
        for step in range(1, 6):
            publisher.publish(step, weights).result()
    assert follower.update().step == 5
    with checkpoint.Publisher(tmp_path, keep=2) as publisher, monkeypatch.context() as context:
        context.setattr(publisher._steps, "save", lambda *args, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publisher.publish(4, weights)
    for step in (3, 2):
        train(weights, step)
        with checkpoint.Publisher(tmp_path, keep=2) as publisher:
            publisher.publish(step, weights).result()
        assert is_step(follower, app, follower.update(), step) and same_bits(app, weights)
