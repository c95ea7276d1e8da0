"""The document of a report: the run, its places and branches, the checkpoint, its changes; errors of the verb."""

import json
import logging
import math
import shutil
from argparse import Namespace

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import Mirror, Tier
from shardopt.cli import main
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout


def told(capsys, *arguments, status=0):
    capsys.readouterr()
    assert main(["report", *map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def quarters(key, stored):
    if len(stored.shape) < 2:
        return Layout.replicated(stored.shape)
    return mesh_layout(stored.shape, Mesh((2, 2), (0, 1, 2, 3)), (Split(0, 0), Split(1, 1)))


@pytest.fixture
def run(tmp_path, caplog):
    """Steps 1 to 4, of which 3 and 4 were abandoned for 3 on branch 1; a mirror, and a log."""
    caplog.set_level(logging.INFO, "shardopt")
    with checkpoint.Manager(tmp_path / "run", destinations=[Mirror(tmp_path / "mirror")]) as manager:
        app = {"w": torch.zeros(8)}
        for step in (1, 2, 3, 4):
            manager.save(step, app, metrics={"loss": 1 / step})
            manager.wait()
        manager.restore(app, step=2)
        manager.save(3, app, metrics={"loss": 0.1})
    (tmp_path / "log").write_text("\n".join(caplog.messages))
    return tmp_path / "run"


def cut(step):
    (file,) = step.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def test_a_run_has_the_steps_that_ls_lists_with_where_they_are(run, tmp_path, capsys):
    (document,) = told(capsys, run, tmp_path / "mirror")["runs"]
    assert main(["ls", str(run), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    for step, of_ls in zip(document["steps"], listed, strict=True):
        shared = step.keys() & of_ls.keys()
        assert shared >= {"step", "branch", "saved_at", "seconds", "nbytes", "metrics", "in_run", "why"}
        assert {name: step[name] for name in shared} == {name: of_ls[name] for name in shared}
        assert [each["condition"] for each in step["places"]] == ["committed", "committed"] and step["complete"]
    assert [each["kind"] for each in document["places"]] == ["root", "mirror"]
    assert document["branches"] == [{"number": 1, "of": 0, "from_step": 2, "newer": "abandon"}]


def test_an_abandoned_step_says_which_branch_it_was_left_for(run, capsys):
    (document,) = told(capsys, run)["runs"]
    left = {(step["step"], step["branch"]): step["left"] for step in document["steps"]}
    assert left.pop((3, 0)) == left.pop((4, 0)) == "abandoned: branch 1 began at step 2"
    assert set(left.values()) == {None}


def test_a_step_that_is_damaged_here_is_complete_if_its_mirror_is(run, tmp_path, capsys):
    cut(run / "step-00000002")
    found = told(capsys, run, tmp_path / "mirror")
    assert found["runs"][0]["steps"][1]["complete"]
    assert [(each["kind"], each["step"]) for each in found["findings"]] == [("one place", 2)]
    found = told(capsys, run)
    assert not found["runs"][0]["steps"][1]["complete"]
    assert [(each["kind"], each["step"]) for each in found["findings"]] == [("not complete", 2)]


def test_a_step_that_one_place_only_has_says_which(run, tmp_path, capsys):
    for file in (run / "step-00000001").glob("*.safetensors"):
        file.unlink()
    shutil.rmtree(tmp_path / "mirror" / "step-00000002")
    shutil.rmtree(tmp_path / "mirror" / "step-00000003")  # of the branch that was left
    found = told(capsys, run, tmp_path / "mirror")
    alone = {(each["step"], each["branch"]): each["alone"] for each in found["runs"][0]["steps"]}
    assert alone == {(1, 0): 1, (2, 0): 0, (3, 0): None, (3, 1): None, (4, 0): None}
    first = found["runs"][0]["steps"][0]["places"][0]
    assert (first["condition"], first["complete"]) == ("files missing", False)
    assert [each["text"].split(" (")[0] for each in found["findings"]] == [
        "step 1 is complete only in the mirror. root: files missing",
        "step 2 is complete only in the root. mirror: not there",
    ]
    assert not told(capsys, run)["runs"][0]["steps"][1]["alone"]


def test_steps_that_only_a_tier_is_to_have_are_not_lost(tmp_path, capsys):
    tiers = [Tier(str(tmp_path / "tier"), every=1, keep_last=4)]
    with checkpoint.Manager(tmp_path / "run", every=2, destinations=tiers) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.zeros(8)})
            manager.wait()  # or the copies of the next step would take the place of this one's
    found = told(capsys, tmp_path / "run")
    places = [[each["place"] for each in step["places"]] for step in found["runs"][0]["steps"]]
    assert places == [[1], [0, 1], [1]] and not found["findings"]


def test_several_mirrors_have_numbers(run, tmp_path, capsys):
    shutil.copytree(tmp_path / "mirror", tmp_path / "other")
    (document,) = told(capsys, run, tmp_path / "mirror", tmp_path / "other")["runs"]
    assert [each["name"] for each in document["places"]] == ["root", "mirror 1", "mirror 2"]


def test_elements_that_are_not_finite_are_counted_over_all_tensors(tmp_path, capsys):
    nan, inf = math.nan, math.inf
    checkpoint.save(
        tmp_path / "c",
        {"a": torch.tensor([nan, 1.0, -inf]), "b": torch.tensor([nan, inf, nan, 0.0]), "c": torch.ones(2)},
    )
    found = told(capsys, tmp_path / "c", "--values")["checkpoint"]["not_finite"]
    assert found == {"nan": 3, "positive_infinity": 1, "negative_infinity": 1, "tensors": 2}
    assert told(capsys, tmp_path / "c")["checkpoint"]["not_finite"] is None


def test_a_copy_of_another_save_does_not_count(run, tmp_path, capsys):
    cut(run / "step-00000002")
    shutil.rmtree(tmp_path / "mirror" / "step-00000002")
    checkpoint.save(tmp_path / "mirror" / "step-00000002", {"w": torch.ones(8)})
    step = told(capsys, run, tmp_path / "mirror")["runs"][0]["steps"][1]
    assert [each["condition"] for each in step["places"]] == ["damaged", "another save"] and not step["complete"]


def test_logs_tell_how_long_training_waited_and_which_steps_are_gone(run, tmp_path, capsys):
    before = told(capsys, run)["runs"][0]
    assert {step["stall_seconds"] for step in before["steps"]} == {None} and before["removed"] == []
    with open(tmp_path / "log", "a") as log:
        log.write("\nsaved step 7 of branch 1: 2 kB in 4 days (training waited 2 h 5 min)\n")
    (document,) = told(capsys, run, "--log", tmp_path / "log")["runs"]
    assert all(step["stall_seconds"] is not None for step in document["steps"])
    (gone,) = document["removed"]
    assert (gone["step"], gone["seconds"], gone["stall_seconds"]) == (7, 4 * 86400.0, 125 * 60.0)
    assert gone["left"] == "by retention or by hand: runs do not record which"


def test_a_removed_step_whose_files_others_need_says_so(tmp_path, capsys):
    with checkpoint.Manager(tmp_path / "run", incremental=True, keep=1) as manager:
        app = {"w": torch.arange(200_000.0), "n": torch.zeros(1)}
        for step in (1, 2):
            manager.save(step, app)
            app["n"] += 1
    (document,) = told(capsys, tmp_path / "run")["runs"]
    base, newest = document["steps"]
    assert base["left"] == "removed; its files stay for the steps that refer to them" and newest["links"] == [1]


def test_a_stream_is_a_run_of_its_own_with_links(run, tmp_path, capsys):
    weights = {"w": torch.randn(4000)}
    with checkpoint.Publisher(tmp_path / "stream") as publisher:
        for step in (1, 2, 3):
            publisher.publish(step, weights)
            publisher.wait()
            weights["w"][step] += 1
    _, stream = told(capsys, run, tmp_path / "stream")["runs"]
    assert stream["kind"] == "stream" and [step["links"] for step in stream["steps"]] == [[], [1], [1, 2]]


def test_sums_of_the_tree_are_those_of_show(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", {"m": {"a": torch.ones(3, 4), "b": {"c": torch.ones(5)}}, "step": 3})
    found = told(capsys, tmp_path / "c")["checkpoint"]
    rows = {row["name"]: row for row in found["tree"]}
    assert (rows["m"]["tensors"], rows["m"]["elements"], rows["m"]["bytes"]) == (2, 17, 68)
    assert found["tensors"][rows["b.c"]["tensor"]]["key"] == "m.b.c" and rows["step"]["text"] == "= 3"


def test_layouts_say_which_rank_wrote_which_box(tmp_path, capsys):
    checkpoint.save(tmp_path / "one", {"w": torch.ones(8, 6), "v": torch.ones(4, 2)})
    checkpoint.reshard(tmp_path / "one", tmp_path / "four", layout=quarters)
    found = told(capsys, tmp_path / "four")["checkpoint"]
    tensor = {each["key"]: each for each in found["tensors"]}["w"]
    assert found["layouts"][tensor["layout"]] == {
        "shape": [8, 6],
        "cuts": [[0, 4, 8], [0, 3, 6]],
        "ranks": [0, 1, 2, 3],
    }


def test_statistics_are_those_of_show_and_norms_those_of_torch(tmp_path, capsys):
    w = torch.randn(100, generator=torch.Generator().manual_seed(1))
    checkpoint.save(tmp_path / "c", {"w": w})
    (tensor,) = told(capsys, tmp_path / "c", "--values")["checkpoint"]["tensors"]
    assert main(["show", str(tmp_path / "c"), "w", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["statistics"]
    found = tensor["statistics"]
    edges = shown.pop("edges")
    assert found.pop("edges") == [edges[0], edges[-1]]
    assert found.pop("norm") == pytest.approx(w.double().norm().item(), rel=1e-12)
    assert found.pop("rms") == pytest.approx(math.sqrt((w.double() ** 2).mean().item()), rel=1e-12)
    assert found == shown


def test_changes_are_those_of_diff(tmp_path, capsys):
    before = {"layers.0.w": torch.ones(4), "layers.1.w": torch.ones(4), "b": torch.ones(2), "old": torch.ones(1)}
    checkpoint.save(tmp_path / "a", before)
    checkpoint.save(tmp_path / "b", {"layers.0.w": torch.ones(4), "layers.1.w": torch.zeros(4), "b": torch.ones(3)})
    changes = told(capsys, tmp_path / "b", "--against", tmp_path / "a")["against"]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    of_diff = json.loads(capsys.readouterr().out)
    assert [each["key"] for each in changes["tensors"]] == [*of_diff["tensors"]]
    for each in changes["tensors"]:
        of_key = of_diff["tensors"][each["key"]]
        assert {name: of_key[name] for name in each.keys() - {"key", "layer"}} == {
            name: each[name] for name in each.keys() - {"key", "layer"}
        }
    assert [each["layer"] for each in changes["tensors"]] == ["", "layers.0", "layers.1"]
    assert changes["only_before"] == ["old"]


def test_what_cannot_be_read_is_told_as_diff_tells_it(tmp_path, capsys):
    for side in ("a", "b"):
        torch.save({"w": torch.ones(2), "args": Namespace(lr=1)}, tmp_path / f"{side}.pt")
    changes = told(capsys, tmp_path / "b.pt", "--against", tmp_path / "a.pt")["against"]
    assert (changes["not_compared"], changes["unread"]) == ([], ["args"])


def test_a_report_without_values_needs_no_bytes_of_tensors(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(1000)})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    assert told(capsys, tmp_path / "c")["checkpoint"]["tensor_count"] == 1
    assert told(capsys, tmp_path / "c", "--values", status=1)["error"]["code"] == "damaged"


def test_wrong_calls_name_the_option(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "--out: found no file" in capsys.readouterr().err
    assert told(capsys, tmp_path / "nowhere", status=1)["error"]["code"] == "no-checkpoint"
    (tmp_path / "run" / "step-00000001").mkdir(parents=True)
    assert told(capsys, tmp_path / "run", "--values", status=1)["error"]["code"] == "nothing-selected"
    assert told(capsys, tmp_path / "run")["checkpoint"] is None


def test_a_url_loses_its_secrets_and_nothing_else_of_the_document(tmp_path, capsys):
    """A value with a URL that ends at no space: redacted in the whole text, it took the next quotes along."""
    checkpoint.save(tmp_path / "c", {"source": "s3://me:secret@host/x?sig=1", "w": torch.ones(1)})
    rows = told(capsys, tmp_path / "c")["checkpoint"]["tree"]
    assert [row["name"] for row in rows] == ["source", "w"] and "secret" not in rows[0]["text"]
