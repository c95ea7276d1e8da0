"""The records by which a run knows its tiers: one that is damaged, or cannot be had, stops nothing of the run."""

import logging
import shutil

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import Tier
from shardopt.checkpoint.run.root import RunIdentity
from shardopt.checkpoint.run.tiers import tiers
from shardopt.errors import CheckpointError, CorruptionError, OptionError


def app_of(step):
    return {"x": torch.full((4,), float(step)), "step": step}


def manager(path, mirror="mirror"):
    destinations = [Tier(str(path / "tier"), every=1), checkpoint.Mirror(path / mirror)]
    return checkpoint.Manager(path / "root", every=4, destinations=destinations)


def restored(path, **options):
    with manager(path, **options) as made:
        app = app_of(0)
        step = made.restore(app)
        assert app["step"] == step
        return step


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run(tmp_path):
    with manager(tmp_path) as made:
        made.save(1, app_of(1))
    return tmp_path


def test_a_mirror_that_cannot_be_reached_stops_no_save_to_a_tier(tmp_path, caplog):
    (tmp_path / "file").write_text("where a directory is wanted")
    with manager(tmp_path, "file/mirror") as made:
        made.save(1, app_of(1))
        assert list(made.where()) == [1]
    assert any("file/mirror" in each.message for each in caplog.records)
    assert restored(tmp_path) == 1  # once the mirror is there, it gets the record
    assert (tmp_path / "mirror/run.json").read_bytes() == (tmp_path / "root/run.json").read_bytes()


def test_a_run_that_another_has_begun_in_the_mirror_meanwhile_is_refused(tmp_path, monkeypatch):
    made = manager(tmp_path)
    record = RunIdentity("0123456789abcdef" * 2, "elsewhere").pack()
    make = type(made._run.root.storage).make

    def make_for_another(storage):
        make(storage)
        if storage.url == str(tmp_path / "mirror"):
            (tmp_path / "mirror/run.json").write_bytes(record)

    monkeypatch.setattr(type(made._run.root.storage), "make", make_for_another)
    with made, pytest.raises(CheckpointError, match="are of two runs"):
        made.save(1, app_of(1))
    assert not list((tmp_path / "tier").glob("step-*"))


@pytest.mark.parametrize("damaged", ["root", "mirror"])
def test_one_record_of_root_and_mirror_is_enough(run, damaged, caplog):
    damage(run / damaged / "run.json")
    with caplog.at_level(logging.WARNING):
        assert restored(run) == 1
    assert any(f"{damaged}/run.json" in each.message for each in caplog.records)
    for each in ("root", "mirror"):
        if each != damaged:
            damage(run / each / "run.json")
    with pytest.raises(CorruptionError, match=r"root/run\.json"):
        restored(run)


@pytest.mark.parametrize(
    ("change", "found"),
    [(damage, r"a \.run that is damaged"), (lambda label: label.unlink(), r"no \.run that says whose")],
)
def test_a_host_whose_label_is_lost_is_told_how_it_gets_one(run, change, found):
    label = run / "tier/.run"
    change(label)
    before = label.exists()
    with pytest.raises(
        CheckpointError, match=rf"tier \(rank 0\): found .*{found}.*copy {run}/root/run\.json to \.run there"
    ):
        restored(run)
    assert label.exists() == before and (run / "tier/step-00000001").exists()
    label.write_bytes((run / "root/run.json").read_bytes())
    assert restored(run) == 1


def test_a_tier_that_a_job_has_no_more_is_told_of(run, caplog):
    """What it has may be newer than all that the job saves from now on, and would be restored before that."""
    with checkpoint.Manager(run / "root", destinations=[checkpoint.Mirror(run / "mirror")]) as made:
        assert made.restore(app_of(0)) == 0
    (told,) = [each.message for each in caplog.records]
    assert f"the run had a tier at {run}/tier" in told and "newer there than step 0" in told
    caplog.clear()
    assert restored(run) == 1 and not caplog.records


def test_a_process_alone_looks_once_whose_its_tiers_are(tmp_path, monkeypatch):
    looks = []
    for name in ("refuse_tiers_of_others", "claim_tiers"):
        call = getattr(tiers, name)
        monkeypatch.setattr(tiers, name, lambda *args, name=name, call=call: [looks.append(name), call(*args)][1])
    both = [Tier(str(tmp_path / "memory"), every=1), Tier(str(tmp_path / "disk"), every=2)]
    with checkpoint.Manager(tmp_path / "root", destinations=both, every=4) as made:
        made.restore(app_of(0))
        for step in range(1, 7):
            made.save(step, app_of(step))
            made.wait()
        where = made.where()
    assert {step: len(places) for step, places in where.items()} == {4: 2, 5: 1, 6: 2}
    assert looks == ["refuse_tiers_of_others", "claim_tiers"]


def test_a_process_alone_marks_a_directory_that_it_makes_anew(run):
    with manager(run) as made:
        made.restore(app_of(0))
        made.wait()  # step 1 is copied in the background to where it lacks
        shutil.rmtree(run / "tier")
        made.save(2, app_of(2))
    assert restored(run) == 2


@pytest.mark.parametrize("place", ["root", "mirror"])
def test_a_tier_at_the_root_itself_is_refused(tmp_path, place):
    tier = Tier(str(tmp_path / "a/.." / place), every=1)
    with pytest.raises(OptionError, match=r"destinations\[0\]\.path: found .*another path than the root's"):
        checkpoint.Manager(tmp_path / "root", destinations=[tier, checkpoint.Mirror(tmp_path / "mirror")])


def test_a_checkpoint_that_somebody_put_into_a_tier_stays(run):
    """As the format allows: all shares of one, with the record under the name of a manifest."""
    share = run / "tier/step-00000001"
    (share / "prepared.json").rename(share / "manifest.json")
    with manager(run) as made:
        assert made.restore(app_of(0)) == 0
        made.save(2, app_of(2))
    app = app_of(0)
    checkpoint.load(share, app)
    assert app["step"] == 1
