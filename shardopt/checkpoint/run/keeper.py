"""Removes the checkpoints of a run that are no longer wanted, and the remains of dead saves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from shardopt.checkpoint.commit import remove_checkpoint, remove_checkpoints
from shardopt.checkpoint.hosts.hosts import is_on_hosts
from shardopt.checkpoint.run.history import History
from shardopt.checkpoint.run.metrics import metrics_of, record_name
from shardopt.checkpoint.run.mirror import Mirror
from shardopt.checkpoint.run.retention import Retention, steps_to_keep
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.steps import Place
from shardopt.checkpoint.sources.open import urls_being_read
from shardopt.checkpoint.storage import storage_of, wrap_os_errors
from shardopt.checkpoint.writing.pending import tracked_urls
from shardopt.errors import CheckpointError, CorruptionError
from shardopt.ranks import SharedGroup
from shardopt.world import Thread, world

_MANY_RANKS = 64  # have so many files that their removal is not waited for
_WAIT_SECONDS = 1.0

_log = logging.getLogger("shardopt.checkpoint")


class Keeper:
    """Keeps the checkpoints that the rules name, under the root of a run and where it is copied to, and no others.

    All ranks may call; rank 0 removes. A failure to remove is logged: it is no reason to end a training.

    Args:
        history: of the run, which says what is part of it.
        root: of the run.
        copies: the root of the mirror, if there is one.
        rules: which checkpoints stay.
        mirror: whose copies are under way, if there is one.
        promoting: returns the names of checkpoints that come to the root from a tier.
        group: of the ranks of the run.
    """

    def __init__(
        self,
        history: History,
        root: Root,
        copies: Root | None,
        rules: Retention,
        mirror: Mirror | None,
        promoting: Callable[[], frozenset[str]],
        group: SharedGroup,
    ) -> None:
        self._group = group
        self._history = history
        self._root, self._copies = root, copies
        self._rules = rules
        self._mirror, self._promoting = mirror, promoting
        self._metrics: dict[Place, Mapping[str, float]] = {}
        self._resumed: Place | None = None
        self._saved: Place | None = None
        self._damaged: frozenset[str] = frozenset()
        self._warned = False
        self._tidying: Thread | None = None
        self._tidied = world().event()
        self._newest: int | None = None  # committed step, below which a removal that goes on removes

    def restored(self, place: Place, damaged: Collection[str]) -> None:
        """Notes that the run was restored from a checkpoint, which stays.

        Args:
            damaged: the URLs of checkpoints of later steps that are damaged, and so count for nothing.
        """
        self._resumed, self._damaged = place, frozenset(damaged)
        self._saved, self._warned = None, False

    def make_way(self, place: Place) -> None:
        """Makes a place free to be saved to: nothing is being removed there, and no damaged checkpoint lies there."""
        if self._newest is None or place.step <= self._newest:
            self.close()  # only below the newest anything is removed
        for root in filter(None, (self._root, self._copies)):
            url = root.checkpoint(place).url
            root.forget([place])
            if url in self._damaged:
                self._say_removed([url])
                self._on_rank_0(root, lambda root: remove_checkpoint(root.checkpoint(place)))
                self._damaged -= {url}

    def tidy(self, place: Place, metrics: Mapping[str, float]) -> None:
        """Removes checkpoints that are no longer wanted under the run's root, where one was just committed.

        No save to it may be under way.

        Args:
            metrics: of that checkpoint, which stays in any case.
        """
        self._saved = place
        self._metrics[place] = metrics
        ranks = self._group.ranks
        if ranks.rank == 0 and (self._root.storage.is_remote or ranks.size > _MANY_RANKS):
            self._tidy_beside()
        else:
            self._on_rank_0(self._root, self._remove_unwanted)

    def _tidy_beside(self) -> None:
        """Removes what is unwanted in a thread, and waits for it a second: of many files, and over a network, it may
        take minutes. One at a time: what is unwanted while another goes on goes with a later save.
        """
        if self._tidying is not None and not self._tidied.is_set():
            return
        tidied = self._tidied = world().event()
        self._newest = None

        def tidy() -> None:
            try:
                self._on_rank_0(self._root, self._remove_unwanted)
            finally:
                tidied.set()

        self._tidying = world().thread(tidy, "shardopt-tidy")
        self._tidying.start()
        tidied.wait(_WAIT_SECONDS)

    def close(self) -> None:
        """Waits until nothing is being removed."""
        if self._tidying is not None:
            self._tidying.join()

    def measured(self, place: Place, metrics: Mapping[str, float]) -> None:
        """Notes the metrics of a checkpoint that was committed before: they count when next something is removed."""
        self._metrics[place] = metrics

    def delete(self, place: Place) -> bool:
        """Removes a checkpoint under both roots, whatever the rules; returns whether there was one. On rank 0."""
        self.close()
        found = False
        for root in filter(None, (self._root, self._copies)):
            found = root.is_committed(place) or found
            with wrap_os_errors(f"remove {root.checkpoint(place).url}"):
                remove_checkpoint(root.checkpoint(place))
                root.storage.remove(record_name(place.name))
            root.forget([place])
        return found

    def forget(self, place: Place) -> None:
        """Forgets what was noted of a checkpoint that was removed."""
        self._metrics.pop(place, None)
        self._saved = None if self._saved == place else self._saved
        self._resumed = None if self._resumed == place else self._resumed

    def tidy_copies(self) -> None:
        """Does the same as `tidy` under the root of the mirror, once a checkpoint was copied."""
        if self._copies is not None:
            self._on_rank_0(self._copies, self._remove_unwanted)

    def remove_beyond(self) -> None:
        """Removes checkpoints that were to go when the run was taken back; those in use now go with a later save."""
        for root in filter(None, (self._root, self._copies)):
            self._on_rank_0(root, lambda root: self._remove_removed(root, root.contents().places))

    def _remove_unwanted(self, root: Root) -> None:
        places = root.contents().places
        self._remove_removed(root, places)
        own = [place for place in places if self._history.branches.has(place)]
        whole = [each for each in root.committed_of(own) if root.checkpoint(each).url not in self._damaged]
        if not whole:
            return
        if self._rules.best is not None:
            for place in set(whole) - self._metrics.keys():
                self._metrics[place] = _metrics_or_none(root, place)
        measured = {place.step: self._metrics.get(place, {}) for place in whole}
        pinned = {place.step for place in (self._resumed, self._saved) if place is not None and place in whole}
        keep = steps_to_keep(measured, self._rules, measured, pinned)
        self._newest = max(measured)
        self._warn_of_later(self._newest)
        # Oldest first, and only below the newest: what lies above it may be a save that another process of this job,
        # not dead yet, is about to give up.
        self._remove(root, [each for each in own if each.step < max(measured) and each.step not in keep])

    def _remove_removed(self, root: Root, places: Collection[Place]) -> None:
        self._remove(root, [place for place in places if self._history.branches.is_removed(place)])

    def _remove(self, root: Root, places: Collection[Place]) -> None:
        # A checkpoint that a background save of this process writes may lie anywhere; a copy is read until it is done,
        # and what is loaded until all ranks have it.
        busy = {storage_of(url).url for url in tracked_urls() if not is_on_hosts(url)} | urls_being_read()
        names = self._promoting()
        if self._mirror is not None:
            names |= self._mirror.uploading() | (self._mirror.filling() if root is self._copies else frozenset())
        free = [place for place in places if place.name not in names and root.checkpoint(place).url not in busy]
        root.forget(free)
        self._say_removed([url for place in free if (url := root.checkpoint(place).url) in self._damaged])
        remove_checkpoints([root.checkpoint(place) for place in free])
        for place in free:
            if record_name(place.name) in root.names:
                root.storage.remove(record_name(place.name))

    def _say_removed(self, damaged: Collection[str]) -> None:
        if damaged and self._group.ranks.rank == 0:
            _log.warning("what is damaged there makes way for what is saved now: %s", ", ".join(damaged))

    def _warn_of_later(self, newest: int) -> None:
        if self._saved is not None and newest > self._saved.step and not self._warned:
            self._warned = True
            _log.warning(
                "step %d was saved where step %d is already, which is not of this job: started again, it would restore "
                "that. restore(app, step=...) takes a run back to an earlier step",
                self._saved.step,
                newest,
            )

    def _on_rank_0(self, root: Root, remove: Callable[[Root], None]) -> None:
        if self._group.ranks.rank == 0:
            try:
                remove(root)
            except (OSError, CheckpointError) as error:
                _log.warning("old checkpoints could not be removed from %s: %s", root.url, error)


def _metrics_or_none(root: Root, place: Place) -> Mapping[str, float]:
    try:
        return metrics_of(root.checkpoint(place))
    except CorruptionError as error:
        _log.warning("%s", error)
        return {}
