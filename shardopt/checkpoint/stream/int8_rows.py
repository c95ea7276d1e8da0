"""Rows of a table in 8 bits, with an fp32 scale and offset for each row.

    offset = min(row)                                 scale = max((max(row) - min(row)) / 255, 2^-126)
    code   = round((x - offset) / scale), 0 to 255    back:   offset + scale · code

All of it is fp32 arithmetic, rounded to nearest, ties of codes to even. So the codes of a row follow from its elements
alone: they are the same on any device and with any cut, and a row that nobody touched keeps its bits.

The error of an element is at most half a step, scale / 2, and what fp32 rounds: the three operations that give a code
lose less than 1e-4 steps. The least scale is the smallest normal number of fp32. It makes a row of equal numbers exact,
and a row whose numbers differ by less than 2^-118 needs no division by numbers that fp32 or a device rounds to 0.

Source: FBGEMM, `FloatOrHalfToFused8BitRowwiseQuantizedSBFloatRef` in src/QuantUtils.cc, behind torch's
`quantized::embedding_bag_byte_prepack`. It has the same scale and offset (there: bias). Its codes multiply by
255 / (max - min + 1e-8), which loses rows whose numbers differ by about 1e-8 or less; these here divide by the scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST = 2.0**126
"""The largest number of a row, so that neither a difference nor the way back is beyond fp32."""

_STEPS = 255
_LEAST_SCALE = torch.finfo(torch.float32).smallest_normal
_RUN = 1 << 20  # elements that are in fp32 at a time


def extremes_of(rows: Tensor) -> Tensor:
    """Returns the largest of each row's negated elements and of its elements, [2, N], fp32; infinite if one is NaN.

    Both are maxima, so that ranks that share rows find those of the whole rows in one all-reduce.

    Args:
        rows: [N, D] of floating point, D at least 1.
    """
    found = torch.empty(2, len(rows), dtype=torch.float32, device=rows.device)
    for begin, run in _runs(rows):
        numbers = run.float()
        found[0, begin : begin + len(run)] = -numbers.amin(dim=1)  # not aminmax, which takes twice as long as both
        found[1, begin : begin + len(run)] = numbers.amax(dim=1)
    return found.nan_to_num_(torch.inf, torch.inf, -torch.inf)


def scales_of(extremes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scale and offset of each row, [N] and [N], fp32.

    Args:
        extremes: of whole rows, as `extremes_of`, none above `LARGEST`.
    """
    offset = -extremes[0] + 0.0  # which makes 0.0 of -0.0: which of them is found depends on the cut
    return ((extremes[1] + extremes[0]) / _STEPS).clamp_(min=_LEAST_SCALE), offset


def codes_of(rows: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Returns the codes of rows, or of some of their columns, [N, D], uint8.

    Args:
        rows: [N, D] of floating point.
        scale, offset: of the whole rows, [N], fp32.
    """
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    for begin, run in _runs(rows):
        of_run = slice(begin, begin + len(run))
        steps = run.to(torch.float32, copy=True).sub_(offset[of_run, None]).div_(scale[of_run, None])
        codes[of_run] = steps.round_().to(torch.uint8)
    return codes


def dequantize_rows(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Returns rows of a table that was published as "int8_rows": `offset + scale * codes`.

    Local: no collective. Nothing is changed.

    Args:
        codes: [..., D], uint8; of a table, or `table[ids]` of it.
        scale, offset: of these rows, [...], fp32: `<name>_scale` and `<name>_offset`.

    Returns:
        [..., D], fp32, on the device of `codes`. An element differs from the published table's by at most half of its
        row's scale, and what fp32 rounds. `docs/tables.md` has the maths.
    """
    return codes.float() * scale.unsqueeze(-1) + offset.unsqueeze(-1)


def _runs(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields rows that are worked on at a time, with the number of the first; so little memory is needed beside."""
    step = max(_RUN // max(rows.shape[1], 1), 1)
    for begin in range(0, len(rows), step):
        yield begin, rows[begin : begin + step]
