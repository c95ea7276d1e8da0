"""A root that somebody has emptied, and begun again: weights are taken whole, or stay, and are never a mixture."""

import shutil

import pytest

from shardopt import checkpoint
from shardopt.checkpoint.run.root import Root
from shardopt.errors import CorruptionError
from tests.support.hosted import values
from tests.support.streams import files_of, flip, same_bits, zeros_like


@pytest.fixture
def app():
    return zeros_like(values(0))


@pytest.fixture
def follower(tmp_path, app):
    return checkpoint.Follower(tmp_path / "root", app)


def publish(path, *steps, seed=0):
    with checkpoint.Publisher(path / "root", durable=False, keep=None, anchor_every=3) as publisher:
        for step in steps:
            publisher.publish(step, values(step, seed)).result()


def begun_again(caplog):
    return [each.message for each in caplog.records if "was begun again" in each.message]


@pytest.mark.parametrize("ask", ["update", "poll"])
def test_an_earlier_step_is_taken(tmp_path, follower, app, caplog, ask):
    publish(tmp_path, 1, 2, 3, 4)
    follower.update()
    shutil.rmtree(tmp_path / "root")
    assert follower.update() is None and follower.poll() is None and same_bits(app, values(4))
    publish(tmp_path, 2, 3, seed=1)
    if ask == "poll":
        assert follower.poll() == 3 and same_bits(app, values(4))
    report = follower.update()
    assert (report.step, report.previous) == (3, 4) and same_bits(app, values(3, 1))
    (line,) = begun_again(caplog)
    assert line == f"{tmp_path}/root was begun again: step 3 is its newest now"
    assert follower.update() is None


@pytest.mark.parametrize("asked_for", [None, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_step_is_taken_and_whole_where_its_bits_are_others(tmp_path, follower, app, seed, asked_for):
    publish(tmp_path, 1, 2, 3)
    follower.update()
    shutil.rmtree(tmp_path / "root")
    publish(tmp_path, 3, seed=seed)
    assert follower.poll() == 3
    report = follower.update(asked_for)
    assert report.step == 3 and same_bits(app, values(3, seed)) and bool(report.changed) is (seed == 1)
    assert follower.poll() is None and follower.update() is None
    publish(tmp_path, 4, seed=seed)
    report = follower.update()
    assert report.step == 4 and same_bits(app, values(4, seed))


def test_a_root_of_many_branches_that_was_begun_again_is_taken_at_any_step(tmp_path, follower, app, caplog):
    """Its steps are of an earlier branch than that of the weights, so their numbers alone say nothing."""
    publish(tmp_path, 1, 2, 3)
    publish(tmp_path, 2)
    publish(tmp_path, 2, 3, 4)
    assert follower.update().step == 4 and follower._at.id.branch == 2
    shutil.rmtree(tmp_path / "root")
    for steps in ([1, 2, 3, 4, 5, 6], [7]):
        publish(tmp_path, *steps, seed=1)
        reports = [follower.update() for _ in range(3)]
        assert [each.step for each in reports if each is not None] == [steps[-1]]
        assert same_bits(app, values(steps[-1], 1))
    assert len(begun_again(caplog)) == 1


def test_a_listing_from_before_the_record_of_a_branch_leads_nobody_back(tmp_path, follower, app, monkeypatch, caplog):
    """A publisher takes steps 3 and 4 back, between the listing of a follower and its look at the steps."""
    publish(tmp_path, 1, 2, 3, 4)
    follower.update()
    ids, late = Root.ids, [True]

    def ids_before(self):
        found = ids(self)
        if late and self is follower._root:
            late.clear()
            publish(tmp_path, 3, seed=1)
            shutil.rmtree(tmp_path / "root" / "step-00000003-b1")  # as if it were not written yet
        return found

    monkeypatch.setattr(Root, "ids", ids_before)
    for _ in range(4):
        assert follower.update() is None and same_bits(app, values(4))
    assert not late and not begun_again(caplog)
    publish(tmp_path, 3, seed=2)
    assert follower.update().step == 3 and same_bits(app, values(3, 2)) and not begun_again(caplog)


def test_where_the_newest_step_is_damaged_the_one_before_is_taken(tmp_path, follower, app, caplog):
    publish(tmp_path, 1, 2, 3, 4)
    follower.update()
    shutil.rmtree(tmp_path / "root")
    publish(tmp_path, 1, 2, seed=1)
    for file in files_of(tmp_path / "root", 2):
        flip(file, file.stat().st_size // 2)
    assert follower.update().step == 1 and same_bits(app, values(1, 1))
    assert follower.update() is None
    publish(tmp_path, 3, seed=1)
    assert follower.update().step == 3 and same_bits(app, values(3, 1))
    assert len(begun_again(caplog)) == 1


@pytest.mark.parametrize("first", ["branch-00001.json", "stream.json"])
def test_a_follower_stays_where_it_is_while_the_root_is_emptied(tmp_path, follower, app, caplog, first):
    publish(tmp_path, 1, 2, 3)
    publish(tmp_path, 3)
    publish(tmp_path, 3, 4)
    follower.update()
    root = tmp_path / "root"
    for name in (first, "branch-00001.json", *sorted(path.name for path in root.iterdir())):
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        assert follower.update() is None and follower.poll() is None
    assert follower.step == 4 and same_bits(app, values(4)) and not begun_again(caplog)
    publish(tmp_path, 1, seed=1)
    assert follower.update().step == 1 and same_bits(app, values(1, 1))


@pytest.mark.parametrize("what", ["manifest.json", ""])
def test_a_step_that_is_lost_leads_nobody_back(tmp_path, follower, app, caplog, what):
    publish(tmp_path, 1, 2, 3)
    follower.update()
    lost = tmp_path / "root" / "step-00000003" / what
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    for _ in range(3):
        assert follower.poll() is None and follower.update() is None
    assert follower.step == 3 and same_bits(app, values(3)) and not begun_again(caplog)


def test_a_record_that_is_lost_begins_no_other_stream_and_one_that_is_damaged_is_named(tmp_path, follower, app, caplog):
    publish(tmp_path, 1, 2)
    follower.update()
    record = tmp_path / "root" / "stream.json"
    whole = record.read_bytes()
    record.unlink()
    assert follower.update() is None and follower.step == 2 and not begun_again(caplog)
    record.write_bytes(whole[:-9])
    with pytest.raises(CorruptionError, match=r"stream\.json"):
        follower.update()
    assert follower.step == 2 and same_bits(app, values(2))


def test_what_was_damaged_before_is_tried_again_afterwards(tmp_path, follower, app):
    publish(tmp_path, 1, 2, 3)
    for file in files_of(tmp_path / "root", 3):
        flip(file, file.stat().st_size // 2)
    assert follower.update().step == 2
    shutil.rmtree(tmp_path / "root")
    publish(tmp_path, 1, seed=1)
    assert follower.update().step == 1
    publish(tmp_path, 2, 3, seed=1)
    assert follower.update().step == 3 and same_bits(app, values(3, 1))
