"""The order of a data set, and the position of a job in it, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardopt.errors import MismatchError, Problem

T = TypeVar("T")


class ResumableSampler:
    """Gives each rank its share of every global batch of a map-style data set, and resumes on any number of ranks.

        sampler = shardopt.ResumableSampler(len(dataset), batch_size=64, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        app = {..., "data": sampler}
        for batch in sampler.through(loader):   # the rest of this epoch
            ...

    The samples of an epoch are put in one order, from seed and epoch alone. A global batch is the next `batch_size` of
    them, and ranks take its samples in turn. So one number, the same on every rank, says what was seen. Any number of
    ranks resumes with exactly the samples that were not seen. It counts what `through` has handed to the program, not
    what workers have fetched ahead.

    Args:
        size: of the data set, in samples.
        batch_size: of a global batch, in samples of all ranks together; at least the number of ranks.
        seed: of the order; not negative.
        shuffle: whether to put the samples in a random order.
        drop_last: whether to leave out what is left at the end of an epoch when it does not fill a batch. Otherwise it
            is the last batch. If it has fewer samples than there are ranks, the first samples of the epoch fill it up
            to one for each.
        rank, ranks: default: of the job; 0 of 1 where torch.distributed is not initialized.

    Attributes:
        epoch: the number of the epoch, from 0; `through` counts it up at its end.
        position: how many samples of it were seen, by all ranks together.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        in_job = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else (dist.get_rank() if in_job else 0)
        self.ranks = ranks if ranks is not None else (dist.get_world_size() if in_job else 1)
        if batch_size < self.ranks:
            raise ValueError(f"batch_size: found {batch_size}; required one for each of {self.ranks} ranks; raise it")
        least = batch_size if drop_last else self.ranks
        if size < least:
            raise ValueError(f"size: found {size} samples; required {least}; lower batch_size, or the number of ranks")
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """The number of batches left in this epoch."""
        left = self.size - self.position
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's samples of each remaining batch of this epoch. Counts nothing, as workers run ahead."""
        order, begin = self._order(), self.position
        for number in range(len(self)):
            batch = order[begin + number * self.batch_size :][: self.batch_size]
            filled = torch.cat([batch, order[: max(0, self.ranks - len(batch))]])
            yield filled[self.rank :: self.ranks].tolist()

    def through(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the rest of this epoch from a loader with this sampler; counts each batch as it is yielded.

        What workers draw themselves, such as augmentations, begins anew in an epoch that is resumed in its middle.

        Raises:
            MismatchError: the position was loaded meanwhile, and this loader gives the batches of another.
        """
        batches, here = opened(loader, self), self.state_dict()
        for batch in batches:
            self._refuse_another(here)
            self.position = min(self.position + self.batch_size, self.size)
            here = self.state_dict()
            yield batch
        self._refuse_another(here)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns size, seed, epoch and position; the same on every rank."""
        return {"size": self.size, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises MismatchError if the state belongs to a data set of another size."""
        if state_dict["size"] != self.size:
            problem = Problem(
                "size", f"{state_dict['size']} samples in the checkpoint", f"{self.size}", "pass the same data set"
            )
            raise MismatchError("a position in another data set", [problem], code="data-position")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes where the state was taken; its seed replaces this one. Loaders must be iterated again."""
        self.check_state_dict(state_dict)
        self.seed, self.epoch, self.position = (state_dict[name] for name in ("seed", "epoch", "position"))

    def _refuse_another(self, here: dict[str, Any]) -> None:
        """Raises MismatchError if the position is no longer that at which a loader has come."""
        if self.state_dict() != here:
            found = f"epoch {self.epoch}, sample {self.position}, which was loaded in the middle of a loop"
            required = f"epoch {here['epoch']}, sample {here['position']}, where the loop's loader is"
            problem = Problem("position", found, required, "leave the loop after a load, and call through() again")
            raise MismatchError("a position in the data that the loader does not have", [problem], code="data-position")

    def _order(self) -> Tensor:
        """Returns the samples of this epoch in order, int64 [size]."""
        return permutation(self.size, self.seed, self.epoch) if self.shuffle else torch.arange(self.size, device="cpu")


def opened(loader: Iterable[T], at: ResumableSampler) -> Iterator[T]:
    """Returns an iterator over a loader, which leaves torch's random numbers on the CPU as they were.

    A DataLoader draws a seed for its workers as it is opened, and is opened again where an epoch is resumed. This seed
    is drawn from seed, epoch, position and rank.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would change the generators of devices too.
        torch.default_generator.manual_seed(mixed(at.seed, at.epoch, at.position, at.rank))
        return iter(loader)


def mixed(*seeds: int) -> int:
    """Returns one seed of 32 bits for several: torch's generator on the CPU looks at no more of its seed."""
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])


def permutation(size: int, *seeds: int) -> Tensor:
    """Returns the numbers 0 … size − 1, int64 [size], in an order that depends on non-negative seeds."""
    generator = torch.Generator("cpu").manual_seed(mixed(*seeds))
    return torch.randperm(size, generator=generator, device="cpu")
