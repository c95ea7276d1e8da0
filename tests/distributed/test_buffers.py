"""Buffers that differ between ranks by design, as batch norm's running statistics: the first holder's are saved."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt import EMA, checkpoint
from shardopt.errors import StateError
from tests.harness import run_ranks

RANKS_STAY = True

WIDE = 300_000  # channels: running statistics that would be cut between their holders


class Net(torch.nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.inner = torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(channels)})
        self.linear = torch.nn.Linear(channels, 1)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        return self.linear(self.inner["norm"](inputs))


class Wrapper:
    """Has a module, and gives its state, as some trainers' stateful objects do."""

    def __init__(self, model):
        self.models = [model]

    def state_dict(self):
        return {name: each.detach() for name, each in self.models[0].state_dict().items()}

    def load_state_dict(self, state):
        self.models[0].load_state_dict(state)


def trained(how, channels=4):
    """An app after two steps on data of this rank's own."""
    torch.manual_seed(0)
    model = Net(channels)
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
    elif how == "fully_shard":
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif how == "hsdp":
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    optimizer = shardopt.keyed("sgd", wrapped.named_parameters(), lr=0.1)
    ema = EMA(wrapped, use_buffers=True)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        wrapped(torch.randn(8, channels)).sum().backward()
        optimizer.step()
        ema.update()
    return model, {"model": Wrapper(model) if how == "wrapper" else wrapped, "optimizer": optimizer, "ema": ema}


def statistics(model, ema):
    averages = ema.state_dict()["state"]["inner.norm.running_var"]["ema"]
    norm = model.inner["norm"]
    return [each.clone() for each in (norm.running_mean, norm.running_var, norm.num_batches_tracked, averages)]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("shardopt").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def saved_and_restored(folder, how, stage, tiers, channels):
    lines = Lines()
    model, app = trained(how, channels)
    tiers = [checkpoint.Tier(f"{folder}/tier-{dist.get_rank()}", every=1)] if tiers else []
    options = {"destinations": tiers} if tiers else {"incremental": True}
    manager = checkpoint.Manager(f"{folder}/run", stage=stage, every=2, **options)
    for step in (1, 2, 3):
        manager.save(step, app, force=step == 1 and not tiers)
        manager.wait()
    own = statistics(model, app["ema"])
    told = lines.lines
    with torch.no_grad():
        for each in (*model.inner["norm"].buffers(), app["ema"].averages_of_buffers()[0]):
            each.zero_()
    assert manager.restore(app) in (2, 3)
    manager.close()
    return own, statistics(model, app["ema"]), told


@pytest.mark.parametrize(
    ("how", "stage", "tiers", "channels"),
    [
        ("ddp", None, False, WIDE),
        ("fully_shard", "now", False, 4),
        ("ddp", "lazy", True, 4),
        *(
            pytest.param(how, stage, tiers, channels, marks=pytest.mark.exhaustive)
            for how in ("ddp", "fully_shard", "hsdp")
            for stage in (None, "now", "lazy")
            for tiers in (False, True)
            for channels in (4, WIDE)
        ),
    ],
)
def test_buffers_that_differ_are_saved_as_the_first_rank_has_them(tmp_path, how, stage, tiers, channels):
    n = 4 if how == "hsdp" else 2
    results = run_ranks(n, saved_and_restored, str(tmp_path), how, stage, tiers, channels)
    first, _, told = results[0]
    assert not torch.equal(results[1][0][0], first[0]), "statistics that do not differ show nothing"
    for own, restored, lines in results:
        for there, here in zip(first, restored, strict=True):
            assert torch.equal(there, here)
        assert lines == (told if own is first else [])
    assert len(told) == 1, told
    (line,) = told
    names = ["model.inner.norm.running_mean", "model.inner.norm.running_var"]
    for name in (*names, *(name.replace("model", "ema.state") + ".ema" for name in names)):
        assert name in line
    assert "num_batches_tracked" not in line
    assert "linear" not in line


def wrapped_and_strict(folder):
    torch.manual_seed(0)
    model = Net()
    model.inner["norm"].running_mean += dist.get_rank()
    checkpoint.save(f"{folder}/wrapped", {"trainer": Wrapper(model)})
    refused = []
    for name, app in {
        "dict": {"model": model.state_dict()},
        "parameter": {"model": model},
        "state": {"model": model, "optimizer": torch.zeros(3) + dist.get_rank()},
    }.items():
        if name == "parameter":
            with torch.no_grad():
                model.inner["norm"].weight += dist.get_rank()
        elif name == "state":
            model.inner["norm"].weight.data.fill_(1.0)
        with pytest.raises(StateError, match="replicas have drifted apart") as caught:
            checkpoint.save(f"{folder}/{name}", app)
        refused.append([each.key for each in caught.value.problems])
    assert "not its state_dict()" in str(caught.value)
    return refused


def test_parameters_state_and_tensors_of_no_module_stay_strict(tmp_path):
    for refused in run_ranks(2, wrapped_and_strict, str(tmp_path)):
        assert refused == [["model.inner.norm.running_mean"], ["model.inner.norm.weight"], ["optimizer"]]
    with checkpoint.open(tmp_path / "wrapped") as reader:
        assert reader.read("trainer.inner.norm.running_mean").sum() == 0


def other_kinds(folder):
    """Rank 1 has a key of its own, so that ranks are of two kinds, and replicas compared with what is written."""
    lines = Lines()
    model = Net()
    model.inner["norm"].running_mean += dist.get_rank()
    app = {"model": model, **({"more": torch.zeros(2)} if dist.get_rank() else {})}
    for i in range(3):
        checkpoint.save(f"{folder}/{i}", app)
    checkpoint.load(f"{folder}/2", app)
    return model.inner["norm"].running_mean, lines.lines


def test_ranks_of_several_kinds_take_the_first_holders_buffers_too(tmp_path):
    (zero, told), (one, untold) = run_ranks(2, other_kinds, str(tmp_path))
    assert zero.sum() == one.sum() == 0
    assert len(told) == 1
    assert untold == []
