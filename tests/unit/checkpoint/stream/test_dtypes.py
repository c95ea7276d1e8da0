"""The dtypes of what is published: one for all, one for each pattern of names, and rows in 8 bits."""

import os

import pytest
import torch
from torch import nn

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Rule
from shardopt.errors import MismatchError, OptionError
from shardopt.sharding import Box, PiecesTensor
from tests.support.in_bits import by_hand
from tests.support.streams import copied, files_of, full_load, is_step, same_bits, zeros_like

INT8 = {"table": "int8_rows"}


def table(rows=50, columns=12):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def publish(root, weights, dtype, step=1, **options):
    """Publishes one step; returns its place."""
    with checkpoint.Publisher(root, dtype=dtype, durable=False, **options) as publisher:
        return publisher.publish(step, weights).result().url


def published(root, weights, dtype, **options):
    """What one step has, by name."""
    with checkpoint.open(publish(root, weights, dtype, **options)) as reader:
        return {name: reader.read(name) for name in reader.manifest.tensors}


def test_the_first_pattern_that_is_found_decides_and_other_weights_keep_their_dtype(tmp_path):
    weights = {"table.a": table(), "table.b": table() * 2, "bias": torch.randn(7), "count": torch.arange(3)}
    weights["head"] = torch.randn(5, 4, dtype=torch.float64)
    found = published(tmp_path, weights, {r"\.a$": torch.float16, "^table": torch.bfloat16, "bias|count": torch.half})
    kept = {name: weights[name] for name in ("count", "head")}
    casts = {"table.a": weights["table.a"].half(), "table.b": weights["table.b"].bfloat16()}
    assert same_bits(found, kept | casts | {"bias": weights["bias"].half()})


def test_a_table_in_8_bits_is_three_tensors_beside_weights_of_other_dtypes(tmp_path):
    weights = {"table.a": table(), "other": table(3, 4), "table.b": table(6, 5).double()}
    before = copied(weights)
    found = published(tmp_path, weights, INT8 | {"other": torch.float16})
    expected = by_hand("table.a", before["table.a"]) | by_hand("table.b", before["table.b"])
    assert same_bits(found, expected | {"other": before["other"].half()})
    assert same_bits(weights, before)


def test_a_module_is_published_by_the_names_of_its_parameters(tmp_path):
    module = nn.ModuleDict({"users": nn.EmbeddingBag(20, 6), "head": nn.Linear(6, 2)})
    found = published(tmp_path, module, {r"users\.": "int8_rows", "": torch.bfloat16})
    expected = by_hand("users.weight", module["users"].weight)
    expected |= {f"head.{name}": each.detach().bfloat16() for name, each in module["head"].named_parameters()}
    assert same_bits(found, expected)


def test_tied_tables_are_stored_once(tmp_path):
    one = table(2000, 16)
    found = published(tmp_path, {"table.a": one, "table.b": one}, INT8)
    assert same_bits(found, by_hand("table.a", one) | by_hand("table.b", one))
    assert sum(file.stat().st_size for file in files_of(tmp_path, 1)) < 1.5 * 2000 * (16 + 8)


@pytest.mark.parametrize("dtype", [torch.float16, {"": torch.float16}, {"": "int8_rows"}], ids=str)
def test_a_tensor_that_only_holds_pieces_is_cast(tmp_path, dtype):
    whole = table(9, 6)
    pieces = [(Box((0, 4), (9, 2)), whole[:, 4:]), (Box((0, 0), (5, 4)), whole[:5, :4])]
    pieces.append((Box((5, 0), (4, 4)), whole[5:, :4]))
    found = published(tmp_path, {"table": PiecesTensor((9, 6), pieces)}, dtype)
    is_half = not isinstance(dtype, dict) or dtype[""] == torch.float16
    assert same_bits(found, {"table": whole.half()} if is_half else by_hand("table", whole))


def test_a_follower_brings_codes_and_scales_to_each_step(tmp_path):
    weights = {"table": table(3000, 32)}
    app = zeros_like(by_hand("table", weights["table"]))
    follower = checkpoint.Follower(tmp_path, app)
    with checkpoint.Publisher(tmp_path, dtype=INT8, durable=False, anchor_every=3) as publisher:
        for step in range(1, 7):
            weights["table"][step::100] += 0.1 * torch.randn(30, 32)
            publisher.publish(step, weights).result()
            assert is_step(follower, app, follower.update(), step)
            assert same_bits(app, by_hand("table", weights["table"]))


def test_a_follower_keeps_what_torchs_embedding_bags_take_up_to_date_in_place(tmp_path):
    weights, packed = {"table": table(1000, 12)}, torch.zeros(1000, 12 + 8, dtype=torch.uint8)
    numbers = packed[:, 12:].view(torch.float32)
    follower = checkpoint.Follower(
        tmp_path, {"table": packed[:, :12], "table_scale": numbers[:, 0], "table_offset": numbers[:, 1]}
    )
    with checkpoint.Publisher(tmp_path, dtype=INT8, durable=False) as publisher:
        for step in range(1, 4):
            weights["table"][step::50] *= step
            publisher.publish(step, weights).result()
            report = follower.update()
            assert report.step == step and (step == 1 or not report.whole)
            codes, scale, offset = by_hand("table", weights["table"]).values()
            back = checkpoint.dequantize_rows(codes, scale, offset)
            assert (torch.ops.quantized.embedding_bag_byte_unpack(packed) - back).abs().max() < 1e-6 * back.abs().max()


def test_one_percent_of_touched_rows_takes_two_bytes_for_each_changed_code(tmp_path):
    before, after = table(20_000, 64), table(20_000, 64)
    after[7::100] += torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    written = {}
    for name, dtype in {"fp16": torch.float16, "int8": INT8}.items():
        with checkpoint.Publisher(tmp_path / name, dtype=dtype, durable=False) as publisher:
            publisher.publish(1, {"table": before}).result()
            publisher.publish(2, {"table": after}).result()
        written[name] = sum(each.stat().st_size for each in files_of(tmp_path / name, 2))
    touched = 200 * (64 + 4 + 4)
    assert written["int8"] <= 2.2 * touched and written["int8"] <= 0.75 * written["fp16"], written


def test_an_untouched_table_is_not_written_again(tmp_path):
    weights = {"table": table(2000, 16)}
    with checkpoint.Publisher(tmp_path, dtype=INT8, durable=False) as publisher:
        for step in (1, 2):
            publisher.publish(step, weights).result()
    assert files_of(tmp_path, 1) and not files_of(tmp_path, 2)


def test_steps_in_8_bits_are_verified_loaded_resharded_and_converted(tmp_path):
    weights = {"table": table(), "bias": torch.randn(3)}
    url = publish(tmp_path / "root", weights, INT8)
    expected = by_hand("table", weights["table"]) | {"bias": weights["bias"]}
    checkpoint.verify(url).raise_if_damaged()
    assert same_bits(full_load(url, zeros_like(expected)), expected)
    checkpoint.reshard(url, tmp_path / "resharded", world_size=3)
    for form in ("huggingface", "torch", "dcp"):
        checkpoint.convert(url, tmp_path / form, to=form)
    for name in ("resharded", "huggingface", "torch", "dcp"):
        with checkpoint.open(tmp_path / name) as reader:
            assert same_bits({key: reader.read(key) for key in reader.manifest.tensors}, expected), name


def test_codes_are_never_taken_for_weights(tmp_path):
    url = publish(tmp_path, {"table": table()}, INT8)
    strict = checkpoint.Strictness(dtype="cast", unexpected="ignore")
    app = {"table": torch.zeros(50, 12)}
    with pytest.raises(MismatchError, match=r"table: found .*uint8"):
        checkpoint.load(url, app, strict=strict)
    with pytest.raises(MismatchError, match=r"table: found .*uint8"):
        checkpoint.Follower(tmp_path, app, strict=strict).update()
    assert not app["table"].any()


def test_the_checkpoint_that_resumes_has_the_weights_as_they_are(tmp_path):
    app = {"model": nn.ModuleDict({"table": nn.Embedding(50, 12)})}
    before = copied(app["model"].state_dict())
    with checkpoint.Manager(tmp_path / "run", every=1) as run:
        publish(tmp_path / "stream", app["model"], INT8)
        run.save(1, app)
        nn.init.zeros_(app["model"]["table"].weight)
        run.restore(app)
    assert same_bits(app["model"].state_dict(), before)


def test_names_are_rearranged_and_renamed_once_weights_have_their_dtype(tmp_path):
    weights = {"a.table": table(), "w": table(6, 4)}
    rule = Rule("w", ("up", "down"), "i+i o -> o i, o i")
    found = published(
        tmp_path,
        weights,
        INT8 | {"^w$": torch.half},
        rearrange=[rule],
        rename={r"^a\.": "served.", "_offset$": "_bias"},
    )
    expected = {name.replace("_offset", "_bias"): each for name, each in by_hand("served.table", table()).items()}
    halves = {"up": weights["w"][:3].t().half(), "down": weights["w"][3:].t().half()}
    assert same_bits(found, expected | halves)


BAD_ROWS = {
    "nan": (torch.nan, r"found NaN or infinity in row 7 \(such rows on this rank: 2\)"),
    "inf": (-torch.inf, r"found NaN or infinity in row 7 \(such rows on this rank: 2\)"),
    "large": (1e38, r"found 1.0e\+38 in row 7 \(such rows on this rank: 2\)"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_without_a_scale_are_refused_and_the_next_step_is_published(tmp_path, bad):
    number, says = BAD_ROWS[bad]
    weights = {"table": table(), "other": torch.randn(4)}
    good = copied(weights)
    with checkpoint.Publisher(tmp_path, dtype=INT8, durable=False) as publisher:
        publisher.publish(1, weights).result()
        weights["table"][7, 3] = weights["table"][40, 11] = number
        with pytest.raises(MismatchError, match=rf"table: {says}; required numbers of at most 8.5e\+37") as raised:
            publisher.publish(2, weights)
        assert raised.value.code == "cast-overflow"
        assert sorted(os.listdir(tmp_path)) == ["step-00000001", "stream.json"]
        publisher.publish(2, good).result()
    assert checkpoint.Follower(tmp_path, zeros_like(good | by_hand("table", good["table"]))).update().step == 2


@pytest.mark.parametrize("dtype", [torch.float16, {"": torch.float16}, {"": torch.float8_e5m2}], ids=str)
def test_a_number_that_a_dtype_would_make_infinite_is_refused(tmp_path, dtype):
    weights = {"small": torch.randn(4), "large": torch.tensor([1.0, 70000.0, -torch.inf])}
    with pytest.raises(MismatchError, match=r"large: found 70000\.0 in float32; required") as raised:
        publish(tmp_path, weights, dtype)
    assert raised.value.code == "cast-overflow" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", [torch.bfloat16, {"": torch.bfloat16}, torch.float32], ids=str)
def test_a_number_near_the_largest_is_refused_as_well(tmp_path, form):
    own, number = (torch.float64, 1e300) if form == torch.float32 else (torch.float32, torch.finfo(torch.float32).min)
    with pytest.raises(MismatchError, match=r"mask: found .* required numbers that .* can hold") as raised:
        publish(tmp_path, {"w": torch.randn(4), "mask": torch.tensor([number], dtype=own)}, form)
    assert raised.value.code == "cast-overflow" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_nan_and_infinity_are_published_where_the_dtype_has_them(tmp_path, dtype):
    weights = {"w": torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])}
    assert same_bits(published(tmp_path, weights, dtype), {"w": weights["w"].to(dtype)})


DO_NOT_FIT = {
    "vector": ({"table": torch.randn(7)}, INT8, r"table: found the shape \[7\]; required a table"),
    "no columns": ({"table": torch.randn(7, 0)}, INT8, r"table: found the shape \[7, 0\]"),
    "cube": ({"table": torch.randn(2, 3, 4)}, INT8, r"table: found the shape \[2, 3, 4\]"),
    "taken": ({"table": table(), "table_scale": torch.ones(1)}, INT8, "table_scale: found a weight; required the name"),
    "misspelt": ({"table": table()}, INT8 | {"tabel": torch.half}, "'tabel': found no weight of that name"),
    "shadowed": ({"table": table()}, {"": torch.half} | INT8, "'table': found no weight of that name"),
}


@pytest.mark.parametrize("case", DO_NOT_FIT)
def test_what_does_not_fit_the_weights_is_refused_by_name(tmp_path, case):
    weights, dtype, says = DO_NOT_FIT[case]
    with pytest.raises(MismatchError, match=says) as raised:
        publish(tmp_path, weights, dtype)
    assert raised.value.code == "bad-rules" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "dtype",
    [{"(": torch.half}, {3: torch.half}, {"w": torch.int8}, {"w": "int4_rows"}, {"w": None}, "int8_rows"],
    ids=str,
)
def test_bad_dtypes_are_refused_by_name(tmp_path, dtype):
    with pytest.raises(OptionError, match="dtype: found"):
        checkpoint.Publisher(tmp_path, dtype=dtype)


def test_a_table_without_rows_is_published(tmp_path):
    weights = {"table": torch.empty(0, 4), "other": torch.ones(2)}
    assert same_bits(published(tmp_path, weights, INT8), by_hand("table", weights["table"]) | {"other": torch.ones(2)})
