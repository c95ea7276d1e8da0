"""What `codes.py` computes, as Triton kernels: to the same bits, in one launch for each function.

Memory is flat: n elements in blocks of S, the last of which need not be of a block. Products and sums are not fused,
and quotients are those of IEEE 754, so that every element has the bits that torch's operations give it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.low_precision.noise import Noise, NoiseKey, Positions
from shardopt.runtime.kernels import can_run, tl, triton

_ELEMENTS = 2048
"""The number of elements of a program."""


def fits(tensor: Tensor) -> bool:
    """Whether the kernels run where a tensor is."""
    return tensor.is_cuda and can_run(_try, tensor)


def _try(device: torch.device) -> None:
    """Runs every kernel once, on one block."""
    values, run = torch.ones(1, 256, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    keys = [NoiseKey(1, 2), NoiseKey(run.int(), run.int())]
    forms = [(2.0**-15, 896, 120), (2.0**-31, 768, 248)]  # as in `codes.py`: of numbers with a sign, and without
    for key, form, maximum in zip(keys, forms, (False, True), strict=True):
        noise, scales = Noise(Positions(run, 256, 256), key), scales_for(values, maximum)
        codes = encode(values, scales, noise, *form)
        decode(codes.view(-1), scales, torch.zeros(256, device=device), 256)
        round_at_random(values, noise)
    encode(values, scales, None, *forms[0])


def decode(codes: Tensor, scales: Tensor, table: Tensor, block: int) -> Tensor:
    """Returns the numbers that codes stand for: fp32 [n], new; 0 behind the last block.

    Args:
        codes: uint8, [n].
        scales: fp32, of each block.
        table: fp32, the number of each code.
        block: S.
    """
    codes, scales = codes.contiguous(), scales.contiguous()  # kernels know no strides
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    grid = (triton.cdiv(codes.numel(), _ELEMENTS),)
    with torch.cuda.device_of(codes):  # type: ignore[no-untyped-call]  # torch leaves it untyped; Triton launches there
        _decode[grid](codes, scales, table, values, codes.numel(), scales.numel(), block, _ELEMENTS)
    return values


def scales_for(values: Tensor, maximum: bool) -> Tensor:
    """Returns the scales of blocks of numbers: fp32 [...] of [..., S]."""
    values = values.contiguous()
    scales = torch.empty(values.shape[:-1], dtype=torch.float32, device=values.device)
    grid, shape = _blocks(values)
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]  # as above
        _scales[grid](values, scales, scales.numel(), *shape, maximum)
    return scales


def encode(values: Tensor, scales: Tensor, noise: Noise | None, least: float, first: int, most: int) -> Tensor:
    """Returns the codes of blocks of numbers: uint8 [..., S].

    Args:
        values: fp32, [..., S].
        scales: fp32, [...].
        noise: None to round to nearest.
        least: d.
        first: the upper bits of d.
        most: the code of 1, with or without a sign beside it.
    """
    values, scales = values.contiguous(), scales.contiguous()
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    grid, shape = _blocks(values)
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]  # as above
        _encode[grid](
            *(values, scales, codes, *_arguments(noise, values), scales.numel()),
            *(least, 1 - least, first, most, most < 128, *shape),
            enable_fp_fusion=False,
        )
    return codes


def round_at_random(values: Tensor, noise: Noise) -> Tensor:
    """Returns fp32 numbers rounded to one of the two neighbouring bf16 numbers: bf16, new."""
    values = values.contiguous()
    rounded = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    grid = (triton.cdiv(values.numel(), _ELEMENTS),)
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]  # as above
        _round[grid](values, rounded.view(torch.int16), *_arguments(noise, values), values.numel(), _ELEMENTS)
    return rounded


def _blocks(values: Tensor) -> tuple[tuple[int], tuple[int, int, int]]:
    """Returns the grid, and S, the columns and the rows of a program."""
    block = values.shape[-1]
    columns = triton.next_power_of_2(block)
    rows = max(_ELEMENTS // columns, 1)
    return (triton.cdiv(values.numel() // block, rows),), (block, columns, rows)


def _arguments(noise: Noise | None, instead: Tensor) -> tuple[Any, ...]:
    """Returns the starts, the key, the length of runs, and how many keys there are: 0, 1, or 2 for one for each run."""
    if noise is None:
        return instead, 0, 0, 1, 0
    before, between = noise.key
    if isinstance(before, Tensor):
        return noise.positions.starts, before.contiguous(), between.contiguous(), noise.positions.length, 2
    return noise.positions.starts, before, between, noise.positions.length, 1


if triton is not None:
    _KEYS = ["before", "between"]

    @triton.jit  # type: ignore[untyped-decorator]  # Triton is untyped
    def _decode(codes, scales, table, values, count, blocks, BLOCK: tl.constexpr, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's own types
        at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
        there = at < count
        block = at // BLOCK
        number = tl.load(table + tl.load(codes + at, mask=there, other=0).to(tl.int32))
        tl.store(values + at, number * tl.load(scales + block, mask=block < blocks, other=0.0), mask=there)

    @triton.jit  # type: ignore[untyped-decorator]  # as above
    def _scales(  # type: ignore[no-untyped-def]  # as above
        values, scales, blocks, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, MAXIMUM: tl.constexpr
    ):
        row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        mask = (row < blocks)[:, None] & (column < BLOCK)[None, :]
        value = tl.abs(tl.load(values + row[:, None] * BLOCK + column[None, :], mask=mask, other=0.0))
        found = tl.max(tl.where(value == value, value, float("inf")), axis=1)
        if MAXIMUM:
            power = ((found.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
            found = tl.where(power == float("inf"), found, power)
        tl.store(scales + row, found, mask=row < blocks)

    @triton.jit  # type: ignore[untyped-decorator]  # as above
    def _random_bits(at, there, starts, before, between, length, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
        """Computes `noise.random_bits`."""
        run = at // length
        index = tl.load(starts + run, mask=there, other=0) + at % length
        if KEYS == 2:
            before = tl.load(before + run, mask=there, other=0)
            between = tl.load(between + run, mask=there, other=0)
        bits = index.to(tl.uint32) ^ before.to(tl.uint32)
        bits ^= bits >> 16
        bits = bits * 0x7FEB352D + between.to(tl.uint32) + (index >> 32).to(tl.uint32) * 0x9E3779B1
        bits ^= bits >> 15
        bits *= 0x846CA68B
        bits ^= bits >> 16
        return bits.to(tl.int32, bitcast=True)

    @triton.jit(do_not_specialize=_KEYS)  # type: ignore[untyped-decorator]  # as above; a key of 1 is a number too
    def _encode(  # type: ignore[no-untyped-def]  # as above
        values,
        scales,
        codes,
        starts,
        before,
        between,
        length,
        KEYS: tl.constexpr,
        blocks,
        LEAST: tl.constexpr,
        REST: tl.constexpr,
        FIRST: tl.constexpr,
        MOST: tl.constexpr,
        SIGNED: tl.constexpr,
        BLOCK: tl.constexpr,
        COLUMNS: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        mask = (row < blocks)[:, None] & (column < BLOCK)[None, :]
        at = row[:, None] * BLOCK + column[None, :]
        value = tl.load(values + at, mask=mask, other=0.0)
        scale = tl.load(scales + row, mask=row < blocks, other=1.0)
        scale = tl.where(scale == 0.0, 1.0, scale)[:, None] + tl.zeros_like(value)
        share = tl.div_rn(tl.abs(value), scale)
        bits = (share * REST + LEAST).to(tl.int32, bitcast=True)
        if KEYS == 0:
            bits += 0x80000
        else:
            bits += _random_bits(at, mask, starts, before, between, length, KEYS) & 0xFFFFF
        bits = tl.minimum(tl.maximum((bits >> 20) - FIRST, 0), MOST)
        if SIGNED:
            bits |= (value.to(tl.int32, bitcast=True) >> 24) & 128
        else:
            bits = tl.maximum(bits, tl.minimum(share.to(tl.int32, bitcast=True), 1))
        tl.store(codes + at, bits.to(tl.uint8), mask=mask)

    @triton.jit(do_not_specialize=_KEYS)  # type: ignore[untyped-decorator]  # as above
    def _round(  # type: ignore[no-untyped-def]  # as above
        values, rounded, starts, before, between, length, KEYS: tl.constexpr, count, ELEMENTS: tl.constexpr
    ):
        at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
        there = at < count
        value = tl.load(values + at, mask=there, other=0.0)
        noise = _random_bits(at, there, starts, before, between, length, KEYS) & 0xFFFF
        bits = tl.where(value == value, (value.to(tl.int32, bitcast=True) + noise) >> 16, 0x7FC0)
        tl.store(rounded + at, bits.to(tl.int16), mask=there)
