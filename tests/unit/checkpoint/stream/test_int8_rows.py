"""Rows in 8 bits: the error of each element, the same bits by any way to them, and what torch makes of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.checkpoint import dequantize_rows
from shardopt.checkpoint.stream import int8_rows
from shardopt.checkpoint.stream.int8_rows import LARGEST, codes_of, extremes_of, scales_of
from tests.support.drawn import examples
from tests.support.in_bits import by_hand
from tests.support.streams import same_bits


def quantized(rows):
    scale, offset = scales_of(extremes_of(rows))
    return codes_of(rows, scale, offset), scale, offset


def assert_near(rows, codes, scale, offset):
    """Half a step, and the rounding of fp32: in the code, and on the way back."""
    exact = offset.double()[:, None] + scale.double()[:, None] * codes.double()
    assert bool(((rows.double() - exact).abs() <= (0.5 + 1e-4) * scale.double()[:, None]).all())
    back = dequantize_rows(codes, scale, offset)
    assert back.dtype == torch.float32 and back.shape == rows.shape
    rounded = 2.0**-23 * (exact.abs() + scale.double()[:, None] * codes.double()) + 2.0**-149
    assert bool(((back.double() - exact).abs() <= rounded).all())


NUMBERS = st.one_of(
    st.floats(-LARGEST, LARGEST, width=32),
    st.floats(-1, 1, width=32),
    st.floats(1000, 1000.0625, width=32),
    st.floats(-(2.0**-120), 2.0**-120, width=32),
    st.sampled_from([0.0, -0.0, 1.0, LARGEST, -LARGEST, 2.0**-149, -(2.0**-149), 2.0**-126]),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 9).flatmap(lambda columns: st.lists(st.lists(NUMBERS, min_size=columns, max_size=columns))))
def test_an_element_is_at_most_half_a_step_off(rows):
    rows = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1) if rows else torch.empty(0, 3)
    codes, scale, offset = quantized(rows)
    assert_near(rows, codes, scale, offset)
    assert same_bits({"t": codes, "t_scale": scale, "t_offset": offset}, by_hand("t", rows))


@pytest.mark.parametrize("number", [0.0, -0.0, 3.25, -7e-42, 2.0**-149, LARGEST, -LARGEST, 1e-9])
def test_a_row_of_equal_numbers_is_exact(number):
    rows = torch.full((2, 5), number)
    codes, scale, offset = quantized(rows)
    assert torch.equal(dequantize_rows(codes, scale, offset), rows)
    assert not offset.signbit().any() or number < 0  # -0.0 becomes 0.0


@pytest.mark.parametrize("width", [1e-8, 1e-12, 1e-30, 1e-36, 2.0**-130, 2.0**-147])
def test_a_row_of_a_narrow_range_keeps_its_differences(width):
    """torch's own form loses them, from about 1e-8 on."""
    rows = torch.linspace(0, 1, 256).mul(width)[None]
    codes, scale, offset = quantized(rows)
    assert_near(rows, codes, scale, offset)
    assert float((dequantize_rows(codes, scale, offset) - rows).abs().max()) <= max(width / 500, 2.0**-126)


def test_the_bits_of_a_row_do_not_depend_on_other_rows_on_runs_or_on_cuts_of_columns(monkeypatch):
    rows = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    rows[3] = torch.tensor([0.0, -0.0] * 6)
    codes, scale, offset = quantized(rows)
    monkeypatch.setattr(int8_rows, "_RUN", 40)
    for order in (torch.arange(50), torch.arange(49, -1, -1), torch.tensor([3])):
        expected = {"c": codes[order], "s": scale[order], "o": offset[order]}
        assert same_bits(dict(zip("cso", quantized(rows[order]), strict=True)), expected)
    left, right = rows[:, :5], rows[:, 5:]
    for parts in ((left, right), (right, left)):
        of_both = torch.stack([extremes_of(part) for part in parts]).amax(dim=0)
        assert same_bits(dict(zip("so", scales_of(of_both), strict=True)), {"s": scale, "o": offset})
    assert torch.equal(torch.cat([codes_of(left, scale, offset), codes_of(right, scale, offset)], dim=1), codes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_rows_of_another_dtype_are_taken_as_fp32(dtype):
    rows = torch.randn(20, 7, generator=torch.Generator().manual_seed(0)).double().to(dtype)
    made = dict(zip("cso", quantized(rows), strict=True))
    assert same_bits(made, dict(zip("cso", quantized(rows.float()), strict=True)))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e300, 1.5 * LARGEST, -1.5 * LARGEST])
@pytest.mark.parametrize("others", [0.0, -1e9, 1e9])
def test_a_number_that_has_no_code_is_seen_in_the_extremes_of_its_row(number, others):
    rows = torch.full((3, 4), others, dtype=torch.float64)
    rows[1, 2] = number
    assert (extremes_of(rows).amax(dim=0) > LARGEST).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 1), (2, 1031)])
def test_tables_of_any_size_have_codes(shape):
    rows = torch.randn(shape)
    codes, scale, offset = quantized(rows)
    assert (codes.shape, scale.shape, offset.shape) == (shape, shape[:1], shape[:1])
    assert_near(rows, codes, scale, offset)


def test_codes_scales_and_offsets_side_by_side_are_what_torchs_embedding_bags_take():
    rows = torch.randn(30, 12, generator=torch.Generator().manual_seed(0))
    rows[4] = 2.5
    codes, scale, offset = quantized(rows)
    packed = torch.cat([codes, torch.stack([scale, offset], dim=1).view(torch.uint8)], dim=1)
    back = dequantize_rows(codes, scale, offset)
    rounding = 1e-6 * back.abs().max()
    assert (torch.ops.quantized.embedding_bag_byte_unpack(packed) - back).abs().max() <= rounding
    ids, starts = torch.tensor([4, 0, 7, 7, 29]), torch.tensor([0, 2, 2])
    pooled = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(packed, ids, starts)
    expected = torch.nn.functional.embedding_bag(ids, back, starts, mode="sum")
    assert (pooled - expected).abs().max() <= 4 * rounding
    of_torch = torch.ops.quantized.embedding_bag_byte_prepack(rows)
    assert of_torch.shape == packed.shape
    assert (of_torch[:, :12].int() - codes.int()).abs().max() <= 1
    theirs, own = (each[:, 12:].contiguous().view(torch.float32) for each in (of_torch, packed))
    is_constant = scale == torch.finfo(torch.float32).smallest_normal
    assert is_constant.sum() == 1 and torch.equal(theirs[~is_constant], own[~is_constant])


def test_rows_are_dequantized_as_they_are_looked_up():
    rows = torch.randn(9, 4)
    codes, scale, offset = quantized(rows)
    ids = torch.tensor([[1, 8], [0, 1]])
    assert torch.equal(dequantize_rows(codes[ids], scale[ids], offset[ids]), dequantize_rows(codes, scale, offset)[ids])
