"""An estimate has the bytes and the host memory that a save then takes, and changes nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import PerRank, SaveOptions
from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.errors import OptionError, StateError
from tests.harness import run_ranks


def model_on(device):
    with torch.device(device):
        model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 50))
    model[3].weight = model[0].weight  # tied
    return model


OPTIMIZERS = {
    "keyed": lambda model: shardopt.keyed("adamw", model.named_parameters(), lr=0.1),
    "8 bits": lambda model: shardopt.keyed("adamw", model.named_parameters(), lr=0.1, state_dtype=torch.uint8),
    "torch's": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


def app_of(make, device="cpu"):
    model = model_on(device)
    return {"model": model, "optimizer": make(model), "step": 0, "own": PerRank({"seed": 12345})}


def step(app):
    app["model"](torch.tensor([1, 2, 3])).sum().backward()
    app["optimizer"].step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_before_the_first_step_are_those_of_a_save_after_it(name, tmp_path):
    app = app_of(OPTIMIZERS[name])
    estimate = checkpoint.estimate(app, tmp_path, measure_seconds=0)
    step(app)
    report = checkpoint.save(tmp_path / "c", app)
    assert estimate.bytes_by_rank == (report.bytes_total,) and estimate.tensors == report.tensors
    assert abs(estimate.manifest_bytes - (tmp_path / "c" / "manifest.json").stat().st_size) <= 8  # digits
    assert estimate.nbytes == estimate.bytes_by_rank[0] + estimate.manifest_bytes and estimate.uncounted == ()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_app_on_the_meta_device_has_the_same_bytes(name, tmp_path):
    on_cpu, on_meta = (
        checkpoint.estimate(app_of(OPTIMIZERS[name], device), tmp_path, measure_seconds=0) for device in ("cpu", "meta")
    )
    assert (on_meta.bytes_by_rank, on_meta.tensors) == (on_cpu.bytes_by_rank, on_cpu.tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_changed(name, tmp_path):
    app = app_of(OPTIMIZERS[name])
    before = str((app["model"].state_dict(), app["optimizer"].state_dict()))
    checkpoint.estimate(app, tmp_path / "root", measure_seconds=0)
    assert str((app["model"].state_dict(), app["optimizer"].state_dict())) == before
    assert not app["optimizer"].state and not (tmp_path / "root").exists()


def test_state_that_only_a_step_makes_is_named(tmp_path):
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            pass

    app = {"model": (model := model_on("cpu")), "own": Own(model.parameters())}
    estimate = checkpoint.estimate(app, tmp_path, measure_seconds=0)
    assert estimate.uncounted == ("own",) and "only a step can make it" in str(estimate)


def test_the_staged_bytes_are_the_host_memory_of_a_save_in_the_background(tmp_path):
    app = {"a": torch.ones(1000, 1000), "b": torch.ones(3), "c": torch.ones(500, 500).t()}
    estimate = checkpoint.estimate(app, tmp_path, measure_seconds=0)
    saver = AsyncSaver()
    saver.save(str(tmp_path / "c"), app, SaveTerms(), stage="now", in_flight="wait").result()
    memory = saver._memories[0][0]._plain.memory.nbytes
    saver.close()
    assert 0 <= memory - estimate.host_bytes["stage"] <= 3 * 4096 + 3 * 64
    assert estimate.host_bytes["write"] >= app["c"].nbytes  # which is copied, as it is not contiguous


def test_selected_keys_count_alone(tmp_path):
    app, options = {"a": torch.ones(100), "b": torch.ones(100)}, SaveOptions(select="^a")
    estimate = checkpoint.estimate(app, tmp_path, measure_seconds=0, options=options)
    assert estimate.bytes_by_rank == (checkpoint.save(tmp_path / "c", app, select="^a").bytes_total,)


def test_the_table_says_what_a_run_keeps(tmp_path):
    app = {"a": torch.ones(1000)}
    estimate = checkpoint.estimate(app, tmp_path, steps=1000, every=100, keep=3, measure_seconds=0)
    assert estimate.kept.nbytes == 3 * estimate.nbytes
    assert "3 of 10 checkpoints" in str(estimate) and "not measured" in str(estimate)


def test_state_that_cannot_be_saved_is_refused_as_by_the_save(tmp_path):
    with pytest.raises(StateError, match="a value cannot be stored"):
        checkpoint.estimate({"f": {"x": print}}, tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("arguments", [{"measure_seconds": -1}, {"measure_seconds": True}, {"steps": 0}, {"keep": 0}])
def test_wrong_arguments_are_refused(arguments, tmp_path):
    with pytest.raises(OptionError):
        checkpoint.estimate({"a": torch.ones(1)}, tmp_path, **arguments)


def _sharded(device, mesh):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 333), nn.Linear(333, 7))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _on_ranks(root):
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = _sharded(device, mesh)
        optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
        app = {"model": model, "optimizer": optimizer, "own": PerRank(list(range(50 * rank)))}
        found.append(checkpoint.estimate(app, root, measure_seconds=0.2 if device == "cpu" else 0))
        if device == "cpu":
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            written = checkpoint.save(f"{root}/c", app).bytes_written
    plain = {"w": torch.ones(3 << 20), "v": torch.ones(9)}
    for check_replicas in ("sampled", "all"):
        options = SaveOptions(check_replicas=check_replicas)
        estimate = checkpoint.estimate(plain, root, measure_seconds=0, options=options)
        report = checkpoint.save(f"{root}/{check_replicas}", plain, check_replicas=check_replicas)
        assert estimate.bytes_by_rank[rank] == report.bytes_written
    with pytest.raises(StateError, match="a value cannot be stored"):
        checkpoint.estimate({"f": {"x": print if rank else 1}}, root)
    return written, [each.bytes_by_rank for each in found], found[0].save_seconds, found[0].load_seconds


def test_each_rank_gets_the_bytes_of_all(tmp_path):
    outcomes = run_ranks(2, _on_ranks, str(tmp_path))
    written = tuple(written for written, *_ in outcomes)
    assert all(of_devices == [written, written] for _, of_devices, *_ in outcomes)
    assert outcomes[0][2:] == outcomes[1][2:] and min(outcomes[0][2:]) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "c", "sampled"]
