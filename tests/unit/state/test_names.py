"""Models are saved and loaded by the names of their parameters, whatever wrappers they are in at the time."""

import copy
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError, StateError
from shardopt.state.flatten import flatten
from shardopt.state.names import names_alike, names_under_wrappers, plain_name, plain_names_in
from tests.harness import run_ranks
from tests.support.fake_rank import fake_rank


class Model(nn.Module):
    """With a buffer, a nested module, and a module that is really called "module"."""

    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.module = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(2)
        for tensor in self.state_dict().values():
            tensor.fill_(number)


KEYS = sorted(f"model.{name}" for name in Model(0).state_dict())


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_within(model):
    model.layers[0] = compiled(model.layers[0])
    return compiled(model)


def checkpointed(model):
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    return model


WRAPPED = {"plain": lambda model: model, "compiled": compiled, "within": compiled_within, "checkpointed": checkpointed}
WRAPPED["all"] = lambda model: compiled(checkpointed(model))


def is_filled(model, number):
    return all((tensor == number).all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("saved", WRAPPED)
def test_any_wrapping_saves_what_any_other_loads(tmp_path, saved):
    checkpoint.save(tmp_path / "c", {"model": WRAPPED[saved](Model(3))})
    with checkpoint.open(tmp_path / "c") as reader:
        assert reader.keys() == KEYS
    for wrap in WRAPPED.values():
        model = wrap(Model(0))
        report = checkpoint.load(tmp_path / "c", {"model": model})
        assert is_filled(model, 3)
        assert sorted(report.loaded) == KEYS
        assert report.renamed == {}
        assert not report.missing and not report.unexpected


@pytest.mark.parametrize("wrap", WRAPPED)
def test_what_was_stored_with_the_names_of_wrappers_still_loads(tmp_path, wrap):
    for number, old in enumerate(WRAPPED.values()):
        stored = {f"_orig_mod.{name}": tensor for name, tensor in old(Model(4)).state_dict().items()}
        checkpoint.save(tmp_path / str(number), {"model": stored})
        model = WRAPPED[wrap](Model(0))
        report = checkpoint.load(tmp_path / str(number), {"model": model})
        assert is_filled(model, 4)
        assert sorted(report.renamed) == KEYS
        model = WRAPPED[wrap](Model(0))
        checkpoint.load(tmp_path / str(number), {"net": model}, rename={r"^model\.": "net."})
        assert is_filled(model, 4)
        model = WRAPPED[wrap](Model(0))
        report = checkpoint.load(tmp_path / str(number), {"model": model}, select=r"layers\.0")
        assert sorted(report.loaded) == ["model.layers.0.bias", "model.layers.0.weight"]


def test_what_stood_in_distributed_data_parallel_still_loads(tmp_path):
    stored = {f"module.{name}": tensor for name, tensor in Model(5).state_dict().items()}
    for number, before in enumerate(["", "_orig_mod.", "module."]):
        checkpoint.save(tmp_path / str(number), {"model": {before + name: tensor for name, tensor in stored.items()}})
        model = Model(0)
        checkpoint.load(tmp_path / str(number), {"model": model})
        assert is_filled(model, 5)


def in_ddp(path):
    model = Model(6)
    inner = nn.ModuleDict({"encoder": DistributedDataParallel(copy.deepcopy(model.layers[0])), "rest": model.layers[1]})
    apps = {
        "ddp": (DistributedDataParallel(model), Model(0)),
        "compiled ddp": (compiled(DistributedDataParallel(copy.deepcopy(model))), Model(0)),
        "ddp compiled": (DistributedDataParallel(compiled(copy.deepcopy(model))), Model(0)),
        "inner": (inner, nn.ModuleDict({"encoder": nn.Linear(2, 2), "rest": nn.Linear(2, 2)})),
    }
    for name, (wrapped, plain) in apps.items():
        checkpoint.save(f"{path}/{name}", {"model": wrapped})
        with checkpoint.open(f"{path}/{name}") as reader:
            assert reader.keys() == sorted(f"model.{key}" for key in plain.state_dict()), name
        checkpoint.load(f"{path}/{name}", {"model": plain})
        assert is_filled(plain, 6), name
        for tensor in wrapped.state_dict().values():
            tensor.zero_()
        checkpoint.load(f"{path}/{name}", {"model": wrapped})
        assert is_filled(wrapped, 6), name


def test_distributed_data_parallel_is_told_by_its_type(tmp_path):
    run_ranks(2, in_ddp, str(tmp_path))


def test_a_module_of_that_name_keeps_it(tmp_path):
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    checkpoint.save(tmp_path / "c", {"model": Averaged()})
    with checkpoint.open(tmp_path / "c") as reader:
        assert reader.keys() == ["model.module.bias", "model.module.weight"]
    checkpoint.load(tmp_path / "c", {"model": Averaged()})


class Doubled(nn.Module):
    """A wrapper of a program's own, whose attribute has the name of DistributedDataParallel's."""

    def __init__(self, inner):
        super().__init__()
        self.module = inner

    def forward(self, x):
        return 2 * self.module(x)


@pytest.mark.parametrize("within", [False, True])
def test_a_wrapper_of_a_program_is_missed_where_it_is_forgotten(tmp_path, within):
    def app(wraps, name="model"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if wraps and within:
            model[1] = Doubled(model[1])
        return {name: Doubled(model) if wraps and not within else model}

    url = tmp_path / "c"
    checkpoint.save(url, app(True))
    with pytest.raises(MismatchError, match=r"model\.(1\.)?module\.\S+ found a tensor .* rename="):
        checkpoint.load(url, app(False))
    with pytest.raises(MismatchError, match="rename="):
        checkpoint.load(url, app(False, "net"), rename={"^model": "net"})
    checkpoint.load(url, app(False), rename={r"\.module\.": "."})
    checkpoint.save(tmp_path / "plain", app(False))
    with pytest.raises(MismatchError):
        checkpoint.load(tmp_path / "plain", app(True))
    # Of these nobody knows whose the names are.
    state = app(True)["model"].state_dict()
    torch.save({"model": state}, tmp_path / "model.pt")
    checkpoint.save(tmp_path / "state", {"model": state})
    checkpoint.convert(tmp_path / "model.pt", tmp_path / "converted", to="shardopt")
    for name in ("model.pt", "state", "converted"):
        assert checkpoint.load(tmp_path / name, app(False)).renamed


def test_names_that_are_one_without_wrappers_are_refused(tmp_path):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model._orig_mod = nn.Linear(1, 1, bias=False)
    with pytest.raises(StateError, match=r"m\.weight: found weight and _orig_mod\.weight in the state of 'm'"):
        checkpoint.save(tmp_path / "c", {"m": model})
    model = nn.Module()
    model._orig_mod = nn.Linear(1, 1, bias=False)
    model._checkpoint_wrapped_module = nn.Linear(1, 1, bias=False)
    with pytest.raises(StateError, match=r"m\.weight: found _orig_mod\.weight and _checkpoint_wrapped_module\.weight"):
        checkpoint.save(tmp_path / "c", {"m": model})
    assert not (tmp_path / "c").exists()


def test_stored_names_that_would_be_one_are_left_as_they_are(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    stored = {"_orig_mod.weight": torch.ones(1, 1), "_checkpoint_wrapped_module.weight": torch.zeros(1, 1)}
    checkpoint.save(tmp_path / "c", {"m": stored})
    with pytest.raises(MismatchError, match=r"m\._orig_mod\.weight"):
        checkpoint.load(tmp_path / "c", {"m": model})
    checkpoint.save(tmp_path / "d", {"m": {"weight": torch.full((1, 1), 2.0), "_orig_mod.weight": torch.ones(1, 1)}})
    report = checkpoint.load(tmp_path / "d", {"m": model}, strict=False)
    assert model.weight == 2 and report.unexpected == ("m._orig_mod.weight",)


def test_a_module_that_is_checked_first_gets_its_own_names(tmp_path):
    class Checked(nn.Linear):
        def check_state_dict(self, state_dict):
            seen.append(sorted(state_dict))

    seen = []
    module = Checked(1, 1)
    wrapped = nn.Sequential(compiled(module))
    wrapped.check_state_dict = lambda state_dict: seen.append(sorted(state_dict))
    checkpoint.save(tmp_path / "c", {"m": wrapped})
    checkpoint.load(tmp_path / "c", {"m": wrapped})
    assert seen == [["0._orig_mod.bias", "0._orig_mod.weight"]]


def test_state_that_is_no_tensor(tmp_path):
    class Extra(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def get_extra_state(self):
            return {"number": self.number}

        def set_extra_state(self, state):
            self.number = state["number"]

    for number, (saved, loaded) in enumerate(
        [(compiled(Extra(3)), Extra(0)), (Extra(3), compiled(Extra(0))), (compiled(Extra(3)), compiled(Extra(0)))]
    ):
        checkpoint.save(tmp_path / str(number), {"m": saved})
        checkpoint.load(tmp_path / str(number), {"m": loaded})
        assert loaded.state_dict() in ({"_extra_state": {"number": 3}}, {"_orig_mod._extra_state": {"number": 3}})


def test_names_of_other_things_stay(tmp_path):
    app = {"m": {"_orig_mod.x": torch.ones(1)}, "module.y": torch.ones(1), "_orig_mod.z": 3}
    assert sorted(flatten(app).leaves) == ["_orig_mod.z", "m._orig_mod.x", "module.y"]


@pytest.mark.parametrize(
    ("stored", "own", "expected"),
    [
        (["module.a", "module.b"], ["a", "b"], {"module.a": "a", "module.b": "b"}),
        (["module.a", "b"], ["a", "b"], {}),  # DistributedDataParallel would have been before both
        (["module.a", "module.module.b"], ["a", "module.b"], {"module.a": "a", "module.module.b": "module.b"}),
        (["e.module.a", "b"], ["e.a", "b"], {"e.module.a": "e.a"}),
        (["module.e.module.a"], ["e.module.a"], {"module.e.module.a": "e.module.a"}),
        (["module.e.module.a"], ["e.a"], {"module.e.module.a": "e.a"}),
        (["module.a"], ["module.a", "a"], {}),
        (["x.module.a"], ["b"], {}),
        (["_orig_mod.module.a"], ["a"], {"_orig_mod.module.a": "a"}),
        (["_orig_mod.a", "a"], ["a"], {}),
        (["my_orig_mod.a", "remodule.a"], ["a"], {}),
        (["a.module"], ["a"], {}),
    ],
)
def test_stored_names(stored, own, expected):
    assert names_under_wrappers(stored, own) == expected


@pytest.mark.parametrize(
    ("stored", "own", "expected"),
    [
        (["e.module.a", "b"], ["e.a", "b"], {"e.module.a": "e.a"}),
        (["e.a", "b"], ["e.module.a", "b"], {"e.a": "e.module.a"}),
        (["a", "b"], ["module.a"], {"a": "module.a"}),  # of a rank with a stage that is called "module"
        (["module.a", "b"], ["a"], {"module.a": "a"}),
        (["e.module.f.a"], ["e.f.module.a"], {"e.module.f.a": "e.f.module.a"}),
        (["e.module._orig_mod.a"], ["e.a"], {"e.module._orig_mod.a": "e.a"}),
        (["module.a", "a"], ["module.a"], {}),  # two parameters
        (["e.a"], ["e.module.a", "e.a"], {}),
        (["a.module", "remodule.b"], ["a", "b"], {}),
    ],
)
def test_names_of_parameters_that_are_alike(stored, own, expected):
    assert names_alike(stored, own) == expected


def stepped(model, factory):
    """Returns an app whose optimizer and averages have the same state for a parameter in any wrapper."""
    if factory == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    else:
        optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.5)
    ema = shardopt.EMA(model, 0.5)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 2
    optimizer.step()
    ema.update()
    return {"model": model, "optimizer": optimizer, "ema": ema}


def state_in(app):
    """Returns the state and the average of each parameter of a model, in order."""
    state, averages = app["optimizer"].state, app["ema"].state_dict()["state"].values()
    moments = [{name: each.tolist() for name, each in state[key].items()} for key in app["model"].parameters()]
    return [(each, average["ema"].tolist()) for each, average in zip(moments, averages, strict=False)]


def encoder_and_head(number):
    torch.manual_seed(number)
    return nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 3)})


def encoder_in(wrapper):
    def wrapped(model):
        model["encoder"] = wrapper(model["encoder"])
        return model

    return wrapped


WRAPPERS = [lambda model: model, encoder_in(DistributedDataParallel), encoder_in(nn.DataParallel), nn.DataParallel]


def through_inner_wrappers(path):
    for factory in ("torch", "keyed"):
        for number, before in enumerate(WRAPPERS):
            app = stepped(before(encoder_and_head(0)), factory)
            checkpoint.save(f"{path}/{factory}{number}", app)
            with checkpoint.open(f"{path}/{factory}{number}") as reader:
                assert {"model.encoder.weight", "ema.state.encoder.weight.ema"} <= {*reader.keys()}
            for after in WRAPPERS:
                other = stepped(after(encoder_and_head(1)), factory)
                assert state_in(other) != state_in(app)
                checkpoint.load(f"{path}/{factory}{number}", other)
                assert state_in(other) == state_in(app)
                new = after(encoder_and_head(1))
                other = {"model": new, "optimizer": shardopt.keyed("adamw", new.named_parameters(), lr=0.5)}
                checkpoint.load(f"{path}/{factory}{number}", other, select="^(model|optimizer)", init_state=True)
                assert state_in(other | {"ema": app["ema"]}) == state_in(app)


def test_optimizers_and_averages_resume_when_wrappers_come_and_go(tmp_path):
    run_ranks(2, through_inner_wrappers, str(tmp_path))


def test_averages_take_state_by_names_that_differ_by_wrappers():
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))
    ema = shardopt.EMA(model)
    early = {**ema.state_dict()}
    early["state"] = {name.replace("0.", "0.module.", 1): each for name, each in early["state"].items()}
    assert early["state"].keys() > {"0.module.weight", "1.weight"}
    early["state"]["0.module.weight"] = {name: each + 1 for name, each in early["state"]["0.module.weight"].items()}
    wanted = {name: each.clone() for name, each in early["state"]["0.module.weight"].items()}
    ema.check_state_dict(early)
    ema.load_state_dict(early)
    for name, each in ema.state_dict()["state"]["0.weight"].items():
        assert torch.equal(each, wanted[name])


def test_averages_that_were_saved_with_the_names_of_wrappers_load(tmp_path):
    state = stepped(encoder_and_head(0), "keyed")["ema"].state_dict()["state"]
    early = {name.replace("encoder.", "encoder.module."): each for name, each in state.items()}
    checkpoint.save(tmp_path / "c", {"ema": {"state": early}})
    ema = shardopt.EMA(encoder_and_head(1), 0.5)
    checkpoint.load(tmp_path / "c", {"ema": ema})
    assert str(ema.state_dict()["state"]) == str(state)


def in_stages(path, is_saved):
    """Each rank has a stage; of one all parameters are under a module that is really called "module"."""
    torch.manual_seed(0 if is_saved else 1)
    stages = [("module", nn.Linear(2, 2)), ("head", nn.Linear(2, 3))]
    if dist.get_world_size() == 2:
        stages = [stages[dist.get_rank()]]
    app = stepped(nn.ModuleDict(dict(stages)), "keyed")
    if is_saved:
        checkpoint.save(path, app)
    else:
        checkpoint.load(path, app)
    return state_in(app)


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1), (2, 2)])
def test_a_stage_whose_only_module_is_called_module(tmp_path, saving, loading):
    saved = run_ranks(saving, in_stages, str(tmp_path / "c"), is_saved=True)
    loaded = run_ranks(loading, in_stages, str(tmp_path / "c"), is_saved=False)
    assert [*chain(*loaded)] == [*chain(*saved)]


def test_a_look_at_names_without_wrappers_is_all_there_is():
    class Unlooked(nn.Module):
        def named_modules(self, *args, **kwargs):
            raise AssertionError("walked through all modules")

    assert plain_names_in(Unlooked(), [f"layers.{i}.weight" for i in range(5)]) == {}
    assert plain_name("a._orig_mod.b._checkpoint_wrapped_module.c") == "a.b.c"


@pytest.mark.parametrize("tied", [False, True])
def test_names_of_parameters_that_fully_shard_has_gathered(tied):
    """A forward without a backward, as of an evaluation, leaves copies in their place until the model's state is made.

    That comes later than the optimizer's in an app that has the optimizer first.
    """
    with fake_rank(0, 1):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        if tied:
            model[2].weight = model[1].weight
        for module in (model[0], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        optimizer, names = torch.optim.Adam(model.parameters()), dict(model.named_parameters())
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert {*map(id, model.parameters())} != {*map(id, names.values())}
        flat = flatten({"optimizer": optimizer, "model": model})
    prefix = "optimizer.param_groups."
    assert [key.removeprefix(prefix) for key in flat.leaves if key.startswith(prefix)] == [*names]
