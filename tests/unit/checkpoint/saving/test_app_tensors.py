"""An optimizer that steps other tensors than the model's is refused at the save; anything that may be meant is not."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.planning.app_tensors import check_optimizers
from shardopt.errors import StateError
from shardopt.state.flatten import flatten
from tests.harness import run_ranks
from tests.support.fake_rank import as_rank


def make_model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def keyed(model):
    return shardopt.keyed("adam", model.named_parameters(), lr=0.1)


MAKERS = {
    "keyed": keyed,
    "wrapped": lambda model: shardopt.GradientClippingOptimizer(
        keyed(model), clipping=shardopt.GradientClipping.NORM, max_gradient=1.0
    ),
    "combined": lambda model: shardopt.optim.CombinedOptimizer([("first", keyed(model[0])), ("rest", keyed(model[1]))]),
    "named": lambda model: torch.optim.Adam(model.named_parameters()),
    "unnamed": lambda model: torch.optim.Adam(model.parameters()),
    "in groups": lambda model: torch.optim.Adam(
        [{"params": [*model[1].parameters()]}, {"params": [*model[0].parameters()]}]
    ),
}


@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.async_save])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_optimizer_of_a_model_that_was_made_anew(tmp_path, maker, call):
    model = make_model()
    optimizer = MAKERS[maker](model)
    app = {"model": model, "parts": list(model), "optimizer": optimizer}
    pending = call(tmp_path / "own", app)
    if call is checkpoint.async_save:
        pending.result()
    app["model"] = make_model()
    app["parts"] = list(app["model"])
    with pytest.raises(
        StateError, match=r"optimizer: found \d parameters .* '(model|parts\.\d)' has .*fully_shard\(model\)"
    ):
        pending = call(tmp_path / "strange", app)
        pending.result()
    assert not (tmp_path / "strange").exists()


def save_sharded_too_late_and_in_order(path):
    for maker in ("keyed", "unnamed"):
        model = make_model()
        optimizer = MAKERS[maker](model)
        fully_shard(model)
        with pytest.raises(StateError, match=r"fully_shard\(model\)"):
            checkpoint.save(f"{path}/late", {"model": model, "optimizer": optimizer})
        save_in_order(f"{path}/{maker}", maker)


def save_in_order(path, maker):
    model = make_model()
    fully_shard(model)
    optimizer = MAKERS[maker](model)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(1, 2))  # leaves parameters of the root gathered
    checkpoint.save(path, {"model": torch.compile(model, backend="eager"), "optimizer": optimizer})


def test_an_optimizer_that_was_made_before_its_model_was_sharded(tmp_path):
    run_ranks(2, save_sharded_too_late_and_in_order, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"keyed", "unnamed"}


def meant():
    """Apps in which optimizers have other parameters than the modules, and are meant to."""
    model, other = make_model(), make_model()
    yield "part of a model", {"model": model, "optimizer": keyed(model[0])}
    yield "a model whose part is here", {"head": model[1], "optimizer": keyed(model)}
    yield "two models of the same names", {"a": model, "b": other, "of b": keyed(other), "of a": keyed(model)}
    average = copy.deepcopy(model)
    yield "an average beside the model", {"average": average, "model": model, "optimizer": keyed(model)}
    yield "an optimizer alone", {"optimizer": keyed(model)}
    yield "a nested module", {"nets": {"generator": [model]}, "optimizer": keyed(model)}
    masters = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    yield "masters in another precision", {"model": model, "optimizer": shardopt.keyed("adam", masters, lr=0.1)}
    yield "another model, of other shapes", {"model": model, "optimizer": keyed(nn.Sequential(nn.Linear(3, 4)))}
    frozen = make_model().requires_grad_(False)
    yield "a frozen model", {"model": frozen, "optimizer": keyed(frozen)}
    head = make_model()
    head[0].requires_grad_(False)
    yield "a frozen part", {"model": head, "optimizer": keyed(head[1])}
    tied = make_model()
    tied.again = tied[1]
    yield "tied weights", {"model": tied, "optimizer": keyed(tied)}
    compiled = torch.compile(model, backend="eager")
    deep = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    yield "parts with names of the whole", {"model": deep, "of part": keyed(deep[1]), "of other": keyed(deep[:1])}
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    yield "names that begin at 0 again", {"model": layers, "optimizer": keyed(layers[1:])}
    yield "a compiled model", {"model": compiled, "optimizer": keyed(compiled), "same": keyed(model)}
    yield (
        "unnamed, of another model",
        {"model": model, "optimizer": torch.optim.SGD(nn.Linear(5, 5).parameters(), lr=0.1)},
    )
    yield "unnamed, of a part", {"model": model, "optimizer": torch.optim.SGD(model[1].parameters(), lr=0.1)}
    other_state = make_model()
    other_state.state_dict = lambda: {name: t.detach() for name, t in nn.Module.state_dict(other_state).items()}
    yield "a state of its own", {"model": other_state, "optimizer": keyed(other_state)}


def test_what_may_be_meant_is_saved(tmp_path):
    for name, app in meant():
        checkpoint.save(tmp_path / name, app)
        assert checkpoint.verify(tmp_path / name).ok, name


def test_parameters_that_the_app_has_in_a_dict_are_stepped_beside_a_model_of_their_names(tmp_path):
    """As an outer optimizer's, by hand. Those that the app has not are still refused."""
    model = make_model()
    anchors = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    app = {"model": model, "anchors": anchors, "named": shardopt.keyed("sgd", anchors, lr=0.7)}
    checkpoint.save(tmp_path / "held", {**app, "unnamed": torch.optim.SGD(anchors.values())})
    del app["anchors"]
    with pytest.raises(StateError, match="named: found 4 parameters that no module of the app has"):
        checkpoint.save(tmp_path / "strange", app)


class Holder:
    """Saves tensors that it has found in a model, and does not train them."""

    def __init__(self, model):
        self.shadow = list(model.parameters())

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state_dict):
        pass


def test_what_an_object_or_an_optimizer_saves_of_old_parameters_is_no_place_where_the_app_has_them(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    app = {"model": make_model(), "optimizer": optimizer, "holder": Holder(model)}
    for parameter in model.parameters():
        optimizer.state[parameter]["before"] = parameter
    found = r"optimizer: found 4 parameters that no module of the app has \(holder.shadow.0 is one\).* put that module"
    with pytest.raises(StateError, match=found):
        checkpoint.save(tmp_path / "c", app)


class Net(Holder):
    """Has a network, or parameters of its own, and saves them as they are."""

    def __init__(self, **own):
        vars(self).update(own)

    def state_dict(self):
        return {
            name: each if isinstance(each, nn.Parameter) else each.state_dict(keep_vars=True)
            for name, each in vars(self).items()
        }


@pytest.mark.parametrize("make", [keyed, lambda model: torch.optim.SGD(model.parameters())])
def test_the_networks_of_an_object_are_stepped_beside_a_model_of_their_names(tmp_path, make):
    model, other = make_model(), make_model()
    scale = nn.Parameter(torch.ones(2))
    app = {"model": model, "optimizer": make(model), "net": Net(net=other, scale=scale), "of net": make(other)}
    app |= {"bias": nn.ParameterList([nn.Parameter(torch.ones(2))]), "of scale": torch.optim.SGD([scale])}
    checkpoint.save(tmp_path / "c", app)


def test_the_network_of_an_object_may_have_parameters_without_elements(tmp_path):
    """As a rank has of `fully_shard`; a state_dict() has others than these, too, and no address tells which."""
    model, other, third = (nn.ParameterDict({"w": nn.Parameter(torch.ones(0, 3))}) for _ in range(3))
    holder = Net(net=other)
    holder.state_dict = lambda: other.state_dict()
    checkpoint.save(tmp_path / "c", {"model": model, "net": holder, "of net": keyed(other)})
    with pytest.raises(StateError, match="found 1 parameters"):
        checkpoint.save(tmp_path / "d", {"model": model, "net": holder, "of third": keyed(third)})


def test_a_layer_that_was_replaced_after_the_optimizer_was_made(tmp_path):
    model = make_model()
    optimizer = keyed(model)
    model[1] = nn.Linear(3, 1)
    with pytest.raises(StateError, match=r"found 2 parameters .* such as '1\.weight', while 'model' has another one"):
        checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("algorithm", ["adam", "adam and sgd"])
def test_layers_that_change_places_in_the_model(tmp_path, algorithm):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    groups = [{"match": "bias", "algorithm": "sgd"}] if "sgd" in algorithm else None
    optimizer = shardopt.keyed("adam", model.named_parameters(), groups=groups)
    torchs = torch.optim.Adam(model.parameters())
    model[0], model[2] = model[2], model[0]
    checkpoint.save(tmp_path / "torch", {"model": model, "optimizer": torchs})
    with pytest.raises(StateError, match=r"optimizer: found \d parameters, such as '0\.\w+', that 'model' now has"):
        checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    checkpoint.save(tmp_path / "again", {"model": model, "optimizer": keyed(model)})


def test_a_table_that_was_made_larger_after_the_optimizer(tmp_path):
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1))
    optimizer = keyed(model)
    model[0].weight = nn.Parameter(torch.ones(6, 2))
    with pytest.raises(StateError, match=r"found 1 parameters .* such as '0\.weight', while 'model' has another one"):
        checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})


def test_an_optimizer_of_parameters_on_the_meta_device(tmp_path):
    with torch.device("meta"):
        early, model = make_model(), make_model()
    optimizer = keyed(early)
    model.to_empty(device="cpu")
    with pytest.raises(StateError, match=r"found 4 parameters .* such as '0\.weight', while 'model' has another one"):
        checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})


def test_buffers_are_no_parameters(tmp_path):
    model, other = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    with pytest.raises(StateError, match="found 4 parameters"):
        checkpoint.save(tmp_path / "c", {"model": model, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)})


@pytest.mark.parametrize("maker", MAKERS)
def test_averages_are_not_saved_as_the_weights_that_an_optimizer_steps(tmp_path, maker):
    model = make_model()
    app = {"model": model, "optimizer": MAKERS[maker](model)}
    ema = shardopt.EMA(model, decay=0.9)  # and not in the app
    with ema.swap():
        with pytest.raises(StateError, match=r"averages in the place of it.*end `with ema.swap\(\):`"):
            checkpoint.save(tmp_path / "training", app)
        checkpoint.save(tmp_path / "averages", {"model": model})
    checkpoint.save(tmp_path / "training", app)


@pytest.mark.parametrize("maker", ["keyed", "named"])
def test_a_parameter_that_became_a_buffer(tmp_path, maker):
    model = nn.Sequential(nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(2))
    optimizer = MAKERS[maker](model)
    checkpoint.save(tmp_path / "own", {"model": model, "optimizer": optimizer})
    value = model.scale.detach().clone()
    del model.scale
    model.register_buffer("scale", value)
    with pytest.raises(StateError, match=r"optimizer: found 1 parameters .* such as 'scale', while 'model' has"):
        checkpoint.save(tmp_path / "stale", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("rank", range(2))
def test_state_of_this_ranks_rows_as_a_plain_parameter_is_refused(rank):
    """As torchrec's DENSE kernel has it: ranks' rows would be replicas of a small tensor."""
    with as_rank(rank, 2):
        model = nn.Linear(2, 4, bias=False)
        fully_shard(model)
        rows = nn.Parameter(model.weight.to_local().detach())
        optimizer = torch.optim.Adam([("weight", rows)], lr=0.1)
        check_optimizers(flatten({"model": model, "optimizer": optimizer}))
        rows.grad = torch.ones_like(rows)
        optimizer.step()
        with pytest.raises(StateError, match=r"state\.weight: found state of \[2, 2\], .* part of \[4, 2\]"):
            check_optimizers(flatten({"model": model, "optimizer": optimizer}))


def test_masters_under_the_names_of_a_model_with_a_state_dict_of_its_own(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.norm = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16), nn.LayerNorm(2)

        def state_dict(self, *args, **kwargs):
            return {name: each.detach() for name, each in super().state_dict(*args, **kwargs).items()}

    model = Own()
    params = dict(model.named_parameters())
    params["low.weight"] = nn.Parameter(params["low.weight"].detach().float())
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": torch.optim.SGD([*params.items()])})


def test_a_frozen_parameter_in_a_group_with_fewer_names(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*model[0].named_parameters()])
    optimizer.param_groups[0]["params"].append(model[1].weight.requires_grad_(False))
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with checkpoint.open(tmp_path / "c") as reader:
        assert reader.manifest.frozen == ("optimizer.param_groups.1.weight",)
