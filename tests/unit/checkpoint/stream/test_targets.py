"""What published weights go to: names, dtypes, rules, ties and memory of any form, by deltas as by a full load."""

import pytest
import torch
from torch import nn

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Drop, Rule
from shardopt.errors import MismatchError, OptionError
from tests.support.streams import bits, delta_bytes, is_step, named, reads_counted, same_bits, train, zeros_like

STEPS = (1, 2, 3)


def follow(root, weights, app, publisher=None, **options):
    """Follows three steps; returns the reports of the last two, which deltas lead to."""
    follower = checkpoint.Follower(root, app, **options)
    with checkpoint.Publisher(root, durable=False, **(publisher or {})) as made:
        reports = []
        for step in STEPS:
            train(named(weights), step)
            made.publish(step, weights).result()
            reports.append(follower.update())
            load = {key: value for key, value in options.items() if key in ("rename", "rearrange", "strict")}
            assert is_step(follower, app, reports[-1], step, **load)
    return reports[1:]


def blocks(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.attn.{name}.weight": torch.randn(48, 200, generator=generator) for i in range(2) for name in "qkv"
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
                                   torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
                                   torch.bool, torch.complex64, torch.complex128])  # fmt: skip
def test_any_dtype_is_followed(tmp_path, dtype):
    weights = {"x": torch.zeros(90, 300).to(dtype), "scalar": torch.zeros(()).to(dtype)}
    app = zeros_like(weights)
    reports = follow(tmp_path, weights, app)
    assert same_bits(app, weights)
    assert dtype == torch.complex128 or all(each.whole <= 1 for each in reports)  # whose words have no name


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float32, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_numbers_are_cast_as_a_load_casts_them(tmp_path, stored, own, memory_bytes):
    weights = {"x": torch.zeros(90, 300).to(stored), "t": torch.zeros(64, 70).to(stored)}
    app = {"x": torch.zeros(90, 300, dtype=own), "t": torch.zeros(70, 64, dtype=own).t()}
    strict = checkpoint.Strictness(dtype="cast")
    assert all(each.whole == 0 for each in follow(tmp_path, weights, app, strict=strict, memory_bytes=memory_bytes))


def test_a_cast_that_would_lose_a_number_is_refused_by_name(tmp_path):
    weights, app = {"x": torch.ones(9000)}, {"x": torch.zeros(9000, dtype=torch.float16)}
    follower = checkpoint.Follower(tmp_path, app, strict=checkpoint.Strictness(dtype="cast"))
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
        follower.update()
        weights["x"][77] = 1e9
        publisher.publish(2, weights).result()
        with pytest.raises(MismatchError, match=r"(?s)cast-overflow.*x: found 1000000000.0") as raised:
            follower.update()
        assert raised.value.code == "cast-overflow"
        assert follower.step == 1 and app["x"].eq(1).all()
        weights["x"][77] = 9
        publisher.publish(3, weights).result()
        assert follower.update().step == 3 and app["x"][77] == 9


def test_weights_are_published_in_another_dtype(tmp_path):
    model = nn.Sequential(nn.Linear(200, 90), nn.BatchNorm1d(90))
    app = nn.Sequential(nn.Linear(200, 90), nn.BatchNorm1d(90)).bfloat16()
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False, dtype=torch.bfloat16) as publisher:
        for step in STEPS:
            train(model.state_dict(), step)
            publisher.publish(step, model).result()
            assert is_step(follower, app, follower.update(), step)
            for name, each in model.state_dict().items():
                expected = each.bfloat16() if each.is_floating_point() else each
                assert torch.equal(app.state_dict()[name], expected), name
    assert app[1].num_batches_tracked.dtype == torch.int64


def test_what_is_too_small_for_the_published_dtype_is_not_written(tmp_path):
    weights, app = {"x": torch.ones(50_000)}, {"x": torch.zeros(50_000, dtype=torch.bfloat16)}
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False, dtype=torch.bfloat16) as publisher:
        publisher.publish(1, weights).result()
        follower.update()
        weights["x"] += 1e-4
        assert publisher.publish(2, weights).result().bytes_total < 1000
        assert follower.update().bytes_read == 0


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_a_number_that_only_a_step_in_between_had_is_no_reason_to_refuse(tmp_path, memory_bytes):
    weights, app = {"x": torch.ones(50_000)}, {"x": torch.zeros(50_000, dtype=torch.bfloat16)}
    follower = checkpoint.Follower(tmp_path, app, strict=checkpoint.Strictness(dtype="cast"), memory_bytes=memory_bytes)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        for step, number in enumerate((1.0, torch.finfo(torch.float32).max, 3.0), start=1):
            weights["x"][3] = number
            publisher.publish(step, weights).result()
            if step != 2:
                report = follower.update()
                assert report.step == step and report.whole == 1 and app["x"][3] == number


@pytest.mark.parametrize(("is_delta", "memory_bytes"), [(True, 1 << 30), (False, 1 << 30), (True, 1000)])
def test_a_number_that_the_apps_dtype_cannot_hold_is_refused_before_anything_changes(tmp_path, is_delta, memory_bytes):
    weights, app = {"x": torch.ones(50_000)}, {"x": torch.zeros(50_000, dtype=torch.bfloat16)}
    follower = checkpoint.Follower(tmp_path, app, strict=checkpoint.Strictness(dtype="cast"), memory_bytes=memory_bytes)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
        follower.update()
        weights["x"][3 if is_delta else slice(None)] = torch.finfo(torch.float32).max
        publisher.publish(2, weights).result()
        with pytest.raises(MismatchError, match=r"x: found 3\.4028.* in float32; required .* bfloat16") as raised:
            follower.update()
        assert raised.value.code == "cast-overflow" and follower.step == 1 and app["x"].eq(1).all()
        publisher.publish(3, {"x": torch.full((50_000,), 2.0)}).result()
        assert follower.update().step == 3 and app["x"].eq(2).all()


def test_parameters_and_persistent_buffers_count(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(100, 70))
            self.register_buffer("kept", torch.zeros(8000))
            self.register_buffer("not_kept", torch.zeros(8000), persistent=False)

    model, app = Model(), Model()
    model.not_kept += 5
    follow(tmp_path, model, app)
    assert torch.equal(app.kept, model.kept) and app.not_kept.eq(0).all()


def test_names_are_changed_by_the_publisher_and_by_the_follower(tmp_path):
    weights = blocks()
    app = {name.replace("attn.", "mixer.").replace("layers", "h"): torch.zeros_like(w) for name, w in weights.items()}
    publisher = {"rename": {r"^layers\.": "h."}}
    reports = follow(tmp_path, weights, app, publisher=publisher, rename={r"\.attn\.": ".mixer."})
    assert all(each.whole == 0 for each in reports)


QKV = tuple(f"layers.{{n}}.attn.{name}.weight" for name in "qkv")
RULES = {
    "fused": (
        [Rule(QKV, "layers.{n}.qkv", "q i, k i, v i -> q+k+v i")],
        {f"layers.{i}.qkv": (144, 200) for i in range(2)},
    ),
    "by heads": (
        [Rule(QKV, "layers.{n}.qkv", "(h d) i, (h d) i, (h d) i -> (h 1+1+1 d) i", {"d": 12})],
        {f"layers.{i}.qkv": (144, 200) for i in range(2)},
    ),
    "transposed": (
        [Rule("{*rest}.weight", "{*rest}.weight", "o i -> i o")],
        {name: (200, 48) for name in blocks()},
    ),
    "stacked": (
        [Rule("layers.{n}.attn.q.weight", "q", "o i -> n o i"), Drop(QKV[1]), Drop(QKV[2])],
        {"q": (2, 48, 200)},
    ),
    "padded": (
        [Rule(QKV[0], QKV[0], "o i -> o+_padding i", {"_padding": 16}), Drop(QKV[1]), Drop(QKV[2])],
        {f"layers.{i}.attn.q.weight": (64, 200) for i in range(2)},
    ),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_tensors_are_rearranged(tmp_path, name, memory_bytes):
    rules, shapes = RULES[name]
    app = {key: torch.zeros(shape) for key, shape in shapes.items()}
    reports = follow(tmp_path, blocks(), app, rearrange=rules, memory_bytes=memory_bytes)
    assert name == "padded" or all(each.whole == 0 for each in reports)


def test_changed_names_are_those_of_the_app_and_of_tied_ones_the_first(tmp_path):
    rules, shapes = RULES["fused"]
    weights = blocks() | {"embed": torch.randn(64, 200)}
    weights["head"] = weights["embed"]
    app = {key: torch.zeros(shape) for key, shape in shapes.items()} | {"tokens": torch.zeros(64, 200)}
    app["head"] = app["tokens"]
    follower = checkpoint.Follower(tmp_path, app, rearrange=rules, rename={"^embed$": "tokens"})
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        for step, (names, changed) in enumerate([(weights, ["layers.0.qkv", "layers.1.qkv", "tokens"]),
                                                 (["layers.1.attn.k.weight"], ["layers.1.qkv"]),
                                                 (["embed"], ["tokens"])]):  # fmt: skip
            train({name: weights[name] for name in names}, step)
            publisher.publish(step, weights).result()
            assert follower.update().changed == tuple(changed)


def test_a_tensor_that_many_are_made_of_is_read_once(tmp_path):
    """Of one stored tensor each head goes elsewhere: its delta is read for the first, and kept for the others."""
    weights = {"qkv": torch.randn(144, 500)}
    rules = [Rule("qkv", ("q", "k", "v"), "q+k+v i -> q i, k i, v i", {"q": 48, "k": 48, "v": 48})]
    app = {name: torch.zeros(48, 500) for name in "qkv"}
    follower = checkpoint.Follower(tmp_path, app, rearrange=rules)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
        follower.update()
        train(weights, 2)
        publisher.publish(2, weights).result()
        with reads_counted() as counted:
            report = follower.update()
    assert is_step(follower, app, report, 2, rearrange=rules)
    assert sum(counted) == report.bytes_read == delta_bytes(tmp_path, 2)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_memory_of_any_form_is_filled_and_what_lies_between_stays(tmp_path, memory_bytes):
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(60, 220, generator=generator) for name in ("columns", "transposed", "every", "plain")}
    weights["cube"] = torch.randn(20, 30, 40, generator=generator)
    outer = {name: torch.full((60, 700), 7.0) for name in ("columns", "every")}
    app = {
        "columns": outer["columns"][:, 13:233],
        "transposed": torch.zeros(220, 60).t(),
        "every": outer["every"][:, ::3][:, :220],
        "plain": torch.zeros(60, 220),
        "cube": torch.zeros(40, 20, 30).permute(1, 2, 0),
    }
    reports = follow(tmp_path, weights, app, memory_bytes=memory_bytes)
    assert all(each.whole == 0 for each in reports)
    assert outer["columns"][:, :13].eq(7).all() and outer["columns"][:, 233:].eq(7).all()
    assert outer["every"][:, 1::3].eq(7).all() and outer["every"][:, 660:].eq(7).all()


def test_strided_weights_are_published(tmp_path):
    weights = {"t": torch.randn(220, 60).t(), "columns": torch.randn(60, 300)[:, 7:207]}
    app = {"t": torch.zeros(60, 220), "columns": torch.zeros(60, 200)}
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        for step in STEPS:
            for each in weights.values():
                each[step * 3, ::9] += step
            publisher.publish(step, weights).result()
            report = follower.update()
            assert is_step(follower, app, report, step) and (step == 1 or report.whole == 0)
    assert same_bits(app, weights)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_a_model_made_in_inference_mode_is_followed(tmp_path, memory_bytes):
    weights = {"x": torch.zeros(90, 200), "t": torch.zeros(90, 200)}
    with torch.inference_mode():
        app = {"x": torch.zeros(90, 200), "t": torch.zeros(200, 90).t()}
    follower = checkpoint.Follower(tmp_path, app, memory_bytes=memory_bytes)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        for step in STEPS:
            train(weights, step)
            publisher.publish(step, weights).result()
            with torch.inference_mode(step == 2):
                assert follower.update().step == step
            assert same_bits(app, weights)


def test_numbers_that_are_none_keep_their_bits(tmp_path):
    weights = {"x": torch.zeros(9000)}
    app = zeros_like(weights)
    follower = checkpoint.Follower(tmp_path, app)
    odd = torch.tensor([0x7FC00001, -1, 0x7F800000, 0x7FA00000, 1], dtype=torch.int32)  # NaNs of several kinds, …
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
        follower.update()
        weights["x"].view(torch.int32)[10:15] = odd
        weights["x"][20] = -0.0
        publisher.publish(2, weights).result()
        report = follower.update()
    assert report.whole == 0 and is_step(follower, app, report, 2)
    assert torch.equal(bits(app["x"]), bits(weights["x"])) and app["x"][20].signbit()


def tied_model():
    model = nn.Module()
    model.embed, model.head = nn.Embedding(100, 80), nn.Linear(80, 100, bias=False)
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tied_weights_are_published_and_followed(tmp_path, as_tensors, dtype):
    """As a module, and as the tensors of one, which share their memory without being one object."""
    model, app = tied_model(), tied_model().to(dtype)
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, durable=False, dtype=dtype) as publisher:
        for step in STEPS:
            with torch.no_grad():
                model.embed.weight[step] += 1
            publisher.publish(step, dict(model.state_dict()) if as_tensors else model).result()
            assert follower.update().step == step
            assert torch.equal(app.head.weight, model.embed.weight.to(dtype or torch.float32))
    assert app.head.weight is app.embed.weight


def test_tied_weights_are_refused_once_their_deltas_make_them_differ(tmp_path):
    shared = torch.zeros(9000)
    follower = checkpoint.Follower(tmp_path, {"a": shared, "b": shared})
    weights = {"a": torch.ones(9000), "b": torch.ones(9000)}
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
        follower.update()
        weights["b"][70] = 5
        publisher.publish(2, weights).result()
        with pytest.raises(MismatchError, match="b: found other values than a"):
            follower.update()
        assert follower.step == 1 and shared.eq(1).all()
        weights["a"][70] = 5
        publisher.publish(3, weights).result()
        assert follower.update().step == 3 and shared[70] == 5


def test_what_does_not_fit_is_refused_by_name_before_a_byte_changes(tmp_path):
    weights = {"a": torch.ones(9000), "b": torch.ones(90, 100), "c": torch.ones(50)}
    apps = {
        "b: found a tensor": {"a": torch.zeros(9000), "b": torch.zeros(100, 90), "c": torch.zeros(50)},
        "c: found a tensor": {"a": torch.zeros(9000), "b": torch.zeros(90, 100), "c": torch.zeros(50).double()},
        "d: ": {"a": torch.zeros(9000), "b": torch.zeros(90, 100), "c": torch.zeros(50), "d": torch.zeros(3)},
        "c: ": {"a": torch.zeros(9000), "b": torch.zeros(90, 100)},
    }
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, weights).result()
    for said, app in apps.items():
        follower = checkpoint.Follower(tmp_path, app)
        with pytest.raises(MismatchError, match=said) as raised:
            follower.update()
        assert raised.value.code in ("does-not-fit", "keys-differ", "missing-keys", "unexpected-keys")
        assert follower.step is None and all(each.eq(0).all() for each in app.values())


def test_names_that_only_one_side_has_may_be_passed_over(tmp_path):
    weights = {"a": torch.ones(9000), "only.published": torch.ones(5000)}
    app = {"a": torch.zeros(9000), "only.here": torch.full((30,), 3.0)}
    follower = checkpoint.Follower(tmp_path, app, strict=False)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        for step in STEPS:
            train(weights, step)
            publisher.publish(step, weights).result()
            assert follower.update().step == step and torch.equal(app["a"], weights["a"])
    assert app["only.here"].eq(3).all()


def test_an_app_that_gains_a_weight_gets_it_too(tmp_path):
    weights = {"a": torch.randn(9000), "b": torch.randn(9000), "c": torch.randn(5)}
    app = {"a": torch.zeros(9000)}
    follower = checkpoint.Follower(tmp_path, app, strict=False)
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        for step in STEPS:
            train(weights, step)
            publisher.publish(step, weights).result()
            if step == 2:
                app["b"] = torch.zeros(9000)
            assert follower.update().step == step
            assert all(torch.equal(each, weights[name]) for name, each in app.items())


def test_two_weights_of_one_name_are_refused(tmp_path):
    publisher = checkpoint.Publisher(tmp_path, rename={r"\d": "n"})
    with publisher, pytest.raises(OptionError, match="two weights would have one name"):
        publisher.publish(1, {"w1": torch.ones(2), "w2": torch.ones(2)})


@pytest.mark.parametrize("model", [3, [torch.ones(2)], {"a": 1}, {1: torch.ones(2)}, {"a": {"b": torch.ones(2)}}])
def test_what_are_no_weights_is_refused(tmp_path, model):
    with pytest.raises(OptionError, match=r"app: found .*tensors by name"):
        checkpoint.Follower(tmp_path, model)
    with checkpoint.Publisher(tmp_path) as publisher, pytest.raises(OptionError, match=r"model: found .*"):
        publisher.publish(1, model)
