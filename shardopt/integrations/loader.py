"""A data loader whose position is saved by the loop that it is handed to, and goes on on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from shardopt.sampler import ResumableSampler


class ResumableLoader:
    """A DataLoader over a `ResumableSampler`, as one object with a length, an order and a position.

        ResumableLoader(dataset, batch_size=64, seed=0, num_workers=2)

    An epoch that was begun is gone on with: the next iteration gives the batches that are left. A batch counts as
    seen once it is handed out; with the last one the next epoch begins.

    Args:
        dataset: map-style.
        batch_size: of a global batch, in samples of all ranks together.
        seed, shuffle, drop_last: as for `ResumableSampler`.
        options: others of torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        self.position = ResumableSampler(
            len(dataset), batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self.position, **options)

    def __len__(self) -> int:
        """The number of batches of a whole epoch, the same on any number of ranks."""
        size, batch = self.position.size, self.position.batch_size
        return size // batch if self.position.drop_last else -(-size // batch)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches that are left in this epoch."""
        left = len(self.position)
        for number, batch in enumerate(self._loader):
            at = self.position
            if number == left - 1:
                at.epoch, at.position = at.epoch + 1, 0
            else:
                at.position = min(at.position + at.batch_size, at.size)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank."""
        return self.position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where the state was taken; raises MismatchError where the data set has another size."""
        self.position.load_state_dict(state_dict)
