"""Parameter groups by pattern: every parameter lands exactly once, and what is mistaken is named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardopt
from shardopt import checkpoint
from shardopt.errors import AlgorithmError, MismatchError, StateError
from shardopt.optim.state_dict.groups import by_pattern
from tests.support.fake_rank import fake_rank


def parameters(*names):
    return {name: torch.nn.Parameter(torch.ones(2)) for name in names}


NAMES = ("blocks.0.attention.weight", "blocks.0.norm.weight", "blocks.0.norm.bias", "head.weight")


def grouped(groups, names=NAMES, **defaults):
    optimizer = shardopt.keyed("adamw", parameters(*names), groups=groups, **defaults)
    names_of = {parameter: name for name, parameter in optimizer.params.items()}
    return [([names_of[p] for p in group["params"]], group) for group in optimizer.param_groups]


def test_the_first_match_wins_and_the_rest_has_the_defaults():
    (norms, none), (heads, small), (rest, default) = grouped(
        [{"match": "norm|bias", "weight_decay": 0.0}, {"match": r"^head|norm", "lr": 0.5}],
        lr=0.1,
        weight_decay=0.2,
    )
    assert norms == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert heads == ["head.weight"]
    assert rest == ["blocks.0.attention.weight"]
    assert [(g["lr"], g["weight_decay"]) for g in (none, small, default)] == [(0.1, 0.0), (0.5, 0.2), (0.1, 0.2)]


WRAPPED = {
    "blocks.0._checkpoint_wrapped_module.weight": "blocks.0.weight",
    "_orig_mod.blocks.1._checkpoint_wrapped_module._orig_mod.bias": "blocks.1.bias",
    "_fsdp_wrapped_module.head.weight": "head.weight",
    "my_orig_mod.weight": "my_orig_mod.weight",
    "tail._orig_mod": "tail._orig_mod",
}


def test_names_are_without_those_of_wrappers():
    assert [names for names, _ in grouped([{"match": r"^(blocks\.\d\.|head\.|my|tail)"}], WRAPPED)] == [
        list(WRAPPED.values()),
        [],
    ]
    optimizer = shardopt.keyed("sgd", parameters("weight"))
    optimizer.add_param_group({"params": parameters("_orig_mod.bias")})
    assert list(optimizer.params) == ["weight", "bias"]
    with pytest.raises(StateError, match="added twice"):
        optimizer.add_param_group({"params": parameters("_orig_mod.weight")})


def test_a_group_for_the_rest_stands_last_also_where_nothing_is_left():
    assert [names for names, _ in grouped([{"match": "."}])] == [list(NAMES), []]
    assert [names for names, _ in grouped(None)] == [list(NAMES)]


@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=6, unique=True),
    st.lists(st.sampled_from(["a", "b", "^a", r"\.", "b$", "a.*b", "."]), max_size=4),
)
def test_every_parameter_lands_exactly_once(names, patterns):
    params = parameters(*names)
    groups, _, unmatched = by_pattern(params, [{"match": pattern} for pattern in patterns])
    landed = [name for _, members in groups for name in members]
    assert sorted(landed) == sorted(names)
    empty = [f"groups[{i}]" for i, (_, members) in enumerate(groups[:-1]) if not members]
    assert [problem.key for problem in unmatched] == empty and len(groups) == len(patterns) + 1


STAGES = [{"match": r"^first", "lr": 0.5}, {"match": r"^last", "algorithm": "sgd", "momentum": 0.9, "lr": 0.25}]


@pytest.mark.parametrize("names", [("first.weight",), ("last.weight",), ("middle.weight",), ()])
def test_groups_keep_their_places_on_every_rank(names):
    """Whatever a rank of several holds, also nothing."""
    with fake_rank(0, 2):
        optimizer = shardopt.keyed("adamw", parameters(*names), lr=0.125, groups=STAGES)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125, 0.25]
        for parameter in optimizer.params.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        saved = optimizer.state_dict()
        assert sorted(name for group in saved["param_groups"] for name in group["params"]) == list(names)
        optimizer.load_state_dict(saved)
        missing = [i for i, pattern in enumerate(("first", "last")) if not any(pattern in name for name in names)]
        assert [problem.key for problem in optimizer.unmatched_patterns()] == [f"groups[{i}]" for i in missing]


def test_options_of_a_group_without_parameters_are_loaded_by_its_place():
    with fake_rank(0, 2):
        optimizer, other = (shardopt.keyed("sgd", parameters("last"), lr=0.5, groups=STAGES[:1]) for _ in range(2))
        optimizer.param_groups[0]["lr"] = 0.0625
        other.load_state_dict(optimizer.state_dict())
        assert [group["lr"] for group in other.param_groups] == [0.0625, 0.5]


@pytest.mark.parametrize("groups", [STAGES, [STAGES[0], {"match": r"^last", "lr": 0.25}]])
def test_options_of_other_ranks_go_to_the_groups_of_their_patterns_alone(groups):
    """However many sets of them there are: by place they would go to a group that has nothing to do with them."""
    with fake_rank(0, 2):
        optimizer = shardopt.keyed("adamw", parameters("first"), lr=0.125, groups=groups)
        position = [group["lr"] for group in optimizer.param_groups].index(0.25)
        last = {**optimizer.state_dict()["param_groups"][position], "lr": 0.0625}
        last.pop("untouched", None)
        for count in range(1, 4):
            made = shardopt.keyed("adamw", parameters("first"), lr=0.125, groups=groups)
            saved = made.state_dict()
            own = [group for group in saved["param_groups"] if group["params"]]
            elsewhere = [{**last, "elsewhere": [f"last.{number}"]} for number in range(count)]
            made.load_state_dict({**saved, "param_groups": own + elsewhere})
            rates = [group["lr"] for group in made.param_groups]
            assert sorted(rates) == [0.0625, 0.125, 0.5] and rates[position] == 0.0625


def test_a_group_takes_the_options_that_all_of_its_parameters_have():
    apart = shardopt.keyed("adamw", parameters("a", "b", "c"), groups=[{"match": "a", "lr": 0.5}, {"match": "b"}])
    saved = apart.state_dict()
    together = shardopt.keyed("adamw", parameters("a", "b", "c"), groups=[{"match": "b|c", "lr": 0.25}])
    together.load_state_dict(saved)
    assert [group["lr"] for group in together.param_groups] == [0.001, 0.5]
    one = shardopt.keyed("adamw", parameters("a", "b", "c"))
    with pytest.raises(
        MismatchError, match=r"param_groups\.a\.lr: found 0\.5 of a; 0\.001 of b, c; required one value"
    ):
        one.load_state_dict(saved)
    one.keep_options("lr")
    one.load_state_dict(saved)


def test_state_of_torchs_optimizers_loads_by_their_names():
    model, twin = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    plain = torch.optim.Adam([{"params": [("bias", model.bias)], "lr": 0.5}, {"params": [("weight", model.weight)]}])
    model(torch.ones(3)).sum().backward()
    plain.step()
    optimizer = shardopt.keyed("adam", twin.named_parameters(), groups=[{"match": "weight"}])
    optimizer.init_state()
    optimizer.load_state_dict(plain.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.5]
    for name, parameter in twin.named_parameters():
        stored = plain.state[model.get_parameter(name)]
        assert all(torch.equal(value, stored[entry]) for entry, value in optimizer.state[parameter].items())


def test_a_pattern_without_a_parameter_is_an_error_that_lists_names():
    with pytest.raises(StateError, match=r"groups\[0\]: found the pattern 'nrom', which is found in no name; .*head"):
        grouped([{"match": "nrom"}])
    taken = r"groups\[1\]: .* whose matches an earlier group took \(blocks\.0\.norm\.bias\)"
    with pytest.raises(StateError, match=taken):
        grouped([{"match": "norm"}, {"match": "bias"}])


@pytest.mark.parametrize("group", [{"lr": 0.1}, {"match": 3}, {"match": "("}])
def test_a_group_without_a_usable_pattern_is_an_error(group):
    with pytest.raises(StateError, match=r"groups\[0\]\.match: found .* required a regular expression"):
        grouped([group])


def test_an_unknown_option_is_an_error_that_names_those_that_exist():
    with pytest.raises(AlgorithmError, match=r"groups\[0\]\.weigth_decay: found an unknown option; .*weight_decay"):
        grouped([{"match": "norm", "weigth_decay": 0.0}])
    with pytest.raises(AlgorithmError, match=r"defaults\.momentum: .* required one of lr, betas, eps"):
        grouped(None, momentum=0.9)


OWN = [{"match": "norm", "lr_scale": 0.5, "name": "norms", "weight_decay": 0.0}]


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}], ids=["torch", "bf16"])
def test_keys_of_the_users_own_are_kept_saved_and_loaded_with_their_group(options, tmp_path):
    def made(scale):
        params = {name: torch.nn.Parameter(torch.ones(8, 8)) for name in ("norm", "w")}
        return shardopt.keyed("adamw", params, groups=[{**OWN[0], "lr_scale": scale}, {"match": "w"}], **options)

    first, second = made(0.5), made(0.25)
    first.add_param_group({"params": {"later": torch.nn.Parameter(torch.ones(2))}, "lr_scale": 2.0})
    second.add_param_group({"params": {"later": torch.nn.Parameter(torch.ones(2))}, "lr_scale": 4.0})
    for parameter in first.params.values():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    checkpoint.save(tmp_path / "saved", {"optimizer": first})
    checkpoint.load(tmp_path / "saved", {"optimizer": second}, init_state=True)
    own = [(group.get("lr_scale"), group.get("name")) for group in second.param_groups]
    assert [each for each in own if each != (None, None)] == [(0.5, "norms"), (2.0, None)]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("weight_decy", "weight_decay"),
        ("beta", "betas"),
        ("learning_rate", "lr"),
        ("LR", "lr"),
        ("foreeach", "foreach"),
    ],
)
def test_a_key_that_looks_like_an_option_is_refused_with_the_option_that_was_meant(written, meant):
    with pytest.raises(AlgorithmError, match=rf"groups\[0\]\.{written}: .*did you mean '{meant}'"):
        grouped([{"match": "norm", written: 0.5}])


def test_options_of_a_group_are_held_against_their_ranges():
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        grouped([{"match": "norm", "lr": -1}])


def test_all_names_of_a_tied_parameter_land_together():
    tied = torch.nn.Parameter(torch.ones(2))
    params = {"embedding": tied, "other": torch.nn.Parameter(torch.ones(2)), "head": tied}
    optimizer = shardopt.keyed("adamw", params, groups=[{"match": "embedding", "lr": 0.5}])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    assert optimizer.param_groups[0]["params"][0] is tied
    assert set(optimizer.params) == {"embedding", "head", "other"}


def test_algorithms_go_by_class_and_by_name():
    for algorithm in (torch.optim.RMSprop, "RMSprop", "rmsprop"):
        assert "KeyedOptimizerWrapper of RMSprop" in repr(shardopt.keyed(algorithm, parameters("w")))
    with pytest.raises(AlgorithmError, match=r"adamm: .* required one of ASGD, AdEMAMix, Adadelta"):
        shardopt.keyed("adamm", parameters("w"))


def test_groups_of_named_parameters_are_groups_as_torch_takes_them():
    def made(optimizer):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
        groups = [
            {"params": model[0].named_parameters("0"), "lr": 0.5},
            {"params": dict(model[1].named_parameters("1")), "weight_decay": 0.0},
            {"params": [*model[2].named_parameters("2")], "betas": (0.5, 0.9)},
        ]
        if optimizer is torch.optim.AdamW:
            groups[1]["params"] = groups[1]["params"].items()
        return model, optimizer(groups, foreach=False)

    trained = []
    for how in (torch.optim.AdamW, lambda groups, **options: shardopt.keyed("adamw", groups, **options)):
        model, optimizer = made(how)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2, 2]
        torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.1, lambda step: 0.2, lambda step: 0.3])
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*trained, rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"][1]["params"] == ["1.bias", "1.weight"]
    _, again = made(lambda groups, **options: shardopt.keyed("adamw", groups, **options))
    again.init_state()
    torch.optim.lr_scheduler.LambdaLR(again, lambda step: 1.0)
    again.load_state_dict(optimizer.state_dict())
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_groups_of_named_parameters_under_wrappers_have_plain_names():
    one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    groups = [{"params": {"module._orig_mod.a": one}}, {"params": {"module.b": two}, "algorithm": "sgd", "lr": 0.1}]
    optimizer = shardopt.keyed("adamw", groups, lr=0.2)
    assert {*optimizer.params} == {"a", "b"}
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([{"params": [torch.ones(2)]}], {}, r"parameters: found a Tensor; required \(name, tensor\)"),
        ([{"params": {"a": torch.ones(2)}}, {"params": {"a": torch.ones(2)}}], {}, "two parameters have one name"),
        ([{"params": {"a": torch.ones(2)}}], {"groups": [{"match": "a"}]}, "found groups by pattern beside groups"),
        ([{"params": {"a": torch.ones(2)}, "rate": 1}], {}, "rate"),
    ],
)
def test_groups_of_parameters_that_do_not_fit_are_refused(groups, options, message):
    with pytest.raises(shardopt.errors.ShardoptError, match=message):
        shardopt.keyed("adamw", groups, **options)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("adamw", {}),
        ("adamw", {"state_dtype": torch.bfloat16}),
        ("sgd", {"momentum": 0.9}),
        ("adafactor", {}),
        ("lion", {}),
        ("lamb", {}),
    ],
)
def test_what_a_group_that_was_taken_out_leaves_is_resumed(tmp_path, algorithm, options):
    def make(is_frozen):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        named = dict(model.named_parameters())
        optimizer = shardopt.keyed(algorithm, {name: named[name] for name in ("0.weight", "0.bias")}, lr=0.1, **options)
        optimizer.add_param_group({"params": {name: named[name] for name in ("1.weight", "1.bias")}})
        groups = [*optimizer.param_groups]
        if is_frozen:
            del optimizer.param_groups[1]
        return {"model": model, "optimizer": optimizer}, groups

    def step(app):
        app["model"](torch.ones(2, 4)).square().mean().backward()
        app["optimizer"].step()
        app["optimizer"].zero_grad(set_to_none=True)

    app, groups = make(False)
    step(app)
    del app["optimizer"].param_groups[1]
    step(app)
    checkpoint.save(tmp_path / "c", app)
    resumed, own = make(True)
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    for each, all_groups in ((app, groups), (resumed, own)):
        each["model"].zero_grad()
        each["optimizer"].param_groups[:] = all_groups  # back again
        step(each)
    for one, other in zip(app["model"].parameters(), resumed["model"].parameters(), strict=True):
        assert torch.equal(one, other)
