"""8-bit codes of fp32 numbers, and stochastic rounding to bf16.

A code is what is left of a float's bits: with x in [0, 1] and d = 2^-k, the bits of the fp32 number y = x (1 - d) + d
minus those of d, without the lowest 20. So it has 3 bits of mantissa, 0 is 0, 8k is 1, and below d the codes are d / 8
apart. k is 15 for numbers with a sign, which is bit 7 of the code, and 31 for those without.

Values are in blocks of S elements; memory is flat, and padded to whole vectors. On GPUs kernels compute the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from shardopt.algorithms.low_precision import code_kernels
from shardopt.algorithms.low_precision.noise import Noise

_MANTISSA = 23  # bits, of fp32
_LOST = 20  # of these
_BINADES = {True: 15, False: 31}
_SIGN = 128


def decode(codes: Tensor, scales: Tensor, signed: bool, block: int) -> Tensor:
    """Returns the numbers that codes stand for: fp32 [n], new; 0 behind the last block.

    Args:
        codes: uint8, [n]; 0 behind the last block.
        scales: fp32, of each block.
        signed: whether numbers may be negative.
        block: S.
    """
    table = _table(signed, codes.device)
    if code_kernels.fits(codes):
        return code_kernels.decode(codes, scales, table, block)
    values = table.index_select(0, codes.int())
    values[: scales.numel() * block].view(-1, block).mul_(scales.unsqueeze(-1))
    return values


def largest(values: Tensor) -> Tensor:
    """Returns the largest absolute value in each block, infinite where one is not a number: [...] of [..., S]."""
    return values.abs().amax(-1).nan_to_num_(nan=torch.inf, posinf=torch.inf)


def scales_for(values: Tensor, maximum: bool) -> Tensor:
    """Returns the scales for encoding: `largest`, or for maxima the next power of two.

    A maximum is rounded to nearest, and stays where it is while the largest of its block grows: between powers of two
    a code stands for the same number.

    Args:
        values: fp32, [..., S].
        maximum: whether they are maxima.

    Returns:
        fp32, [...].
    """
    if code_kernels.fits(values):
        return code_kernels.scales_for(values, maximum)
    found = largest(values)
    if not maximum:
        return found
    below = (1 << _MANTISSA) - 1
    powers = (found.view(torch.int32) + below).bitwise_and_(~below).view(torch.float32)
    return torch.where(powers.isinf(), found, powers)  # above the last power of two, the number itself


def as_stored(scales: Tensor) -> Tensor:
    """Returns scales as stored: an infinite one becomes NaN, so all numbers of its block decode to NaN.

    They are infinite until then, as a reduction over ranks need not take a NaN for the largest.
    """
    return scales.nan_to_num(nan=torch.nan, posinf=torch.nan)


def encode(values: Tensor, scales: Tensor, signed: bool, noise: Noise | None) -> Tensor:
    """Encodes numbers.

    Args:
        values: fp32, [..., S], contiguous; used up.
        scales: fp32, [...]; at least the largest absolute value in each block. Where it is infinite, codes stand for
            nothing: see `as_stored`.
        signed: whether numbers may be negative.
        noise: of the elements; None to round to nearest.

    Returns:
        uint8, [..., S].
    """
    if code_kernels.fits(values):
        first, most = _first_code(signed), code_of_one(signed)
        return code_kernels.encode(values, scales, noise, 2.0 ** -_BINADES[signed], first, most)
    signs = (values.view(torch.int32) >> 24).bitwise_and_(_SIGN) if signed else None
    least = 2.0 ** -_BINADES[signed]
    values.abs_().div_((scales + (scales == 0)).unsqueeze(-1))
    positive = None if signed else values.view(torch.int32).clamp(max=1)
    bits = values.mul_(1 - least).add_(least).view(torch.int32)
    below = (1 << _LOST) - 1
    bits.add_((1 << _LOST) >> 1 if noise is None else noise.bits().view(bits.shape).bitwise_and_(below))
    bits.bitwise_right_shift_(_LOST).sub_(_first_code(signed)).clamp_(0, 8 * _BINADES[signed])
    if signs is not None:
        bits.bitwise_or_(signs)
    if positive is not None:
        bits = torch.maximum(bits, positive)
    return bits.to(torch.uint8)


def round_at_random(values: Tensor, noise: Noise) -> Tensor:
    """Rounds fp32 numbers to one of the two neighbouring bf16 numbers; the nearer one is likelier.

    Args:
        values: fp32, contiguous.
        noise: of the elements.

    Returns:
        bf16, new. What is not a number stays so.
    """
    if code_kernels.fits(values):
        return code_kernels.round_at_random(values, noise)
    bits = noise.bits().view(values.shape).bitwise_and_(0xFFFF).add_(values.view(torch.int32)).bitwise_and_(-0x10000)
    # Of what is not a number the sum may be one (CUDA's has all bits set); a maximum brings it back.
    not_numbers = values.clamp(max=torch.finfo(torch.float32).max).sub_(torch.inf)
    return torch.maximum(bits.view(torch.float32), not_numbers).bfloat16()


def code_of_one(signed: bool) -> int:
    """Returns the code of the largest number of a block."""
    return 8 * _BINADES[signed]


def _first_code(signed: bool) -> int:
    """Returns the upper bits of d, which stand for code 0."""
    return (127 - _BINADES[signed]) << (_MANTISSA - _LOST)


@lru_cache(maxsize=64)
def _table(signed: bool, device: torch.device) -> Tensor:
    """Returns the number that each of 256 codes stands for, fp32."""
    least = 2.0 ** -_BINADES[signed]
    magnitudes = torch.arange(_SIGN if signed else 256, dtype=torch.int32, device="cpu")
    bits = (magnitudes.clamp(max=8 * _BINADES[signed]) + _first_code(signed)) << _LOST
    values = (bits.view(torch.float32).double() - least) / (1 - least)
    values = torch.cat([values, -values]) if signed else values
    return values.float().to(device)
