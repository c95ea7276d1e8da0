"""Schedules of torch's in an app: their rates go by position of groups, and are not to reach other groups."""

import pytest
import torch
from torch.optim import lr_scheduler

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import MismatchError
from shardopt.optim import CombinedOptimizer, KeyedOptimizerWrapper

RATES = {"bias": 0.2, "weight": 0.1}


def of_rates(optimizer, times=1.0):
    return [group["lr"] * times for group in optimizer.param_groups]


SCHEDULES = {
    "lambda": lambda it: lr_scheduler.LambdaLR(it, [lambda step: 0.5**step] * len(it.param_groups)),
    "cosine": lambda it: lr_scheduler.CosineAnnealingLR(it, 10),
    "step": lambda it: lr_scheduler.StepLR(it, 2),
    "one cycle": lambda it: lr_scheduler.OneCycleLR(it, of_rates(it), total_steps=20),
    "cyclic": lambda it: lr_scheduler.CyclicLR(it, of_rates(it), of_rates(it, 2), cycle_momentum=False),
    "chained": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(it), lr_scheduler.ExponentialLR(it, 0.9)]
    ),
    "sequential": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.LinearLR(it), lr_scheduler.CosineAnnealingLR(it, 10)], [2]
    ),
    "sequential in chained": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.SequentialLR(it, [lr_scheduler.LinearLR(it), lr_scheduler.CosineAnnealingLR(it, 10)], [2])]
    ),
}


def made(schedule, order=("bias", "weight"), rates=RATES):
    """An app whose optimizer has a group for each of these patterns, of this rate, and a last one for the rest."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    groups = [{"match": pattern, "lr": rates[pattern]} for pattern in order]
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.3, groups=groups)
    return {"model": model, "optimizer": optimizer, "schedule": schedule(optimizer), "step": 0}


def combined(optimizer_of, order=("bias", "weight")):
    """An app whose optimizer has others in it: its groups are a tuple."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    members = {each: {n: p for n, p in model.named_parameters() if each in n} for each in RATES}
    optimizer = CombinedOptimizer([(each, optimizer_of(members[each], RATES[each])) for each in order])
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}


def trained(app, steps=3):
    for _ in range(steps):
        app["model"](torch.randn(3, 4)).sum().backward()
        app["optimizer"].step()
        app["optimizer"].zero_grad()
        app["schedule"].step()
        app["step"] += 1
    return app


def rates_by_name(optimizer):
    return {name: group["lr"] for group in optimizer.state_dict()["param_groups"] for name in group["params"]}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_groups_in_another_order_or_number_are_refused_before_anything_changes(tmp_path, kind, caplog):
    saved = trained(made(SCHEDULES[kind]))
    checkpoint.save(tmp_path / "c", saved)

    same = made(SCHEDULES[kind])
    checkpoint.load(tmp_path / "c", same, init_state=True)
    trained(same), trained(saved)
    assert rates_by_name(same["optimizer"]) == rates_by_name(saved["optimizer"])
    assert not caplog.records

    for order in (("weight", "bias"), ("bias", "1", "weight")):
        other = made(SCHEDULES[kind], order, {**RATES, "1": 0.1})
        before = rates_by_name(other["optimizer"]), other["model"][0].weight.clone(), other["schedule"].state_dict()
        with pytest.raises(MismatchError, match="nothing was changed") as caught:
            checkpoint.load(tmp_path / "c", other, init_state=True)
        problems = caught.value.problems
        assert all(each.key.startswith("schedule.") for each in problems), problems
        assert any("base_lrs" in each.key for each in problems)
        assert "0.bias" in problems[0].required
        assert 'Strictness(unexpected="ignore")' in problems[0].remedy
        assert other["step"] == 0 and torch.equal(other["model"][0].weight, before[1])
        assert rates_by_name(other["optimizer"]) == before[0]
        assert [*other["schedule"].state_dict()] == [*before[2]]


def test_the_remedy_makes_the_schedule_anew_where_it_was(tmp_path):
    """As the error says: without the schedule, which is made after the load, with last_epoch."""
    saved = trained(made(SCHEDULES["cosine"]))
    checkpoint.save(tmp_path / "c", saved)
    other = made(SCHEDULES["cosine"], ("weight", "bias"))
    del other["schedule"]
    checkpoint.load(tmp_path / "c", other, init_state=True, strict=Strictness(unexpected="ignore"))
    other["schedule"] = lr_scheduler.CosineAnnealingLR(other["optimizer"], 10, last_epoch=other["step"] - 1)
    assert rates_by_name(other["optimizer"]) == rates_by_name(saved["optimizer"])
    trained(other, 4), trained(saved, 4)
    assert rates_by_name(other["optimizer"]) == pytest.approx(rates_by_name(saved["optimizer"]))


def test_limits_that_the_code_gives_in_another_order_are_refused(tmp_path):
    def plateau(floors):
        return lambda it: shardopt.optim.ReduceLROnPlateau(it, min_lr=floors)

    equal = dict.fromkeys(RATES, 0.1)
    checkpoint.save(tmp_path / "c", made(plateau([0.0, 0.01, 0.02]), rates=equal))
    with pytest.raises(
        MismatchError, match=r"schedule.min_lrs: found \[0.0, 0.01, 0.02\]; required \[0.01, 0.0, 0.02\]"
    ):
        checkpoint.load(tmp_path / "c", made(plateau([0.01, 0.0, 0.02]), ("weight", "bias"), equal))


def test_another_number_of_schedules_within_one_is_refused(tmp_path):
    def chained(count):
        return lambda it: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(it, 0.9) for _ in range(count)])

    checkpoint.save(tmp_path / "c", made(chained(2)))
    with pytest.raises(MismatchError, match=r"schedule._schedulers: found 2 schedules; required 3"):
        checkpoint.load(tmp_path / "c", made(chained(3)))


def test_optimizers_of_torch_are_refused_by_the_number_of_groups(tmp_path):
    def app(count):
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups = [{"params": params}] if count == 1 else [{"params": [each]} for each in params]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return {"schedule": lr_scheduler.CosineAnnealingLR(optimizer, 5)}  # whose optimizer is elsewhere

    checkpoint.save(tmp_path / "c", app(2))
    with pytest.raises(MismatchError, match=r"schedule.base_lrs: found those of 2 groups; required of 1"):
        checkpoint.load(tmp_path / "c", app(1))


def test_rates_that_were_changed_by_hand_in_the_schedule_pass(tmp_path, caplog):
    saved = trained(made(SCHEDULES["lambda"]))
    saved["schedule"].base_lrs = [rate / 2 for rate in saved["schedule"].base_lrs]
    trained(saved, 1)
    checkpoint.save(tmp_path / "c", saved)
    into = made(SCHEDULES["lambda"])
    checkpoint.load(tmp_path / "c", into, init_state=True)
    assert into["schedule"].base_lrs == saved["schedule"].base_lrs
    assert not caplog.records


def lower_one_base(app):
    app["schedule"].base_lrs[0] /= 2


def restart_one(app):
    app["optimizer"].param_groups[0]["initial_lr"] /= 2


CHANGES = {  # the change, the schedule, and the rates of groups but the last one, of 0.3
    "a base, of equal ones": (lower_one_base, "lambda", {"bias": 0.3}),
    "a base, of equal ones that all groups still have": (lower_one_base, "cosine", {"bias": 0.3}),
    "a base, to that of another group": (lower_one_base, "lambda", {"bias": 0.6, "0.weight": 0.6}),
    "an initial rate, to that of another group": (restart_one, "lambda", {"bias": 0.6, "0.weight": 0.3}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_single_rate_that_was_changed_by_hand_passes(tmp_path, case):
    change, kind, rates = CHANGES[case]
    app = made(SCHEDULES[kind], [*rates], rates)
    change(app)
    checkpoint.save(tmp_path / "c", trained(app))
    into = made(SCHEDULES[kind], [*rates], rates)
    checkpoint.load(tmp_path / "c", into, init_state=True)
    assert into["schedule"].base_lrs == app["schedule"].base_lrs


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_an_exchange_is_refused_though_all_rates_are_one_now(tmp_path, factor):
    def warmed_up(it):
        return lr_scheduler.LambdaLR(it, lambda step: factor)

    checkpoint.save(tmp_path / "c", trained(made(warmed_up)))
    with pytest.raises(MismatchError, match=r"schedule\.base_lrs"):
        checkpoint.load(tmp_path / "c", made(warmed_up, ("weight", "bias")), init_state=True)


def test_a_schedule_resumes_with_groups_that_were_added_behind_it(tmp_path):
    def app():
        app = made(SCHEDULES["step"])
        app["model"].append(more := torch.nn.Linear(4, 4))
        app["optimizer"].add_param_group({"params": {f"2.{name}": each for name, each in more.named_parameters()}})
        return app

    saved = trained(app())
    assert len(saved["schedule"].get_last_lr()) > len(saved["schedule"].base_lrs)
    checkpoint.save(tmp_path / "c", saved)
    into = app()
    checkpoint.load(tmp_path / "c", into, init_state=True)
    trained(into), trained(saved)
    assert rates_by_name(into["optimizer"]) == rates_by_name(saved["optimizer"])


class OfSomebody(lr_scheduler.LRScheduler):
    """A schedule that keeps what it likes where torch's have lists of numbers."""

    def __init__(self, optimizer, last, base):
        self.groups, self._last_lr, self.base_lrs, self.steps = optimizer.param_groups, last, base, 0

    def step(self):
        self.steps += 1

    def state_dict(self):
        return {"_last_lr": self._last_lr, "base_lrs": self.base_lrs, "steps": self.steps}


@pytest.mark.parametrize(("last", "base"), [(0.1, None), (None, [[0.1, 2], [0.2, 3], [0.3, 4]]), ([], ["a", "b", "c"])])
def test_schedules_that_keep_other_things_are_left_alone(tmp_path, last, base):
    checkpoint.save(tmp_path / "c", trained(made(lambda it: OfSomebody(it, last, base))))
    app = made(lambda it: OfSomebody(it, last, base))
    checkpoint.load(tmp_path / "c", app, init_state=True)
    assert app["schedule"].state_dict() == {"_last_lr": last, "base_lrs": base, "steps": 3}


def test_a_schedule_around_a_wrapped_optimizer_is_compared_with_the_groups_of_the_one_within(tmp_path):
    def app(order):
        made_app = made(SCHEDULES["lambda"], order)
        clipping = shardopt.GradientClippingOptimizer(
            made_app["optimizer"], shardopt.GradientClipping.NORM, max_gradient=1.0
        )
        return {"model": made_app["model"], "optimizer": clipping, "schedules": {"first": made_app["schedule"]}}

    checkpoint.save(tmp_path / "c", app(("bias", "weight")))
    checkpoint.load(tmp_path / "c", app(("bias", "weight")))
    with pytest.raises(MismatchError, match=r"schedules.first.base_lrs: found \[0.2, 0.1, 0.3\]"):
        checkpoint.load(tmp_path / "c", app(("weight", "bias")))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("kind", ["lambda", "cosine"])
def test_rates_that_differ_from_those_of_the_groups_are_told_of(tmp_path, caplog, kind):
    saved = trained(made(SCHEDULES[kind]))
    checkpoint.save(tmp_path / "c", saved)
    rates = {"bias": 0.5, "weight": 0.25}
    into = made(SCHEDULES[kind], rates=rates)
    into["optimizer"].keep_options("lr")
    checkpoint.load(tmp_path / "c", into, init_state=True)
    (line,) = [each.message for each in caplog.records if "its next step" in each.message]
    assert "schedule" in line and str(saved["schedule"].get_last_lr()) in line
    assert "make it again after the load, with last_epoch= the steps that it has made, less one" in line
    assert "make it anew, and call its step() once for each step that it has made" in line
    into["schedule"] = SCHEDULES[kind](into["optimizer"])
    for _ in range(3):
        into["schedule"].step()
    anew = trained(made(SCHEDULES[kind], rates=rates), 4)
    assert rates_by_name(trained(into, 1)["optimizer"]) == pytest.approx(rates_by_name(anew["optimizer"]))


def test_rates_in_tensors_are_told_of_once_they_are_read(tmp_path, caplog):
    def app(order):
        return made(SCHEDULES["cosine"], order, {name: torch.tensor(rate) for name, rate in RATES.items()})

    checkpoint.save(tmp_path / "c", app(("bias", "weight")))
    checkpoint.load(tmp_path / "c", app(("bias", "weight")))
    assert not caplog.records
    checkpoint.load(tmp_path / "c", app(("weight", "bias")))
    assert any("its next step" in each.message for each in caplog.records)


def test_keys_that_are_passed_over_are_one_line_of_the_log(tmp_path, caplog):
    caplog.set_level("INFO", "shardopt.checkpoint")
    checkpoint.save(tmp_path / "c", {f"x{i}": i for i in range(7)})
    checkpoint.load(tmp_path / "c", {"x0": 0, "y": 1}, strict=False)
    (line,) = [each for each in caplog.records if "passed over" in each.message]
    assert line.levelname == "WARNING"
    assert "1 key of the app that the checkpoint has not (y)" in line.message
    assert "6 keys of the checkpoint that the app has not (x1, x2, x3, x4, x5, ...)" in line.message
    caplog.clear()
    checkpoint.load(tmp_path / "c", {"x0": 0}, strict=Strictness(unexpected="ignore"))
    assert [each.levelname for each in caplog.records if "passed over" in each.message] == ["INFO"]
    caplog.clear()
    checkpoint.load(tmp_path / "c", {f"x{i}": i for i in range(7)}, strict=False)
    assert not [each for each in caplog.records if "passed over" in each.message]


def test_rates_of_an_optimizer_that_saves_no_groups_are_told_of_and_resume_as_said(tmp_path, caplog):
    def app():
        model = torch.nn.Linear(4, 1)
        optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda its: torch.optim.SGD(its, lr=1.0))
        schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}

    checkpoint.save(tmp_path / "c", trained(app(), 3))
    into = app()
    checkpoint.load(tmp_path / "c", into, init_state=True)
    (line,) = [each.message for each in caplog.records if "those of its optimizer's groups" in each.message]
    assert "[0.5], and" in line and "save_param_groups(True)" in line and "make it again" not in line
    (group,) = into["optimizer"].param_groups
    group["lr"] = into["schedule"].get_last_lr()[0]
    into["optimizer"].save_param_groups(True)
    checkpoint.save(tmp_path / "d", trained(into, 1))
    again = app()
    again["optimizer"].save_param_groups(True)
    checkpoint.load(tmp_path / "d", again, init_state=True)
    assert again["optimizer"].param_groups[0]["lr"] == 0.25


def test_groups_of_a_combined_optimizer_in_another_order_are_refused(tmp_path, caplog):
    def keyed(members, rate):
        return shardopt.keyed("adamw", members.items(), lr=rate)

    checkpoint.save(tmp_path / "c", trained(combined(keyed)))
    checkpoint.load(tmp_path / "c", combined(keyed), init_state=True)
    assert not caplog.records
    with pytest.raises(MismatchError, match=r"schedule\.base_lrs"):
        checkpoint.load(tmp_path / "c", combined(keyed, ("weight", "bias")), init_state=True)


def test_rates_of_a_combined_optimizer_that_saves_no_groups_are_told_of(tmp_path, caplog):
    def wrapped(members, rate):
        return KeyedOptimizerWrapper(members, lambda params: torch.optim.Adam(params, lr=rate))

    checkpoint.save(tmp_path / "c", trained(combined(wrapped)))
    checkpoint.load(tmp_path / "c", combined(wrapped), init_state=True)
    assert "checkpoints of this optimizer have no groups" in caplog.text
