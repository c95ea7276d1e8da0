"""Groups of parameters whose members are on other ranks: their options, their patterns, and what ranks agree on."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import shardopt
from shardopt import GradientClippingOptimizer, checkpoint
from shardopt.errors import ShardoptError, StateError
from tests.harness import run_ranks

RANKS_STAY = True

NAMES = ("embed.weight", "first.weight", "second.weight", "head.weight")
STAGES = {1: (NAMES,), 3: (NAMES[:2], NAMES[2:], ())}  # the last of three ranks has nothing
ONE = [{"match": "^embed", "lr": 0.5}, {"match": "^head", "lr": 0.25}]
SEVERAL = [ONE[0], {**ONE[1], "algorithm": "sgd", "momentum": 0.5}]
KINDS = {
    "keyed": lambda params, groups: shardopt.keyed("adamw", params, lr=0.125, groups=groups or ONE),
    "several algorithms": lambda params, groups: shardopt.keyed("adamw", params, lr=0.125, groups=groups or SEVERAL),
    "wrapped": lambda params, groups: GradientClippingOptimizer(
        shardopt.keyed("adamw", params, lr=0.125, groups=groups or ONE), "norm", 1.0
    ),
    "copied": lambda params, groups: copy.deepcopy(KINDS["several algorithms"](params, groups)),
    "pickled": lambda params, groups: pickle.loads(pickle.dumps(KINDS["several algorithms"](params, groups))),
}


def made(kind, groups=None):
    names = STAGES[dist.get_world_size()][dist.get_rank()]
    params = {name: torch.nn.Parameter(torch.ones(2) * len(name)) for name in names}
    return KINDS[kind](params, groups)


def train(optimizer, schedule, steps):
    for _ in range(steps):
        for name, parameter in optimizer.params.items():
            parameter.grad = torch.ones(2) * len(name)
        optimizer.step()
        schedule.step()


def rates(optimizer):
    return [(group["lr"], group.get("initial_lr")) for group in optimizer.param_groups]


def save(path, kinds):
    """Returns the rates of all groups here, which a schedule has changed."""
    saved = {}
    for kind in kinds:
        optimizer = made(kind)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        train(optimizer, schedule, 3)
        checkpoint.save(f"{path}/{kind}", {"optimizer": optimizer})
        saved[kind] = rates(optimizer)
    return saved


def load(path, kinds, strict=True):
    loaded = {}
    for kind in kinds:
        optimizer = made(kind)
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        checkpoint.load(f"{path}/{kind}", {"optimizer": optimizer}, init_state=True, strict=strict)
        loaded[kind] = rates(optimizer)
        train(optimizer, schedule, 1)
        optimizer.check_agreement()
    return loaded


@pytest.mark.parametrize("saving", [1, 3])
def test_a_group_without_parameters_resumes_as_on_other_ranks(tmp_path, saving):
    """On a stage that has none of it, and on a rank that has no parameters: the schedule itself is not saved."""
    saved = run_ranks(saving, save, str(tmp_path), [*KINDS])
    assert all(of_rank == saved[0] for of_rank in saved)
    assert saved[0]["keyed"] == [(0.125, 0.5), (0.0625, 0.25), (0.03125, 0.125)]
    for loading in (1, 3):
        for rank, loaded in enumerate(run_ranks(loading, load, str(tmp_path), [*KINDS])):
            assert loaded == saved[0], (loading, rank)


def save_more(path, lr):
    """A job that has more parameters, in groups of other rates."""
    optimizer = shardopt.keyed("adamw", {name: torch.nn.Parameter(torch.ones(2)) for name in NAMES}, lr=0.03125)
    optimizer.add_param_group({"params": {"head.bias": torch.nn.Parameter(torch.ones(2))}, "lr": lr})
    checkpoint.save(path, {"optimizer": optimizer})


def test_a_load_that_is_not_strict(tmp_path):
    """Options of parameters that are left out count where they agree with those of the others."""
    for lr, rate in ((0.03125, 0.03125), (7.0, 0.25)):
        run_ranks(1, save_more, str(tmp_path / str(lr) / "keyed"), lr)
        first, second, third = run_ranks(3, load, str(tmp_path / str(lr)), ["keyed"], strict=False)
        assert second["keyed"] == [(0.03125, 0.5), (0.03125, 0.25), (0.03125, 0.125)]
        assert first["keyed"] == third["keyed"] == [(0.03125, 0.5), (rate, 0.25), (0.03125, 0.125)]


def fewer_groups(path, declared):
    """Two stages, of which the second has a group of its own for what it has; the first does not know of that."""
    rank = dist.get_rank()
    params = {name: torch.nn.Parameter(torch.ones(2)) for name in (NAMES[:2], NAMES[2:])[rank]}
    groups = [{"match": "^head", "lr": 0.25}] if rank or declared else None

    def made(lr):
        return shardopt.keyed("adamw", params, lr=lr, groups=groups)

    saved, loaded = made(0.5), made(0.125)
    for parameter in params.values():
        parameter.grad = torch.ones(2)
    saved.step()
    checkpoint.save(path, {"optimizer": saved})
    checkpoint.load(path, {"optimizer": loaded}, init_state=True)
    params[min(params)].requires_grad_(False)
    checkpoint.async_save(f"{path}-frozen", {"optimizer": saved}).result()
    frozen = checkpoint.load(f"{path}-frozen", {"optimizer": loaded}).frozen
    assert {*frozen} == {"optimizer.param_groups.embed.weight", "optimizer.param_groups.head.weight"}  # of both
    return {name: group["lr"] for group in loaded.state_dict()["param_groups"] for name in group["params"]}


@pytest.mark.parametrize("declared", [False, True])
def test_a_stage_that_declares_fewer_groups_than_another_is_loaded_by_its_own_members(tmp_path, declared):
    first, second = run_ranks(2, fewer_groups, str(tmp_path / "saved"), declared)
    assert first == dict.fromkeys(NAMES[:2], 0.5)
    assert second == {"second.weight": 0.5, "head.weight": 0.25}


def refuse_mistaken_patterns(path):
    """Returns what each call says on this rank; nothing is saved, and nothing loaded."""
    said = {}
    for kind in KINDS:
        checkpoint.save(f"{path}/{kind}", {"optimizer": made(kind)})
        optimizer = made(kind, [*(SEVERAL if kind == "several algorithms" else ONE), {"match": "nrom", "lr": 1.0}])
        before = repr(optimizer.state_dict())
        app = {"optimizer": optimizer}
        for call, do in {
            "save": lambda app=app, kind=kind: checkpoint.save(f"{path}/{kind}-not", app),
            "async_save": lambda app=app, kind=kind: checkpoint.async_save(f"{path}/{kind}-not", app).result(),
            "load": lambda app=app, kind=kind: checkpoint.load(f"{path}/{kind}", app),
            "load with init_state": lambda a=app, kind=kind: checkpoint.load(f"{path}/{kind}", a, init_state=True),
            "check_agreement": optimizer.check_agreement,
        }.items():
            with pytest.raises(ShardoptError) as caught:
                do()
            said[kind, call] = str(caught.value)
            assert isinstance(caught.value, StateError), (kind, call)
        assert repr(optimizer.state_dict()) == before
    return said


def test_a_pattern_that_matches_on_no_rank_is_refused_everywhere(tmp_path):
    said, *others = run_ranks(3, refuse_mistaken_patterns, str(tmp_path))
    for (kind, call), message in said.items():
        assert "groups[2]: found the pattern 'nrom'" in message, (kind, call)
        assert "groups[0]" not in message and "groups[1]" not in message, (kind, call)
    for other in others:
        assert other == said
    assert not [each for each in tmp_path.iterdir() if each.name.endswith("-not") and (each / "manifest.json").exists()]


def drift():
    """Stages whose ranks are replicas, and an option that one of them has otherwise."""
    stage = dist.get_rank() // 2
    params = {f"layers.{stage}.weight": torch.nn.Parameter(torch.ones(2)), "shared": torch.nn.Parameter(torch.ones(2))}
    optimizer = shardopt.keyed("adamw", params, groups=[{"match": r"layers\.0"}, {"match": r"layers\.1"}])
    optimizer.check_agreement()
    for group in optimizer.param_groups:
        group["lr"] = 0.5 if dist.get_rank() == 3 else group["lr"]
    with pytest.raises(StateError) as caught:
        optimizer.check_agreement()
    return str(caught.value)


def test_ranks_that_share_parameters_find_what_differs():
    said = run_ranks(4, drift)
    assert len(set(said)) == 1
    assert "lr: found 0.001 on rank 2; 0.5 on rank 3" in said[0] or "0.001 on ranks 0, 1, 2; 0.5 on rank 3" in said[0]
