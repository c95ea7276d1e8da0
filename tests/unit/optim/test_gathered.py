"""Steps that go by what an earlier step gathered: as long as nothing but the gradients changed, and no longer.

Each test steps an optimizer on DTensors and a torch optimizer on plain copies of their local tensors, and does the same
to both on the way.
"""

import copy
import functools
import gc
import pickle
import sys
import weakref

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt.errors import GradientError
from tests.support.fake_rank import fake_rank, shard

ALGORITHMS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
STATE = {"Adadelta": "square_avg", "Adagrad": "sum", "ASGD": "ax", "RMSprop": "square_avg", "Rprop": "prev"}


class Twins:
    """Three sharded parameters under our optimizer, and plain ones under torch's."""

    def __init__(self, mesh, algorithm="AdamW", **options):
        options = {"lr": 0.1, "foreach": False, **options}
        wholes = [torch.randn(6, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        self.mesh = mesh
        self.ours = {f"w{i}": torch.nn.Parameter(shard(whole, mesh, Shard(0))) for i, whole in enumerate(wholes)}
        self.plain = [torch.nn.Parameter(p.to_local().detach().clone()) for p in self.ours.values()]
        self.optimizer = shardopt.keyed(algorithm, self.ours, **options)
        self.torchs = getattr(torch.optim, algorithm)(self.plain, **options)
        self.seed = 100

    @property
    def pairs(self):
        return list(zip(self.ours.values(), self.plain, strict=True))

    @property
    def gathered(self):
        return self.optimizer._local._grouped[0].cache if self.optimizer._local._grouped else None

    def step(self, without=(), sparse=(), tolerance=0.0):
        for i, (ours, plain) in enumerate(self.pairs):
            self.seed += 1
            local = torch.randn(plain.shape, generator=torch.Generator().manual_seed(self.seed))
            local = local.to_sparse(1) if i in sparse else local
            plain.grad = None if i in without else local.clone()
            ours.grad = None if i in without else self.gradient(ours, local)
        self.optimizer.step()
        self.torchs.step()
        self.check(tolerance)

    def gradient(self, ours, local):
        return DTensor(local, ours._spec, requires_grad=False)  # as fully_shard makes it

    def check(self, tolerance=0.0):
        for ours, plain in self.pairs:
            assert torch.allclose(ours.to_local(), plain, rtol=tolerance, atol=0.0)
            state = self.optimizer.state[ours]
            assert state.keys() == self.torchs.state[plain].keys()
            for name, value in self.torchs.state[plain].items():
                held = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
                assert torch.allclose(held, value, rtol=tolerance, atol=0.0), name


@pytest.fixture
def mesh():
    with fake_rank(0, 2) as mesh:
        yield mesh


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steady_steps_go_by_what_was_gathered_once(mesh, algorithm):
    twins = Twins(mesh, algorithm, **({"momentum": 0.9} if algorithm == "SGD" else {}))
    for _ in range(3):
        twins.step()
    kept = twins.gathered
    assert kept is not None
    for group in (*twins.optimizer.param_groups, *twins.torchs.param_groups):
        group["lr"] = 0.03  # as schedules do
    for _ in range(3):
        twins.step()
    assert twins.gathered is kept


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_state_that_was_replaced_is_stepped_on(mesh, algorithm):
    twins = Twins(mesh, algorithm, **({"momentum": 0.9} if algorithm == "SGD" else {}))
    name = STATE.get(algorithm, "momentum_buffer" if algorithm == "SGD" else "exp_avg")
    for _ in range(3):
        twins.step()
    state = twins.optimizer.state[twins.ours["w1"]]
    state[name] = twins.gradient(twins.ours["w1"], torch.full((3, 2), 0.5))
    twins.torchs.state[twins.plain[1]][name] = torch.full((3, 2), 0.5)
    for _ in range(2):
        twins.step()


def test_state_that_was_taken_away_is_made_anew(mesh):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    del twins.optimizer.state[twins.ours["w2"]]
    del twins.torchs.state[twins.plain[2]]
    twins.step()
    twins.optimizer.state[twins.ours["w0"]].clear()
    twins.torchs.state[twins.plain[0]].clear()
    twins.step()


def test_state_that_was_loaded_is_stepped_on(mesh):
    twins = Twins(mesh)
    twins.step()
    saved, theirs = copy.deepcopy(twins.optimizer.state_dict()), copy.deepcopy(twins.torchs.state_dict())
    for _ in range(3):
        twins.step()
    twins.optimizer.load_state_dict(saved)
    twins.torchs.load_state_dict(theirs)
    for _ in range(2):
        twins.step()


@pytest.mark.parametrize(
    "algorithm, before, after",
    [
        ("SGD", {"momentum": 0.0}, {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9}, {"momentum": 0.0}),
        ("SGD", {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}),
        ("AdamW", {"amsgrad": True}, {"amsgrad": False}),
        ("AdamW", {}, {"foreach": True}),
        ("AdamW", {}, {"fused": True}),
        ("Adagrad", {}, {"weight_decay": 0.1, "maximize": True}),
        ("RMSprop", {"centered": True, "momentum": 0.9}, {"centered": False}),
        ("RMSprop", {"centered": True, "momentum": 0.9}, {"momentum": 0.0}),
    ],
)
def test_options_that_change(mesh, algorithm, before, after):
    twins = Twins(mesh, algorithm, **before)
    for _ in range(3):
        twins.step()
    for group in (*twins.optimizer.param_groups, *twins.torchs.param_groups):
        group.update(after)
    for _ in range(3):
        twins.step()


def test_gradients_that_come_and_go(mesh):
    twins = Twins(mesh)
    for without in ((1,), (1,), (1,), (), (), (0, 2), (0, 2), (), (0, 1, 2), ()):
        twins.step(without)
    assert twins.gathered is not None


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("tolerance, how", [(0.0, {"foreach": False}), (1e-6, {"foreach": None})])
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad"])
def test_rows_in_between(mesh, algorithm, tolerance, how):
    """Without a name for the implementation, ours takes the fused one for dense gradients."""
    twins = Twins(mesh, algorithm, **how)
    for sparse in ((), (), (1,), (), (), (0, 1, 2), ()):
        twins.step(sparse=sparse, tolerance=tolerance)


def test_local_tensors_that_were_replaced(mesh):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    ours = twins.ours["w1"]
    old = ours._local_tensor
    ours._local_tensor = old.clone()  # as fully_shard does when a model moves
    for _ in range(2):
        twins.step()
    assert not torch.equal(old, ours._local_tensor)


def test_bad_gradient_is_told_and_changes_nothing(mesh):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    ours = twins.ours["w1"]
    for bad in (torch.ones(2, 2), torch.ones(3, 2, dtype=torch.float64)):
        gradient = twins.gradient(ours, torch.ones(3, 2))
        gradient._local_tensor, gradient._spec = bad, ours.grad._spec
        before, ours.grad = ours.grad, gradient
        with pytest.raises((GradientError, RuntimeError)):
            twins.optimizer.step()
        twins.check()
        assert all(
            local_tensor.grad is None
            for p in twins.ours.values()
            for local_tensor in twins.optimizer._local.state.local_tensors(p)
        )
        ours.grad = before
    twins.step()


def test_groups_and_parameters_that_are_added(mesh):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    whole = torch.randn(4, 2)
    ours = torch.nn.Parameter(shard(whole, mesh, Shard(0)))
    plain = torch.nn.Parameter(ours.to_local().detach().clone())
    twins.optimizer.add_param_group({"params": {"new": ours}, "lr": 0.5})
    twins.torchs.add_param_group({"params": [plain], "lr": 0.5})
    twins.ours["new"] = ours
    twins.plain.append(plain)
    for _ in range(3):
        twins.step()


def test_a_failed_step_leaves_the_optimizer_as_it_was(mesh, monkeypatch):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    inner = twins.optimizer._local.optimizer
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["torch.optim.adam"], "_single_tensor_adam", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            twins.optimizer.step()
    assert "_init_group" not in vars(inner)
    assert [len(group["params"]) for group in twins.optimizer.param_groups] == [3]
    twins.step()


def test_copy_of_a_state_is_a_dict_of_its_own(mesh):
    twins = Twins(mesh)
    twins.step()
    state = twins.optimizer.state[twins.ours["w0"]]
    copied = copy.deepcopy(state)
    assert type(copied) is dict
    copied["exp_avg"].to_local().fill_(9.0)
    del copied["step"]
    twins.check()


def test_copy_of_an_optimizer_goes_by_its_own_state(mesh):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    held = copy.deepcopy((twins.ours, twins.optimizer))
    old = {name: p.to_local().clone() for name, p in twins.ours.items()}
    twins.ours, twins.optimizer = held
    for _ in range(2):
        twins.step()
    assert all(not torch.equal(old[name], p.to_local()) for name, p in twins.ours.items())
    plain = {"w": torch.nn.Parameter(torch.ones(2))}
    optimizer = shardopt.keyed("AdamW", plain, lr=0.1)
    plain["w"].grad = torch.ones(2)
    optimizer.step()
    assert pickle.loads(pickle.dumps(optimizer)).state_dict().keys() == optimizer.state_dict().keys()


@pytest.mark.parametrize("number", [np.float64, np.float32, torch.tensor])
@pytest.mark.parametrize("before, after", [(0.0, 0.9), (0.9, 0.0)])
def test_options_that_are_no_plain_numbers(mesh, number, before, after):
    twins = Twins(mesh, "SGD", momentum=number(before))
    for _ in range(3):
        twins.step()
    for group in (*twins.optimizer.param_groups, *twins.torchs.param_groups):
        group["momentum"] = number(after)
    for _ in range(3):
        twins.step()


def test_an_option_that_is_written_into(mesh):
    twins = Twins(mesh, "SGD", momentum=torch.tensor(0.0))
    for _ in range(3):
        twins.step()
    for group in (*twins.optimizer.param_groups, *twins.torchs.param_groups):
        group["momentum"].fill_(0.9)
    for _ in range(3):
        twins.step()


def test_learning_rates_that_are_tensors_are_no_reason_to_gather_again(mesh):
    twins = Twins(mesh, lr=torch.tensor(0.1))
    for _ in range(3):
        twins.step()
    kept = twins.gathered
    for group in (*twins.optimizer.param_groups, *twins.torchs.param_groups):
        group["lr"].fill_(0.03)
    twins.step()
    assert twins.gathered is kept is not None


def test_who_gathers_in_another_way_is_asked_in_every_step(mesh):
    """Also where it takes care to look like torch's, and where one optimizer alone was changed."""
    calls = []

    class Counting(torch.optim.AdamW):
        @functools.wraps(torch.optim.AdamW._init_group)
        def _init_group(self, *args, **kwargs):
            calls.append(self)
            return super()._init_group(*args, **kwargs)

    twins = Twins(mesh)
    twins.optimizer = shardopt.keyed(Counting, twins.ours, lr=0.1, foreach=False)
    for _ in range(4):
        twins.step()
    assert len(calls) == 4
    twins = Twins(mesh)
    inner = twins.optimizer._local.optimizer
    torchs = inner._init_group
    inner._init_group = changed = lambda *args: (calls.append(inner), torchs(*args))[1]
    for _ in range(4):
        twins.step()
    assert len(calls) == 8
    assert inner._init_group is changed


def test_local_tensors_that_were_replaced_before_a_step_that_is_refused(mesh):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    ours, other = twins.ours["w1"], twins.ours["w2"]
    ours._local_tensor = ours._local_tensor.clone()
    bad = twins.gradient(other, torch.ones(3, 2))
    bad._local_tensor, bad._spec = torch.ones(2, 2), other.grad._spec
    other.grad = bad
    with pytest.raises(GradientError):
        twins.optimizer.step()
    other.grad = None
    for _ in range(3):
        twins.step()


def test_state_that_is_held_while_local_tensors_are_replaced(mesh):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    ours, plain = twins.ours["w1"], twins.plain[1]
    held = twins.optimizer.state[ours], twins.torchs.state[plain]
    ours._local_tensor = ours._local_tensor.clone()
    twins.step()
    held[0]["exp_avg"] = twins.gradient(ours, torch.full((3, 2), 0.5))
    held[1]["exp_avg"] = torch.full((3, 2), 0.5)
    for _ in range(2):
        twins.step()


def test_a_local_tensor_with_a_gradient_of_its_own(mesh):
    """Which is not the parameter's: it neither is stepped with, nor gets lost."""
    twins = Twins(mesh)
    local_tensor = twins.ours["w1"]._local_tensor
    local_tensor.grad = own = torch.ones(3, 2)
    for without in ((), (1,), (), (1,)):
        twins.step(without)
    assert local_tensor.grad is own


def test_a_parameter_in_two_groups_is_stepped_twice_and_keeps_no_gradient(mesh):
    twins = Twins(mesh)
    twins.optimizer.add_param_group({"params": {"n": torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))}})
    twins.torchs.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})
    twins.optimizer.param_groups[1]["params"] = [twins.ours["w0"]]
    twins.torchs.param_groups[1]["params"] = [twins.plain[0]]
    for _ in range(3):
        twins.step()
    assert all(p._local_tensor.grad is None for p in twins.ours.values())


def test_parameters_that_change_their_group(mesh):
    twins = Twins(mesh)
    ours = torch.nn.Parameter(shard(torch.randn(6, 2), mesh, Shard(0)))
    plain = torch.nn.Parameter(ours.to_local().detach().clone())
    twins.optimizer.add_param_group({"params": {"new": ours}, "lr": 0.5})
    twins.torchs.add_param_group({"params": [plain], "lr": 0.5})
    twins.ours["new"] = ours
    twins.plain.append(plain)
    every = twins.optimizer.param_groups, twins.torchs.param_groups

    def move(groups):
        groups[1]["params"].append(groups[0]["params"].pop(1))

    def swap(groups):
        groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]

    for change in (move, swap, list.reverse, list.pop):
        for _ in range(3):
            twins.step()
        for groups in every:
            change(groups)
    for _ in range(3):
        twins.step()


def test_a_default_for_state(mesh):
    twins = Twins(mesh)
    ones = torch.ones(3, 2)
    ours = twins.gradient(twins.ours["w0"], ones.clone())
    for _ in range(2):  # before there is any, and when there is
        again = twins.gradient(twins.ours["w0"], ones.clone())
        twins.optimizer.state.setdefault(
            twins.ours["w0"], {"step": torch.tensor(5.0), "exp_avg": ours, "exp_avg_sq": again}
        )
        twins.torchs.state.setdefault(
            twins.plain[0], {"step": torch.tensor(5.0), "exp_avg": ones.clone(), "exp_avg_sq": ones.clone()}
        )
        twins.step()


def test_nothing_is_kept_of_gradients_and_of_state_that_was_taken_away(mesh):
    twins = Twins(mesh)
    for _ in range(3):
        twins.step()
    inner = twins.optimizer._local.optimizer
    held = [weakref.ref(p.grad._local_tensor) for p in twins.ours.values()]
    held += [weakref.ref(state["exp_avg"]) for state in inner.state.values()]
    gc.collect()
    gc.disable()
    try:
        for p in twins.ours.values():
            p.grad = None
        twins.optimizer.state.clear()
        assert all(each() is None for each in held)
    finally:
        gc.enable()
