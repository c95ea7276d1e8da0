"""Reads weights stored as codes and scales as if they were stored dequantized: any box of them.

    float8       codes [.., R, C] of float8_e4m3fn, scales [.., R/r, C/c]: each block of r × c codes has one factor
    mxfp4        codes [E, R, C/32, 16], scales [E, R, C/32]: two codes in a byte, the lower bits first

Nothing is held: what a reader asks for is computed from the codes and scales of just the blocks that it lies in.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import add, floordiv, sub
from typing import NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.tensor_bytes import bytes_of, torch_dtype
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.fetch import fetch_here
from shardopt.checkpoint.sources.reading.open_file import ComputedFile, Form, ReadRequest, form_of
from shardopt.checkpoint.storage import Span, Storage
from shardopt.sharding.box import Box, boxes_of_range, whole
from shardopt.sharding.pieces import Piece

FP4_PER_SCALE = 32
"""The number of mxfp4 codes per scale."""
BYTES_PER_SCALE = FP4_PER_SCALE // 2
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_WORD_BITS = 64  # of an address: those that count bytes, and each of those above, which say what box they are of


class Quantized(NamedTuple):
    """A weight stored as codes and scales.

    Args:
        codes, scales: their keys.
        dtype: in which it is offered.
        sizes: of the weight, in the order of the dimensions of its codes.
        order: which dimension of the weight each of those is.
        block: codes under one scale along the last two dimensions of float8; None for mxfp4.
    """

    codes: str
    scales: str
    dtype: Dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    block: tuple[int, int] | None


class DequantizedFile(ComputedFile):
    """The weights whose codes are in one file, as if the file stored the weights.

    Any box of a weight has a range of addresses of its own: its bytes in C order, above the numbers that say which
    box it is. So nothing has to be kept of what was asked for. Codes and scales are checked as what they are.

    Args:
        stored: a reader of codes and scales.
        weights: by key.
    """

    def __init__(self, storage: Storage, name: str, stored: CheckpointReader, weights: Mapping[str, Quantized]) -> None:
        super().__init__(storage, name)
        self._stored, self._weights = stored, [*weights.values()]
        self._numbers = {key: number for number, key in enumerate(weights)}

    def entry(self, key: str, form: Form) -> Entry:
        return self._entry(key, whole(self._weights[self._numbers[key]].sizes))

    def requests(
        self, targets: Iterable[tuple[str, Tensor]], form: Form, dtype: Dtype, sizes: tuple[int, ...], wanted: Box
    ) -> Iterator[ReadRequest]:
        for key, target in targets:
            order = self._weights[self._numbers[key]].order
            box = Box(tuple(wanted.offsets[dim] for dim in order), tuple(wanted.sizes[dim] for dim in order))
            yield ReadRequest(self, self._entry(key, box), dtype, box.sizes, whole(box.sizes), target.permute(order))

    def _entry(self, key: str, box: Box) -> Entry:
        number = self._numbers[key]
        form = form_of(self._weights[number].dtype, box)
        words = (1 + number, *box.offsets, *box.sizes)  # the first is not 0: so the address says how many there are
        begin = int.from_bytes(struct.pack(f">{len(words)}Q", *words)) << _WORD_BITS
        return Entry(key, form.dtype, form.shape, begin, begin + form.nbytes, 0)

    def fill(self, spans: Sequence[Span]) -> None:
        for address, memory in spans:
            raw, begin = address >> _WORD_BITS, address & ((1 << _WORD_BITS) - 1)
            count = -(-raw.bit_length() // _WORD_BITS)
            number, *numbers = struct.unpack(f">{count}Q", raw.to_bytes(8 * count))
            weight = self._weights[number - 1]
            offsets, sizes = numbers[: count // 2], numbers[count // 2 :]
            itemsize, at = weight.dtype.itemsize, 0
            for box in boxes_of_range(sizes, begin // itemsize, (begin + memory.nbytes) // itemsize):
                read = self._dequantized(weight, Box(tuple(map(add, offsets, box.offsets)), box.sizes))
                memory[at : at + read.nbytes] = bytes_of(read)
                at += read.nbytes

    def _dequantized(self, weight: Quantized, box: Box) -> Tensor:
        """Returns a box of a weight, dequantized and contiguous, in the order of its codes."""
        numbers = self._times_scales(weight, box, weight.block) if weight.block else self._mxfp4(weight, box)
        return numbers.to(torch_dtype(weight.dtype)).contiguous()

    def _times_scales(self, weight: Quantized, box: Box, block: tuple[int, int]) -> Tensor:
        per_dim = (*(1,) * (len(box.sizes) - 2), *block)
        first = tuple(map(floordiv, box.offsets, per_dim))
        ends = (-(-end // per) for end, per in zip(box.ends, per_dim, strict=True))
        scales = self._read(weight.scales, Box(first, tuple(map(sub, ends, first)))).float()
        for dim in (-2, -1):
            blocks = torch.arange(box.offsets[dim], box.ends[dim], device="cpu") // block[dim] - first[dim]
            scales = scales.index_select(dim, blocks)
        return self._read(weight.codes, box).float().mul_(scales)

    def _mxfp4(self, weight: Quantized, box: Box) -> Tensor:
        *outer, begin = box.offsets
        first, end = begin // FP4_PER_SCALE, -(-box.ends[-1] // FP4_PER_SCALE)
        of_scales = Box((*outer, first), (*box.sizes[:-1], end - first))
        of_codes = Box((*of_scales.offsets, 0), (*of_scales.sizes, BYTES_PER_SCALE))
        pairs = self._read(weight.codes, of_codes)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).int()
        numbers = torch.tensor(_FP4, dtype=torch.float32, device="cpu")[codes]
        scales = self._read(weight.scales, of_scales).view(torch.float8_e8m0fnu).float()
        values = numbers.mul_(scales.unsqueeze(-1)).flatten(-2)
        return values.narrow(-1, begin - first * FP4_PER_SCALE, box.sizes[-1])

    def _read(self, key: str, box: Box) -> Tensor:
        target = torch.empty(box.sizes, dtype=self._stored.info(key).dtype, device="cpu")
        fetch_here(self._stored.requests([(key, [Piece(box, target)])]))
        return target
