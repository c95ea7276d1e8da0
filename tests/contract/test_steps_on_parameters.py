"""The seam for algorithms that are not elementwise: their optimizer is handed the user's own tensors."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt.algorithms import AlgorithmSpec, Kind, StateEntry, StepsOn, register, registry
from shardopt.errors import AlgorithmError
from shardopt.optim import KeyedOptimizerWrapper
from shardopt.sharding.gradients import local_gradients
from shardopt.sharding.view import assemble, local_tensors, view_of
from tests.support.fake_rank import fake_rank, shard, sharded_tensor


class Theirs(torch.optim.Optimizer):
    """Takes plain tensors only."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        raise AssertionError("ours runs in its place")


class Ours(torch.optim.Optimizer):
    """Subtracts all gradients so far, and counts."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def initial_state(self, group, parameter):
        return {"sum": assemble(parameter, [torch.zeros_like(local) for local in local_tensors(parameter)])}

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.update(state or self.initial_state(group, parameter))
                parts = zip(
                    local_tensors(parameter), local_tensors(state["sum"]), local_gradients(parameter), strict=True
                )
                for local, total, gradient in parts:
                    if gradient is not None:
                        local.sub_(total.add_(gradient), alpha=group["lr"])
        return loss


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    before = dict(registry._SPECS)
    register(
        AlgorithmSpec(
            Ours,
            "ours",
            elementwise=False,
            state=(StateEntry("sum", Kind.PARAMETER),),
            steps_on=StepsOn.PARAMETERS,
            stands_for=Theirs,
            unsuitable=lambda view: "" if len(view.shape) == 2 else f"{len(view.shape)} dimensions",
        )
    )
    yield
    registry._SPECS.clear()
    registry._SPECS.update(before)


@contextmanager
def parameters(rank=0):
    """A plain parameter, a DTensor and a ShardedTensor of which rank 1 has no shard."""
    full = torch.arange(8.0).view(4, 2)
    with fake_rank(rank, 2) as mesh:
        yield {
            "plain": torch.nn.Parameter(full.clone()),
            "d": torch.nn.Parameter(shard(full, mesh, Shard(0))),
            "table": sharded_tensor(full, [(1, 0), (3, 0)], rank, requires_grad=True),
        }


def give_gradients(params):
    params["plain"].grad = torch.ones(4, 2)
    params["d"].grad = DTensor.from_local(torch.ones(2, 2), params["d"].device_mesh, [Shard(0)], run_check=False)
    for local in local_tensors(params["table"]):
        local.grad = torch.ones_like(local)


@pytest.mark.parametrize("algorithm", ["ours", Ours, Theirs])
@pytest.mark.parametrize("rank", [0, 1])
def test_it_is_handed_the_parameters(algorithm, rank):
    with parameters(rank) as params:
        before = {name: [local.detach().clone() for local in local_tensors(p)] for name, p in params.items()}
        optimizer = shardopt.keyed(algorithm, params, lr=0.5)
        optimizer.init_state()
        for _ in range(2):
            give_gradients(params)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        assert list(state) == ["plain", "d", *(["table"] if rank == 0 else [])]  # rank 1 has no part of it
        for name, parameter in [(name, params[name]) for name in state]:
            assert type(state[name]["sum"]) is type(parameter.data if name != "table" else parameter)
            assert view_of(state[name]["sum"]).shape == (4, 2)
            for local, was, total in zip(
                local_tensors(parameter), before[name], local_tensors(state[name]["sum"]), strict=True
            ):
                assert torch.equal(local.detach(), was - 1.5)
                assert torch.equal(total, torch.full_like(was, 2.0))
        optimizer.zero_grad()
        assert all(gradient is None for p in params.values() for gradient in local_gradients(p))


def test_a_factory_of_the_class_it_stands_for_is_taken():
    with parameters() as params:
        optimizer = KeyedOptimizerWrapper(params, lambda tensors: Theirs(tensors, lr=0.25))
        give_gradients(params)
        assert optimizer.step(lambda: 7.0) == 7.0
        assert torch.equal(params["plain"].detach(), torch.arange(8.0).view(4, 2) - 0.25)


def test_groups_loading_and_parameters_added_later():
    with parameters() as params:
        whole, table = {name: params[name] for name in ("plain", "d")}, {"table": params["table"]}
        optimizer = shardopt.keyed("ours", whole, groups=[{"match": "plain", "lr": 0.5}])
        optimizer.add_param_group({"params": table, "lr": 2.0})
        optimizer.init_state()
        give_gradients(params)
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0, 2.0]
        assert optimizer.param_groups[2]["params"][0] is params["table"]
        assert torch.equal(local_tensors(params["table"])[1][0], torch.tensor([2.0, 3.0]) - 2.0)

        other = shardopt.keyed("ours", whole, groups=[{"match": "plain"}])
        other.add_param_group({"params": table})
        other.init_state()
        memory = [local.data_ptr() for p in params.values() for local in local_tensors(other.state[p]["sum"])]
        other.load_state_dict(optimizer.state_dict())
        assert memory == [local.data_ptr() for p in params.values() for local in local_tensors(other.state[p]["sum"])]
        assert all((local == 1).all() for p in params.values() for local in local_tensors(other.state[p]["sum"]))
        assert [group["lr"] for group in other.param_groups] == [0.5, 1.0, 2.0]


def test_unsuitable_parameters_are_named():
    params = {"w": torch.nn.Parameter(torch.zeros(2, 2)), "bias": torch.nn.Parameter(torch.zeros(2))}
    with pytest.raises(AlgorithmError, match="bias: found 1 dimensions"):
        shardopt.keyed("ours", params)
    optimizer = shardopt.keyed("ours", {"w": params["w"]})
    with pytest.raises(AlgorithmError, match="bias: found 1 dimensions"):
        optimizer.add_param_group({"params": {"bias": params["bias"]}})
    assert len(optimizer.param_groups) == 1


def test_a_copy_knows_the_names_of_its_own_parameters():
    params = {"w": torch.nn.Parameter(torch.zeros(2, 2)), "v": torch.nn.Parameter(torch.ones(2, 2))}
    optimizer = shardopt.keyed("ours", {"w": params["w"]})
    optimizer.add_param_group({"params": {"v": params["v"]}})
    for keyed in (optimizer, copy.deepcopy(optimizer)):
        assert keyed._local.optimizer.names == {parameter: name for name, parameter in keyed.params.items()}
