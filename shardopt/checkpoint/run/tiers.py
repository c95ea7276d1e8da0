"""The tiers of a run: directories that each host has for itself, faster than the root, and lost with their hosts.

A save goes to the first tier that is due. The rest goes on behind the training, from the files of that tier and never
from the training's state, in one thread with rounds of its own:

copy       each host fetches its neighbours' files, until each file is on `copies` hosts
clear      what is older than the last `keep_last` that are copied is removed; the next save is written over its files
promote    the files go to the tiers behind that are due as well, and to the root
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardopt.checkpoint.format.constants import writer_of
from shardopt.checkpoint.hosts.copying import copy_file, damaged_files, fetch_copies, replace_damaged
from shardopt.checkpoint.hosts.finding import find, whole_on
from shardopt.checkpoint.hosts.hosts import PREFIX, Hosts, hosts_of
from shardopt.checkpoint.hosts.spare import remove_spares
from shardopt.checkpoint.hosts.whole import WholeCheckpoint
from shardopt.checkpoint.reports import CopyReport, emit_report
from shardopt.checkpoint.run.branches import Branches
from shardopt.checkpoint.run.copying import copy_over_ranks, is_copied
from shardopt.checkpoint.run.identity import claim_tiers, refuse_tiers_of_others
from shardopt.checkpoint.run.restoring import Candidate
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.shares import TIERS_NAME, note_tiers, tiers_at
from shardopt.checkpoint.run.steps import Place, place_of
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.checkpoint.storage.no_space import explain_no_space
from shardopt.errors import CheckpointError, NoSpaceError, OptionError, Problem
from shardopt.ranks import Group, Ranks, SideRanks, ranks_of
from shardopt.world import Thread, world

_log = logging.getLogger("shardopt.checkpoint")


@dataclass(frozen=True, slots=True)
class Tier:
    """A directory on each host in which a `Manager` keeps the newest checkpoints of its run.

    Args:
        path: the same on every host, of a directory that each has for itself: in its memory ("/dev/shm/run") or on its
            disks. It is made with mode 0700 where there is none; one that others may use is refused.
        every: saves go here at steps that are multiples of this.
        keep_last: how many of the newest stay, of those that are copied; what is newer stays too.
        copies: on how many hosts each file is kept; a checkpoint survives the loss of any `copies - 1` of them.
        domain: the failure domain of this host, such as the name of its rack: copies go to hosts of other domains where
            there are such. None is one for each host.
        most_per_second: bytes that a host fetches for copies at most; None for no limit.
    """

    path: str
    every: int
    keep_last: int = 2
    copies: int = 1
    domain: str | None = None
    most_per_second: float | None = None


def refuse_unfit_tiers(tiers: Sequence[Tier], roots: Sequence[Storage], incremental: bool) -> None:
    """Raises OptionError where tiers cannot be used; all of it is listed.

    Args:
        roots: of the run and its mirror.
    """
    problems = []
    taken = {os.path.realpath(root.url) for root in roots if not root.is_remote}
    for number, tier in enumerate(tiers):
        if os.path.realpath(tier.path) in taken:
            required = "another path than the root's and the mirror's: what a tier has is removed"
            problems.append(Problem(f"tiers[{number}].path", repr(tier.path), required, "give it one of its own"))
    for number, tier in enumerate(tiers):
        for name, least in (("every", 1), ("keep_last", 1), ("copies", 1)):
            value = getattr(tier, name)
            if type(value) is not int or value < least:
                wanted = f"an int of at least {least}"
                problems.append(Problem(f"tiers[{number}].{name}", repr(value), wanted, "mend it"))
        if tier.most_per_second is not None and not (
            isinstance(tier.most_per_second, int | float) and tier.most_per_second > 0
        ):
            found = repr(tier.most_per_second)
            problems.append(Problem(f"tiers[{number}].most_per_second", found, "a number of bytes above 0", "mend it"))
        if not isinstance(tier.domain, str | None):
            problems.append(Problem(f"tiers[{number}].domain", repr(tier.domain), "a name, or None", "mend it"))
    paths = [os.path.abspath(tier.path) for tier in tiers]
    if len(set(paths)) < len(paths):
        problems.append(Problem("tiers", "one path twice", "a path for each", "mend it"))
    if tiers and incremental:
        remedy = "leave out one of the two"
        problems.append(Problem("incremental", "True, with tiers", "False: what hosts have refers to nothing", remedy))
    if problems:
        raise OptionError("these tiers cannot be used", problems)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be done for a checkpoint that was committed.

    Args:
        tier, onto: numbers of tiers; that which has it (None: the root alone), and those behind that are to get it.
        to_root: whether the root is to get it.
        then: called once it has.
        is_restored: whether the run has just been restored from it: then what the hosts have of it is verified.
    """

    place: Place
    tier: int | None
    onto: tuple[int, ...] = ()
    to_root: bool = False
    then: Callable[[], None] = lambda: None
    is_restored: bool = False

    @property
    def promotes(self) -> bool:
        return bool(self.onto) or self.to_root


class Tiers:
    """The tiers of a run, the fastest first. All ranks make the same calls."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        root: Root,
        deadline_seconds: float,
        group: Group | None = None,
        copies: Root | None = None,
    ) -> None:
        self._tiers, self._root, self._group, self._copies = tuple(tiers), root, group, copies
        self._deadline_seconds = deadline_seconds
        self._side = SideRanks("the tiers of a run")
        self._alone: Ranks | None = None
        self._changed = world().condition()
        self._waiting: deque[_Job] = deque()  # the first is under way
        self._begun: deque[tuple[Ranks, Sequence[Hosts]]] = deque()  # with which each is done
        self._given_up: set[_Job] = set()  # on rank 0
        self._worker: Thread | None = None
        self._restored: Place | None = None
        self._failure: BaseException | None = None
        self._met: list[Hosts] = []  # whose directories are known to be of no other run
        self._own: list[Hosts] = []  # and are marked as the run's
        self._copied: dict[int, set[Place]] = {number: set() for number in range(len(tiers))}
        self._led: list[str] = []  # directories of the hosts that this rank leads

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def prepare(self) -> None:
        """Has the hosts meet, where they have not. Collective then.

        Raises:
            CheckpointError: a host's directory cannot be used, or belongs to another run.
        """
        self._forget_removed()
        self._side.of(self._ranks, self._deadline_seconds)
        hosts = [self._hosts(number) for number in range(len(self._tiers))]
        if hosts != self._met:
            refuse_tiers_of_others(self._ranks, hosts, self._root, self._copies, self._deadline_seconds)
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
            claim_tiers(self._ranks, self._met, self._root, self._copies, self._deadline_seconds)
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
        _, superseded = self._ranks.agree(
            "making room on tiers",
            work=lambda: None,
            decide=lambda _: self._supersede(),
            deadline_seconds=self._deadline_seconds,
        )
        for number, *place in superseded:
            self._clear(self._hosts(number), Place(*place).__eq__)

    def _supersede(self) -> list[tuple[int, int, int]]:
        """On rank 0: gives up what has no turn yet and will have none; returns tier, step and branch of each."""
        with self._changed:
            of_tiers = [job for job in list(self._waiting)[1:] if job.tier is not None][:-1]
            given_up = [job for job in of_tiers if not (job.promotes or job.is_restored or job in self._given_up)]
            self._given_up.update(given_up)
        return [(job.tier, *job.place) for job in given_up if job.tier is not None]

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
        number = self._number_of(url)
        self._begin(_Job(place, number, self._behind(place, number), to_root, then))

    def committed_at_root(self, place: Place, then: Callable[[], None]) -> None:
        """Has `then` called in its turn, for a checkpoint that was saved to the root: in one order on all ranks."""
        self._begin(_Job(place, None, then=then))

    def promoting(self) -> frozenset[str]:
        """Returns the names of checkpoints that come to the root now or later; nothing of them is to be removed."""
        with self._changed:
            return frozenset(job.place.name for job in self._waiting if job.to_root)

    def _behind(self, place: Place, number: int | None) -> tuple[int, ...]:
        """Returns the tiers behind one that are due for a checkpoint."""
        return () if number is None else tuple(other for other in self._due(place.step) if other > number)

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
        for number in range(len(self._tiers)):
            hosts = self._hosts(number)
            places = [place_of(name) for name in whole_on(self._ranks, hosts, self._deadline_seconds)]
            found += [Candidate(place, hosts.url(place.name)) for place in places if place is not None]
        return found

    def where(self, branches: Branches) -> dict[int, dict[str, int]]:
        """Returns by step of the run the tiers that have it, with the number of hosts that may be lost. Collective."""
        if self._tiers:
            self.prepare()
        found: dict[int, dict[str, int]] = {}
        for number, tier in enumerate(self._tiers):
            for name, survives in whole_on(self._ranks, self._hosts(number), self._deadline_seconds).items():
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
            for number in range(len(self._tiers)):
                self._clear(self._hosts(number), unwanted)
            self._remove_spares()  # those of ranks that there are no more too

        self.prepare()
        if place is not None:
            self._claim()
        what = f"clearing what is newer than step {max(step, 0)}"
        self._ranks.agree(what, work=clear, deadline_seconds=self._deadline_seconds)
        for copied in self._copied.values():
            copied.clear()
        self._failure = None  # of what came to nothing before, and was logged
        self._restored = place
        number = None if url is None else self._number_of(url)
        if place is not None and number is not None:
            self._begin(_Job(place, number, self._behind(place, number), to_root, then, is_restored=True))

    def wait(self) -> None:
        """Waits until all that was begun is done. Local."""
        with self._changed:
            while self._waiting:
                self._changed.wait()

    def close(self) -> None:
        """Waits as `wait` does, and gives back what the next save would have been written over."""
        self.wait()
        self._remove_spares()

    def take_failure(self) -> BaseException | None:
        """Returns the failure of a promotion once, if it was not raised yet; does not wait. Local."""
        failure, self._failure = self._failure, None
        return failure

    @property
    def _ranks(self) -> Ranks:
        ranks = ranks_of(self._group)
        if ranks.has_group:
            return ranks
        # Without a group each call has made others: their hosts, which are theirs, would meet again and again.
        self._alone = self._alone or ranks
        return self._alone

    def _hosts(self, number: int) -> Hosts:
        tier = self._tiers[number]
        return hosts_of(self._ranks, tier.path, self._deadline_seconds, tier.domain)

    def _due(self, step: int) -> list[int]:
        return [number for number, tier in enumerate(self._tiers) if step % tier.every == 0]

    def _begin(self, job: _Job) -> None:
        ranks = self._side.of(self._ranks, self._deadline_seconds)  # made by `prepare`
        hosts = [self._hosts(number) for number in range(len(self._tiers))]
        with self._changed:
            self._waiting.append(job)
            self._begun.append((ranks, hosts))
            if self._worker is None:
                # Not a daemon: a program that ends waits for it. It ends when there is nothing to do.
                self._worker = world().thread(self._work, "shardopt-tiers")
                self._worker.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._worker = None
                    return
                job, (ranks, hosts) = self._waiting[0], self._begun[0]
            try:
                with ranks.beating(self._deadline_seconds):
                    self._do(ranks, hosts, job)
            except BaseException as error:  # the training goes on meanwhile
                _log.error("what is behind the save of step %d has failed: %s", job.place.step, error)
                if (
                    job.promotes or job.tier is None
                ):  # raised by the next call; copies alone are made with the next save
                    self._failure = error
            with self._changed:
                self._given_up.discard(self._waiting.popleft())
                self._begun.popleft()
                self._changed.notify()  # nobody but the program itself waits

    def _do(self, ranks: Ranks, hosts: Sequence[Hosts], job: _Job) -> None:
        if job.tier is None:
            job.then()
            return
        source, name = hosts[job.tier], job.place.name
        _, wanted = ranks.agree(
            f"copying {name} on {source.root}",
            work=lambda: None,
            decide=lambda _: job.promotes or job.is_restored or self._is_newest(job),
            deadline_seconds=self._deadline_seconds,
        )
        if not wanted:  # a newer one is there, and is copied next
            self._clear(source, job.place.__eq__)
            return
        if job.is_restored:
            self._mend(ranks, source, job.place)
        whole = self._copy(ranks, source, job.tier, job.place)
        for number in job.onto:
            try:
                self._promote(ranks, whole, hosts[number], job.place)
            except NoSpaceError as error:
                if ranks.rank == 0:
                    _log.warning("step %d is not on %s: %s", job.place.step, hosts[number].root, error)
                self._clear(hosts[number], job.place.__eq__)
            else:
                self._copy(ranks, hosts[number], number, job.place)
        if job.to_root:
            self._promote_to_root(ranks, whole, self._root.checkpoint(job.place))
            job.then()

    def _is_newest(self, job: _Job) -> bool:
        with self._changed:
            return [each for each in self._waiting if each.tier is not None][-1] is job

    def _mend(self, ranks: Ranks, hosts: Hosts, place: Place) -> None:
        """Has each host verify what it has of a checkpoint, and fetch anew what is damaged, where another has it."""
        what = f"verifying {place.name} on {hosts.root}"
        whole = find(ranks, hosts, place.name, what, self._deadline_seconds)
        _, damaged = ranks.agree(
            what,
            work=lambda: damaged_files(hosts, whole) if hosts.is_leader else [],
            report=lambda names: names,
            decide=lambda reports: [reports[leader] for leader in hosts.leaders],
            deadline_seconds=self._deadline_seconds,
        )
        ranks.agree(
            what,
            work=lambda: replace_damaged(hosts, whole, damaged) if hosts.is_leader else None,
            deadline_seconds=self._deadline_seconds,
        )

    def _copy(self, ranks: Ranks, hosts: Hosts, number: int, place: Place) -> WholeCheckpoint:
        """Has each host fetch its copies of a checkpoint of a tier, and clears what is older than those that stay."""
        begin = world().monotonic()
        what = f"copying {place.name} on {hosts.root}"
        whole = find(ranks, hosts, place.name, what, self._deadline_seconds)
        tier = self._tiers[number]

        def fetch() -> bool:
            if not hosts.is_leader:
                return True
            return fetch_copies(hosts, whole, tier.copies, tier.most_per_second)

        _, copied = ranks.agree(what, work=fetch, report=bool, decide=all, deadline_seconds=self._deadline_seconds)
        if copied:
            self._copied[number].add(place)
            nbytes = sum(file.nbytes for file in whole.manifest.files)
            copies, seconds = min(tier.copies, hosts.count), world().monotonic() - begin
            emit_report("copy", CopyReport(whole.url, whole.manifest.save_id, copies, nbytes, seconds))
        newest = sorted(each for each in self._copied[number] if each.branch == place.branch)[-tier.keep_last :]
        self._copied[number] = set(newest)
        is_full = len(newest) == tier.keep_last

        def unwanted(other: Place) -> bool:
            if is_full and (other.branch < place.branch or other.step < newest[0].step):
                return True
            # Older ones that are not copied never will be; this one is there.
            return other.branch == place.branch and other < place and other not in (*newest, self._restored)

        self._clear(hosts, unwanted)
        return whole

    def _promote(self, ranks: Ranks, whole: WholeCheckpoint, target: Hosts, place: Place) -> None:
        """Copies a checkpoint from one tier to another: each host the files that its ranks have written."""
        what = f"promoting {place.name} to {target.root}"
        share = target.share(place.name)
        own = {
            file.name: file
            for file in whole.manifest.files
            if target.of_rank[writer_of(file.name) % ranks.size] == target.number
        }

        def copy() -> None:
            if not target.is_leader:
                return
            needed = sum(file.nbytes for file in own.values())
            if share.record() != whole.record:
                share.clear()  # what is there is of another save
            with (
                wrap_os_errors(f"copy {whole.url} to {share.url}"),
                explain_no_space(share, "its files", lambda: needed, lambda: sum(share.files().values())),
            ):
                share.make()
                there = share.files()
                for file in own.values():
                    if there.get(file.name) != file.nbytes:
                        copy_file(whole, share, file)

        def record() -> None:
            if target.is_leader and share.record() != whole.record:
                with (
                    wrap_os_errors(f"commit {share.url}"),
                    explain_no_space(share, "a record", whole.record.__len__, lambda: 0),
                ):
                    share.keep_record(whole.record, {name: file.nbytes for name, file in own.items()})

        for work in (copy, record):
            ranks.agree(what, work=work, deadline_seconds=self._deadline_seconds)

    def _promote_to_root(self, ranks: Ranks, whole: WholeCheckpoint, target: Storage) -> None:
        _, copied = ranks.agree(
            f"promoting {target.url.rstrip('/').rpartition('/')[2]} to the root",
            work=lambda: None,
            decide=lambda _: is_copied(whole, target),
            deadline_seconds=self._deadline_seconds,
        )
        if not copied:
            copy_over_ranks(ranks, whole, target, lambda: (whole.manifest, whole.record), self._deadline_seconds)

    def _clear(self, hosts: Hosts, unwanted: Callable[[Place], bool]) -> None:
        """Removes shares, on leaders."""
        if not hosts.is_leader:
            return
        with _logging_failures(hosts.root):
            for name in hosts.share(".").names():
                place = place_of(name)
                if place is not None and unwanted(place):
                    hosts.share(name).clear()

    def _remove_spares(self) -> None:
        for path in self._led:
            with _logging_failures(path):
                remove_spares(path)


@contextmanager
def _logging_failures(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # no reason to end a training
        _log.warning("old checkpoints could not be removed from %s: %s", path, error)
