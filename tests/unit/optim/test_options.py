"""Options through a load: whose they are, of which algorithm, of which kind; and what is told of those that differ."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim import lr_scheduler

import shardopt
from shardopt import (
    GradientClipping,
    GradientClippingOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    checkpoint,
)
from shardopt.errors import MismatchError, StateError
from shardopt.optim import CombinedOptimizer, OptimizerWrapper
from shardopt.optim.keyed import KeyedOptimizerWrapper
from shardopt.optim.state_dict.options import overridden
from tests.support.fake_rank import fake_rank, shard

FULL = torch.arange(8.0).view(4, 2)


def params(**more):
    return {"bias": nn.Parameter(FULL[0].clone()), "w": nn.Parameter(FULL.clone())}


def stepped(optimizer, steps=1):
    for _ in range(steps):
        for parameter in optimizer.params.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


def ready(optimizer):
    optimizer.init_state()
    return optimizer


def through_memory(tmp_path, saved, into, **choices):
    return into.load_state_dict(copy.deepcopy(saved.state_dict()), **choices)


def through_a_checkpoint(tmp_path, saved, into, **choices):
    path = tmp_path / f"c{len(list(tmp_path.iterdir()))}"
    checkpoint.save(path, {"optimizer": saved})
    return checkpoint.load(path, {"optimizer": into}, **choices)


both_ways = pytest.mark.parametrize("load", [through_memory, through_a_checkpoint])
NESTINGS = {
    "alone": lambda it: it,
    "wrapped": lambda it: OptimizerWrapper(GradientClippingOptimizer(it, GradientClipping.NONE)),
    "combined": lambda it: CombinedOptimizer(
        [("a", it), ("b", ready(shardopt.keyed("sgd", {"x": nn.Parameter(FULL)})))]
    ),
}
in_any_nesting = pytest.mark.parametrize("nesting", NESTINGS)


def lines(caplog):
    """Returns the warnings, except that of a save without the schedule: these apps have none."""
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    told = [record for record in warnings if "a schedule sets the rates of" not in record.getMessage()]
    assert {record.name for record in told} <= {"shardopt"}
    caplog.clear()
    return [record.getMessage() for record in told]


# --- numbers and tensors of one element ------------------------------------------------------------------------------


@both_ways
@in_any_nesting
@pytest.mark.parametrize("tensor_first", [True, False])
def test_a_float_resumes_into_a_tensor_and_the_reverse(tmp_path, load, nesting, tensor_first):
    def made(rate, tensor):
        rate = torch.tensor(rate, dtype=torch.float64) if tensor else rate
        options = {"lr": rate, "foreach": False} if tensor else {"lr": rate}
        return ready(shardopt.keyed("adamw", params(), groups=[{"match": "bias", "weight_decay": 0.5}], **options))

    saved, inner = made(0.125, tensor_first), made(0.5, not tensor_first)
    into = NESTINGS[nesting](inner)
    before = [group["lr"] for group in inner.param_groups]
    load(tmp_path, NESTINGS[nesting](stepped(saved)), into)
    for group, rate in zip(inner.param_groups, before, strict=True):
        assert type(group["lr"]) is type(rate) and float(group["lr"]) == 0.125
        assert tensor_first or group["lr"] is rate
    assert inner.state_dict()["state"]["w"]["step"] == 1


@both_ways
def test_tuples_of_tensors_and_groups_that_share_one(tmp_path, load):
    shared = torch.tensor(0.5)
    betas = (torch.tensor(0.5), torch.tensor(0.25))
    options = {"lr": shared, "betas": betas, "foreach": False}
    into = ready(shardopt.keyed("adam", params(), groups=[{"match": "bias"}], **options))
    first, second = into.param_groups
    assert first["lr"] is second["lr"] is shared
    saved = ready(shardopt.keyed("adam", params(), lr=0.1, betas=(0.8, 0.75), groups=[{"match": "bias", "lr": 0.2}]))
    load(tmp_path, saved, into)
    assert [float(group["lr"]) for group in (first, second)] == pytest.approx([0.2, 0.1])
    assert all(type(group["lr"]) is torch.Tensor for group in (first, second))
    assert first["betas"][0] is betas[0] and [beta.item() for beta in second["betas"]] == pytest.approx([0.8, 0.75])
    again = ready(shardopt.keyed("adam", params(), lr=0.3, groups=[{"match": "bias"}]))
    load(tmp_path, into, again)
    assert again.param_groups[1]["betas"] == pytest.approx((0.8, 0.75))
    assert type(again.param_groups[1]["betas"]) is tuple and type(again.param_groups[1]["lr"]) is float


def test_a_rate_that_two_algorithms_share():
    def made(rate, other):
        return shardopt.keyed("adamw", params(), lr=rate, groups=[{"match": "bias", "algorithm": "sgd", "lr": other}])

    saved, shared = made(0.1, 0.2), torch.tensor(0.5)
    into = made(shared, shared)
    into.load_state_dict(saved.state_dict())
    assert [float(group["lr"]) for group in into.param_groups] == pytest.approx(
        [group["lr"] for group in saved.param_groups]
    )


@pytest.mark.parametrize("kept", ["first", "second"])
def test_a_kept_rate_that_shares_its_tensor_with_one_that_is_loaded(kept):
    """Whichever of both is loaded first."""

    def made(rate, other):
        first = shardopt.keyed("adamw", {"w": nn.Parameter(torch.ones(2))}, lr=rate)
        second = shardopt.keyed("sgd", {"w": nn.Parameter(torch.ones(2))}, lr=other)
        combined = CombinedOptimizer([("first", first), ("second", second)])
        combined.save_param_groups(True)
        return combined, {"first": first, "second": second}

    saved, shared = made(0.1, 0.2)[0], torch.tensor(0.5)
    into, parts = made(shared, shared)
    parts[kept].keep_options("lr")
    into.load_state_dict(saved.state_dict())
    wanted = [0.5, 0.2] if kept == "first" else [0.1, 0.5]
    assert [float(group["lr"]) for group in into.param_groups] == pytest.approx(wanted)
    assert parts[kept].param_groups[0]["lr"] is shared


def test_what_is_saved_is_a_number_and_does_not_change_any_more():
    rate = torch.tensor([0.5])
    optimizer = shardopt.keyed("sgd", params(), lr=rate)
    saved = optimizer.state_dict()["param_groups"][0]
    rate.fill_(0.25)
    assert saved["lr"] == 0.5 and type(saved["lr"]) is float
    optimizer.load_state_dict({"state": {}, "param_groups": [{**saved, "lr": torch.tensor(0.125)}]})
    assert optimizer.param_groups[0]["lr"] is rate and rate.tolist() == [0.125]


# --- algorithms ------------------------------------------------------------------------------------------------------


@both_ways
@in_any_nesting
@pytest.mark.parametrize(("one", "other"), [("adam", "adamw"), ("adamw", "adam"), ("sgd", "rmsprop"), ("adamw", "sgd")])
def test_another_algorithm_is_refused_by_name(tmp_path, load, nesting, one, other):
    saved, inner = (ready(shardopt.keyed(name, params(), lr=0.5)) for name in (one, other))
    into = NESTINGS[nesting](inner)
    before = copy.deepcopy(inner.state_dict())
    with pytest.raises(MismatchError) as caught:
        load(tmp_path, NESTINGS[nesting](saved), into)
    (problem,) = [owned for owned in caught.value.problems if owned.key.endswith(".algorithm")]  # SGD has no state
    assert problem.found.lower().startswith(one + ",") and problem.required.lower() == other
    assert "strict=False" in problem.remedy
    assert str(inner.state_dict()) == str(before)


def test_the_algorithm_is_that_which_steps_however_it_is_spelt():
    class Mine(torch.optim.AdamW):
        """Steps as its base does."""

    class Other(torch.optim.AdamW):
        def step(self, closure=None):
            raise AssertionError

    def name(optimizer):
        (group,) = optimizer.state_dict()["param_groups"]
        return group.get("algorithm")

    def by_factory(cls, **options):
        made = KeyedOptimizerWrapper(params(), lambda received: cls(received, **options))
        made.save_param_groups(True)
        return made

    made = [shardopt.keyed(owned, params()) for owned in ("adamw", "ADAMW", "adam_w", torch.optim.AdamW, Mine)]
    made += [shardopt.keyed("adamw", params(), fused=True), shardopt.keyed("adamw", params(), foreach=True)]
    made += [by_factory(torch.optim.AdamW), by_factory(torch.optim.AdamW, fused=True), by_factory(Mine)]
    made += [shardopt.in_backward(params(), "adamw"), OptimizerWrapper(made[0])]
    assert {name(each) for each in made} == {"AdamW"}
    assert name(by_factory(torch.optim.Adafactor)) == name(shardopt.keyed("adafactor", params())) == "Adafactor"
    assert name(by_factory(Other)).endswith("Other")
    own = params()
    base = shardopt.KeyedOptimizer(own, {}, [{"params": list(own.values()), "lr": 1.0}])
    base.save_param_groups(True)
    assert name(base) is None
    base.load_state_dict({"state": {}, "param_groups": [{"params": ["bias", "w"], "lr": 0.5, "algorithm": "X"}]})
    assert base.param_groups[0]["lr"] == 0.5


def as_older(state_dict):
    for group in state_dict["param_groups"]:
        del group["algorithm"], group["given"]
    return state_dict


def test_what_does_not_tell_its_algorithm_is_accepted():
    """Older checkpoints, and torchrec's."""
    saved, into = (ready(shardopt.keyed("adamw", params(), lr=rate)) for rate in (0.5, 0.1))
    older = as_older(stepped(saved).state_dict())
    into.check_state_dict(older)
    assert into.load_state_dict(older) == ([], [])
    assert into.param_groups[0]["lr"] == 0.5


@both_ways
@in_any_nesting
def test_strict_false_takes_the_state_that_fits_and_says_so(tmp_path, load, nesting, caplog):
    saved = stepped(shardopt.keyed("adam", params(), lr=0.5))
    inner = ready(shardopt.keyed("adamw", params(), lr=0.1, weight_decay=0.25))
    load(tmp_path, NESTINGS[nesting](saved), NESTINGS[nesting](inner), strict=False)
    (group,) = inner.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.25)
    assert inner.state_dict()["state"]["w"]["step"] == 1
    (line,) = lines(caplog)
    assert "saved by Adam; AdamW takes the state that fits, with its own options" in line
    if load is through_memory:
        missing, unexpected = inner.load_state_dict(saved.state_dict(), strict=False)
        assert (missing, unexpected) == ([], ["param_groups.bias.algorithm"])


def test_state_of_another_algorithm_that_does_not_fit_stays_as_it_was():
    """And so its first step is still its first."""
    saved = stepped(shardopt.keyed("adam", params()))
    into, fresh = (shardopt.keyed("sgd", params(), lr=0.1, momentum=0.9, dampening=0.5) for _ in range(2))
    into.init_state()
    into.load_state_dict(saved.state_dict(), strict=False)
    for _ in range(2):
        stepped(into)
        stepped(fresh)
    assert torch.equal(into.params["w"], fresh.params["w"])


# --- options that the code gives otherwise ---------------------------------------------------------------------------


def adamw(**options):
    return ready(shardopt.keyed("adamw", params(), **options))


@both_ways
@in_any_nesting
def test_options_that_the_code_gives_otherwise_are_told_once(tmp_path, load, nesting, caplog):
    saved = adamw(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99), groups=[{"match": "bias", "weight_decay": 0.0}])
    inner = adamw(lr=5e-4, weight_decay=0.1, betas=(0.9, 0.95), groups=[{"match": "bias", "weight_decay": 0.5}])
    load(tmp_path, NESTINGS[nesting](saved), NESTINGS[nesting](inner))
    assert [group["lr"] for group in inner.param_groups] == [1e-3] * 2
    assert [group["weight_decay"] for group in inner.param_groups] == [0.0, 0.1]
    (line,) = lines(caplog)
    key = "param_groups.a." if nesting == "combined" else "param_groups."
    for expected in (
        f"{key}bias.lr: 0.0005 in the code, 0.001 in the checkpoint",
        f"{key}bias.weight_decay: 0.5 in the code, 0.0 in the checkpoint",
        f"{key}bias.betas: (0.9, 0.95) in the code, (0.9, 0.99) in the checkpoint",
        f"{key}w.lr: 0.0005 in the code, 0.001 in the checkpoint",
        f"{key}w.betas",
    ):
        assert expected in line
    assert "keep_options('lr', 'betas', 'weight_decay')" in line or "keep_options(" in line
    assert f"{key}w.weight_decay" not in line and "eps" not in line


@both_ways
def test_options_that_the_code_no_longer_gives_are_told(tmp_path, load, caplog):
    saved, inner = adamw(lr=0.1, eps=1e-8, weight_decay=0.1, maximize=True), adamw()
    into = NESTINGS["combined"](inner)
    into.keep_options("lr")
    load(tmp_path, NESTINGS["combined"](saved), into)
    (line,) = lines(caplog)
    assert "bias.weight_decay: 0.01 by default in the code, 0.1 in the checkpoint" in line
    assert "bias.maximize: False by default in the code, True in the checkpoint" in line
    assert "keep_options('weight_decay', 'maximize')" in line  # "eps" is the default, and the code's "lr" is kept
    assert (inner.param_groups[0]["weight_decay"], inner.param_groups[0]["lr"]) == (0.1, 1e-3)
    into.load_state_dict(as_older(into.state_dict()))  # which does not say what was given
    assert lines(caplog) == []


def test_the_default_in_place_of_a_given_option_is_compared_with_both():
    """With what the code gave at the save, and with what a schedule or the loop has made of it."""
    told = [overridden("g", {}, {"lr": now}, {"lr": then}, {"lr": 0.1}) for then, now in [(0.1, 0.2), (0.2, 0.1)]]
    assert told == [[], []]
    assert [each.key for each in overridden("g", {}, {"lr": 0.3}, {"lr": 0.2, "own": 1}, {"lr": 0.1})] == ["g.lr"]


SCHEDULES = {
    "lambda": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.5**step),
    "step": lambda it: lr_scheduler.StepLR(it, 1, 0.5),
    "one cycle": lambda it: lr_scheduler.OneCycleLR(it, 0.5, total_steps=10),  # which moves betas, too
    "none": lambda it: None,
}


def scheduled(kind, **options):
    optimizer = adamw(**options)
    return optimizer, SCHEDULES[kind](optimizer)


@both_ways
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_same_code_resumes_without_a_word(tmp_path, load, kind, caplog):
    def made():
        return scheduled(kind, lr=0.1, weight_decay=0.1, betas=(0.9, 0.99), groups=[{"match": "bias", "lr": 0.2}])

    (saved, schedule), (into, _) = made(), made()
    for _ in range(3):
        stepped(saved)
        if schedule is not None:
            schedule.step()
        else:
            for group in saved.param_groups:
                group["lr"] *= 0.5  # as a training loop may
    load(tmp_path, saved, into)
    assert [group["lr"] for group in into.param_groups] == [group["lr"] for group in saved.param_groups]
    load(tmp_path, into, made()[0])
    assert lines(caplog) == []


def test_of_older_checkpoints_the_rate_that_a_schedule_began_with_counts(caplog):
    saved, schedule = scheduled("step", lr=0.1, weight_decay=0.1)
    stepped(saved)
    schedule.step()
    older = as_older(saved.state_dict())
    assert older["param_groups"][0]["lr"] == 0.05
    scheduled("step", lr=0.1, weight_decay=0.1)[0].load_state_dict(older)
    assert lines(caplog) == []
    scheduled("step", lr=0.2, weight_decay=0.1)[0].load_state_dict(older)
    (line,) = lines(caplog)
    assert "bias.lr: 0.2 in the code, 0.1 in the checkpoint" in line and "weight_decay" not in line


def test_a_schedule_that_begins_with_another_rate_is_told_of(caplog):
    saved, schedule = scheduled("lambda", lr=0.1)
    stepped(saved)
    schedule.step()
    scheduled("lambda", lr=0.3)[0].load_state_dict(saved.state_dict())
    (line,) = lines(caplog)
    assert "bias.lr: 0.3 in the code, 0.1 in the checkpoint" in line
    assert "a schedule sets 'lr' again: leave it out of the app" in line
    other = adamw(lr=0.05)  # what the schedule has come to, so that nothing is lost
    state = saved.state_dict()
    del state["param_groups"][0]["initial_lr"]
    other.load_state_dict(state)
    assert lines(caplog) == []


@both_ways
@in_any_nesting
def test_options_that_are_kept_are_those_of_the_code(tmp_path, load, nesting, caplog):
    saved = adamw(lr=1e-3, weight_decay=0.1)
    for group in saved.param_groups:
        group["initial_lr"] = 1e-3
    inner = adamw(lr=5e-4, weight_decay=0.3)
    into = NESTINGS[nesting](inner)
    into.keep_options("lr")
    load(tmp_path, NESTINGS[nesting](saved), into)
    (group,) = inner.param_groups
    assert (group["lr"], group["weight_decay"]) == (5e-4, 0.1) and "initial_lr" not in group
    (line,) = lines(caplog)
    assert "weight_decay: 0.3 in the code, 0.1 in the checkpoint" in line and "lr:" not in line
    into.keep_options("weight_decay")
    load(tmp_path, NESTINGS[nesting](saved), copy.deepcopy(into))
    load(tmp_path, NESTINGS[nesting](saved), into)
    assert lines(caplog) == []
    with pytest.raises(StateError, match=r"keep_options: found 'momemtum'; required some of .*weight_decay"):
        into.keep_options("momemtum")


def test_options_that_no_group_has_or_that_other_groups_get():
    both = CombinedOptimizer(
        [("a", adamw(lr=0.1)), ("b", shardopt.keyed("sgd", {"x": nn.Parameter(FULL)}, momentum=0.5))]
    )
    both.keep_options("momentum", "betas")
    saved = copy.deepcopy(both.state_dict())
    saved["param_groups"][1] |= {"momentum": 0.9, "lr": 0.7}
    both.load_state_dict(saved)
    assert (both.param_groups[1]["momentum"], both.param_groups[1]["lr"]) == (0.5, 0.7)


def warm(lr, inner=0.1):
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.5)]
    return WarmupOptimizer(adamw(lr=inner), stages, lr=lr)


@both_ways
@pytest.mark.parametrize("steps", [1, 9], ids=["within", "after"])
def test_the_full_rate_of_a_warm_up(tmp_path, load, steps, caplog):
    saved = stepped(warm(0.2), steps)
    load(tmp_path, saved, warm(0.2))
    assert lines(caplog) == []
    into = warm(0.4)
    load(tmp_path, saved, into)
    assert into.param_groups[0]["initial_lr"] == 0.2
    (line,) = lines(caplog)
    assert "bias.initial_lr: 0.4 in the code, 0.2 in the checkpoint" in line and "bias.lr" not in line
    kept, same = warm(0.4), stepped(warm(0.4), steps)
    kept.keep_options("lr")
    load(tmp_path, saved, kept)
    assert kept.param_groups[0]["lr"] == same.param_groups[0]["lr"]
    stepped(kept)
    stepped(same)
    assert kept.param_groups[0]["lr"] == pytest.approx(same.param_groups[0]["lr"])
    assert lines(caplog) == []


def test_a_group_that_is_added_gives_its_options(caplog):
    def made(rate):
        optimizer = adamw(lr=0.1)
        optimizer.add_param_group({"params": {"x": nn.Parameter(FULL.clone())}, "lr": rate})
        return ready(optimizer)

    for make in (made, lambda rate: copy.deepcopy(made(rate))):
        make(0.3).load_state_dict(make(0.3).state_dict())
        assert lines(caplog) == []
        make(0.3).load_state_dict(make(0.2).state_dict())
        (line,) = lines(caplog)
        assert "x.lr: 0.3 in the code, 0.2 in the checkpoint" in line and "bias" not in line


def test_what_a_factory_gives(caplog):
    def made(rate, **options):
        optimizer = KeyedOptimizerWrapper(params(), lambda received: torch.optim.SGD(received, lr=rate, **options))
        optimizer.save_param_groups(True)
        return optimizer

    made(0.5).load_state_dict(made(0.5, nesterov=False).state_dict())
    assert lines(caplog) == []
    made(0.5, weight_decay=0.25).load_state_dict(made(0.25).state_dict())
    (line,) = lines(caplog)
    assert "bias.lr: 0.5 in the code, 0.25" in line and "bias.weight_decay: 0.25 in the code, 0 in" in line
    made(0.001).load_state_dict(made(0.25).state_dict())  # the class's default, as if nobody gave it
    (line,) = lines(caplog)
    assert "bias.lr: 0.001 by default in the code, 0.25" in line


def test_many_are_told_in_a_few_lines_and_on_rank_0_alone(caplog):
    def made(rate):
        many = {f"p{i:02}": nn.Parameter(torch.ones(2)) for i in range(40)}
        return shardopt.keyed("sgd", many, groups=[{"match": name, "lr": rate} for name in many])

    saved = made(0.1).state_dict()
    made(0.2).load_state_dict(saved)
    (line,) = lines(caplog)
    assert line.count("in the code, 0.1") == 20 and "and 20 more" in line
    for rank in (0, 1):
        with fake_rank(rank, 2) as mesh:
            one, other = (
                shardopt.keyed("sgd", {"w": nn.Parameter(shard(FULL, mesh, Shard(0)))}, lr=rate) for rate in (0.1, 0.2)
            )
            other.load_state_dict(one.state_dict())
        assert len(lines(caplog)) == 1 - rank


def test_a_check_alone_tells_nothing(caplog):
    adamw(lr=0.1).check_state_dict(adamw(lr=0.2).state_dict())
    assert lines(caplog) == []


# --- hooks before a load ---------------------------------------------------------------------------------------------


def hooked(optimizer, hook):
    seen = []

    def noting(who, state_dict):
        tensors = [value for entries in state_dict.get("state", {}).values() for value in entries.values()]
        seen.append("descriptions" if any(tensor.is_meta for tensor in tensors) else "tensors")
        return hook(state_dict)

    optimizer.register_load_state_dict_pre_hook(noting)
    return seen


def adds_an_option(state_dict):
    for group in state_dict["param_groups"]:
        group.setdefault("amsgrad", False)
        group["lr"] *= 0.5


def takes_it_apart(state_dict):
    return {"state": state_dict["state"], "param_groups": state_dict["param_groups"]}


@both_ways
@pytest.mark.parametrize(
    ("nesting", "hook"),
    # What is part of another gives it no other keys than its own.
    [*((nesting, adds_an_option) for nesting in NESTINGS), ("alone", takes_it_apart)],
)
def test_a_hook_may_make_a_state_fit(tmp_path, load, nesting, hook):
    saved, inner = stepped(shardopt.keyed("adamw", params(), lr=0.5)), adamw(lr=0.5)

    def older(who, state_dict):
        for group in state_dict["param_groups"] if hook is adds_an_option else ():
            del group["amsgrad"]
        return state_dict if hook is adds_an_option else {**state_dict, "version": 1}

    saved.register_state_dict_post_hook(older)
    if hook is takes_it_apart:
        inner.register_state_dict_post_hook(older)
    nested = NESTINGS[nesting](inner)
    with pytest.raises(MismatchError):
        load(tmp_path, NESTINGS[nesting](saved), nested)
    seen = hooked(inner, hook)
    load(tmp_path, NESTINGS[nesting](saved), nested)
    assert seen == (["descriptions", "tensors"] if load is through_a_checkpoint else ["tensors"])
    assert inner.param_groups[0]["lr"] == (0.25 if hook is adds_an_option else 0.5)
    assert inner.state_dict()["state"]["w"]["step"] == 1


def test_a_hook_that_refuses_does_so_before_anything_is_read(tmp_path):
    saved, into = stepped(shardopt.keyed("adamw", params())), adamw()
    checkpoint.save(tmp_path / "c", {"optimizer": saved})

    def refuses(who, state_dict):
        raise ValueError("another version")

    into.register_load_state_dict_pre_hook(refuses)
    with pytest.raises(MismatchError, match="register_load_state_dict_pre_hook: found ValueError: another version"):
        checkpoint.load(tmp_path / "c", {"optimizer": into})
    assert into.state_dict()["state"]["w"]["step"] == 0
    stepped(into)  # it is not torn


def test_a_hook_that_looks_into_a_description_is_told_what_to_do(tmp_path):
    saved, into = stepped(shardopt.keyed("adamw", params())), adamw()
    checkpoint.save(tmp_path / "c", {"optimizer": saved})
    seen = hooked(into, lambda state_dict: state_dict["state"]["w"]["step"].item())
    with pytest.raises(MismatchError, match=r"tensor\.is_meta"):
        checkpoint.load(tmp_path / "c", {"optimizer": into})
    assert seen == ["descriptions"]
