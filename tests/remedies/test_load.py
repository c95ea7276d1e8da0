"""What the errors of a load advise, followed to the letter, one alternative after the other: then it works."""

import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.checkpoint.rearrange import Drop, Rule
from shardopt.errors import MismatchError
from tests.remedies.following import app_of, assert_same, moments_of, refused, stepped, weights_of

IGNORE = Strictness(unexpected="ignore")


@pytest.fixture
def url(tmp_path):
    return tmp_path / "c"


def saved(url, app, **options):
    checkpoint.save(url, app, **options)
    return app


class Refusing:
    """Takes its state, or does not."""

    def __init__(self):
        self.count, self.refuses = 1, False

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("not now")
        self.count = state["count"]


def test_an_object_that_refuses_its_state_is_mended_or_left_out(url):
    app = saved(url, {"weight": torch.ones(2), "object": Refusing()})
    app["object"].count, app["object"].refuses = 7, True
    app["weight"].zero_()
    refused("mend what it says, and load again, which loads everything anew", checkpoint.load, url, app)
    checkpoint.load(url, {"weight": app["weight"]}, strict=IGNORE)
    assert app["weight"].all()
    app["object"].refuses = False
    checkpoint.load(url, app)
    assert app["object"].count == 1


def test_tied_values_that_differ_load_untied(url):
    saved(url, {"a": 1, "b": 2})
    app = {"a": 0, "b": 0}
    refused("load without tied={...}", checkpoint.load, url, app, tied={"b": "a"})
    checkpoint.load(url, app)
    assert app == {"a": 1, "b": 2}


@pytest.mark.parametrize("form", ["keyed", "torch"])
def test_state_for_an_optimizer_without_is_made_by_the_load_by_a_call_or_a_step(url, form):
    app = saved(url, app_of(form, 2))
    load = (
        "load with init_state=True, or call init_state() before loading (where there is none, take a step; in place of"
        " an optimizer around another, give the app the inner one, which loads this under the same key)"
    )
    refused(load, checkpoint.load, url, app_of(form))
    loaded = app_of(form)
    checkpoint.load(url, loaded, init_state=True)
    other = app_of(form)
    other["optimizer"].init_state() if form == "keyed" else stepped(other, 1)
    checkpoint.load(url, other)
    assert_same(loaded, other)
    assert_same(stepped(app, 1), other)


class Around(torch.optim.Optimizer):
    """An optimizer around another, whose state it gives as its own."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict


def test_of_an_optimizer_around_another_the_inner_one_is_loaded(url):
    app = app_of("torch", 2)
    checkpoint.save(url, {**app, "optimizer": Around(app["optimizer"])})
    fresh = app_of("torch")
    around = {**fresh, "optimizer": Around(fresh["optimizer"])}
    inner = "in place of an optimizer around another, give the app the inner one"
    refused(inner, checkpoint.load, url, around, init_state=True)
    checkpoint.load(url, fresh, init_state=True)
    assert_same(fresh, app)


class Holder:
    """Has optimizers where nobody finds them; of those that are attributes, or in lists that are, state comes back."""

    def __init__(self, optimizer):
        self.optimizers = lambda: [optimizer]

    def state_dict(self):
        return {"optimizers": [each.state_dict() for each in self.optimizers()]}

    def load_state_dict(self, state):
        for each, own in zip(self.optimizers(), state["optimizers"], strict=True):
            each.load_state_dict(own)


@pytest.mark.parametrize("form", ["keyed", "torch"])
def test_an_optimizer_that_an_object_holds_gets_its_state_first_or_is_saved_too(url, form):
    def held(app, too=False):
        return {"model": app["model"], "holder": Holder(app["optimizer"]), **({"too": app["optimizer"]} if too else {})}

    app, fresh = app_of(form, 2), app_of(form)
    checkpoint.save(url, held(app))
    remedy = (
        "if an object of the app holds an optimizer, make its state before loading (init_state(), or a step), or save"
        " and load the optimizer itself too; otherwise "
    )
    refused(remedy, checkpoint.load, url, held(fresh))
    fresh["optimizer"].init_state() if form == "keyed" else stepped(fresh, 1)
    checkpoint.load(url, held(fresh))
    assert_same(fresh, app)
    checkpoint.save(f"{url}-too", held(app, too=True))
    other = app_of(form)
    checkpoint.load(f"{url}-too", held(other, too=True), init_state=True)
    assert_same(other, app)


@pytest.mark.parametrize("form", ["keyed", "torch"])
def test_state_that_was_not_saved_is_made_before_the_save_or_at_the_load(url, form):
    app = saved(url, app_of(form))
    remedy = (
        "load it into an optimizer that was just made and has none yet, or call init_state() before saving (where there"
        " is none, take a step)"
    )
    refused(remedy, checkpoint.load, url, app_of(form, 2))
    for options in ({}, {"init_state": True}):
        loaded = app_of(form)
        checkpoint.load(url, loaded, **options)
        assert weights_of(loaded) == weights_of(app) and not moments_of(loaded)
    before = app_of(form)
    before["optimizer"].init_state() if form == "keyed" else stepped(before, 1)
    saved(url.parent / "d", before)
    loaded = app_of(form, 2)
    checkpoint.load(url.parent / "d", loaded)
    assert_same(loaded, before)


def test_a_scaler_that_was_disabled_is_left_out_or_disabled(url):
    saved(url, {"weight": torch.ones(2), "scaler": torch.amp.GradScaler("cpu", enabled=False)})
    app = {"weight": torch.zeros(2), "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}
    refused("leave it out of the app, and load with …; or make it with enabled=False", checkpoint.load, url, app)
    checkpoint.load(url, {"weight": app["weight"]}, strict=IGNORE)
    assert app["weight"].all() and app["scaler"].get_scale() == 8.0
    checkpoint.load(url, {"weight": app["weight"], "scaler": torch.amp.GradScaler("cpu", enabled=False)})


def test_a_key_that_was_not_saved_is_renamed_removed_left_or_not_selected(url):
    saved(url, {"weight": torch.ones(2)})

    def app(name):
        return {"weight": torch.zeros(2), name: torch.full((2,), 5.0)}

    remedy = (
        "give its old name with rename={...}, remove it from the app, leave it as it is with strict=Strictness("
        'missing="ignore"), or load only some keys by select='
    )
    refused(remedy, checkpoint.load, url, app("extra"))
    for options in ({"strict": Strictness(missing="ignore")}, {"select": "^weight$"}):
        loaded = app("extra")
        checkpoint.load(url, loaded, **options)
        assert loaded["weight"].all() and loaded["extra"][0] == 5
    loaded = app("extra")
    del loaded["extra"]
    checkpoint.load(url, loaded)
    renamed = {"new": torch.zeros(2)}
    refused(remedy, checkpoint.load, url, {**renamed, "weight": torch.zeros(2)})
    checkpoint.load(url, renamed, rename={"^weight$": "new"})
    assert renamed["new"].all()


def test_a_key_that_the_app_has_not_is_renamed_added_left_out_or_not_selected(url):
    saved(url, {"weight": torch.ones(2), "old": torch.full((2,), 5.0)})
    remedy = (
        "give its new name with rename={...}, add it to the app, leave it out with strict=Strictness("
        'unexpected="ignore"), or load only some keys by select='
    )
    refused(remedy, checkpoint.load, url, {"weight": torch.zeros(2)})
    for name, options in (
        ("", {"strict": IGNORE}),
        ("", {"select": "^weight$"}),
        ("new", {"rename": {"^old$": "new"}}),
        ("old", {}),
    ):
        loaded = {"weight": torch.zeros(2), **({name: torch.zeros(2)} if name else {})}
        checkpoint.load(url, loaded, **options)
        assert loaded["weight"].all() and (not name or loaded[name][0] == 5)


def test_entries_that_the_app_lacks_are_one_problem_each(url):
    model = torch.nn.Linear(2, 2)
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    saved(url, {"model": model, "optimizer": optimizer, "step": 7})
    app = {"model": torch.nn.Linear(2, 2)}
    remedy = (
        'to load only what both have, pass select=r"^model(\\.|$)"; to resume, add its object to the app; or leave it '
        'out with strict=Strictness(unexpected="ignore"), or give its new name with rename={...}'
    )
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(url, app)
    assert [(each.key, each.remedy) for each in caught.value.problems] == [("step", remedy), ("optimizer.*", remedy)]
    found = "found 2 keys in the checkpoint, such as optimizer.param_groups.bias"
    assert f'{found}; required an entry "optimizer" in the app' in str(caught.value)
    for options in ({"select": r"^model(\.|$)"}, {"strict": IGNORE}):
        app = {"model": torch.nn.Linear(2, 2)}
        checkpoint.load(url, app, **options)
        assert torch.equal(app["model"].weight, model.weight)
    with checkpoint.Manager(url.parent / "run") as manager:
        manager.save(1, {"model": model, "optimizer": optimizer, "step": 7})
        refused(remedy, manager.restore, {"model": model})  # of the first one


def test_an_entry_that_was_not_saved_is_one_problem(url):
    app = saved(url, app_of("keyed", 1))

    def fresh():
        loaded = app_of("keyed")
        return {**loaded, "ema": shardopt.EMA(loaded["model"], decay=0.5)}

    remedy = (
        'to load only what both have, pass select=r"^(model|optimizer)(\\.|$)"; remove it from the app, leave it as it '
        'is with strict=Strictness(missing="ignore"), or give its old name with rename={...}'
    )
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(url, fresh(), init_state=True)
    (problem,) = caught.value.problems
    assert (problem.key, problem.required, problem.remedy) == ("ema.*", "3 keys, such as ema.state.weight.ema", remedy)
    for options in ({"select": r"^(model|optimizer)(\.|$)"}, {"strict": Strictness(missing="ignore")}):
        loaded = fresh()
        checkpoint.load(url, loaded, init_state=True, **options)
        assert weights_of(loaded) == weights_of(app) and loaded["ema"].n_averaged == 0
    renamed = fresh()
    checkpoint.save(url.parent / "renamed", {("average" if key == "ema" else key): renamed[key] for key in renamed})
    checkpoint.load(url.parent / "renamed", fresh(), rename={r"^average\.": "ema."})


class Strange:
    """Of a class that is not known to a reader of torch's files."""


def test_what_is_not_known_is_skipped(tmp_path):
    torch.save({"weight": torch.ones(2), "args": Strange()}, tmp_path / "a.pt")
    app = {"weight": torch.zeros(2)}
    refused("leave it out with skip=..., a regex of keys", checkpoint.load, tmp_path / "a.pt", app)
    checkpoint.load(tmp_path / "a.pt", app, skip="^args")
    assert app["weight"].all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_lazily_conjugated_tensor_is_skipped_or_saved_resolved(tmp_path):
    lazy = torch.tensor([1j]).conj()
    dcp.save({"weight": torch.ones(2), "x": lazy}, checkpoint_id=tmp_path / "a", no_dist=True)
    app = {"weight": torch.zeros(2), "x": torch.zeros(1, dtype=torch.complex64)}
    remedy = "leave it out with skip=..., or save tensor.resolve_conj().resolve_neg()"
    refused(remedy, checkpoint.load, tmp_path / "a", app)
    checkpoint.load(tmp_path / "a", {"weight": app["weight"]}, skip="^x")
    assert app["weight"].all()
    dcp.save({"weight": torch.ones(2), "x": lazy.resolve_conj().resolve_neg()}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint.load(tmp_path, app)
    assert torch.equal(app["x"], lazy)


def test_a_list_with_gaps_is_not_selected(url):
    saved(url, {"weight": torch.ones(2), "list": [1, torch.ones(1), 3]}, select=r"^(?!list\.0)")
    app = {"weight": torch.zeros(2), "list": []}
    remedy = 'load the rest with select=r"^(?!…(\\.|$))"'
    problem = refused(remedy, checkpoint.load, url, app)
    checkpoint.load(url, app, select=problem.remedy.split('"')[1])
    assert app["weight"].all() and app["list"] == []


def test_a_box_is_read_by_offsets_and_sizes(url):
    saved(url, {"weight": torch.ones(2, 3)})
    with checkpoint.open(url) as reader:
        refused("give a Box(offsets, sizes) within it", reader.read, "weight", (slice(0, 1), slice(0, 3)))
        assert reader.read("weight", checkpoint.Box((0, 0), (1, 3))).shape == (1, 3)


def test_a_module_in_a_file_is_saved_by_its_state_dict(tmp_path):
    model = torch.nn.Linear(2, 2)
    torch.save([model.weight], tmp_path / "a.pt")
    app = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    refused("save state_dict() and not the object itself", checkpoint.load, tmp_path / "a.pt", app)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    checkpoint.load(tmp_path / "a.pt", app)
    assert torch.equal(app["weight"], model.weight)


def test_nothing_in_common_is_renamed_or_the_regex_mended(url):
    saved(url, {"model": {"weight": torch.ones(2)}})
    app = {"net": {"weight": torch.zeros(2)}}
    refused("give names by rename={...}; the checkpoint has model.weight", checkpoint.load, url, app, strict=False)
    checkpoint.load(url, app, rename={"^model": "net"})
    assert app["net"]["weight"].all()
    refused("mend the regex", checkpoint.load, url, app, select="modle")


def test_memory_that_cannot_be_read_into_is_made(url):
    saved(url, {"model": torch.nn.Linear(2, 2)})
    with torch.device("meta"):
        app = {"model": torch.nn.Linear(2, 2)}
    refused("call to_empty(device=...) first", checkpoint.load, url, app)
    app["model"].to_empty(device="cpu")
    checkpoint.load(url, app)
    shared = {"model": {"weight": torch.zeros(1, 2).expand(2, 2), "bias": torch.zeros(2)}}
    refused("call contiguous() first", checkpoint.load, url, shared)
    shared["model"]["weight"] = shared["model"]["weight"].contiguous()
    checkpoint.load(url, shared)
    assert torch.equal(shared["model"]["weight"], app["model"].weight)


def test_a_number_of_another_dtype_is_cast(url):
    saved(url, {"weight": torch.ones(2)})
    app = {"weight": torch.zeros(2, dtype=torch.bfloat16)}
    refused('load it into a tensor of …, or with Strictness(dtype="cast")', checkpoint.load, url, app)
    checkpoint.load(url, app, strict=Strictness(dtype="cast"))
    assert app["weight"].all()


def test_rules_are_given_sizes(url):
    saved(url, {"model": {"qkv": torch.arange(12.0).view(6, 2)}})
    names = ("q", "k", "v")
    app = {"model": {name: torch.zeros(2, 2) for name in names}}
    without = Rule("qkv", names, "n+m+k i -> n i, m i, k i")
    refused("give sizes={...} to the rule", checkpoint.load, url, app, rearrange=[without])
    rule = Rule("qkv", names, "n+m+k i -> n i, m i, k i", sizes=dict.fromkeys("nmk", 2))
    checkpoint.load(url, app, rearrange=[rule])
    assert app["model"]["v"].tolist() == [[8, 9], [10, 11]]


@pytest.mark.parametrize("weights", [{}, {"model": {"qkv": torch.ones(6, 2)}}])
def test_state_of_another_layout_is_left_as_it_was_arranged_or_dropped(url, weights):
    saved(url, {**weights, "optimizer": {"state": {"qkv": {"m": torch.ones(6)}}}, "step": 3})
    rule = Rule("qkv", ("q", "v"), "n+m i -> n i, m i", sizes={"n": 3, "m": 3})

    def rearranged():
        return {**({"model": {name: torch.zeros(3, 2) for name in "qv"}} if weights else {}), "step": 0}

    remedy = "load it into the arrangement that it was saved in, or leave it out with Drop(…) before the rule"
    problem = refused(remedy, checkpoint.load, url, rearranged(), rearrange=[rule])
    assert "Drop('optimizer.state.qkv.m')" in problem.remedy
    app = rearranged()
    checkpoint.load(url, app, rearrange=[Drop("optimizer.state.qkv.m"), rule])
    assert app["step"] == 3 and (not weights or app["model"]["v"].all())
    as_it_was = {
        **{name: {"qkv": torch.zeros(6, 2)} for name in weights},
        "optimizer": {"state": {"qkv": {"m": torch.zeros(6)}}},
        "step": 0,
    }
    checkpoint.load(url, as_it_was)
    assert as_it_was["optimizer"]["state"]["qkv"]["m"].all()


def test_a_size_in_a_rule_gets_a_name(url):
    with pytest.raises(ValueError, match="an axis has a name, and its size stands in `sizes`"):
        Rule("a", ("b", "c"), "2+2 i -> 2 i, 2 i")
    saved(url, {"a": torch.arange(4.0).view(4, 1)})
    app = {"b": torch.zeros(2, 1), "c": torch.zeros(2, 1)}
    checkpoint.load(url, app, rearrange=[Rule("a", ("b", "c"), "n+m i -> n i, m i", sizes={"n": 2})])
    assert app["c"].flatten().tolist() == [2, 3]


def test_a_directory_of_checkpoints_is_not_one(tmp_path):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(2, {"weight": torch.ones(2)}, force=True)
    app = {"weight": torch.zeros(2)}
    problem = refused("give one of them, such as …, or use Manager(...).restore(app)", checkpoint.load, tmp_path, app)
    checkpoint.load(problem.remedy.split("such as ")[1].split(", or")[0], app)
    assert app["weight"].all()
    app["weight"].zero_()
    assert checkpoint.Manager(tmp_path).restore(app) == 2 and app["weight"].all()


def test_a_checkpoint_that_was_moved_alone_is_told_where_the_rest_is(tmp_path):
    weight = torch.ones(1000)
    with checkpoint.Manager(tmp_path / "run", incremental=True) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": weight, "step": step}, force=True)
        moved = tmp_path / "elsewhere" / "last"
        moved.parent.mkdir()
        os.rename(manager.path(2), moved)
    app = {"weight": torch.zeros(1000), "step": 0}
    remedy = "name the directory that has its directory by base_root=, or restore from another checkpoint"
    refused(remedy, checkpoint.load, moved, app)
    checkpoint.load(moved, app, base_root=tmp_path / "run")
    assert app["weight"].all() and app["step"] == 2
    assert checkpoint.Manager(tmp_path / "run").restore(app) == 1 and app["step"] == 1


def test_what_has_another_kind_of_memory_is_converted_or_left_out(url):
    with warnings.catch_warnings():  # once a process
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    app = {"weight": torch.ones(2), "nested": nested}
    remedy = "convert it with to_padded_tensor(), or store its components"
    refused(remedy, checkpoint.save, url, app)
    saved(url, {**app, "nested": nested.to_padded_tensor(0.0)})
    refused(remedy, checkpoint.load, url, app)
    padded = {"weight": torch.zeros(2), "nested": torch.zeros(2, 3)}
    checkpoint.load(url, padded)
    assert padded["nested"].sum() == 5
    saved(url.parent / "d", {**app, "nested": [*nested.unbind()]})
    parts = {"weight": torch.zeros(2), "nested": [torch.zeros(2), torch.zeros(3)]}
    checkpoint.load(url.parent / "d", parts)
    assert parts["nested"][1].all()


def test_sparse_and_lazy_memory_is_converted(url):
    weight = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    saved(url, {"weight": weight})
    app = {"weight": torch.zeros(2, 2).to_sparse()}
    refused("convert it with to_dense()", checkpoint.load, url, app)
    app["weight"] = app["weight"].to_dense()
    checkpoint.load(url, app)
    assert torch.equal(app["weight"], weight)
    values = torch.tensor([1 + 2j, 3 - 1j])
    saved(url.parent / "d", {"weight": values})
    app = {"weight": torch.zeros(2, dtype=torch.complex64).conj()}
    refused("apply resolve_conj() and resolve_neg()", checkpoint.load, url.parent / "d", app)
    app["weight"] = app["weight"].resolve_conj().resolve_neg()
    checkpoint.load(url.parent / "d", app)
    assert torch.equal(app["weight"], values)


def test_what_wraps_several_tensors_is_left_out_or_taken_apart(url):
    data, mask = torch.arange(3.0), torch.tensor([True, False, True])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of MaskedTensors is in prototype")
        masked = torch.masked.masked_tensor(data, mask)
    app = {"weight": torch.ones(2), "masked": masked}
    refused("leave it out (select=), or pass the tensors that it wraps", checkpoint.save, url, app)
    saved(url, app, select="weight")
    saved(url.parent / "d", {**app, "masked": [data, mask]})
    taken = {"weight": torch.zeros(2), "masked": [torch.zeros(3), torch.zeros(3, dtype=torch.bool)]}
    checkpoint.load(url.parent / "d", taken)
    assert torch.equal(taken["masked"][0], data)


def test_averages_of_another_kind_load_by_what_they_have_in_common(url):
    def made(kind):
        app = app_of()
        app["ema"] = kind(app["model"])
        app["ema"].update()
        return app

    app = made(lambda model: shardopt.EMA(model, decay=0.5))
    state = app["ema"].state_dict()
    other = torch.nn.Linear(3, 2, bias=False)
    average = shardopt.EMA(other, decay=0.5)
    refused(
        "load what was saved from the same model and kind of average, or pass strict=False",
        average.load_state_dict,
        state,
    )
    average.load_state_dict(state, strict=False)
    with average.swap():
        assert torch.equal(other.weight, app["model"].weight)
    fitting = made(lambda model: shardopt.EMA(model, decay=0.5))
    fitting["ema"].load_state_dict(state)
    assert fitting["ema"].n_averaged == 1
