"""The order of a data set, and the position of a job in it, for any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from shardopt.data.loops import forget_loop, note_loop, refuse_past_end
from shardopt.data.workers import shield_if_listening
from shardopt.errors import MismatchError, OptionError, Problem
from shardopt.ranks import refuse_lone_processes

T = TypeVar("T")

_NO_MIXTURE = "no mixture"
_REMEDY = (
    "make the sampler as it was for the save. A grown data set, other sources or weights begin a new order: load once "
    'without the sampler, with select=r"^(?!data(\\.|$))" if its key in the app is "data"'
)

_log = logging.getLogger("shardopt")


class ResumableSampler:
    """Gives each rank its share of every global batch of a map-style data set, and resumes on any number of ranks.

        sampler = shardopt.ResumableSampler(len(dataset), batch_size=64, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        app = {..., "data": sampler}
        for batch in sampler.through(loader):   # the rest of this epoch
            ...

    The samples of an epoch are put in one order, from seed and epoch alone. A global batch is the next `batch_size` of
    them, and ranks take its samples in turn. So one number, the same on every rank, says what was seen: what `through`
    has handed to the program, not what workers have fetched ahead. Any number of ranks resumes after that. A loop that
    is not over `through` counts nothing: a resume repeats its samples.

    Args:
        size: of the data set, in samples.
        batch_size: of a global batch, in samples of all ranks together; at least the number of ranks. It may be set
            between loops; a resume keeps what was set. Where the sampler is made with another one than in the saved
            run, or has another one set before the load, that stays, and a log line says so.
        seed: of the order; not negative.
        shuffle: whether to put the samples in a random order.
        drop_last: whether to leave out what is left at the end of an epoch when it does not fill a batch. Otherwise it
            is the last batch. If it has fewer samples than there are ranks, the first samples of the epoch fill it up
            to one for each.
        rank, ranks: default: of the job, at each use; 0 of 1 in a process that was started alone. Ranks of tensor,
            context or pipeline parallelism, which need the same samples, pass those of data parallelism:
            `mesh["dp"].get_local_rank()` and `mesh["dp"].size()`.

    Raises:
        ValueError: a batch or the data set has too few samples, or rank is none of the ranks, as far as they are given;
            else at the first use.
        RankError: at the first use; a launcher has started several processes, and there is no process group.

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
        self._rank, self._ranks = rank, ranks
        self._dealt: tuple[int, int] | None = None  # rank and ranks by default, where a framework says them
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self._made_with, self.has_run = batch_size, False  # with a loop or a load: what is set then, the run has set
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = self.position = 0
        self._begun: tuple[int] | None = None  # the position at which the loop that runs over `through` began
        self._drawn_from: tuple[int, ...] | None = None  # where the batches begin that were drawn last
        self._is_awaited = False  # whether `through` waits for the first batch of what it opened
        self._random: Tensor | None = None  # the state of the random numbers to put back once a loader is opened there
        self._warned: set[str] = set()
        if rank is None or ranks is None:  # the job's may be others at the first use, as a framework says
            self._require_enough_for(1 if ranks is None else ranks)
        else:
            self._require_share(rank, ranks)

    @property
    def rank(self) -> int:
        """The rank whose samples these are."""
        return self._by_default(0, dist.get_rank) if self._rank is None else self._rank

    @property
    def ranks(self) -> int:
        """The number of ranks that share each batch."""
        return self._by_default(1, dist.get_world_size) if self._ranks is None else self._ranks

    def __len__(self) -> int:
        """The number of batches of the loop over `through` that runs; if none runs, of the next one.

        After a resume in the middle of an epoch these are those that were left.
        """
        return self._batches_from(self.position if self._begun is None else self._begun[0])

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's samples of each remaining batch of this epoch. Counts nothing, as workers run ahead."""
        self._put_back()  # with workers a loader asks twice
        if self._is_awaited:  # by what opens a loader when it is asked for its first batch, as prefetch(loader)
            self._random = torch.default_generator.get_state()
            _seed_for(self)
        return self._shares()

    def _shares(self) -> Iterator[list[int]]:
        self._put_back()
        rank, ranks, order, here = self.rank, self.ranks, self._order(), place_of(self)
        begin, size = self.position, self.batch_size
        self._require_share(rank, ranks)
        self._warn_if_uneven(ranks)
        try:
            for number in range(self._batches_from(begin)):
                batch = order[begin + number * size :][:size]
                filled = torch.cat([batch, order[: max(0, ranks - len(batch))]])
                self._drawn_from = here
                yield filled[rank::ranks].tolist()
        except GeneratorExit:  # as by next(iter(loader)), which only looks at a batch
            self._drawn_from = None
            raise

    def _put_back(self) -> None:
        """Puts torch's random numbers on the CPU back from which a loader that is opened has drawn a seed."""
        if self._random is not None:
            torch.default_generator.set_state(self._random)
            self._random = None

    def through(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the rest of this epoch from a loader with this sampler; counts each batch as it is yielded.

        After a resume behind an epoch's last batch that is none, so that what a program does at the end of an epoch is
        done. Schedules count by `app["step"]`: an index in this loop, and `len(loader)`, are of the rest of the epoch.
        Loops over epochs resume so:

            for epoch in range(data.epoch, epochs):
                for batch in data.through(loader):
                    ...

        What workers draw themselves, such as augmentations, begins anew in an epoch that is resumed in its middle, or
        any later one with `persistent_workers`. What fetches batches ahead goes inside, `through(prefetch(loader))`:
        around it, a resume would skip them. `zip`, `enumerate` and others that open the loader as they are made need
        `DataLoader(..., generator=torch.Generator())` inside: else a resume in mid-epoch has other random numbers. A
        loader that ends early, as `islice(loader, 3)` does, ends the epoch.

        Raises:
            OptionError: the batches of this DataLoader are not this sampler's, or come in another order than its own;
                or `batch_size` was set meanwhile, and this loader gives batches of another; `position` is past the end.
            MismatchError: the position was loaded meanwhile, and this loader gives the batches of another.
        """
        self._refuse_others_batches(loader)
        if not self._batches_from(self.position):
            _log.info(
                "epoch %d has no batch left, as the checkpoint was saved at its last one: the loop over it ends at "
                "once. Loops over epochs resume with range(data.epoch, epochs), and so with this one [data-position]",
                self.epoch,
            )
        begun = self._begun = (self.position,)
        self.has_run = True
        note_loop(self)
        try:
            batches, here, size = opened(loader, self), place_of(self), self.batch_size
            self._is_awaited = True
            for batch in batches:
                self._is_awaited = False
                refuse_another(self, here)
                refuse_other_batches(self, size)
                self.position = min(self.position + self.batch_size, self.size)
                here = place_of(self)
                yield batch
            refuse_another(self, here)
            self.epoch, self.position = self.epoch + 1, 0
        finally:
            if self._begun is begun:
                forget_loop(self)
                self._begun, self._is_awaited = None, False
                self._put_back()

    def state_dict(self) -> dict[str, Any]:
        """Returns size, seed, epoch, position, shuffle and batch sizes; the same on every rank.

        Logs a warning, once, if batches were drawn and none was counted, as by a loop that is not over `through`.
        """
        if self._drawn_from == place_of(self):
            self._warn_once(
                "batches were drawn from the sampler, and its position is still where they begin: a resume would repeat"
                " them. Loop over sampler.through(loader), which counts them"
            )
        return {
            "size": self.size,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "made_with_batch_size": self._made_with,
        }

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises MismatchError if the state belongs to another order: of other data, or another kind of sampler."""
        stored = {"shuffle": self.shuffle, **state_dict}  # earlier versions did not say
        own = self._order_is_of()
        problems = [
            Problem(
                name, f"{stored.get(name, _NO_MIXTURE)} in the checkpoint", f"{own.get(name, _NO_MIXTURE)}", _REMEDY
            )
            for name in ("size", "shuffle", "sizes", "shares")
            if stored.get(name) != own.get(name)
        ]
        if problems:
            raise MismatchError("a position in another order", problems, code="data-position")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes where the state was taken; its seed replaces this one, and a log line says so.

        So does a `batch_size` that was set in the saved run, if this sampler is made with the same one as that run's.
        Loaders must be iterated again.
        """
        self.check_state_dict(state_dict)
        if state_dict["seed"] != self.seed:
            self._warn_once(
                "the order of the data is the checkpoint's: "
                f"seed {self.seed} in the code, {state_dict['seed']} in the checkpoint"
            )
        self.seed, self.epoch, self.position = (state_dict[name] for name in ("seed", "epoch", "position"))
        self._take_batch_size(state_dict)
        self._drawn_from = None

    def _take_batch_size(self, state_dict: dict[str, Any]) -> None:
        """Takes a batch size that the saved run has set; one that the code of now says stays."""
        size = state_dict.get("batch_size", self.batch_size)  # earlier versions did not say
        has_run, self.has_run = self.has_run, True
        if size == self.batch_size:
            return
        is_of_code = not has_run and self.batch_size != self._made_with
        if not is_of_code and self._made_with == state_dict["made_with_batch_size"]:
            self._warn_once(f"batch_size is the checkpoint's: {self.batch_size} here, {size} in the checkpoint")
            self.batch_size = size
        else:
            self._warn_once(f"batch_size is the code's: {self.batch_size}, and {size} in the checkpoint")

    def _order_is_of(self) -> dict[str, Any]:
        """Returns what the order of an epoch depends on, beside seed and epoch, by its name in the state."""
        return {"size": self.size, "shuffle": self.shuffle}

    def _batches_from(self, position: int) -> int:
        refuse_past_end(self)
        left = self.size - position
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def _by_default(self, number: int, in_job: Callable[[], int]) -> int:
        """Returns the rank (0) or the ranks (1) where none were given.

        The job's are asked for at each use, as the process group may be made later.
        """
        if self._dealt is not None:
            return self._dealt[number]
        refuse_lone_processes("dealing samples to the ranks")
        return in_job() if dist.is_initialized() else number  # 0 of 1

    def _require_share(self, rank: int, ranks: int) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank: found {rank} of {ranks}; required 0 to {ranks - 1}; pass both, counted from 0")
        self._require_enough_for(ranks)

    def _require_enough_for(self, ranks: int) -> None:
        if self.batch_size < ranks:
            remedy = "raise it, or pass rank and ranks of data parallelism, if only these share a batch"
            raise ValueError(f"batch_size: found {self.batch_size}; required one for each of {ranks} ranks; {remedy}")
        least = self.batch_size if self.drop_last else ranks
        if self.size < least:
            found = f"{self.size} samples"
            raise ValueError(f"size: found {found}; required {least}; lower batch_size, or the number of ranks")

    def _warn_if_uneven(self, ranks: int) -> None:
        least, more = divmod(self.batch_size, ranks)
        if more:
            self._warn_once(
                f"of {self.batch_size} samples of a batch, {more} ranks get {least + 1} each and {ranks - more} get "
                f"{least}: with mean losses, samples have other weights on another number of ranks. Make batch_size a "
                "multiple of the ranks, or divide each rank's sum of losses by batch_size (times the ranks, where "
                "gradients are averaged)"
            )

    def _warn_once(self, line: str) -> None:
        if line not in self._warned and not (dist.is_initialized() and dist.get_rank()):
            _log.warning("%s [data-position]", line)
        self._warned.add(line)

    def _refuse_others_batches(self, loader: object) -> None:
        """Raises OptionError for a DataLoader that takes its batches from elsewhere, of which nothing is known here."""
        if not isinstance(loader, DataLoader):
            return
        refuse_any_order(loader)
        order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if order is not self:
            found = f"a {type(order).__name__}, which is not this sampler"
            problem = Problem("batch_sampler", found, "this sampler", "make DataLoader(dataset, batch_sampler=sampler)")
            raise OptionError("a position in the batches of another sampler", [problem], code="data-position")

    def _order(self) -> Tensor:
        """Returns the samples of this epoch in order, int64 [size]."""
        return permutation(self.size, self.seed, self.epoch) if self.shuffle else torch.arange(self.size, device="cpu")


def deal(at: ResumableSampler, rank: int, ranks: int) -> None:
    """Has a sampler give the samples of a rank, of those that share each batch as a framework says.

    Numbers that it was made with stay. Raises OptionError as `require_dealt`.
    """
    at._dealt = rank, ranks
    require_dealt(at, rank, ranks)


def require_dealt(at: ResumableSampler, rank: int, ranks: int) -> None:
    """Raises OptionError if a sampler does not give the samples of this rank, of so many that share each batch.

    Ranks of tensor parallelism would then have different samples, and no collective of theirs would notice. Fewer ranks
    may share each batch, as the program says: a framework may not know of all that need the same samples.
    """
    if at.ranks >= ranks and (at.rank, at.ranks) != (rank, ranks):
        found, required = f"rank {at.rank} of {at.ranks}", f"rank {rank} of {ranks}, as data parallelism has them"
        problem = Problem("rank", found, required, f"make the sampler or loader with rank={rank}, ranks={ranks} here")
        raise OptionError("samples that ranks do not share as their mesh says", [problem], code="data-position")


def refuse_any_order(loader: Any) -> None:
    """Raises OptionError for a DataLoader whose workers' batches come as they are ready: none could be counted then.

    A resume goes on behind as many batches as were handed out. Of these some would not be the first ones.
    """
    loader = getattr(loader, "base_dataloader", loader)  # by which those of Accelerate read
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        found, required = "False, with workers", "True: a resume would skip samples"
        problem = Problem("in_order", found, required, "leave in_order out, or num_workers")
        raise OptionError("a position in batches that come in any order", [problem], code="data-position")


def opened(loader: Iterable[T], at: ResumableSampler) -> Iterator[T]:
    """Returns an iterator over a loader, which leaves torch's random numbers on the CPU as they were.

    A DataLoader draws a seed for its workers as it is opened, and is opened again where an epoch is resumed. This seed
    is drawn from seed, epoch, position and rank.
    """
    shield_if_listening(loader)
    with torch.random.fork_rng(devices=[]):
        _seed_for(at)
        return iter(loader)


def _seed_for(at: ResumableSampler) -> None:
    # torch.manual_seed would change the generators of devices too.
    torch.default_generator.manual_seed(mixed(at.seed, at.epoch, at.position, at.rank))


def place_of(at: ResumableSampler) -> tuple[int, ...]:
    """Returns where a sampler is, as seed, epoch and position."""
    return at.seed, at.epoch, at.position


def refuse_another(at: ResumableSampler, here: tuple[int, ...]) -> None:
    """Raises MismatchError if the position is no longer that at which a loader has come."""
    if place_of(at) != here:
        found = f"epoch {at.epoch}, sample {at.position}, which was loaded in the middle of a loop"
        required = f"epoch {here[1]}, sample {here[2]}, where the loop's loader is"
        problem = Problem("position", found, required, "leave the loop after a load, and begin it again")
        raise MismatchError("a position in the data that the loader does not have", [problem], code="data-position")


def refuse_other_batches(at: ResumableSampler, size: int) -> None:
    """Raises OptionError if batches no longer have the size with which a loop began: others would be counted."""
    if at.batch_size != size:
        found, required = f"{at.batch_size}, set in the middle of a loop", f"{size}, as of the loop's loader"
        problem = Problem("batch_size", found, required, "leave the loop, set it, and begin the loop again")
        raise OptionError("batches of another size than the loader's", [problem], code="data-position")


def mixed(*seeds: int) -> int:
    """Returns one seed of 32 bits for several: torch's generator on the CPU looks at no more of its seed."""
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])


def permutation(size: int, *seeds: int) -> Tensor:
    """Returns the numbers 0 … size − 1, int64 [size], in an order that depends on non-negative seeds."""
    generator = torch.Generator("cpu").manual_seed(mixed(*seeds))
    return torch.randperm(size, generator=generator, device="cpu")
