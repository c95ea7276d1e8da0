"""Steps that go by what an earlier step gathered: as long as nothing but the gradients changed, and no longer.

Each test steps an optimizer on DTensors and a torch optimizer on plain copies of their local tensors, and does the same
to both on the way.
"""

import copy
import pickle
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt.errors import GradientError
from tests.fake_rank import fake_rank, shard

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
        return self.optimizer._local._grouped[0].gathered if self.optimizer._local._grouped else None

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
        assert all(leaf.grad is None for p in twins.ours.values() for leaf in twins.optimizer._local.leaves(p))
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
