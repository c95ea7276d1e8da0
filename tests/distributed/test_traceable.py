"""Wrappers of tensors by torch's own protocol: one tensor is seen through, several are stored as what they are."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt import checkpoint
from shardopt.errors import LayoutError, MismatchError
from shardopt.optim import EMA, GradientClipping, GradientClippingOptimizer
from tests.harness import run_ranks
from tests.support.traceable import Coded, Marked, coded

RANKS_STAY = True


class Model(nn.Module):
    """Two layers of which the weights are marked, or not."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
        for layer in self.layers if wrap else ():
            layer.weight = nn.Parameter(Marked(layer.weight.detach().clone()))

    def forward(self, inputs):
        return self.layers(inputs)


def app_of(wrap):
    model = Model(wrap)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    optimizer = GradientClippingOptimizer(optimizer, clipping=GradientClipping.NORM, max_gradient=0.5)
    return {"model": model, "optimizer": optimizer, "ema": EMA(model, 0.5)}


def train(app, steps, scaler=None):
    norms = []
    for i in range(steps):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        loss = app["model"](inputs).square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        app["optimizer"].step() if scaler is None else scaler.step(app["optimizer"])
        scaler is None or scaler.update()
        norms.append(float(app["optimizer"].total_norm))
        app["optimizer"].zero_grad()
        app["ema"].update()
    return norms


def _train_and_save(url, call):
    """Steps, clips, averages and saves as the same model without wrappers does; either loads the other's."""
    norms = []
    for wrap in (True, False):
        app = app_of(wrap)
        norms.append(train(app, 2, shardopt.GradScaler(device="cpu", init_scale=8.0) if wrap else None))
        here = f"{url}/{wrap}"
        checkpoint.save(here, app) if call == "save" else checkpoint.async_save(here, app, stage=call).result()
        assert not wrap or type(app["model"].layers[0].weight._local_tensor) is Marked
    assert norms[0] == norms[1]
    for wrap in (True, False):
        app = app_of(wrap)
        checkpoint.load(f"{url}/{not wrap}", app, init_state=True)
        norms.append(train(app, 1))
    assert norms[2] == norms[3]


def contents(url):
    with checkpoint.open(url) as reader:
        return {key: reader.read(key) for key in reader.manifest.tensors}


@pytest.mark.parametrize(
    "call", ["lazy", *(pytest.param(call, marks=pytest.mark.exhaustive) for call in ("save", "now"))]
)
def test_a_wrapper_of_one_tensor_is_that_tensor(tmp_path, call):
    run_ranks(2, _train_and_save, str(tmp_path), call)
    marked, plain = contents(tmp_path / "True"), contents(tmp_path / "False")
    assert marked.keys() == plain.keys() and all(torch.equal(marked[key], plain[key]) for key in plain)
    app = app_of(True)  # on one process, without a mesh
    checkpoint.load(tmp_path / "True", app, init_state=True)
    assert torch.equal(app["model"].layers[0].weight.inner, plain["model.layers.0.weight"])


class Frozen(nn.Module):
    """A weight of codes, frozen, and one that is trained."""

    def __init__(self, seed=0, rows=8):
        super().__init__()
        whole = coded(rows, seed)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            local = torch.chunk(whole, dist.get_world_size())[dist.get_rank()]
            local = Coded(local.codes.clone(), local.scales.clone(), local.table.clone())
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        self.base = nn.Parameter(whole, requires_grad=False)
        self.adapter = nn.Parameter(torch.ones(4))


def _tune(url, save):
    model = Frozen(seed=0 if save else 1)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    optimizer = GradientClippingOptimizer(optimizer, clipping=GradientClipping.NORM, max_gradient=0.5)
    app = {"model": model, "optimizer": optimizer, "ema": EMA(model, 0.5)}
    if not save:
        checkpoint.load(url, app, init_state=True)
    else:
        model.adapter.sum().backward()
        optimizer.step()
        assert float(optimizer.total_norm) == 2.0
        app["ema"].update()
        with app["ema"].swap():
            pass
        checkpoint.async_save(url, app, stage="lazy").result()
    local = model.base._local_tensor if isinstance(model.base, DTensor) else model.base
    return local.decoded().detach()


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_wrapper_of_several_tensors_is_stored_as_these(tmp_path, ranks):
    """On two ranks, and loaded on another number of them, in place."""
    saved = torch.cat(run_ranks(2, _tune, str(tmp_path / "c"), True))
    assert torch.equal(saved, coded(8).decoded())
    stored = contents(tmp_path / "c")
    assert torch.equal(stored["model.base.codes"], coded(8).codes) and stored["model.base.table"].shape == (16,)
    assert not any(("ema" in key and "base" in key) or ".state.base" in key for key in stored)
    loaded = [_tune(str(tmp_path / "c"), False)] if ranks == 1 else run_ranks(ranks, _tune, str(tmp_path / "c"), False)
    assert torch.equal(torch.cat(loaded), saved)


def test_codes_that_do_not_fit_are_refused(tmp_path):
    checkpoint.save(tmp_path / "c", {"model": Frozen()})
    model = Frozen(seed=1, rows=4)
    before = model.base.decoded()
    with pytest.raises(MismatchError, match=r"model\.base\.codes"):
        checkpoint.load(tmp_path / "c", {"model": model})
    assert torch.equal(model.base.decoded(), before)


def test_codes_that_are_trained_are_refused():
    model = Frozen()
    model.base = nn.Parameter(coded(4))
    with pytest.raises(LayoutError, match="base: found the tensor subclass Coded"):
        EMA(model, 0.5)


def test_torchaos_own_classes(tmp_path):
    reason = "torchao is not installed (launch/test_integrations.sh)"
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor", reason=reason)
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    torch.manual_seed(0)
    weights = torch.randn(512, 512)
    model = nn.ParameterDict({"float8": WeightWithDynamicFloat8CastTensor(weights, None, torch.float8_e4m3fn)})
    model["nf4"] = nn.Parameter(nf4.to_nf4(weights), requires_grad=False)
    before = {name: getattr(model["nf4"], name).clone() for name in model["nf4"].__tensor_flatten__()[0]}
    checkpoint.save(tmp_path / "c", {"model": model})
    for name in before:
        getattr(model["nf4"], name).zero_()
    model["float8"]._tensor.zero_()
    checkpoint.load(tmp_path / "c", {"model": model})
    assert torch.equal(model["float8"]._tensor, weights)
    assert all(torch.equal(getattr(model["nf4"], name), each) for name, each in before.items())


def _rows_through(url, rows):
    """Saves and loads codes of so many rows over the ranks; None where a save is refused."""
    here = [each.clone() for each in torch.chunk(torch.arange(rows * 2.0).view(rows, 2), 2)]
    mesh = init_device_mesh("cpu", (2,))
    local = ByRow(here[dist.get_rank()])
    whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 2)), stride=(2, 1))
    wanted = local.codes.clone()
    try:
        checkpoint.save(url, {"w": whole})
    except LayoutError:
        return None
    local.codes.zero_()
    checkpoint.load(url, {"w": whole})
    return torch.equal(whole._local_tensor.codes, wanted)


class ByRow(torch.Tensor):
    """Codes, and a scale that all rows have."""

    @staticmethod
    def __new__(cls, codes, scale=None):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale=None):
        self.codes, self.scale = codes, torch.ones(()) if scale is None else scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        made = operation(args[0].codes, *args[1:], **(kwargs or {}))
        return [cls(each, args[0].scale) for each in made] if isinstance(made, list) else cls(made, args[0].scale)


@pytest.mark.parametrize(("rows", "expected"), [(2, None), (3, None), (5, True)])
def test_rows_that_ranks_have_unequally_are_stored_and_single_ones_refused(tmp_path, rows, expected):
    assert run_ranks(2, _rows_through, str(tmp_path / "saved"), rows) == [expected] * 2
