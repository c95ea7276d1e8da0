"""Parameters that are tied under two names, of which the stages of a pipeline have one each."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.errors import LayoutError, ShardoptError, StateError
from shardopt.sharding.view import local_tensors, view_of
from tests.harness import run_ranks

RANKS_STAY = True

TIED = {"head.weight": "embed.weight"}
WHOLE = torch.arange(24.0).view(6, 4) * 0.25 - 2
ONE_NAME = {name: ("first.weight", "last.weight", f"{name}.weight") for name in ("embed", "head")}
GROUPS = [{"match": "embed", "weight_decay": 0.25}, {"match": "last", "lr": 0.5}]


def parameter(whole, mesh, placement):
    if mesh is None:
        return nn.Parameter(whole.clone())
    return nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None))


def stages(where):
    """The number of this rank's stage, of two, and the mesh of the stage. Collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    half = size // 2
    stage = rank // half if size > 1 else 0
    if where == "plain":
        return stage, None
    if where == "sharded over meshes of their own":
        meshes = [DeviceMesh("cpu", list(range(at * half, (at + 1) * half))) for at in range(2)]
        return stage, meshes[stage]
    return stage, init_device_mesh("cpu", (2, half), mesh_dim_names=("stage", "shard"))["shard"]


def app_of(where, value=0.0, names=None):
    """The state of this rank: of the first stage, or of the last, or of a process that has all."""
    if dist.get_world_size() == 1:
        own, mesh = names or ("embed.weight", "first.weight", "last.weight", "head.weight"), None
    else:
        stage, mesh = stages(where)
        own = (("embed.weight", "first.weight"), ("last.weight", "head.weight"))[stage]
    placement = Replicate() if where == "copies" else Shard(0)
    model, tied = {}, None
    for name in own:
        if name in ("embed.weight", "head.weight"):
            tied = tied if tied is not None else parameter(WHOLE + value, mesh, placement)
            model[name] = tied
        else:
            model[name] = parameter(torch.ones(4) * len(name) + value, mesh, placement)
    optimizer = shardopt.keyed(
        "adamw",
        model,
        lr=0.1,
        tied=TIED,
        groups=[{"match": "embed", "weight_decay": 0.25}, {"match": "last", "lr": 0.5}],
    )
    return {"model": model, "optimizer": optimizer, "step": 0}


def give_gradients(app, step):
    for name, each in app["model"].items():
        whole = (torch.arange(each.numel() * 1.0).view(each.shape) + step + len(TIED.get(name, name))).sin()
        if isinstance(each, DTensor):
            whole = distribute_tensor(whole, each.device_mesh, each.placements, src_data_rank=None)
        each.grad = whole


def train(app, steps):
    clipped = shardopt.GradientClippingOptimizer(app["optimizer"], "norm", 0.5)
    norms = []
    for step in steps:
        give_gradients(app, step)
        clipped.step()
        norms.append(float(clipped.total_norm))
    app["step"] += len(steps)
    app["optimizer"].check_agreement()
    return norms


def boxes_of(tensor):
    pieces = view_of(tensor.detach()).pieces
    return {(piece.box.offsets, piece.box.ends): piece.tensor.detach().clone() for piece in pieces}


def state_of(app):
    """Name → box → values, of parameters and of state, under the name that stands for both."""
    state = app["optimizer"].state_dict()["state"]
    return {
        TIED.get(name, name): [
            boxes_of(tensor),
            *(boxes_of(state[TIED.get(name, name)][entry]) for entry in ("exp_avg", "exp_avg_sq")),
        ]
        for name, tensor in app["model"].items()
    }


def save(root, where):
    app = app_of(where)
    norms = train(app, range(3))
    for number, stage in enumerate((None, None, "lazy", "now")):
        url = f"{root}/{number}"
        if stage is None:
            checkpoint.save(url, app, tied=TIED)
        else:
            checkpoint.async_save(url, app, tied=TIED, stage=stage).result()
    return norms + train(app, range(3, 5)), state_of(app)


def resume(cases, where):
    """The values after more training, of each case: where it was saved, and the names that this process has."""
    results = []
    for root, names in cases:
        for number, share_reads in enumerate(("never", "always", "never", "always")):
            app = app_of(where, value=7.0, names=names)
            checkpoint.load(f"{root}/{number}", app, init_state=True, tied=TIED, share_reads=share_reads)
            assert app["step"] == 3
        results.append((train(app, range(3, 5)), state_of(app)))
    return results


def is_that_of(whole, ranks, rtol=0.0):
    """Whether the boxes of all ranks are those of a process that has everything."""
    seen = {name: 0 for name in whole}
    for state in ranks:
        for name, parts in state.items():
            for part, (all_of_it,) in zip(parts, [each.values() for each in whole[name]], strict=True):
                for (begin, end), values in part.items():
                    expected = all_of_it[tuple(map(slice, begin, end))]
                    torch.testing.assert_close(values, expected, rtol=rtol, atol=0.0, msg=f"{name} at {begin}")
                    seen[name] += 1
    assert all(seen.values())
    return True


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("alone"))
    return run_ranks(1, save, root, "plain")[0], root


@pytest.mark.parametrize(
    ("where", "size"),
    [
        ("plain", 2),
        ("sharded over meshes of their own", 4),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in [("plain", 4), ("sharded", 4), ("copies", 4)]),
    ],
)
def test_stages_and_a_process_that_has_both(tmp_path, alone, where, size):
    ((norms, whole), saved_alone), root = alone, str(tmp_path)
    saved = run_ranks(size, save, root, where)
    rtol = 2e-6 if "sharded" in where else 0.0  # then the clipped norm is of other sums
    assert all(own_norms == pytest.approx(norms, rel=1e-12) for own_norms, _ in saved)
    assert is_that_of(whole, [state for _, state in saved], rtol)
    for path in [f"{root}/{number}" for number in range(4)]:
        assert checkpoint.verify(path).ok
        body = json.loads(Path(path, "manifest.json").read_bytes())
        assert body["tied"]["model.head.weight"][0] == "model.embed.weight"
        assert not any("head" in key for key in body["tensors"])
        with checkpoint.open(path) as reader:
            assert torch.equal(reader.read("model.head.weight"), reader.read("model.embed.weight"))
    checkpoint.reshard(f"{root}/1", f"{root}/again", world_size=3)
    assert checkpoint.verify(f"{root}/again").ok
    by_one = [(root, None), (root, ONE_NAME["embed"]), (root, ONE_NAME["head"])]
    by_stages = [(root, None), (saved_alone, None)]
    for cases, ranks in ((by_one, 1), (by_stages, size)):
        for resumed in zip(*run_ranks(ranks, resume, cases, where), strict=True):
            assert all(own_norms == pytest.approx(norms[3:], rel=1e-12) for own_norms, _ in resumed)
            assert is_that_of(whole, [state for _, state in resumed], rtol)


def refused(root):
    """Whatever two stages disagree on is one error on both, and nothing is there afterwards."""
    rank, texts = dist.get_rank(), []
    name = ("embed.weight", "head.weight")[rank]

    def attempt(call, error):
        with pytest.raises(error) as caught:
            call()
        texts.append(str(caught.value))

    drifted = WHOLE.clone()
    drifted[5, 3] += rank
    attempt(lambda: checkpoint.save(f"{root}/no", {"model": {name: drifted}}, tied=TIED), StateError)
    same = {"model": {name: WHOLE.clone()}}
    for declared in ((TIED, None), (None, TIED), (TIED, {"head.weight": "wte.weight"})):
        attempt(lambda declared=declared: checkpoint.save(f"{root}/no", same, tied=declared[rank]), StateError)
    own = {"model": {"embed.weight": WHOLE.clone(), "head.weight": WHOLE.clone()}} if rank else same
    attempt(lambda: checkpoint.save(f"{root}/no", own, tied=TIED), StateError)
    wide = {"model": {name: torch.ones(6, 4 + rank)}}
    attempt(lambda: checkpoint.save(f"{root}/no", wide, tied=TIED), ShardoptError)
    lagging = {"counts": {name: rank}}
    attempt(lambda: checkpoint.save(f"{root}/no", lagging, tied=TIED), StateError)
    attempt(lambda: checkpoint.async_save(f"{root}/no", {"model": {name: drifted}}, tied=TIED).result(), StateError)
    checkpoint.save(f"{root}/yes", same, tied=TIED)
    before = same["model"][name].clone()
    for declared in ((TIED, None), (None, TIED)):
        attempt(lambda declared=declared: checkpoint.load(f"{root}/yes", same, tied=declared[rank]), StateError)
    apart = {"model": {name: WHOLE.clone() + rank}}
    checkpoint.save(f"{root}/apart", apart)
    attempt(lambda: checkpoint.load(f"{root}/apart", same, tied=TIED), ShardoptError)
    assert torch.equal(same["model"][name], before)
    checkpoint.load(f"{root}/apart", same)
    assert torch.equal(same["model"][name], WHOLE + rank)
    return texts


def test_what_stages_disagree_on(tmp_path):
    one, other = run_ranks(2, refused, str(tmp_path))
    assert one == other
    drifted, left, right, elsewhere, two, wide, lagging, beside, load_left, load_right, apart = one
    for text in (drifted, beside):
        assert "model.embed.weight: found other bytes" in text and "on rank 1 than on rank 0" in text
    assert "tied['head.weight']: found 'embed.weight' on rank 0; nothing on rank 1" in left
    assert "tied['head.weight']: found nothing on rank 0; 'embed.weight' on rank 1" in right
    assert "tied['head.weight']: found 'embed.weight' on rank 0; 'wte.weight' on rank 1" in elsewhere
    assert "failed on rank 1" in two and "model.head.weight: found another tensor on this rank" in two
    assert "model.embed.weight: found" in wide and "[6, 5]" in wide
    assert "counts.embed.weight: found 0 on rank 0, 1 on rank 1" in lagging
    assert "found 'embed.weight' on rank 0; nothing on rank 1" in load_left
    assert "found nothing on rank 0; 'embed.weight' on rank 1" in load_right
    assert "model.head.weight: found other values than model.embed.weight" in apart
    assert not (tmp_path / "no" / "manifest.json").exists()


def meshes_that_cut_otherwise(root):
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1, 2])]
    stage = 0 if dist.get_rank() == 0 else 1
    weight = parameter(WHOLE, meshes[stage], Shard(0))
    app = {"model": {("embed.weight", "head.weight")[stage]: weight}}
    with pytest.raises((LayoutError, StateError)) as caught:
        checkpoint.save(f"{root}/c", app, tied=TIED)
    return str(caught.value)


def test_meshes_that_cut_a_tied_tensor_otherwise(tmp_path):
    texts = run_ranks(3, meshes_that_cut_otherwise, str(tmp_path))
    assert len(set(texts)) == 1 and "model.embed.weight" in texts[0]


def drifted_shards(root):
    """Replicas on meshes of their own, of which no rank knows by itself."""
    stage, mesh = stages("sharded over meshes of their own")
    weight = parameter(WHOLE, mesh, Shard(0))
    if dist.get_rank() == 3:
        with torch.no_grad():
            local_tensors(weight)[0][-1, -1] += 1
    with pytest.raises(StateError) as caught:
        checkpoint.save(f"{root}/c", {"model": {("embed.weight", "head.weight")[stage]: weight}}, tied=TIED)
    return str(caught.value)


def test_shards_that_have_drifted_between_meshes(tmp_path):
    texts = run_ranks(4, drifted_shards, str(tmp_path))
    assert len(set(texts)) == 1
    assert "model.embed.weight: found other bytes" in texts[0] and "on rank 3 than on rank 1" in texts[0]


def averages(root):
    """Averages of stages, which have the tied weight under the names of their modules."""
    rank = dist.get_rank()
    module = nn.Module()
    name = ("embed", "head")[rank] if dist.get_world_size() > 1 else "embed"
    module.add_module(name, nn.Linear(4, 6, bias=False))
    with torch.no_grad():
        module.get_submodule(name).weight.copy_(WHOLE)
    average = shardopt.EMA(module, decay=0.5)
    for _ in range(2):
        average.update()
        with torch.no_grad():
            module.get_submodule(name).weight.add_(1)
    app = {"model": module, "average": average}
    expected = repr(average.state_dict()["state"][f"{name}.weight"])
    if dist.get_world_size() > 1:
        checkpoint.async_save(root, app, stage="lazy", tied=TIED).result()
    average.update()
    checkpoint.load(root, app, tied=TIED)
    assert repr(average.state_dict()["state"][f"{name}.weight"]) == expected
    return expected


def test_averages_of_stages(tmp_path):
    one, other = run_ranks(2, averages, str(tmp_path / "c"))
    assert [one] == [other] == run_ranks(1, averages, str(tmp_path / "c"))
    with checkpoint.open(tmp_path / "c") as reader:
        keys = [key for key in reader.manifest.tensors if key.startswith("average.state")]
        assert any("head" in key for key in keys)
        for key in keys:
            if "head" in key:
                assert reader.info(key).tied_to == key.replace("head", "embed")
