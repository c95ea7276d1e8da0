"""What errors of `keyed` and of `Manager` advise, followed to the letter."""

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.algorithms import AlgorithmSpec, CommunicatingOptimizer, Kind, StateEntry, StepsOn, registry
from shardopt.sharding import local_tensors
from tests.remedies.following import app_of, moments_of, refused, stepped


class Own(torch.optim.SGD):
    """An algorithm of somebody's, that is not registered."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            held = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
            parameter -= held.add_(parameter.grad)


def test_an_unknown_algorithm_is_registered(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    parameters = {"weight": torch.nn.Parameter(torch.ones(2))}
    remedy = "declare the state that it keeps with shardopt.algorithms.register(AlgorithmSpec(...))"
    refused(remedy, shardopt.keyed, Own, parameters, lr=0.1)
    spec = AlgorithmSpec(Own, "own", elementwise=True, state=(StateEntry("sum", Kind.PARAMETER),))
    shardopt.algorithms.register(spec)
    for algorithm in (Own, "own"):
        optimizer = shardopt.keyed(algorithm, parameters, lr=0.1)
        optimizer.init_state()
        assert optimizer.state_dict()["state"]["weight"]["sum"].shape == (2,)


def test_state_is_declared_by_entries(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    parameters = {"weight": torch.nn.Parameter(torch.ones(2))}
    refused("write StateEntry('sum', Kind.PARAMETER)", declare, Own, elementwise=True, state=("sum",))
    declare(Own, elementwise=True)
    refused("add StateEntry('sum', Kind.PARAMETER)", shardopt.keyed, "own", parameters, lr=0.1)
    declare(Own, elementwise=True, state=(StateEntry("sum", Kind.PARAMETER),))
    shardopt.keyed("own", parameters, lr=0.1)


class Rows(CommunicatingOptimizer):
    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    def equations(self, step):
        yield [(step.numbers(0, torch.float32), step.cuts)]
        if step.is_due():
            sums = local_tensors(step.counted_state()["sum"])
            for local, held, gradient in zip(step.local_tensors, sums, step.gradients, strict=True):
                local.sub_(held.add_(gradient.mean(-1, keepdim=True)) * step.group["lr"])


def test_state_of_rows_communicates(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    state = (StateEntry("sum", Kind.ROWS),)
    remedy = "let it step on parameters (elementwise=False, steps_on=StepsOn.PARAMETERS), and communicate"
    refused(remedy, declare, Rows, elementwise=True, state=state)
    declare(Rows, elementwise=False, steps_on=StepsOn.PARAMETERS, state=state)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    shardopt.keyed("rows", {"weight": weight}).step()
    assert weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def declare(optimizer, **given):
    shardopt.algorithms.register(AlgorithmSpec(optimizer, optimizer.__name__.lower(), **given))


def test_parameters_are_given_with_their_names():
    model = torch.nn.Linear(2, 2)
    refused("pass model.named_parameters()", shardopt.keyed, "adamw", [])
    refused("pass named_parameters()", shardopt.keyed, "adamw", model.parameters())
    assert [*shardopt.keyed("adamw", model.named_parameters()).params] == ["weight", "bias"]


@pytest.mark.parametrize("way", ["add", "after"])
def test_a_parameter_that_came_later_is_added_or_the_optimizer_made_after(way):
    app = app_of(steps=1)
    app["model"].scale = torch.nn.Parameter(torch.ones(2))
    app["optimizer"].param_groups[0]["params"].append(app["model"].scale)
    remedy = 'add it under its name, add_param_group({"params": {name: tensor}}), or make the optimizer after the model'
    refused(remedy, app["optimizer"].step)
    app["optimizer"].param_groups[0]["params"].pop()
    if way == "add":
        app["optimizer"].add_param_group({"params": {"scale": app["model"].scale}})
    else:
        app["optimizer"] = shardopt.keyed("adamw", app["model"].named_parameters())
    app["model"].scale.grad = torch.ones(2)
    app["optimizer"].step()
    assert app["model"].scale[0] != 1


def test_a_group_goes_to_the_one_that_is_meant():
    one, other = app_of(steps=1), app_of(steps=1)
    combined = shardopt.optim.CombinedOptimizer([("a", one["optimizer"]), ("b", other["optimizer"])])
    group = {"params": {"scale": torch.nn.Parameter(torch.ones(2))}}
    remedy = "call add_param_group of the one that is meant: optimizers[0][1] (AdamW), optimizers[1][1] (AdamW)"
    refused(remedy, combined.add_param_group, group)
    combined.optimizers[1][1].add_param_group(group)
    assert "b.scale" in combined.params
    remedy = "change it in the one that is meant, in `optimizers`"
    refused(remedy, setattr, combined, "param_groups", [])
    dict(combined.optimizers)["b"].param_groups[0]["lr"] = 0.5
    assert 0.5 in [group["lr"] for group in combined.param_groups]


def test_torchs_getters_get_the_optimizer_by_position():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    app = app_of(steps=1)
    remedy = "pass optimizer.as_torch() in its place"
    refused(remedy, get_optimizer_state_dict, app["model"], app["optimizer"])
    taken = get_optimizer_state_dict(app["model"], app["optimizer"].as_torch())
    assert taken["state"]["weight"]["step"] == 1


def test_state_that_cannot_follow_does_without_the_rounding(caplog):
    options = {"state_dtype": torch.uint8, "betas": (0.9, 0.99937)}  # the line is said once for each of these
    stepped(app_of(**options, rounding="nearest"), 1)
    assert "leave rounding out to let it follow" in caplog.text
    caplog.clear()
    stepped(app_of(**options), 1)
    assert not caplog.messages


def test_clipping_is_chosen_or_turned_off():
    from shardopt import GradientClipping, GradientClippingOptimizer

    remedy = "pass clipping=GradientClipping.NORM (or VALUE), or GradientClipping.NONE to turn it off"
    inner = app_of()["optimizer"]
    refused(remedy, GradientClippingOptimizer, inner, max_gradient=1.0)
    for clipping in (GradientClipping.NORM, GradientClipping.VALUE, GradientClipping.NONE):
        GradientClippingOptimizer(inner, max_gradient=1.0, clipping=clipping)


def test_stages_of_warm_up_are_given_as_such():
    from shardopt import WarmupOptimizer, WarmupPolicy, WarmupStage

    inner = app_of()["optimizer"]
    stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=1000, value=0.01)
    remedy = "pass a stage, as [WarmupStage(WarmupPolicy.LINEAR, max_iters=1000, value=0.01)]"
    refused(remedy, WarmupOptimizer, inner, [])
    refused("write WarmupStage(WarmupPolicy.LINEAR, max_iters=1000, value=0.01)", WarmupOptimizer, inner, ["linear"])
    WarmupOptimizer(inner, [stage])


def test_state_without_that_of_a_wrapper_is_loaded_without_strictness():
    from shardopt import WarmupOptimizer, WarmupPolicy, WarmupStage

    before, app = app_of(steps=2), app_of(steps=1)
    wrapped = WarmupOptimizer(app["optimizer"], [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.5)])
    state = before["optimizer"].state_dict()
    remedy = "it was saved without …: pass strict=False to load without this"
    refused(remedy, wrapped.load_state_dict, state)
    wrapped.load_state_dict(state, strict=False)
    assert moments_of(app) == moments_of(before)
    stepped({**app, "optimizer": wrapped}, 1)


def test_averages_are_swapped_back():
    app = app_of(steps=1)
    ema = shardopt.EMA(app["model"], decay=0.5)
    with ema.swap():
        refused("do not nest swap()", ema.swap().__enter__)
    with ema.swap():
        pass


def test_options_of_saves_come_as_such(tmp_path):
    refused("give it as in SaveOptions(durable=False)", checkpoint.Manager, tmp_path, options={"durable": False})
    app = {"weight": torch.ones(2)}
    with checkpoint.Manager(tmp_path, options=checkpoint.SaveOptions(durable=False)) as manager:
        manager.save(1, app, force=True)
        app["weight"].zero_()
        assert manager.restore(app) == 1 and app["weight"].all()


def test_a_branch_is_one_of_those_that_there_are(tmp_path):
    app = {"step": 0}
    with checkpoint.Manager(tmp_path) as manager:
        for step in (1, 2):
            app["step"] = step
            manager.save(step, app, force=True)
        manager.restore(app, step=1)
        refused("see abandoned_steps() for those that there are", manager.restore, app, step=2, branch=7)
        ((branch, steps),) = manager.abandoned_steps().items()
        assert manager.restore(app, step=steps[0], branch=branch) == 2 and app["step"] == 2


@pytest.mark.parametrize("name", ["step-00000001", "last"])
def test_a_run_is_not_kept_in_a_checkpoint(tmp_path, name):
    checkpoint.save(tmp_path / name, {"weight": torch.ones(2)})
    app = {"weight": torch.zeros(2)}
    whose = "another directory" if name == "last" else "…, of which this is a step"
    remedy = (
        f"give Manager {whose}; to begin with what it holds, checkpoint.load(url, app) where restore has returned 0"
    )
    problem = refused(remedy, checkpoint.Manager(tmp_path / name).restore, app)
    if name == "last":
        with checkpoint.Manager(tmp_path / "another") as manager:
            assert manager.restore(app) == 0
            checkpoint.load(tmp_path / name, app)
            manager.save(1, app, force=True)
    else:
        parent = problem.remedy.removeprefix("give Manager ").partition(", of which")[0]
        assert checkpoint.Manager(parent).restore(app) == 1
    assert app["weight"].all()
