"""Parameters that are declared as tied under two names, in one process: the job of stages, seen from one rank."""

import json

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError, StateError

TIED = {"head.weight": "embed.weight"}
ROWS = 6


class Model(nn.Module):
    """An embedding, an output layer, or both with one weight or with two."""

    def __init__(self, *names, value=0.0, one=True):
        super().__init__()
        if "embed" in names:
            self.embed = nn.Embedding(ROWS, 4)
        if "head" in names:
            self.head = nn.Linear(4, ROWS, bias=False)
        if one and len(names) == 2:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.arange(24.0).view(6, 4) + value)


def app_of(*names, value=0.0, tied=TIED, one=True, groups=None, nested=False, **options):
    model = Model(*names, value=value, one=one)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), tied=tied, groups=groups, lr=0.1, **options)
    return {"model": {"stage": model} if nested else model, "optimizer": optimizer, "step": 1}


def module_of(app):
    return app["model"]["stage"] if isinstance(app["model"], dict) else app["model"]


def train(app, steps=(1, 2)):
    for step in steps:
        for parameter in module_of(app).parameters():
            parameter.grad = torch.full_like(parameter, float(step)).cumsum(0)
        app["optimizer"].step()


def weight_of(app):
    return next(module_of(app).parameters())


def moment_of(app):
    (entries,) = app["optimizer"].state_dict()["state"].values()
    return entries["exp_avg"]


WAYS = {  # the app, and how its load declares what is tied
    "both, one weight": (("embed", "head"), TIED, TIED),
    "both, not declared": (("embed", "head"), None, None),
    "the name alone": (("embed",), TIED, TIED),
    "the alias alone": (("head",), TIED, TIED),
    "the alias alone, its optimizer under it": (("head",), None, TIED),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("loaded", WAYS)
def test_whoever_has_which_of_the_names(tmp_path, saved, loaded, nested):
    (saved_names, saved_tied, tied), (names, own_tied, load_tied) = WAYS[saved], WAYS[loaded]
    app, other = (
        app_of(*saved_names, tied=saved_tied, nested=nested),
        app_of(*names, value=9.0, tied=own_tied, nested=nested),
    )
    train(app)
    checkpoint.save(tmp_path / "c", app, tied=tied)
    fills_both = saved == "the name alone" and len(names) == 2  # one weight here, stored under the name of its state
    if load_tied is None and saved in ("the name alone", "the alias alone, its optimizer under it") and not fills_both:
        with pytest.raises(MismatchError, match=r"head\.weight|embed\.weight"):
            checkpoint.load(tmp_path / "c", other, init_state=True)
        return
    checkpoint.load(tmp_path / "c", other, init_state=True, tied=load_tied)
    assert torch.equal(weight_of(other), weight_of(app))
    assert torch.equal(moment_of(other), moment_of(app))
    train(app), train(other)
    assert torch.equal(weight_of(other), weight_of(app))


def test_stored_once_and_read_under_both(tmp_path):
    for number, names in enumerate([("embed", "head"), ("head",)]):
        app = app_of(*names)
        train(app)
        checkpoint.save(tmp_path / str(number), app, tied=TIED)
        body = json.loads((tmp_path / str(number) / "manifest.json").read_bytes())
        assert "model.embed.weight" in body["tensors"] and "model.head.weight" not in body["tensors"]
        assert body["tied"]["model.head.weight"][0] == "model.embed.weight"
        assert checkpoint.verify(tmp_path / str(number)).ok
        with checkpoint.open(tmp_path / str(number)) as reader:
            for key in ("model.embed.weight", "model.head.weight"):
                assert torch.equal(reader.read(key), weight_of(app))
            moments = {key for key in reader.keys() if key.endswith("exp_avg")}  # noqa: SIM118  # no dict
        assert "optimizer.state.embed.weight.exp_avg" in moments
        checkpoint.reshard(tmp_path / str(number), tmp_path / f"{number}-again", world_size=2)
        other = app_of("embed", "head", value=3.0)
        checkpoint.load(tmp_path / f"{number}-again", other, init_state=True, tied=TIED)
        assert torch.equal(weight_of(other), weight_of(app))


def test_two_tensors_under_names_that_are_declared_as_tied(tmp_path):
    app = {"model": Model("embed", "head", one=False)}
    with pytest.raises(StateError, match=r"model\.head\.weight: found another tensor on this rank than model\.embed"):
        checkpoint.save(tmp_path / "c", app, tied=TIED)
    assert not (tmp_path / "c" / "manifest.json").exists()
    checkpoint.save(tmp_path / "c", app)
    before = app["model"].embed.weight.clone()
    with pytest.raises(StateError, match=r"model\.head\.weight: found another tensor"):
        checkpoint.load(tmp_path / "c", app, tied=TIED)
    assert torch.equal(app["model"].embed.weight, before)


def test_values_under_names_that_are_declared_as_tied(tmp_path):
    app = {"counts": {"embed.weight": 3, "head.weight": 3}}
    checkpoint.save(tmp_path / "c", app, tied=TIED)
    other = {"counts": {"embed.weight": 0, "head.weight": 0}}
    checkpoint.load(tmp_path / "c", other, tied=TIED)
    assert other == app
    with pytest.raises(StateError, match=r"counts\.head\.weight: found 4 under one name, 3 under the other"):
        checkpoint.save(tmp_path / "d", {"counts": {"embed.weight": 3, "head.weight": 4}}, tied=TIED)
    with pytest.raises(StateError, match="found"):
        checkpoint.save(tmp_path / "d", {"counts": {"embed.weight": torch.ones(2), "head.weight": 4}}, tied=TIED)
    checkpoint.save(tmp_path / "d", {"counts": {"embed.weight": 3, "head.weight": 4}})
    with pytest.raises(MismatchError, match=r"counts\.head\.weight: found another value than counts\.embed\.weight"):
        checkpoint.load(tmp_path / "d", {"counts": {"embed.weight": 0}}, tied=TIED)


def test_a_checkpoint_that_has_both_apart(tmp_path):
    apart = Model("embed", "head", one=False)
    checkpoint.save(tmp_path / "equal", {"model": apart})
    with torch.no_grad():
        apart.head.weight[5, 3] += 1
    checkpoint.save(tmp_path / "unequal", {"model": apart})
    for names in (("embed",), ("head",), ("embed", "head")):
        model = Model(*names, value=9.0)
        checkpoint.load(tmp_path / "equal", {"model": model}, tied=TIED)
        assert torch.equal(weight_of({"model": model}), apart.embed.weight)
        model = Model(*names, value=9.0)
        with pytest.raises(MismatchError, match=r"model\.head\.weight: found other values than model\.embed\.weight"):
            checkpoint.load(tmp_path / "unequal", {"model": model}, tied=TIED)
        assert torch.equal(weight_of({"model": model}), weight_of({"model": Model(*names, value=9.0)}))


def test_renamed_and_selected(tmp_path):
    app = app_of("head")
    train(app)
    checkpoint.save(tmp_path / "c", app, tied=TIED)
    rules = {r"(^|\.)embed\.": r"\1wte.", r"(^|\.)head\.": r"\1lm_head."}

    def renamed_app():
        parameter = nn.Parameter(torch.zeros(6, 4))
        named = [("lm_head.weight", parameter)]
        tied = {"lm_head.weight": "wte.weight"}
        return {"model": dict(named), "optimizer": shardopt.keyed("adamw", named, tied=tied, lr=0.1), "step": 0}, tied

    other, tied = renamed_app()
    report = checkpoint.load(tmp_path / "c", other, init_state=True, rename=rules, tied=tied)
    assert torch.equal(other["model"]["lm_head.weight"], weight_of(app)) and other["step"] == 1
    assert report.renamed["model.wte.weight"] == "model.embed.weight"
    other, tied = renamed_app()
    checkpoint.load(tmp_path / "c", other, rename=rules, tied=tied, select=r"^model\.wte")
    assert torch.equal(other["model"]["lm_head.weight"], weight_of(app)) and other["step"] == 0
    # Under the alias alone, of a job that declared nothing.
    checkpoint.save(tmp_path / "alias", {"model": {"head.weight": torch.ones(6, 4)}})
    other, tied = renamed_app()
    checkpoint.load(tmp_path / "alias", {"model": other["model"]}, rename=rules, tied=tied)
    assert other["model"]["lm_head.weight"].eq(1).all()


def test_one_optimizer_has_one_of_them():
    app = app_of("embed", "head")
    assert list(app["optimizer"].params) == ["embed.weight"]
    apart = Model("embed", "head", one=False)
    with pytest.raises(StateError, match=r"embed\.weight: found two parameters"):
        shardopt.keyed("adamw", apart.named_parameters(), tied=TIED)
    added = shardopt.keyed("adamw", [("other", nn.Parameter(torch.ones(2)))], tied=TIED)
    added.add_param_group({"params": Model("head").named_parameters()})
    assert list(added.params) == ["other", "embed.weight"]
    in_backward = shardopt.in_backward(Model("head"), "adamw", tied=TIED)
    assert list(in_backward.params) == ["embed.weight"]


def test_names_of_wrappers(tmp_path):
    model = Model("head", value=2.0)
    prefixed = [(f"module.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = shardopt.keyed("adamw", prefixed, tied=TIED)
    assert list(optimizer.params) == ["embed.weight"]


@pytest.mark.parametrize("stage", ["now", "lazy"])
def test_saved_in_the_background_with_averages(tmp_path, stage):
    app = app_of("embed", "head")
    app["average"] = shardopt.EMA(app["model"], decay=0.5)
    train(app)
    app["average"].update()
    checkpoint.async_save(tmp_path / "c", app, stage=stage, tied=TIED).result()
    other = app_of("head", value=5.0)
    other["average"] = shardopt.EMA(other["model"], decay=0.5)
    checkpoint.load(tmp_path / "c", other, init_state=True, tied=TIED)
    assert torch.equal(weight_of(other), weight_of(app))
    train(other), train(app)
    for each in (app, other):
        each["average"].update()
    assert torch.equal(weight_of(other), weight_of(app))


def test_what_cannot_be_meant(tmp_path):
    for tied in ({"a": "b", "b": "c"}, {"a": 1}, [("a", "b")], {"a": "a"}):
        with pytest.raises(StateError, match="tied"):
            checkpoint.save(tmp_path / "c", {"x": 1}, tied=tied)
        with pytest.raises(StateError, match="tied"):
            shardopt.keyed("sgd", [("x", nn.Parameter(torch.ones(1)))], tied=tied)


def test_options_that_differ(tmp_path):
    """Each parameter had a group of its own, as without ties; then they are tied."""
    groups = [{"match": "head", "weight_decay": 0.5}, {"match": "embed", "weight_decay": 0.0}]
    checkpoint.save(tmp_path / "c", app_of("embed", "head", tied=None, one=False, groups=groups))
    with pytest.raises(MismatchError, match=r"param_groups\.head\.weight: found another value than"):
        checkpoint.load(tmp_path / "c", app_of("embed", "head"), tied=TIED)
    other = app_of("embed", "head", value=4.0)
    checkpoint.load(tmp_path / "c", other, tied=TIED, select="^model")
    assert torch.equal(weight_of(other), weight_of(app_of("head")))
