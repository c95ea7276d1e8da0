"""Finds numbers that a conversion to another floating-point dtype would lose rather than round."""

from __future__ import annotations

from functools import cache
from math import floor, inf, log2

import torch
from torch import Tensor

_RUN = 1 << 20  # elements that are looked at at a time


@cache
def may_lose(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether one floating-point or complex dtype has numbers that another cannot hold."""
    source, target = _real(source), _real(target)
    smaller = torch.finfo(target).max < torch.finfo(source).max
    return smaller or (_has_infinity(source) and not _has_infinity(target))


@cache
def has_fewer_exponents(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether numbers far below the largest one can be lost, as from fp32 to fp16, but not from fp32 to bf16."""
    source, target = _real(source), _real(target)
    return may_lose(source, target) and (
        2 * torch.finfo(target).max < torch.finfo(source).max or not _has_infinity(target)
    )


def lost_in_cast(source: Tensor, target: torch.dtype) -> float | None:
    """Returns a number of a tensor that a dtype cannot hold; None if there is none.

    What is rounded to the largest number is not lost, and neither is an infinity or NaN that stays one. Waits for the
    device that the tensor is on.

    Args:
        source: of a floating-point or complex dtype.
        target: a floating-point or complex dtype.
    """
    if not may_lose(source.dtype, target):
        return None
    target = _real(target)
    for run in (torch.view_as_real(source) if source.is_complex() else source).reshape(-1).split(_RUN):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        wide = run.to(torch.promote_types(run.dtype, torch.float32) if run.itemsize > 1 else torch.float32)
        if not wide.numel():
            continue
        least, greatest = torch.aminmax(wide)  # in one pass, without a copy
        if bool(torch.maximum(-least, greatest) <= torch.finfo(target).max):  # NaN is not
            continue
        back = run.to(target).to(wide.dtype)
        # A conversion may stop at the largest number; torch's to float8_e4m3fn does, for infinities too.
        beyond = ~back.isfinite() | (wide.abs() > _limit(target))
        lost = wide[torch.where(wide.isfinite(), beyond, wide.isinf() & ~back.isinf())]
        if lost.numel():
            return float(lost[0])
    return None


def _limit(dtype: torch.dtype) -> float:
    """Returns the limit up to which numbers are rounded to the dtype's largest one."""
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    return float(largest + 2.0 ** floor(log2(largest)) * eps / 2)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


@cache
def _has_infinity(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(inf, device="cpu").to(dtype).float().isinf())
