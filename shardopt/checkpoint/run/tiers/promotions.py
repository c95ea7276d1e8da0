"""Brings checkpoints of tiers to the root, in a thread of its own: a root out of reach delays no copy on hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from shardopt.checkpoint.hosts.whole import WholeCheckpoint
from shardopt.checkpoint.run.background import Turns
from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.run.copying import copy_over_ranks
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.text import nbytes_text
from shardopt.errors import CheckpointError
from shardopt.ranks import Ranks
from shardopt.runtime.program_end import fail_at_end_if
from shardopt.world import world

_PAUSE_SECONDS = 60.0
_ROUND_SECONDS = 5.0  # after which the other ranks say again whether they go on
_POLL_SECONDS = 1.0  # of what it waits for: a newer step, or that nobody goes on
_MANY_WAIT = 3

_Verdict = Literal["try", "wait", "leave", "raise"]
_log = logging.getLogger("shardopt.checkpoint")


@dataclass(slots=True, eq=False)
class Arrival:
    """A checkpoint that is to come to the root, or is there.

    Args:
        ranks: of the side channel on which it is copied.
        whole: its files on a tier; None for one that was saved to the root.
        then: called once the root has it.
        is_begun: on rank 0, whether it is being copied.
        given_up: whether a newer one takes its place.
    """

    id: CheckpointId
    ranks: Ranks
    whole: WholeCheckpoint | None
    then: Callable[[], None]
    is_begun: bool = False
    given_up: bool = False


class Promotions(Turns[Arrival]):
    """Copies checkpoints from tiers to the root, in the order in which they begin, which is the same on all ranks.

    While the root cannot be reached, only the newest is kept for it, and tried again each minute: a tier is to have
    room for the next saves, and holds what is newer. Each failure is logged. It is raised once somebody waits for the
    root to have all, as at the end of a program.

    Attributes:
        looks_away: on rank 0, whether the root gave no answer when it was last listed.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.looks_away = self._has_failed = self._drops = False
        self._told_at = _MANY_WAIT  # steps that wait, of which a line tells next
        self._is_last_try = False  # whether the attempt began after somebody waits for it
        self._tries_at = 0.0  # again, after a failure
        super().__init__(
            self._do_one, lambda each: f"bringing step {each.id.step} to {root.url}", "shardopt-promote", True
        )

    def reset(self) -> None:
        super().reset()
        self._lock = world().lock()
        self._waiting = 0  # calls of `finish`

    def names(self) -> frozenset[str]:
        """Returns the names of checkpoints that come to the root, and must stay on their tiers. Local."""
        return frozenset(each.id.name for each in self.jobs if each.whole is not None and not each.given_up)

    def supersede(self) -> list[CheckpointId]:
        """Returns those that wait, while the root is away, and that a newer one makes needless. On rank 0."""
        waiting = self._promoted()
        if not (self.looks_away or self._has_failed):
            self._tell_of_slow([each.whole for each in waiting if each.whole is not None and not each.is_begun])
            return []
        with self._lock:
            needless = [each for each in waiting[:-1] if not (each.is_begun or each.given_up)]
            for each in needless:
                each.given_up = True
            return [each.id for each in needless]

    def _tell_of_slow(self, waiting: Sequence[WholeCheckpoint]) -> None:
        """Warns that steps wait for a root that takes each for longer than the next one comes: tiers keep them all."""
        if len(waiting) >= self._told_at:
            self._told_at, files = 2 * len(waiting), [file for each in waiting for file in each.manifest.own_files]
            _log.warning(
                "%d steps wait for %s, which takes each for longer than the next one comes. Tiers keep them till then, "
                "%s on all hosts together, and will be full: save to the root less often (every=) [no-space]",
                *(len(waiting), self._root.url, nbytes_text(sum(file.nbytes for file in files))),
            )

    def give_up(self, ids: Collection[CheckpointId]) -> None:
        """Gives up those that rank 0 found needless: tiers may remove them. On the other ranks."""
        for each in self.jobs:
            each.given_up = each.given_up or each.id in ids

    def settle(self) -> None:
        """Waits until all are done, or the root is known to be out of reach, which raises nothing later. Local."""
        while self.jobs and not self._has_failed:
            super().finish(_POLL_SECONDS)

    def drop(self) -> None:
        """Waits until all are done, or given up after a failure, as the run continues from another step. Local."""
        self._drops = True
        try:
            super().finish()
        finally:
            self._drops = False

    def finish(self, seconds: float | None = None) -> None:
        with self._lock:
            self._waiting += 1
        try:
            super().finish(seconds)
        finally:
            with self._lock:
                self._waiting -= 1

    def _do_one(self, arrival: Arrival) -> None:
        try:
            with arrival.ranks.beating():
                if arrival.whole is None or self._promote(arrival, arrival.whole):
                    arrival.then()
        except BaseException:
            _failed.add(self)
            raise

    def _promote(self, arrival: Arrival, whole: WholeCheckpoint) -> bool:
        """Copies a checkpoint to the root; returns whether it is there. Collective, on its ranks."""
        ranks, target = arrival.ranks, self._root.checkpoint(arrival.id)
        what = f"bringing {arrival.id.name} to {self._root.url}"
        verdict: _Verdict = ranks.on_rank_0(what, lambda: self._begin(arrival))
        while verdict == "try":
            try:
                copy_over_ranks(ranks, whole, target, lambda: (whole.manifest, whole.record))
            except CheckpointError as error:  # the same on all ranks
                if error.code != "storage-failed":
                    raise
                if ranks.rank == 0:
                    _log.error("%s failed, and is tried again with the newest step: %s", what, error)
                self._has_failed, self._tries_at = True, world().monotonic() + _PAUSE_SECONDS
                verdict = "wait"
                while verdict == "wait":
                    _, verdict = ranks.agree(
                        what,
                        work=self._is_awaited,
                        report=bool,
                        decide=lambda ranks_wait: self._after_failure(arrival, any(ranks_wait)),
                    )
                if verdict == "raise":
                    raise
            else:
                self._has_failed = False
                return True
        if ranks.rank == 0:
            _log.warning(
                "step %d does not come to %s, as that is out of reach: a newer one does",
                arrival.id.step,
                self._root.url,
            )
        return False

    def _begin(self, arrival: Arrival) -> _Verdict:
        with self._lock:
            self._is_last_try = self._is_awaited()
            arrival.is_begun = not arrival.given_up
            return "try" if arrival.is_begun else "leave"

    def _after_failure(self, arrival: Arrival, is_awaited: bool) -> _Verdict:
        """Waits for a while, or until there is a newer one, or somebody waits for this one. On rank 0.

        For a few seconds: another rank whose program has failed is to end, and says so in the next round.

        Args:
            is_awaited: whether somebody does on any rank.
        """
        until = world().monotonic() + _ROUND_SECONDS
        while self._promoted()[-1] is arrival and not self._drops:
            if self._is_last_try:
                return "raise"
            self._is_last_try = is_awaited or self._is_awaited()
            if self._is_last_try or world().monotonic() >= self._tries_at:
                return "try"
            if world().monotonic() >= until:
                return "wait"
            world().sleep(_POLL_SECONDS)
        return "leave"

    def _promoted(self) -> list[Arrival]:
        return [each for each in self.jobs if each.whole is not None]

    def _is_awaited(self) -> bool:
        return self._waiting > 0 or not world().main_thread_lives()


_failed: set[Promotions] = set()
"""Those with failures, which may have been raised since; kept as their Managers may be gone."""


def _fails_at_end() -> bool:
    """Whether a failure was not raised, as where the program has waited for nothing: it was logged."""
    return any(each.failures.newest for each in _failed)


fail_at_end_if(_fails_at_end)
