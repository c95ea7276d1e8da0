"""Checkpoints are made and read where the default device is not the CPU; "meta" shows who forgot to say where."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from tests.harness import run_ranks

DTYPES = ["float32", "bfloat16", "complex128", "bool", "float8_e4m3fn", "int64"]


def value(dtype="float32", rows=700):
    return torch.arange(rows * 100, device="cpu").reshape(rows, 100).to(getattr(torch, dtype))


def make(filled):
    """An app of all kinds, with memory on the CPU whatever the default device is."""
    scale = float(filled)

    def filled_or_not(tensor):
        return tensor if filled else torch.zeros_like(tensor)

    app = {dtype: filled_or_not(value(dtype)) for dtype in DTYPES}
    app |= {"turned": filled_or_not(value()).t(), "scalar": torch.tensor(3.0 * scale, device="cpu")}
    app |= {
        "empty": torch.empty(0, 3, device="cpu"),
        "array": np.arange(5.0) * scale,
        "plain": (1, b"x") if filled else 0,
    }
    app["mine"] = checkpoint.PerRank({"small": torch.arange(3, device="cpu"), "none": torch.empty(0, device="cpu")})
    with torch.device("cpu"):
        model = torch.nn.Linear(3, 2)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, scale)
        app |= {"model": model, "keyed": shardopt.keyed("adam", model.named_parameters(), lr=0.1)}
        app["torch"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for name in ("keyed", "torch"):
            model(torch.full((1, 3), scale)).sum().backward()
            app[name].step()
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("same", Replicate())):
                app[name] = distribute_tensor(filled_or_not(value()), mesh, [placement], src_data_rank=None)
    return app


def flat(app):
    tensors = {name: each for name, each in app.items() if isinstance(each, torch.Tensor)}
    tensors |= {f"model.{name}": each for name, each in app["model"].state_dict().items()}
    for state in app["torch"].state.values():
        tensors |= {f"torch.{name}": each for name, each in state.items()}
    return {
        name: each.to_local() if isinstance(each, torch.distributed.tensor.DTensor) else each
        for name, each in tensors.items()
    }


def same(app, other):
    theirs = flat(other)
    for name, mine in flat(app).items():
        assert not mine.is_meta, name
        raw, their_raw = (t.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for t in (mine, theirs[name]))
        assert np.array_equal(raw, their_raw), name
    assert np.array_equal(app["array"], other["array"]) and app["plain"] == other["plain"]
    assert app["mine"].value["small"].tolist() == [0, 1, 2] and not app["mine"].value["none"].is_meta


def everything(path):
    saved = make(filled=True)
    path = f"{path}/{torch.get_default_device()}"
    checkpoint.save(f"{path}/a", saved, check_replicas="all")
    for stage in ("now", "lazy"):
        checkpoint.async_save(f"{path}/{stage}", saved, stage=stage).result()
    for name, choice in (("a", {"transactional": True}), ("now", {"share_reads": "always"}), ("lazy", {})):
        app = make(filled=False)
        checkpoint.load(f"{path}/{name}", app, **choice)
        same(app, saved)
    if dist.is_initialized():
        dist.barrier()
    manager = checkpoint.Manager(f"{path}/run")
    manager.save(1, saved)
    app = make(filled=False)
    assert manager.restore(app) == 1
    same(app, saved)
    manager.close()
    if not dist.is_initialized():
        checkpoint.reshard(f"{path}/a", f"{path}/two", world_size=1)
        for name in ("a", "two"):
            checkpoint.verify(f"{path}/{name}").raise_if_damaged()
            with checkpoint.open(f"{path}/{name}") as reader:
                for dtype in DTYPES:
                    read = reader.read(dtype)
                    assert read.device.type == "cpu"
                    assert np.array_equal(read.view(torch.uint8).numpy(), saved[dtype].view(torch.uint8).numpy())
                part = reader.read("turned", checkpoint.Box((2, 3), (50, 500)))
                assert torch.equal(part, saved["turned"][2:52, 3:503])
                assert not reader.per_rank(0)["mine"]["none"].is_meta
        app = {"x": torch.zeros(700, 100, dtype=torch.float64, device="cpu")}
        checkpoint.load(
            f"{path}/a", app, rename={"^float32$": "x"}, select="^x$", strict=checkpoint.Strictness(dtype="cast")
        )
        assert torch.equal(app["x"], value().double())


def everything_on(device, path):
    torch.set_default_device(device)
    try:
        everything(path)
    finally:
        torch.set_default_device(None)


def test_in_one_process(tmp_path):
    everything_on("meta", str(tmp_path))


def test_on_ranks(tmp_path):
    run_ranks(2, everything_on, "meta", str(tmp_path))


@pytest.mark.exhaustive
def test_as_on_the_cpu(tmp_path):
    """The test itself: what it does must be right without another default."""
    everything_on("cpu", str(tmp_path))
    run_ranks(2, everything_on, "cpu", str(tmp_path / "ranks"))
