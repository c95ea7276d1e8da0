"""Damage and failures: the weights are of an older step and whole, or refused by name until an update is whole."""

import shutil

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.stream import changes, staged
from shardopt.checkpoint.stream import follower as follower_module
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, Problem, StateError
from tests.harness import Fault
from tests.harness.faults import watched
from tests.support.streams import copied, files_of, flip, is_step, place_of, same_bits, train, zeros_like

ALL_MEMORY = 1 << 30


@pytest.fixture
def weights():
    return {
        "wide": torch.randn(300, 500),
        "bf16": torch.randn(300_000).bfloat16(),
        "w": torch.randn(99),
    }


@pytest.fixture
def app(weights):
    return zeros_like(weights)


def publish_changes(root, weights, *steps):
    """Publishes the weights as they are, and then steps of which the second and those after it are deltas."""
    first, *others = steps
    kept = {}
    with checkpoint.Publisher(root, durable=False, keep=None) as publisher:
        publisher.publish(first, weights).result()
        kept[first] = copied(weights)
        for step in others:
            train(weights, step)
            publisher.publish(step, weights).result()
            kept[step] = copied(weights)
    return kept


def publish(root, weights, *steps, **options):
    """Publishes steps with what a publisher keeps from one to the next; returns the weights of each."""
    kept = {}
    with checkpoint.Publisher(root, durable=False, keep=None, **options) as publisher:
        for step in steps:
            train(weights, step)
            publisher.publish(step, weights).result()
            kept[step] = copied(weights)
    return kept


def entry_of(root, step, key):
    """The data file of a step that has an entry, and where it begins and ends."""
    for path in files_of(root, step):
        try:
            return path, *place_of(path, key)
        except KeyError:
            continue
    raise KeyError(key)


@pytest.mark.parametrize("key", ["__delta_index__.wide", "__delta__.wide", "__delta__.bf16"])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("memory_bytes", [0, ALL_MEMORY])
def test_a_flipped_bit_of_a_delta_is_never_taken(tmp_path, weights, app, key, where, memory_bytes):
    follower = checkpoint.Follower(tmp_path, app, memory_bytes=memory_bytes)
    with checkpoint.Publisher(tmp_path, durable=False, keep=None, anchor_every=3) as publisher:
        kept = {}
        for step in (1, 2, 3, 4):
            train(weights, step)
            publisher.publish(step, weights).result()
            kept[step] = copied(weights)
            if step == 2:
                path, begin, end = entry_of(tmp_path, 2, key)
                flip(path, begin + int((end - begin) * where))
            follower.update()  # what was read in the pause has torn the weights, which the older step has mended
            assert follower.step in {1: (1,), 2: (1,), 3: (1, 3), 4: (4,)}[step]  # the anchor leads on
            assert same_bits(app, kept[follower.step])


@pytest.mark.parametrize("where", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("memory_bytes", [0, ALL_MEMORY])
def test_a_flipped_bit_of_a_delta_that_is_read_in_windows_is_never_taken(tmp_path, where, memory_bytes):
    weights = {"long": torch.zeros(65 * SEGMENT_BYTES // 2, dtype=torch.bfloat16)}  # one segment more than a window
    app = zeros_like(weights)
    follower = checkpoint.Follower(tmp_path, app, memory_bytes=memory_bytes)
    kept = publish(tmp_path, weights, 1)
    follower.update()
    kept |= publish_changes(tmp_path, weights, 2, 3)
    path, begin, end = entry_of(tmp_path, 3, "__delta__.long")
    flip(path, begin + int((end - begin) * where))
    follower.update()
    assert follower.step == 2 and same_bits(app, kept[2])


def test_a_flipped_bit_of_the_base_keeps_out_those_that_join_alone(tmp_path, weights, app):
    follower = checkpoint.Follower(tmp_path, app)
    kept = publish(tmp_path, weights, 1)
    follower.update()
    late = zeros_like(weights)
    with checkpoint.Publisher(tmp_path, durable=False, keep=None, anchor_every=2) as publisher:
        for step in (2, 3):
            train(weights, step)
            publisher.publish(step, weights).result()
        path, begin, end = entry_of(tmp_path, 2, "wide")
        flip(path, (begin + end) // 2)
        joined = checkpoint.Follower(tmp_path, late)
        assert joined.update().step == 1 and same_bits(late, kept[1])
        assert follower.update() is None or follower.step == 3
        train(weights, 4)
        publisher.publish(4, weights).result()  # an anchor
        for each, its in ((follower, app), (joined, late)):
            assert is_step(each, its, each.update(), 4) and same_bits(its, weights)


@pytest.mark.parametrize("what", ["manifest", "data", "directory"])
def test_what_is_gone_leaves_the_older_step(tmp_path, weights, app, what):
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False, keep=None) as publisher:
        for step in (1, 2):
            train(weights, step)
            publisher.publish(step, weights).result()
            if step == 1:
                follower.update()
                before = copied(weights)
        place = tmp_path / "step-00000002"
        if what == "directory":
            shutil.rmtree(place)
        for path in [] if what == "directory" else place.glob("manifest*" if what == "manifest" else "*.safetensors"):
            path.unlink()
        assert follower.update() is None
        assert follower.step == 1 and same_bits(app, before)


def test_a_publisher_fails_once_at_most_where_a_file_is_gone_that_only_followers_read(tmp_path, weights, app):
    """That which leads to an anchor from the step before it, which later steps refer to as well."""
    with checkpoint.Publisher(tmp_path, durable=False, keep=None, anchor_every=3) as publisher:
        for step in (1, 2, 3, 4):
            train(weights, step)
            publisher.publish(step, weights).result()
        (bridge,) = (tmp_path / "step-00000004").glob("*-1.safetensors")
        bridge.unlink()
        train(weights, 5)
        with pytest.raises(CheckpointError, match=bridge.name):
            publisher.publish(5, weights).result()
        train(weights, 6)
        publisher.publish(6, weights).result()
    follower = checkpoint.Follower(tmp_path, app)
    assert is_step(follower, app, follower.update(), 6) and same_bits(app, weights)


def test_a_damaged_manifest_leaves_the_older_step(tmp_path, weights, app):
    follower = checkpoint.Follower(tmp_path, app)
    kept = publish(tmp_path, weights, 1)
    follower.update()
    publish(tmp_path, weights, 2)
    flip(tmp_path / "step-00000002" / "manifest.json", 99)
    assert follower.update() is None and follower.step == 1 and same_bits(app, kept[1])
    kept = publish(tmp_path, weights, 3)
    assert follower.update().step == 3 and same_bits(app, kept[3])


def test_a_disk_that_comes_back_is_read_again(tmp_path, weights, app):
    """A read that fails says nothing about what is stored: the same step is tried in the next update."""
    follower = checkpoint.Follower(tmp_path, app)
    kept = publish(tmp_path, weights, 1, 2)
    with watched([Fault(0, "os:preadv", action="EIO", times=1000)], []) as watch:
        assert follower.update() is None
    assert watch.struck and follower.step is None
    assert is_step(follower, app, follower.update(), 2) and same_bits(app, kept[2])


def test_a_given_step_that_is_damaged_is_an_error(tmp_path, weights, app):
    follower = checkpoint.Follower(tmp_path, app)
    kept = publish(tmp_path, weights, 1, 2)
    path, begin, _ = entry_of(tmp_path, 2, "__delta__.wide")
    flip(path, begin)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="fail their checksum"):
            follower.update(2)
        assert follower.step is None
        assert follower.update(1) is None or same_bits(app, kept[1])
        follower = checkpoint.Follower(tmp_path, app)
    with pytest.raises(CheckpointNotFoundError, match="found no such step; required step 7"):
        follower.update(7)


def test_a_given_step_is_damaged_after_it_was_passed_over(tmp_path, weights, app):
    follower = checkpoint.Follower(tmp_path, app)
    publish(tmp_path, weights, 1, 2)
    path, begin, _ = entry_of(tmp_path, 2, "__delta__.wide")
    flip(path, begin)
    assert follower.update().step == 1
    with pytest.raises(CorruptionError):
        follower.update(2)
    assert follower.step == 1


@pytest.mark.parametrize("memory_bytes", [0, ALL_MEMORY])
@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_in_the_middle_of_applying_tears_until_an_update_is_whole(
    tmp_path, weights, app, memory_bytes, at, monkeypatch
):
    follower = checkpoint.Follower(tmp_path, app, memory_bytes=memory_bytes)
    publish(tmp_path, weights, 1)
    follower.update()
    with checkpoint.Publisher(tmp_path, durable=False, keep=None) as publisher:
        publisher.publish(2, weights).result()
        follower.update()
        train(weights, 3)
        publisher.publish(3, weights).result()
        apply, calls = changes.Scatter.apply, []

        def failing(self):
            calls.append(1)
            if len(calls) == at:
                raise RuntimeError("the device fell off")
            apply(self)

        with monkeypatch.context() as patched:
            patched.setattr(changes.Scatter, "apply", failing)
            with pytest.raises(RuntimeError, match="fell off"):
                follower.update()
        assert follower.step is None
        with pytest.raises(StateError, match="an update was interrupted") as raised, follower.serving():
            pass
        assert raised.value.code == "following"
        assert follower.poll() == 3
        report = follower.update()
        assert report.whole == report.parts
        assert is_step(follower, app, report, 3) and same_bits(app, weights)
        train(weights, 4)
        publisher.publish(4, weights).result()
        assert follower.update().whole <= 1 and same_bits(app, weights)


def test_torn_weights_are_mended_by_an_older_step_where_the_newest_is_damaged(tmp_path, weights, app, monkeypatch):
    follower = checkpoint.Follower(tmp_path, app)
    kept = publish(tmp_path, weights, 1, 2)
    follower.update()
    kept |= publish(tmp_path, weights, 3)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(staged.Staged, "apply", _interrupted)
        follower.update()
    for path in files_of(tmp_path, 3):
        path.unlink()
    assert follower.update().step == 2 and same_bits(app, kept[2])
    with follower.serving() as step:
        assert step == 2


def _interrupted(self):
    raise KeyboardInterrupt


def test_torn_weights_with_nothing_whole_left_are_an_error(tmp_path, weights, app, monkeypatch):
    follower = checkpoint.Follower(tmp_path, app)
    publish(tmp_path, weights, 1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(staged.Staged, "apply", _interrupted)
        follower.update()
    for path in files_of(tmp_path, 1):
        path.unlink()
    for _ in range(2):
        with pytest.raises(CorruptionError, match="no such file"):
            follower.update()
        assert follower.step is None
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointNotFoundError, match="found no step; required one to replace weights that are torn"):
        follower.update()
    kept = publish(tmp_path, weights, 2)
    assert follower.update().step == 2 and same_bits(app, kept[2])


@pytest.mark.parametrize("operation", ["os:preadv", "os:open"])
def test_no_failing_read_leaves_a_mixture(tmp_path, weights, app, operation):
    """Each call that reads fails once: the weights are whole after it, or refused, and the next update is whole."""
    kept = publish(tmp_path, weights, 1)
    follower = checkpoint.Follower(tmp_path, app, memory_bytes=100 << 10)
    follower.update()
    step, struck = 1, True
    with checkpoint.Publisher(tmp_path, durable=False, keep=3) as publisher:
        publisher.publish(2, weights).result()
        follower.update()
        for at in range(1, 40):
            step = at + 2
            train(weights, step)
            publisher.publish(step, weights).result()
            before, kept = follower.step, copied(app)
            with watched([Fault(0, operation, at, "EIO")], []) as watch:
                try:
                    follower.update()
                except CheckpointError:
                    assert follower.step is None or same_bits(app, kept)
            struck = watch.struck
            assert follower.step in (None, before, step)
            assert follower.step != step or same_bits(app, weights)
            assert follower.step != before or same_bits(app, kept)
            if follower.step != step:
                assert follower.update().step == step and same_bits(app, weights)
            if not struck:
                break
    assert not struck and step > 4


def test_a_step_whose_manifest_is_not_seen_at_once_is_taken_later(tmp_path, weights, app, monkeypatch):
    publish(tmp_path, weights, 1)
    follower = checkpoint.Follower(tmp_path, app)
    follower.update()
    kept = publish(tmp_path, weights, 2)
    with monkeypatch.context() as patch:
        patch.setattr(follower_module, "open_source", not_seen)
        assert follower.update() is None
    assert follower.update() is not None and follower.step == 2
    assert same_bits(app, kept[2])


def not_seen(storage):
    raise CheckpointNotFoundError("there is no checkpoint", [Problem(storage.url, "none", "one", "wait")])
