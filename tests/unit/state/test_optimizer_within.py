"""Objects that are no optimizers of torch's, and are around one: wrappers, engines, loops."""

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError
from shardopt.state.flatten import flatten


class Delegating:
    """Keeps all that it has in the optimizer's state, as schedulefree's wrapper."""

    def __init__(self, optimizer):
        self.base = optimizer

    @property
    def param_groups(self):
        return self.base.param_groups

    def step(self):
        self.base.step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                state = self.base.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                parameter.data.lerp_(slow.lerp_(parameter.detach(), 0.5), 0.1 * (group["steps"] % 3))

    def zero_grad(self):
        self.base.zero_grad()

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)


class Counting(Delegating):
    """Has entries of its own beside the optimizer's."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.count, self.mean = 0, torch.zeros(2)

    def step(self):
        self.base.step()
        self.count += 1
        self.mean = 0.5 * self.mean + self.param_groups[0]["params"][0].detach().flatten()[:2]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(1 - 0.01 * self.count * self.mean.mean().tanh())

    def own(self):
        return {"count": self.count, "mean": self.mean}

    def take(self, state_dict):
        self.count, self.mean = state_dict["count"], state_dict["mean"]

    def state_dict(self):
        return {**self.base.state_dict(), **self.own()}

    def load_state_dict(self, state_dict):
        self.take(state_dict)
        self.base.load_state_dict({name: each for name, each in state_dict.items() if name not in self.own()})


class Nesting(Counting):
    """Has the optimizer's state as a part of its own, as mixed precision and training loops do."""

    loads = 0

    def state_dict(self):
        return {"count": self.count, "optimizer_state_dict": self.base.state_dict(), "mean": self.mean}

    def load_state_dict(self, state_dict):
        self.loads += 1
        self.take(state_dict)
        self.base.load_state_dict(state_dict["optimizer_state_dict"])


MAKERS = {
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "keyed": lambda model: shardopt.keyed("adamw", model.named_parameters(), lr=0.1),
}


def make_app(wrap, maker, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)).to(dtype)
    return {"model": model, "optimizer": wrap(MAKERS[maker](model))}


def train(app, seeds):
    for seed in seeds:
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        app["model"](inputs.to(app["model"][0].weight.dtype)).square().mean().backward()
        app["optimizer"].step()
        app["optimizer"].zero_grad()


def assert_equal_leaves(one, other):
    one, other = flatten(one).leaves, flatten(other).leaves
    assert one.keys() == other.keys()
    for key, leaf in one.items():
        assert type(leaf.value) is type(other[key].value)
        same = torch.equal if isinstance(leaf.value, torch.Tensor) else lambda left, right: left == right
        assert same(leaf.value, other[key].value), key


WRAPPED = [
    (Delegating, "sgd"),
    *((Counting, maker) for maker in ("adam", "sgd")),
    *((Nesting, maker) for maker in MAKERS),
]


@pytest.mark.parametrize(("wrap", "maker"), WRAPPED)
def test_a_new_one_goes_on_as_the_one_that_was_saved(tmp_path, wrap, maker):
    app, resumed = make_app(wrap, maker), make_app(wrap, maker, seed=1)
    train(app, range(4))
    checkpoint.save(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    assert_equal_leaves(app, resumed)
    for each in (app, resumed):
        train(each, range(4, 9))
    assert_equal_leaves(app, resumed)


def test_state_is_known_by_the_names_of_parameters_and_loaded_once(tmp_path):
    app, resumed = make_app(Nesting, "adam"), make_app(Nesting, "adam")
    train(app, range(2))
    leaves = flatten(app).leaves
    assert {"optimizer.count", "optimizer.mean", "optimizer.optimizer_state_dict.state.2.bias.exp_avg"} <= {*leaves}
    assert not any(".state.0." in key and ".weight" not in key and ".bias" not in key for key in leaves)
    checkpoint.save(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    assert resumed["optimizer"].loads == 1


def test_parameters_in_another_order_get_their_own_state(tmp_path):
    def make(reverse):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
        parameters = [*model.parameters()][:: -1 if reverse else 1]
        return {"model": model, "optimizer": Nesting(torch.optim.AdamW(parameters))}

    app, resumed = make(False), make(True)
    train(app, range(2))
    checkpoint.save(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    for i in (0, 1):
        one, other = (each["optimizer"].base.state[each["model"][i].weight] for each in (app, resumed))
        assert torch.equal(one["exp_avg"], other["exp_avg"])


def test_moments_in_more_bits_than_the_parameters_keep_them(tmp_path):
    app, resumed = (make_app(Nesting, "adam", dtype=torch.bfloat16) for _ in range(2))
    for each, more in ((app, 1e-5), (resumed, 0)):
        train(each, [0])
        for state in each["optimizer"].base.state.values():
            state.update({name: each.float() + more for name, each in state.items() if name != "step"})
    checkpoint.save(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", resumed)
    assert_equal_leaves(app, resumed)


def test_what_it_has_of_its_own_is_compared_before_anything_changes(tmp_path):
    app, resumed = make_app(Nesting, "adam"), make_app(Nesting, "adam", seed=1)
    train(app, [0])
    checkpoint.save(tmp_path / "c", app)
    resumed["optimizer"].mean = torch.zeros(3)
    before = [each.detach().clone() for each in resumed["model"].parameters()]
    with pytest.raises(MismatchError, match=r"optimizer\.mean"):
        checkpoint.load(tmp_path / "c", resumed, init_state=True)
    assert all(map(torch.equal, before, resumed["model"].parameters()))
    assert resumed["optimizer"].loads == 0 and not resumed["optimizer"].base.state


@pytest.mark.parametrize("maker", MAKERS)
def test_the_optimizer_itself_may_be_in_the_app_too(tmp_path, maker):
    app, resumed = make_app(Nesting, maker), make_app(Nesting, maker, seed=1)
    train(app, range(3))
    for each in (app, resumed):
        each["too"] = each["optimizer"].base
    checkpoint.save(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    assert_equal_leaves(app, resumed)


def test_an_object_whose_state_has_no_optimizers_is_itself():
    class Warmup:
        def __init__(self, optimizer):
            self.optimizer, self.steps = optimizer, 3

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state_dict):
            self.steps = state_dict["steps"]

    warmup = Warmup(MAKERS["adam"](torch.nn.Linear(1, 1)))
    flat = flatten({"warmup": warmup})
    assert [each.object for each in flat.targets] == [warmup]
    assert flat.leaves["warmup"].value == {"steps": 3}
