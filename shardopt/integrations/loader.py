"""A data loader whose position the training loop saves, and that resumes on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import ConcatDataset, DataLoader

from shardopt.data.loops import forget_loop, note_loop, refuse_past_end
from shardopt.data.mixture import MixtureSampler
from shardopt.data.sampler import (
    ResumableSampler,
    opened,
    place_of,
    refuse_another,
    refuse_any_order,
    refuse_other_batches,
)
from shardopt.errors import OptionError, Problem

T = TypeVar("T")


def sampler_of(dataset: Any, weights: Sequence[float] | None, **options: Any) -> ResumableSampler:
    """Returns the sampler of a map-style data set; with weights, one for the data sets that it concatenates.

    Raises:
        OptionError: there are weights, and the data set is no concatenation.
    """
    if weights is None:
        return ResumableSampler(len(dataset), **options)
    if not isinstance(dataset, ConcatDataset):
        required = "torch.utils.data.ConcatDataset([...]), which tells its sources"
        remedy = "concatenate the sources, or leave weights out"
        problem = Problem("dataset", f"a {type(dataset).__name__}", required, remedy)
        raise OptionError("weights are of several sources", [problem], code="data-position")
    sizes = [len(source) for source in dataset.datasets]  # type: ignore[arg-type]  # ConcatDataset refuses streams
    return MixtureSampler(sizes, weights=weights, **options)


def rest_of_epoch(batches: Iterable[T], at: ResumableSampler) -> Iterator[T]:
    """Yields the remaining batches of an epoch, and counts each; the last one begins the next epoch.

    So a loop that saves after each batch, and is not asked for one more, saves no position at the end of an epoch.

    Raises:
        MismatchError: the position was loaded meanwhile, and these are the batches of another.
        OptionError: `batch_size` of the sampler was set meanwhile, and these are batches of another.
    """
    left, here, size = len(at), place_of(at), at.batch_size
    at.has_run = True
    note_loop(at)
    try:
        for number, batch in enumerate(opened(batches, at)):
            refuse_another(at, here)
            refuse_other_batches(at, size)
            if number >= left - 1:
                at.epoch, at.position = at.epoch + 1, 0
            else:
                at.position = min(at.position + at.batch_size, at.size)
            here = place_of(at)
            yield batch
    finally:
        forget_loop(at)
    if left == 0:
        at.epoch, at.position = at.epoch + 1, 0


def position_of(loader: Any) -> ResumableSampler | None:
    """Returns the sampler with the position of one of our loaders, or the sampler that this is; else None."""
    for each in (loader, getattr(loader, "position", None)):
        if isinstance(each, ResumableSampler):
            return each
    return None


def batches_left(at: ResumableSampler) -> int:
    """Returns the number of batches that are left of an epoch, the same on any number of ranks."""
    refuse_past_end(at)
    left = at.size - at.position
    return left // at.batch_size if at.drop_last else -(-left // at.batch_size)


class Positioned:
    """A loader with one position for the whole job: that of its sampler, which is its state.

    Attributes:
        position: the sampler.
    """

    position: ResumableSampler

    @property
    def epoch(self) -> int:
        """The number of the epoch of the next batch, from 0."""
        return self.position.epoch

    def __len__(self) -> int:
        """The number of batches in a whole epoch, the same on any number of ranks."""
        at = self.position
        return at.size // at.batch_size if at.drop_last else -(-at.size // at.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, the same on every rank."""
        return self.position.state_dict()

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises MismatchError if the state belongs to another data set or mixture."""
        self.position.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes where the state was taken; the loader must be iterated again. Raises as `check_state_dict`."""
        self.position.load_state_dict(state_dict)


class ResumableLoader(Positioned):
    """A DataLoader over a `ResumableSampler`, as one object with a length, an order and a position.

        ResumableLoader(dataset, batch_size=64, seed=0, num_workers=2)

    An epoch that was begun resumes: the next iteration gives the batches that are left. A batch counts as
    seen once it is handed out; with the last one the next epoch begins. Loops over epochs resume so:

        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...
                if loader.epoch > epoch:  # this was the last batch
                    schedule.step()
                manager.save(step, app)

    What is done at an epoch's end comes before the save of its last batch. Behind the inner loop it would be left out
    by a resume from that save, which begins with the next epoch. `ResumableSampler.through` gives an empty epoch then,
    and what stands behind its loop is done.

    Args:
        dataset: map-style.
        batch_size: of a global batch, in samples of all ranks together.
        seed, shuffle, drop_last, rank, ranks: as for `ResumableSampler`.
        weights: of the sources of a `ConcatDataset`, to mix them as a `MixtureSampler` does.
        options: others of torch's DataLoader.

    Raises:
        OptionError: `options` have `in_order=False` with workers; or there are weights, and the data set is no
            concatenation.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int | None = None,
        ranks: int | None = None,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        self.position = sampler_of(
            dataset,
            weights,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            ranks=ranks,
        )
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self.position, **options)
        refuse_any_order(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the remaining batches of this epoch."""
        return rest_of_epoch(self._loader, self.position)
