"""Rearranging on the way in: strict, with the state of optimizers, and training resumes as it would have."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.rearrange import Drop, Rule, Tie, inverse, rearranged
from shardopt.checkpoint.rearrange.notation import Name
from shardopt.errors import CorruptionError, MismatchError, OptionError
from tests.harness import run_ranks

JOIN = Rule(("{n}.q", "{n}.k"), "{n}.qk", "(h d) i, d i -> (h+1 d) i", {"d": 2})
STACK = Rule("{n}.experts.{e}.w", "{n}.experts.w", "o i -> e o i")


class Split(nn.Module):
    """A layer with a tensor for each of queries, keys and values, and for each expert; kernels as Conv1D has them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(6, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 5, bias=False) for _ in range(3)])
        self.out = nn.Parameter(torch.randn(5, 3))
        self.table = nn.Embedding(7, 6)

    def forward(self, ids):
        x = self.table(ids)
        q, k, v = self.q(x).unflatten(-1, (2, 4)), self.k(x), self.v(x)
        mixed = (q * k[..., None, :]).sum(-2) + v
        return sum(expert(mixed) for expert in self.experts) @ self.out


class Fused(nn.Module):
    """The same: by pairs of dimensions, those of both query heads, of keys and of values; experts stacked; a table with
    two more rows."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 16)
        self.experts = nn.Parameter(torch.randn(3, 5, 4))
        self.out = nn.Linear(5, 3, bias=False)
        self.table = nn.Embedding(9, 6)

    def forward(self, ids):
        x = self.qkv(self.table(ids)).unflatten(-1, (2, 4, 2))  # [..., pairs, q q k v, 2]
        q, k, v = x[..., :2, :], x[..., 2, :], x[..., 3, :]
        mixed = ((q * k[..., None, :]).sum(-2) + v).flatten(-2)
        return self.out(torch.einsum("...i,eoi->...o", mixed, self.experts))


RULES = [
    Rule(
        ("q.{part}", "k.{part}", "v.{part}"),
        "qkv.{part}",
        "(h pair d) ..., (pair d) ..., (pair d) ... -> (pair h+1+1 d) ...",
        {"pair": 2, "d": 2},
    ),
    Rule("experts.{e}.weight", "experts", "o i -> e o i"),
    Rule("out", "out.weight", "i o -> o i"),
    Rule("table.weight", "table.weight", "v i -> v+_more i", {"_more": 2}),
]


def app_of(kind, shard=False):
    torch.manual_seed(0)
    model = kind()
    if shard:
        fully_shard(model)
    return {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters(), lr=0.05, amsgrad=True)}


def train(app, steps):
    losses = []
    for step in steps:
        ids = torch.arange(12).reshape(4, 3).add(step).remainder(7)
        loss = F.mse_loss(app["model"](ids), torch.ones(4, 3, 3) * torch.arange(3.0))
        app["optimizer"].zero_grad()
        loss.backward()
        app["optimizer"].step()
        losses.append(loss.item())
    return losses


def trained(path):
    app = app_of(Split)
    train(app, range(3))
    checkpoint.save(path, app)
    return app


def resume(path, kind, rules):
    app = app_of(kind, shard=dist.is_initialized())
    checkpoint.load(path, app, rearrange=rules, init_state=True)
    return train(app, range(3, 8))


def test_training_resumes_in_another_arrangement(tmp_path):
    """With every moment, counter and option; and back."""
    expected = train(trained(tmp_path / "split"), range(3, 8))
    assert expected[-1] < expected[0]
    assert resume(tmp_path / "split", Fused, RULES) == pytest.approx(expected, rel=1e-5)
    app = app_of(Fused)
    checkpoint.load(tmp_path / "split", app, rearrange=RULES, init_state=True)
    checkpoint.save(tmp_path / "fused", app)
    assert resume(tmp_path / "fused", Split, inverse(RULES)) == expected


def test_training_resumes_on_shards(tmp_path):
    """Two ranks whose cuts go through heads, experts and what pads; they get the same batches."""
    expected = train(trained(tmp_path / "split"), range(3, 8))
    for losses in run_ranks(2, resume, tmp_path / "split", Fused, RULES):
        assert losses == pytest.approx(expected, rel=1e-5)


def saved(path, app):
    checkpoint.save(path, app)
    return path


def with_optimizer(params, algorithm="adamw", **options):
    optimizer = shardopt.keyed(algorithm, params, lr=0.1, **options)
    optimizer.init_state()
    return {"model": dict(params), "optimizer": optimizer}


def params(**shapes):
    return {name.replace("__", "."): nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def problems_of(path, *rules, app=None):
    with pytest.raises(MismatchError) as caught:
        if app is None:
            rearranged(checkpoint.open(path), rules)
        else:
            checkpoint.load(path, app, rearrange=rules)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_what_is_missing_and_what_does_not_fit_names_the_rule(tmp_path):
    stored = {"a.q": torch.ones(4, 3), "b.q": torch.ones(5, 3), "b.k": torch.ones(2, 3), "c.q": torch.ones(4, 3)}
    stored |= {"c.k": torch.ones(2, 3, dtype=torch.float64), "d.q": torch.ones(4), "d.k": torch.ones(2)}
    stored |= {"a.experts.0.w": torch.ones(2, 2), "a.experts.2.w": torch.ones(2, 2)}
    path = saved(tmp_path / "it", {"model": stored})
    problems = problems_of(path, JOIN, STACK)
    assert set(problems) == {"model.a.k", "model.b.q", "model.c.k", "model.d.q", "model.a.experts.*.w"}
    assert all(str(JOIN) in problems[key] for key in problems if "experts" not in key)
    experts = problems["model.a.experts.*.w"]
    assert "2 that there are" in experts and "3 of them" in experts


def test_sizes_that_do_not_follow_are_asked_for(tmp_path):
    path = saved(tmp_path / "it", {"model": {"0.qk": torch.ones(6, 3)}})
    rule = Rule("{n}.qk", ("{n}.q", "{n}.k"), "a+b i -> a i, b i")
    assert "no size of a, b" in problems_of(path, rule)["model.0.qk"]
    with rearranged(checkpoint.open(path), [Rule(rule.old, rule.new, rule.axes, {"a": 4})]) as reader:
        assert reader.info("model.0.k").shape == (2, 3)


def test_what_no_rule_names_stays_and_is_unexpected(tmp_path):
    stored = {"0.q": torch.ones(4, 3), "0.k": torch.ones(2, 3), "0.rotary": torch.ones(2), "0.more.q.k": torch.ones(2)}
    path = saved(tmp_path / "it", {"model": stored})
    app = {"model": {"0.qk": torch.zeros(6, 3)}}
    assert set(problems_of(path, JOIN, app=app)) == {"model.0.rotary", "model.0.more.q.k"}
    assert not app["model"]["0.qk"].any()
    report = checkpoint.load(path, app, rearrange=[JOIN, Drop("{n}.rotary"), Drop("0.more.q.k")])
    assert report.left_out == ("model.0.rotary", "model.0.more.q.k")
    assert app["model"]["0.qk"].all()


def test_what_is_sliced_off_is_listed(tmp_path):
    path = saved(tmp_path / "it", {"model": {"table": torch.arange(15.0).reshape(5, 3)}})
    app = {"model": {"table": torch.zeros(4, 3)}}
    report = checkpoint.load(path, app, rearrange=[Rule("table", "table", "v+_pad i -> v i", {"v": 4})])
    assert report.left_out == ("model.table (_pad: 1)",)
    assert torch.equal(app["model"]["table"], torch.arange(12.0).reshape(4, 3))


def test_two_rules_for_one_name(tmp_path):
    path = saved(tmp_path / "it", {"model": {"0.q": torch.ones(4, 3), "0.k": torch.ones(2, 3), "0.qk": torch.ones(2)}})
    assert "0.qk and model.0.q" in problems_of(path, JOIN)["model.0.qk"].replace("model.0.qk and", "0.qk and")
    assert "one for each name" in problems_of(path, Rule("0.q", "0.x"), Rule("0.k", "0.x"))["model.0.x"]


def test_options_and_counters_that_differ_are_refused(tmp_path):
    made = with_optimizer(params(a__q=(4, 3), a__k=(2, 3)), groups=[{"match": "k$", "weight_decay": 0.5}])
    path = saved(tmp_path / "options", made)
    assert "another value than optimizer.param_groups.a" in "".join(problems_of(path, JOIN).values())
    stepped = with_optimizer(params(a__q=(4, 3), a__k=(2, 3)))
    stepped["model"]["a.k"].grad = torch.ones(2, 3)
    stepped["optimizer"].step()
    path = saved(tmp_path / "steps", stepped)
    with rearranged(checkpoint.open(path), [Rule("{n}.q", "{n}.p")]) as reader:
        assert "model.a.p" in reader.manifest.tensors
    problems = problems_of(path, JOIN)
    assert any("step" in key or "param_groups" in key for key in problems), problems


def test_state_of_another_layout_is_refused_by_name(tmp_path):
    path = saved(tmp_path / "it", with_optimizer(params(a__q=(4, 3), a__k=(2, 3)), "adafactor"))
    problems = problems_of(path, JOIN)
    assert problems and all(key.startswith("optimizer.state.a.") for key in problems)
    assert all("of shape" in problem and str(JOIN) in problem for problem in problems.values())
    with rearranged(checkpoint.open(path), [Rule("{n}.q", "{n}.p")]) as reader:  # a new name is none
        assert any(key.startswith("optimizer.state.a.p.") for key in reader.manifest.tensors)


def test_state_without_its_parameter_is_refused(tmp_path):
    app = with_optimizer(params(a__q=(4, 3), a__k=(2, 3)))
    path = saved(tmp_path / "it", {"optimizer": app["optimizer"]})
    assert all("only state" in problem for problem in problems_of(path, JOIN).values())


@pytest.mark.parametrize("kind", ["keyed", "torch"])
def test_the_rest_of_a_name_ends_before_an_entry_of_state(tmp_path, kind):
    def made(*names, experts=False):
        model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
        if experts:
            model["e"] = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        if kind == "keyed":
            optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ema = shardopt.EMA(model)
        ema.attach(optimizer)
        return {"model": model, "optimizer": optimizer, "ema": ema}

    old = made("ffn", experts=True)
    sum(each.square().sum() for each in old["model"].parameters()).backward()
    old["optimizer"].step()
    path = saved(tmp_path / "one", old)
    new = made("mlp", "again", "e")
    new["model"]["e"].weight = nn.Parameter(torch.zeros(2, 4, 4))
    del new["optimizer"]
    stacked = Rule("e.{e}.{*rest}", "e.{*rest}", "o i -> e o i")
    rules = [Rule("ffn.{*rest}", "mlp.{*rest}"), Tie("mlp.{*rest}", "again.{*rest}"), stacked]
    if kind == "keyed":
        new["optimizer"] = shardopt.keyed("adamw", new["model"].named_parameters(), lr=0.1)
    else:
        new["optimizer"] = torch.optim.AdamW(new["model"].parameters(), lr=0.1)
    new["ema"] = shardopt.EMA(new["model"])
    is_tied = re.compile(r"again|param_groups|^optimizer\.state\.1\.")
    checkpoint.load(path, new, rearrange=rules, init_state=True, strict=checkpoint.Strictness(missing=is_tied))
    was, now = old["model"], new["model"]
    assert torch.equal(now["mlp"].weight, was["ffn"].weight) and torch.equal(now["again"].weight, was["ffn"].weight)
    assert torch.equal(now["e"].weight, torch.stack([each.weight for each in was["e"]]))
    states = new["optimizer"].state
    assert torch.equal(states[now["mlp"].weight]["exp_avg"], old["optimizer"].state[was["ffn"].weight]["exp_avg"])
    assert states[now["e"].weight]["exp_avg"].all() and states[now["e"].weight]["step"] == 1
    averages = new["ema"].state_dict()["state"]
    assert torch.equal(averages["mlp.weight"]["ema"], was["ffn"].weight)


@pytest.mark.parametrize(
    ("path", "name", "before", "found", "after"),
    [
        (("o", "state", "a.b.w", "GG", 0), "a.{*r}", "o.state.", "a.b.w", ".GG.0"),
        (("o.state.a.b.w.exp_avg",), "a.{*r}", "o.state.", "a.b.w", ".exp_avg"),
        (("m", "a.b.w"), "a.{*r}", "m.", "a.b.w", ""),
        (("state", "m", "a.b.w"), "a.{*r}", "state.m.", "a.b.w", ""),
        (("m.a.b.w",), "{*r}", "", "m.a.b.w", ""),
        (("o", "state", "w", "exp_avg"), "{n}", "o.state.", "w", ".exp_avg"),
    ],
)
def test_where_names_end(path, name, before, found, after):
    key = ".".join(map(str, path))
    match = Name(name).find(key, path)
    assert (match.before, match.name, match.after) == (before, found, after)


def test_ties(tmp_path):
    tie = Tie("embed", "output")
    path = saved(tmp_path / "one", {"model": {"embed": torch.ones(3)}})
    app = {"model": {"embed": torch.zeros(3), "output": torch.zeros(3)}}
    checkpoint.load(path, app, rearrange=[tie])
    assert app["model"]["output"].all()
    both = saved(tmp_path / "both", app)
    with rearranged(checkpoint.open(both), inverse([tie])) as reader:
        assert reader.keys() == ["model.embed"]
    app["model"]["output"][1] = 2
    other = saved(tmp_path / "other", app)
    assert "other values than model.embed" in problems_of(other, *inverse([tie]))["model.output"]


def test_one_memory_is_not_filled_from_what_rules_turn_otherwise(tmp_path):
    """Equal stored bytes are not equal tensors where only one of them is transposed."""
    square = torch.arange(4.0).reshape(2, 2)
    path = saved(tmp_path / "it", {"model": {"a": square, "b": square.clone()}})
    shared = torch.zeros(2, 2)
    problems = problems_of(path, Rule("a", "a", "i o -> o i"), app={"model": {"a": shared, "b": shared}})
    assert "model.b" in problems
    assert not shared.any()


@pytest.mark.parametrize(
    ("old", "new", "axes", "sizes"),
    [
        ("a", "b", "i o -> o", {}),
        ("a", "b", "i i -> i i", {}),
        ("a", "b", "i o", {}),
        (("a", "b"), "c", "", {}),
        (("a", "b"), "c", "i, o -> i", {}),
        ("a", ("b", "c"), "i+o -> i, i", {}),
        ("a.{e}", "b", "i -> i", {}),
        ("a.{n}", "b.{m}", "", {}),
        ("a", "b", "(i o -> i o", {}),
        ("a", "b", "i 2 -> 2 i", {}),
        ("a", "b", "i -> i", {"i": -1}),
        ("a..b", "b", "", {}),
        ("a", "b", "_i -> _i", {}),
        ("a", "b", "a+b c+d -> a+b c+d", {}),
    ],
)
def test_rules_that_do_not_work_are_refused_when_they_are_made(old, new, axes, sizes):
    with pytest.raises(OptionError, match="required"):
        Rule(old, new, axes, sizes)


def test_other_rules_on_another_rank(tmp_path):
    path = saved(tmp_path / "it", {"model": {"a": torch.ones(2)}})
    with checkpoint.open(path) as reader:
        digests = {rearranged(reader, rules).digest for rules in ([], [Rule("a", "b")], [Rule("a", "c")])}
    assert len(digests) == 3


def test_a_flipped_byte_is_found_whatever_the_arrangement(tmp_path):
    rows = SEGMENT_BYTES // 64
    path = saved(tmp_path / "it", {"model": {"a": torch.ones(rows, 32)}})
    rule = Rule("a", "a", "(h two d) i -> (h d two) i", {"two": 2, "d": 4})
    (file,) = (tmp_path / "it").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[4096 + SEGMENT_BYTES + 5] ^= 1
    file.write_bytes(data)
    for transactional in (True, False):
        with pytest.raises(CorruptionError):
            checkpoint.load(
                path, {"model": {"a": torch.zeros(rows, 32)}}, rearrange=[rule], transactional=transactional
            )


def test_tensors_that_torch_saved_with_other_strides(tmp_path):
    """Their boxes are read in the order of memory, or run by run."""
    base = torch.randn(12, 20)
    stored = {"turned": base.T, "gaps": base[:, ::2], "cut": torch.randn(3, 12, 5).permute(1, 2, 0)}
    torch.save({"model": stored}, tmp_path / "it.pt")
    how = {"turned": "(h two d) i", "gaps": "(h two d) i", "cut": "(h two d) i j"}
    rules = [
        Rule(name, name, f"{axes} -> {axes.replace('two d', 'd two')}", {"two": 2, "h": 2})
        for name, axes in how.items()
    ]
    app = {"model": {name: torch.zeros(tensor.shape) for name, tensor in stored.items()}}
    checkpoint.load(tmp_path / "it.pt", app, rearrange=rules)
    for name, tensor in stored.items():
        expected = tensor.unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2)
        assert torch.equal(app["model"][name], expected), name


def test_a_new_tensor_is_not_the_stored_one_of_its_name(tmp_path):
    stored = {"a": torch.ones(2, 2), "b": torch.arange(4.0).reshape(2, 2)}
    path = saved(tmp_path / "it", {"model": stored})
    shared = torch.zeros(2, 2)
    app = {"model": {"a": shared, "c": shared}}
    assert problems_of(path, Rule("a", "c"), Rule("b", "a", "i o -> o i"), app=app)
    assert not shared.any()
