"""Runs of torch.distributed.checkpoint on some ranks and placements resume in our optimizers on others, exactly."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardopt
from shardopt import checkpoint
from shardopt.errors import CorruptionError
from tests.harness import run_ranks

RANKS_STAY = True

STYLES = ("fsdp", "hsdp", "tp", "plain")
LAYERS = ("0", "2", "3", "4")  # those of the model that have parameters
PAIRS = [(2, "fsdp", 3, "fsdp"), (2, "tp", 2, "fsdp"), (3, "fsdp", 2, "tp")]


def make_model(style, seed):
    torch.manual_seed(seed)
    last = torch.nn.Linear(7, 5, bias=False)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 7), torch.nn.LayerNorm(7), last
    ).double()
    ranks = dist.get_world_size()
    if style == "tp":
        mesh = init_device_mesh("cpu", (ranks,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif style == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif style == "hsdp":
        rows = 2 if ranks % 2 == 0 else 1
        fully_shard(model, mesh=init_device_mesh("cpu", (rows, ranks // rows), mesh_dim_names=("replicas", "shards")))
    return model


def train(model, optimizer, first, steps):
    losses = []
    for step in range(first, first + steps):
        inputs = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).sin().mean()  # all ranks see the same data, so that their means are equal
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(path, style, flattened):
    model = make_model(style, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    before = train(model, optimizer, 0, 3)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flattened))
    dcp.save({"model": weights, "optim": state, "step": 3}, checkpoint_id=path)
    return before, train(model, optimizer, 3, 3)


def resume(path, style):
    model = make_model(style, 1)
    optimizer = shardopt.keyed("adamw", dict(model.named_parameters()), lr=0.9)
    app = {"model": model, "optim": optimizer, "step": 0}
    checkpoint.load(path, app, init_state=True)
    return train(model, optimizer, app["step"], 3)


def check(tmp_path, writers, style, readers, other, flattened=False):
    path = str(tmp_path / f"{writers}{style}{readers}{other}{flattened}")
    _, expected = run_ranks(writers, save, path, style, flattened)[0]
    for losses in run_ranks(readers, resume, path, other):
        assert losses == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("writers", "style", "readers", "other"), PAIRS)
def test_a_run_resumes_from_dcp(tmp_path, writers, style, readers, other):
    check(tmp_path, writers, style, readers, other, flattened=style == "tp")


def as_stages(path, saved):
    """Each rank has some layers of the run, under the names that they have in the whole model, and saves them."""
    full = make_model("plain", 1)
    layers = {0: LAYERS[:1], 1: LAYERS[1:]}[dist.get_rank()]
    stage = torch.nn.ModuleDict({name: full[int(name)] for name in layers})
    optimizer = shardopt.keyed("adamw", stage.named_parameters(), lr=0.9)
    app = {"model": stage, "optim": optimizer, "step": 0}
    checkpoint.load(path, app, init_state=True)
    with checkpoint.open(path) as reader:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, reader.read(f"model.{name}"))
            assert torch.equal(
                optimizer.state_dict()["state"][name]["exp_avg"], reader.read(f"optim.state.{name}.exp_avg")
            )
    checkpoint.save(saved, app)


def test_stages_of_a_pipeline_take_what_is_theirs_and_give_it_back(tmp_path):
    path, saved = str(tmp_path / "dcp"), str(tmp_path / "stages")
    _, expected = run_ranks(2, save, path, "fsdp", False)[0]
    run_ranks(2, as_stages, path, saved)
    for losses in run_ranks(2, resume, saved, "tp"):
        assert losses == pytest.approx(expected, abs=1e-12)


def save_keyed(path, style):
    model = make_model(style, 0)
    optimizer = shardopt.keyed("adamw", dict(model.named_parameters()), lr=0.05)
    train(model, optimizer, 0, 3)
    checkpoint.save(path, {"model": model, "optim": optimizer, "step": 3})
    return train(model, optimizer, 3, 3)


def resume_in_torch(path, style):
    model = make_model(style, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.9)
    weights, state = get_state_dict(model, optimizer)
    app = {"model": weights, "optim": state, "step": 0}
    dcp.load(app, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=app["model"], optim_state_dict=app["optim"])
    return train(model, optimizer, app["step"], 3)


def check_the_way_back(tmp_path, writers, style, others):
    path = tmp_path / f"{writers}{style}"
    expected = run_ranks(writers, save_keyed, str(path), style)[0]
    checkpoint.convert(path, f"{path}-dcp", to="dcp", check=True)
    for readers, other in others:
        for losses in run_ranks(readers, resume_in_torch, f"{path}-dcp", other):
            assert losses == pytest.approx(expected, abs=1e-12), (readers, other)


def test_a_run_of_ours_resumes_in_torch(tmp_path):
    check_the_way_back(tmp_path, 2, "fsdp", [(3, "fsdp")])


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("style", STYLES)
def test_any_run_of_ours_resumes_in_torch(tmp_path, style):
    for writers in (1, 2, 3, 4):
        others = [(readers, other) for readers in (1, 2, 3, 4) for other in STYLES]
        check_the_way_back(tmp_path, writers, style, others)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_any_ranks_and_placements(tmp_path, writers, style):
    """Each checkpoint is written once for both forms of state, and loaded by 1 to 4 ranks in all styles."""
    for flattened in (False, True):
        path = str(tmp_path / str(flattened))
        _, expected = run_ranks(writers, save, path, style, flattened)[0]
        for readers in (1, 2, 3, 4):
            for other in STYLES:
                for losses in run_ranks(readers, resume, path, other):
                    assert losses == pytest.approx(expected, abs=1e-12), (readers, other)


def save_as_hugging_face(path):
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [Shard(0)])
    both = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    writer = dcp.HuggingFaceStorageWriter(path=path, save_distributed=True)
    dcp.save({"rows": rows, "both": both}, storage_writer=writer)


def test_files_of_several_ranks_in_the_layout_of_hugging_face(tmp_path):
    run_ranks(2, save_as_hugging_face, str(tmp_path))
    app = {"rows": torch.zeros(7, 3), "both": torch.zeros(4)}
    checkpoint.load(tmp_path, app)
    assert torch.equal(app["rows"], torch.arange(21.0).view(7, 3)) and torch.equal(app["both"], torch.arange(4.0))
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptionError, match="rows"):
        checkpoint.load(tmp_path, app)


def load_damaged(path):
    app = {"x": torch.zeros(1000), "mine": torch.zeros(4)}
    try:
        checkpoint.load(path, app)
    except CorruptionError as error:
        return str(error), app["x"].any().item()
    return None


def test_damage_is_named_on_all_ranks_before_anything_is_changed(tmp_path):
    path = tmp_path / "d"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"x": torch.arange(1000.0), "mine": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(500.0, 510.0).numpy().tobytes()) + 1] ^= 4
    file.write_bytes(data)
    for message, changed in run_ranks(2, load_damaged, str(path)):
        assert "'x' that fail their checksum" in message and not changed
