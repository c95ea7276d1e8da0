"""Stages of a pipeline: ranks with other parameters, saved and loaded strictly, also by another number of ranks."""

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt import checkpoint
from tests.harness import RanksFailed, run_ranks

RANKS_STAY = True

NAMES = ("embed.weight", "first.weight", "first.bias", "second.weight", "second.bias", "head.weight")
STAGES = (NAMES[:3], NAMES[3:])
GROUPS = [
    {"match": r"^embed", "lr": 0.5},
    {"match": r"bias$", "weight_decay": 0.0, "lr": 0.25},
    {"match": r"^head", "algorithm": "sgd", "momentum": 0.9, "dampening": 0.5, "lr": 0.125},
]


def app_of(names):
    params = {name: torch.nn.Parameter(torch.arange(3.0) + len(name)) for name in names}
    return {"model": dict(params), "optimizer": shardopt.keyed("adamw", params, lr=0.0625, groups=GROUPS)}


def train(app, steps):
    for step in steps:
        for name, parameter in app["model"].items():
            parameter.grad = torch.arange(3.0) * len(name) - step
        app["optimizer"].step()


def state_of(app):
    saved = app["optimizer"].state_dict()
    options = {name: repr(group["lr"]) for group in saved["param_groups"] for name in group["params"]}
    return {name: (repr(app["model"][name]), repr(saved["state"][name]), options[name]) for name in app["model"]}


def names_here():
    return STAGES[dist.get_rank()] if dist.get_world_size() == 2 else NAMES


def save(path, steps):
    app = app_of(names_here())
    train(app, range(steps))
    for group in app["optimizer"].param_groups:
        group["lr"] *= 0.5
    checkpoint.save(path, app)
    train(app, range(steps, steps + 2))
    return state_of(app)


def resume(path, steps):
    app = app_of(names_here())
    checkpoint.load(path, app, init_state=True)
    train(app, range(steps, steps + 2))
    return state_of(app)


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2), (2, 2)])
def test_stages_resume_as_any_others(tmp_path, saving, loading):
    trained = run_ranks(saving, save, str(tmp_path / "c"), 3)
    resumed = run_ranks(loading, resume, str(tmp_path / "c"), 3)
    merged = [{name: each for stage in stages for name, each in stage.items()} for stages in (trained, resumed)]
    assert merged[0].keys() == set(NAMES)
    assert merged[0] == merged[1]


def save_with_a_mistaken_pattern(path):
    params = {name: torch.nn.Parameter(torch.ones(3)) for name in names_here()}
    groups = [{"match": "embed", "lr": 0.5}, {"match": "nrom", "lr": 0.5}]
    checkpoint.save(path, {"optimizer": shardopt.keyed("sgd", params, groups=groups)})


def test_a_pattern_that_matches_on_no_rank_is_refused_by_a_save(tmp_path):
    with pytest.raises(RanksFailed, match=r"optimizer: groups\[1\]: found the pattern .nrom.") as caught:
        run_ranks(2, save_with_a_mistaken_pattern, str(tmp_path / "c"))
    assert "groups[0]" not in str(caught.value)


def app_with(value, has):
    """A module, a dict, a list and a tuple, all of them empty on ranks that have nothing."""
    model = torch.nn.Linear(2, 2, bias=False) if has else torch.nn.ReLU()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    row = torch.full((2,), value)
    parts = {"rows": row.clone()}, [row.clone()], (row.clone(),)
    containers = parts if has else ({}, [], ())
    return {
        "model": model,
        "always empty": {},
        "step": 1,
        **dict(zip(("dict", "list", "tuple"), containers, strict=True)),
    }


def save_and_load_with_nothing(path, before, after):
    for number in range(2):  # the second save goes by the plan of the first
        checkpoint.save(f"{path}/{number}", app_with(3.0, dist.get_rank() in before))
        app = app_with(0.0, dist.get_rank() in after)
        checkpoint.load(f"{path}/{number}", app)
        assert repr(app) == repr(app_with(3.0, dist.get_rank() in after))
        assert all((parameter == 3).all() for parameter in app["model"].parameters())


@pytest.mark.parametrize(("before", "after"), [([0], [1]), ([1], [0, 1]), ([0, 1], [1])])
def test_ranks_that_have_nothing_in_a_module_or_a_container(tmp_path, before, after):
    run_ranks(2, save_and_load_with_nothing, str(tmp_path), before, after)
    with checkpoint.open(tmp_path / "1") as reader:
        assert reader.keys() == ["always empty", "dict.rows", "list.0", "model.weight", "step", "tuple.0"]


LAYERS = {1: [(0, 1, 2, 3, 4)], 2: [(0, 1, 2), (3, 4)], 3: [(0, 1), (2,), (3, 4)]}


class Net(torch.nn.Module):
    """Some layers of five, each with the weights that it has in the whole."""

    def __init__(self, layers):
        super().__init__()
        for number in layers:
            torch.manual_seed(number)
            self.add_module(f"layer{number}", torch.nn.Linear(3, 3))


class Training:
    """Even layers are updated in backward, odd ones by a scaled step; their average, a schedule and values go along."""

    def __init__(self):
        self.model = Net(LAYERS[dist.get_world_size()][dist.get_rank()])
        even, odd = ({n: p for n, p in self.model.named_parameters() if int(n[5]) % 2 == i} for i in (0, 1))
        groups = [{"match": "bias", "lr": 0.25}]
        self.within = shardopt.in_backward(even, "sgd", lr=0.125, momentum=0.5, groups=groups)
        self.keyed = shardopt.keyed("adamw", odd, lr=0.0625, groups=groups)
        self.clipped = shardopt.GradientClippingOptimizer(self.keyed, "value", max_gradient=0.5)
        self.scaler = shardopt.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.schedule = shardopt.optim.ReduceLROnPlateau(self.clipped, factor=0.5, patience=0)
        self.average = shardopt.EMA(self.model, decay=0.75)
        self.app = {
            "model": self.model,
            "within": self.within,
            "optimizer": self.clipped,
            "scaler": self.scaler,
            "schedule": self.schedule,
            "average": self.average,
            "mine": checkpoint.PerRank(dist.get_rank(), "keep"),
            "step": 0,
        }

    def train(self, steps):
        for _ in range(steps):
            step = self.app["step"] = self.app["step"] + 1
            x = torch.arange(3.0) / step
            losses = [torch.zeros((), requires_grad=True), torch.zeros((), requires_grad=True)]
            for name, layer in self.model.named_children():
                losses[int(name[5]) % 2] = losses[int(name[5]) % 2] + layer(x).square().sum()
            losses[0].backward()
            self.within.step()
            self.scaler.scale(losses[1]).backward()
            self.scaler.step(self.clipped)
            self.scaler.update()
            self.clipped.zero_grad()
            self.schedule.step(1.0)
            self.average.update()
        return self

    def values(self):
        by_name = {f"model.{name}": repr(value) for name, value in self.model.state_dict().items()}
        for part in ("within", "optimizer", "average"):
            saved = self.app[part].state_dict()
            by_name |= {f"{part}.{name}": repr(entries) for name, entries in saved["state"].items() if entries}
            by_name |= {f"{part}.rates": repr([group["lr"] for group in saved.get("param_groups", ())])}
        return by_name | {"scaler": repr(self.scaler.state_dict()), "schedule": repr(self.schedule.state_dict())}


def save_training(path):
    training = Training().train(3)
    checkpoint.async_save(path, training.app, stage="lazy").result()
    return training.train(3).values()


def resume_training(path):
    training = Training()
    checkpoint.load(path, training.app, init_state=True)
    return training.train(3).values()


def together(by_rank):
    whole = {}
    for values in by_rank:
        for name, value in values.items():
            assert whole.setdefault(name, value) == value, name
    return whole


@pytest.mark.parametrize(("saving", "loading"), [(3, 1), (2, 3), (1, 2)])
def test_all_that_goes_beside_an_optimizer_resumes(tmp_path, saving, loading):
    trained = together(run_ranks(saving, save_training, str(tmp_path / "c")))
    assert together(run_ranks(loading, resume_training, str(tmp_path / "c"))) == trained
    assert checkpoint.verify(tmp_path / "c").ok
    checkpoint.reshard(tmp_path / "c", tmp_path / "again", world_size=2, drop_per_rank=True)
    assert checkpoint.verify(tmp_path / "again").ok
