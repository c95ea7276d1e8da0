"""Publishers and followers in one process: lives of steps, and what an update reads."""

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.run.root import Root
from tests.support.streams import (
    copied,
    delta_bytes,
    full_load,
    is_step,
    reads_counted,
    same_bits,
    train,
    zeros_like,
)


def new_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(300, 500, generator=generator),
        "bf16": torch.randn(70_000, generator=generator).bfloat16(),
        "small": torch.randn(7, 5, generator=generator),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def weights():
    return new_weights()


@pytest.fixture
def app(weights):
    return zeros_like(weights)


@pytest.fixture
def publisher(tmp_path):
    with checkpoint.Publisher(tmp_path, durable=False, keep=None, anchor_every=4) as made:
        yield made


@pytest.fixture
def follower(tmp_path, app):
    return checkpoint.Follower(tmp_path, app)


def publish(publisher, weights, *steps):
    for step in steps:
        train(weights, step)
        publisher.publish(step, weights).result()


def test_each_step_is_taken(publisher, follower, weights, app):
    for step in range(1, 11):  # with two anchors
        publish(publisher, weights, step)
        report = follower.update()
        assert is_step(follower, app, report, step) and same_bits(app, weights)
        assert report.previous == (step - 1 or None)
        assert step == 1 or report.whole <= 3  # small tensors have no deltas


def test_nothing_new_is_none(publisher, follower, weights, app):
    assert follower.update() is None and follower.poll() is None
    publish(publisher, weights, 1)
    assert follower.poll() == 1 and follower.step is None
    assert is_step(follower, app, follower.update(), 1)
    assert follower.update() is None and follower.poll() is None and follower.step == 1


@pytest.mark.parametrize("missed", [[2], [2, 3], [2, 3, 4]])
def test_steps_that_were_missed_come_by_their_deltas(tmp_path, publisher, follower, weights, app, missed):
    publish(publisher, weights, 1)
    follower.update()
    publish(publisher, weights, *missed)
    report = follower.update()
    assert is_step(follower, app, report, missed[-1]) and same_bits(app, weights)
    assert report.bytes_read < sum(each.nbytes for each in weights.values()) / 4


def test_a_bridge_leads_over_an_anchor(publisher, follower, weights, app):
    publish(publisher, weights, 1, 2, 3, 4)
    assert follower.update().step == 4
    publish(publisher, weights, 5, 6)
    report = follower.update()
    assert is_step(follower, app, report, 6) and same_bits(app, weights)
    assert report.bytes_read < sum(each.nbytes for each in weights.values()) / 4


def test_two_anchors_that_were_missed_are_read_whole(publisher, follower, weights, app):
    publish(publisher, weights, 1)
    follower.update()
    publish(publisher, weights, *range(2, 12))
    report = follower.update()
    assert is_step(follower, app, report, 11) and same_bits(app, weights)
    assert report.whole == report.parts


def test_one_that_joins_late_reads_the_newest_step_alone(tmp_path, publisher, weights, app):
    publish(publisher, weights, 1, 2, 3)
    follower = checkpoint.Follower(tmp_path, app)
    report = follower.update()
    assert is_step(follower, app, report, 3) and same_bits(app, weights)
    assert report.previous is None


def test_two_followers_are_at_steps_of_their_own(tmp_path, publisher, weights):
    apps = [zeros_like(weights), zeros_like(weights)]
    quick, slow = (checkpoint.Follower(tmp_path, app) for app in apps)
    for step in range(1, 9):
        publish(publisher, weights, step)
        assert is_step(quick, apps[0], quick.update(), step)
        if step % 3 == 0:
            assert is_step(slow, apps[1], slow.update(), step)
    assert (quick.step, slow.step) == (8, 6)


def test_an_older_step_can_be_asked_for(publisher, follower, weights, app):
    publish(publisher, weights, 1, 2, 3)
    for step in (3, 1, 2):
        assert is_step(follower, app, follower.update(step), step)
        assert follower.update(step) is None
    assert is_step(follower, app, follower.update(), 3) and same_bits(app, weights)


def test_a_step_that_goes_back_to_the_bits_of_an_earlier_one(publisher, follower, weights, app):
    before = copied(weights)
    publisher.publish(1, weights).result()
    publish(publisher, weights, 2)
    assert follower.update().step == 2
    publisher.publish(3, before).result()
    assert is_step(follower, app, follower.update(), 3) and same_bits(app, before)


def test_what_did_not_change_is_not_read(publisher, follower, weights, app):
    publisher.publish(1, weights).result()
    follower.update()
    publisher.publish(2, weights).result()
    with reads_counted() as counted:
        report = follower.update()
    assert is_step(follower, app, report, 2)
    assert counted == [] and report.bytes_read == 0


def test_the_bytes_of_deltas_are_read_once(tmp_path):
    """Of many tensors, of which some are longer than what is read of a delta at a time."""
    weights = {f"layer{i}": torch.randn(120, 200) for i in range(60)} | {"table": torch.randn(5 << 20)}
    app = zeros_like(weights)
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
        follower.update()
        for step in (2, 3):
            train(weights, step, share=0.2)
            publisher.publish(step, weights).result()
    with reads_counted() as counted:
        report = follower.update()
    assert is_step(follower, app, report, 3) and same_bits(app, weights)
    assert report.whole == 0
    assert sum(counted) == report.bytes_read == delta_bytes(tmp_path, 2) + delta_bytes(tmp_path, 3)
    assert len(counted) < 300


@pytest.mark.parametrize("memory_bytes", [0, 4 << 10, 300 << 10, 1 << 30])
def test_whatever_memory_there_is(tmp_path, publisher, weights, app, memory_bytes):
    follower = checkpoint.Follower(tmp_path, app, memory_bytes=memory_bytes)
    for steps in ([1], [2], [3, 4], [5]):
        publish(publisher, weights, *steps)
        assert is_step(follower, app, follower.update(), steps[-1]) and same_bits(app, weights)


def test_large_boxes_are_read_in_windows(tmp_path):
    weights = {"x": torch.arange(65 * SEGMENT_BYTES // 2, dtype=torch.int16)}  # one segment more than a window
    for memory_bytes in (0, 1 << 30):
        root, app = tmp_path / str(memory_bytes), zeros_like(weights)
        follower = checkpoint.Follower(root, app, memory_bytes=memory_bytes)
        with checkpoint.Publisher(root, durable=False) as publisher:
            publisher.publish(1, weights).result()
            follower.update()
            for places in ([0, -1], [64 * SEGMENT_BYTES // 2 - 1, 64 * SEGMENT_BYTES // 2]):
                weights["x"][places] += 1
            train(weights, 5, share=0.05)
            publisher.publish(2, weights).result()
            report = follower.update()
        assert report.whole == 0 and is_step(follower, app, report, 2) and same_bits(app, weights)


@pytest.mark.parametrize("through", ["element", "data", "numpy"])
def test_a_weight_changed_by_hand_is_noticed(publisher, follower, weights, app, through, caplog):
    publish(publisher, weights, 1)
    follower.update()
    where = {"element": app["wide"], "data": app["wide"].data, "numpy": app["wide"].numpy()}[through]
    where[17, 3] = 1e6
    publish(publisher, weights, 2)
    report = follower.update()
    assert is_step(follower, app, report, 2) and same_bits(app, weights)
    assert "wide was changed since the last update" in caplog.text


def test_memory_that_was_replaced_is_filled(tmp_path, publisher, weights):
    model = torch.nn.Linear(500, 40)
    weights = dict(model.state_dict())
    app = torch.nn.Linear(500, 40)
    follower = checkpoint.Follower(tmp_path, app)
    publish(publisher, weights, 1)
    follower.update()
    app.weight = torch.nn.Parameter(torch.zeros_like(app.weight))
    publish(publisher, weights, 2)
    assert is_step(follower, app, follower.update(), 2)


def test_files_go_as_retention_says_while_a_follower_lags(tmp_path, weights, app):
    """What is gone is passed over, and what the follower gets is a whole step."""
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False, keep=2, anchor_every=3) as publisher:
        for step in range(1, 14):
            publish(publisher, weights, step)
            if step % 4 == 1:
                assert is_step(follower, app, follower.update(), step) and same_bits(app, weights)
    assert len(list(tmp_path.glob("step-*/manifest.json"))) == 2


def test_a_step_removed_after_it_was_found_is_passed_over(tmp_path, publisher, follower, weights, app, monkeypatch):
    """As by the retention of a publisher elsewhere, between the look and the read; a newer one is there then."""
    publish(publisher, weights, 1)
    follower.update()
    publish(publisher, weights, 2)
    look, removed = type(follower)._update, []

    def update_late(self, ranks, found, url, begin):
        if not removed:
            removed.append(found)
            publish(publisher, weights, 3)
            for file in (tmp_path / found.id.name).iterdir():
                file.rename(tmp_path / f"gone-{file.name}") if file.name == "manifest.json" else None
        return look(self, ranks, found, url, begin)

    monkeypatch.setattr(type(follower), "_update", update_late)
    assert is_step(follower, app, follower.update(), 3) and same_bits(app, weights)


def test_a_step_that_is_committed_during_a_look_is_found(tmp_path, publisher, follower, weights, app, monkeypatch):
    """And the one before it removed in the same moment: for a follower that joins there would be no step at all."""
    publish(publisher, weights, 1, 2)
    is_committed, asked = Root.is_committed, []

    def ask_early(self, id):
        asked.append(id.step)
        if asked == [2]:
            (tmp_path / "step-00000001" / "manifest.json").rename(tmp_path / "gone")
            return False
        return is_committed(self, id)

    monkeypatch.setattr(Root, "is_committed", ask_early)
    assert is_step(follower, app, follower.update(), 2) and same_bits(app, weights)


def test_a_publisher_that_starts_again_is_followed(tmp_path, weights, app):
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publish(publisher, weights, 1, 2)
        follower.update()
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publish(publisher, weights, 3)
        assert is_step(follower, app, follower.update(), 3)
        publish(publisher, weights, 4)
        report = follower.update()
        assert is_step(follower, app, report, 4) and report.whole <= 3


@pytest.mark.parametrize(
    ("before", "after"), [([1, 2, 3], [2, 3]), ([0, 1, 2], [0, 1]), ([4, 5], [0, 1]), ([0], [0, 1])]
)
def test_steps_that_were_taken_back_are_replaced(tmp_path, weights, app, before, after):
    late = zeros_like(weights)
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False, keep=None) as publisher:
        publish(publisher, weights, *before)
    follower.update()
    other = new_weights(1)
    with checkpoint.Publisher(tmp_path, durable=False, keep=None) as publisher:
        for step in after:
            publish(publisher, other, step)
            joined = checkpoint.Follower(tmp_path, late)
            assert is_step(joined, late, joined.update(), step) and same_bits(late, other)
            assert is_step(follower, app, follower.update(), step) and same_bits(app, other)


def test_each_published_step_is_a_checkpoint_like_others(tmp_path, publisher, weights, app):
    kept = {}
    for step in range(1, 7):
        publish(publisher, weights, step)
        kept[step] = copied(weights)
    for step, expected in kept.items():
        url = f"{tmp_path}/step-{step:08d}"
        checkpoint.verify(url).raise_if_damaged()
        assert same_bits(full_load(url, app), expected)


def test_weights_are_those_at_the_call(publisher, follower, weights, app):
    publish(publisher, weights, 1)
    train(weights, 2)
    expected = copied(weights)
    pending = publisher.publish(2, weights)
    for each in weights.values():
        each.view(-1)[:3] = 77
    pending.result()
    follower.update()
    assert same_bits(app, expected)


def test_gradients_through_weights_that_were_updated_are_refused(publisher, tmp_path):
    model, weights = torch.nn.Linear(300, 200), copied(torch.nn.Linear(300, 200).state_dict())
    follower = checkpoint.Follower(tmp_path, model)
    publish(publisher, weights, 1)
    follower.update()
    loss = model(torch.ones(5, 300, requires_grad=True)).sum()
    weights["weight"][3, 5] += 1  # which a delta sets past torch
    publisher.publish(2, weights).result()
    assert follower.update().whole == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_a_report_names_what_has_changed_and_nothing_else(tmp_path, memory_bytes):
    weights = {name: torch.randn(300, 200) for name in ("d", "a", "c", "b")} | {"small": torch.zeros(7)}
    app = zeros_like(weights) | {"fused": torch.zeros(600, 200)}
    app["d"], app["a"] = app["fused"][:300], app["fused"][300:]
    del app["fused"]
    follower = checkpoint.Follower(tmp_path, app, memory_bytes=memory_bytes)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        for step, names in enumerate([["d", "a", "c", "b", "small"], ["a"], [], ["d", "b", "small"]]):
            before = copied(app)
            train({name: weights[name] for name in names}, step)
            publisher.publish(step, weights).result()
            report = follower.update()
            assert report.changed == tuple(names)
            assert all(torch.equal(app[name], before[name]) for name in app.keys() - report.changed)
            assert same_bits(app, weights)
        torch.nn.init.zeros_(app["c"])  # by another hand
        publisher.publish(4, weights).result()
        assert follower.update().changed == ("c",) and same_bits(app, weights)
