"""The difference of two stored tensors: compares checksums first, then elements, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shardopt.checkpoint import CheckpointReader
from shardopt.checkpoint.format.tensor_bytes import dtype_name, flat_bytes
from shardopt.checkpoint.sources.equality import checksums_are_equal
from shardopt.checkpoint.sources.reading.checking import pieces_in_order
from shardopt.cli.statistics import as_array
from shardopt.sharding.box import whole

Kind = Literal["equal", "shape", "dtype", "values", "bits"]


@dataclass(slots=True)
class TensorDifference:
    """The difference between a tensor of one checkpoint and another's.

    Args:
        kind: "equal": the same bytes. "shape": of other shapes, whose values were not compared. "dtype": of other
            dtypes, with or without other values. "values": there are elements that differ. "bits": none does, but
            some have other bits (a zero of the other sign, another NaN).
        by_checksum: whether the checksums have said so, and no element was read.
        a, b: dtype and shape of each.
        elements: of the tensor.
        differing: how many elements are not equal; NaN is equal to NaN.
        other_bits: how many are equal, and have other bits. Of tensors of one dtype.
        maximum: the greatest absolute difference; NaN where one of two elements is.
        norm: the 2-norm of the difference.
        relative: that, as a share of the 2-norm of the tensor of A.
    """

    kind: Kind
    by_checksum: bool
    a: str
    b: str
    elements: int = 0
    differing: int = 0
    other_bits: int = 0
    maximum: float = 0.0
    norm: float = 0.0
    relative: float = 0.0


class _Of(NamedTuple):
    """The differences of some elements: how many are zero, the greatest, and the sum of squares."""

    differing: int
    maximum: float
    squares: float


def difference_of(
    a: CheckpointReader, key_a: str, b: CheckpointReader, key_b: str, done: Callable[[int], object]
) -> TensorDifference:
    """Compares two tensors. Local; holds some MiB of each in memory.

    Args:
        done: called with the bytes of A that are compared.

    Raises:
        CorruptionError: what is stored is not what was written.
    """
    info, other = a.info(key_a), b.info(key_b)
    found = TensorDifference(
        "equal",
        by_checksum=True,
        a=f"{dtype_name(info.dtype)} {list(info.shape)}",
        b=f"{dtype_name(other.dtype)} {list(other.shape)}",
        elements=math.prod(info.shape),
    )
    nbytes = found.elements * info.dtype.itemsize
    if info.shape != other.shape:
        found.kind, found.by_checksum = "shape", False
        done(nbytes)
        return found
    if checksums_are_equal(a, key_a, b, key_b, whole(info.shape)):
        done(nbytes)
        return found
    found.by_checksum = False
    squares = squares_of_a = 0.0
    for box in info.boxes:
        for piece in pieces_in_order(box, max(info.dtype.itemsize, other.dtype.itemsize)):
            x, y = a.read(key_a, piece), b.read(key_b, piece)
            squares_of_a += _squares(x)
            if info.dtype != other.dtype or not torch.equal(flat_bytes(x), flat_bytes(y)):
                of_piece = _compare(x, y)
                found.differing += of_piece.differing
                found.other_bits += _unequal_bits(x, y) - of_piece.differing if x.dtype == y.dtype else 0
                found.maximum = float(np.maximum(found.maximum, of_piece.maximum))  # which keeps a NaN
                squares += of_piece.squares
            done(x.nbytes)
    found.norm, of_a = math.sqrt(squares), math.sqrt(squares_of_a)
    found.relative = found.norm / of_a if of_a else (math.inf if found.norm else 0.0)
    if info.dtype != other.dtype:
        found.kind = "dtype"
    elif found.differing or found.other_bits:
        found.kind = "values" if found.differing else "bits"
    return found


def _unequal_bits(x: torch.Tensor, y: torch.Tensor) -> int:
    """Returns how many elements of two tensors of one dtype have other bits."""
    return int((flat_bytes(x) != flat_bytes(y)).reshape(-1, x.itemsize).any(dim=1).sum())


def _compare(x: torch.Tensor, y: torch.Tensor) -> _Of:
    """Compares tensors of one shape, element by element."""
    one, other = as_array(x).reshape(-1), as_array(y).reshape(-1)
    kinds = {one.dtype.kind, other.dtype.kind}
    if kinds <= {"b", "i", "u"}:
        return _summed(_integer_distances(one, other))
    wide: Any = np.complex128 if "c" in kinds else np.float64
    one, other = one.astype(wide), other.astype(wide)
    unequal = ~((one == other) | (np.isnan(one) & np.isnan(other)))
    with np.errstate(invalid="ignore", over="ignore"):
        distances = np.abs(one[unequal] - other[unequal])
        return _summed(distances.astype(np.float64))


def _integer_distances(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """Returns the distances of integers that differ; compares them exactly."""
    if {one.dtype.kind, other.dtype.kind} == {"i", "u"}:
        signed, unsigned = (one, other) if one.dtype.kind == "i" else (other, one)
        negative = signed < 0
        below = unsigned[negative].astype(np.float64) - signed[negative].astype(np.float64)
        return np.concatenate([below, _integer_distances(signed[~negative].astype(np.uint64), unsigned[~negative])])
    wide: Any = np.uint64 if {one.dtype.kind, other.dtype.kind} <= {"b", "u"} else np.int64
    one, other = one.astype(wide), other.astype(wide)
    unequal = one != other
    one, other = one[unequal], other[unequal]
    below_2_64 = np.maximum(one, other).view(np.uint64) - np.minimum(one, other).view(np.uint64)
    distances: NDArray[np.float64] = below_2_64.astype(np.float64)
    return distances


def _summed(distances: NDArray[np.float64]) -> _Of:
    if not distances.size:
        return _Of(0, 0.0, 0.0)
    with np.errstate(over="ignore"):
        return _Of(distances.size, float(distances.max()), float((distances**2).sum()))


def _squares(x: torch.Tensor) -> float:
    """Returns the sum of the squares of the finite elements."""
    magnitudes = np.abs(as_array(x).astype(np.complex128 if x.dtype.is_complex else np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        return float((magnitudes[np.isfinite(magnitudes)] ** 2).sum())
