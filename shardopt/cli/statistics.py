"""Statistics of a stored tensor, read piece by piece with some MiB in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from shardopt.checkpoint import CheckpointReader
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.sources.contents import CheckpointContents
from shardopt.checkpoint.sources.reading.checking import pieces_in_order

BINS = 20
"""The largest number of bins in a histogram."""

_LARGEST_SQUARED, _SMALLER = 2.0**400, 2.0**-600  # beyond it numbers are made smaller, as sums of squares overflow


@dataclass(slots=True)
class Statistics:
    """Numbers about the elements of a tensor.

    Args:
        elements: how many there are.
        nan, positive_infinity, negative_infinity, zeros: how many of these.
        minimum, maximum: of those that are finite, exact for integers; None where there are none.
        mean, std: of those that are finite, in fp64; std is that of a population.
        magnitudes: whether all of this is of absolute values, as of a complex tensor.
        edges: of the bins of the histogram, one more than these; the last bin has its upper edge in it.
        counts: of the bins.
    """

    elements: int = 0
    nan: int = 0
    positive_infinity: int = 0
    negative_infinity: int = 0
    zeros: int = 0
    minimum: float | int | None = None
    maximum: float | int | None = None
    mean: float | None = None
    std: float | None = None
    magnitudes: bool = False
    edges: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


def reader_of(contents: CheckpointContents) -> CheckpointReader:
    """Returns a reader for the tensors of an open checkpoint."""
    return CheckpointReader(contents.source)


def statistics_of(reader: CheckpointReader, key: str, progress: Progress | None = None) -> Statistics:
    """Reads a tensor twice: for its range, and for the histogram. Local.

    Args:
        progress: called with the bytes that are done and all that are to be read.

    Raises:
        CorruptionError: what is stored is not what was written.
    """
    info = reader.info(key)
    done = Counter(2 * math.prod(info.shape) * info.dtype.itemsize, progress)
    result = Statistics(magnitudes=info.dtype.is_complex)
    finite = 0
    mean = squares = 0.0  # of the deviations from the mean, both of numbers times `scale`
    scale = 1.0
    for numbers in _pieces(reader, key, done):
        result.elements += numbers.size
        result.zeros += int(np.count_nonzero(numbers == 0))
        if numbers.dtype.kind == "f":
            result.nan += int(np.count_nonzero(np.isnan(numbers)))
            result.positive_infinity += int(np.count_nonzero(numbers == np.inf))
            result.negative_infinity += int(np.count_nonzero(numbers == -np.inf))
            numbers = numbers[np.isfinite(numbers)]
        if not numbers.size:
            continue
        low, high = numbers.min().item(), numbers.max().item()
        result.minimum = low if result.minimum is None else min(low, result.minimum)
        result.maximum = high if result.maximum is None else max(high, result.maximum)
        # Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
        doubles = numbers.astype(np.float64)
        if scale == 1.0 and max(-low, high) > _LARGEST_SQUARED:
            mean, squares, scale = mean * _SMALLER, squares * _SMALLER * _SMALLER, _SMALLER
        if scale != 1.0:
            doubles *= scale
        own_mean = float(doubles.mean())
        delta, total = own_mean - mean, finite + numbers.size
        squares += float(((doubles - own_mean) ** 2).sum()) + delta * delta * finite * numbers.size / total
        mean += delta * numbers.size / total
        finite = total
    if result.minimum is not None and result.maximum is not None:
        result.mean, result.std = mean / scale, math.sqrt(squares / finite) / scale
        _fill_histogram(result, _pieces(reader, key, done))
    return result


def _fill_histogram(result: Statistics, pieces: Iterator[NDArray[np.generic]]) -> None:
    low, high = result.minimum, result.maximum
    assert low is not None and high is not None
    whole_numbers = isinstance(low, int)
    bins = min(BINS, int(high) - int(low) + 1) if whole_numbers else BINS
    if whole_numbers and 1 < bins == int(high) - int(low) + 1:
        high = int(high) + 1  # a bin for each number
    counts = np.zeros(bins, dtype=np.int64)
    width = float(high) / 2 - float(low) / 2  # halves, since the whole may be beyond the range of fp64
    if not width:  # fp64 has no number between these: one bin
        finite = result.elements - result.nan - result.positive_infinity - result.negative_infinity
        result.edges, result.counts = [float(low), float(high)], [finite]
        return
    for numbers in pieces:
        doubles = numbers.astype(np.float64)
        doubles = doubles[np.isfinite(doubles)]
        places = ((doubles / 2 - float(low) / 2) / width * bins).astype(np.int64)
        counts += np.bincount(np.clip(places, 0, bins - 1), minlength=bins)
    shares = [i / bins for i in range(bins + 1)]
    result.edges = [2 * (float(low) / 2 * (1 - share) + float(high) / 2 * share) for share in shares]
    result.counts = counts.tolist()


def _pieces(reader: CheckpointReader, key: str, done: Counter) -> Iterator[NDArray[np.generic]]:
    """Yields all elements of a tensor, in stored order."""
    info = reader.info(key)
    for box in info.boxes:
        for piece in pieces_in_order(box, info.dtype.itemsize):
            tensor = reader.read(key, piece)
            done.add(tensor.nbytes)
            yield as_numbers(tensor).reshape(-1)


def as_numbers(tensor: torch.Tensor) -> NDArray[np.generic]:
    """Returns elements of a CPU tensor in a dtype that NumPy has; magnitudes for complex ones."""
    if tensor.dtype.is_complex:
        return np.abs(as_array(tensor).astype(np.complex128))
    array = as_array(tensor)
    return array.astype(np.uint8) if array.dtype.kind == "b" else array


def as_array(tensor: torch.Tensor) -> NDArray[np.generic]:
    """Returns elements of a CPU tensor in a dtype that NumPy has, without loss."""
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    elif tensor.dtype == torch.bfloat16 or (tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point):
        tensor = tensor.float()
    array: NDArray[np.generic] = tensor.numpy()
    return array
