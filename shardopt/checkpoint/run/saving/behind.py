"""What follows each commit of a run, behind its training.

A checkpoint on a tier goes to other hosts, other tiers and the root (`tiers/`). One under the root is copied to the
mirror and exported, and those that are no longer wanted are removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial

from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.format.metrics import numbers_of
from shardopt.checkpoint.hosts.hosts import is_on_hosts
from shardopt.checkpoint.reports import SaveReport
from shardopt.checkpoint.run.export import Exporter
from shardopt.checkpoint.run.failures import Failures
from shardopt.checkpoint.run.history import History
from shardopt.checkpoint.run.keeper import Keeper
from shardopt.checkpoint.run.metrics import add_to, metrics_of, save_id_of
from shardopt.checkpoint.run.mirror import Mirror
from shardopt.checkpoint.run.restoring import Restored
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.saving.due import Due
from shardopt.checkpoint.run.saving.slow_saves import SlowSaves
from shardopt.checkpoint.run.steps import Place
from shardopt.checkpoint.run.tiers.tiers import Tiers
from shardopt.checkpoint.storage import storage_of, wrap_os_errors
from shardopt.errors import CheckpointNotFoundError, Problem
from shardopt.ranks import SharedGroup
from shardopt.world import world


class Behind:
    """Begins what follows a commit, and keeps what came of it. All ranks make the same calls.

    Args:
        root: of the run.
        due: which says what of the tiers goes to the root too.
        history: of the run.
        tiers: of the run, which may be none.
        mirror: of the run, if there is one, and `copies` its root.
        exporter: on rank 0, if there is one.
        keeper: which removes what is no longer wanted.
        slow_saves: which is told how long saves took.
        group: of the ranks of the run.
    """

    def __init__(
        self,
        root: Root,
        due: Due,
        history: History,
        tiers: Tiers,
        mirror: Mirror | None,
        copies: Root | None,
        exporter: Exporter | None,
        keeper: Keeper,
        slow_saves: SlowSaves,
        group: SharedGroup,
    ) -> None:
        self._root, self._due, self._history = root, due, history
        self.tiers, self.mirror, self._copies = tiers, mirror, copies
        self._exporter, self._keeper, self._slow_saves = exporter, keeper, slow_saves
        self._group = group
        self._copying = [each for each in (tiers, mirror) if each]
        self._known: dict[Place, str] = {}  # what was committed or restored here, and where
        self._save_ids: dict[Place, str] = {}  # of these
        self._added: dict[Place, dict[str, float]] = {}  # metrics, after the commit
        self.base: str | None = None
        """The URL of the last checkpoint that is known under the root."""
        self._committing = world().lock()

    def prepare(self, place: Place, in_turn: bool) -> None:
        """Makes a place free to be saved to, and sees that copies can be made. Collective.

        Args:
            in_turn: as for `committed`.
        """
        if self.mirror is not None:
            self.mirror.prepare()
        with self._committing:
            self._keeper.make_way(place)
            self._added.pop(place, None)
        if self.tiers and in_turn:
            self.tiers.make_room()

    def committed(self, place: Place, report: SaveReport, metrics: Mapping[str, float], in_turn: bool) -> None:
        """Begins what follows the commit of a checkpoint. No save is under way then.

        Args:
            metrics: of the checkpoint.
            in_turn: whether what is begun is begun after what tiers have begun: in one order on all ranks.
        """
        self._known[place] = report.url if is_on_hosts(report.url) else self._root.checkpoint(place).url
        self._save_ids[place] = report.save_id
        then = partial(self._committed_at_root, place, report.seconds, metrics)
        if is_on_hosts(report.url):
            self.tiers.committed(place, report.url, self._due.was_at(place.step), then)
        elif self.tiers and in_turn:
            self.tiers.committed_at_root(place, then)
        else:
            then()

    def _committed_at_root(self, place: Place, seconds: float | None, metrics: Mapping[str, float] | None) -> None:
        """Does the same for a checkpoint that is under the root; one from a tier may come beside another save.

        Args:
            metrics: None where they are to be read.
        """
        checkpoint = self._root.checkpoint(place)
        metrics = metrics_of(checkpoint) if metrics is None else metrics
        with self._committing:
            metrics = {**metrics, **self._added.get(place, {})}
            self._slow_saves.look_at(checkpoint.url, seconds)
            self._known[place] = self.base = checkpoint.url
            if self.mirror is not None:
                self._copy(self.mirror, place)
            if self._exporter is not None:
                self._exporter.offer(place, checkpoint.url, metrics)
            self._keeper.tidy(place, metrics)

    def restored(self, restored: Restored | None) -> None:
        """Begins what an earlier process of the job may not have been done with. Collective.

        Args:
            restored: the checkpoint from which the run goes on; None where there was none.
        """
        branches = self._history.branches
        if restored is None:
            self.tiers.restored(None, None, branches, False, lambda: None)
            return
        (place, url), seconds = restored.candidate, restored.report.save_seconds
        self._known, self._save_ids = {place: url}, {place: restored.report.save_id}
        self.base = url if url == self._root.checkpoint(place).url else None  # and not a copy elsewhere
        self._keeper.restored(place, restored.damaged)
        self.copy_newest(restored.damaged)
        then = partial(self._committed_at_root, place, seconds, None)
        self.tiers.restored(place, url, branches, self._due.may_have_been_at(place.step), then)
        self._slow_saves.look_at(url, seconds)

    def copy_newest(self, damaged: Collection[str] = ()) -> None:
        """Begins to copy the newest checkpoint under the root to the mirror. Collective.

        Args:
            damaged: the URLs of those that are not to be copied.
        """
        if self.mirror is not None:
            newest = self._history.newest_under_root(damaged)
            if newest is not None:
                self._copy(self.mirror, newest)

    def add_metrics(self, place: Place, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a checkpoint that is committed, wherever it is. Collective; rank 0's count.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            StateError: something is no number.
        """
        ranks, checkpoint = self._group.ranks, self._root.checkpoint(place)

        def add() -> None:
            save_id = self._save_ids.get(place)
            roots = [checkpoint] if self._copies is None else [checkpoint, self._copies.checkpoint(place)]
            if save_id is None:
                save_id = next((found for root in roots if (found := save_id_of(root)) is not None), None)
            if save_id is None:
                raise _not_found(place, self._root, self._history)
            numbers = numbers_of(metrics)
            with self._committing, wrap_os_errors(f"write the metrics of {checkpoint.url}"):
                for root in roots:
                    add_to(root, save_id, numbers)
                self._added[place] = {**self._added.get(place, {}), **numbers}
                if self._root.is_committed(place):
                    measured = metrics_of(checkpoint)
                    self._keeper.measured(place, measured)
                    if self._exporter is not None:
                        self._exporter.offer(place, checkpoint.url, measured)

        ranks.agree(
            f"adding metrics to step {place.step} of {self._root.url}",
            work=lambda: numbers_of(metrics),
            report=lambda _: None,
            decide=lambda _: add(),
        )

    def delete(self, place: Place) -> None:
        """Removes a checkpoint wherever it is: under both roots, and on tiers. Collective; nothing is under way.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: it could not be removed.
        """
        on_tiers = any(each.place == place for each in self.tiers.candidates())

        def delete() -> None:
            if not self._keeper.delete(place) and not on_tiers:
                raise _not_found(place, self._root, self._history)

        self._group.ranks.on_rank_0(f"removing step {place.step} of {self._root.url}", delete)
        if on_tiers:
            self.tiers.delete(place)
        self._keeper.forget(place)
        for known in (self._known, self._save_ids, self._added):
            known.pop(place, None)
        if self.base == self._root.checkpoint(place).url:
            self.base = None

    def url_of(self, place: Place, at_root: bool) -> str | None:
        """Returns where a checkpoint is that was committed or restored here; None if there is none. Collective.

        Args:
            at_root: whether one that a tier alone has does not count; it may be on its way to the root.
        """
        if at_root and is_on_hosts(self._known.get(place, "")):
            self.tiers.finish()
        url = self._known.get(place)
        if url is None or (at_root and is_on_hosts(url)):
            return None
        is_there = self._group.ranks.on_rank_0(
            f"looking for step {place.step} in {self._root.url}",
            lambda: is_on_hosts(url) or storage_of(url).exists(MANIFEST_NAME),
        )
        return url if is_there else None

    @property
    def copies(self) -> bool:
        """Whether anything is copied, and so may fail behind the training."""
        return bool(self._copying)

    def finish(self) -> None:
        """Waits until nothing is being copied. Local; a failure stays to be raised."""
        for each in self._copying:
            each.finish()

    def take_failures(self) -> list[BaseException]:
        """Returns the failures of copies that were not raised yet, once; does not wait. Local."""
        return [failure for each in self._copying if (failure := each.failures.take()) is not None]

    def raise_failure(self) -> None:
        """Raises the failure of a copy on all ranks: threads of some may not have met it yet. Collective."""
        ranks, doing = self._group.ranks, f"copying checkpoints of {self._root.url}"
        _, failed = ranks.agree(
            doing,
            work=lambda: [each.failures.newest for each in self._copying],
            report=lambda numbers: numbers,
            decide=lambda reports: [max(numbers) for numbers in zip(*reports, strict=True)],
        )
        for each, number in zip(self._copying, failed, strict=True):
            if number:
                work = partial(_raise_taken, each.failures, number)
                ranks.agree(doing, work=work)

    def close(self) -> None:
        """Waits as `finish` does, and gives back what copies need. Raises the failure of a copy. Local."""
        with ExitStack() as last_first:
            last_first.callback(self._raise_failure)
            for each in reversed(self._copying):
                last_first.callback(each.close)

    def _raise_failure(self) -> None:
        for each in self._copying:
            _raise_taken(each.failures)

    def _copy(self, mirror: Mirror, place: Place) -> None:
        mirror.begin(place.name, afterwards=lambda _: self._keeper.tidy_copies())


def _not_found(place: Place, root: Root, history: History) -> CheckpointNotFoundError:
    run, _ = history.committed_here()
    there = f"steps {', '.join(str(each.step) for each in run)}" if run else "no committed checkpoint"
    problem = Problem(root.url, there, f"step {place.step}", "give one of the steps that are there")
    return CheckpointNotFoundError("there is no checkpoint of this step", [problem])


def _raise_taken(failures: Failures, until: int | None = None) -> None:
    failure = failures.take(until)
    if failure is not None:
        raise failure
