"""Runs whose parameters are unused, used later or frozen later: saved and resumed midway, they continue alike."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks

RANKS_STAY = True

SHAPES = {
    "trunk": (6, 4),
    "unused": (6, 4),
    "late": (5, 4),
    "frozen": (4, 6),
    "from_the_start": (4, 4),
    "plain": (4, 4),
}
ALGORITHMS = {
    "adamw": {"lr": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "adagrad": {"lr": 0.1},
    "lbfgs": {"lr": 0.5, "max_iter": 2, "history_size": 3},
    "muon": {"lr": 0.1},
    "adafactor": {"lr": 0.1},
    "rprop": {"lr": 0.1},
    "rowwiseadagrad": {"lr": 0.1},
}
USUAL = ["adamw", "sgd", "adagrad", "lbfgs"]


def schedule(step):
    """The parameters that have a gradient in a step, and those that are frozen."""
    active = {"trunk", "plain"} | ({"late"} if step >= 4 else set()) | ({"frozen"} if step < 3 else set())
    return active, {"from_the_start"} | ({"frozen"} if step >= 3 else set())


class Run:
    """A job's parameters and its optimizer, made anew as by a process that has just started."""

    def __init__(self, algorithm, how, nested="", init=False, at=0):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        numbers = torch.Generator().manual_seed(5)
        self.params, self.targets = {}, {}
        for name, shape in SHAPES.items():
            full, self.targets[name] = torch.randn(2, *shape, generator=numbers)
            if name != "plain":
                full = distribute_tensor(full, mesh, [how[name]], src_data_rank=None)
            self.params[name] = torch.nn.Parameter(full)
            self.params[name].requires_grad_(name not in schedule(at)[1])
        self.optimizer = built(algorithm, self.params, nested)
        if init:
            self.optimizer.init_state()
        self.app = {"params": self.params, "optimizer": self.optimizer, "step": at}

    def go(self, schedule, steps):
        inner = self.optimizer
        while self.app["step"] < steps:
            active, frozen = schedule(self.app["step"])
            for name, parameter in self.params.items():
                parameter.requires_grad_(name not in frozen)
                parameter.grad = None

            def closure(active=active):
                loss = 0.0
                for name in sorted(active):
                    parameter = self.params[name]
                    target = self.targets[name]
                    if name != "plain":
                        target = distribute_tensor(
                            target, parameter.device_mesh, parameter.placements, src_data_rank=None
                        )
                    difference = parameter.detach() - target
                    parameter.grad = difference.clone()
                    full = difference if name == "plain" else difference.full_tensor()
                    loss += float(full.double().square().sum()) / 2
                return loss

            inner.step(closure)
            self.app["step"] += 1

    def bits(self):
        """Everything that training resumes from, by key; state that is as it was made counts for none."""
        optimizer = self.optimizer
        state = optimizer.state_dict()["state"]
        dropped = optimizer.unstepped_state(state)
        tensors = {
            f"{name}.{key}": value for name, own in state.items() if name not in dropped for key, value in own.items()
        }
        tensors |= self.params
        return {key: local(value) for key, value in tensors.items()}


def local(value):
    tensor = value.to_local() if hasattr(value, "to_local") else value
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else repr(value)


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def built(algorithm, params, nested):
    if nested == "combined":
        names = sorted(params)
        parts = [
            (key, shardopt.keyed(algorithm, {name: params[name] for name in those}, **ALGORITHMS[algorithm]))
            for key, those in (("one", names[:3]), ("two.deep", names[3:]))
        ]
        return shardopt.optim.CombinedOptimizer(parts)
    optimizer = shardopt.keyed(algorithm, params, **ALGORITHMS[algorithm])
    if nested == "wrapped":
        stages = [shardopt.WarmupStage(shardopt.WarmupPolicy.LINEAR, max_iters=3, value=0.5)]
        return shardopt.WarmupOptimizer(shardopt.GradientClippingOptimizer(optimizer), stages, lr=0.1)
    return optimizer


def placed(choice):
    return {name: choice(name) for name in SHAPES}


ROWS = placed(lambda name: Shard(0))
OTHERWISE = placed(lambda name: Replicate() if name == "late" else Shard(1))


def series(root, algorithm, nested, init, cuts, steps, schedule=schedule, how=ROWS):
    """Trains `steps` steps at one go, and again with a new process at each of the cuts; whether it is the same."""
    whole = Run(algorithm, how, nested)
    whole.go(schedule, steps)
    with checkpoint.Manager(root) as manager:
        run = Run(algorithm, how, nested)
        for cut, early in zip(cuts, init, strict=True):
            run.go(schedule, cut)
            manager.save(cut, run.app)
            run = Run(algorithm, how, nested, init=early, at=cut)
            assert manager.restore(run.app) == cut
        run.go(schedule, steps)
    one, other = whole.bits(), run.bits()
    assert one.keys() == other.keys(), (algorithm, nested, sorted(one.keys() ^ other.keys()))
    return [key for key in one if not same(one[key], other[key])]


def usual(root, algorithms, nestings, inits):
    return {
        f"{algorithm} {nested} {init}": different
        for algorithm, nested, init in itertools.product(algorithms, nestings, inits)
        if not (algorithm == "lbfgs" and nested)  # it evaluates the model itself
        and (different := series(f"{root}/{algorithm}-{nested}-{init}", algorithm, nested, init, (1, 2, 5), 7))
    }


def every(root):
    alone = usual(root, USUAL, [""], [(False, True, False)])
    return alone | usual(root, ["adamw", "sgd"], ["combined", "wrapped"], [(True, False, True)])


def test_a_run_that_was_resumed_three_times_is_one_that_was_not(tmp_path):
    assert run_ranks(2, every, str(tmp_path)) == [{}] * 2


def drawn(seed):
    """Any schedule of gradients and freezing."""
    random_of = random.Random(seed)
    steps = [
        ({name for name in SHAPES if random_of.random() < 0.5}, {name for name in SHAPES if random_of.random() < 0.2})
        for _ in range(10)
    ]
    return lambda step: (steps[step][0] - steps[step][1] | {"trunk"}, steps[step][1] - {"trunk"})


def drawn_series(root, algorithm, nested, seeds):
    actual = {}
    for seed in seeds:
        random_of = random.Random(f"{algorithm} {nested} {seed}")
        cuts = sorted(random_of.sample(range(10), 4))
        init = [random_of.random() < 0.5 for _ in cuts]
        how = random_of.choice([ROWS, OTHERWISE])
        # Muon takes whole matrices, row-wise moments are of rows.
        actual[seed] = series(f"{root}/{seed}", algorithm, nested, init, cuts, 10, drawn(seed), how)
    return {seed: different for seed, different in actual.items() if different}


@pytest.mark.exhaustive
@pytest.mark.parametrize("nested", ["", "combined", "wrapped"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_schedule_of_gradients(tmp_path, algorithm, nested):
    if algorithm == "lbfgs" and nested:
        return
    assert run_ranks(2, drawn_series, str(tmp_path), algorithm, nested, range(25), deadline_seconds=600) == [{}] * 2


def load_where_one_rank_has_stepped(path):
    run = Run("sgd", ROWS)
    checkpoint.save(path, {"optimizer": run.optimizer})
    run.optimizer.init_state()
    if dist.get_rank() == 1:
        run.optimizer.state[run.params["late"]]["momentum_buffer"].to_local().fill_(1.0)
    before = sorted(run.optimizer.state_dict()["state"])
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(path, {"optimizer": run.optimizer}, init_state=True)
    assert sorted(run.optimizer.state_dict()["state"]) == before
    buffer = run.optimizer.state[run.params["late"]]["momentum_buffer"].to_local()
    return buffer.unique().tolist(), [problem.key for problem in caught.value.problems]


def test_what_one_rank_has_stepped_no_rank_drops(tmp_path):
    """Nor loses, as the load is refused for it; what was dropped for the load is made again."""
    outcomes = run_ranks(2, load_where_one_rank_has_stepped, str(tmp_path / "c"))
    assert outcomes == [([0.0], ["optimizer.state"]), ([1.0], ["optimizer.state"])]
