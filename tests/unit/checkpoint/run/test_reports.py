"""Reports of saves, loads, verifications, reshardings and uploads, and their progress."""

import ast
import logging
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import reports
from shardopt.errors import OptionError
from tests.harness import run_ranks


def app():
    return {"x": torch.arange(3_000_000.0), "y": torch.zeros(7), "step": 3}


@pytest.fixture
def events():
    reports = []
    remove = checkpoint.add_listener(lambda event, report: reports.append((event, report)))
    yield reports
    remove()


def test_everything_that_is_done_is_told(tmp_path, events, caplog):
    caplog.set_level(logging.DEBUG, "shardopt")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    saved = checkpoint.save(a, app())
    loaded = checkpoint.load(a, app())
    verified = checkpoint.verify(a)
    resharded = checkpoint.reshard(a, b, world_size=2)
    pending = checkpoint.async_save(str(tmp_path / "c"), app())
    beside = pending.result()
    with checkpoint.MirrorCopier(tmp_path, "memory://shardopt-told") as mirror:
        mirror.upload("c")
    assert [event for event, _ in events] == ["save", "load", "verify", "reshard", "save", "upload"]
    assert [report for _, report in events][:4] == [saved, loaded, verified, resharded]
    assert saved in {saved} and loaded in {loaded}
    assert events[4][1].save_id == beside.save_id
    records = [record for record in caplog.records if record.name == "shardopt"]
    lines = [record.getMessage() for record in records if record.levelno == logging.DEBUG]
    assert len(lines) == 6
    words = dict(word.split("=", 1) for word in lines[0].split()[1:])
    assert lines[0].startswith(f"save url={a} save_id={saved.save_id} ")
    assert int(words["bytes_total"]) == saved.bytes_total
    assert float(words["seconds"]) == pytest.approx(saved.seconds, rel=1e-4)
    assert float(words["stall_seconds"]) == pytest.approx(saved.stall_seconds, rel=1e-4)
    assert float(words["gb_per_second"]) == pytest.approx(saved.bytes_total / saved.seconds / 1e9, rel=1e-4)


def test_lines_for_people(tmp_path, caplog):
    """One for each event at INFO, with the step of a run, or the URL of what is of none."""
    caplog.set_level(logging.INFO, "shardopt")
    step, b = str(tmp_path / "run" / "step-00000500-b2"), str(tmp_path / "b")
    checkpoint.save(step, app())
    checkpoint.load(step, app())
    checkpoint.verify(step)
    checkpoint.reshard(step, b, world_size=2)
    checkpoint.convert(step, tmp_path / "converted", "torch")
    checkpoint.async_save(str(tmp_path / "c"), app()).result()
    with checkpoint.MirrorCopier(tmp_path, "memory://shardopt-people") as mirror:
        mirror.upload("c")
    here = re.escape(str(tmp_path))
    forms = [
        "saved step 500 of branch 2: BYTES in TIME",
        "loaded step 500 of branch 2: BYTES in TIME on this rank",
        "verified step 500 of branch 2: BYTES in TIME, every byte is as it was written",
        f"resharded into {here}/b: BYTES in TIME",
        f"converted into {here}/converted.*: BYTES in TIME",
        rf"saved {here}/c: BYTES in TIME \(training waited TIME\)",
        "uploaded memory://.*/c to memory://.*: BYTES in TIME",
    ]
    lines = [record.getMessage() for record in caplog.records if record.name == "shardopt"]
    assert len(lines) == len(forms)
    for line, form in zip(lines, forms, strict=True):
        form = form.replace("BYTES", r"[\d.]+ [kM]?B").replace("TIME", r"[\d.]+ m?s")
        assert re.fullmatch(form, line), line


def test_figures_are_numbers():
    report = checkpoint.SaveReport("u", "id", 2, 10**9, 4 * 10**9, 2.0, stall_seconds=0.5)
    numbers = checkpoint.report_metrics(report)
    assert numbers["gb_per_second"] == 2.0 and numbers["stall_seconds"] == 0.5 and numbers["bytes_written"] == 10**9
    assert all(isinstance(number, int | float) for number in numbers.values())
    assert checkpoint.report_metrics(checkpoint.SaveReport("u", "id", 0, 0, 0, 0.0))["gb_per_second"] == 0.0


def test_a_listener_that_fails_does_no_harm(tmp_path, events, caplog):
    def fails(event, report):
        raise ZeroDivisionError

    remove = checkpoint.add_listener(fails)
    checkpoint.save(tmp_path / "a", {"n": 1})
    assert "a listener failed" in caplog.text
    remove()
    remove()
    caplog.clear()
    checkpoint.save(tmp_path / "b", {"n": 1})
    assert caplog.text == "" and len(events) == 2


def test_a_handler_of_the_log_that_fails_does_no_harm(tmp_path, events, monkeypatch, caplog):
    class Failing(logging.Handler):
        def emit(self, record):
            raise ZeroDivisionError

    monkeypatch.setattr(logging.getLogger("shardopt"), "handlers", [Failing(logging.DEBUG)])
    with caplog.at_level(logging.DEBUG, logger="shardopt"):
        checkpoint.save(tmp_path / "a", {"n": 1})
        checkpoint.load(tmp_path / "a", {"n": 0})
    assert [event for event, _ in events] == ["save", "load"]


def test_a_listener_is_a_function():
    with pytest.raises(OptionError, match="listener: found None"):
        checkpoint.add_listener(None)


@pytest.mark.parametrize("to", ["local", "memory"])
def test_progress_goes_from_nothing_to_all(tmp_path, to):
    root = str(tmp_path / "c") if to == "local" else f"memory://shardopt-progress/{tmp_path.name}"
    saved, loaded = [], []
    checkpoint.save(root, app(), progress=lambda *seen: saved.append(seen))
    checkpoint.load(root, app(), progress=lambda *seen: loaded.append(seen))
    nbytes = 4 * 3_000_007
    for seen in (saved, loaded):
        assert len(seen) >= 2
        assert seen == sorted(seen)
        assert seen[-1] == (nbytes, nbytes)
        assert {total for _, total in seen} == {nbytes}


def test_progress_of_a_save_in_the_background(tmp_path):
    seen, threads = [], set()

    def progress(*each):
        threads.add(threading.current_thread().name)
        seen.append(each)

    pending = checkpoint.async_save(tmp_path / "c", app(), progress=progress)
    pending.result(60)
    nbytes = 4 * 3_000_007
    assert len(seen) >= 2
    assert seen == sorted(seen)
    assert seen[-1] == (nbytes, nbytes)
    assert {total for _, total in seen} == {nbytes}
    assert threading.current_thread().name not in threads


def test_what_progress_raises_fails_the_save_in_the_background(tmp_path):
    def progress(done, total):
        raise LookupError("no bar")

    pending = checkpoint.async_save(tmp_path / "c", app(), progress=progress)
    with pytest.raises(LookupError, match="no bar"):
        pending.result(60)
    assert not (tmp_path / "c" / "manifest.json").exists()


def bars(root):
    with checkpoint.progress_bar("saving") as progress:
        checkpoint.save(root, {"x": torch.zeros(5)}, progress=progress)
        return progress is not None


def test_a_bar_only_on_a_terminal(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    assert not bars(tmp_path / "a")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert bars(tmp_path / "b")
    monkeypatch.setenv("RANK", "1")
    assert not bars(tmp_path / "c")


def seen_by_rank(root):
    now, beside, state = [], [], {name: torch.arange(2_000_000.0) for name in "xy"}
    checkpoint.save(f"{root}/now", state, progress=lambda *each: now.append(each))
    checkpoint.async_save(f"{root}/beside", state, progress=lambda *each: beside.append(each)).result(60)
    return now[-1], beside[-1]


def test_each_rank_sees_its_own_part(tmp_path):
    for ends in zip(*run_ranks(2, seen_by_rank, str(tmp_path)), strict=True):
        assert all(done == total for done, total in ends)
        assert sum(total for _, total in ends) == 16_000_000


@dataclass(frozen=True, slots=True)
class AnyReport:
    """What the lines of all events want of a report."""

    url: str = "/run/step-00000005"
    seconds: float = 2.0
    pause_seconds: float = 0.5
    bytes_total: int = 1_000_000
    verdict: str = "every byte is as it was written"


def emitted_events():
    """The events that are emitted anywhere in the package, by its source."""
    for path in sorted(Path(reports.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "emit_report":
                yield ast.literal_eval(node.args[0])


def test_every_event_that_is_emitted_has_a_line(caplog):
    events = sorted(set(emitted_events()))
    assert {"save", "load", "update", "verify", "reshard", "convert", "upload", "copy"} == {*events}
    with caplog.at_level(logging.INFO, "shardopt"):
        for event in events:
            reports.emit_report(event, AnyReport())
    assert len(caplog.records) == len(events) and all("1 MB in 2 s" in each.message for each in caplog.records)
