"""The tiers of a run: directories that each host has for itself, faster than the root, and lost with their hosts.

A save goes to the first tier that is due. The rest goes on behind the training, from the files of that tier and never
from the training's state, in one thread with rounds of its own:

copy       each host fetches its neighbours' files, until each file is on `copies` hosts
clear      what is older than the last `keep_last` that are copied is removed; the next save is written over its files
promote    the files go to the tiers behind that are due as well, and to the root

Here is what the run asks of its tiers; `jobs.py` has the thread, `work.py` what it does for a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from shardopt.checkpoint.hosts.finding import whole_on
from shardopt.checkpoint.hosts.hosts import PREFIX, Hosts, hosts_of
from shardopt.checkpoint.run.branches import Branches
from shardopt.checkpoint.run.failures import Failures
from shardopt.checkpoint.run.identity import claim_tiers, refuse_tiers_of_others
from shardopt.checkpoint.run.restoring import Candidate
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.shares import TIERS_NAME, note_tiers, tiers_at
from shardopt.checkpoint.run.steps import Place, place_of
from shardopt.checkpoint.run.tiers.jobs import Job, TierQueue
from shardopt.checkpoint.run.tiers.tier import Tier
from shardopt.checkpoint.run.tiers.work import TierWork, clear_shares, clear_spares
from shardopt.errors import CheckpointError, NoSpaceError
from shardopt.ranks import Ranks, SharedGroup, SideRanks

_log = logging.getLogger("shardopt.checkpoint")


class Tiers:
    """The tiers of a run, the fastest first. All ranks make the same calls."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        root: Root,
        group: SharedGroup,
        copies: Root | None = None,
    ) -> None:
        self._tiers, self._root, self._group, self._copies = tuple(tiers), root, group, copies
        self._side = SideRanks("the tiers of a run")
        self._alone: Ranks | None = None
        self._work = TierWork(self._tiers, root)
        self._queue = TierQueue(self._work.do)
        self._met: list[Hosts] = []  # whose directories are known to be of no other run
        self._own: list[Hosts] = []  # and are marked as the run's
        self._led: list[str] = []  # directories of the hosts that this rank leads

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def prepare(self) -> None:
        """Has the hosts meet, where they have not. Collective then.

        Raises:
            CheckpointError: a host's directory cannot be used, or belongs to another run.
        """
        self._forget_removed()
        self._side.of(self._ranks)
        hosts = self._all_hosts()
        if hosts != self._met:
            refuse_tiers_of_others(self._ranks, hosts, self._root, self._copies)
            self._met = hosts
            self._led = [each.directory.path for each in hosts if each.is_leader]

    def _forget_removed(self) -> None:
        """Without a process group: has the hosts meet anew where a directory was taken away, to mark the next one.

        With one, a save to it is refused, and goes to the next tier.
        """
        if self._alone is not None:
            try:
                for hosts in self._met:
                    hosts.directory.refuse_replaced()
            except (NoSpaceError, OSError):
                self._alone = None

    def _claim(self) -> None:
        """Marks the hosts' directories as the run's, where that is not done; before anything is written. Collective."""
        if self._met != self._own:
            claim_tiers(self._ranks, self._met, self._root, self._copies)
            self._own = self._met
            if self._ranks.rank == 0:
                self._note()

    def _note(self) -> None:
        """Has the root tell which tiers there are, for those who look."""
        members = ("path", "every", "keep_last", "copies")
        try:
            note_tiers(self._root.storage, [{name: getattr(tier, name) for name in members} for tier in self._tiers])
        except CheckpointError as error:
            _log.warning("%s", error)

    def _warn_of_former(self, step: int) -> None:
        """Logs which tiers the run had that this job does not look at: of what they have nothing is cleared."""
        if TIERS_NAME not in self._root.names:
            return
        try:
            former = {str(tier["path"]) for tier in tiers_at(self._root.storage)} - {tier.path for tier in self._tiers}
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

    def make_room(self) -> None:
        """Before a save: removes those that wait to be copied while a newer one does, and never would be. Collective.

        Raises:
            CheckpointError: as `prepare`.
        """
        self.prepare()
        self._claim()
        superseded = self._ranks.on_rank_0(
            "making room on tiers", lambda: [(job.tier, *job.place) for job in self._queue.supersede()]
        )
        for number, *place in superseded:
            clear_shares(self._hosts(number), Place(*place).__eq__)

    def is_due(self, step: int) -> bool:
        """Whether a save of this step goes to some tier."""
        return bool(self._due(step))

    def urls(self, place: Place) -> list[str]:
        """Returns where a checkpoint goes: the URL on the first tier that is due, and on the others, in turn."""
        return [f"{PREFIX}{self._tiers[number].path}/{place.name}" for number in self._due(place.step)]

    def committed(self, place: Place, url: str, to_root: bool, then: Callable[[], None]) -> None:
        """Begins to copy and promote a checkpoint that was saved to a tier.

        Args:
            to_root: whether it goes to the root too; `then` is called once it is there.
        """
        self._begin(place, self._number_of(url), to_root, then)

    def committed_at_root(self, place: Place, then: Callable[[], None]) -> None:
        """Has `then` called in its turn, for a checkpoint that was saved to the root: in one order on all ranks."""
        self._begin(place, None, False, then)

    def promoting(self) -> frozenset[str]:
        """Returns the names of checkpoints that come to the root now or later; nothing of them is to be removed."""
        return self._queue.promoting()

    def _number_of(self, url: str) -> int | None:
        """Returns the number of the tier that a checkpoint is on; None where it is on none."""
        roots = [f"{PREFIX}{tier.path}" for tier in self._tiers]
        root = url.rpartition("/")[0]
        return roots.index(root) if root in roots else None

    def candidates(self) -> list[Candidate]:
        """Lists the checkpoints that are whole on a tier, those of the first tier first. Collective."""
        if not self._tiers:
            return []
        self.prepare()
        found = []
        for hosts in self._all_hosts():
            places = [place_of(name) for name in whole_on(self._ranks, hosts)]
            found += [Candidate(place, hosts.url(place.name)) for place in places if place is not None]
        return found

    def where(self, branches: Branches) -> dict[int, dict[str, int]]:
        """Returns by step of the run the tiers that have it, with the number of hosts that may be lost. Collective."""
        if self._tiers:
            self.prepare()
        found: dict[int, dict[str, int]] = {}
        for tier, hosts in zip(self._tiers, self._all_hosts(), strict=True):
            for name, survives in whole_on(self._ranks, hosts).items():
                place = place_of(name)
                if place is not None and branches.has(place):
                    found.setdefault(place.step, {})[tier.path] = survives
        return found

    def restored(
        self, place: Place | None, url: str | None, branches: Branches, to_root: bool, then: Callable[[], None]
    ) -> None:
        """Goes on from a checkpoint: removes what is newer, verifies and copies this one, and promotes it. Collective.

        What is newer on the run's branch is not whole on the hosts that are left, and its places are to be saved to
        once more. A promotion may have been cut off.

        Args:
            place, url: of the checkpoint; None where there was none.
            branches: of the run, after it was taken back.
            to_root, then: as for `committed`.
        """
        step = -1 if place is None else place.step
        if self._ranks.rank == 0:
            self._warn_of_former(max(step, 0))
        if not self._tiers:
            return

        def unwanted(other: Place) -> bool:
            return branches.is_removed(other) or (other.branch == branches.current and other.step > step)

        def clear() -> None:
            for hosts in self._all_hosts():
                clear_shares(hosts, unwanted)
            self._remove_spares()  # those of ranks that there are no more too

        self.prepare()
        if place is not None:
            self._claim()
        what = f"clearing what is newer than step {max(step, 0)}"
        self._ranks.agree(what, work=clear)
        self.failures.take()  # of what came to nothing before, and was logged
        self._work.begin_from(place)
        number = None if url is None else self._number_of(url)
        if place is not None and number is not None:
            self._begin(place, number, to_root, then, is_restored=True)

    def delete(self, place: Place) -> None:
        """Removes a checkpoint from all tiers. Collective; nothing is under way.

        Raises:
            CheckpointError: as `prepare`.
        """
        self.prepare()

        def clear() -> None:
            for hosts in self._all_hosts():
                clear_shares(hosts, place.__eq__)

        what = f"removing step {place.step} from tiers"
        self._ranks.agree(what, work=clear)

    def finish(self) -> None:
        """Waits until all that was begun is done. Local; a failure stays to be raised."""
        self._queue.finish()

    def close(self) -> None:
        """Waits as `finish` does, and gives back what the next save would have been written over."""
        self.finish()
        self._remove_spares()

    @property
    def failures(self) -> Failures:
        """Of promotions."""
        return self._queue.failures

    @property
    def _ranks(self) -> Ranks:
        ranks = self._group.ranks
        if ranks.has_group:
            return ranks
        # Without a group each call has made others: their hosts, which are theirs, would meet again and again.
        self._alone = self._alone or ranks
        return self._alone

    def _hosts(self, number: int) -> Hosts:
        tier = self._tiers[number]
        return hosts_of(self._ranks, tier.path, tier.domain)

    def _all_hosts(self) -> list[Hosts]:
        return [self._hosts(number) for number in range(len(self._tiers))]

    def _due(self, step: int) -> list[int]:
        return [number for number, tier in enumerate(self._tiers) if step % tier.every == 0]

    def _begin(
        self, place: Place, number: int | None, to_root: bool, then: Callable[[], None], is_restored: bool = False
    ) -> None:
        ranks = self._side.of(self._ranks)  # made by `prepare`
        onto = [] if number is None else [other for other in self._due(place.step) if other > number]
        self._queue.begin(Job(place, ranks, self._all_hosts(), number, onto, to_root, then, is_restored))

    def _remove_spares(self) -> None:
        for path in self._led:
            clear_spares(path)
