"""A run's last or best checkpoint as a Hugging Face folder, written in the background."""

import json
import logging
import threading

import pytest
import torch
from safetensors import safe_open

from shardopt import checkpoint
from shardopt.checkpoint.run import export as module
from shardopt.errors import CheckpointError, OptionError


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


def test_a_checkpoint_that_waits_for_its_export_is_not_removed(tmp_path, monkeypatch):
    """Exports are slower than saves here: those in between are left out, and the last is whole."""
    go_on, began, convert_on = threading.Event(), threading.Event(), module.convert_on

    def slowly(*args):
        began.set()
        assert go_on.wait(30)
        return convert_on(*args)

    monkeypatch.setattr(module, "convert_on", slowly)
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
