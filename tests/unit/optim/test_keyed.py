"""Keyed optimizers: torch.optim's contract, state by name, and loading that is in place and all or nothing."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardopt
from shardopt import KeyedOptimizer, checkpoint
from shardopt.algorithms import AlgorithmSpec, Kind, StateEntry, register, registry
from shardopt.errors import AlgorithmError, GradientError, MismatchError, StateError
from shardopt.optim import CombinedOptimizer, KeyedOptimizerWrapper
from shardopt.sharding.view import local_tensors
from tests.support.fake_rank import fake_rank, shard, sharded_tensor


def parameters(**more):
    return {"layer.w": torch.nn.Parameter(torch.ones(4, 2)), "layer.b": torch.nn.Parameter(torch.zeros(2)), **more}


def adam(params=None, steps=1, algorithm="adam", **options):
    optimizer = shardopt.keyed(algorithm, params or parameters(), **options)
    for step in range(steps):
        for position, parameter in enumerate(optimizer.params.values()):
            parameter.grad = torch.full_like(parameter, 0.5 + position + step)
        optimizer.step()
    return optimizer


def tensors(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def everything(optimizer):
    """All that a load could change: parameters, state, options."""
    return copy.deepcopy((list(optimizer.params.values()), optimizer.state_dict()))


def unchanged(optimizer, before):
    params, state_dict = before
    assert all(map(torch.equal, optimizer.params.values(), params))
    now = optimizer.state_dict()
    assert now["param_groups"] == state_dict["param_groups"]
    assert now["state"].keys() == state_dict["state"].keys()
    for name, state in state_dict["state"].items():
        assert all(torch.equal(value, now["state"][name][entry]) for entry, value in state.items())


# --- state_dict ------------------------------------------------------------------------------------------------------


def test_state_goes_by_names_and_groups_by_their_least_name():
    optimizer = adam(groups=[{"match": "b$", "lr": 0.5}], lr=0.1)
    saved = optimizer.state_dict()
    assert list(saved) == ["state", "param_groups"]
    assert saved["state"].keys() == {"layer.w", "layer.b"}
    assert list(saved["state"]["layer.w"]) == ["step", "exp_avg", "exp_avg_sq"]
    assert [group["params"][0] for group in saved["param_groups"]] == ["layer.b", "layer.w"]
    assert saved["param_groups"][0] == {
        "params": ["layer.b"], "lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False,
        "maximize": False, "decoupled_weight_decay": False, "algorithm": "Adam", "given": {"lr": 0.5},
    }  # fmt: skip
    optimizer.save_param_groups(False)
    assert list(optimizer.state_dict()) == ["state"]


def test_state_is_live_and_its_tensors_are_the_optimizers_own():
    optimizer = adam()
    weight = optimizer.params["layer.w"]
    assert optimizer.state_dict()["state"]["layer.w"]["exp_avg"] is optimizer.state[weight]["exp_avg"]
    del optimizer.state[weight]
    assert list(optimizer.state_dict()["state"]) == ["layer.b"]
    assert weight not in optimizer.state
    with pytest.raises(KeyError):
        optimizer.state[torch.zeros(1)]


def test_an_option_that_cannot_be_stored_is_named():
    optimizer = adam()
    optimizer.param_groups[0]["callback"] = print
    with pytest.raises(StateError, match=r"param_groups\.layer\.b\.callback: found a builtin_function_or_method"):
        optimizer.state_dict()
    optimizer.save_param_groups(False)
    optimizer.state_dict()


def test_sharded_state_lies_like_its_parameter_and_is_not_copied():
    with fake_rank(1, 2) as mesh:
        params = {"w": torch.nn.Parameter(shard(torch.ones(5, 2), mesh, Shard(0)))}
        optimizer = adam(params)
        state = optimizer.state[params["w"]]
        exp_avg = state["exp_avg"]
        assert (exp_avg.shape, exp_avg.placements, exp_avg.to_local().shape) == ((5, 2), (Shard(0),), (2, 2))
        assert local_tensors(state["exp_avg"])[0] is local_tensors(exp_avg)[0]
        assert type(state["step"]) is torch.Tensor
        exp_avg.zero_()
        assert not optimizer.state_dict()["state"]["w"]["exp_avg"].to_local().any()
        state["exp_avg"] = shard(torch.full((5, 2), 3.0), mesh, Shard(0))
        assert optimizer.state[params["w"]]["exp_avg"].to_local().eq(3).all()


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_loading_is_in_place_and_exact(sharded):
    with fake_rank(0, 2) as mesh:

        def build(steps):
            params = parameters()
            if sharded:
                params["table"] = torch.nn.Parameter(shard(torch.ones(3, 2), mesh, Shard(0)))
            return adam(params, steps, lr=torch.tensor(0.1), betas=(torch.tensor(0.5), torch.tensor(0.9)))

        source, into = build(3), build(1)
        held = list(tensors(into.state_dict()))
        before = [local_tensors(tensor)[0].data_ptr() for tensor in held]
        assert into.load_state_dict(copy.deepcopy(source.state_dict())) == ([], [])
        assert [local_tensors(tensor)[0].data_ptr() for tensor in tensors(into.state_dict())] == before
        for mine, theirs in zip(tensors(into.state_dict()), tensors(source.state_dict()), strict=True):
            assert torch.equal(local_tensors(mine)[0], local_tensors(theirs)[0])


def test_its_own_tensors_are_not_copied():
    optimizer = adam()
    saved = optimizer.state_dict()
    versions = [tensor._version for tensor in tensors(saved)]
    optimizer.load_state_dict(saved)
    assert [tensor._version for tensor in tensors(saved)] == versions


@pytest.mark.parametrize("sharded", [False, True])
def test_its_own_tensors_under_exchanged_names_are_read_before_they_are_overwritten(sharded):
    with fake_rank(0, 2) as mesh:
        weights = [torch.ones(3, 2), torch.ones(3, 2)]
        if sharded:
            weights = [shard(weight, mesh, Shard(0)) for weight in weights]
        optimizer = adam({name: torch.nn.Parameter(weight) for name, weight in zip("ab", weights, strict=True)}, 2)
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved)["state"]
        saved["state"] = {"a": saved["state"]["b"], "b": saved["state"]["a"]}
        optimizer.load_state_dict(saved)
        now = optimizer.state_dict()["state"]
        for name, other in ("ab", "ba"):
            for mine, wanted in zip(tensors(now[name]), tensors(before[other]), strict=True):
                assert torch.equal(local_tensors(mine)[0], local_tensors(wanted)[0])


def test_another_order_of_parameters_and_groups_loads():
    patterns = [{"match": r"\.w", "lr": 0.5}, {"match": r"\.b", "lr": 0.25}]
    source = adam(groups=patterns, steps=2)
    backwards = dict(reversed(parameters().items()))
    into = adam(backwards, groups=[{**group, "lr": 0.0} for group in reversed(patterns)])
    into.load_state_dict(copy.deepcopy(source.state_dict()))
    assert [group["lr"] for group in into.param_groups] == [0.25, 0.5, 0.001]
    loaded, saved = (optimizer.state_dict()["state"]["layer.w"] for optimizer in (into, source))
    assert torch.equal(loaded["exp_avg"], saved["exp_avg"])


def test_how_a_step_is_computed_is_this_processs_choice():
    into = adam(foreach=True)
    into.load_state_dict(adam(foreach=False).state_dict())
    assert into.param_groups[0]["foreach"] is True


def drop_parameter(saved):
    del saved["state"]["layer.b"]


def rename_parameter(saved):
    saved["state"]["layer.c"] = saved["state"].pop("layer.b")


def drop_entry(saved):
    del saved["state"]["layer.b"]["exp_avg_sq"]


def add_entry(saved):
    saved["state"]["layer.b"]["max_exp_avg_sq"] = torch.zeros(2)


def other_shape(saved):
    saved["state"]["layer.b"]["exp_avg"] = torch.zeros(1)


def other_dtype(saved):
    saved["state"]["layer.b"]["exp_avg"] = torch.zeros(2, dtype=torch.float64)


def other_kind(saved):
    saved["state"]["layer.b"]["exp_avg"] = 1.0


def no_values(saved):
    saved["state"]["layer.b"]["exp_avg"] = torch.zeros(2, device="meta")


def no_state(saved):
    saved["state"] = {}


def drop_groups(saved):
    del saved["param_groups"]


def torchs_groups(saved):
    saved["param_groups"] = [{"params": [0, 1]}]


def other_members(saved):
    saved["param_groups"][0]["params"] = ["layer.b"]


def other_group_key(saved):
    saved["param_groups"][0]["params"][0] = "layer.a"


def drop_option(saved):
    del saved["param_groups"][0]["eps"]


def add_option(saved):
    saved["param_groups"][0]["initial_lr"] = 0.1


def option_kind(saved):
    saved["param_groups"][0]["lr"] = torch.tensor([0.1, 0.2])


def strange_key(saved):
    saved["schedule"] = {}


MISMATCHES = {
    drop_parameter: r"state\.layer\.b: found nothing; required a value",
    rename_parameter: r"state\.layer\.c: found a value; required nothing",
    drop_entry: r"state\.layer\.b\.exp_avg_sq: found nothing",
    add_entry: r"state\.layer\.b\.max_exp_avg_sq: found a value",
    other_shape: r"state\.layer\.b\.exp_avg: found shape \(1,\); required \(2,\)",
    other_dtype: r"state\.layer\.b\.exp_avg: found dtype torch\.float64; required torch\.float32",
    other_kind: r"state\.layer\.b\.exp_avg: found a plain value; required a tensor",
    no_values: r"state\.layer\.b\.exp_avg: found a tensor on the meta device",
    no_state: r"state: found no state; required state of layer.w, layer.b; .*init_state\(\)",
    drop_groups: r"param_groups: found nothing",
    torchs_groups: r"param_groups: found parameters by position, without names",
    other_members: r"param_groups\.layer\.w: found nothing",
    other_group_key: r"param_groups\.layer\.a: found a value",
    drop_option: r"param_groups\.layer\.b\.eps: found nothing",
    add_option: r"param_groups\.layer\.b\.initial_lr: found a value",
    option_kind: r"param_groups\.layer\.b\.lr: found a tensor; required a plain value",
    strange_key: r"schedule: found a value",
}


@pytest.mark.parametrize(("change", "message"), MISMATCHES.items(), ids=[change.__name__ for change in MISMATCHES])
def test_what_does_not_fit_is_refused_and_nothing_is_changed(change, message):
    saved = copy.deepcopy(adam(steps=3, lr=0.5).state_dict())
    change(saved)
    into = adam()
    before = everything(into)
    with pytest.raises(MismatchError, match=message):
        into.load_state_dict(saved)
    unchanged(into, before)
    if change is not no_values:  # there a tensor without values stands for one that will be read
        with pytest.raises(MismatchError, match=message):
            into.check_state_dict(saved)
    unchanged(into, before)


def test_every_problem_is_told_at_once():
    saved = copy.deepcopy(adam(steps=3).state_dict())
    for change in (rename_parameter, other_group_key, strange_key):
        change(saved)
    saved["state"]["layer.w"]["exp_avg"] = torch.zeros(2, 4)
    with pytest.raises(MismatchError) as caught:
        adam().load_state_dict(saved)
    assert [problem.key for problem in caught.value.problems] == [
        "param_groups.layer.a", "param_groups.layer.b", "schedule", "state.layer.b", "state.layer.c",
        "state.layer.w.exp_avg",
    ]  # fmt: skip


def test_state_for_an_optimizer_that_has_none_names_init_state():
    into = adam(steps=0)
    with pytest.raises(MismatchError, match=r"state: found state of layer.w, layer.b; .*; call init_state\(\) before"):
        into.load_state_dict(adam().state_dict())
    into.init_state()
    into.load_state_dict(adam(steps=2).state_dict())
    assert into.state_dict()["state"]["layer.w"]["step"] == 2


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_state_by_position_is_refused_with_the_way_to_load_it(combined, steps):
    theirs = torch.optim.Adam(parameters().values(), lr=0.25)
    for parameter in theirs.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    ours = adam(steps=steps)
    optimizer = CombinedOptimizer([("dense", ours)]) if combined else ours
    for options in ({}, {"strict": False}):
        with pytest.raises(MismatchError, match=r"by position, without names.*as_torch\(\)\.load_state_dict"):
            optimizer.load_state_dict(theirs.state_dict(), **options)
    with pytest.raises(MismatchError, match="state of 0, 1" if not steps else "state.0"):
        ours.load_state_dict({"state": theirs.state_dict()["state"]})
    ours.as_torch().load_state_dict(theirs.state_dict())
    (group,), state = ours.param_groups, ours.state_dict()["state"]
    assert group["lr"] == 0.25
    assert torch.equal(state["layer.w"]["exp_avg"], theirs.state_dict()["state"][0]["exp_avg"])


def test_a_number_of_numpy_is_an_option_like_any_other(tmp_path):
    optimizer = adam()
    optimizer.param_groups[0]["lr"] = np.float32(0.1)
    checkpoint.save(tmp_path / "one", {"optimizer": optimizer})
    resumed = adam()
    checkpoint.load(tmp_path / "one", {"optimizer": resumed})
    (lr,) = (group["lr"] for group in resumed.param_groups)
    assert lr == np.float32(0.1) and type(lr) is np.float32
    resumed = adam(lr=torch.tensor(0.5))
    checkpoint.load(tmp_path / "one", {"optimizer": resumed})
    assert torch.equal(resumed.param_groups[0]["lr"], torch.tensor(0.1))


def test_descriptions_are_checked_without_values():
    optimizer = adam()
    described = copy.deepcopy(optimizer.state_dict())
    described["state"]["layer.w"] = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in described["state"]["layer.w"].items()
    }
    optimizer.check_state_dict(described)
    described["state"]["layer.w"]["exp_avg"] = torch.empty(2, 4, device="meta")
    with pytest.raises(MismatchError, match=r"exp_avg: found shape \(2, 4\)"):
        optimizer.check_state_dict(described)


def test_descriptions_of_sharded_state_have_its_global_shape():
    with fake_rank(0, 2) as mesh:
        optimizer = adam({"w": torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))})
        described = optimizer.state_dict()
        described["state"]["w"]["exp_avg"] = torch.empty(4, 2, device="meta")
        optimizer.check_state_dict(described)
        described["state"]["w"]["exp_avg"] = torch.empty(2, 2, device="meta")
        with pytest.raises(MismatchError, match=r"found shape \(2, 2\); required \(4, 2\)"):
            optimizer.check_state_dict(described)


def test_another_placement_is_refused():
    with fake_rank(0, 2) as mesh:
        rows = adam({"w": torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))})
        columns = adam({"w": torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(1)))}, steps=3)
        with pytest.raises(MismatchError, match=r"found the elements \[0:4, 0:1\] .* required \[0:2, 0:2\]"):
            rows.load_state_dict(columns.state_dict())


def test_not_strict_loads_what_fits_and_tells_the_rest():
    saved = copy.deepcopy(adam(steps=3, lr=0.5).state_dict())
    into = adam(parameters(**{"layer.new": torch.nn.Parameter(torch.ones(3))}), steps=0)
    into.init_state()
    del saved["param_groups"][0]["eps"]
    saved["state"]["layer.old"] = saved["state"]["layer.b"]
    missing, unexpected = into.load_state_dict(saved, strict=False)
    assert sorted(missing) == ["param_groups.layer.b.eps", "param_groups.layer.new", "state.layer.new"]
    assert unexpected == ["state.layer.old"]
    assert into.param_groups[0]["lr"] == 0.5
    assert [into.state[parameter]["step"].item() for parameter in into.params.values()] == [3, 3, 0]
    saved["state"]["layer.w"]["exp_avg"] = torch.zeros(1)
    with pytest.raises(MismatchError, match="found shape"):
        into.load_state_dict(saved, strict=False)


def test_several_shards_on_a_rank_keep_one_counter():
    full, rows = torch.arange(10.0).view(5, 2), [(2, 0), (2, 0), (1, 1)]
    with fake_rank(0, 2):

        def build(steps):
            table = sharded_tensor(full, rows, 0, requires_grad=True)
            optimizer = shardopt.keyed("adam", {"table": table})
            optimizer.init_state()
            for _ in range(steps):
                local_tensors(table)[0].grad = torch.ones(
                    2, 2
                )  # the second shard has none: zero, as of the whole table
                optimizer.step()
            return table, optimizer

        table, optimizer = build(3)
        _, other = build(1)
        other.load_state_dict(optimizer.state_dict())
        assert other.state[next(iter(other.params.values()))]["step"] == 3
        counters = [state["step"].item() for state in other._local.optimizer.state.values()]
        assert counters == [3, 3]
        assert torch.equal(local_tensors(table)[1].detach(), full[2:4])
        assert local_tensors(table)[0].grad is not None
        optimizer.zero_grad()
        assert local_tensors(table)[0].grad is None


def test_shards_in_a_wrapper_are_stepped_on_each():
    with fake_rank(0, 2) as mesh:
        shards = [torch.ones(2, 2), torch.ones(1, 2)]
        wrapper = LocalShardsWrapper(shards, [(0, 0), (2, 0)])
        table = DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False, shape=(5, 2), stride=(2, 1))
        optimizer = shardopt.keyed("adam", {"table": table})
        for local in local_tensors(table):
            local.grad = torch.ones_like(local)
        optimizer.step()
        assert [local.lt(1).all().item() for local in local_tensors(table)] == [True, True]
        state = optimizer.state_dict()["state"]["table"]
        assert [tuple(local.shape) for local in local_tensors(state["exp_avg"])] == [(2, 2), (1, 2)]
        optimizer.load_state_dict(copy.deepcopy({**optimizer.state_dict(), "state": {"table": {**state}}}))
        optimizer.zero_grad()
        assert [local.grad for local in local_tensors(table)] == [None, None]


# --- stepping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_a_closure_runs_once_and_its_gradients_are_stepped_on(sharded):
    with fake_rank(0, 2) as mesh:
        weight = torch.nn.Parameter(shard(torch.ones(2, 2), mesh, Replicate()) if sharded else torch.ones(2, 2))
        optimizer = shardopt.keyed("sgd", {"w": weight}, lr=0.5)
        calls = []

        def closure():
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = (3 * weight).sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert calls == [True]
        assert loss == 12
        assert local_tensors(weight)[0].tolist() == [[-0.5, -0.5], [-0.5, -0.5]]


def test_lbfgs_calls_its_closure_as_often_as_it_likes():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = shardopt.keyed("lbfgs", {"w": weight})
    calls = []

    def closure():
        calls.append(None)
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2
    assert len(calls) > 1
    assert weight.abs().max() < 0.1


def test_hooks_fire_once_for_the_optimizer_that_the_user_has():
    optimizer = adam()
    fired = []

    def note(name):
        return lambda who, *_: fired.append((name, who is optimizer))

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))
    optimizer.register_state_dict_pre_hook(note("save pre"))
    optimizer.register_state_dict_post_hook(note("save post"))
    optimizer.register_load_state_dict_pre_hook(note("load pre"))
    optimizer.register_load_state_dict_post_hook(note("load post"))
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for handle in handles:
        handle.remove()
    assert fired == [
        (name, True)
        for name in ("global pre", "pre", "post", "global post", "save pre", "save post", "load pre", "load post")
    ]


def test_hooks_may_change_what_is_saved_and_loaded():
    optimizer, loaded = adam(), adam()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.register_state_dict_post_hook(lambda _, saved: {"wrapped": saved})
    loaded.register_load_state_dict_pre_hook(lambda _, saved: saved["wrapped"])
    saved = optimizer.state_dict()
    assert saved.keys() == {"wrapped"}
    loaded.load_state_dict(saved)
    assert loaded.param_groups[0]["lr"] == 0.25


def test_a_pre_hook_that_raises_keeps_the_step_from_happening():
    optimizer = adam()
    before = everything(optimizer)

    def refuse(*_):
        raise RuntimeError("not now")

    handle = optimizer.register_step_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="not now"):
        optimizer.step()
    unchanged(optimizer, before)
    handle.remove()
    optimizer.step()


@pytest.mark.parametrize("sharded", [False, True])
def test_schedules_act_on_the_groups(sharded):
    with fake_rank(0, 2) as mesh:
        weight = torch.nn.Parameter(shard(torch.zeros(2), mesh, Replicate()) if sharded else torch.zeros(2))
        optimizer = shardopt.keyed("sgd", {"w": weight}, lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            schedule.step()
        assert local_tensors(weight)[0].tolist() == [-1.75, -1.75]
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.125


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_grad_scaler_unscales_and_skips(fused):
    optimizer = shardopt.keyed("adam", parameters(), lr=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = optimizer.params["layer.w"]
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.grad, torch.ones(4, 2))
    assert weight.lt(1).all()
    stepped = weight.detach().clone()
    weight.grad = torch.full((4, 2), torch.inf)
    scaler.step(optimizer)
    assert torch.equal(weight.detach(), stepped)


def test_one_group_may_mix_meshes_and_plain_tensors():
    for options in ({"foreach": True}, {"fused": True}):
        with fake_rank(0, 4, (2, 2)) as mesh:
            params = {
                "plain": torch.ones(4),
                "here": shard(torch.ones(4), mesh, Shard(0), Replicate()),
                "there": shard(torch.ones(4), init_device_mesh("cpu", (4,)), Shard(0)),
            }
            optimizer = adam({name: torch.nn.Parameter(tensor) for name, tensor in params.items()}, **options)
            first_elements = [local_tensors(parameter)[0][0].item() for parameter in optimizer.params.values()]
            assert first_elements == pytest.approx([0.999] * 3)
            assert [state["step"].item() for state in optimizer.state.values()] == [1, 1, 1]


def test_gradients_do_not_stay_on_local_tensors():
    with fake_rank(0, 2) as mesh:
        weight = torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))
        optimizer = shardopt.keyed("adam", {"w": weight})
        weight.grad = gradient = torch.ones_like(weight)
        optimizer.step()
        assert local_tensors(weight)[0].grad is None
        assert weight.grad is gradient
        assert optimizer.param_groups[0]["params"] == [weight]
        optimizer.zero_grad(set_to_none=False)
        assert not weight.grad.to_local().any()
        optimizer.zero_grad()
        assert weight.grad is None


def test_a_gradient_that_does_not_fit_is_named_and_nothing_is_left_behind():
    with fake_rank(0, 2) as mesh:
        first = torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))
        second = torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))
        optimizer = shardopt.keyed("adam", {"first": first, "second": second})
        first.grad = torch.ones_like(first)
        second.grad = shard(torch.ones(4, 2), init_device_mesh("cpu", (2, 1)), Shard(0), Replicate())
        with pytest.raises(GradientError, match=r"second\.grad: found DTensor .* redistribute it"):
            optimizer.step()
        assert local_tensors(first)[0].grad is None
        assert optimizer.param_groups[0]["params"] == [first, second]
        assert local_tensors(first)[0].eq(1).all()


def test_a_replaced_local_tensor_is_noticed_and_state_follows():
    with fake_rank(0, 2) as mesh:
        model = torch.nn.Linear(2, 4, bias=False)
        model.weight = torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))
        optimizer = shardopt.keyed("adam", model.named_parameters())
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        before = local_tensors(model.weight)[0]
        model.to(torch.float64)
        assert local_tensors(model.weight)[0] is not before
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        state = optimizer.state[model.weight]
        assert state["step"] == 2
        assert state["exp_avg"].dtype == torch.float64
        assert local_tensors(model.weight)[0].lt(before).all()
        model.weight._local_tensor = torch.ones(3, 2)
        with pytest.raises(StateError, match=r"weight: found local shapes \[\(3, 2\)\]; required \[\(2, 2\)\]"):
            optimizer.step()


# --- copies ----------------------------------------------------------------------------------------------------------


def repickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, repickled])
@pytest.mark.parametrize("algorithm", ["adam", "sgd", "adagrad"])
def test_a_copy_trains_alike_and_apart(duplicate, algorithm):
    optimizer = adam(algorithm=algorithm, **({"momentum": 0.9, "dampening": 0.5} if algorithm == "sgd" else {}))
    twin = duplicate(optimizer)
    before = everything(optimizer)
    for parameter in twin.params.values():
        parameter.grad = torch.ones_like(parameter)
    twin.step()
    unchanged(optimizer, before)
    for parameter in optimizer.params.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(map(torch.equal, optimizer.params.values(), twin.params.values()))
    unchanged(twin, everything(optimizer))


def test_a_copy_of_a_sharded_optimizer_steps_on_the_copied_parameters():
    with fake_rank(0, 2) as mesh:
        optimizer = adam({"w": torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))})
        twin = copy.deepcopy(optimizer)
        (weight,), (copied,) = optimizer.params.values(), twin.params.values()
        assert local_tensors(copied)[0].data_ptr() != local_tensors(weight)[0].data_ptr()
        before = local_tensors(weight)[0].clone()
        copied.grad = torch.ones_like(copied)
        twin.step()
        assert torch.equal(local_tensors(weight)[0], before)
        assert not torch.equal(local_tensors(copied)[0], before)
        assert (twin.state[copied]["step"], optimizer.state[weight]["step"]) == (2, 1)


def test_repr_tells_the_algorithm_and_its_options():
    assert repr(adam(lr=0.25)).startswith("KeyedOptimizerWrapper of Adam (\nParameter Group 0\n")
    assert "lr: 0.25" in repr(adam(lr=0.25))


# --- building --------------------------------------------------------------------------------------------------------


def test_groups_are_added_with_names():
    optimizer = adam()
    extra = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": {"extra": extra}, "lr": 0.75})
    assert optimizer.params["extra"] is extra
    extra.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][-1]["lr"] == 0.75
    assert saved["state"]["extra"]["step"] == 1
    for again in ({"extra": torch.nn.Parameter(torch.ones(2))}, {"other": extra}):
        with pytest.raises(StateError, match="a parameter that the optimizer has already"):
            optimizer.add_param_group({"params": again})
    with pytest.raises(StateError, match="without names"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2


def test_a_group_added_to_adagrad_has_state_as_the_first_has():
    optimizer = shardopt.keyed("adagrad", parameters(), groups=[{"match": "b$"}], initial_accumulator_value=0.5)
    state = optimizer.state_dict()["state"]
    assert state.keys() == {"layer.b", "layer.w"}
    assert all(entries["sum"].eq(0.5).all() for entries in state.values())


def test_tied_parameters_are_one_under_their_first_name():
    tied = torch.nn.Parameter(torch.ones(2))
    optimizer = adam({"embedding": tied, "head": tied})
    assert list(optimizer.state_dict()["state"]) == ["embedding"]
    assert optimizer.params["head"] is tied
    assert optimizer.state[tied]["step"] == 1
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "got no parameters"),
        ([torch.nn.Parameter(torch.ones(1))], "parameters without names"),
        ([("w", torch.nn.Parameter(torch.ones(1)))] * 2, "w: found two parameters"),
        ({"w": torch.nn.Parameter(torch.ones(1)) * 2}, "w: found a tensor that autograd computed"),
    ],
)
def test_what_is_not_named_parameters_is_refused(params, message):
    with pytest.raises(StateError, match=message):
        shardopt.keyed("adam", params)


def test_a_factory_builds_over_what_it_is_given():
    params = parameters()
    seen = []

    def factory(received):
        seen.extend(received)
        return torch.optim.SGD([{"params": received[:1]}, {"params": received[1:], "lr": 0.5}], lr=0.25)

    optimizer = KeyedOptimizerWrapper(params, factory)
    assert all(map(torch.equal, seen, params.values()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    assert list(optimizer.state_dict()) == ["state"]
    optimizer.save_param_groups(True)
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.25, 0.5]
    with pytest.raises(StateError, match="a tensor that the factory took from elsewhere"):
        KeyedOptimizerWrapper(params, lambda _: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))


class OwnStep(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


class OwnDefaults(torch.optim.Adam):
    pass


class Signum(torch.optim.Optimizer):
    """A stranger with one like-parameter state."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    def _init_group(self, group, grads, averages):
        for p in group["params"]:
            if p.grad is not None:
                grads.append(p)
                averages.append(self.state[p].setdefault("exp_avg", torch.zeros_like(p)))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params, averages = [], []
            self._init_group(group, params, averages)
            for p, average in zip(params, averages, strict=True):
                average.lerp_(p.grad, 0.5)
                p.sub_(average.sign(), alpha=group["lr"])


@pytest.mark.parametrize("other", [None, 3, [torch.optim.SGD], torch.optim.SGD([torch.zeros(1)])])
def test_what_is_no_algorithm_at_all_is_refused_by_name(other):
    with pytest.raises(AlgorithmError, match=r"found an algorithm that is not registered(.|\n)*one of ASGD"):
        shardopt.keyed(other, parameters())


def test_a_stranger_of_a_registered_name_is_told_by_its_module():
    stranger = type("SGD", (Signum,), {"__module__": "others.optim"})
    with pytest.raises(AlgorithmError, match=r"others\.optim\.SGD: found .*; use the registered SGD, by that name, or"):
        shardopt.keyed(stranger, parameters())


@pytest.mark.parametrize("module", ["torchao.optim.adam", "bitsandbytes.optim.adamw"])
def test_a_stranger_with_state_in_8_bits_is_told_of_ours(module):
    stranger = type("AdamW8bit", (Signum,), {"__module__": module})
    words = r"AdamW8bit: found .*; for state in 8 bits pass shardopt\.keyed\(name, .*, state_dtype=torch\.uint8\), or"
    with pytest.raises(AlgorithmError, match=words):
        shardopt.keyed(stranger, parameters())


def test_a_stranger_is_refused_until_it_is_registered(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    for stranger in (Signum, OwnStep, "signum"):
        with pytest.raises(AlgorithmError, match=r"one of ASGD, AdEMAMix, .*register"):
            shardopt.keyed(stranger, parameters())
    KeyedOptimizerWrapper(parameters(), Signum)  # plain parameters are stepped on by the optimizer itself
    shardopt.keyed(OwnDefaults, parameters())  # its step is Adam's
    with fake_rank(0, 2) as mesh:
        weight = torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))
        with pytest.raises(AlgorithmError, match="Signum: found an algorithm that is not registered"):
            KeyedOptimizerWrapper({"w": weight}, Signum)
        register(AlgorithmSpec(Signum, "signum", elementwise=True, state=(StateEntry("exp_avg", Kind.PARAMETER),)))
        optimizer = shardopt.keyed("signum", {"w": weight})
        optimizer.init_state()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert local_tensors(weight)[0].eq(0.5).all()
        assert optimizer.state[weight]["exp_avg"].placements == (Shard(0),)
        with pytest.raises(AlgorithmError, match="a class once"):
            register(AlgorithmSpec(OwnStep, "Signum", elementwise=True))


def test_the_base_class_keys_what_it_is_given():
    """The signature and the behaviour that torchrec.optim documents."""
    weight, bias = torch.ones(2), torch.ones(3)
    nested = {"list": [torch.zeros(1), torch.zeros(1)]}
    state = {weight: {"momentum": torch.full((2,), 4.0), "nested": nested, "count": 1}}
    groups = [{"params": [weight, bias], "rate": 2.0}]
    optimizer = KeyedOptimizer({"w": weight, "b": bias}, state, groups)
    assert optimizer.param_groups is groups
    assert list(optimizer.state_dict()) == ["state"]
    optimizer.save_param_groups(True)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"] == [{"params": ["b", "w"], "rate": 2.0}]
    saved["state"]["w"]["momentum"].fill_(9.0)
    saved["state"]["w"]["nested"]["list"][1].fill_(7.0)
    saved["state"]["w"]["count"] = 5
    saved["param_groups"][0]["rate"] = 3.0
    held = [state[weight]["momentum"], *state[weight]["nested"]["list"]]
    optimizer.load_state_dict(saved)
    assert [tensor.flatten()[0].item() for tensor in held] == [9.0, 0.0, 7.0]
    assert state[weight]["nested"]["list"][1] is held[2]
    assert (state[weight]["count"], groups[0]["rate"]) == (5, 3.0)
    assert saved["state"]["w"]["nested"]["list"][1] is not held[2]
    with pytest.raises(NotImplementedError):
        optimizer.step()
    with pytest.raises(StateError, match="All state keys must be params"):
        KeyedOptimizer({"w": weight}, {bias: {}}, [])
    with pytest.raises(StateError, match=r"All state keys must be params\.[\s\S]*no parameters: other"):
        KeyedOptimizer({"w": weight}, {weight: {}, "other": 2.0}, [{"params": [weight]}])
    KeyedOptimizer({}, {}, [])


def test_implementation_is_chosen_anew_for_a_module_that_was_cast():
    """In bfloat16 the fused SGD rounds in another way than the for-loop."""
    ours = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 64))
    plain = torch.nn.Parameter(ours.detach().clone())
    optimizer = shardopt.keyed("sgd", {"w": ours}, lr=0.1, weight_decay=0.1)
    torchs = torch.optim.SGD([plain], lr=0.1, weight_decay=0.1, foreach=False)
    for dtype in (torch.float32, torch.bfloat16):
        ours.data, plain.data = ours.data.to(dtype), ours.data.to(dtype)
        for i in range(10):
            ours.grad = torch.linspace(i - 5.0, 0.3, 64, dtype=dtype)
            plain.grad = ours.grad.clone()
            optimizer.step()
            torchs.step()
    assert torch.equal(ours, plain)
