"""A run resumes under other names of its modules: the options of a parameter are renamed as its state is."""

import pytest
import torch
from torch import nn

import shardopt
from shardopt import (
    EMA,
    GradientClipping,
    GradientClippingOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    checkpoint,
)
from shardopt.checkpoint import Strictness
from shardopt.checkpoint.loading.names import names_as_stored
from shardopt.checkpoint.loading.names_in_app import names_in_app
from shardopt.checkpoint.loading.options import LoadOptions
from shardopt.errors import MismatchError
from shardopt.optim import CombinedOptimizer
from shardopt.optim.keyed import KeyedOptimizer
from shardopt.state.flatten import flatten

EVERYWHERE = {r"\.layers\.": ".blocks."}
RULES = [
    EVERYWHERE,
    {"layers": "blocks"},
    {r"^model\.layers\.": "model.blocks.", r"^optimizer\.state\.layers\.": "optimizer.state.blocks."},
    {r"\.layers\b": ".stack", r"stack(?=\.\d)": "blocks"},
]
KINDS = ["settles at its first step", "without state", "rates are tensors", "state of a group", "two algorithms"]


class Net(nn.Module):
    """`head` is the least name beside `layers`, and not beside `blocks`."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 2)
        self.add_module(name, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))
        self.name = name

    def forward(self, inputs):
        return self.head(self.get_submodule(self.name)(inputs))


def train(model, optimizer, first, steps=2):
    for i in range(first, first + steps):
        inputs = torch.arange(6.0).reshape(2, 3) + i

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


GROUPS = [{"match": "bias", "lr": 0.03, "weight_decay": 0.0}]
OPTIMIZERS = {
    "adamw": lambda named: shardopt.keyed("adamw", named, lr=0.01, weight_decay=0.1, groups=GROUPS),
    "settles at its first step": lambda named: shardopt.keyed("sgd", named, lr=0.01, momentum=0.9, dampening=0.5),
    "without state": lambda named: shardopt.keyed("sgd", named, lr=0.01, groups=GROUPS),
    "rates are tensors": lambda named: shardopt.keyed(
        "adam", named, lr=torch.tensor(0.01), groups=[{"match": "bias", "weight_decay": 0.2}]
    ),
    "state of a group": lambda named: shardopt.keyed("lbfgs", named, lr=0.1, max_iter=2, history_size=3),
    "two algorithms": lambda named: shardopt.keyed(
        "adamw", named, lr=0.01, groups=[{"match": "bias", "algorithm": "sgd", "momentum": 0.9, "lr": 0.02}]
    ),
}


def app_of(name, make):
    model = Net(name)
    optimizer = make(dict(model.named_parameters()))
    optimizer.init_state()
    return {"model": model, "optimizer": optimizer, "step": 0}


def saved_by(path, make):
    """An app whose options are no longer those that it was made with, after two steps."""
    app = app_of("layers", make)
    for number, group in enumerate(app["optimizer"].param_groups):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5 + number
    train(app["model"], app["optimizer"], 0)
    app["step"] = 2
    checkpoint.save(path, app)
    return app


def bits(app):
    """All parameters, and options by them."""
    options = {
        id(parameter): {key: value for key, value in group.items() if key != "params"}
        for group in app["optimizer"].param_groups
        for parameter in group["params"]
    }
    return [(parameter.detach().tolist(), options[id(parameter)]) for parameter in app["model"].parameters()]


def state_of(optimizer):
    return {
        name: {entry: value.clone() if isinstance(value, torch.Tensor) else value for entry, value in entries.items()}
        for name, entries in optimizer.state_dict()["state"].items()
    }


@pytest.mark.parametrize(("kind", "rules"), [*(("adamw", rules) for rules in RULES), *((k, RULES[1]) for k in KINDS)])
def test_a_run_resumes_under_other_names(tmp_path, kind, rules):
    app = saved_by(tmp_path / "c", OPTIMIZERS[kind])
    renamed = app_of("blocks", OPTIMIZERS[kind])
    assert bits(renamed) != bits(app)
    checkpoint.load(tmp_path / "c", renamed, rename=rules)
    assert renamed["step"] == 2
    assert bits(renamed) == bits(app)
    for each in (app, renamed):
        train(each["model"], each["optimizer"], 2)
    if kind == "state of a group":  # sums go over parameters in the order of their names
        for one, other in zip(app["model"].parameters(), renamed["model"].parameters(), strict=True):
            torch.testing.assert_close(one, other)
    else:
        assert bits(renamed) == bits(app)


def nested(named):
    """Children under keys of their own, one in another, wrapped, with one that keeps state of its own."""
    named = dict(named)
    own = {name: named.pop(name) for name in list(named) if "head" in name}
    bias = {name: named.pop(name) for name in list(named) if "bias" in name}
    inner = CombinedOptimizer(
        [
            ("layers", shardopt.keyed("adamw", named, lr=0.02, groups=[{"match": r"1\.weight", "lr": 0.04}])),
            ("bias", shardopt.keyed("sgd", bias, lr=0.01, momentum=0.9)),
        ]
    )
    clipped = GradientClippingOptimizer(inner, GradientClipping.NORM, 0.5)
    both = CombinedOptimizer([("inner", clipped), ("own", shardopt.keyed("rmsprop", own, lr=0.01))])
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1), WarmupStage(max_iters=9, value=0.7)]
    return WarmupOptimizer(both, stages, lr=0.02)


def nested_app(name):
    app = app_of(name, nested)
    average = EMA(app["model"], decay=0.5)
    average.attach(app["optimizer"])
    schedule = torch.optim.lr_scheduler.LambdaLR(app["optimizer"], lambda step: 1.0 + step)
    return app | {"average": average, "schedule": schedule}


def test_optimizers_in_optimizers_averages_and_schedules(tmp_path):
    app = nested_app("layers")
    train(app["model"], app["optimizer"], 0)
    app["schedule"].step()
    checkpoint.save(tmp_path / "c", app)
    renamed = nested_app("blocks")
    # The key of a child is "layers", too, and stays.
    checkpoint.load(tmp_path / "c", renamed, rename={r"\.layers\.(?=\d)": ".blocks."})
    for each in (app, renamed):
        train(each["model"], each["optimizer"], 2)
        each["schedule"].step()
    assert bits(renamed) == bits(app)
    assert renamed["schedule"].state_dict() == app["schedule"].state_dict()
    averages = [each["average"].state_dict()["state"] for each in (app, renamed)]
    for name, entries in averages[0].items():
        (value,), (other,) = entries.values(), averages[1][name.replace("layers", "blocks")].values()
        assert torch.equal(value, other)


def test_an_optimizer_that_goes_by_another_name_itself(tmp_path):
    app = saved_by(tmp_path / "c", OPTIMIZERS["adamw"])
    fresh = app_of("blocks", OPTIMIZERS["adamw"])
    moved = {"model": fresh["model"], "train": {"state": {"opt": fresh["optimizer"]}}, "step": 0}
    checkpoint.load(tmp_path / "c", moved, rename=EVERYWHERE | {r"^optimizer\.": "train.state.opt."})
    assert bits(fresh) == bits(app)
    checkpoint.save(tmp_path / "back", moved)
    back = app_of("layers", OPTIMIZERS["adamw"])
    checkpoint.load(
        tmp_path / "back", back, rename={r"^train\.state\.opt\b": "optimizer", r"(state|model)\.blocks": r"\1.layers"}
    )
    assert bits(back) == bits(app)


def refused(path, make, rules, **options):
    app = app_of("blocks", make)
    before, state = bits(app), state_of(app["optimizer"])
    with pytest.raises(MismatchError, match=r"nothing was changed|one name") as caught:
        checkpoint.load(path, app, rename=rules, **options)
    assert bits(app) == before
    torch.testing.assert_close(state_of(app["optimizer"]), state, rtol=0, atol=0)
    return {problem.key: problem for problem in caught.value.problems}


def test_a_rule_for_the_model_alone_renames_no_optimizer(tmp_path):
    saved_by(tmp_path / "c", OPTIMIZERS["without state"])
    problems = refused(tmp_path / "c", OPTIMIZERS["without state"], {r"^model\.layers\.": "model.blocks."})
    assert set(problems) == {f"optimizer.param_groups.blocks.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}


def test_rules_that_give_two_parameters_one_name_are_refused(tmp_path):
    path = tmp_path / "c"
    make = OPTIMIZERS["without state"]
    saved_by(path, make)
    problems = refused(path, make, {r"^model\.layers": "model.blocks", r"layers\.\d": "blocks.0"})
    options = "optimizer.param_groups"
    assert problems[f"{options}.blocks.0.bias"].found == f"{options}.layers.0.bias and {options}.layers.1.bias"
    assert set(problems) == {f"{options}.blocks.0.bias", f"{options}.blocks.0.weight"}
    assert refused(path, make, {r"^model\.layers": "model.blocks", r"layers\.\d": "blocks.0"}, strict=False) == problems


def test_rules_that_fit_the_state_of_a_parameter_and_not_its_name_are_refused(tmp_path):
    path = tmp_path / "c"
    saved_by(path, OPTIMIZERS["adamw"])
    rules = {r"^model\.layers": "model.blocks", r"layers\.(\d)\.(weight|bias)\.": r"blocks.\1.\2."}
    problems = refused(path, OPTIMIZERS["adamw"], rules)
    blocks = {f"blocks.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    assert {f"optimizer.param_groups.{name}" for name in blocks} <= set(problems)


def test_rules_that_take_a_parameter_out_of_its_optimizer_are_refused(tmp_path):
    saved_by(tmp_path / "c", OPTIMIZERS["adamw"])
    rules = EVERYWHERE | {r"^optimizer\.state\.blocks\.1": "other.state.blocks.1"}
    problems = refused(tmp_path / "c", OPTIMIZERS["adamw"], rules)
    assert {"optimizer.state.blocks.1.bias", "optimizer.state.blocks.1.weight"} <= set(problems)
    assert "other.*" in problems


def test_without_groups_any_rule_that_fits_the_keys_will_do(tmp_path):
    def make(named):
        made = shardopt.keyed("adamw", named, lr=0.01)
        made.save_param_groups(False)
        return made

    app = saved_by(tmp_path / "c", make)
    renamed = app_of("blocks", make)
    rules = {r"^model\.layers": "model.blocks", r"layers\.(\d)\.(weight|bias)\.": r"blocks.\1.\2."}
    checkpoint.load(tmp_path / "c", renamed, rename=rules)
    assert str(state_of(renamed["optimizer"])) == str(state_of(app["optimizer"])).replace("layers", "blocks")


def test_what_is_selected_is_renamed(tmp_path):
    app = saved_by(tmp_path / "c", OPTIMIZERS["adamw"])
    renamed = app_of("blocks", OPTIMIZERS["adamw"])
    fresh = [parameter.clone() for parameter in renamed["model"].parameters()]
    checkpoint.load(tmp_path / "c", renamed, rename=EVERYWHERE, select="^optimizer")
    assert all(map(torch.equal, fresh, renamed["model"].parameters()))
    assert [options for _, options in bits(renamed)] == [options for _, options in bits(app)]
    part = app_of("blocks", OPTIMIZERS["adamw"])
    checkpoint.load(tmp_path / "c", part, rename=EVERYWHERE, select="param_groups", strict=Strictness())
    assert [options for _, options in bits(part)] == [options for _, options in bits(app)]


def test_groups_that_are_taken_apart_are_left_where_they_are_not_selected(tmp_path):
    app = saved_by(tmp_path / "c", OPTIMIZERS["rates are tensors"])
    renamed = app_of("blocks", lambda named: shardopt.keyed("adam", named, lr=torch.tensor(0.01)))  # in one group
    before = [options for _, options in bits(renamed)]
    checkpoint.load(tmp_path / "c", renamed, rename=EVERYWHERE, select=r"^model|\.state\.")
    assert [options for _, options in bits(renamed)] == before
    assert [weights for weights, _ in bits(renamed)] == [weights for weights, _ in bits(app)]


def test_state_of_plain_values_alone_is_renamed(tmp_path):
    def app(name):
        params = {f"{name}.w": nn.Parameter(torch.ones(2)), "head.w": nn.Parameter(torch.ones(2))}
        state = {parameter: {"count": 0} for parameter in params.values()}
        optimizer = KeyedOptimizer(params, state, [{"params": list(params.values()), "lr": 0.0}])
        optimizer.save_param_groups(True)
        return {"optimizer": optimizer}, state

    saved, state = app("layers")
    for number, entries in enumerate(state.values()):
        entries["count"] = number + 1
    saved["optimizer"].param_groups[0]["lr"] = 0.5
    checkpoint.save(tmp_path / "c", saved)
    renamed, counts = app("blocks")
    checkpoint.load(tmp_path / "c", renamed, rename={r"\.layers\.": ".blocks."})
    assert [entries["count"] for entries in counts.values()] == [1, 2]
    assert renamed["optimizer"].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("stepped", [True, False])
def test_a_checkpoint_whose_keys_are_the_apps_is_taken_as_it_is(tmp_path, stepped):
    """The plain case gives what the way for all others gives; one key that the app has not is no plain case."""
    net = Net("layers")
    optimizer = shardopt.keyed("adamw", net.named_parameters(), lr=0.1)
    if stepped:
        net.head.weight.grad = torch.ones_like(net.head.weight)
        optimizer.step()
    app = {"model": net, "optimizer": optimizer, "rng": checkpoint.PerRank([1]), "nested": {"a": [1, torch.ones(2)]}}
    checkpoint.save(tmp_path / "c", app)
    with checkpoint.open(tmp_path / "c") as reader:
        flat = flatten(app)
        names = names_as_stored(reader, flat)
        assert names == names_in_app(reader, flat, LoadOptions())
        assert names.chosen == flat.leaves.keys() and not names.renamed
        for key in ("rng", "nested", "model"):
            assert names_as_stored(reader, flatten({name: each for name, each in app.items() if name != key})) is None
