"""Averages of weights in conversions: left out by themselves, and written in the place of the weights on purpose."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel

import shardopt
from shardopt import checkpoint
from shardopt.cli.entry import main
from shardopt.errors import MismatchError

RENAME = {r"^model\.": ""}


class Net(torch.nn.Module):
    """Tied weights, and buffers that have no average."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.embed.weight


def averaged(kind, **options):
    """A model, and averages of it that are other numbers."""
    torch.manual_seed(0)
    model = Net()
    averages = kind(model, **options)
    update = averages.update if hasattr(averages, "update") else lambda: averages.update_parameters(model)
    for _ in range(3):
        update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    return model, averages


def of(averages):
    """The averages by the model's names, tied ones under both."""
    if isinstance(averages, AveragedModel):
        return {name: each.detach() for name, each in averages.module.state_dict().items()}
    with averages.swap():
        return {name: each.clone() for name, each in averages.module.state_dict().items()}


def written(path):
    return load_file(path / "model.safetensors")


def with_masters(seed):
    """A model in bf16 that is stepped by its masters, a part that is not averaged, and averages."""
    torch.manual_seed(seed)
    model, other = torch.nn.Linear(3, 2).bfloat16(), torch.nn.Linear(3, 2, bias=False).bfloat16()
    params = {f"{name}.{own}": each for name, m in (("a", model), ("b", other)) for own, each in m.named_parameters()}
    optimizer = shardopt.keyed("adamw", params, lr=0.25, master_dtype=torch.float32)
    return {"a": model, "b": other, "ema": shardopt.EMA(model, decay=0.5), "optimizer": optimizer}


@pytest.mark.parametrize("to", ["shardopt", "torch", "dcp"])
def test_a_load_of_averages_makes_parameters_of_averages(tmp_path, to):
    app = with_masters(0)
    for _ in range(3):
        (app["a"](torch.ones(1, 3).bfloat16()) + app["b"](torch.ones(1, 3).bfloat16())).square().sum().backward()
        app["optimizer"].step()
        app["ema"].update()
    checkpoint.save(tmp_path / "c", app)
    checkpoint.convert(tmp_path / "c", tmp_path / "out", to, weights="ema", check=True)
    into = with_masters(1)
    del into["ema"]
    checkpoint.load(tmp_path / "out", into, init_state=True)
    with app["ema"].swap():
        wanted = {key: {name: each.clone() for name, each in app[key].state_dict().items()} for key in "ab"}
    for key in "ab":
        assert all(torch.equal(each, wanted[key][name]) for name, each in into[key].state_dict().items())
    masters = {name: each["master"] for name, each in into["optimizer"].state_dict()["state"].items()}
    assert all(torch.equal(masters[f"a.{name}"], each.float()) for name, each in wanted["a"].items())
    trained = app["optimizer"].state_dict()["state"]
    assert all(torch.equal(masters[f"b.{name}"], trained[f"b.{name}"]["master"]) for name in wanted["b"])


KINDS = [shardopt.EMA, shardopt.SWA, AveragedModel]


@pytest.mark.parametrize("kind", KINDS)
def test_averages_are_no_weights(tmp_path, kind):
    model, averages = averaged(kind)
    checkpoint.save(tmp_path / "c", {"model": model, "run": {"ema": averages}})
    report = checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface", rename=RENAME)
    found, state = written(tmp_path / "hf"), model.state_dict()
    assert {*found, "head.weight"} == {*state} or {*found, "embed.weight"} == {*state}
    assert all(torch.equal(found[name], state[name]) for name in found)
    assert any(key.startswith("run.ema") for key in report.left_out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", ["huggingface", "torch"])
def test_averages_take_the_place_of_the_weights(tmp_path, kind, to):
    model, averages = averaged(kind)
    wanted = of(averages)
    assert not torch.equal(wanted["head.bias"], model.state_dict()["head.bias"])
    checkpoint.save(tmp_path / "c", {"model": model, "run": {"ema": averages}})
    checkpoint.convert(tmp_path / "c", tmp_path / "out", to, rename=RENAME, weights="run.ema", check=True)
    found = written(tmp_path / "out") if to == "huggingface" else torch.load(tmp_path / "out")
    assert len(found) >= len(wanted) - 1 and found.keys() <= wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_averages_are_cast_as_weights_are(tmp_path):
    model, averages = averaged(shardopt.EMA)
    checkpoint.save(tmp_path / "c", {"model": model, "ema": averages})
    checkpoint.convert(
        tmp_path / "c", tmp_path / "hf", "huggingface", rename=RENAME, weights="ema", dtype=torch.bfloat16
    )
    assert torch.equal(written(tmp_path / "hf")["head.bias"], of(averages)["head.bias"].bfloat16())


def test_averages_alone_have_the_names_of_the_parameters(tmp_path):
    _, averages = averaged(shardopt.SWA)
    checkpoint.save(tmp_path / "c", {"swa": averages})
    with pytest.raises(MismatchError, match="there is nothing to convert"):
        checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface")
    checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface", weights="swa")
    wanted = of(averages)
    assert written(tmp_path / "hf").keys() == {"embed.weight", "head.bias", "norm.bias", "norm.weight"}
    assert all(torch.equal(each, wanted[name]) for name, each in written(tmp_path / "hf").items())


def test_an_averaged_model_alone_is_a_model(tmp_path):
    _, averages = averaged(AveragedModel)
    checkpoint.save(tmp_path / "c", {"model": averages})
    checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface", rename=RENAME)
    assert "module.head.bias" in written(tmp_path / "hf")


def test_a_select_names_averages_too(tmp_path):
    model, averages = averaged(shardopt.EMA)
    checkpoint.save(tmp_path / "c", {"model": model, "ema": averages})
    checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface", select=r"^ema\..*\.ema$")
    assert all(name.startswith("ema.state.") for name in written(tmp_path / "hf"))


def test_averages_that_are_not_there_are_refused_by_name(tmp_path):
    model, averages = averaged(shardopt.EMA)
    checkpoint.save(tmp_path / "c", {"model": model, "ema": averages})
    with pytest.raises(MismatchError, match=r"weights='swa': found no averages; required one of 'ema'"):
        checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface", weights="swa")


def test_two_models_that_averages_may_be_of(tmp_path):
    model, averages = averaged(shardopt.EMA)
    checkpoint.save(tmp_path / "c", {"model": model, "teacher": Net(), "ema": averages})
    with pytest.raises(MismatchError, match=r"found 2 models of these names \(model\., teacher\.\)"):
        checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface", weights="ema")
    checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface", weights="ema", skip=r"^teacher\.", rename=RENAME)
    assert torch.equal(written(tmp_path / "hf")["head.bias"], of(averages)["head.bias"])


def test_an_export_of_a_run_ships_averages_on_purpose(tmp_path):
    model, averages = averaged(shardopt.EMA)
    export = checkpoint.Export(tmp_path / "hf", rename=RENAME, skip=r"^teacher\.", weights="ema")
    with checkpoint.Manager(tmp_path / "run", export=export) as manager:
        manager.save(1, {"model": model, "ema": averages, "teacher": Net()})
    found = written(tmp_path / "hf" / "step-00000001")
    assert torch.equal(found["head.bias"], of(averages)["head.bias"]) and not any("ema" in name for name in found)


def test_in_a_shell(tmp_path, capsys):
    model, averages = averaged(shardopt.EMA)
    checkpoint.save(tmp_path / "c", {"model": model, "ema": averages})
    out = str(tmp_path / "hf")
    words = ["convert", str(tmp_path / "c"), out, "--to", "huggingface", "--rename", r"^model\.=", "--weights", "ema"]
    assert main(words) == 0
    assert torch.equal(written(tmp_path / "hf")["head.bias"], of(averages)["head.bias"])


@pytest.mark.parametrize("mode", [True, False])
def test_a_warning_where_the_weights_are_those_that_schedule_free_trains(tmp_path, caplog, mode):
    model = torch.nn.Linear(2, 2)
    optimizer = shardopt.keyed("schedulefreeadamw", model.named_parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.train(mode)
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with caplog.at_level(logging.WARNING, "shardopt"):
        checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface")
    assert ("and not their averages" in caplog.text) == mode


def test_state_of_an_optimizer_without_groups_is_no_weight(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    optimizer.save_param_groups(False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer, "ema": shardopt.EMA(model)})
    checkpoint.convert(tmp_path / "c", tmp_path / "hf", "huggingface", rename=RENAME)
    assert written(tmp_path / "hf").keys() == {"weight", "bias"}
