"""A run's last or best checkpoint as a Hugging Face folder, written in the background."""

import json
import logging
import math
import shutil
import threading
from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardopt import checkpoint
from shardopt.checkpoint.run import export as module
from shardopt.errors import CheckpointError, MismatchError, OptionError


def app(value):
    return {"model": {"w": torch.full((4, 3), float(value))}, "step": value}


def exported(root):
    """The name of the export that is there, and its value."""
    record = json.loads((root / "export.json").read_text())
    (folder,) = [path for path in root.iterdir() if path.is_dir()]
    assert folder.name == record["name"]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return record["name"], file.get_tensor("w")[0, 0].item()


def run(tmp_path, losses, **options):
    export = checkpoint.Export(tmp_path / "hf", rename={r"^model\.": ""}, **options)
    with checkpoint.Manager(tmp_path / "run", keep=1, export=export) as manager:
        for step, loss in enumerate(losses, 1):
            manager.save(step, app(step), metrics={"loss": loss})


def test_the_last_one_stays(tmp_path):
    run(tmp_path, [3.0, 1.0, 2.0])
    assert exported(tmp_path / "hf") == ("step-00000003", 3.0)
    assert (tmp_path / "run" / "step-00000003").is_dir()


def test_the_best_one_stays_also_in_the_next_process(tmp_path):
    run(tmp_path, [3.0, 1.0, 2.0], best=("loss", "min"))
    assert exported(tmp_path / "hf") == ("step-00000002", 2.0)
    with checkpoint.Manager(
        tmp_path / "run", export=checkpoint.Export(tmp_path / "hf", best=("loss", "min"), rename={r"^model\.": ""})
    ) as manager:
        manager.save(4, app(4), metrics={"loss": 1.5})
        manager.save(5, app(5))  # without the metric it is no candidate
        manager.save(6, app(6), metrics={"loss": 0.5})
    assert exported(tmp_path / "hf") == ("step-00000006", 6.0)


def test_a_best_by_a_name_that_no_metric_has_is_told_once(tmp_path, caplog):
    run(tmp_path, [3.0] * 12, best=("los", "min"))
    (said,) = caplog.messages
    assert said.startswith("nothing is exported: Export(best=) goes by the metric 'los', which none of 10 saves had; ")
    assert "step 10 has loss" in said and not (tmp_path / "hf" / "export.json").exists()


def test_a_job_with_few_saves_that_ends_without_an_export_is_told_of_such_a_name(tmp_path, caplog):
    run(tmp_path / "a", [3.0, 2.0], best=("los", "min"))
    (said,) = caplog.messages
    assert "'los', which none of 2 saves had; step 2 has loss" in said
    caplog.clear()
    with pytest.raises(ZeroDivisionError):  # it may have come later
        run(tmp_path / "b", (1 / (2 - step) for step in range(3)), best=("los", "min"))
    run(tmp_path / "c", [3.0], best=("loss", "min"))
    (tmp_path / "c" / "run").rename(tmp_path / "c" / "before")
    run(tmp_path / "c", [3.0], best=("los", "min"))  # an export of an earlier job is there
    assert caplog.messages == []


@pytest.mark.parametrize("late", [False, True])
def test_a_best_by_a_metric_that_few_saves_have_is_not_told_of(tmp_path, caplog, late):
    """An evaluation comes at every ninth save, some with `add_metrics`."""
    export = checkpoint.Export(tmp_path / "hf", best=("val_loss", "min"), rename={r"^model\.": ""})
    with checkpoint.Manager(tmp_path / "run", export=export) as manager:
        for step in range(1, 21):
            found = {"val_loss": 1 / step} if step % 9 == 0 else {}
            manager.save(step, app(step), metrics={"loss": 2.0} if late else {"loss": 2.0, **found})
            if late and found:
                manager.add_metrics(step, found)
    assert caplog.messages == []
    assert exported(tmp_path / "hf") == ("step-00000018", 18.0)


def exports_that_wait(monkeypatch):
    """Has exports wait in their middle; returns an event that one has begun, and one for all to go on."""
    began, go_on, convert_on = threading.Event(), threading.Event(), module.convert_on

    def slowly(*args):
        began.set()
        assert go_on.wait(30)
        return convert_on(*args)

    monkeypatch.setattr(module, "convert_on", slowly)
    return began, go_on


def test_a_checkpoint_that_waits_for_its_export_is_not_removed(tmp_path, monkeypatch):
    """Exports are slower than saves here: those in between are left out, and the last is whole."""
    began, go_on = exports_that_wait(monkeypatch)
    export = checkpoint.Export(tmp_path / "hf", rename={r"^model\.": ""})
    manager = checkpoint.Manager(tmp_path / "run", keep=1, export=export)
    manager.save(1, app(1))
    assert began.wait(30)
    for step in (2, 3, 4):
        manager.save(step, app(step))
    kept = sorted(path.name for path in (tmp_path / "run").glob("step*"))
    assert kept == ["step-00000001", "step-00000004"]  # the one that is read, and the newest, which waits
    go_on.set()
    manager.close()
    assert exported(tmp_path / "hf") == ("step-00000004", 4.0)


def test_a_failure_is_logged_and_raised_by_close_and_the_one_before_stays(tmp_path, monkeypatch, caplog):
    run(tmp_path, [1.0])

    def fails(*args):
        raise OSError("no place")

    monkeypatch.setattr(module, "convert_on", fails)
    manager = checkpoint.Manager(tmp_path / "run", export=checkpoint.Export(tmp_path / "hf"))
    with caplog.at_level(logging.ERROR):
        manager.save(2, app(2))
        with pytest.raises(CheckpointError, match=r"cannot export .*no place"):
            manager.close()
    assert "exporting" in caplog.text
    assert exported(tmp_path / "hf") == ("step-00000001", 1.0)


def test_what_an_earlier_process_left_half_written_goes(tmp_path):
    (tmp_path / "hf" / "step-00000001").mkdir(parents=True)
    for name in ("model-00001-of-00002.safetensors", ".conversion"):
        (tmp_path / "hf" / "step-00000001" / name).write_text("half")
    (tmp_path / "hf" / "step-00000007-mine").mkdir()
    run(tmp_path, [1.0, 2.0])
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "export.json",
        "step-00000002",
        "step-00000007-mine",
    ]


def test_options_that_cannot_be_meant(tmp_path):
    with pytest.raises(OptionError, match="metric, mode"):
        checkpoint.Export(tmp_path, best=("loss", "least"))


@pytest.mark.parametrize("taken", ["run", "copy", "run/../copy"])
def test_an_export_needs_a_place_of_its_own(tmp_path, taken):
    options = {"destinations": [checkpoint.Mirror(tmp_path / "copy")], "export": checkpoint.Export(tmp_path / taken)}
    with pytest.raises(OptionError, match=r"export\.url: .*, which is (the root|destinations\[0\]\.url) too"):
        checkpoint.Manager(tmp_path / "run", **options)
    assert not list(tmp_path.iterdir())


def test_an_export_is_no_path(tmp_path):
    with pytest.raises(OptionError, match=r"export: found 'hf'; required an Export; give it as in Export\(url\)"):
        checkpoint.Manager(tmp_path / "run", export="hf")


def manager_at(tmp_path, best=None):
    return checkpoint.Manager(
        tmp_path / "run", export=checkpoint.Export(tmp_path / "hf", rename={r"^model\.": ""}, best=best)
    )


def save_all(manager, losses):
    """Saves steps with losses, each exported before the next."""
    for step, loss in losses.items():
        manager.save(step, app(step), metrics={"loss": loss})
        manager._after._exporter.finish()


def record_of(tmp_path):
    return json.loads((tmp_path / "hf" / "export.json").read_text())


def delete_it(tmp_path):
    with manager_at(tmp_path) as manager:
        manager.restore(app(0))
        manager.delete(3)


def remove_the_root(tmp_path):
    shutil.rmtree(tmp_path / "run")


def damage_it(tmp_path):
    (path,) = (tmp_path / "run" / "step-00000003").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("lose", [delete_it, remove_the_root, damage_it])
def test_a_step_that_is_saved_again_is_exported_again(tmp_path, lose):
    with manager_at(tmp_path) as manager:
        save_all(manager, {2: 1.0, 3: 1.0})
    lose(tmp_path)
    with manager_at(tmp_path) as manager:
        manager.restore(app(0))
        manager.save(3, app(9))
    # Of the restored step 2 there was an export in between, but not where there was nothing to restore.
    name = "step-00000003-again" if lose is remove_the_root else "step-00000003"
    assert exported(tmp_path / "hf") == (name, 9.0)


def test_exports_of_one_step_take_turns_in_two_folders(tmp_path):
    for name in ("step-00000003", "step-00000003-again", "step-00000003"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        with manager_at(tmp_path) as manager:
            save_all(manager, {3: 1.0})
        assert exported(tmp_path / "hf") == (name, 3.0)
        with manager_at(tmp_path) as manager:
            manager.restore(app(0))
        assert exported(tmp_path / "hf") == (name, 3.0)


def test_what_is_no_number_is_never_the_best_and_the_record_is_json(tmp_path):
    with manager_at(tmp_path, ("loss", "min")) as manager:
        save_all(manager, {1: math.nan})
        assert not (tmp_path / "hf" / "export.json").exists()
        save_all(manager, {2: math.inf})
        assert record_of(tmp_path)["value"] == "inf"
        save_all(manager, {3: math.nan, 4: 0.5, 5: 0.5, 6: math.inf})
    with checkpoint.open(tmp_path / "run" / "step-00000004") as reader:
        save_id = reader.manifest.save_id
    assert record_of(tmp_path) == {"name": "step-00000004", "save_id": save_id, "best": ["loss", "min"], "value": 0.5}


def test_metrics_of_an_earlier_step_do_not_move_the_export_of_the_last(tmp_path):
    with manager_at(tmp_path) as manager:
        save_all(manager, {1: 1.0, 2: 1.0})
        manager.add_metrics(1, {"loss": 0.1})
    assert exported(tmp_path / "hf") == ("step-00000002", 2.0)


def test_metrics_that_are_added_decide_which_is_the_best(tmp_path):
    with manager_at(tmp_path, ("loss", "min")) as manager:
        save_all(manager, {1: 0.5, 2: 0.7})
        manager.add_metrics(2, {"loss": 0.1})
        manager._after._exporter.finish()
        assert exported(tmp_path / "hf") == ("step-00000002", 2.0)
        manager.add_metrics(2, {"loss": 0.9})
        manager._after._exporter.finish()
        assert record_of(tmp_path)["value"] == 0.9
        save_all(manager, {3: 0.6})
    assert exported(tmp_path / "hf") == ("step-00000003", 3.0)


def test_a_best_that_has_left_the_run_counts_no_more(tmp_path):
    with manager_at(tmp_path, ("loss", "min")) as manager:
        save_all(manager, {1: 0.3, 2: 0.5, 3: 0.1})
        manager.restore(app(0), step=2)
        manager._after._exporter.finish()
        assert exported(tmp_path / "hf") == ("step-00000001", 1.0)
        save_all(manager, {3: 0.4})
        assert exported(tmp_path / "hf") == ("step-00000001", 1.0)
        save_all(manager, {4: 0.2})
    assert exported(tmp_path / "hf") == ("step-00000004-b1", 4.0)


def test_the_best_of_a_run_that_is_begun_anew_is_its_own(tmp_path):
    with manager_at(tmp_path, ("loss", "min")) as manager:
        save_all(manager, {1: 0.3, 2: 0.1})
    remove_the_root(tmp_path)
    with manager_at(tmp_path, ("loss", "min")) as manager:
        manager.restore(app(0))
        save_all(manager, {1: 0.9})
    assert exported(tmp_path / "hf") == ("step-00000001", 1.0)


def test_another_metric_begins_anew(tmp_path):
    with manager_at(tmp_path, ("loss", "min")) as manager:
        save_all(manager, {1: 2.0})
    with manager_at(tmp_path, ("accuracy", "max")) as manager:
        manager.save(2, app(2), metrics={"accuracy": 0.5})
    assert exported(tmp_path / "hf") == ("step-00000002", 2.0)


@pytest.mark.parametrize("best", [None, ("loss", "max")])
def test_an_export_that_was_cut_off_is_made_at_the_restore(tmp_path, monkeypatch, best):
    with manager_at(tmp_path, best) as manager:
        save_all(manager, {1: 1.0})
        with monkeypatch.context() as patched:
            patched.setattr(module.Exporter, "begin", lambda *args: None)  # as of a process that is killed
            save_all(manager, {2: 3.0, 3: 2.0})
    with manager_at(tmp_path, best) as manager:
        manager.restore(app(0))
    assert exported(tmp_path / "hf") == (("step-00000003", 3.0) if best is None else ("step-00000002", 2.0))

    def fails(*args):
        raise AssertionError("it is there already")

    monkeypatch.setattr(module, "convert_on", fails)
    with manager_at(tmp_path, best) as manager:
        manager.restore(app(0))


def test_a_damaged_best_is_passed_over_at_the_restore(tmp_path, caplog):
    with checkpoint.Manager(tmp_path / "run") as manager:
        for step, loss in {1: 1.0, 3: 3.0, 4: 2.0}.items():
            manager.save(step, app(step), metrics={"loss": loss})
    damage_it(tmp_path)
    with manager_at(tmp_path, ("loss", "max")) as manager:
        manager.restore(app(0))
    assert exported(tmp_path / "hf") == ("step-00000004", 4.0)
    assert "step-00000003 is not exported, but the next best" in caplog.text


def test_a_link_that_leads_nowhere_is_no_candidate_at_the_restore(tmp_path, caplog):
    with checkpoint.Manager(tmp_path / "run") as manager:
        for step, loss in {1: 1.0, 2: 3.0, 3: 2.0}.items():
            manager.save(step, app(step), metrics={"loss": loss})
    shutil.rmtree(tmp_path / "run" / "step-00000001")
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "archive")
    with manager_at(tmp_path, ("loss", "min")) as manager:
        manager.restore(app(0))
    assert exported(tmp_path / "hf") == ("step-00000003", 3.0) and not caplog.messages


def test_records_of_earlier_versions(tmp_path):
    """Their value counts; their folder is of a save that is not known, and is written again if that is still due."""
    for best in (("loss", "min"), None):
        with manager_at(tmp_path, best) as manager:
            save_all(manager, {1: 0.1} if best else {2: 0.5})
        record = record_of(tmp_path)
        (tmp_path / "hf" / "export.json").write_text(json.dumps({key: record[key] for key in ("name", "value")}))
        with manager_at(tmp_path, best) as manager:
            manager.restore(app(0))
        assert record_of(tmp_path) == {**record, "name": record["name"] + "-again"}
        assert exported(tmp_path / "hf") == (record["name"] + "-again", 1.0 if best else 2.0)
    (tmp_path / "hf" / "export.json").write_text(json.dumps({"name": "step-00000002-again", "value": 0.5}))
    with manager_at(tmp_path, ("loss", "min")) as manager:
        save_all(manager, {3: 0.7})
        assert exported(tmp_path / "hf") == ("step-00000002-again", 2.0)
        save_all(manager, {4: 0.2})
    assert exported(tmp_path / "hf") == ("step-00000004", 4.0)


def test_earlier_checkpoints_that_do_not_fit_the_export_fail_nothing(tmp_path, caplog):
    """A run that had exported all that it saved ended with an error."""

    def run_with(steps):
        export = checkpoint.Export(tmp_path / "hf", best=("loss", "min"), weights="ema")
        with checkpoint.Manager(tmp_path / "run", export=export) as manager:
            manager.restore(app(0))
            for step in steps:
                model = torch.nn.Linear(2, 2)
                averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
                manager.save(step, {"model": model, "ema": averages}, metrics={"loss": 1 / step})

    with checkpoint.Manager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, app(step), metrics={"loss": 0.1})
    run_with([])
    assert caplog.text.count("is not exported, but the next best, if any: averages cannot take") == 2
    run_with([3, 4])
    assert record_of(tmp_path)["name"] == "step-00000004"
    manager = checkpoint.Manager(tmp_path / "run", export=checkpoint.Export(tmp_path / "hf", weights="ema"))
    manager.save(5, app(5))
    with pytest.raises(MismatchError, match="averages"):
        manager.close()


@pytest.mark.parametrize("added_by", ["the process that saved it", "a later one"])
def test_an_export_that_does_not_fit_what_gets_metrics_after_its_save(tmp_path, added_by):
    """That was never an error, as if an earlier process had saved it."""
    export = checkpoint.Export(tmp_path / "hf", best=("loss", "min"), weights="ema")
    manager = checkpoint.Manager(tmp_path / "run", export=export)
    manager.save(1, app(1))
    if added_by == "a later one":
        manager.close()
        manager = checkpoint.Manager(tmp_path / "run", export=export)
    manager.add_metrics(1, {"loss": 0.5})
    with pytest.raises(MismatchError, match="averages") if added_by != "a later one" else nullcontext():
        manager.close()


def test_what_was_noted_last_of_a_step_that_waits_counts(tmp_path, monkeypatch):
    began, go_on = exports_that_wait(monkeypatch)
    with manager_at(tmp_path, ("loss", "min")) as manager:
        manager.save(1, app(1), metrics={"loss": 0.5})
        assert began.wait(30)
        manager.save(2, app(2))
        for loss in (0.1, 0.9):
            manager.add_metrics(2, {"loss": loss})
        go_on.set()
    assert exported(tmp_path / "hf") == ("step-00000001", 1.0)


@pytest.mark.parametrize("damaged", ["", "[]", '{"name"', '{"name": 5}'])
def test_a_damaged_record_is_written_again_and_other_folders_go(tmp_path, caplog, damaged):
    """It stopped all exports, after they were written: their folders piled up."""
    with manager_at(tmp_path) as manager:
        save_all(manager, {1: 1.0})
        (tmp_path / "hf" / "export.json").write_text(damaged)
        save_all(manager, {2: 1.0, 3: 1.0})
    assert exported(tmp_path / "hf") == ("step-00000003", 3.0)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "export.json is not what was written" in line


def fail(*args):
    raise OSError("no place")


@pytest.mark.parametrize("of", ["an earlier version", "another step"])
def test_an_export_stays_while_the_next_one_fails(tmp_path, monkeypatch, of):
    """Its record was removed before the next one was there, also where that named another one."""
    with manager_at(tmp_path, ("loss", "min")) as manager:
        save_all(manager, {1: 0.5})
    if of == "an earlier version":
        (tmp_path / "hf" / "export.json").write_text(json.dumps({"name": "step-00000001", "value": 0.5}))
    else:
        with checkpoint.Manager(tmp_path / "run") as manager:
            manager.save(2, app(2), metrics={"loss": 0.3})
        folder = tmp_path / "hf" / "step-00000002"  # of a process that was killed before it wrote the record
        shutil.copytree(tmp_path / "hf" / "step-00000001", folder)
    before = record_of(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "convert_on", fail)
        manager = manager_at(tmp_path, ("loss", "min"))
        manager.restore(app(0))
        with pytest.raises(CheckpointError, match="no place"):
            manager.close()
    assert record_of(tmp_path) == before
    assert (tmp_path / "hf" / before["name"] / "model.safetensors").exists()
    with manager_at(tmp_path, ("loss", "min")) as manager:
        manager.restore(app(0))
    last = ("step-00000001-again", 1.0) if of == "an earlier version" else ("step-00000002", 2.0)
    assert exported(tmp_path / "hf") == last


def test_delete_waits_for_an_export_of_the_step(tmp_path, monkeypatch):
    began, go_on = exports_that_wait(monkeypatch)
    with manager_at(tmp_path) as manager:
        manager.save(1, app(1))
        assert began.wait(30)
        threading.Timer(0.05, go_on.set).start()
        manager.delete(1)
        assert go_on.is_set()


def test_the_failure_of_an_export_is_not_forgotten_for_one_that_is_not_due(tmp_path, monkeypatch):
    with manager_at(tmp_path, ("loss", "min")) as manager:
        save_all(manager, {1: 0.5})

    def fails(*args):
        raise OSError("no place")

    monkeypatch.setattr(module, "convert_on", fails)
    manager = manager_at(tmp_path, ("loss", "min"))
    save_all(manager, {2: 0.1, 3: 0.9})
    with pytest.raises(CheckpointError, match="no place"):
        manager.close()
