"""A run that is taken back to an earlier step: what is part of it, what is abandoned, and that nothing is lost."""

import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import seal, unpack_record
from shardopt.checkpoint.run import keeper
from shardopt.checkpoint.run.branches import (
    Branch,
    Branches,
    CheckpointId,
    branches_of,
    by_numbers,
    decode_branch,
    parse_id,
    read_records,
)
from shardopt.checkpoint.run.listing import list_run
from shardopt.checkpoint.run.root import Root, run_at
from shardopt.checkpoint.run.shares import tiers_at
from shardopt.checkpoint.storage import LocalStorage
from shardopt.checkpoint.stream.root import StreamRoot
from shardopt.cli import main
from shardopt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptionError,
    MismatchError,
    OptionError,
)
from tests.harness import run_ranks

# What branches are, without a disk.

SERIES = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 3)),
        st.tuples(st.just("back"), st.integers(0, 20), st.integers(0, 5), st.sampled_from(["abandon", "remove"])),
    ),
    max_size=25,
)


@given(SERIES)
def test_they_are_what_a_list_of_all_that_was_saved_says(series):
    branches = Branches()
    of_branch = {0: []}  # by branch, what a run on it has: places in the order of steps
    removed, step = set(), 0
    for what, *arguments in series:
        if what == "save":
            step += arguments[0]
            of_branch[branches.current].append(branches.id_of(step))
            removed.discard(branches.id_of(step))
            continue
        number, branch, newer = arguments
        there = [place for place in of_branch.get(branch, []) if place not in removed]
        if not there:
            continue
        target = there[number % len(there)]
        record = Branch(branches.current + 1, branch, target.step, newer)
        branches = branches_of([record, *branches.values()])
        of_branch[record.number] = [place for place in of_branch[branch] if place.step <= target.step]
        if newer == "remove":
            removed |= {place for place in of_branch[branch] if place.step > target.step}
        step = target.step
    everything = set(itertools.chain.from_iterable(of_branch.values()))
    for branch, places in of_branch.items():
        assert {place for place in everything if branches.has(place, branch)} == set(places)
        assert all(branches.id_of(place.step, branch) == place for place in places)
    run = set(of_branch[branches.current])
    assert {place for place in everything if branches.is_removed(place)} == removed - run
    assert everything == {parse_id(place.name) for place in everything}


def test_names_of_directories():
    assert CheckpointId(500).name == "step-00000500" and CheckpointId(123_456_789, 12).name == "step-123456789-b12"
    for other in ("step-5", "step-00000500-b0", "step-00000500-b01", "step-000000500", "step-00000500-b", "x"):
        assert parse_id(other) is None
    names = ["step-99999999", "step-100000000", "step-00000009-b1", "a2", "a10", "b", "2", "10"]
    assert sorted(names, key=by_numbers) == [
        "2",
        "10",
        "a2",
        "a10",
        "b",
        "step-00000009-b1",
        "step-99999999",
        "step-100000000",
    ]


WHOLE = Branch(1, 0, 200)


def written_with_an_error(monkeypatch):
    """Has the next record of a branch be written, and an error be raised all the same, as by a disk that is slow."""
    add, failed = Root.add, []

    def add_and_fail(self, record):
        add(self, record)
        if not failed:
            failed.append(record)
            raise CheckpointError("the disk is slow")

    monkeypatch.setattr(Root, "add", add_and_fail)


def test_a_record_that_is_there_though_writing_it_failed_counts_for_what_is_saved_next(tmp_path, monkeypatch):
    with checkpoint.Manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, app_of(step))
        written_with_an_error(monkeypatch)
        with pytest.raises(CheckpointError, match="the disk is slow"):
            manager.restore(app_of(), step=1, newer="abandon")
        manager.save(2, app_of(20))
    with checkpoint.Manager(tmp_path) as manager:
        app = app_of()
        assert manager.restore(app) == 2 and app["value"] == 20


def test_a_record_that_is_there_though_writing_it_failed_counts_for_what_is_published_next(tmp_path, monkeypatch):
    weights = {"w": torch.zeros(3)}
    with checkpoint.Publisher(tmp_path) as publisher:
        for step in (1, 2):
            publisher.publish(step, weights)
    follower = checkpoint.Follower(tmp_path, {"w": torch.ones(3)})
    follower.update()
    written_with_an_error(monkeypatch)
    with checkpoint.Publisher(tmp_path) as publisher:
        with pytest.raises(CheckpointError, match="the disk is slow"):
            publisher.publish(2, weights)
        publisher.publish(3, weights).result()
        assert follower.update().step == 3


def test_a_branch_may_begin_before_step_0():
    record = Branch(1, 0, -1, "remove")
    assert decode_branch(unpack_record(record.pack(), ""), "") == record
    assert branches_of([record]).id_of(0) == (0, 1) and branches_of([record]).is_removed(CheckpointId(0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        WHOLE.pack()[:-1],
        WHOLE.pack().replace(b"200", b"300"),
        seal(b"{"),
        seal(b'{"format":"shardopt-branch","branch":1,"of":1,"from_step":2,"beyond":"remove"'),
        seal(b'{"format":"shardopt-branch","branch":1,"of":0,"from_step":-2,"beyond":"remove"'),
        seal(b'{"format":"shardopt-branch","branch":1,"of":0,"from_step":2,"beyond":"keep"'),
        seal(b'{"format":"shardopt-branch","branch":1,"of":0,"from_step":"2","beyond":"remove"'),
        seal(b'{"format":"shardopt-branch","branch":2,"of":0,"from_step":2,"beyond":"remove"'),
        seal(b'{"format":"shardopt","branch":1,"of":0,"from_step":2,"beyond":"remove"'),
        seal(b'{"format":"shardopt-branch","branch":1'),
    ],
)
def test_a_record_that_is_damaged_is_refused(tmp_path, data):
    (tmp_path / "branch-00001.json").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"branch-00001\.json"):
        read_records(LocalStorage(str(tmp_path)), ["branch-00001.json"], {})
    with pytest.raises(CorruptionError, match=r"branch-00001\.json"):
        checkpoint.Manager(tmp_path).restore(app_of())


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("branch-00001.json", lambda storage: read_records(storage, ["branch-00001.json"], {})),
        ("tiers.json", tiers_at),
        ("run.json", run_at),
    ],
    ids=["branch", "tiers", "run"],
)
def test_a_record_that_is_no_small_file_is_refused_unread(tmp_path, name, read):
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptionError, match="more than 1048576 bytes"):
        read(LocalStorage(str(tmp_path)))


def test_a_record_that_is_missing_is_refused(tmp_path):
    (tmp_path / "branch-00002.json").write_bytes(Branch(2, 1, 5).pack())
    with pytest.raises(CorruptionError, match="no record of branch 1 of 2"):
        checkpoint.Manager(tmp_path).steps()


def test_a_copy_of_steps_without_the_records_of_their_branches_is_refused(tmp_path, capsys):
    root, copy, mirror = (tmp_path / name for name in ("run", "copy", "mirror"))
    three_steps(root)
    with checkpoint.Manager(root) as manager:
        restored(manager, step=100)
        save(manager, 400)
    for name in directories(root):
        shutil.copytree(root / name, copy / name)
    manager = checkpoint.Manager(copy)
    reads = [
        lambda: manager.restore(app_of()),
        lambda: manager.restore(app_of(), step=100),
        lambda: manager.save(1, app_of()),
        manager.steps,
        manager.abandoned_steps,
        lambda: manager.path(400),
        lambda: list_run(copy),
        StreamRoot(LocalStorage(str(copy))).newest,
    ]
    said = r"no record of branch 1 of 1.* copy branch-00001\.json from .*-b1 .*; or move step-00000400-b1 away, "
    for read in reads:
        with pytest.raises(CorruptionError, match=said):
            read()
    assert directories(copy) == directories(root)  # nor is there a record of another branch 1
    for verb in ("ls", "prune --keep-last 1", "follow --count 1", "show"):
        assert main([*verb.split(), str(copy)]) == 1 and "branch-00001.json" in capsys.readouterr().err
    shutil.move(copy / "step-00000400-b1", tmp_path / "away")
    assert restored(checkpoint.Manager(copy)) == (300, 300)
    shutil.move(tmp_path / "away", copy / "step-00000400-b1")
    shutil.copy(root / "branch-00001.json", copy)
    assert restored(manager) == restored(checkpoint.Manager(copy)) == (400, 400)
    # The mirror of a root, or the root of a mirror, brings the record.
    for first, second in ((root, mirror), (mirror, root)):
        with checkpoint.Manager(first, destinations=[checkpoint.Mirror(second)]) as manager:
            assert restored(manager) == (400, 400)
        (second / "branch-00001.json").unlink()


def test_a_root_without_the_records_of_the_branches_that_tiers_have_steps_of_is_refused(tmp_path):
    root, options = tmp_path / "run", {"destinations": [checkpoint.Tier(str(tmp_path / "fast"), every=1)], "every": 100}
    with checkpoint.Manager(root, **options) as manager:
        for step in (100, 200):
            save(manager, step)
        manager.wait()
        restored(manager, step=100)
        save(manager, 101)
        manager.wait()
    (root / "branch-00001.json").unlink()  # as by a backup of the root from before
    with (
        checkpoint.Manager(root, **options) as manager,
        pytest.raises(CorruptionError, match=r"no record of branch 1.*step-00000101-b1"),
    ):
        manager.restore(app_of())


def test_a_branch_that_begins_while_the_root_is_listed_is_seen(tmp_path, monkeypatch):
    three_steps(tmp_path)
    manager, names, listed = checkpoint.Manager(tmp_path), LocalStorage.names, []

    def names_without_record(self):
        found = names(self)
        if self.url == str(tmp_path) and not listed:
            listed.append(found)
            with checkpoint.Manager(tmp_path) as other:
                restored(other, step=100)
                save(other, 400)
            return [name for name in names(self) if not name.startswith("branch-")]
        return found

    monkeypatch.setattr(LocalStorage, "names", names_without_record)
    assert manager.steps() == [100, 400]


def away_from(path, method):
    def fails_there(self, *args):
        if self.url == str(path):
            raise CheckpointError("it is away")
        return method(self, *args)

    return fails_there


def test_the_record_of_a_branch_that_began_while_the_mirror_was_away_comes_to_it_with_the_next_copy(
    tmp_path, monkeypatch
):
    root, mirror = tmp_path / "run", tmp_path / "mirror"
    with checkpoint.Manager(root, destinations=[checkpoint.Mirror(mirror)]) as manager:
        save(manager, 100)
        save(manager, 200)
        manager.wait()
        for name, look in (
            ("add", lambda: restored(manager, step=100)),
            ("ids", lambda: manager._run.agree_on_branches(needs_copies=False)),
        ):
            with monkeypatch.context() as patched, suppress(CheckpointError):
                patched.setattr(Root, name, away_from(mirror, getattr(Root, name)))
                look()
        assert not (mirror / "branch-00001.json").exists()
        save(manager, 300)
    assert restored(checkpoint.Manager(mirror)) == (300, 300)


# What a Manager makes of them.


def app_of(value=0.0):
    return {"w": torch.full((5,), float(value)), "step": 0, "value": float(value)}


def save(manager, step, value=None, **options):
    app = app_of(step if value is None else value)
    app["step"] = step
    manager.save(step, app, **options)


def restored(manager, **options):
    app = app_of()
    assert manager.restore(app, **options) == app["step"]
    assert app["w"].eq(app["value"]).all()
    return app["step"], app["value"]


def directories(root):
    return sorted(each.name for each in Path(root).glob("*") if each.is_dir())


def three_steps(root, **rules):
    with checkpoint.Manager(root, **rules) as manager:
        for step in (100, 200, 300):
            save(manager, step)


@pytest.mark.parametrize("stage", [None, "now"])
@pytest.mark.parametrize("newer", ["abandon", "remove"])
def test_a_run_resumes_from_an_earlier_step(tmp_path, newer, stage):
    three_steps(tmp_path)
    with checkpoint.Manager(tmp_path, keep=1, stage=stage) as manager:
        assert restored(manager, step=200, newer=newer) == (200, 200)
        assert manager.steps() == [100, 200]
        assert manager.abandoned_steps() == ({0: [300]} if newer == "abandon" else {})
        save(manager, 250, -250)
        save(manager, 300, -300)
    assert manager.steps() == [200, 300]  # the one restored from, and the newest
    assert manager.path(300) == str(tmp_path / "step-00000300-b1")
    again = checkpoint.Manager(tmp_path)
    assert restored(again) == (300, -300)
    assert again.steps() == [200, 300]
    kept = ["step-00000300"] if newer == "abandon" else []
    assert directories(tmp_path) == ["step-00000200", *kept, "step-00000300-b1"]
    if kept:
        assert restored(again, step=300, branch=0) == (300, 300)
        assert again.abandoned_steps() == {1: [300]}
        save(again, 400)
        assert directories(tmp_path)[-1] == "step-00000400-b2"


def test_a_listing_that_ends_late_takes_no_place_of_one_that_began_after_it(tmp_path):
    """A look that hung for a minute hid the record of a branch that had been read meanwhile."""
    asked, hangs = threading.Event(), threading.Event()

    class Slow(LocalStorage):
        def names(self):
            found = super().names()
            if threading.current_thread() is thread:
                asked.set()
                assert hangs.wait(20)
            return found

    root = Root(Slow(str(tmp_path)))
    thread = threading.Thread(target=root.ids)
    thread.start()
    assert asked.wait(20)
    three_steps(tmp_path)
    manager = checkpoint.Manager(tmp_path)
    restored(manager, step=100)
    save(manager, 150)
    ids = root.ids()
    hangs.set()
    thread.join(20)
    assert [id.name for id in root.seen.ids] == [id.name for id in ids] and len(ids) == 4
    assert root.branches().current == 1 and {*root.seen.records} < root.seen.names


def test_a_line_says_what_a_rewind_leaves_behind(tmp_path, caplog):
    three_steps(tmp_path)
    manager = checkpoint.Manager(tmp_path)
    restored(manager, step=100)
    restored(manager, step=300, branch=0)
    restored(manager, step=200, newer="remove")
    save(manager, 250)
    restored(manager, step=100, branch=0, newer="remove")
    assert [line.partition(", and leaves ")[2] for line in caplog.messages] == [
        "2 steps from 200 to 300 behind: restore(app, step=300, branch=0) would go on from there",
        "step 300 behind: to be removed",
        "step 200 behind: to be removed",
        "step 250 behind: restore(app, step=250, branch=3) would go on from there",
    ]


def test_what_a_run_on_a_branch_leaves_behind_is_told_as_it_is(tmp_path, caplog):
    three_steps(tmp_path)
    manager = checkpoint.Manager(tmp_path)
    restored(manager, step=100)
    save(manager, 250)
    restored(manager, step=200, branch=0)  # step 300 is of no run since the first restore
    save(manager, 400)
    restored(manager, step=300, branch=0)  # the end of that branch
    assert [line.partition(", and leaves ")[2] for line in caplog.messages[1:]] == [
        "step 250 behind: restore(app, step=250, branch=1) would go on from there",
        "step 400 behind: restore(app, step=400, branch=2) would go on from there",
    ]
    assert manager.abandoned_steps() == {1: [250], 2: [400]}
    assert restored(manager, step=400, branch=2)[0] == 400 and manager.steps() == [100, 200, 400]


@pytest.mark.parametrize(("force", "told"), [(True, 1), (False, 0)])
def test_a_forced_save_of_the_step_that_the_run_was_rewound_to_is_told(tmp_path, caplog, force, told):
    three_steps(tmp_path)
    manager = checkpoint.Manager(tmp_path, every=100)
    restored(manager, step=200)
    manager.save(200, app_of(), force=True, metrics={"accuracy": 0.5})  # of an evaluation
    assert "changed since the restore" not in caplog.text
    manager.save(200, app_of(5), force=force)
    assert caplog.text.count("changed since the restore is saved with the next step") == told
    save(manager, 300)
    assert manager.restore(app_of()) == 300
    manager.save(300, app_of(5), force=True)  # as at the end of a script
    assert manager.restore(app_of(), step=300) == 300  # the newest
    manager.save(300, app_of(), force=True)
    assert caplog.text.count("changed since the restore") == told


def test_nothing_is_recorded_where_nothing_is_beyond(tmp_path, caplog):
    three_steps(tmp_path)
    manager = checkpoint.Manager(tmp_path)
    assert restored(manager, step=300) == (300, 300)
    assert restored(manager, step=300, branch=0) == (300, 300)
    assert not list(tmp_path.glob("branch*")) and not caplog.messages
    save(manager, 301)
    assert manager.steps() == [100, 200, 300, 301]


def test_what_is_abandoned_is_out_of_the_way_of_all_rules(tmp_path):
    three_steps(tmp_path)
    manager = checkpoint.Manager(tmp_path, keep=checkpoint.Retention(last=2, best=("loss", "min", 1)))
    restored(manager, step=100)
    for step in range(110, 160, 10):
        save(manager, step, metrics={"loss": step})
    assert manager.steps() == [100, 110, 140, 150]
    assert manager.abandoned_steps() == {0: [200, 300]}
    assert all(checkpoint.verify(tmp_path / name).ok for name in directories(tmp_path))


def test_a_run_that_is_taken_back_again_and_again(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    for round_number in range(3):
        for step in (1, 2, 3):
            if step > round_number - 1:
                save(manager, step, 10 * round_number + step)
        restored(manager, step=1)
    assert manager.steps() == [1]
    assert manager.abandoned_steps() == {0: [2, 3], 1: [2, 3], 2: [2, 3]}
    assert restored(manager, step=3, branch=1) == (3, 13)
    assert manager.steps() == [1, 2, 3]


def test_a_process_that_continues_the_run_as_it_was_saves_beside_it(tmp_path, caplog):
    destinations = [checkpoint.Mirror(tmp_path / "mirror")]
    old = checkpoint.Manager(tmp_path / "run", keep=2, destinations=destinations)
    for step in (1, 2, 3, 4):
        save(old, step)
        old.wait()
    new = checkpoint.Manager(tmp_path / "run", keep=1, destinations=destinations)
    restored(new, step=3)
    for step in (5, 6):
        save(old, step)
        old.wait()
    # The new job has saved nothing yet: what it resumes from is the third newest of the old one.
    assert [name for name in directories(tmp_path / "mirror") if name.endswith("3")] == ["step-00000003"]
    assert restored(checkpoint.Manager(tmp_path / "run")) == (3, 3)
    (line,) = [each for each in caplog.messages if "it removes no checkpoints any more" in each]
    assert "another job has taken" in line and "branch-00001.json" in line
    save(new, 4, -4)
    save(old, 7)
    assert new.steps() == [3, 4] and restored(checkpoint.Manager(tmp_path / "run")) == (4, -4)
    assert new.abandoned_steps() == {0: [4, 5, 6, 7]}
    restored(old)
    save(old, 8)
    assert old.steps() == [4, 8]  # it continues the run as it is now


def test_a_process_that_continues_the_run_as_it_was_leaves_tiers_as_they_are(tmp_path):
    tier = checkpoint.Tier(tmp_path / "tier", every=1, keep_last=2)
    old, new = (checkpoint.Manager(tmp_path / "run", every=100, destinations=[tier]) for _ in range(2))
    restored(old)
    for step in (1, 2, 3):
        save(old, step)
        old.wait()
    restored(new, step=2)
    for step in (4, 5):
        save(old, step)
        old.wait()
    assert restored(checkpoint.Manager(tmp_path / "run", every=100, destinations=[tier])) == (2, 2)
    save(new, 3, -3)
    new.wait()
    save(old, 6)
    old.wait()
    assert restored(checkpoint.Manager(tmp_path / "run", every=100, destinations=[tier])) == (3, -3)


def test_what_was_just_saved_stays_and_a_line_says_what_stands_beyond(tmp_path, caplog):
    three_steps(tmp_path / "full")
    first = checkpoint.Manager(tmp_path / "first")
    save(first, 200)
    restored(first)
    caplog.clear()
    manager = checkpoint.Manager(tmp_path / "full", keep=1)  # a second one, which is not restored
    for step in (250, 260):
        save(manager, step, -step)
    assert manager.steps() == [260, 300]
    (line,) = [each.getMessage() for each in caplog.records]
    assert "step 250 was saved below step 300 of another job" in line and "restore(app, step=...)" in line
    with pytest.raises(CheckpointExistsError):
        save(manager, 300)


@pytest.mark.parametrize("stage", [None, "now"])
def test_a_forgotten_restore_is_refused_below_another_run_and_removes_nothing_of_it(
    tmp_path, caplog, monkeypatch, stage
):
    """It used to remove the other run's best checkpoint at its first save."""
    monkeypatch.setattr(keeper, "_resumed", WeakSet())  # of other tests, whose Managers were not closed
    three_steps(tmp_path)
    with checkpoint.Manager(tmp_path, keep=1, stage=stage) as manager:
        for step in (10, 20):
            with pytest.raises(CheckpointError, match="found step 300, which this job neither saved nor restored;"):
                save(manager, step)
                manager.wait()
        assert manager.steps() == [100, 200, 300]
        for step in (310, 320, 330):
            save(manager, step)
        manager.wait()
        assert manager.steps() == [100, 200, 300, 330]
    (line,) = [line for line in caplog.messages if "neither saved nor restored" in line]
    assert "has 3 checkpoints that this job neither saved nor restored: steps 100, 200, 300. Retention leaves" in line
    with checkpoint.Manager(tmp_path, keep=1) as manager:  # a restore counts them, whoever saved them
        restored(manager)
        save(manager, 340)
        assert manager.steps() == [330, 340]


def test_retention_counts_all_steps_of_a_second_manager_that_counts_otherwise(tmp_path, caplog):
    three_steps(tmp_path / "epochs")
    with checkpoint.Manager(tmp_path / "first") as first, checkpoint.Manager(tmp_path / "epochs", keep=1) as epochs:
        save(first, 5000)
        restored(first)
        for step in (301, 302):
            save(epochs, step)
        assert epochs.steps() == [302]
    assert "neither saved nor restored" not in caplog.text


def test_retention_counts_all_steps_where_one_was_loaded(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(keeper, "_resumed", WeakSet())
    three_steps(tmp_path)
    with checkpoint.Manager(tmp_path, keep=1) as manager:
        checkpoint.load(manager.path(300), app_of())
        save(manager, 310)
        assert manager.steps() == [310]
    assert "neither saved nor restored" not in caplog.text


def test_retention_goes_on_if_a_restore_comes_while_it_counts(tmp_path, monkeypatch):
    three_steps(tmp_path)
    with checkpoint.Manager(tmp_path, keep=1) as manager:
        monkeypatch.setattr(keeper.Keeper, "_others", lambda self: self.restored(None, ()))  # in its midst
        save(manager, 310)
        assert manager.steps() == [100, 200, 300, 310]


def stopped_at_10(root):
    with pytest.raises(SystemExit), checkpoint.Manager(root, stop_on=signal.SIGTERM) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        save(manager, 10)


def test_a_job_that_stops_saves_below_another_run(tmp_path):
    three_steps(tmp_path)
    run_ranks(1, stopped_at_10, str(tmp_path), backend=None)
    assert checkpoint.Manager(tmp_path).steps() == [10, 100, 200, 300]


def test_a_loop_that_does_not_continue_where_it_was_restored_is_told(tmp_path, caplog):
    for last in (3, 1):
        model = torch.nn.Linear(2, 2)
        with checkpoint.Manager(tmp_path, keep=1) as manager:
            manager.restore({"model": model, "step": 0})  # the step goes into a dict that nobody has
            for step in range(1, last + 1):
                manager.save(step, {"model": model, "step": step})
    (line,) = [line for line in caplog.messages if "saved below" in line]
    assert "step 1 was saved below step 3 that this job was restored from (restore returns the step" in line


def test_a_step_that_is_not_there(tmp_path):
    three_steps(tmp_path)
    manager = checkpoint.Manager(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"found steps 100, 200, 300; required step 250; give one"):
        manager.restore(app_of(), step=250)
    restored(manager, step=200)
    with pytest.raises(CheckpointNotFoundError, match=r"found steps 100, 200; required step 300"):
        manager.restore(app_of(), step=300)
    with pytest.raises(CheckpointNotFoundError, match=r"found steps 100, 200, 300 on branch 0; required step 400"):
        manager.restore(app_of(), step=400, branch=0)
    with pytest.raises(OptionError, match=r"branch: found branch 2; required one from 0 to 1"):
        manager.restore(app_of(), step=300, branch=2)
    assert manager.steps() == [100, 200]


@pytest.mark.parametrize(
    "wrong", [{"step": -1}, {"step": "200"}, {"step": True}, {"branch": -1}, {"newer": "drop"}], ids=str
)
def test_wrong_arguments_of_restore(tmp_path, wrong):
    three_steps(tmp_path)
    with pytest.raises(OptionError, match=next(iter(wrong))):
        checkpoint.Manager(tmp_path).restore(app_of(), **wrong)


def test_a_step_that_is_damaged_is_not_gone_around(tmp_path):
    three_steps(tmp_path)
    (tmp_path / "step-00000200" / "manifest.json").write_text("{}")
    manager = checkpoint.Manager(tmp_path)
    with pytest.raises(CorruptionError):
        manager.restore(app_of(), step=200)
    assert not list(tmp_path.glob("branch*")) and manager.steps() == [100, 200, 300]


def test_a_load_that_fails_takes_nothing_back(tmp_path):
    three_steps(tmp_path)
    manager = checkpoint.Manager(tmp_path)
    with pytest.raises(ValueError):
        manager.restore({"w": torch.zeros(9)}, step=200)
    assert manager.steps() == [100, 200, 300]


def test_what_is_saved_after_a_load_that_was_refused_is_part_of_the_run(tmp_path):
    three_steps(tmp_path)
    restored(checkpoint.Manager(tmp_path), step=100)
    manager = checkpoint.Manager(tmp_path)
    with pytest.raises(MismatchError):
        manager.restore({"w": torch.zeros(9)})
    save(manager, 200, -2)
    save(manager, 400, -4)
    assert manager.steps() == [100, 200, 400] and restored(checkpoint.Manager(tmp_path)) == (400, -4)


OPERATIONS = ("make", "write", "publish", "remove", "remove_durably", "remove_if_empty", "names", "read", "size")


class Stop(BaseException):
    """The process ends here."""


def stop_at(monkeypatch, at):
    """From now on the storage does `at` operations, and then the process is killed: before the next has begun."""
    calls = 0

    def counted(name, method):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls > at:
                raise Stop(name)
            return method(*args)

        return call

    for name in OPERATIONS:
        monkeypatch.setattr(LocalStorage, name, counted(name, getattr(LocalStorage, name)))
    return lambda: calls


def go_back(root, newer):
    with checkpoint.Manager(root, keep=1) as manager:
        restored(manager, step=200, newer=newer)
        save(manager, 250, -250)
        save(manager, 300, -300)


@pytest.mark.parametrize("newer", [pytest.param("abandon", marks=pytest.mark.exhaustive), "remove"])
def test_wherever_it_ends_the_run_is_what_it_was_or_what_it_is_to_be(tmp_path, monkeypatch, newer):
    monkeypatch.setattr("os.fsync", lambda fd: None)  # of the process it is that ends here, not the machine
    for at in itertools.count():
        root = tmp_path / str(at)
        three_steps(root)
        with monkeypatch.context() as patch:
            calls = stop_at(patch, at)
            with suppress(Stop):
                go_back(root, newer)
            ended = calls() <= at
        manager = checkpoint.Manager(root, keep=1)
        step, value = restored(manager)
        assert (step, value) in [(300, 300), (200, 200), (250, -250), (300, -300)], at
        assert all(checkpoint.verify(manager.path(each)).ok for each in manager.steps())
        # What the user does then: the same again, or on with what is there.
        if value > 0:
            restored(manager, step=200, newer=newer)
        save(manager, 310, -310)
        assert max(manager.steps()) == 310
        later = checkpoint.Manager(root)
        assert restored(later) == (310, -310)
        assert later.abandoned_steps() == ({0: [300]} if newer == "abandon" else {}), at
        if ended:
            break
    assert at > 30


def test_both_roots_know_of_it(tmp_path):
    root, copies = tmp_path / "local", tmp_path / "copies"
    with checkpoint.Manager(root, destinations=[checkpoint.Mirror(copies)]) as manager:
        for step in (100, 200, 300):
            save(manager, step)
            manager._run.mirror.wait()
        restored(manager, step=200)
        save(manager, 250, -250)
    assert checkpoint.Manager(copies).steps() == [100, 200, 250]
    assert restored(checkpoint.Manager(copies)) == (250, -250)
    # The local disk is gone; a new one learns of it from the copies.
    other = checkpoint.Manager(tmp_path / "new", destinations=[checkpoint.Mirror(copies)])
    assert restored(other) == (250, -250)
    save(other, 300, -300)
    other.close()
    assert directories(tmp_path / "new") == ["step-00000300-b1"]
    assert checkpoint.Manager(tmp_path / "new").steps() == [300]
    assert restored(checkpoint.Manager(copies)) == (300, -300)


def test_a_record_that_came_to_one_root_alone_comes_to_the_other(tmp_path):
    for first, second in ((0, 1), (1, 0)):
        roots = [tmp_path / f"{first}-{number}" for number in range(2)]
        with checkpoint.Manager(roots[0], destinations=[checkpoint.Mirror(roots[1])]) as manager:
            for step in (1, 2):
                save(manager, step)
                manager._run.mirror.wait()
        (roots[first] / "branch-00001.json").write_bytes(Branch(1, 0, 1).pack())
        manager = checkpoint.Manager(roots[0], destinations=[checkpoint.Mirror(roots[1])])
        assert restored(manager) == (1, 1)
        assert (roots[second] / "branch-00001.json").read_bytes() == Branch(1, 0, 1).pack()
        manager.close()


def test_records_that_contradict_each_other(tmp_path):
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "branch-00001.json").write_bytes(Branch(1, 0, number).pack())
    with pytest.raises(CheckpointError, match=r"branch-00001.json: found .* one run in both roots"):
        checkpoint.Manager(tmp_path / "a", destinations=[checkpoint.Mirror(tmp_path / "b")]).restore(app_of())


def test_copies_that_were_to_be_removed_are_removed(tmp_path):
    root, copies = tmp_path / "local", tmp_path / "copies"
    with checkpoint.Manager(root, destinations=[checkpoint.Mirror(copies)]) as manager:
        for step in (100, 200, 300):
            save(manager, step)
            manager._run.mirror.wait()
        restored(manager, step=200, newer="remove")
    assert directories(copies) == directories(root) == ["step-00000100", "step-00000200"]


def test_what_was_to_be_removed_may_be_gone_back_to_while_it_is_there(tmp_path):
    three_steps(tmp_path)
    (tmp_path / "branch-00001.json").write_bytes(Branch(1, 0, 100, "remove").pack())  # and the process was killed
    manager = checkpoint.Manager(tmp_path)
    assert manager.abandoned_steps() == {0: [200, 300]}
    assert restored(manager, step=200, branch=0) == (200, 200)
    save(manager, 400)
    assert directories(tmp_path) == ["step-00000100", "step-00000200", "step-00000400-b2"]


def test_a_format_that_a_stranger_can_write(tmp_path):
    """As docs/format.md has it."""
    three_steps(tmp_path)
    text = json.dumps({"format": "shardopt-branch", "branch": 1, "of": 0, "from_step": 100, "beyond": "set_aside"})
    (tmp_path / "branch-00001.json").write_bytes(seal(text[:-1].encode()))
    assert checkpoint.Manager(tmp_path).steps() == [100]


class Reference:
    """A model of a run: for each branch a list of (step, value), as one would keep it by hand."""

    def __init__(self):
        self.lists, self.current = {0: []}, 0

    def save(self, step, value):
        self.lists[self.current].append((step, value))

    def take_back(self, index, branch, newer):
        kept, gone = self.lists[branch][: index + 1], self.lists[branch][index + 1 :]
        if gone or branch != self.current:
            self.current = max(self.lists) + 1
            self.lists[self.current] = list(kept)
        if newer == "remove":
            run = self.lists[self.current]
            for other in self.lists.values():
                other[:] = [each for each in other if each not in gone or each in run]
        return kept[-1]


@st.composite
def histories(draw):
    kinds = st.sampled_from(["save"] * 4 + ["restart"] + ["back"] * 2)
    numbers = st.integers(0, 10**6)
    return draw(st.lists(st.tuples(kinds, numbers, numbers, st.booleans()), min_size=5, max_size=20))


def live_through(root, mirror, history):
    """The same through a Manager; whether all that is restored is what the reference has."""
    reference, step, value = Reference(), 0, 0
    options = {"destinations": [checkpoint.Mirror(mirror)] if mirror else []}
    manager = checkpoint.Manager(root, **options)
    for kind, number, other, remove in history:
        if kind == "save":
            step, value = step + 1 + number % 3, value + 1
            save(manager, step, value)
            reference.save(step, value)
        elif kind == "restart":
            manager.close()
            manager = checkpoint.Manager(root, **options)
            wanted = reference.lists[reference.current]
            assert restored(manager) == (wanted[-1] if wanted else (0, 0))
            step = wanted[-1][0] if wanted else 0
        else:
            branch = number % (max(reference.lists) + 1)
            if not reference.lists[branch]:
                continue
            index = other % len(reference.lists[branch])
            newer = "remove" if remove else "abandon"
            if manager._run.mirror is not None:
                manager._run.mirror.wait()  # which copies what is to be removed
            wanted = reference.lists[branch][index]
            assert restored(manager, step=wanted[0], branch=branch, newer=newer) == wanted
            assert reference.take_back(index, branch, newer) == wanted
            step = wanted[0]
        assert manager.steps() == [each for each, _ in reference.lists[reference.current]]
        assert manager.branch == reference.current
        there = {(place.branch, place.step) for place in map(parse_id, directories(root)) if place}
        aside = {(branch, each) for branch, steps in manager.abandoned_steps().items() for each in steps}
        assert aside <= there
    manager.close()


@settings(max_examples=10)
@given(histories(), st.booleans())
def test_any_history_of_a_run(history, mirrored):
    with tempfile.TemporaryDirectory() as root, mock.patch("os.fsync", lambda fd: None):
        live_through(f"{root}/run", f"{root}/copies" if mirrored else None, history)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@settings(max_examples=1000)
@given(histories(), st.booleans())
def test_any_history_of_a_run_at_length(history, mirrored):
    with tempfile.TemporaryDirectory() as root, mock.patch("os.fsync", lambda fd: None):
        live_through(f"{root}/run", f"{root}/copies" if mirrored else None, history)


def test_on_a_store():
    root, copies = (f"memory://shardopt-branches/{uuid.uuid4().hex}" for _ in range(2))
    for newer, aside in (("abandon", {0: [300]}), ("remove", {})):
        where = f"{root}/{newer}"
        three_steps(where)
        with checkpoint.Manager(where, destinations=[checkpoint.Mirror(f"{copies}/{newer}")], keep=1) as manager:
            assert restored(manager, step=200, newer=newer) == (200, 200)
            save(manager, 300, -300)
            assert manager.steps() == [200, 300] and manager.abandoned_steps() == aside
        assert restored(checkpoint.Manager(where)) == restored(checkpoint.Manager(f"{copies}/{newer}")) == (300, -300)
