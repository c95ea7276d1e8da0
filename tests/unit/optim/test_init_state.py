"""init_state is invisible: who calls it trains exactly as who does not, and sees the state that torch would make."""

import copy

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardopt
from shardopt.algorithms import AlgorithmSpec, AtFirstStep, Dtype, Kind, StateEntry, register, registry, spec_of
from shardopt.errors import StateError
from shardopt.sharding.view import local_tensors
from tests.support.cases import ELEMENTWISE_CASES, IN_TURN
from tests.support.fake_rank import fake_rank, shard, sharded_tensor

STEPS = 8
ABSENT = {0: {"late"}, 1: {"late", "plain"}, 4: {"shard"}}
DAMPENED = pytest.param("SGD", {"momentum": 0.9, "dampening": 0.5, "fused": True}, id="SGD-dampened")
CASES = [*ELEMENTWISE_CASES, DAMPENED]
SOME = [
    case if case.id in IN_TURN else pytest.param(*case.values, id=case.id, marks=pytest.mark.exhaustive)
    for case in ELEMENTWISE_CASES
]


def parameters(mesh):
    generator = torch.Generator().manual_seed(3)
    full = {name: torch.randn(5, 4, generator=generator) for name in ("shard", "plain", "late")}
    return {
        name: torch.nn.Parameter(shard(tensor, mesh, Shard(0)) if name == "shard" else tensor)
        for name, tensor in full.items()
    }


def give_gradients(params, step, absent=ABSENT):
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in params.items():
        gradient = torch.randn(5, 4, generator=generator)
        if name == "shard":
            gradient = shard(gradient, parameter.device_mesh, Shard(0))
        parameter.grad = None if name in absent.get(step, ()) else gradient


def bits(optimizer):
    """Everything that training depends on, as local tensors."""
    return {
        name: [local_tensors(parameter)[0].detach().clone()]
        + [local_tensors(value)[0].clone() for value in optimizer.state.get(parameter, {}).values()]
        for name, parameter in optimizer.params.items()
    }


def shapes(optimizer):
    state = optimizer.state_dict()["state"]
    return {
        key: {name: (value.shape, value.dtype) for name, value in entries.items()} for key, entries in state.items()
    }


def equal(one, other):
    return one.keys() == other.keys() and all(
        len(one[name]) == len(other[name]) and all(map(torch.equal, one[name], other[name])) for name in one
    )


@pytest.mark.parametrize(("name", "options"), [*SOME, DAMPENED])
def test_training_continues_as_if_it_had_not_been_called(name, options):
    with fake_rank(0, 2) as mesh:
        # torch's fused SGD fails where a parameter gets its momentum buffer later than the others.
        late = name != "SGD" or not options.get("momentum") or not options.get("fused")
        runs = []
        for calls_at in ((), (0,), (0, 3)):
            params = parameters(mesh)
            try:
                optimizer = shardopt.keyed(name, params, **options)
            except ValueError:
                return  # what torch refuses
            tensor_lr = isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
            for step in range(STEPS):
                give_gradients(params, step, ABSENT if late else {4: {"shard"}})
                if step in calls_at:
                    optimizer.init_state()
                if not tensor_lr:
                    optimizer.param_groups[0]["lr"] *= 0.5 if step % 2 else 3.0  # a schedule, before the first step too
                optimizer.step()
            runs.append(bits(optimizer))
        assert equal(runs[0], runs[1])
        assert equal(runs[0], runs[2])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_it_makes_what_torch_would_make_and_the_registry_says_so(name, options):
    with fake_rank(1, 2) as mesh:
        params = parameters(mesh)
        try:
            optimizer = shardopt.keyed(name, params, **options)
        except ValueError:
            return  # what torch refuses
        optimizer.init_state()
        group = optimizer.param_groups[0]
        entries = spec_of(name).entries(group)
        initial = {
            AtFirstStep.GRADIENT: 0.0,
            AtFirstStep.LEARNING_RATE: group["lr"],
            AtFirstStep.PARAMETER: 0.0,
        }
        for parameter in params.values():
            state = optimizer.state.get(parameter, {})
            assert list(state) == [entry.name for entry in entries]
            for entry in entries:
                value = state[entry.name]
                assert value.dtype == entry.dtype.of(parameter.dtype, group)
                assert value.shape == (parameter.shape if entry.kind is Kind.PARAMETER else ())
                wanted = initial.get(entry.initial, group.get(entry.initial, entry.initial))
                local = local_tensors(value)[0]
                assert torch.equal(local, torch.full_like(local, float(wanted)))
        before = shapes(optimizer)
        give_gradients(params, 2)
        optimizer.step()
        assert shapes(optimizer) == before


@pytest.mark.parametrize("name", ["adam", "sgd", "rprop"])
def test_nothing_is_touched(name):
    with fake_rank(0, 2) as mesh:
        params = parameters(mesh)
        give_gradients(params, 0)
        optimizer = shardopt.keyed(name, params, lr=0.1, **({"momentum": 0.9} if name == "sgd" else {}))
        fired = []
        optimizer.register_step_pre_hook(lambda *_: fired.append("step"))
        optimizer.register_state_dict_pre_hook(lambda *_: fired.append("state_dict"))
        optimizer.register_load_state_dict_post_hook(lambda *_: fired.append("load"))
        handle = register_optimizer_step_pre_hook(lambda *_: fired.append("global"))
        for parameter in params.values():
            parameter.register_post_accumulate_grad_hook(lambda _: fired.append("gradient"))
        gradients = {key: parameter.grad for key, parameter in params.items()}
        before = {
            key: (local_tensors(p)[0].detach().clone(), local_tensors(p)[0]._version) for key, p in params.items()
        }
        optimizer.init_state()
        handle.remove()
        assert fired == []
        for key, parameter in params.items():
            (local,) = local_tensors(parameter)
            assert parameter.grad is gradients[key]
            assert torch.equal(local.detach(), before[key][0])
            assert local._version == before[key][1]
            if key == "shard":
                assert local.grad is None


def test_state_that_is_there_is_kept():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = shardopt.keyed("adam", {"w": weight})
    weight.grad = torch.ones(3)
    optimizer.step()
    kept = dict(optimizer.state[weight])
    optimizer.init_state()
    assert all(optimizer.state[weight][name] is value for name, value in kept.items())


def test_a_frozen_parameter_gets_none():
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = shardopt.keyed("adam", {"w": torch.nn.Parameter(torch.ones(3)), "frozen": frozen})
    optimizer.init_state()
    assert list(optimizer.state_dict()["state"]) == ["w"]
    frozen.requires_grad_(True)
    optimizer.init_state()
    assert list(optimizer.state_dict()["state"]) == ["w", "frozen"]


def test_state_that_is_made_at_construction_is_that_of_frozen_parameters_too_in_every_group():
    params = {name: torch.nn.Parameter(torch.ones(3), requires_grad=False) for name in ("a", "b", "c")}
    optimizer = shardopt.keyed("adagrad", {"a": params["a"], "b": params["b"]}, groups=[{"match": "b", "lr": 0.1}])
    optimizer.add_param_group({"params": {"c": params["c"]}})
    assert list(optimizer.state_dict()["state"]) == ["b", "a", "c"]
    optimizer.state.clear()
    assert list(optimizer.state_dict()["state"]) == ["b", "a", "c"]


def test_what_someone_wrote_into_early_state_is_used():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = shardopt.keyed("sgd", {"w": weight}, lr=1.0, momentum=0.5, dampening=0.5)
    optimizer.init_state()
    optimizer.state[weight]["momentum_buffer"].fill_(8.0)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == [-4.5, -4.5]  # 0.5 × 8 + (1 − 0.5) × 1


@pytest.mark.parametrize(("written", "after"), [(True, -4.5), (False, -1.0)])
def test_what_was_written_into_early_state_follows_a_replaced_local_tensor(written, after):
    with fake_rank(0, 2) as mesh:
        model = torch.nn.Linear(2, 4, bias=False)
        model.weight = torch.nn.Parameter(shard(torch.zeros(4, 2), mesh, Shard(0)))
        optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=1.0, momentum=0.5, dampening=0.5)
        optimizer.init_state()
        if written:
            local_tensors(optimizer.state[model.weight]["momentum_buffer"])[0].fill_(8.0)
        model.to(torch.float64)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        # As above; a first step that makes the buffer anew starts it with the whole gradient.
        assert local_tensors(model.weight)[0].eq(after).all()


def test_the_mark_of_a_parameter_without_a_step_is_saved_and_loaded():
    def optimizer_over(weight):
        return shardopt.keyed("sgd", {"w": weight}, lr=1.0, momentum=0.5, dampening=0.5)

    fresh, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    saved = optimizer_over(fresh)
    saved.init_state()
    assert saved.state_dict()["param_groups"][0]["untouched"] == ["w"]
    stepped = optimizer_over(other)
    other.grad = torch.ones(2)
    stepped.step()
    after_one = stepped.state_dict()
    assert after_one["param_groups"][0]["untouched"] == []

    loaded = optimizer_over(fresh)
    loaded.init_state()
    loaded.load_state_dict(after_one)
    assert loaded.state_dict()["param_groups"][0]["untouched"] == []
    fresh.grad = torch.ones(2)
    loaded.step()
    assert fresh.tolist() == [-1.0, -1.0]  # 0.5 × 1 + (1 − 0.5) × 1

    stepped.load_state_dict(saved.state_dict())  # back to never stepped: the first gradient counts in full
    other.data.zero_()
    other.grad = torch.full((2,), 2.0)
    stepped.step()
    assert other.tolist() == [-2.0, -2.0]


def test_what_someone_put_in_the_place_of_early_state_is_used():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = shardopt.keyed("sgd", {"w": weight}, lr=1.0, momentum=0.5, dampening=0.5)
    optimizer.init_state()
    optimizer.state[weight] = {"momentum_buffer": torch.full((2,), 8.0)}
    weight.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == [-4.5, -4.5]


@pytest.mark.parametrize("written", [False, True])
def test_a_copy_knows_what_was_written_into_early_state(written):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = shardopt.keyed("sgd", {"w": weight}, lr=1.0, momentum=0.5, dampening=0.5)
    optimizer.init_state()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # writes zeros, and knows that they mean nothing
    if written:
        optimizer.state[weight]["momentum_buffer"].fill_(8.0)
    twin = copy.deepcopy(optimizer)
    (copied,) = twin.params.values()
    copied.grad = torch.ones(2)
    twin.step()
    assert copied.tolist() == ([-4.5, -4.5] if written else [-1.0, -1.0])


def test_a_parameter_that_is_in_no_group_has_no_state():
    params = {"w": torch.nn.Parameter(torch.ones(2)), "left out": torch.nn.Parameter(torch.ones(2))}
    optimizer = shardopt.optim.KeyedOptimizerWrapper(params, lambda tensors: torch.optim.Adam(tensors[:1]))
    optimizer.init_state()
    assert list(optimizer.state_dict()["state"]) == ["w"]


def test_a_rank_without_a_shard_has_no_state():
    full = torch.arange(8.0).view(4, 2)
    rows = [(3, 0), (1, 0)]
    for rank in (0, 1):
        with fake_rank(rank, 2):
            table = sharded_tensor(full, rows, rank, requires_grad=True)
            optimizer = shardopt.keyed("adam", {"table": table})
            optimizer.init_state()
            for local in local_tensors(table):
                local.grad = torch.ones_like(local)
            optimizer.step()
            saved = optimizer.state_dict()
            assert saved["param_groups"][0]["params"] == ["table"]
            assert [*saved["state"]] == [*optimizer.held_state_names()] == (["table"] if rank == 0 else [])
            assert (table in optimizer.state) == (rank == 0) and len(optimizer.state) == 1 - rank
            if rank == 0:
                state = saved["state"]["table"]
                assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
                assert state["step"] == 1
                assert [tuple(local.shape) for local in local_tensors(state["exp_avg"])] == [(3, 2), (1, 2)]
            else:
                optimizer.state[table] = {"step": torch.ones(())}  # as every rank of a program may do
                assert optimizer.state[table] == {} and table not in optimizer.state


def test_names_that_are_not_parameters_are_refused():
    optimizer = shardopt.keyed("adam", {"w": torch.nn.Parameter(torch.ones(3))})
    optimizer.init_state(sparse_grad_parameter_names={"w"})
    with pytest.raises(StateError, match=r"found embedding; required some of w"):
        optimizer.init_state(sparse_grad_parameter_names={"embedding"})


class Own(torch.optim.Optimizer):
    """Makes its state inside of its step, where only the spec can tell of it."""

    def __init__(self, params, lr=0.1, start=3.0):
        super().__init__(params, {"lr": lr, "start": start})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["calls"] = 0
                    state["step"] = torch.tensor(0.0)
                    state["sum"] = torch.full_like(parameter, group["start"])
                    state["rate"] = torch.full_like(parameter, group["lr"])
                state["calls"] += 1
                state["step"] += 1
                state["sum"].addcmul_(parameter.grad, parameter.grad)
                parameter.sub_(state["rate"] * parameter.grad / state["sum"].sqrt() / state["step"])


def test_state_of_an_algorithm_that_makes_it_inside_its_step_is_as_told(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    entries = (
        StateEntry("calls", Kind.SCALAR, Dtype.PLAIN_COUNT),
        StateEntry("step", Kind.SCALAR, Dtype.COUNTER),
        StateEntry("sum", Kind.PARAMETER, initial="start"),
        StateEntry("rate", Kind.PARAMETER, initial=AtFirstStep.LEARNING_RATE),
    )
    register(AlgorithmSpec(Own, "own", elementwise=True, state=entries))
    states = []
    for early in (False, True):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = shardopt.keyed("own", {"w": parameter}, lr=0.5)
        if early:
            optimizer.init_state()
            made = optimizer.state_dict()["state"]["w"]
            assert made["calls"] == 0 and made["step"].item() == 0 and made["sum"].tolist() == [3.0] * 3
        optimizer.param_groups[0]["lr"] = 0.25  # known only at the first step
        for _ in range(2):
            parameter.grad = torch.tensor([1.0, -2.0, 0.5])
            optimizer.step()
        states.append({"": parameter.detach(), **optimizer.state_dict()["state"]["w"]})
    never, early = states
    assert list(never) == list(early)
    assert all(torch.equal(torch.as_tensor(never[name]), torch.as_tensor(early[name])) for name in never)
