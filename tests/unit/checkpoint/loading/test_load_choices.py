"""Choices of a load: strictness by kind, selection, renaming, conversion, verification first."""

import re

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import CorruptionError, LayoutError, MismatchError, OptionError, PartialLoadError


def model_and_optimizer(init=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    if init:
        optimizer.init_state()
    return model, optimizer


def torchs_adam(model):
    return torch.optim.Adam(model.parameters())


def train(model, optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def app_of(model, optimizer):
    return {"model": model, "optimizer": optimizer, "step": 0}


def bits(app):
    flat = [value.clone() for value in app["model"].state_dict().values()]
    for entries in app["optimizer"].state_dict()["state"].values():
        flat += [value.clone() for value in entries.values()]
    return flat


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def saved(tmp_path):
    app = app_of(*model_and_optimizer())
    train(app["model"], app["optimizer"])
    app["step"] = 1
    checkpoint.save(tmp_path / "c", app)
    return tmp_path / "c", bits(app)


def test_state_into_an_optimizer_without_is_one_error_that_names_init_state(saved):
    app = app_of(*model_and_optimizer(init=False))
    before = bits(app)
    with pytest.raises(MismatchError, match="init_state") as caught:
        checkpoint.load(saved[0], app)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].key == "optimizer.state"
    assert same(bits(app), before)


def test_no_state_into_an_optimizer_with_state_is_one_error(tmp_path):
    checkpoint.save(tmp_path / "c", app_of(*model_and_optimizer(init=False)))
    app = app_of(*model_and_optimizer())
    with pytest.raises(MismatchError, match="init_state") as caught:
        checkpoint.load(tmp_path / "c", app)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("optimizer_of", [lambda net: shardopt.keyed("adam", net.named_parameters()), torchs_adam])
def test_a_lazy_module_is_refused_by_name_before_state_is_made_for_it(tmp_path, optimizer_of):
    net = torch.nn.LazyLinear(2)
    net(torch.ones(1, 3)).sum().backward()
    optimizer = optimizer_of(net)
    optimizer.step()
    checkpoint.save(tmp_path / "c", app_of(net, optimizer))
    lazy = torch.nn.LazyLinear(2)
    app = app_of(lazy, optimizer_of(lazy))
    with pytest.raises(LayoutError, match=r"weight: found a lazy parameter.*run the module once before"):
        checkpoint.load(tmp_path / "c", app, init_state=True)


@pytest.mark.parametrize("stepped", [True, False])
def test_a_torch_optimizer_that_never_stepped(tmp_path, stepped):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    if stepped:
        weight.sum().backward()
        optimizer.step()
    checkpoint.save(tmp_path / "c", {"optimizer": optimizer, "w": weight})
    other = torch.optim.Adam([weight])
    if not stepped:
        weight.sum().backward()
        other.step()
    with pytest.raises(MismatchError, match="init_state") as caught:
        checkpoint.load(tmp_path / "c", {"optimizer": other, "w": weight})
    assert len(caught.value.problems) == 1


def test_one_sided_optimizer_state_may_be_left(saved):
    app = app_of(*model_and_optimizer(init=False))
    report = checkpoint.load(saved[0], app, strict=Strictness(uninitialized="ignore"))
    assert app["step"] == 1
    assert "model.0.weight" in report.loaded
    assert not any(key.startswith("optimizer.") for key in report.loaded)
    train(app["model"], app["optimizer"])
    with pytest.warns(UserWarning, match="never initialized"):
        checkpoint.load(saved[0], app_of(*model_and_optimizer(False)), strict=Strictness(uninitialized="warn"))


@pytest.mark.parametrize("in_model", [True, False])
def test_a_group_that_the_run_added_is_told_of_first_where_the_model_has_its_parameters(tmp_path, in_model):
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        return {"model": model, "optimizer": shardopt.keyed("adam", model[0].named_parameters("0"))}

    app = make()
    app["optimizer"].add_param_group({"params": dict(app["model"][1].named_parameters("1"))})
    app["optimizer"].init_state()
    checkpoint.save(tmp_path / "grown", app)
    app = make()
    if not in_model:
        app["model"] = app["model"][:1]
    with pytest.raises(MismatchError) as error:
        checkpoint.load(tmp_path / "grown", app, init_state=True)
    told = [each.key for each in error.value.problems if "call add_param_group(" in each.remedy]
    if not in_model:
        assert told == []
        return
    assert told == [each.key for each in error.value.problems[:2]]
    assert set(told) == {"optimizer.param_groups.1.weight", "optimizer.param_groups.1.bias"}
    app["optimizer"].add_param_group({"params": dict(app["model"][1].named_parameters("1"))})
    checkpoint.load(tmp_path / "grown", app, init_state=True)


def test_missing_and_unexpected_have_a_choice_each(saved):
    app = app_of(*model_and_optimizer()) | {"extra": torch.full((2,), 5.0)}
    del app["step"]
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(saved[0], app)
    assert {problem.key for problem in caught.value.problems} == {"extra", "step"}
    with pytest.raises(MismatchError, match="extra"):
        checkpoint.load(saved[0], app, strict=Strictness(unexpected="ignore"))
    with pytest.warns(UserWarning, match="extra"):
        report = checkpoint.load(saved[0], app, strict=Strictness(unexpected="ignore", missing="warn"))
    assert report.missing == ("extra",)
    assert report.unexpected == ("step",)
    assert app["extra"].tolist() == [5.0, 5.0]
    assert same(bits(app), saved[1])


def test_a_regex_lets_those_keys_be_missing_in_which_it_is_found(saved, caplog):
    adapters = {"q.lora_A.weight": torch.ones(2), "q.lora_B.weight": torch.zeros(2)}
    app = app_of(*model_and_optimizer()) | {"adapters": adapters, "other": torch.full((2,), 5.0)}
    before = bits(app)
    only = Strictness(missing=re.compile(r"\.lora_[AB]\."))
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(saved[0], app, strict=only)
    assert [problem.key for problem in caught.value.problems] == ["other"] and same(bits(app), before)
    del app["other"]
    with caplog.at_level("INFO", logger="shardopt"):
        report = checkpoint.load(saved[0], app, strict=only)
    assert report.missing == ("adapters.q.lora_A.weight", "adapters.q.lora_B.weight")
    assert "2 keys of the app that the checkpoint has not (adapters.q.lora_A.weight, " in caplog.text
    assert app["step"] == 1 and adapters["q.lora_A.weight"].all()
    checkpoint.save(saved[0].parent / "with", app)
    assert checkpoint.load(saved[0].parent / "with", app, strict=only).missing == ()  # as a program that is run again


def test_a_regex_for_missing_keys_that_is_found_in_none_is_refused(saved):
    app = app_of(*model_and_optimizer())
    before = bits(app)
    for select in (None, r"^model\."):
        with pytest.raises(OptionError, match=r"'lora', which is found in no key of the app.*correct the regex"):
            checkpoint.load(saved[0], app, strict=Strictness(missing=re.compile("lora")), select=select)
    assert same(bits(app), before)
    with pytest.raises(OptionError):  # not among those that are loaded
        checkpoint.load(saved[0], app, strict=Strictness(missing=re.compile("exp_avg")), select=r"^model\.")


def test_a_regex_lets_options_of_groups_be_missing(tmp_path):
    plain, scheduled = model_and_optimizer(), model_and_optimizer()
    checkpoint.save(tmp_path / "c", app_of(*plain))
    torch.optim.lr_scheduler.OneCycleLR(scheduled[1], max_lr=0.5, total_steps=20)
    with pytest.raises(MismatchError, match="max_lr"):
        few = Strictness(missing=re.compile(r"param_groups\..*\.initial_lr$"))
        checkpoint.load(tmp_path / "c", app_of(*scheduled), strict=few)
    added = Strictness(missing=re.compile(r"\.param_groups\..*\.(initial_lr|(max|min)_(lr|momentum)|base_momentum)$"))
    checkpoint.load(tmp_path / "c", app_of(*scheduled), strict=added)
    assert scheduled[1].param_groups[0]["max_lr"] == 0.5


def test_conversion_only_on_request_and_only_of_inexact_dtypes(tmp_path):
    numbers = torch.arange(300_000, dtype=torch.float32).reshape(600, 500) / 7
    checkpoint.save(tmp_path / "c", {"x": numbers, "n": torch.arange(3)})
    app = {"x": torch.zeros(600, 500, dtype=torch.bfloat16), "n": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(MismatchError, match="Strictness"):
        checkpoint.load(tmp_path / "c", app)
    report = checkpoint.load(tmp_path / "c", app, strict=Strictness(dtype="cast"))
    assert report.cast == ("x",)
    assert torch.equal(app["x"], numbers.to(torch.bfloat16))
    with pytest.raises(MismatchError, match="int64"):
        checkpoint.load(tmp_path / "c", {"x": app["x"], "n": torch.zeros(3)}, strict=Strictness(dtype="cast"))


def test_only_what_is_selected_is_loaded(saved):
    app = app_of(*model_and_optimizer())
    before = app["optimizer"].state_dict()["state"]["0.weight"]["exp_avg"].clone()
    report = checkpoint.load(saved[0], app, select=r"^model\.")
    assert sorted(report.loaded) == ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight"]
    assert report.missing == report.unexpected == ()
    assert app["step"] == 0
    assert torch.equal(app["optimizer"].state_dict()["state"]["0.weight"]["exp_avg"], before)
    train(app["model"], app["optimizer"])
    checkpoint.load(saved[0], app, select=r"exp_avg|\.step$")
    assert same(bits(app)[4:], saved[1][4:])


def test_keys_are_renamed_by_rules(tmp_path):
    checkpoint.save(tmp_path / "c", {"model": {"module.a": torch.ones(3), "module.b": torch.zeros(2)}, "n": 3})
    app = {"net": {"a": torch.zeros(3), "b": torch.ones(2)}, "n": 0}
    report = checkpoint.load(tmp_path / "c", app, rename={r"^model\.module\.": "net."})
    assert app["net"]["a"].tolist() == [1.0] * 3
    assert app["net"]["b"].tolist() == [0.0] * 2
    assert report.renamed == {"net.a": "model.module.a", "net.b": "model.module.b"}
    with pytest.raises(MismatchError, match="one name"):
        checkpoint.load(tmp_path / "c", app, rename={r"module\.[ab]": "a"})


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="missing"):
        Strictness(missing="maybe")
    with pytest.raises(ValueError, match="unexpected"):
        Strictness(unexpected=re.compile("a"))


def flip_last_byte_of(path, key):
    (file,) = path.glob("*.safetensors")
    with checkpoint.open(path) as reader:
        (wanted,) = reader.requests([(key, shardopt.sharding.view.view_of(reader.read(key)).pieces)])
    data = bytearray(file.read_bytes())
    data[wanted.entry.end - 1] ^= 1
    file.write_bytes(data)


def test_damage_met_in_the_middle_keeps_the_optimizer_from_stepping(saved):
    path, expected = saved
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    flip_last_byte_of(path, "optimizer.state.1.weight.exp_avg")
    app = app_of(*model_and_optimizer())
    with pytest.raises(CorruptionError, match="exp_avg") as caught:
        checkpoint.load(path, app)
    assert "may be loaded in part, and optimizers in it refuse to step" in caught.value.message
    with pytest.raises(PartialLoadError, match="load it again"):
        train(app["model"], app["optimizer"])
    for name, data in whole.items():
        (path / name).write_bytes(data)
    app["optimizer"].zero_grad()
    checkpoint.load(path, app)
    assert same(bits(app), expected)
    train(app["model"], app["optimizer"])


def test_transactional_load_finds_damage_before_anything_changes(saved):
    path, _ = saved
    flip_last_byte_of(path, "optimizer.state.1.weight.exp_avg")
    app = app_of(*model_and_optimizer())
    before = bits(app)
    with pytest.raises(CorruptionError, match="this load changed nothing"):
        checkpoint.load(path, app, transactional=True)
    assert same(bits(app), before)
    train(app["model"], app["optimizer"])


def test_damage_of_several_tensors_is_listed_in_the_order_of_the_files(tmp_path):
    """The first of them is the one that a load which does not verify first stops at."""
    names = ["a", "b", "c", "d"]
    checkpoint.save(tmp_path, {name: torch.ones(40_000) for name in names})
    for name in "bcd":
        flip_last_byte_of(tmp_path, name)
    for order in (names, names[::-1]):
        app = {name: torch.zeros(40_000) for name in order}
        with pytest.raises(CorruptionError) as verified:
            checkpoint.load(tmp_path, app, transactional=True)
        assert [re.search(r"\b([bcd])\b", str(each)).group() for each in verified.value.problems] == ["b", "c", "d"]
        with pytest.raises(CorruptionError) as met:
            checkpoint.load(tmp_path, app)
        assert str(met.value.problems[0]) == str(verified.value.problems[0])


@pytest.mark.parametrize("init", [True, False])
def test_damage_of_a_manifest_or_a_header_says_that_nothing_was_changed(saved, init):
    path, _ = saved
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
        app = app_of(*model_and_optimizer(init))
        before = bits(app)
        with pytest.raises(CorruptionError) as caught:
            checkpoint.load(path, app, init_state=True)
        assert caught.value.message.endswith("; this load changed nothing")
        assert str(caught.value).startswith(caught.value.message)
        assert same(bits(app), before)
        train(app["model"], app["optimizer"])
        file.write_bytes(whole)


@pytest.mark.parametrize("make", [torchs_adam, lambda model: shardopt.keyed("adam", model.named_parameters())])
def test_a_file_of_only_an_optimizers_state_loads_by_the_names_of_the_model_in_the_app(tmp_path, make):
    model, _ = model_and_optimizer()
    before = torchs_adam(model)
    train(model, before)
    torch.save(before.state_dict(), tmp_path / "optimizer.pt")
    fresh, _ = model_and_optimizer()
    app = {"model": fresh, "optimizer": make(fresh), "step": 7}
    only = {"rename": {r"^": "optimizer."}, "select": r"^optimizer\."}
    checkpoint.load(tmp_path / "optimizer.pt", app, init_state=True, **only)
    assert app["step"] == 7 and not torch.equal(fresh[0].weight, model[0].weight)
    for stepped, parameter in zip(model.parameters(), fresh.parameters(), strict=True):
        for entry, value in before.state[stepped].items():
            assert torch.equal(app["optimizer"].state[parameter][entry], value)


def test_another_head_is_left_out_by_the_regex_that_the_error_names(tmp_path):
    def net(classes):
        model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 3), "head": torch.nn.Linear(3, classes)})
        model.scale = torch.nn.Parameter(torch.ones(classes))
        return model

    saved, model = net(5), net(2)
    checkpoint.save(tmp_path / "c", {"net": saved})
    rename = {r"^net\.": "model."}
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", {"model": model}, strict=False, rename=rename)
    regexes = {re.search(r'leave it as it is with skip=r"(.+)"$', each.remedy)[1] for each in caught.value.problems}
    assert regexes == {r"^net\.head\.", r"^net\.scale$"}
    report = checkpoint.load(tmp_path / "c", {"model": model}, strict=False, rename=rename, skip="|".join(regexes))
    assert sorted(report.loaded) == ["model.body.bias", "model.body.weight"]
    assert torch.equal(model["body"].weight, saved["body"].weight)
    with pytest.raises(MismatchError, match=r"(?s)^(?!.*skip=)"):  # where what is missing does not pass either
        checkpoint.load(tmp_path / "c", {"model": model}, rename=rename)


def of_a_run(classes, init=True):
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 3), "head": torch.nn.Linear(3, classes)})
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    if init:
        optimizer.init_state()
    return {"optimizer": optimizer, "model": model, "step": 1}


def test_a_head_that_does_not_fit_is_told_of_before_what_the_app_lacks(tmp_path):
    """These were a line for each key of the optimizer, with `add_param_group`, and the head behind the twentieth."""
    checkpoint.save(tmp_path / "c", of_a_run(5))
    app = {"model": of_a_run(2)["model"]}
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", app)
    told, first = (
        [(each.key, each.found, each.required) for each in caught.value.problems],
        "optimizer.state.body.weight.step",
    )
    assert told == [
        ("model.head.weight", "a tensor of float32 [5, 3]", "a tensor of float32 [2, 3]"),
        ("model.head.bias", "a tensor of float32 [5]", "a tensor of float32 [2]"),
        ("optimizer.*", f"16 keys in the checkpoint, such as {first}", 'an entry "optimizer" in the app'),
        ("step", "a plain value (int) in the checkpoint", 'an entry "step" in the app'),
    ]
    assert "add_param_group" not in str(caught.value)
    remedy = r'to load only what both have, pass select=r"^model(\.|$)"; '
    assert all(each.remedy.startswith(remedy) for each in caught.value.problems[2:])
    report = checkpoint.compare(tmp_path / "c", app)
    assert report.differing == ("model.head.weight", "model.head.bias")
    assert "optimizer.state.body.weight.exp_avg" in report.unexpected


def test_an_entry_that_passes_with_a_warning_has_one(tmp_path):
    model, optimizer = model_and_optimizer()
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    checkpoint.save(tmp_path / "m", {"model": model})
    passing = Strictness(unexpected="warn", missing="warn")
    with pytest.warns(UserWarning, match=r"optimizer\.\*: found 16 keys in the checkpoint, such as ") as caught:
        report = checkpoint.load(tmp_path / "c", {"model": model}, strict=passing)
    assert (len(caught), len(report.unexpected)) == (1, 16)
    with pytest.warns(UserWarning, match=r"optimizer\.\*: found nothing in the checkpoint; required 16 keys") as caught:
        report = checkpoint.load(tmp_path / "m", {"model": model, "optimizer": optimizer}, strict=passing)
    assert (len(caught), len(report.missing)) == (1, 16)


def test_the_regex_of_what_both_have_is_of_their_names_also_of_a_single_one(tmp_path):
    checkpoint.save(tmp_path / "c", {"model (1": {"x": torch.ones(1)}, "other": {"y": 1, "z": 2}})
    app = {"model (1": {"x": torch.zeros(1)}}
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", app)
    (regex,) = re.findall(r'select=r"(.*?)"', str(caught.value))
    assert checkpoint.load(tmp_path / "c", app, select=regex).loaded == ("model (1.x",)


def test_what_has_another_name_is_renamed_and_not_selected(tmp_path):
    """All under one prefix, as what DCP saved of an object "app"."""
    saved = of_a_run(5)
    checkpoint.save(tmp_path / "c", {"app": {key: saved.pop(key) for key in ("model", "optimizer")}, **saved})
    app = of_a_run(5)
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", app)
    assert 'the missing names after rename={r"^app\\.": ""}.\n' in str(caught.value)
    assert [each.key for each in caught.value.problems] == ["model.*", "optimizer.*", "app.*"]
    assert [each.remedy[:10] for each in caught.value.problems] == ["give its o", "give its o", "give its n"]
    checkpoint.load(tmp_path / "c", app, rename={r"^app\.": ""})


def test_a_follower_is_not_advised_to_select(tmp_path):
    app = of_a_run(5)
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, app, force=True)
    model = of_a_run(5)["model"]
    rename = {r"^model\.": ""}
    for options in ({}, {"rename": rename}):
        with pytest.raises(MismatchError) as caught:
            checkpoint.Follower(tmp_path, model, **options).update()
        assert "optimizer.*: found 16 keys" in str(caught.value)
        assert "select=" not in str(caught.value) and 'Strictness(unexpected="ignore")' in str(caught.value)
    follower = checkpoint.Follower(tmp_path, model, rename=rename, strict=Strictness(unexpected="ignore"))
    assert follower.update().step == 1 and torch.equal(model["head"].weight, app["model"]["head"].weight)
