"""The tiers of a run: directories of each host, faster than the root, and lost together with their host.

A save goes to the first tier that is due. The rest continues in the background, from the files of that tier and never
from the training's state, in one thread with rounds of its own:

copy       each host fetches its neighbours' files, until each file is on `copies` hosts
clear      what is older than the last `keep_last` that are copied is removed; the next save is written over its files
promote    the files go to the slower tiers that are due as well
to root    in another thread, with rounds of its own: a root out of reach delays nothing of this

Here is what the run asks of its tiers; `work.py` has what is done for a checkpoint, in its turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from shardopt.checkpoint.hosts.directory import PREFIX
from shardopt.checkpoint.hosts.finding import whole_on
from shardopt.checkpoint.hosts.hosts import Hosts, hosts_of
from shardopt.checkpoint.run.background import Task
from shardopt.checkpoint.run.branches import CheckpointId, parse_id
from shardopt.checkpoint.run.context import Candidate, Restored, Run
from shardopt.checkpoint.run.destinations import Tier
from shardopt.checkpoint.run.identity import claim_tiers, refuse_tiers_of_others
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.shares import note_tiers, tiers_at
from shardopt.checkpoint.run.tiers.work import Job, TierWork, clear_shares, clear_spares
from shardopt.errors import CheckpointError, NoSpaceError, ShardoptError
from shardopt.ranks import Ranks, SideRanks

_log = logging.getLogger("shardopt.checkpoint")


class Tiers(Task):
    """The tiers of a run, the fastest first. All ranks make the same calls.

    Attributes:
        failures: of promotions to slower tiers.
        promotions: to the root, with the failures of these.
        paths: of the tiers.
        lacking: the checkpoints that were whole on no tier at the last look, as they lack files, which hosts that are
            away may have; with the error of each.
    """

    def __init__(self, run: Run, tiers: Sequence[Tier]) -> None:
        self._run, self._tiers = run, tuple(tiers)
        self.paths = tuple(tier.path for tier in tiers)
        self.lacking: Mapping[CheckpointId, ShardoptError] = {}
        self._copied: list[list[Candidate]] = [[] for _ in tiers]  # that had their copies at the last look, by tier
        self._side, self._to_root = SideRanks("the tiers of a run"), SideRanks("the root behind tiers")
        self._alone: Ranks | None = None
        self._work = TierWork(run, self._tiers)
        super().__init__(self._work)
        self.promotions = Task(self._work.promotions)
        self._met: list[Hosts] = []  # whose directories are known to be of no other run
        self._own: list[Hosts] = []  # and are marked as the run's
        self._led: list[str] = []  # directories of the hosts that this rank leads

    def prepare(self) -> None:
        """Connects the hosts, if they are not connected; collective then.

        Raises:
            CheckpointError: a host's directory cannot be used, or belongs to another run.
        """
        if self._alone is not None:
            # Without a process group hosts meet again where a directory was taken away, to mark the next one. With
            # one, a save to it is refused, and goes to the next tier.
            try:
                for hosts in self._met:
                    hosts.directory.refuse_replaced()
            except (NoSpaceError, OSError):
                self._alone = None
        for side in (self._side, self._to_root):
            side.of(self._ranks)
        hosts_now = self._hosts()
        if hosts_now != self._met:
            domains = [tier.domain for tier in self._tiers]
            refuse_tiers_of_others(self._run, self._ranks, hosts_now, domains)
            self._met = hosts_now
            self._led = [each.directory.path for each in hosts_now if each.is_leader]

    @property
    def are_connected(self) -> bool:
        """Whether `prepare` has connected the hosts of the ranks that there are now; the same on all of them. Local."""
        return bool(self._met) and self._to_root.are_beside(self._ranks)

    def _claim(self) -> None:
        """Marks the hosts' directories as the run's, once, before anything is written. Collective."""
        if self._met != self._own:
            claim_tiers(self._run, self._ranks, self._met)
            self._own = self._met
            if self._ranks.rank == 0:
                members = ("path", "every", "keep_last", "copies")
                tiers = [{name: getattr(tier, name) for name in members} for tier in self._tiers]
                try:
                    note_tiers(self._run.root.storage, tiers)
                except CheckpointError as error:
                    _log.warning("%s", error)

    def make_room(self) -> None:
        """Removes, before a save, checkpoints whose turn to be copied never comes, as a newer one waits. Collective.

        Raises:
            CheckpointError: as `prepare`.
        """
        self.prepare()
        self._claim()
        superseded, needless = self._ranks.on_rank_0(
            "making room on tiers",
            lambda: [[(job.tier, *job.id) for job in self._work.supersede()], self._work.promotions.supersede()],
        )
        self._work.promotions.give_up([CheckpointId(*id) for id in needless])
        for number, *id in superseded:
            clear_shares(self._hosts()[number], CheckpointId(*id).__eq__)

    @property
    def roots(self) -> list[str]:
        """The URLs of the directories that have the checkpoints."""
        return [f"{PREFIX}{tier.path}" for tier in self._tiers]

    def is_due(self, step: int) -> bool:
        """Whether a save of this step goes to any tier."""
        return bool(self._due(step))

    def urls(self, id: CheckpointId) -> list[str]:
        """Returns the URL of a checkpoint on the first tier that is due, and then those on the other tiers."""
        return [f"{PREFIX}{self._tiers[number].path}/{id.name}" for number in self._due(id.step)]

    def begin(
        self, id: CheckpointId, url: str, to_root: bool, then: Callable[[], None], is_restored: bool = False
    ) -> None:
        """Begins to copy and promote a checkpoint saved to a tier; one saved to the root only takes its turn.

        Args:
            url: where it is.
            to_root: whether it goes to the root too.
            then: called once it is there: in one order on all ranks.
            is_restored: whether the run has just been restored from it: then what the hosts have of it is verified.
        """
        tier = self._number_of(url)
        ranks = self._side.of(self._ranks)  # made by `prepare`
        onto = [] if tier is None else [other for other in self._due(id.step) if other > tier]
        to_root, root_ranks = to_root and tier is not None, self._to_root.of(self._ranks)
        self._work.begin(Job(id, ranks, self._hosts(), tier, onto, to_root, then, is_restored, root_ranks))

    def promoting(self) -> frozenset[str]:
        """Returns the names of checkpoints that come to the root now or later, and must not be removed."""
        return self._work.promoting()

    def _number_of(self, url: str) -> int | None:
        """Returns the number of the tier that a checkpoint is on; None if it is on none."""
        path = url.rpartition("/")[0].removeprefix(PREFIX)
        return self.paths.index(path) if url.startswith(PREFIX) and path in self.paths else None

    def candidates(self) -> list[Candidate]:
        """Lists the checkpoints that are whole on a tier, in the order of tiers. Collective."""
        return [Candidate(id, hosts.url(id.name)) for hosts, id, _ in self._whole()]

    def where(self) -> dict[int, dict[str, int | None]]:
        """Returns, for each step of the run, the tiers that have it, and how many hosts may be lost. Collective."""
        found: dict[int, dict[str, int | None]] = {}
        for hosts, id, survives in self._whole():
            if self._run.branches.has(id):
                found.setdefault(id.step, {})[hosts.root.removeprefix(PREFIX)] = survives
        return found

    def _whole(self) -> list[tuple[Hosts, CheckpointId, int]]:
        """Lists the checkpoints that are whole on a tier, and how many hosts may be lost. Collective."""
        self.prepare()
        found: list[tuple[Hosts, CheckpointId, int]] = []
        lacking: dict[CheckpointId, ShardoptError] = {}
        self._copied = []
        for tier, hosts in zip(self._tiers, self._hosts(), strict=True):
            whole_here, lacking_here = whole_on(self._ranks, hosts)
            others = min(tier.copies, hosts.count) - 1
            copied = {name: parse_id(name) for name, survives in whole_here.items() if survives >= others}
            self._copied.append([Candidate(id, hosts.url(name)) for name, id in copied.items() if id is not None])
            found += [(hosts, id, survives) for name, survives in whole_here.items() if (id := parse_id(name))]
            lacking |= {id: error for name, error in lacking_here.items() if (id := parse_id(name))}
        whole = {id for _, id, _ in found}
        self.lacking = {id: error for id, error in sorted(lacking.items()) if id not in whole}
        return found

    def lacking_after(self, step: int, seen_from: int) -> dict[CheckpointId, ShardoptError]:
        """Returns those of `lacking` that are newer than a step on a branch. Local."""
        branches = self._run.branches
        return {id: error for id, error in self.lacking.items() if id.step > step and branches.has(id, seen_from)}

    def restored(
        self, restored: Restored | None, to_root: bool = False, then: Callable[[], None] = lambda: None
    ) -> None:
        """Continues from a checkpoint: clears what is newer; verifies, copies and promotes this one. Collective.

        What is newer on the run's branch was never committed, is damaged, or lacks files. The last stays, as the hosts
        with these files may come back before the run saves. A promotion may have been cut off.

        Args:
            restored: the checkpoint; None where there was none.
            to_root, then: as for `begin`.
        """
        step, branches = -1 if restored is None else restored.id.step, self._run.branches
        lacking = self.lacking_after(step, branches.current)

        def unwanted(other: CheckpointId) -> bool:
            is_newer = other.branch == branches.current and other.step > step
            return branches.is_removed(other) or (is_newer and other not in lacking)

        self.drop_promotions()
        self.prepare()
        if restored is not None:
            self._claim()
        self._clear(f"clearing what is newer than step {max(step, 0)}", unwanted, spares=True)
        for each in (self, self.promotions):
            each.failures.take()  # of what came to nothing before, and was logged
        damaged = frozenset() if restored is None else restored.damaged
        copied = [
            [id for id, url in each if id.step <= step and branches.has(id) and url not in damaged]
            for each in self._copied
        ]
        self._work.begin_from(None if restored is None else restored.id, copied)
        if restored is not None and self._number_of(restored.url) is not None:
            self.begin(restored.id, restored.url, to_root, then, is_restored=True)

    def delete(self, id: CheckpointId) -> None:
        """Removes a checkpoint from all tiers; no task is running then. Collective.

        Raises:
            CheckpointError: as `prepare`.
        """
        self.prepare()
        self._clear(f"removing step {id.step} from tiers", id.__eq__)

    def _clear(self, what: str, unwanted: Callable[[CheckpointId], bool], spares: bool = False) -> None:
        """Removes unwanted shares on all tiers and, with `spares`, the spare files for the next save. Collective."""

        def clear() -> None:
            for hosts in self._hosts():
                clear_shares(hosts, unwanted)
            if spares:
                self._remove_spares()  # those of ranks that there are no more too

        self._ranks.agree(what, work=clear)

    def finish(self) -> None:
        super().finish()
        self.promotions.finish()

    def settle(self) -> None:
        """Waits as `finish` does, but not for a root that is out of reach. Local."""
        super().finish()
        self._work.promotions.settle()

    def drop_promotions(self) -> None:
        """Ends what is still to come to the root, as the run continues from another step. Local."""
        self._work.promotions.drop()

    def close(self) -> None:
        """Waits as `finish` does, and removes the spare files for the next save. Raises a failure."""
        self.finish()
        self._remove_spares()
        self.failures.raise_taken()

    @property
    def _ranks(self) -> Ranks:
        ranks = self._run.ranks
        if ranks.has_group:
            return ranks
        # Without a group each call has made others: their hosts, which are theirs, would meet again and again.
        self._alone = self._alone or ranks
        return self._alone

    def _hosts(self) -> list[Hosts]:
        return [hosts_of(self._ranks, tier.path) for tier in self._tiers]

    def _due(self, step: int) -> list[int]:
        return [number for number, tier in enumerate(self._tiers) if self._run.due.of(tier.every, step)]

    def _remove_spares(self) -> None:
        for path in self._led:
            clear_spares(path)


def warn_of_former(root: Root, paths: Collection[str], step: int) -> None:
    """Logs which tiers a run had that this job does not use, and so does not clean up.

    Args:
        paths: of this job's tiers.
        step: from which it resumes.
    """
    try:
        former = {str(tier["path"]) for tier in tiers_at(root.storage)} - {*paths}
    except CheckpointError as error:
        _log.warning("%s", error)
        return
    for path in sorted(former):
        _log.warning(
            "the run had a tier at %s, which is none of this job's: it stays as it is, and a later job that has it "
            "again restores what is newer there than step %d. Remove it from each host where it is not wanted",
            path,
            step,
        )
