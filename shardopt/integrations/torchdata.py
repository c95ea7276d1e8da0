"""torchdata's `StatefulDataLoader` with a position that is saved with the job, for any ranks if its data allows.

Samples that can be asked for by number (map-style data sets, mixtures of them, windows of a text, `Packed` documents)
have one order for the whole job: the position in it is one number, and any number of ranks resumes behind it. A stream
gives each rank samples of its own, and what of them another rank would have to leave out cannot be told from its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from shardopt.data.sampler import ResumableSampler, refuse_any_order
from shardopt.data.workers import shield_if_listening, shield_workers
from shardopt.errors import MismatchError, OptionError, Problem
from shardopt.integrations.loader import Positioned, rest_of_epoch, sampler_of
from shardopt.state.paths import all_but
from shardopt.state.state import PerRank


class ResumableStatefulLoader(Positioned, StatefulDataLoader):  # type: ignore[misc, type-arg, unused-ignore]  # torchdata has no types
    """A `StatefulDataLoader` over a map-style data set, whose position is the same on every rank.

        loader = ResumableStatefulLoader(dataset, batch_size=64, seed=0, num_workers=4)
        app = {..., "data": loader}
        for epoch in range(loader.epoch, epochs):
            for batch in loader:  # the rest of this epoch
                ...

    Each pass yields the rest of an epoch. Batches count as they are handed out, whatever workers have fetched ahead.
    With the last one the next epoch begins: what is done at an epoch's end comes before the save of its last batch, as
    in `shardopt.integrations.loader.ResumableLoader`.

    Args:
        dataset: with a length, and samples by number. An epoch has each of them once, and with `drop_last` those alone
            that fill batches.
        batch_size: of a global batch, in samples of all ranks together; at least the number of ranks.
        seed, shuffle, drop_last, rank, ranks: as for `shardopt.ResumableSampler`.
        weights: of the sources of a `ConcatDataset`, to mix them as a `shardopt.data.MixtureSampler` does.
        options: of `StatefulDataLoader`: workers, collating, pinned memory.

    Raises:
        OptionError: the data set is a stream, or `options` have a sampler of their own, or `in_order=False` with
            workers; or there are weights, and the data set is no concatenation.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
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
        _refuse(dataset, options)
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
        super().__init__(dataset, batch_sampler=_Batches(self.position), **options)
        refuse_any_order(self)

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of this epoch, from the position when the first batch is requested."""
        shield_if_listening(self)
        yield from rest_of_epoch(_Opened(super().__iter__), self.position)


class RankPosition:
    """The position of any `StatefulDataLoader` on each rank; it holds for the same number of ranks in the same mesh.

        app = {..., "data": RankPosition(loader)}

    On another number of ranks a load raises MismatchError, and changes nothing: the samples that one rank has seen of a
    stream say nothing about where two ranks are to begin. If ranks share a batch, as those of tensor parallelism, pass
    `rank` and `ranks`: else as many ranks of another mesh silently get positions of other streams.

    What opens the loader for a save, or opens it again after a load, leaves torch's random numbers on the CPU as they
    were: beside a `RandomState`, dropout goes on as if nothing had been.

    Signals to the process group of the rank, as those of torchrun, pass the loader's workers by
    (`shardopt.data.shield_workers`). A load with another `num_workers` is refused: each worker has a state of its own.

    Args:
        loader: whose position is saved and restored; not iterated yet.
        rank, ranks: of those that the data is dealt to, as for `shardopt.ResumableSampler`. They are in the key of the
            position; others are refused. None for all ranks of the job.

    Raises:
        ValueError: only one of `rank` and `ranks` is given, or `rank` is none of `ranks`.
    """

    def __init__(self, loader: StatefulDataLoader[Any], *, rank: int | None = None, ranks: int | None = None) -> None:
        self._loader, self._key = loader, "position"
        shield_workers(loader)  # always: a loader may be opened, as by a load, before a Manager listens
        if rank is not None or ranks is not None:
            if rank is None or ranks is None or not 0 <= rank < ranks:
                raise ValueError(f"rank: found {rank} of {ranks}; required 0 to ranks - 1; pass both, counted from 0")
            self._key = f"position of rank {rank} of {ranks}"

    def held_state_names(self) -> tuple[str, ...]:
        """No "state" by names of parameters; but each entry has a key of its own, maybe on some ranks alone."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):  # a loader that is not open is opened, which draws a seed
            return {self._key: _Position(self._loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Resumes where the state was taken; the loader must be iterated again."""
        loader, left = self._loader, self._loader._iterator
        loader.load_state_dict(state_dict[self._key].value)
        loader._get_iterator = MethodType(_get_iterator, loader)
        if left is not None:  # a loop over it would go on where it was, and the next save tell another position
            left._next_data = _refuse_to_go_on


class _Position(PerRank):
    """The state of a loader, which another number of workers cannot take."""

    __slots__ = ()

    def check(self, key: str, stored: Any) -> Problem | None:
        here, there = _workers_of(self.value), _workers_of(stored)
        if here == there:
            return None
        remedy = f"set num_workers={there} of the loader; or load all else: select={all_but(key)}"
        return Problem(key, f"the position of {there} workers", f"that of num_workers={here}", remedy)


def _workers_of(state: Any) -> Any:
    return state.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers", 0)


def _get_iterator(loader: Any) -> Any:
    """Opens a loader for the first time after a load. By its name, that of the method, pickle finds this one again."""
    del loader._get_iterator  # of the object: the next time it is that of the class
    with torch.random.fork_rng(devices=[]):  # the seed was drawn before the save
        return loader._get_iterator()


def _refuse_to_go_on() -> Any:
    found, required = "one that was loaded in the middle of a loop", "that of the loop's loader"
    problem = Problem("position", found, required, "leave the loop after a load, and begin it again")
    raise MismatchError("a position in the data that the loader does not have", [problem], code="data-position")


class _Opened:
    """A loader that `iter` opens, and not before: a seed is drawn then, which would count as one of the program's."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


class _Batches:
    """The batches of a sampler without its state, which torchdata would treat as one rank's position."""

    def __init__(self, positions: ResumableSampler) -> None:
        self._positions = positions

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


def _refuse(dataset: Dataset[Any], options: dict[str, Any]) -> None:
    problems = []
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        found = f"a {type(dataset).__name__}, a stream: what a rank has seen of it, or has packed, is no number"
        required = "a data set with a length, and samples by number"
        remedy = (
            "index its samples (windows of a stream have numbers, and shardopt.integrations.packed.Packed numbers "
            "packs of documents), or use RankPosition on as many ranks"
        )
        problems.append(Problem("dataset", found, required, remedy))
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            problems.append(Problem(name, "one", "none: the order is this loader's", "leave it out"))
    if problems:
        raise OptionError(
            "a position in this data does not hold for another number of ranks", problems, code="data-position"
        )
