"""Rules of `rename` that stay in a script: each is applied once to the names of a run, at whichever start it came."""

import logging
import re

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Manager
from shardopt.errors import MismatchError
from tests.harness import run_ranks

SWAP = {r"\bfirst\b": "other", r"\bsecond\b": "first", r"\bother\b": "second"}
PREFIX = {r"^model\.": "model.net.", r"^optimizer\.state\.": "optimizer.state.net."}


class Pair(torch.nn.Module):
    def __init__(self, *names):
        super().__init__()
        for number, name in enumerate(names):
            self.add_module(name, torch.nn.Linear(2, 2))
            with torch.no_grad():
                for value in getattr(self, name).parameters():
                    value.fill_(number + 1)


def app_of(*names, within=False):
    model = torch.nn.ModuleDict({"net": Pair(*names)}) if within else Pair(*names)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.0, weight_decay=0.0)
    optimizer.init_state()
    for name, state in optimizer.state_dict()["state"].items():
        state["exp_avg"].fill_(10 * dict(model.named_parameters())[name].detach().reshape(-1)[0])
    return {"model": model, "optimizer": optimizer, "step": 0}


def numbers(app):
    states = app["optimizer"].state_dict()["state"]
    found = {}
    for name, value in app["model"].named_parameters():
        if name.endswith("weight"):
            found[name.removesuffix(".weight")] = float(value.detach()[0, 0]), float(states[name]["exp_avg"][0, 0])
    return found


def start(root, app, step, rename=None, **options):
    """One start of a job: restores, and saves a step."""
    with Manager(root, **options) as manager:
        restored = manager.restore(app, rename=rename)
        app["step"] = step
        manager.save(step, app)
    return restored


@pytest.mark.parametrize(
    "options", [{}, {"stage": "now"}, {"incremental": True}], ids=["call", "behind", "incremental"]
)
def test_a_swap_is_not_swapped_back(tmp_path, options):
    start(tmp_path, app_of("first", "second"), 1, **options)
    for step in (2, 3, 4):
        app = app_of("second", "first")
        assert start(tmp_path, app, step, SWAP, **options) == step - 1
        assert numbers(app) == {"second": (1, 10), "first": (2, 20)}


def test_rules_are_added_from_start_to_start(tmp_path):
    start(tmp_path, app_of("first", "second"), 1)
    start(tmp_path, app_of("second", "first"), 2, SWAP)
    for step in (3, 4):
        app = app_of("second", "first", within=True)
        start(tmp_path, app, step, SWAP | PREFIX)
        assert numbers(app) == {"net.second": (1, 10), "net.first": (2, 20)}
    with checkpoint.open(Manager(tmp_path).path(4)) as reader:
        assert reader.manifest.renamed == tuple((SWAP | PREFIX).items())
    app = app_of("second", "first", within=True)
    assert start(tmp_path, app, 5) == 4  # and a script without them loses no record
    start(tmp_path, app, 6, SWAP)
    assert numbers(app) == {"net.second": (1, 10), "net.first": (2, 20)}


def test_a_run_that_began_with_rules_in_its_script_has_the_new_names(tmp_path):
    for step in (1, 2, 3):
        app = app_of("first", "second")
        start(tmp_path, app, step, SWAP)
        assert numbers(app) == {"first": (1, 10), "second": (2, 20)}


def test_without_a_record_a_checkpoint_that_fits_as_it_is_is_taken(tmp_path):
    checkpoint.save(tmp_path / "step-00000001", app_of("first", "second", within=True))
    app = app_of("second", "first", within=True)
    assert start(tmp_path, app, 2, PREFIX) == 1
    assert numbers(app) == {"net.first": (1, 10), "net.second": (2, 20)}
    assert start(tmp_path, app, 3, PREFIX) == 2
    report = checkpoint.load(tmp_path / "step-00000001", app, rename=PREFIX)
    assert report.renamed == {}


def test_a_rule_that_gives_a_name_that_is_taken_is_refused_also_where_all_fits_as_it_is(tmp_path):
    checkpoint.save(tmp_path / "plain", app_of("first", "second"))
    start(tmp_path, app_of("first", "second"), 1)
    for url in (tmp_path / "plain", Manager(tmp_path).path(1)):
        app = {"model": app_of("first", "second")["model"]}
        with pytest.raises(MismatchError, match="one name"):
            checkpoint.load(url, app, select=r"^model\.", rename={r"^model\.second": "model.first"})
        with pytest.raises(MismatchError, match="one name"):  # also beside a rule that finds nothing
            idle = {r"^model\.second": "model.first", r"^model\.third": "model.second"}
            checkpoint.load(url, {"model": Pair("first")}, select=r"^model\.", rename=idle)
        averages = {r"^model\.first": "own", r"^model\.second": "model.first"}
        checkpoint.load(url, app, select=r"^model\.first", rename=averages)
        assert next(app["model"].parameters()).flatten()[0] == 2


def test_rules_that_shift_names_stay_in_a_script_without_a_record(tmp_path):
    rules = {r"^x\.b": "x.c", r"^x\.a": "x.b"}
    checkpoint.save(tmp_path / "0", {"x": {"a": torch.ones(2), "b": torch.full((2,), 2.0)}})
    for start in range(3):
        app = {"x": {"b": torch.zeros(2), "c": torch.zeros(2)}}
        checkpoint.load(tmp_path / str(start), app, rename=rules)
        assert app["x"]["b"][0] == 1 and app["x"]["c"][0] == 2
        checkpoint.save(tmp_path / str(start + 1), app)


@pytest.mark.parametrize(
    ("of_app", "options"),
    [
        (("model", "optimizer"), {"init_state": True}),
        (("model",), {"strict": checkpoint.Strictness(unexpected="ignore")}),
        (("model",), {"skip": "^optimizer"}),
        (("model", "optimizer"), {"select": "^model"}),
    ],
)
def test_names_that_the_app_does_not_load_do_not_tell_whether_names_are_new(tmp_path, of_app, options):
    def made():
        model = torch.nn.ModuleDict({"b": torch.nn.Linear(2, 1), "c": torch.nn.Linear(2, 1)})
        return {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters())}

    saved, app = made(), made()
    saved["optimizer"].init_state()
    checkpoint.save(tmp_path / "new", saved)
    rules = {r"\bb\b": "c", r"\ba\b": "b"}
    checkpoint.load(tmp_path / "new", {key: app[key] for key in of_app}, rename=rules, **options)
    assert torch.equal(app["model"]["b"].weight, saved["model"]["b"].weight)


def test_a_rule_that_fits_neither_way_is_refused(tmp_path):
    checkpoint.save(tmp_path / "old", app_of("first", "second"))
    with pytest.raises(MismatchError, match="nothing in the checkpoint"):
        checkpoint.load(tmp_path / "old", app_of("first", "third"), rename=SWAP)


def test_what_was_renamed_is_said(tmp_path, caplog):
    start(tmp_path, app_of("first", "second"), 1)
    with caplog.at_level(logging.INFO):
        start(tmp_path, app_of("second", "first"), 2, SWAP)
        assert "renamed model.second.bias -> model.first.bias" in caplog.text
        caplog.clear()
        start(tmp_path, app_of("second", "first"), 3, SWAP)
        assert "renamed nothing; its names have been through" in caplog.text


def test_runs_record_that_nothing_was_renamed(tmp_path):
    start(tmp_path, app_of("first", "second"), 1)
    start(tmp_path, app_of("first", "second"), 2)
    for step in (1, 2):
        with checkpoint.open(Manager(tmp_path).path(step)) as reader:
            assert reader.manifest.renamed == ()
    checkpoint.save(tmp_path / "plain", app_of("first", "second"))
    assert b"renamed" not in (tmp_path / "plain" / "manifest.json").read_bytes()


def test_a_swap_without_a_record_is_made_by_the_call_that_is_told(tmp_path, caplog):
    """A run that an earlier version saved may have been swapped then, as it has the rules in its script."""
    root = tmp_path / "run"
    checkpoint.save(root / "step-00000001", app_of("first", "second"))
    app = app_of("second", "first")
    with caplog.at_level(logging.INFO), Manager(root) as manager:
        assert manager.restore(app, rename=SWAP) == 1
        assert numbers(app) == {"first": (1, 10), "second": (2, 20)}
        told = re.search(r"(checkpoint\.load\(.*init_state=True\))", caplog.text)[0]
        assert eval(told, {"checkpoint": checkpoint, "app": app}).renamed
        assert numbers(app) == {"second": (1, 10), "first": (2, 20)}
        manager.save(2, app)
    app = app_of("second", "first")
    start(root, app, 3, SWAP)
    assert numbers(app) == {"second": (1, 10), "first": (2, 20)}


def test_rules_of_a_load_are_applied_to_what_has_no_record(tmp_path):
    checkpoint.save(tmp_path / "old", app_of("first", "second"))
    app = app_of("second", "first")
    checkpoint.load(tmp_path / "old", app, rename=SWAP)
    assert numbers(app) == {"second": (1, 10), "first": (2, 20)}


def test_mirrors_tiers_and_conversions_keep_the_record(tmp_path):
    tier, mirror = checkpoint.Tier(str(tmp_path / "tier"), every=1), checkpoint.Mirror(tmp_path / "mirror")
    roots = {"destinations": [tier, mirror], "every": 2}
    start(tmp_path / "root", app_of("first", "second"), 2, **roots)
    for step in (3, 4, 5):
        app = app_of("second", "first")
        assert start(tmp_path / "root", app, step, SWAP, **roots) == step - 1
        assert numbers(app) == {"second": (1, 10), "first": (2, 20)}
    app = app_of("second", "first")
    start(tmp_path / "mirror", app, 6, SWAP)
    assert numbers(app) == {"second": (1, 10), "first": (2, 20)}
    checkpoint.reshard(tmp_path / "mirror" / "step-00000006", tmp_path / "resharded", world_size=2)
    checkpoint.convert(tmp_path / "root" / "step-00000002", tmp_path / "converted", to="shardopt", rename=SWAP)
    for url in (tmp_path / "resharded", tmp_path / "converted"):
        app = app_of("second", "first")
        checkpoint.load(url, app, rename=SWAP)
        assert numbers(app) == {"second": (1, 10), "first": (2, 20)}


def load_shifted(root):
    """Loads, in stages of a pipeline, a checkpoint with new names, and one with the old ones, of which c is no more."""
    rank, found = torch.distributed.get_rank(), []
    rules = {r"^b$": "c", r"^a$": "b"}
    for url, of_ranks in (("new", "bc"), ("old", "cd")):
        app = {of_ranks[rank]: torch.zeros(2)}
        try:
            checkpoint.load(f"{root}/{url}", app, rename=rules, strict=checkpoint.Strictness(unexpected="ignore"))
        except MismatchError as error:
            found.append(error.code)
        else:
            found.append(float(app[of_ranks[rank]][0]))
    return found


def test_names_that_shift_between_ranks_tell_whether_they_are_new(tmp_path):
    checkpoint.save(tmp_path / "new", {"b": torch.full((2,), 1.0), "c": torch.full((2,), 2.0)})
    checkpoint.save(tmp_path / "old", {key: torch.ones(2) for key in "bcd"})
    assert run_ranks(2, load_shifted, str(tmp_path)) == [[1.0, "bad-rules"], [2.0, "bad-rules"]]


def test_a_refusal_tells_of_rules_that_were_passed_by(tmp_path):
    start(tmp_path, app_of("first", "second"), 1)
    start(tmp_path, app_of("second", "first"), 2, SWAP)
    with pytest.raises(MismatchError, match=r"its names have been through .*already"):
        start(tmp_path, app_of("second", "third"), 3, SWAP)
    with pytest.raises(MismatchError) as refused:
        start(tmp_path, app_of("second", "third"), 3)
    assert "have been through" not in str(refused.value)
