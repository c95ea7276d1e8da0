"""Finds numbers that a conversion to another floating-point dtype would lose rather than round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import compress, islice
from math import floor, inf, log2
from operator import not_

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
    """Returns a number of a tensor that a dtype cannot hold; None if there is none. See `lost_in_casts`."""
    return lost_in_casts([(source, target)])[0]


def lost_in_casts(casts: Sequence[tuple[Tensor, torch.dtype]]) -> list[float | None]:
    """Returns for each tensor a number that a dtype cannot hold; None if there is none.

    What is rounded to the largest number is not lost, and neither is an infinity or NaN that stays one. Waits once for
    each device; more often where there are numbers above the largest one.

    Args:
        casts: tensors and dtypes, both floating-point or complex.
    """
    fits: dict[torch.device, list[Tensor]] = {}
    counts = []
    for source, target in casts:
        of_runs = [_fits(run, target) for run in _runs(source, target)]
        fits.setdefault(source.device, []).extend(of_runs)
        counts.append(len(of_runs))
    fitting = {device: iter(torch.stack(each).tolist() if each else ()) for device, each in fits.items()}
    found: list[float | None] = []
    for (source, target), count in zip(casts, counts, strict=True):
        fit = [*islice(fitting[source.device], count)]
        doubtful = () if all(fit) else compress(_runs(source, target), map(not_, fit))
        found.append(next((each for run in doubtful if (each := _lost_in_run(run, target)) is not None), None))
    return found


def _runs(source: Tensor, target: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the numbers of a tensor in runs, which bound the memory that it takes to look at them."""
    if not source.numel() or not may_lose(source.dtype, target):
        return ()
    real = torch.view_as_real(source) if source.is_complex() else source
    runs: tuple[Tensor, ...] = real.reshape(-1).split(_RUN)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return runs


def _wide(run: Tensor) -> Tensor:
    return run.to(torch.promote_types(run.dtype, torch.float32) if run.itemsize > 1 else torch.float32)


def _fits(run: Tensor, target: torch.dtype) -> Tensor:
    """Returns whether no number is above a dtype's largest one: a bool on the device, false if one is NaN."""
    least, greatest = torch.aminmax(_wide(run))  # in one pass, without a copy
    return torch.maximum(-least, greatest) <= torch.finfo(_real(target)).max


def _lost_in_run(run: Tensor, target: torch.dtype) -> float | None:
    wide, target = _wide(run), _real(target)
    back = run.to(target).to(wide.dtype)
    # A conversion may stop at the largest number; torch's to float8_e4m3fn does, for infinities too.
    beyond = ~back.isfinite() | (wide.abs() > _limit(target))
    lost = wide[torch.where(wide.isfinite(), beyond, wide.isinf() & ~back.isinf())]
    return float(lost[0]) if lost.numel() else None


def _limit(dtype: torch.dtype) -> float:
    """Returns the limit up to which numbers are rounded to the dtype's largest one."""
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    return float(largest + 2.0 ** floor(log2(largest)) * eps / 2)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


@cache
def _has_infinity(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(inf, device="cpu").to(dtype).float().isinf())
