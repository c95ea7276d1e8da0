"""Steps with changes in any order between them, drawn at random: ours and torch's continue alike, bit for bit."""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from shardopt.errors import GradientError
from tests.support.fake_rank import fake_rank, shard
from tests.unit.optim.test_gathered import ALGORITHMS, Twins

OPTIONS = [
    *(("lr", value) for value in (0.01, 0.2)),
    *((name, value) for name in ("maximize", "foreach") for value in (True, False)),
    *(("weight_decay", value) for value in (0.1, 0)),
    *(("momentum", value) for value in (0.5, 0.0, np.float64(0.3))),
]


@functools.cache
def algorithms():
    """Those of torch that make state again. Adagrad of torch 2.11 makes it when it is constructed alone."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad, adagrad = torch.ones(1), torch.optim.Adagrad([weight])
    adagrad.state.clear()
    try:
        adagrad.step()
    except KeyError:
        return ["Adam" if each == "Adagrad" else each for each in ALGORITHMS]
    return ALGORITHMS


class Changes(Twins):
    """Each method changes both optimizers, or what they step on, in one way."""

    def __init__(self, mesh, draw):
        options = {"momentum": draw.choice([0.0, 0.9])} if (algorithm := draw.choice(algorithms())) == "SGD" else {}
        super().__init__(mesh, algorithm, foreach=draw.choice([True, False]), **options)
        self.draw = draw

    def one(self):
        ours, plain = self.draw.choice(self.pairs)
        return ours, plain, self.optimizer.state, self.torchs.state

    def groups(self):
        return zip(self.optimizer.param_groups, self.torchs.param_groups, strict=True)

    def some_steps(self):
        for _ in range(self.draw.randint(1, 3)):
            self.step(without=[i for i in range(len(self.plain)) if self.draw.random() < 0.1])

    def local_tensors(self):
        for ours in self.draw.sample(list(self.ours.values()), 2):
            ours._local_tensor = ours._local_tensor.detach().clone()

    def own_gradient(self):
        self.one()[0]._local_tensor.grad = torch.ones(3, 2)

    def option(self):
        name, value = self.draw.choice(OPTIONS)
        for group in self.draw.choice(list(self.groups())):
            if name in group:
                group[name] = value

    def delete(self):
        ours, plain, state, theirs = self.one()
        if plain in theirs:
            del state[ours], theirs[plain]

    def clear(self):
        ours, plain, state, theirs = self.one()
        for entries in (state[ours], theirs[plain]):
            entries.clear()

    def replace(self):
        ours, plain, state, theirs = self.one()
        for name, value in list(theirs[plain].items()):
            new = torch.rand_like(value) if value.shape == plain.shape else value.clone()
            state[ours][name] = self.gradient(ours, new.clone()) if value.shape == plain.shape else new.clone()
            theirs[plain][name] = new

    def take_out_and_back(self):
        ours, plain, state, theirs = self.one()
        if theirs.get(plain):
            state[ours], theirs[plain] = state.pop(ours), theirs.pop(plain)

    def refused(self):
        ours, _, _, _ = self.one()
        before, ours.grad = ours.grad, self.gradient(ours, torch.ones(3, 2))
        ours.grad._local_tensor = torch.ones(2, 2)
        if before is not None:
            ours.grad._spec = before._spec
        with pytest.raises(GradientError):
            self.optimizer.step()
        ours.grad = before

    def new_group(self):
        ours = torch.nn.Parameter(shard(torch.rand(6, 2), self.mesh, Shard(0)))
        plain = torch.nn.Parameter(ours.to_local().detach().clone())
        name = f"new{len(self.plain)}"
        self.optimizer.add_param_group({"params": {name: ours}, "lr": 0.3})
        self.torchs.add_param_group({"params": [plain], "lr": 0.3})
        self.ours[name] = ours
        self.plain.append(plain)

    def another_group(self):
        both = list(self.groups())
        for source, target in zip(self.draw.choice(both), self.draw.choice(both), strict=True):
            if source["params"]:
                target["params"].append(source["params"].pop(0))

    def order(self):
        seed = self.draw.random()
        for group in [group for both in self.groups() for group in both]:
            random.Random(seed).shuffle(group["params"])

    def early_state(self):
        self.optimizer.init_state()

    def copied(self):
        self.ours, self.optimizer = copy.deepcopy((self.ours, self.optimizer))

    def check(self, tolerance=0.0):
        for ours, plain in self.pairs:
            assert torch.equal(ours.to_local(), plain)


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(20, 60))])
def test_changes_in_any_order(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    changes = [getattr(Changes, name) for name, made in vars(Changes).items() if callable(made) and name[0] != "_"]
    changes = [change for change in changes if change.__name__ not in ("one", "groups", "check")]
    with fake_rank(0, 2) as mesh:
        twins = Changes(mesh, draw)
        for _ in range(12):
            twins.some_steps()
            draw.choice(changes)(twins)
        twins.some_steps()
