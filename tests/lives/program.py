"""The program of a life, as a user writes it: a model, an optimizer, a schedule, averages, and a Manager."""

from __future__ import annotations

import random

import torch
from torch.distributed.tensor import Replicate, Shard

import shardopt
from shardopt.sharding.view import view_of
from tests.lives.plain import DECAY, Plain, gradient
from tests.lives.script import ALGORITHMS, GROUPS, SCHEDULES, SHAPES, Script, value
from tests.sub_meshes import give_gradient, part, placed

HOW = ("params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "maximize", "amsgrad")
TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}  # a vector's tail depends on where a shard ends


class Net(torch.nn.Module):
    """Parameters under dotted names, each in a module of its own."""

    def __init__(self, named: dict[str, torch.nn.Parameter]):
        super().__init__()
        for name, param in named.items():
            at: torch.nn.Module = self
            *path, leaf = name.split(".")
            for each in path:
                if not hasattr(at, each):
                    at.add_module(each, torch.nn.Module())
                at = getattr(at, each)
            at.register_parameter(leaf, param)


class Program:
    """One process of the job, from its start to its end.

    Args:
        late: whether the schedule is left out of the app, and made again after the restore (`make_schedule`).
    """

    def __init__(self, script: Script, meshes: dict[tuple[int, ...], object], late: bool = False):
        self.script = script
        draw = random.Random(script.layout)
        where = {name: self._where(draw) for name in sorted(SHAPES)}
        self.params = {name: placed(value(name, 0), where[name], meshes) for name in script.params}
        for name in script.frozen:
            self.params[name].requires_grad_(False)
        self.model = Net({script.name(name): param for name, param in self.params.items()})
        self.optimizer = self._optimizer()
        self.app: dict[str, object] = {"model": self.model, "optimizer": self.optimizer, "step": 0, "records": {}}
        self.schedule = None
        self.make_schedule()
        if late:
            self.app.pop("schedule", None)
        self.ema = None
        if script.averages:
            self.ema = self.app["ema"] = shardopt.EMA(self.model, decay=DECAY)

    def make_schedule(self, last_epoch: int = -1) -> None:
        make = SCHEDULES[self.script.schedule]
        if make is not None:
            self.schedule = self.app["schedule"] = make(self.optimizer, last_epoch)

    def _where(self, draw: random.Random) -> object:
        """A placement over all ranks of this program."""
        ranks = list(range(self.script.ranks))
        return draw.choice([None, (ranks, Shard(0)), (ranks, Shard(0)), (ranks, Replicate())])

    def _optimizer(self) -> torch.optim.Optimizer:
        script = self.script
        algorithm, options = ALGORITHMS[script.algorithm]
        if script.optimizer == "torch":
            groups = [{"params": [self.params[name] for name in names], **own} for names, own in script.groups_of()]
            return algorithm(groups, foreach=False, **options)
        rules = []
        for names, own in GROUPS[script.groups]:
            if set(own) <= options.keys():
                escaped = "|".join(script.name(name).replace(".", r"\.") for name in names if name in script.params)
                rules.append({"match": f"^({escaped})$", **own})
        return shardopt.keyed(script.algorithm, self.model.named_parameters(), groups=rules, **options)

    def step(self) -> None:
        self.app["step"] += 1
        for name, param in self.params.items():
            give_gradient(param, gradient(name, self.app["step"]) if param.requires_grad else None)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        if self.ema is not None:
            self.ema.update()

    def check(self, plain: Plain) -> None:
        """That this rank has what the plain side has: weights, state, options, rates, averages, records."""
        assert self.app["step"] == plain.step_number, (self.app["step"], plain.step_number)
        assert self.params.keys() == plain.params.keys()
        state = self._state()
        for name, param in self.params.items():
            same(param, plain.params[name], name)
            mine, theirs = state[name], plain.optimizer.state.get(plain.params[name], {})
            present = {entry for entry, each in theirs.items() if each is not None}
            assert {entry for entry, each in mine.items() if each is not None} == present, (name, mine, theirs)
            for entry in present:
                if isinstance(theirs[entry], torch.Tensor):
                    same(mine[entry], theirs[entry], f"{name}.{entry}")
                else:
                    assert mine[entry] == theirs[entry], (name, entry, mine[entry], theirs[entry])
            group = next(g for g in self.optimizer.param_groups if any(param is each for each in g["params"]))
            options = {key: each for key, each in plain.options(name).items() if key not in HOW}
            differing = {key: (group.get(key), each) for key, each in options.items() if group.get(key) != each}
            assert not differing, f"options of {name}: {differing}"
        if self.schedule is not None:
            assert self.schedule.last_epoch == plain.schedule.last_epoch
            assert self.schedule.get_last_lr() == plain.schedule.get_last_lr()
        if self.ema is not None and plain.averaged:
            averages = self.ema.state_dict()["state"]
            for name, average in plain.averages.items():
                (mine,) = (each for each in averages[self.script.name(name)].values() if each.numel())
                same(mine, average, f"average of {name}")
        assert _plain(self.app["records"]) == _plain(plain.records), (self.app["records"], plain.records)

    def _state(self) -> dict[str, dict[str, object]]:
        """Returns the state of each parameter that has had a step, by its canonical name."""
        if self.script.optimizer == "torch":
            return {name: dict(self.optimizer.state.get(param, {})) for name, param in self.params.items()}
        state = self.optimizer.state_dict()["state"]
        untouched = self.optimizer.unstepped_state(state)
        by_name = {name: self.script.name(name) for name in self.params}
        return {name: {} if seen_as in untouched else state.get(seen_as, {}) for name, seen_as in by_name.items()}


def same(mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    whole = whole.detach()
    view = view_of(mine, what)
    assert (view.shape, view.dtype) == (tuple(whole.shape), whole.dtype), (what, view.shape, view.dtype, whole.dtype)
    for piece in view.pieces:
        torch.testing.assert_close(
            piece.tensor.detach(), part(whole, piece), **TOLERANCE, msg=lambda text: f"{what}: {text}"
        )


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return value.tolist() if isinstance(value, torch.Tensor) else value
