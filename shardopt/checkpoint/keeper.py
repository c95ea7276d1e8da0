"""Takes away the checkpoints of a run that are no longer wanted, and what dead saves have left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from shardopt.checkpoint.metrics import metrics_of
from shardopt.checkpoint.mirror import Mirror
from shardopt.checkpoint.retention import Rules, remove_checkpoint, steps_to_keep
from shardopt.checkpoint.steps import committed_in, name_of, steps_in
from shardopt.checkpoint.storage import Storage, storage_of
from shardopt.checkpoint.unsettled import urls_unsettled
from shardopt.errors import CheckpointError, CorruptionError
from shardopt.ranks import ranks_of

_log = logging.getLogger("shardopt.checkpoint")


class Keeper:
    """Keeps what the rules say, under the root of a run and where it is copied to.

    All ranks may call; rank 0 does it. What cannot be removed is logged: that is no reason to end a training.

    Args:
        root: of the run.
        rules: what to keep.
        mirror: whose copies are under way, if there is one.
    """

    def __init__(self, root: Storage, rules: Rules, mirror: Mirror | None) -> None:
        self._root = root
        self._rules = rules
        self._mirror = mirror
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._resumed: int | None = None
        self._damaged: frozenset[int] = frozenset()

    def restored(self, step: int, damaged: Collection[int]) -> None:
        """Takes it that the run was restored from a step, whose checkpoint stays.

        Args:
            damaged: newer ones, whose checkpoints under the run's root are damaged, and so count for nothing.
        """
        self._resumed, self._damaged = step, frozenset(damaged)

    def make_way(self, step: int) -> None:
        """Removes the checkpoint of a step that is to be saved again, if it is one of the damaged."""
        if step in self._damaged:
            self._on_rank_0(lambda: remove_checkpoint(self._root.child(name_of(step))))
            self._damaged -= {step}

    def tidy(self) -> None:
        """Removes what is no longer wanted under the run's root. No save to it may be under way."""
        self._on_rank_0(lambda: self._remove_unwanted(self._root, self._damaged))

    def tidy_copies(self, copies: Storage) -> None:
        """The same under the root of the mirror, once a checkpoint was copied."""
        self._on_rank_0(lambda: self._remove_unwanted(copies, frozenset()))

    def _remove_unwanted(self, root: Storage, damaged: frozenset[int]) -> None:
        there = steps_in(root)
        committed = set(committed_in(root)) - damaged
        if not committed:
            return
        if self._rules.best is not None:
            for step in committed - self._metrics.keys():
                self._metrics[step] = _metrics_or_none(root.child(name_of(step)))
        keep = steps_to_keep(committed, self._rules, self._metrics, self._resumed)
        # A checkpoint that a background save of this process writes may lie anywhere; a copy is read until it is done.
        busy = {storage_of(url).url for url in urls_unsettled()}
        if self._mirror is not None:
            busy |= {root.child(name).url for name in self._mirror.uploading()}
        # Oldest first, and only below the newest: what lies above it may be a save that another process of this job,
        # not dead yet, is about to give up.
        for step in there:
            storage = root.child(name_of(step))
            if step < max(committed) and step not in keep and storage.url not in busy:
                remove_checkpoint(storage)

    def _on_rank_0(self, remove: Callable[[], None]) -> None:
        if ranks_of().rank == 0:
            try:
                remove()
            except (OSError, CheckpointError) as error:
                _log.warning("old checkpoints could not be removed from %s: %s", self._root.url, error)


def _metrics_or_none(checkpoint: Storage) -> Mapping[str, float]:
    try:
        return metrics_of(checkpoint)
    except CorruptionError as error:
        _log.warning("%s", error)
        return {}
