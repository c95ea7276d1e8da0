"""Numbers that a cast would turn into others are found: just these, and before anything has changed where it can be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.checkpoint.sources.reading import fetch as read
from shardopt.errors import CheckpointError, MismatchError, PartialLoadError
from shardopt.state.casts import has_fewer_exponents, lost_in_cast, may_lose

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, *FP8)
CAST = Strictness(dtype="cast")


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.lists(st.floats(), min_size=1, max_size=5), st.booleans())
def test_what_is_lost_is_what_is_further_off_than_rounding(source, target, numbers, strided):
    tensor = torch.tensor(numbers, dtype=torch.float64).to(source)
    tensor = torch.stack([tensor.double(), tensor.double()], 1).to(source)[:, 0] if strided else tensor
    wide, limits = tensor.double(), torch.finfo(target)
    lost = lost_in_cast(tensor, target)
    # Between the largest number and the next one that there would be, it is a matter of rounding.
    within = wide.isnan() | (wide.abs() <= limits.max)
    if target in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        within |= wide.isinf()
    beyond = ~wide.isnan() & ~within & (wide.abs() >= limits.max * (1 + limits.eps))
    assert lost is None or (lost in wide.tolist() and bool((~within).any()))
    assert lost is not None or not bool(beyond.any())
    assert lost is None or may_lose(source, target)


def test_the_edges():
    for dtype, last, first in (
        (torch.float16, 65519.0, 65520.0),
        (torch.bfloat16, 3.39617e38, 3.39619e38),
        (torch.float8_e4m3fn, 464.0, 465.0),
        (torch.float8_e5m2, 61439.0, 61440.0),
    ):
        for sign in (1, -1):
            assert lost_in_cast(torch.tensor([0.5, sign * last, torch.nan]), dtype) is None
            assert lost_in_cast(torch.tensor([0.5, sign * first, torch.nan]), dtype) == pytest.approx(sign * first)
    infinity = torch.tensor([torch.inf])
    assert lost_in_cast(infinity, torch.float16) is None
    assert lost_in_cast(infinity, torch.float8_e4m3fn) == torch.inf  # where it would be 448
    assert lost_in_cast(torch.tensor([1 + 70000j]), torch.complex32) == 70000
    assert lost_in_cast(torch.zeros(0), torch.float16) is None
    assert lost_in_cast(torch.full((3 << 20,), 1.0).index_fill_(0, torch.tensor([3 << 19]), 1e9), torch.float16) == 1e9


def test_what_is_looked_at_before():
    assert has_fewer_exponents(torch.float32, torch.float16) and has_fewer_exponents(torch.float64, torch.float32)
    assert has_fewer_exponents(torch.bfloat16, torch.float16) and has_fewer_exponents(
        torch.float16, torch.float8_e4m3fn
    )
    for source, target in (
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ):
        assert not has_fewer_exponents(source, target)


def app_of(values, dtype):
    parameter = torch.nn.Parameter(values.to(dtype))
    optimizer = shardopt.keyed("adamw", {"w": parameter}, lr=0.1)
    optimizer.init_state()
    return {"w": parameter, "other": torch.zeros(4, dtype=dtype), "optimizer": optimizer, "step": 0}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("where", ["w", "other"])
def test_a_number_that_the_app_cannot_hold_is_refused_before_anything_is_changed(tmp_path, stored, wanted, where):
    values = torch.arange(300_000) % 7 / 4
    saved = {"other": values.to(stored).view(300, 1000), "w": torch.ones(9, dtype=stored), "step": 3}
    saved[where].view(-1)[-1] = 70000.0
    checkpoint.save(tmp_path / "c", saved)
    into = {"other": torch.zeros(300, 1000).to(wanted), "w": torch.zeros(9).to(wanted), "step": 0}
    with pytest.raises(MismatchError, match="nothing was changed") as caught:
        checkpoint.load(tmp_path / "c", into, strict=CAST)
    (problem,) = caught.value.problems
    assert problem.key == where and problem.found.startswith("70" if stored == torch.float32 else "70144.0 in bfloat16")
    assert not into["other"].float().any() and not into["w"].float().any() and into["step"] == 0
    saved[where].view(-1)[-1] = 7.0
    checkpoint.save(tmp_path / "d", saved)
    report = checkpoint.load(tmp_path / "d", into, strict=CAST)
    assert set(report.cast) == {"w", "other"} and into["w"].float()[-1] == (7.0 if where == "w" else 1.0)


def test_a_renamed_key_is_named_as_in_the_app(tmp_path):
    checkpoint.save(tmp_path / "c", {"old": torch.tensor([1e6])})
    with pytest.raises(
        MismatchError, match=r"new: found 1000000\.0 in float32; required numbers that float16 can hold"
    ):
        checkpoint.load(tmp_path / "c", {"new": torch.zeros(1).half()}, strict=CAST, rename={"old": "new"})


def test_only_what_needs_it_is_read_twice(tmp_path):
    saved = {name: torch.ones(1 << 20) for name in ("same", "bf16", "fp16")}
    checkpoint.save(tmp_path / "c", saved)
    dtypes = {"same": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    into = {name: torch.zeros(1 << 20, dtype=dtype) for name, dtype in dtypes.items()}
    counted = []
    fetch = read.fetch
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(read, "fetch", lambda wants, *rest, **use: counted.append(fetch(wants, *rest, **use)))
        checkpoint.load(tmp_path / "c", into, strict=CAST)
    assert counted == [4 << 20, 3 * (4 << 20)]  # what needs it, and then the load itself


def test_of_bf16_the_very_largest_are_found_as_they_are_read(tmp_path):
    app = app_of(torch.ones(4), torch.float32)
    app["optimizer"].state[app["w"]]["exp_avg"][2] = torch.finfo(torch.float32).max
    checkpoint.save(tmp_path / "c", app)
    into = app_of(torch.zeros(4), torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.w\.exp_avg: found 3\.40.*e\+38 in float32"):
        checkpoint.load(tmp_path / "c", into, strict=CAST)
    into["w"].grad = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(PartialLoadError):
        into["optimizer"].step()


def test_powers_of_two_without_a_sign_take_no_casts(tmp_path):
    checkpoint.save(tmp_path / "c", {"x": torch.ones(3)})
    with pytest.raises(MismatchError, match="float8_e8m0fnu"):
        checkpoint.load(tmp_path / "c", {"x": torch.ones(3).to(torch.float8_e8m0fnu)}, strict=CAST)


@pytest.mark.parametrize("check", [False, True])
def test_state_dicts(check):
    wide, narrow = app_of(torch.ones(4), torch.float32), app_of(torch.ones(4), torch.float16)
    saved = wide["optimizer"].state_dict()
    saved["state"]["w"]["exp_avg"][1] = 3.0
    saved["state"]["w"]["exp_avg_sq"][3] = -70000.0
    take = narrow["optimizer"].check_state_dict if check else narrow["optimizer"].load_state_dict
    with pytest.raises(MismatchError, match=r"w\.exp_avg_sq: found -70000\.0 in torch\.float32") as caught:
        take(saved, convert_dtype=True)
    assert len(caught.value.problems) == 1
    assert not any(value.any() for value in narrow["optimizer"].state_dict()["state"]["w"].values())
    saved["state"]["w"]["exp_avg_sq"][3] = 4.0
    narrow["optimizer"].load_state_dict(saved, convert_dtype=True)
    assert narrow["optimizer"].state[narrow["w"]]["exp_avg_sq"].tolist() == [0, 0, 0, 4]


def test_averages():
    model = torch.nn.Linear(2, 2)
    wide = shardopt.EMA(model, dtype=torch.float64)
    saved = wide.state_dict()
    saved["state"]["weight"]["ema"][0, 0] = 1e300
    narrow = shardopt.EMA(model)
    with pytest.raises(MismatchError, match=r"weight\.ema: found 1e\+300"):
        narrow.load_state_dict(saved, convert_dtype=True)
