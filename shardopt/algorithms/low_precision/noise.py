"""Random bits that depend only on the element: the same on any mesh, in any order, and after any resume.

A 32-bit hash of the element's index in the flattened global tensor, keyed by the parameter's name, the entry and the
step. The mix is x ^= x >> 16, x *= a, x ^= x >> 15, x *= b, x ^= x >> 16, of which every output bit depends on every
input bit (constants of Chris Wellons' search for hashes of low bias); one half of the key goes in before it, and one
after the first product. int32 arithmetic wraps.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

_A, _B, _C = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32


class NoiseKey(NamedTuple):
    """Two 32-bit numbers; or int32 tensors of them, one for each run of elements."""

    before: Any
    between: Any


class Positions:
    """The positions of elements in flattened global tensors: runs of them, one position behind the other.

    Args:
        starts: of the runs, int64 [R].
        length: L, of each run.
        most: no position is greater.
    """

    def __init__(self, starts: Tensor, length: int, most: int) -> None:
        self.starts, self.length, self.most = starts, length, most

    @cached_property
    def index(self) -> Tensor:
        """All positions: int64, [R, L]."""
        return self.starts[:, None] + torch.arange(self.length, device=self.starts.device)


class Noise(NamedTuple):
    """Random bits for elements, as numbers that they follow from.

    Args:
        positions: of the elements.
        key: one for all, or one for each run.
    """

    positions: Positions
    key: NoiseKey

    def bits(self) -> Tensor:
        """Makes 32 random bits for each element: int32 [R · L]."""
        before, between = (each[:, None] if isinstance(each, Tensor) else each for each in self.key)
        return random_bits(self.positions.index, self.positions.most, NoiseKey(before, between)).view(-1)


def noise_key(name: str, entry: str, step: int) -> NoiseKey:
    """Makes the key for one step of an entry of a parameter's state, or of the parameter itself ("param")."""
    digest = blake2b(f"{name}\0{entry}\0{step}".encode(), digest_size=8).digest()
    before, between = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    return NoiseKey(before, between)


def random_bits(index: Tensor, most: int, key: NoiseKey) -> Tensor:
    """Makes 32 random bits for each element.

    Args:
        index: int64, the elements' positions in the flattened global tensor.
        most: none of them is greater.

    Returns:
        int32, new.
    """
    bits = index.to(torch.int32)  # the lower half
    bits.bitwise_xor_(key.before)
    _fold(bits, 16)
    bits.mul_(_A).add_(key.between)
    if most >= 2**32:
        bits.add_((index >> 32).to(torch.int32).mul_(_C))
    _fold(bits, 15)
    bits.mul_(_B)
    return _fold(bits, 16)


def _fold(bits: Tensor, shift: int) -> Tensor:
    """Computes x ^= x >> shift for unsigned numbers; torch's shift copies the sign."""
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
