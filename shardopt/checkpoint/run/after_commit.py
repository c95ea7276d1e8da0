"""The background tasks that follow each commit of a run: a chain, in one order on all ranks.

tiers → root → mirror, export, retention        (docs/architecture.md has the order and who raises what)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.format.metrics import first_given, numbers_of
from shardopt.checkpoint.hosts.served import is_on_hosts
from shardopt.checkpoint.reports import SaveReport
from shardopt.checkpoint.run.background import Task
from shardopt.checkpoint.run.branches import CheckpointId, not_restored
from shardopt.checkpoint.run.context import Restored, Run
from shardopt.checkpoint.run.export import Exporter
from shardopt.checkpoint.run.keeper import Keeper
from shardopt.checkpoint.run.metrics import Noted, add_to, added_to, noted_of
from shardopt.checkpoint.run.mirror import MirrorCopier
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.shares import TIERS_NAME
from shardopt.checkpoint.run.tiers.tiers import Tiers, warn_of_former
from shardopt.checkpoint.saving.removal import committed_id
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.errors import CheckpointError
from shardopt.world import world

_SLOW_SHARE = 0.5  # of the time to stop: the rest is for what comes before the save, a step and a save under way
_MOST_KNOWN = 1000  # checkpoints, in a run that saves for months: who saves an older one again gets an error
_log = logging.getLogger("shardopt.checkpoint")


class _Known(NamedTuple):
    """A checkpoint that was committed or restored here.

    Args:
        url: where it is.
        save_id: the id of its save.
        added: metrics, of the save and after the commit; on rank 0. Those of one restored: after it.
    """

    url: str
    save_id: str
    added: dict[str, float]


class AfterCommit:
    """Begins the tasks that follow a commit, and keeps their results. All ranks make the same calls.

    Args:
        run: whose checkpoints these are.
        tiers: None where there are none.
        exporter: on rank 0, if there is one.
        stop_seconds: that a job asked to stop has, on rank 0: it warns, once, of saves that take too long for
            that; None where nothing is to be said.

    Attributes:
        base: the URL of the last checkpoint that is known under the root.
        copying: the tasks that copy on all ranks, and so may fail in the background.
    """

    def __init__(self, run: Run, tiers: Tiers | None, exporter: Exporter | None, stop_seconds: float | None) -> None:
        self._run, self.tiers, self._mirror, self._exporter = run, tiers, run.mirror, exporter
        self._keeper, self._stop_seconds = Keeper(run, self._in_use), stop_seconds
        of_tiers = [] if tiers is None else [tiers, tiers.promotions]
        self.copying: list[Task] = [*of_tiers, *([] if run.mirror is None else [run.mirror])]
        self._known: dict[CheckpointId, _Known] = {}  # the same ones on all ranks
        self._committing = world().lock()
        self.base: str | None = None

    def prepare(self, id: CheckpointId, in_turn: bool) -> None:
        """Clears a directory to save to, and checks that copies can be made. Collective.

        Args:
            in_turn: whether tiers make room; else, as a job that stops saves to the root, they are left alone.
        """
        if self._mirror is not None:
            self._mirror.prepare()
        with self._committing:
            self._keeper.make_way(id)
        if self.tiers is not None and in_turn:
            self.tiers.make_room()

    def of_another_run(self, id: CheckpointId) -> CheckpointError | None:
        """Returns the error of a first save below another run's checkpoint, which all ranks raise. Collective."""
        above = self._keeper.other_above(id)
        return None if above is None else not_restored(above, id, self._run.root.url)

    def committed(self, id: CheckpointId, report: SaveReport) -> None:
        """Begins the tasks that follow a commit; no save is running then.

        Where there are tiers they begin after what tiers have begun, by whose thread: in one order on all ranks.
        """
        url = report.url if is_on_hosts(report.url) else self._run.root.checkpoint(id).url
        with self._committing:
            self._known[id] = _Known(url, report.save_id, dict(report.metrics))
            for oldest in list(self._known)[:-_MOST_KNOWN]:  # in the order of commits: the same on all ranks
                del self._known[oldest]
        if not is_on_hosts(report.url):
            self._keeper.saved_at_root(id)
        # Now, as it may come to the root much later.
        noted = Noted(world().wall_clock(), report.metrics, report.save_id)
        if self.tiers is None or not self.tiers.are_connected:  # as where a job stops at its first save
            self._committed_at_root(id, report.seconds, noted)
            return
        then = partial(self._committed_at_root, id, report.seconds, noted)
        self.tiers.begin(id, report.url, self._run.due.was_at(id.step), then)

    def _committed_at_root(self, id: CheckpointId, seconds: float | None, noted: Noted | None) -> None:
        """Begins the tasks of a checkpoint under the root; one from a tier may arrive during another save.

        Args:
            noted: None where it is to be read, as the run was restored from it.
        """
        checkpoint, is_own = self._run.root.checkpoint(id), noted is not None
        noted = noted_of(checkpoint) if noted is None else noted
        with self._committing:
            known = self._known.get(id)
            if known is not None:
                noted = noted._replace(metrics={**noted.metrics, **known.added})
                self._known[id] = known._replace(url=checkpoint.url)
            if self._stop_seconds is not None:
                self._warn_if_slow(checkpoint.url, seconds, self._stop_seconds)
            self.base = checkpoint.url
            if self._mirror is not None:
                self._begin_copy(self._mirror, id)
            if self._exporter is not None:
                self._exporter.begin(id, noted, is_own)
            self._keeper.begin(id, noted)

    def restored(self, restored: Restored | None) -> None:
        """Begins tasks that an earlier process of the job may have left unfinished. Collective.

        Args:
            restored: the checkpoint from which the run resumes; None where there was none.
        """
        if TIERS_NAME in self._run.root.seen.names and self._run.ranks.rank == 0:
            paths = () if self.tiers is None else self.tiers.paths
            warn_of_former(self._run.root, paths, 0 if restored is None else restored.id.step)
        if restored is None:
            self._keeper.restored(None, ())
            if self.tiers is not None:
                self.tiers.restored(None)
            return
        id, url, seconds = restored.id, restored.url, restored.report.save_seconds
        self._known = {id: _Known(url, restored.report.save_id, {})}
        self.base = url if url == self._run.root.checkpoint(id).url else None  # and not a copy elsewhere
        self._keeper.restored(id, restored.damaged)
        if self._exporter is not None:
            self._exporter.restored(restored)
        if self._mirror is not None:
            self.copy_newest(restored.damaged)
        if self.tiers is not None:
            then = partial(self._committed_at_root, id, seconds, None)
            self.tiers.restored(restored, self._run.due.may_have_been_at(id.step), then)
        if self._stop_seconds is not None:
            self._warn_if_slow(url, seconds, self._stop_seconds)

    def copy_newest(self, damaged: Collection[str] = ()) -> None:
        """Begins to copy the newest checkpoint under the root to the mirror. Collective.

        Args:
            damaged: the URLs of those that are not to be copied.
        """
        if self._mirror is not None:
            newest = self._run.newest(damaged)
            if newest is not None:
                self._begin_copy(self._mirror, newest)

    def _begin_copy(self, copier: MirrorCopier, id: CheckpointId) -> None:
        """Begins to copy a checkpoint to the mirror, with the metrics that were added to it."""
        root, mirror = (storage.child(id.name) for storage in (self._run.root.storage, copier.remote))

        def copy_metrics(save_id: str) -> None:
            copies = self._run.roots[-1]
            for record in self._run.branches.values():
                if record.file_name not in copies.seen.names:  # it was out of reach when the branch began
                    copies.add(record)
            # From here on `add_metrics` writes to both, as the copy is being made. Before, it may have found none.
            with self._committing, wrap_os_errors(f"copy the metrics of {root.url} to {mirror.url}"):
                added = added_to(root, save_id)
                if added:
                    add_to(mirror, save_id, added)

        copier.begin(id.name, copy_metrics, lambda _: self._keeper.tidy_copies(id))

    def remove_newer(self) -> None:
        """Removes the checkpoints newer than the step that the run was taken back to. Collective."""
        # In a round, so that no rank is taken for dead meanwhile.
        self._run.ranks.on_rank_0(f"removing what was abandoned from {self._run.root.url}", self._keeper.remove_newer)

    def add_metrics(self, id: CheckpointId, metrics: Mapping[str, float] | None) -> None:
        """Adds metrics to a committed checkpoint, wherever it is; as in `Manager.add_metrics`. Collective.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            StateError: something is no number.
        """
        doing = f"adding metrics to step {id.step} of {self._run.root.url}"
        self._agree_on_metrics(doing, metrics, lambda numbers: self._add(id, numbers))

    def _agree_on_metrics(
        self, doing: str, metrics: Mapping[str, float] | None, decide: Callable[[dict[str, float]], Any]
    ) -> Any:
        """Calls a function with the metrics that any rank gives, on rank 0; returns its result. Collective."""
        return self._run.ranks.agree(
            doing,
            work=lambda: None if metrics is None else numbers_of(metrics),
            report=lambda numbers: numbers,
            decide=lambda given: decide(first_given(given)),
        )[1]

    def _add(self, id: CheckpointId, numbers: Mapping[str, float]) -> None:
        """Adds metrics to a committed checkpoint, in place of those that it has by these names. On rank 0."""
        with self._committing, wrap_os_errors(f"write the metrics of {self._run.root.checkpoint(id).url}"):
            is_there = False  # one that is known may be removed since
            for at, save_id in self._places(id):
                if numbers:
                    add_to(at, save_id, numbers)
                if id in self._known:
                    self._known[id].added.update(numbers)
                is_there = True
            if not is_there:
                raise self._run.not_found(id)
            self._tell_of_metrics(id, numbers)

    def _add_missing(self, id: CheckpointId, numbers: Mapping[str, float]) -> None:
        """Adds metrics to a known checkpoint by names that it does not have, on rank 0.

        What the first of its roots has counts for the others too.
        """
        with self._committing, wrap_os_errors(f"write the metrics of {self._run.root.checkpoint(id).url}"):
            known, places = self._known[id].added, self._places(id)
            first = next(places, None)
            if first is None:
                raise self._run.not_found(id)
            had = {**known, **noted_of(first[0]).metrics, **added_to(*first)}
            new = {name: number for name, number in numbers.items() if name not in had}
            if new:
                add_to(*first, new)
                known.update(new)
            wanted = {name: had.get(name, number) for name, number in numbers.items()}
            for at, save_id in places:
                noted = noted_of(at)
                # While the copy is being made, what the root had comes with it.
                there = had if noted.save_id is None else {**noted.metrics, **added_to(at, save_id)}
                if lacking := {name: wanted[name] for name in _others(wanted, there)}:
                    add_to(at, save_id, lacking)
            if left_out := _others(numbers, wanted):
                _log.warning(
                    "step %d keeps the metrics that it has: %s. add_metrics(%d, ...) replaces them",
                    *(id.step, ", ".join(f"{name}={had[name]:g}" for name in left_out), id.step),
                )
            self._tell_of_metrics(id, new)

    def _places(self, id: CheckpointId) -> Iterator[tuple[Storage, str]]:
        """Yields the directories where a checkpoint is or is to come, and the id of its save.

        The mirror is looked at once the run's own root is written: it may be out of reach.
        """
        known = self._known.get(id)
        is_coming = self._mirror is not None and id.name in self._mirror.uploading()
        is_coming = is_coming or (known is not None and is_on_hosts(known.url))
        save_id = None if known is None else known.save_id
        for at in (root.checkpoint(id) for root in self._run.roots if is_coming or root.is_committed(id)):
            save_id = committed_id(at) if save_id is None else save_id
            if save_id is not None:
                yield at, save_id

    def _tell_of_metrics(self, id: CheckpointId, numbers: Mapping[str, float]) -> None:
        """Tells retention and exports of metrics that were added."""
        if numbers and self._run.root.is_committed(id):
            noted = noted_of(self._run.root.checkpoint(id))
            self._keeper.note(id, noted)
            if self._exporter is not None:
                self._exporter.note(id, noted)

    def delete(self, id: CheckpointId) -> None:
        """Removes a checkpoint under all roots and on tiers; no copy is running then. Collective.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: it could not be removed.
        """
        on_tiers = self.tiers is not None and any(each.id == id for each in self.tiers.candidates())

        def delete() -> None:
            if self._exporter is not None:
                self._exporter.finish()  # which may read it
            if not self._keeper.delete(id) and not on_tiers:
                raise self._run.not_found(id)

        self._run.ranks.on_rank_0(f"removing step {id.step} of {self._run.root.url}", delete)
        if self.tiers is not None:  # also where hosts that are away have the rest of it
            self.tiers.delete(id)
        self._keeper.forget(id)
        self._known.pop(id, None)
        if self.base == self._run.root.checkpoint(id).url:
            self.base = None

    def url_of(
        self, id: CheckpointId, at_root: bool, metrics: Mapping[str, float] | None, stops: bool = False
    ) -> str | None:
        """Returns the URL of a checkpoint that was committed or restored here; None if there is none. Collective.

        Args:
            at_root: whether one that a tier alone has does not count; it may be on its way to the root.
            metrics: to add to it under names that it does not have, if it is there; as in `Manager.save`.
            stops: whether the process is to end: what keeps metrics from being added is logged, and not raised.
        """
        known = self._known.get(id)
        if known is not None and at_root and self.tiers is not None and is_on_hosts(known.url):
            self.tiers.finish()
            known = self._known.get(id)
        if known is None or (at_root and is_on_hosts(known.url)):
            return None
        url = known.url

        def look(numbers: dict[str, float]) -> bool:
            is_there = is_on_hosts(url) or storage_of(url).exists(MANIFEST_NAME)
            if is_there and numbers:
                try:
                    self._add_missing(id, numbers)
                except CheckpointError as error:
                    if not stops:
                        raise
                    _log.error("the metrics of step %d were not added: %s", id.step, error)
            return is_there

        doing = f"looking for step {id.step} in {self._run.root.url}"
        return url if self._agree_on_metrics(doing, metrics, look) else None

    def finish(self) -> None:
        """Waits until no copy is running; keeps failures to be raised later. Local."""
        for each in self.copying:
            each.finish()

    def take_failures(self) -> list[BaseException]:
        """Returns the failures of copies that were not raised yet, once; does not wait. Local."""
        return [failure for each in self.copying if (failure := each.failures.take()) is not None]

    def raise_failure(self) -> None:
        """Raises the failure of a copy on all ranks, even those whose threads have not seen it yet. Collective."""
        run, doing = self._run, f"copying checkpoints of {self._run.root.url}"
        _, failed = run.ranks.agree(
            doing,
            work=lambda: [each.failures.newest for each in self.copying],
            report=lambda numbers: numbers,
            decide=lambda reports: [max(numbers) for numbers in zip(*reports, strict=True)],
        )
        for each, number in zip(self.copying, failed, strict=True):
            if number:
                work = partial(each.failures.raise_taken, number)
                run.ranks.agree(doing, work=work)

    def close(self) -> None:
        """Waits as `finish` does, and frees what copies need. Raises the failure of a copy. Local."""
        with ExitStack() as last_first:  # each is closed, whatever another raises
            for each in reversed(self.copying):
                last_first.callback(each.close)

    def close_own(self) -> None:
        """Waits for rank 0's own tasks: exports, whose failure it raises, and removals. Local."""
        with ExitStack() as last_first:
            last_first.callback(self._keeper.close)
            if self._exporter is not None:
                last_first.callback(self._exporter.close)

    def _in_use(self, root: Root) -> frozenset[str]:
        """Returns the names of checkpoints that tasks still copy to a root or from it."""
        names: frozenset[str] = frozenset() if self.tiers is None else self.tiers.promoting()
        if self._mirror is not None:
            names |= self._mirror.uploading() | (frozenset() if root is self._run.root else self._mirror.filling())
        return names

    def _warn_if_slow(self, url: str, seconds: float | None, stop_seconds: float) -> None:
        if seconds is not None and seconds > _SLOW_SHARE * stop_seconds:
            _log.warning(
                "saving %s took %.3g s, and a job asked to stop has %g s (seconds of Preemption) for a step and "
                "a save; give it more, and have the launcher grant more than that before it kills [save-in-flight]",
                *(url, seconds, stop_seconds),
            )
            self._stop_seconds = None


def _others(numbers: Mapping[str, float], there: Mapping[str, float]) -> list[str]:
    """Returns the names of numbers that are not there, or are others there."""
    return [name for name, number in numbers.items() if repr(number) != repr(there.get(name))]  # NaN is NaN
