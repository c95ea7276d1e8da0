"""What does not fit in jobs of stages and shards: one error on all ranks, by name, and nothing changed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError, ShardoptError, StateError
from shardopt.sharding.view import view_of
from tests.harness import run_ranks
from tests.support.fake_rank import shard

RANKS_STAY = True

ONE_GROUP = [{"match": r"^layers", "lr": 0.5}]
TIED = {"head.weight": "embed.weight"}


def app_of(layers=4, width=3, groups=ONE_GROUP, tied=TIED, mesh=None):
    """Two layers a stage, each cut over the two ranks of it; the embedding on the first, the tied head on the last."""
    stage = dist.get_rank() // 2
    names = [f"layers.{i}.weight" for i in range(layers) if i * 2 // 4 == stage]
    names += [["embed.weight"], ["head.weight"]][stage]
    row = mesh["shard"]
    model = {
        name: torch.nn.Parameter(
            shard(torch.arange(4.0 * width).view(4, width) + len(TIED.get(name, name)), row, Shard(0))
        )
        for name in names
    }
    optimizer = shardopt.keyed("adamw", model, groups=groups, tied=tied)
    return {"model": model, "optimizer": optimizer}


def stepped(app):
    for parameter in app["model"].values():
        parameter.grad = parameter.detach().clone()
    app["optimizer"].step()
    return app


def bits(app):
    """All that an app has on this rank, to the bit."""
    saved = app["optimizer"].state_dict()
    tensors = {**app["model"], **{(n, e): value for n, each in saved["state"].items() for e, value in each.items()}}
    pieces = {key: [(str(p.box), p.tensor.tolist()) for p in view_of(t).pieces] for key, t in tensors.items()}
    return repr([pieces, saved["param_groups"]])


MISFITS = {
    "a layer that was not saved": ({"layers": 3}, {}),
    "a layer without a place": ({}, {"layers": 3}),
    "another width": ({"width": 2}, {}),
    "options of members on one stage": ({"groups": [{"match": r"layers\.[02]", "lr": 0.25}]}, {}),
    "an algorithm of one stage": ({"groups": [{"match": r"layers\.[23]", "algorithm": "adam"}]}, {}),
}
FINDINGS = {
    "a layer that was not saved": [
        "model.layers.3.weight: found nothing in the checkpoint (on ranks 2, 3)",
        "optimizer.param_groups.layers.3.weight",
        "optimizer.state.layers.3.weight",
    ],
    "a layer without a place": ["model.layers.3.weight: found", "optimizer.state.layers.3.weight.exp_avg:"],
    "another width": [f"model.layers.{i}.weight: found a tensor of float32 [4, 2]" for i in range(4)],
    "options of members on one stage": [
        "param_groups.layers.0.weight.lr: found 0.25 of layers.0.weight; 0.001 of layers.1.weight (on ranks 0, 1)",
        "param_groups.layers.2.weight.lr: found 0.25 of layers.2.weight; 0.001 of layers.3.weight (on ranks 2, 3)",
    ],
    "an algorithm of one stage": [
        "param_groups.layers.2.weight.algorithm: found Adam, by which it was saved (on ranks 2, 3); required"
    ],
}


def load_misfits(path):
    """Returns the error of each on this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    said = {}
    for number, (name, (of_save, of_load)) in enumerate(MISFITS.items()):
        checkpoint.save(f"{path}/{number}", stepped(app_of(**of_save, mesh=mesh)), tied=TIED)
        app = stepped(stepped(app_of(**of_load, mesh=mesh)))
        before = bits(app)
        for init_state in (False, True):
            with pytest.raises(MismatchError) as caught:
                checkpoint.load(f"{path}/{number}", app, init_state=init_state, tied=TIED)
            assert bits(app) == before, name
            said[name, init_state] = str(caught.value)
        stepped(app)  # it was not torn
    return said


def test_what_does_not_fit_is_one_error_on_all_ranks(tmp_path):
    by_rank = run_ranks(4, load_misfits, str(tmp_path))
    for (name, init_state), message in by_rank[0].items():
        assert all(of_rank[name, init_state] == message for of_rank in by_rank), (name, init_state)
        for finding in FINDINGS[name]:
            assert message.count(finding) == 1, (name, init_state, message)


def load_options_of_stages(path):
    """Saves the first stage with a rate of its own; returns the rate here once that is loaded into one group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    groups = [{"match": r"layers\.[01]", "lr": 0.25}]
    checkpoint.save(f"{path}/c", stepped(app_of(groups=groups, mesh=mesh)), tied=TIED)
    app = app_of(mesh=mesh)
    checkpoint.load(f"{path}/c", app, init_state=True, tied=TIED)
    return app["optimizer"].param_groups[0]["lr"]


def test_options_that_all_members_on_a_rank_have_are_loaded(tmp_path):
    """Members on other stages have theirs, there."""
    assert run_ranks(4, load_options_of_stages, str(tmp_path)) == [0.25, 0.25, 0.001, 0.001]


def save_claims(path):
    """A plain tensor that ranks of two stages have, with other values; and values, options and tensors of two kinds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    rank = dist.get_rank()
    said = {}
    for name, claimed in {
        "values": torch.full((3,), float(rank in (2, 3))),
        "values on one rank": torch.full((3,), float(rank == 3)),
        "shapes": torch.zeros(3 if rank < 2 else 4),
        "dtypes": torch.zeros(3, dtype=torch.float32 if rank != 1 else torch.float64),
        "placements": torch.zeros(4) if rank < 2 else DTensor.from_local(torch.zeros(2), mesh["shard"], [Shard(0)]),
        "plain values": rank // 2,
    }.items():
        app = {**stepped(app_of(mesh=mesh)), "claimed": claimed}
        before = bits(app)
        with pytest.raises(ShardoptError) as caught:
            checkpoint.save(f"{path}/{name}", app, tied=TIED)
        assert isinstance(caught.value, StateError), name
        assert bits(app) == before
        said[name] = str(caught.value)
    app = stepped(app_of(groups=[{"match": "layers", "lr": 0.5 if rank % 2 else 0.25}], mesh=mesh))
    with pytest.raises(StateError) as caught:
        checkpoint.save(f"{path}/options", app, tied=TIED)
    said["options"] = str(caught.value)
    return said


def test_ranks_that_claim_one_key_for_different_things(tmp_path):
    by_rank = run_ranks(4, save_claims, str(tmp_path))
    for name, message in by_rank[0].items():
        assert all(of_rank[name] == message for of_rank in by_rank), name
        key = "optimizer.param_groups.layers.0.weight" if name == "options" else "claimed"
        assert key in message, (name, message)
        assert not (tmp_path / name / "manifest.json").exists()


def declare_ties_apart(path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    rank = dist.get_rank()
    checkpoint.save(f"{path}/saved", stepped(app_of(mesh=mesh)), tied=TIED)
    said = {}
    for alone in range(4):
        app = stepped(stepped(app_of(mesh=mesh)))
        before = bits(app)
        tied = TIED if rank == alone else None
        for name, call in {
            "save": lambda app=app, tied=tied, alone=alone: checkpoint.save(f"{path}/{alone}", app, tied=tied),
            "load": lambda app=app, tied=tied: checkpoint.load(f"{path}/saved", app, tied=tied),
        }.items():
            with pytest.raises(StateError) as caught:
                call()
            said[name, alone] = str(caught.value)
            assert bits(app) == before
    return said


def test_ties_that_one_rank_alone_declares(tmp_path):
    """Also on one that has neither of the two, or only the name that stays."""
    by_rank = run_ranks(4, declare_ties_apart, str(tmp_path))
    for (name, alone), message in by_rank[0].items():
        assert all(of_rank[name, alone] == message for of_rank in by_rank), (name, alone)
        others = ", ".join(str(rank) for rank in range(4) if rank != alone)
        assert "tied['head.weight']: found" in message
        assert f"'embed.weight' on rank {alone}" in message and f"nothing on ranks {others}" in message
        assert not (tmp_path / str(alone) / "manifest.json").exists()
