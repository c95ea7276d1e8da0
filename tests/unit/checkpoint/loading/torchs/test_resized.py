"""Tensors whose module takes another shape in a load resume; those whose module does not are refused."""

import re

import pytest
import torch
from torch import nn
from torch.ao import quantization

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError


def quantized():
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(8, 16), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_observers_before_their_first_batch_get_what_was_saved(tmp_path):
    model = quantized()
    model(torch.randn(4, 8))
    checkpoint.save(tmp_path / "one", {"model": model})
    fresh = quantized()
    report = checkpoint.load(tmp_path / "one", {"model": fresh})
    assert len(set(report.loaded)) == len(report.loaded)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    inputs = torch.randn(4, 8)
    assert torch.equal(model(inputs), fresh(inputs))


def test_a_hook_that_resizes_nothing_is_no_reason_to_read(tmp_path):
    checkpoint.save(tmp_path / "one", {"model": nn.BatchNorm1d(4, affine=False)})
    narrow = nn.BatchNorm1d(3, affine=False)
    with pytest.raises(MismatchError, match="running_mean"):
        checkpoint.load(tmp_path / "one", {"model": narrow})


class Positions(nn.Module):
    """Interpolates its parameter, as many vision transformers do; with `drops` it leaves that as it is."""

    def __init__(self, count, drops=False):
        super().__init__()
        self.pos, self.head, self.drops = nn.Parameter(torch.randn(1, count, 4)), nn.Linear(4, 1), drops

    def forward(self):
        return self.head(self.pos).sum()

    def _load_from_state_dict(self, state, prefix, *others):
        stored = state[f"{prefix}pos"]
        if self.drops:
            del state[f"{prefix}pos"]
        elif stored.shape != self.pos.shape:
            state[f"{prefix}pos"] = interpolated(stored, self.pos.shape[1])
        super()._load_from_state_dict(state, prefix, *others)


def interpolated(positions, count):
    return torch.nn.functional.interpolate(positions.mT, size=count, mode="linear").mT


@pytest.mark.parametrize("kind", ["keyed", "torch"])
def test_a_parameter_that_its_module_interpolates(tmp_path, kind):
    def made(count):
        model = nn.ModuleDict({"net": Positions(count)})
        if kind == "keyed":
            return {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters(), lr=0.1)}
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    app = made(4)
    app["model"]["net"]().backward()
    app["optimizer"].step()
    checkpoint.save(tmp_path / "one", app)
    larger = made(8)
    net = larger["model"]["net"]
    own = net.pos
    before = own.detach().clone()
    with pytest.raises(MismatchError, match=r"optimizer\.state\.net\.pos\.exp_avg: ") as refused:
        checkpoint.load(tmp_path / "one", larger, init_state=True)
    assert torch.equal(net.pos, before)
    (skip,) = {re.search(r'skip=r"(.+?)"', each.remedy)[1] for each in refused.value.problems}
    checkpoint.load(tmp_path / "one", larger, init_state=True, skip=skip)
    assert net.pos is own and torch.equal(own, interpolated(app["model"]["net"].pos, 8))
    assert torch.equal(net.head.weight, app["model"]["net"].head.weight)
    assert larger["optimizer"].state[net.head.weight]["step"] == 1 and not larger["optimizer"].state.get(own)


def test_a_hook_that_passes_a_parameter_over_does_not_load_it(tmp_path):
    checkpoint.save(tmp_path / "one", {"model": Positions(4)})
    with pytest.raises(MismatchError, match=r"model\.pos"):
        checkpoint.load(tmp_path / "one", {"model": Positions(8, drops=True)})


def test_a_load_that_is_refused_leaves_what_a_hook_sets_beside_the_parameter(tmp_path):
    class Grid(Positions):
        def __init__(self, count):
            super().__init__(count)
            self.register_buffer("places", torch.arange(count), persistent=False)
            self.register_buffer("count", torch.tensor(count), persistent=False)

        def _load_from_state_dict(self, state, prefix, *others):
            self.places = torch.arange(state[f"{prefix}pos"].shape[1])
            self.count.fill_(len(self.places))
            super()._load_from_state_dict(state, prefix, *others)

    checkpoint.save(tmp_path / "one", {"model": Grid(4), "more": torch.ones(1)})
    model = Grid(8)
    with pytest.raises(MismatchError, match=r"^(?!.*model\.pos)"):
        checkpoint.load(tmp_path / "one", {"model": model, "other": torch.ones(1)})
    assert len(model.places) == model.count == 8
    checkpoint.load(tmp_path / "one", {"model": model, "more": torch.ones(1)})
    assert len(model.places) == model.count == 4
