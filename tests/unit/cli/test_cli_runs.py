"""`shardopt ls` and `shardopt prune`: what a run has, and what rules would leave of it."""

import json
import math
import os
import time

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt import checkpoint
from shardopt.checkpoint.run.listing import list_run
from shardopt.checkpoint.run.retention import Best, Retention, reasons_to_keep
from shardopt.checkpoint.storage import LocalStorage
from shardopt.checkpoint.storage.base import unreadable
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.cli import main
from shardopt.world import using
from tests.support.worlds import FakeClock


@pytest.fixture
def run(tmp_path):
    """Steps 100 to 500 with a loss, of which 300 is the best."""
    manager = checkpoint.Manager(tmp_path / "run")
    for step in range(100, 600, 100):
        loss = 0.1 if step == 300 else 1 / step
        manager.save(step, {"w": torch.arange(5000.0), "step": step}, metrics={"loss": loss + 1})
    return tmp_path / "run"


def listed(capsys, *arguments, status=0):
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def steps_in(root):
    return checkpoint.Manager(root).steps()


def damage(directory):
    (file,) = directory.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)


def test_ls_tells_all_of_each_checkpoint(run, capsys):
    (run / "step-00000600").mkdir()
    document = listed(capsys, "ls", run)
    assert (document["url"], document["branch"], document["branches"]) == (str(run), 0, [])
    first = document["checkpoints"][0]
    with checkpoint.open(run / "step-00000100") as reader:
        stored = reader.manifest
    own = sum(file.nbytes for file in stored.files)
    assert first == {
        "step": 100,
        "branch": 0,
        "url": f"{run}/step-00000100",
        "condition": "committed",
        "problems": [],
        "in_run": True,
        "to_be_removed": False,
        "save_id": stored.save_id,
        "saved_at": stored.saved_at,
        "seconds": stored.seconds,
        "world_size": 1,
        "tensors": 1,
        "nbytes": own,
        "nbytes_beside": 0,
        "metrics": {"loss": 1.01},
        "kept": None,
        "why": [],
    }
    assert [each["condition"] for each in document["checkpoints"]] == ["committed"] * 5 + ["unfinished"]
    assert document["checkpoints"][4]["why"] == ["newest"]
    assert main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{run}: a run of 5 checkpoints, ") and lines[1].split()[:2] == ["step", "saved"]
    assert lines[2].split()[0] == "100" and " 1.01  " in lines[2]


def test_ls_finds_damage(run, capsys):
    """Of files that are missing or cut short at once, of bytes by `--verify`."""
    damage(run / "step-00000100")
    (file,) = (run / "step-00000200").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    (file,) = (run / "step-00000300").glob("*.safetensors")
    file.unlink()
    (run / "step-00000400" / "manifest.json").write_text("{}")
    found = listed(capsys, "ls", run, status=1)["checkpoints"]
    assert [each["condition"] for each in found] == ["committed", *["damaged"] * 3, "committed"]
    assert all(each["problems"] for each in found[1:4])
    found = listed(capsys, "ls", run, "--verify", status=1)["checkpoints"]
    assert [each["condition"] for each in found] == [*["damaged"] * 4, "whole"]
    assert main(["ls", str(run)]) == 1
    assert "step-00000400/manifest.json" in capsys.readouterr().err


def test_ls_says_what_rules_would_keep(run, capsys):
    rules = ["--keep-last", "1", "--keep-every", "200", "--best", "loss:min:1"]
    found = {each["step"]: each for each in listed(capsys, "ls", run, *rules)["checkpoints"]}
    assert {step: each["why"] for step, each in found.items() if each["kept"]} == {
        200: ["every 200"],
        400: ["every 200"],
        500: ["newest", "last 1", "best loss"],
    }
    assert main(["ls", str(run), *rules]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("  no")


@pytest.mark.parametrize(
    "verb", [["ls"], ["prune", "--yes"], ["ls", "step-00000300"], ["report", "-o", "page.html"]], ids="-".join
)
def test_rules_by_a_metric_that_no_checkpoint_has_are_told_and_remove_nothing(verb, run, tmp_path, capsys):
    before = steps_in(run)
    url = run / "step-00000300" if verb[-1].startswith("step") else run
    arguments = [str(tmp_path / each) if each.endswith(".html") else each for each in verb if "step" not in each]
    status = 2 if "prune" in verb else 0
    assert main([*arguments, str(url), "--keep-last", "1", "--best", "lass:min:1"]) == status
    told = "".join(capsys.readouterr())
    assert told.count("found the metric 'lass', which no checkpoint has; required one of loss;") == 1
    assert steps_in(run) == before
    # As where none was removed yet, and where the metric comes later.
    assert main([*arguments, str(url), "--keep-last", "9", "--best", "lass:min:1"]) == 0


def test_a_metric_that_abandoned_checkpoints_alone_have_keeps_none(tmp_path, capsys):
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, {"x": 1}, metrics={"loss": 1.0})
    for step in (2, 3):
        manager.save(step, {"x": 1}, metrics={"loss": 1.0, "late": 1.0})
    manager.restore({"x": 0}, step=1)
    for step in (2, 3):
        manager.save(step, {"x": 1}, metrics={"loss": 1.0})
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--best", "late:min:1"]) == 2
    assert "required one of loss;" in capsys.readouterr().err


def test_ls_of_one_checkpoint_and_of_a_run_on_another_storage(run, capsys):
    document = listed(capsys, "ls", run / "step-00000300", "--verify", "--keep-last", "1", "--best", "loss:max:1")
    (one,) = document["checkpoints"]
    assert (document["url"], document["run"]) == (f"{run}/step-00000300", str(run))
    assert (one["step"], one["condition"], one["metrics"]) == (300, "whole", {"loss": 1.1})
    assert (one["kept"], one["why"]) == (True, ["best loss"])
    alone = run.parent / "alone"
    (run / "step-00000300").rename(alone)
    document = listed(capsys, "ls", alone)
    assert (document["run"], document["checkpoints"][0]["step"]) == (None, None)
    assert main(["ls", str(alone)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{alone}: one checkpoint, of no run"
    url = "memory://cli-runs/run"
    manager = checkpoint.Manager(url)
    for step in (1, 2):
        manager.save(step, {"w": torch.ones(2)})
    found = listed(capsys, "ls", url)["checkpoints"]
    assert [(each["step"], each["condition"]) for each in found] == [(1, "committed"), (2, "committed")]


def test_ls_of_a_step_names_its_run_and_branch(run, capsys):
    app = {"w": torch.arange(5000.0), "step": 0}
    manager = checkpoint.Manager(run)
    manager.restore(app, step=300)
    manager.save(400, app)
    for name, said in (
        ("step-00000300", "step 300 of the run at {run}, on branch 0"),
        ("step-00000400", "step 400 of the run at {run}, on branch 0, which the run has abandoned"),
        ("step-00000400-b1", "step 400 of the run at {run}, on branch 1"),
    ):
        assert main(["ls", str(run / name)]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"{run / name}: {said.format(run=run)}"


def test_prune_is_dry_by_default(run, capsys):
    before = sorted(run.rglob("*"))
    document = listed(capsys, "prune", run, "--keep-last", "2", "--best", "loss:max:1")
    assert [url[-3:] for url in document["unwanted"]] == ["100", "200"] and document["removed"] == []
    assert sorted(run.rglob("*")) == before
    assert main(["prune", str(run), "--keep-last", "2"]) == 0
    assert "would remove 3 checkpoints" in capsys.readouterr().out


def test_prune_removes_what_a_manager_would(run, tmp_path, capsys):
    """The same rules, once behind a save and once by the shell."""
    rules = checkpoint.Retention(last=2, every=200, best=("loss", "max", 1))
    other = checkpoint.Manager(tmp_path / "other", keep=rules)
    for step in range(100, 600, 100):
        other.save(step, {"step": step}, metrics={"loss": 1.1 if step == 300 else 1 / step + 1})
    manager = checkpoint.Manager(run)
    for step in (100, 200):
        manager.add_metrics(step, {"late": 1.0})
    document = listed(capsys, "prune", run, "--keep-last", "2", "--keep-every", "200", "--best", "loss:max:1", "--yes")
    assert steps_in(run) == other.steps() == [200, 300, 400, 500]
    assert [each.name for each in run.glob("*.metrics.json")] == ["step-00000200.metrics.json"]
    assert document["removed"] == document["unwanted"] == [f"{run}/step-00000100"]
    assert not (run / "step-00000100").exists()
    assert checkpoint.Manager(run).restore({"w": torch.zeros(5000), "step": 0}) == 500


def test_ls_and_prune_go_by_age(tmp_path, capsys):
    with using(FakeClock(now=1e9)) as clock:
        manager = checkpoint.Manager(tmp_path)
        for step in range(1, 6):
            manager.save(step, {"step": step})
            clock.now += 60
        found = {each["step"]: each for each in listed(capsys, "ls", tmp_path, "--keep-seconds", 150)["checkpoints"]}
        assert {step: each["why"] for step, each in found.items() if each["kept"]} == {
            4: ["younger than 150 s"],
            5: ["newest", "younger than 150 s"],
        }
        rules = ["--keep-seconds", 150, "--keep-every", 2]
        assert [url[-1] for url in listed(capsys, "prune", tmp_path, *rules)["unwanted"]] == ["1", "3"]
        listed(capsys, "prune", tmp_path, *rules, "--yes")
        assert steps_in(tmp_path) == [2, 4, 5]


def test_prune_leaves_what_branches_need_and_what_is_abandoned(run, capsys):
    manager = checkpoint.Manager(run)
    app = {"w": torch.zeros(5000), "step": 0}
    manager.restore(app, step=300)
    manager.save(350, app)
    manager.restore(app, step=200, newer="remove")
    manager.save(250, app)
    assert {each.id.name for each in list_run(run).checkpoints if not each.in_run} == {
        *("step-00000400", "step-00000500")
    }
    document = listed(capsys, "prune", run, "--keep-last", "1", "--yes")
    assert document["removed"] == [f"{run}/step-00000100"]
    assert checkpoint.Manager(run).steps() == [200, 250]
    assert checkpoint.Manager(run).abandoned_steps() == {0: [400, 500]}
    assert checkpoint.Manager(run).restore(app, step=400, branch=0) == 400


def test_prune_gives_no_place_to_what_is_damaged_and_leaves_it(run, capsys):
    (run / "step-00000500" / "manifest.json").write_text("{}")
    damage(run / "step-00000400")
    (run / "step-00000050").mkdir()
    document = listed(capsys, "prune", run, "--keep-last", "1", "--verify", "--yes")
    assert [url[-3:] for url in document["removed"]] == ["100", "200"]
    assert {path.name[-3:] for path in run.iterdir()} == {"050", "300", "400", "500"}


def test_prune_says_what_one_that_was_interrupted_has_left(run, monkeypatch, capsys):
    from shardopt.checkpoint.saving import removal

    def interrupted(storage, names):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(removal, "_remove_each", interrupted)
        assert main(["prune", str(run), "--keep-last", "3", "--yes"]) == 130
    assert "interrupted: checkpoints may be without manifests" in capsys.readouterr().err
    assert main(["prune", str(run), "--keep-last", "3", "--yes"]) == 0
    assert "unfinished stay: step 100, 200, of saves or removals that broke off; the next" in capsys.readouterr().out
    with checkpoint.Manager(run) as manager:
        manager.save(600, {"step": 600})
    assert sorted(path.name[-3:] for path in run.glob("step-*")) == ["300", "400", "500", "600"]


def test_prune_removes_what_broken_off_saves_have_left_but_none_that_may_be_under_way(run, capsys):
    """It used to say that it would remove nothing, on a disk that they had filled."""
    clock = FakeClock(time.time() + 30 * 3600)
    for step, ages in ((250, (60, 80)), (600, (60, 1)), (700, (1, 1)), (150, (1, 1))):  # in hours, of two saves
        (run / f"step-00000{step}").mkdir()
        for i, age in enumerate(ages):
            for rank, more in ((0, 0), (1, 99)):
                file = run / f"step-00000{step}" / f"{i}123456789ab-r0000{rank}.safetensors"
                file.write_bytes(b"x" * 400)
                os.utime(file, (0, clock.now - (age + more) * 3600))
    before = sorted(run.rglob("*"))
    document = listed(capsys, "prune", run, "--keep-last", "5", "--yes")  # it used to remove what was being copied here
    assert not any(each["removable_bytes"] for each in document["leftovers"]) and sorted(run.rglob("*")) == before
    with using(clock):
        assert main(["prune", str(run), "--keep-last", "5"]) == 0
    said = capsys.readouterr().out
    assert "would remove 1.6 kB of step 250, which" in said and "would remove 800 B of step 600, which" in said
    assert "stays: 800 B of step 600, of a save that is under way" in said and "stays: 1.6 kB of step 700, of" in said
    assert "unfinished stay: step 150, of" in said and "of step 150" not in said
    assert sorted(run.rglob("*")) == before
    with using(clock):
        document = listed(capsys, "prune", run, "--keep-last", "5", "--yes")
    assert [(each["url"][-3:], each["bytes"], each["removed_bytes"]) for each in document["leftovers"]] == [
        *(("150", 1600, 0), ("250", 1600, 1600), ("600", 1600, 800), ("700", 1600, 0))
    ]
    assert [len(list((run / f"step-00000{step}").iterdir())) for step in (150, 250, 600, 700)] == [4, 0, 2, 4]
    assert steps_in(run) == [100, 200, 300, 400, 500]


def test_prune_removes_other_leftovers_where_some_cannot_be_removed(run, monkeypatch, capsys):
    inner = LocalStorage.remove

    def remove(self, name):
        if "step-00000600" in self.url:
            raise PermissionError(13, "Permission denied", f"{self.url}/{name}")
        inner(self, name)

    monkeypatch.setattr(LocalStorage, "remove", remove)
    for step in (600, 700):
        (run / f"step-00000{step}").mkdir()
        (run / f"step-00000{step}" / "0123456789ab-r00000.safetensors").write_bytes(b"x" * 100)
    with using(FakeClock(time.time() + 90_000)):
        document = listed(capsys, "prune", run, "--keep-last", "5", "--yes", status=1)
    assert [(each["removed_bytes"], "error" in each) for each in document["leftovers"]] == [(0, True), (100, False)]
    assert [len(list((run / f"step-00000{step}").iterdir())) for step in (600, 700)] == [1, 0]


def test_prune_asks_a_store_for_no_sizes_of_what_it_leaves(tmp_path, monkeypatch, capsys):
    root = f"memory:///{tmp_path.name}/run"
    with checkpoint.Manager(root) as manager:
        manager.save(1, {"step": 1})
    fs, path = fsspec.core.url_to_fs(root)
    asked, inner = [], RemoteStorage.size
    monkeypatch.setattr(RemoteStorage, "size", lambda self, name: (asked.append(name), inner(self, name))[1])
    for rank in range(9):
        fs.pipe(f"{path}/step-00000005/0123456789ab-r0000{rank}.safetensors", b"x")
    assert main(["prune", root, "--keep-last", "5"]) == 0
    said = capsys.readouterr().out
    assert "unfinished stay: step 5, of saves that are under way" in said
    assert not any(name.endswith(".safetensors") and "0123456789ab" in name for name in asked)


def test_prune_of_a_run_that_changes_removes_nothing(run, monkeypatch, capsys):
    from shardopt.cli.verbs import prune

    seen = []

    def changing(root, verify_bytes=False):
        if seen:
            checkpoint.Manager(root).restore({"w": torch.zeros(5000), "step": 0}, step=200)
        seen.append(list_run(root, verify_bytes))
        return seen[-1]

    monkeypatch.setattr(prune, "list_run", changing)
    assert main(["prune", str(run), "--keep-last", "1", "--yes"]) == 1
    assert "changed meanwhile" in capsys.readouterr().err and len(list_run(run).checkpoints) == 5


def incremental_run(root):
    """Steps 1 to 4, of which the later ones refer to the first."""
    frozen = torch.arange(50_000.0)
    with checkpoint.Manager(root, incremental=True) as manager:
        for step in range(1, 5):
            manager.save(step, {"frozen": frozen, "adapter": torch.full((70,), float(step)), "step": step})


@pytest.fixture(params=["local", "memory"])
def incremental(request, tmp_path):
    root = str(tmp_path / "run") if request.param == "local" else f"memory:///{tmp_path.name}/run"
    incremental_run(root)
    return root


def stored_at(root):
    """The bytes of all data files under a root."""
    fs, path = fsspec.core.url_to_fs(root)
    return sum(fs.size(name) for name in fs.find(path) if name.endswith(".safetensors"))


def test_every_verb_takes_a_run_of_checkpoints_that_refer_to_the_first(incremental, tmp_path, capsys):
    url = [f"{incremental}/step-{step:08d}" for step in range(5)]
    for verify, condition in ((), "committed"), (("--verify",), "whole"):
        each = listed(capsys, "ls", incremental, *verify)["checkpoints"]
        assert [one["condition"] for one in each] == [condition] * 4 and not any(one["problems"] for one in each)
        assert sum(one["nbytes"] for one in each) == stored_at(incremental)
        assert [one["nbytes_beside"] for one in each] == [0, *[each[0]["nbytes"]] * 3]
        (alone,) = listed(capsys, "ls", url[2], *verify)["checkpoints"]
        assert (alone["condition"], alone["nbytes"]) == (condition, each[1]["nbytes"])
    assert main(["ls", incremental]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "beside" in lines[1] and "204 kB" in lines[3] and "damaged" not in "".join(lines)
    assert listed(capsys, "verify", *url[1:])["checkpoints"][3]["ok"]
    assert main(["show", url[2], "--boxes"]) == 0
    shown = capsys.readouterr().out
    assert "1 file, " in shown and "of earlier saves 1 file, 204 kB" in shown
    assert "in ../step-00000001/" in shown
    assert listed(capsys, "show", url[2])["tensors"]["frozen"]["boxes"][0]["file"].startswith("../step-00000001/")
    assert main(["diff", url[2], url[3]]) == 1 and "1 tensor equal (1 by checksum)" in capsys.readouterr().out
    assert main(["reshard", url[4], str(tmp_path / "whole"), "--world-size", "2"]) == 0
    assert main(["convert", url[4], str(tmp_path / "torch"), "--to", "torch"]) == 0


def test_prune_removes_no_file_to_which_a_checkpoint_refers_that_stays(incremental, capsys):
    root, url = incremental, [f"{incremental}/step-{step:08d}" for step in range(5)]
    before = stored_at(root)
    document = listed(capsys, "prune", root, "--keep-last", "1")
    assert document["unwanted"] == url[1:4] and stored_at(root) == before
    assert main(["prune", root, "--keep-last", "1"]) == 0
    assert "would remove 3 checkpoints, 8" in (said := capsys.readouterr().out) and "more stay" in said
    assert listed(capsys, "prune", root, "--keep-last", "1", "--yes")["removed"] == url[1:4]
    assert checkpoint.verify(url[4]).ok
    base, last = listed(capsys, "ls", root)["checkpoints"]
    assert (base["condition"], last["condition"]) == ("base", "committed")
    assert base["nbytes"] + last["nbytes"] == stored_at(root)
    assert listed(capsys, "prune", root, "--keep-last", "1", "--yes")["removed"] == []
    assert checkpoint.verify(url[4]).ok
    assert main(["verify", url[1]]) == 1 and "checkpoints beside it refer" in capsys.readouterr().err
    # Once nothing refers to it any more, what was left goes too.
    checkpoint.save(f"{root}/step-00000005", {"other": torch.ones(3)})
    assert listed(capsys, "prune", root, "--keep-last", "1", "--yes")["removed"] == [url[4], url[1]]
    assert [each["step"] for each in listed(capsys, "ls", root)["checkpoints"]] == [5]


def test_ls_names_what_is_missing_or_cut_in_files_beside_a_checkpoint(tmp_path, capsys):
    incremental_run(root := tmp_path / "run")
    (file,) = (root / "step-00000001").glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    each = listed(capsys, "ls", root, status=1)["checkpoints"]
    assert [one["condition"] for one in each] == ["damaged"] * 4
    assert {one["problems"][0]["key"] for one in each} == {str(file)}
    (alone,) = listed(capsys, "ls", root / "step-00000003", status=1)["checkpoints"]
    assert alone["condition"] == "damaged" and alone["problems"][0]["key"] == str(file)
    file.unlink()
    each = listed(capsys, "ls", root, status=1)["checkpoints"]
    assert {one["problems"][0]["found"] for one in each} == {"no such file"}
    file.write_bytes(whole)
    assert listed(capsys, "ls", root)["checkpoints"][3]["condition"] == "committed"


@given(
    st.sets(st.integers(0, 40), max_size=12),
    st.builds(
        Retention,
        st.none() | st.integers(1, 4),
        st.none() | st.integers(1, 9),
        st.none() | st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
        st.none() | st.floats(0.1, 1e4),
    ),
    st.dictionaries(st.integers(0, 40), st.floats(allow_nan=True)),
    st.dictionaries(st.integers(0, 40), st.floats(-1e4, 1e4)),
)
def test_reasons_are_of_the_steps_that_stay(steps, rules, losses, ages):
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    pinned = dict.fromkeys([step for step in steps if step % 7 == 0], "in use")
    reasons = reasons_to_keep(steps, rules, metrics, pinned, ages)
    assert {*pinned, *sorted(steps)[-1:]} <= set(reasons) <= steps
    assert all(reasons.values()) and list(reasons) == sorted(reasons)
    assert [step for step, why in reasons.items() if "newest" in why] == sorted(steps)[-1:]
    best = [step for step, why in reasons.items() if "best loss" in why]
    assert not any(math.isnan(losses.get(step, math.nan)) for step in best)


def test_follow_prints_every_step_between_two_looks(tmp_path, monkeypatch, capsys):
    """The first look prints the newest step alone; what is removed before a look is not there to be printed."""
    manager = checkpoint.Manager(tmp_path / "run")
    saved = iter([(1, 2), (), (3, 4, 5), (6, 7, 8)])

    class Clock(FakeClock):
        def sleep(self, seconds):
            for step in next(saved):
                manager.save(step, {"step": step})
            if manager.steps()[-1] == 5:
                (tmp_path / "run/step-00000004/manifest.json").unlink()  # removed before it is looked at
            if manager.steps()[-1] == 8:
                (tmp_path / "run/step-00000006/manifest.json").write_text("torn")

    with using(Clock()):
        assert main(["follow", str(tmp_path / "run"), "--count", "5", "--json"]) == 0
    assert steps_in_documents(capsys.readouterr().out) == [2, 3, 5, 7, 8]


def steps_in_documents(text):
    decoder, text, steps = json.JSONDecoder(), text.strip(), []
    while text:
        document, end = decoder.raw_decode(text)
        steps, text = [*steps, document["step"]], text[end:].strip()
    return steps


def test_follow_says_once_that_it_waits_and_refuses_a_checkpoint(tmp_path, capsys):
    """It used to wait without a word."""
    run = tmp_path / "run"
    looks = iter([lambda: None, run.mkdir, lambda: checkpoint.Manager(run).save(1, {"a": 1})])

    class Clock(FakeClock):
        def sleep(self, seconds):
            next(looks)()

    with using(Clock()):
        assert main(["follow", str(run), "--count", "1"]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("step 1: ") and said.err.count("\n") == 1
        assert f"there is no step in {run}, which is no directory: waiting for the first one" in said.err
        assert main(["follow", str(run / "step-00000001"), "--count", "1"]) == 2
    assert f"required the root of a run or of a Publisher; give {run}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("times", "unread", "printed"), [(2, 2, [1, 2, 3, 4]), (2, 3, [1, 2, 3, 4]), (99, 2, [1, 3, 4])]
)
def test_follow_takes_up_again_what_a_disk_fails_to_return(tmp_path, monkeypatch, capsys, times, unread, printed):
    """It passed over that step for good, or ended if it was the newest."""
    manager, read, left = checkpoint.Manager(tmp_path), LocalStorage.read, [times]
    saved = iter([(2, 3), *[()] * (10 if times == 99 else 2), (4,)])

    def failing(self, name, *args):
        if self.url.endswith(f"step-0000000{unread}") and left[0]:
            left[0] -= 1
            raise unreadable(f"{self.url}/{name}", OSError(5, "Input/output error"))
        return read(self, name, *args)

    class Clock(FakeClock):
        def sleep(self, seconds):
            for step in next(saved):
                manager.save(step, {"step": step})

    manager.save(1, {"step": 1})
    monkeypatch.setattr(LocalStorage, "read", failing)
    with using(Clock()):
        assert main(["follow", str(tmp_path), "--count", str(len(printed)), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.count("Input/output error") == 1
    assert steps_in_documents(output.out) == printed
