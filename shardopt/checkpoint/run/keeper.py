"""Removes the checkpoints of a run that retention does not keep, and leftovers of dead saves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakSet

from shardopt.checkpoint.hosts.served import is_on_hosts
from shardopt.checkpoint.run.background import Task, Turns
from shardopt.checkpoint.run.branches import CheckpointId, parse_id
from shardopt.checkpoint.run.context import Run
from shardopt.checkpoint.run.metrics import Noted, added_to, is_damage, noted_of, record_name, remove_records
from shardopt.checkpoint.run.retention import MOST_LACKING, metric_problem, reasons_to_keep
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.saving.removal import (
    remove_checkpoint,
    remove_checkpoints,
    remove_in_the_way,
    remove_leftovers,
)
from shardopt.checkpoint.saving.writing.pending import tracked_urls
from shardopt.checkpoint.sources.open import loaded_from, urls_being_read
from shardopt.checkpoint.sources.reading.checking import sizes_for
from shardopt.checkpoint.storage import storage_of, wrap_os_errors
from shardopt.checkpoint.text import plural
from shardopt.errors import CheckpointError
from shardopt.ranks import DEADLINE_SECONDS
from shardopt.world import world

_MANY_RANKS = 64  # have so many files that their removal is not waited for
_WAIT_SECONDS = 1.0
_NOTHING = Noted(None, {})
_UNREAD = "stays, as its metrics cannot be read"

_log = logging.getLogger("shardopt.checkpoint")
_resumed: WeakSet[Keeper] = WeakSet()  # of Managers that are open and have restored a checkpoint


class Keeper(Task):
    """Removes all checkpoints under the roots of a run except those that the rules keep.

    All ranks may call; rank 0 removes. A failure to remove is logged: it is no reason to end a training.

    In a root where nothing was looked for by a restore, other checkpoints than this job's are another run's, and stay:
    the restore was forgotten. Not so of a second Manager of a job that another one has resumed.

    Args:
        run: whose checkpoints these are.
        in_use: returns the names of checkpoints under a root that come to it, or are read, in the background.
    """

    def __init__(self, run: Run, in_use: Callable[[Root], frozenset[str]]) -> None:
        self._run, self._in_use = run, in_use
        self._noted: dict[CheckpointId, Noted] = {}
        self._own: set[CheckpointId] | None = None if run.root.publishes else set()  # None: all that are there
        self._resumed: CheckpointId | None = None
        self._saved: CheckpointId | None = None
        self._at_root: int | None = None  # the last step that this job saved to the root, and not to a tier
        self._damaged: frozenset[str] = frozenset()
        self._warned, self._told_of_others, self._lacking = False, False, 0
        self._staying: dict[str, str] = {}  # URL → why it was not removed, as was told
        self._newest: int | None = None  # committed step, below which a running removal removes
        super().__init__(Turns(self._tidy, lambda root: f"removing from {root.url}", "shardopt-tidy"))

    def restored(self, id: CheckpointId | None, damaged: Collection[str]) -> None:
        """Notes that a restore has looked into the root: the run goes on from what is there, or there was nothing.

        Args:
            id: the checkpoint that the run was restored from, which is kept; None for none.
            damaged: the URLs of checkpoints of later steps that are damaged, and so count for nothing.
        """
        self._own = None
        if id is not None:
            _resumed.add(self)
            self._resumed, self._damaged = id, frozenset(damaged)
            self._saved, self._at_root, self._warned = None, None, False

    def other_above(self, id: CheckpointId) -> CheckpointId | None:
        """Returns the newest checkpoint if it is another run's, above one that is to be saved. Collective."""
        if self._own is None or (newest := self._run.newest()) is None or newest.step <= id.step:
            return None
        if newest in self._own:
            return None
        # By rank 0, as which Managers are still there, and have committed, may not be alike on all ranks.
        doing = f"looking for checkpoints in {self._run.root.url}"
        return None if self._run.ranks.on_rank_0(doing, lambda: self._is_second(id)) else newest

    def _is_second(self, id: CheckpointId) -> bool:
        """Whether another Manager of this process has resumed another root, and is not beyond this step."""
        last = [each._saved or each._resumed for each in self._others()]
        return any(each is not None and each.step <= id.step for each in last)

    def _others(self) -> list[Keeper]:
        """Returns those of Managers of this process that have resumed another root."""
        return [each for each in list(_resumed) if each._run.root.url != self._run.root.url]

    def saved_at_root(self, id: CheckpointId) -> None:
        """Notes a commit in the root, which lower steps from tiers may reach later: no other job has saved it."""
        self._at_root = id.step
        self._note_own(id)

    def _note_own(self, id: CheckpointId) -> None:
        """Notes a commit. All others count too if this process had loaded one of them before, in whatever way."""
        own = self._own  # once: a restore may change it meanwhile
        if own is not None:
            if not own and self._run.root.url in loaded_from:
                self._own = None
            own.add(id)

    def make_way(self, id: CheckpointId) -> None:
        """Clears a directory to save to: waits for a removal there, and removes a damaged checkpoint.

        It also removes what killed saves of the same step have left on a disk, which each new start would add to. Of
        saves that have just written something it does not: their processes may not be dead yet.
        """
        if self._newest is None or id.step <= self._newest:
            self.finish()  # only below the newest anything is removed
        for root in self._run.roots:
            root.forget([id])
            if self._damaged and (url := root.checkpoint(id).url) in self._damaged:
                if self._run.ranks.rank == 0:
                    self._say_removed([url])
                    with _logging_failures(root):
                        remove_in_the_way(root.checkpoint(id))
                self._damaged -= {url}
        root = self._run.root  # a mirror, or an object store, is cleared by the commit
        if self._run.ranks.rank or root.storage.is_remote or id.name not in root.seen.names:
            return  # as all others: there was no directory of this step when the root was last listed
        with _logging_failures(root):
            if id.name not in self._in_use(root) and root.checkpoint(id).url not in _busy_urls():
                remove_leftovers(root.checkpoint(id), DEADLINE_SECONDS)

    def begin(self, id: CheckpointId, noted: Noted) -> None:
        """Begins to remove unwanted checkpoints under the run's root, after a commit there.

        No save to it may be under way. Of many files, and over a network, this may take minutes: there it is waited for
        a second, and continues in a thread. One at a time: what is unwanted while another runs goes with a later save.

        Args:
            noted: of that checkpoint, which stays in any case.
        """
        self._saved = id
        self._note_own(id)
        ranks, root = self._run.ranks, self._run.root
        if ranks.rank:
            return
        self._noted[id] = noted
        if not (root.storage.is_remote or ranks.size > _MANY_RANKS):
            self._tidy(root)
        elif not self._turns.jobs:
            self._newest = None
            self._turns.begin_alone(root)
            self._turns.finish(_WAIT_SECONDS)

    def note(self, id: CheckpointId, noted: Noted) -> None:
        """Notes what is known of an earlier checkpoint, for the next removal."""
        self._noted[id] = noted

    def delete(self, id: CheckpointId) -> bool:
        """Removes a checkpoint under all roots, regardless of the rules; returns whether it existed. On rank 0."""
        self.finish()
        found = False
        for root in self._run.roots:
            is_link = root.checkpoint(id).missing_target() is not None  # whose archive is away: of that only the link
            found = is_link or root.is_committed(id) or found
            with wrap_os_errors(f"remove {root.checkpoint(id).url}"):
                remove_checkpoint(root.checkpoint(id))
                root.storage.remove(record_name(id.name))
            root.forget([id])
        return found

    def forget(self, id: CheckpointId) -> None:
        """Drops the notes on a removed checkpoint."""
        self._noted.pop(id, None)
        self._saved = None if self._saved == id else self._saved
        self._resumed = None if self._resumed == id else self._resumed

    def close(self) -> None:
        """Waits until removals are done. Local."""
        _resumed.discard(self)
        self.finish()

    def tidy_copies(self, copied: CheckpointId) -> None:
        """Removes as `begin` does, under the mirror's root, after a checkpoint was copied; waits for it."""
        if self._run.ranks.rank == 0:
            for root in self._run.roots[1:]:
                self._tidy(root, copied.step)

    def remove_newer(self) -> None:
        """Removes what left the run when it was taken back; what is in use now goes at a later save. On rank 0."""
        for root in self._run.roots:
            with _logging_failures(root):
                self._remove(root, [id for id in root.ids() if self._run.branches.is_removed(id)])

    def _tidy(self, root: Root, copied: int | None = None) -> None:
        """Removes all checkpoints under a root that are not kept. On rank 0.

        Args:
            copied: the step of a copy that was made here.
        """
        with _logging_failures(root):
            unwanted = self._unwanted(root)
            if unwanted:
                self._remove(root, unwanted)
            if copied is not None:
                self._remove_left_behind(root, copied)

    def _remove_left_behind(self, root: Root, step: int) -> None:
        """Removes, after a listing, metrics of lower steps whose copies were left out for that of this one."""
        there = root.seen.names | self._in_use(root)
        for name in root.seen.names:
            id = parse_id(name.removesuffix(record_name("")))
            if id is not None and id.step < step and id.name not in there:
                root.storage.remove(name)

    def _unwanted(self, root: Root) -> list[CheckpointId]:
        ids, branches = root.ids(), self._run.branches
        if not self._run.may_remove():
            return []
        listed = {name for each in self._run.roots for name in each.seen.names}
        for id in list(self._noted):  # what others note meanwhile stays
            if id.name not in listed:
                self._noted.pop(id, None)
        own = [id for id in ids if branches.has(id)]
        unwanted = [id for id in ids if branches.is_removed(id)] if branches else []
        whole, unread = root.committed_of(own)
        for id, error in unread.items():
            self._tell_once(root.checkpoint(id).url, "stays, as it cannot be looked at", error, "readable")
        if self._damaged:
            whole = [id for id in whole if root.checkpoint(id).url not in self._damaged]
        if not whole:
            return unwanted
        keep: Collection[int] = {id.step for id in whole}
        newest = self._newest = max(keep)
        if not self._run.rules.keeps_all:
            counted = self._counted(root, whole)
            others = {id.step for id in whole if id not in counted}
            keep = {*others, *self._kept(root, counted)} if counted else others
            if self._run.branches != branches or not self._run.may_remove():  # that took its time
                return []
        is_other = self._saved is not None and newest > self._saved.step and newest != self._at_root
        if self._saved is not None and is_other and not self._warned:
            self._warned = True
            is_resumed = self._resumed is not None and self._resumed.step == newest
            _log.warning(
                "step %d was saved below step %d %s: a restart would resume from that one. "
                "restore(app, step=...) rewinds a run to an earlier step [run-root]",
                self._saved.step,
                newest,
                "that this job was restored from (restore returns the step to continue at)"
                if is_resumed
                else "of another job",
            )
        # Oldest first, and only below the newest: what is above it may be a save that another process of this job,
        # not dead yet, is about to give up. Links that lead nowhere stay: their archive may be back later.
        below = [id for id in own if id.step < newest and id.step not in keep and id not in unread]
        known = {*whole}
        return unwanted + [id for id in below if id in known or root.checkpoint(id).missing_target() is None]

    def _counted(self, root: Root, ids: Collection[CheckpointId]) -> Collection[CheckpointId]:
        """Returns those of some checkpoints that retention goes by; logs once which are another run's."""
        # The other one may count otherwise, such as batches where this counts epochs, or be beyond a slow save by now.
        if (own := self._own) is None or (own and self._others()):  # once: a restore may change it meanwhile
            return {*ids}
        others = sorted(id.step for id in ids if id not in own)
        if own and others and not self._told_of_others:  # else nothing is removed yet, as of a mirror
            self._told_of_others = True
            _log.warning(
                "%s has %s that this job neither saved nor restored: %s. Retention leaves them. Call restore(app) "
                "before the first save to count them, or delete(step) for each [run-root]",
                *(root.url, plural(len(others), "checkpoint"), _some(others)),
            )
        return own.intersection(ids)

    def _kept(self, root: Root, whole: Collection[CheckpointId]) -> Collection[int]:
        """Returns the steps that rules keep.

        Reads each manifest once, and only if a rule needs what it has. Metrics that were added are read each time, if a
        rule goes by metrics: another job may add some, as one that evaluates.
        """
        rules, unread = self._run.rules, list[CheckpointId]()
        known = {id: had for id in sorted(whole) if (had := self._noted.get(id)) is not None}
        if rules.best is not None or rules.seconds is not None:
            for id in sorted(set(whole) - known.keys()):
                try:
                    self._noted[id] = noted_of(root.checkpoint(id))
                except CheckpointError as error:  # it may be the best one: it stays this time
                    if is_damage(error):
                        self._noted[id] = _NOTHING
                        _log.warning("%s", error)
                        continue
                    if unread and root.storage.is_remote:
                        raise  # after many attempts at each of two: it is the store that fails
                    unread.append(id)
                    self._tell_once(root.checkpoint(id).url, _UNREAD, error, "readable")
        if rules.best is not None:
            with_added = {id: noted for id, noted in known.items() if record_name(id.name) in root.seen.names}
            unread += self._read_added(root, with_added)
        noted = {id.step: self._noted.get(id, _NOTHING) for id in whole}
        pinned = {id.step: "pinned" for id in (self._resumed, self._saved, *unread) if id is not None and id in whole}
        metrics, now = {step: each.metrics for step, each in noted.items()}, world().wall_clock()
        ages = {step: now - each.saved_at for step, each in noted.items() if each.saved_at is not None}
        kept = reasons_to_keep(noted, rules, metrics, pinned, ages)
        # Metrics may come at fewer steps than checkpoints: the rule's are just not there yet, unless that goes on.
        if len(kept) < len(noted) and any(metrics.values()):
            for problem in metric_problem(rules, metrics.values()):
                self._lacking += 1
                if self._lacking == MOST_LACKING:
                    text = "checkpoints are removed by rules of which one keeps nothing: %s [invalid-argument]"
                    _log.warning(text, problem)
        return kept

    def _read_added(self, root: Root, known: Mapping[CheckpointId, Noted]) -> Collection[CheckpointId]:
        """Reads the metrics that were added to checkpoints by now; returns those of which they cannot be read.

        What was known of these counts on. After two that a store fails to return the others are not read, as each takes
        many attempts: they are returned too.
        """
        failed: dict[CheckpointId, CheckpointError] = {}
        skipped: list[CheckpointId] = []

        def read(id: CheckpointId) -> Noted:
            if len(failed) < 2 or not root.storage.is_remote:
                try:
                    return _noted_again(root, id, known[id])
                except CheckpointError as error:
                    failed[id] = error
            else:
                skipped.append(id)
            return known[id]

        if known:
            with world().thread_pool(sizes_for(root.storage).threads, "shardopt-metrics") as pool:
                try:
                    found = [*pool.map(read, known)]
                except RuntimeError:  # Python's for a limit of the system
                    found = [*map(read, known)]
            for id, noted in zip(known, found, strict=True):
                if self._noted.get(id) is known[id]:  # others may have noted more meanwhile
                    self._noted[id] = noted
        for id, error in failed.items():
            self._tell_once(root.checkpoint(id).url, _UNREAD, error, "readable")
        return [*failed, *skipped]

    def _remove(self, root: Root, ids: Collection[CheckpointId]) -> None:
        busy, names = _busy_urls(), self._in_use(root)
        free = [id for id in ids if id.name not in names and root.checkpoint(id).url not in busy]
        root.forget(free)
        self._say_removed([url for id in free if (url := root.checkpoint(id).url) in self._damaged])
        failed = {storage.url: error for storage, error in remove_checkpoints(list(map(root.checkpoint, free))).items()}
        for url in (root.checkpoint(id).url for id in free):
            if url in failed:
                self._tell_once(url, "could not be removed, and stays", failed[url], "writable")
            else:
                self._staying.pop(url, None)
        remove_records(root.storage, root.seen.names, [id.name for id in free if root.checkpoint(id).url not in failed])

    def _tell_once(self, url: str, what: str, error: Exception, required: str) -> None:
        """Logs why a checkpoint stays: once, and not at each save."""
        if self._staying.get(url) != str(error):
            self._staying[url] = str(error)
            _log.warning("%s %s: %s; make it %s, or move it away [storage-failed]", url, what, error, required)

    def _say_removed(self, damaged: Collection[str]) -> None:
        if damaged:
            _log.warning(
                "damaged checkpoints are removed before they are saved again: %s [damaged]", ", ".join(damaged)
            )


@contextmanager
def _logging_failures(root: Root) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointError) as error:
        _log.warning("old checkpoints could not be removed from %s: %s", root.url, error)


def _some(steps: Sequence[int]) -> str:
    told = [*steps[:4], "…", *steps[-2:]] if len(steps) > 7 else steps
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, told))}"


def _noted_again(root: Root, id: CheckpointId, noted: Noted) -> Noted:
    """Returns what is noted of a checkpoint with the metrics that were added to it by now."""
    added = {} if noted.save_id is None else added_to(root.checkpoint(id), noted.save_id)
    return noted._replace(metrics={**noted.metrics, **added})


def _busy_urls() -> set[str]:
    """Returns the URLs of checkpoints that saves of this process write, or loads read until all ranks have them."""
    return urls_being_read() | {storage_of(url).url for url in tracked_urls() if not is_on_hosts(url)}
