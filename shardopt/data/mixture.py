"""The order of several data sets mixed by weight, and the position of a job in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardopt.data.sampler import ResumableSampler, permutation


class MixtureSampler(ResumableSampler):
    """A `ResumableSampler` of several sources; each gives its share of every epoch, by a weight.

        sampler = shardopt.data.MixtureSampler([len(web), len(code)], weights=[3, 1], batch_size=64)
        loader = DataLoader(ConcatDataset([web, code]), batch_sampler=sampler, num_workers=2)

    A source gives the same number of samples to each epoch, and the next epoch continues where it was. So at the end of
    each epoch its samples were all drawn equally often, or some once more. Within a shuffled epoch that goes through a
    source several times, or over the end of a pass, a sample may come again before others. All of that follows from
    seed, epoch and position, so that any number of ranks resumes with what was not seen.

    Args:
        sizes: of the sources, in samples. Sample i of a source has the number i + the sizes of those before it.
        weights: of the sources: the ratio of the samples that they give. Positive.
        epoch_size: samples of an epoch, of all sources; default: the sum of `sizes`. With `drop_last`, the default,
            rounded down to full batches, so that no sample is passed over, unless `batch_size` changes within an epoch.
            Where a source would give nothing then, it is not rounded, and the last samples are left out.
        batch_size: as for `ResumableSampler`.
        options: `seed`, `drop_last`, `rank` and `ranks`, as for `ResumableSampler`; and `shuffle`: whether sources, and
            the samples of each, are in a random order. If not, a source's samples are spread evenly.

    Raises:
        ValueError: a source would give nothing to an epoch.

    Attributes:
        shares: the samples that each source gives to an epoch. A load takes those of the checkpoint, which may be of
            another `batch_size`, or by an earlier version, which did not round.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Sequence[float],
        batch_size: int,
        epoch_size: int | None = None,
        **options: Any,
    ) -> None:
        if len(sizes) != len(weights) or not sizes or min(sizes) < 1:
            found = f"sizes {[*sizes]} and weights {[*weights]}"
            raise ValueError(f"weights: found {found}; required one of each source, none of which is empty; add it")
        self._epoch_size = sum(sizes) if epoch_size is None else epoch_size
        super().__init__(self._epoch_size, batch_size=batch_size, **options)
        self.sizes, self._weights = [*sizes], [*weights]
        self.size = self._rounded()
        self.shares = _divide(self.size, weights)
        if min(self.shares) == 0:
            found = f"shares {self.shares} of an epoch of {self.size} samples"
            raise ValueError(f"epoch_size: found {found}; required one sample of each source; raise it")
        self._warn_if_left_out()

    def state_dict(self) -> dict[str, Any]:
        """Returns sizes and shares of the sources beside what a `ResumableSampler` does; the same on every rank."""
        return {**super().state_dict(), **self._shares_of_sources(), "epoch_size": self._epoch_size}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises MismatchError as `ResumableSampler` does; epochs rounded to other batches are no other order."""
        size = state_dict.get("size", 0)
        epoch_size = state_dict.get("epoch_size", size)  # earlier versions did not round
        if epoch_size == self._epoch_size and state_dict.get("shares") == _divide(size, self._weights):
            state_dict = {**state_dict, "size": self.size, "shares": self.shares}
        super().check_state_dict(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.size, self.shares = state_dict["size"], [*state_dict["shares"]]
        self._warn_if_left_out()

    def _warn_if_left_out(self) -> None:
        left = self._left_out_of(self.size)
        if left:
            anew = "" if self._left_out_of(self._rounded()) else ", and so does a run that begins anew"
            self._warn_once(
                f"epochs have {self.size} samples, and the last {left} of each are left out: a source gives some "
                f"samples again before all others. A batch_size that divides {self.size} leaves none out{anew}"
            )

    def _rounded(self) -> int:
        """Returns the size of epochs in full batches; as it was given where a source would have no share of these."""
        rounded = self._epoch_size - self._left_out_of(self._epoch_size)
        return rounded if min(_divide(rounded, self._weights)) else self._epoch_size

    def _left_out_of(self, size: int) -> int:
        return size % self.batch_size if self.drop_last else 0

    def _order_is_of(self) -> dict[str, Any]:
        # Where a source stands follows from its share of epochs.
        return {**super()._order_is_of(), **self._shares_of_sources()}

    def _shares_of_sources(self) -> dict[str, list[int]]:
        return {"sizes": [*self.sizes], "shares": [*self.shares]}

    def _order(self) -> Tensor:
        numbers, places, first = [], [], 0
        for source, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True), start=1):
            begin = self.epoch * share  # in the source's passes, one after the other
            passes = range(begin // size, (begin + share - 1) // size + 1)
            drawn = torch.cat([self._pass(source, size, number) for number in passes])
            numbers.append(first + drawn[begin % size :][:share])
            places.append((torch.arange(share, dtype=torch.float64, device="cpu") + 0.5) / share)
            first += size
        if self.shuffle:
            return torch.cat(numbers)[permutation(self.size, self.seed, self.epoch)]
        return torch.cat(numbers)[torch.argsort(torch.cat(places), stable=True)]

    def _pass(self, source: int, size: int, number: int) -> Tensor:
        """Returns the samples of a source in the order of its n-th pass."""
        if not self.shuffle:
            return torch.arange(size, device="cpu")
        return permutation(size, self.seed, number, source)  # sources count from 1: a last seed of 0 changes nothing


def _divide(size: int, weights: Sequence[float]) -> list[int]:
    """Divides a number in the ratio of weights, into integers that add up to it, by largest remainders."""
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights: found {[*weights]}; required positive numbers; leave sources out that give nothing")
    exact = np.asarray(weights, dtype=np.float64) * (size / math.fsum(weights))
    shares = np.floor(exact).astype(np.int64)
    largest = np.argsort(shares - exact, kind="stable")[: size - int(shares.sum())]
    shares[largest] += 1
    return [int(share) for share in shares]
