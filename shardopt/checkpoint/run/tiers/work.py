"""Copies and repairs a checkpoint of a tier, from the files that hosts have of it, and promotes it to slower tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from shardopt.checkpoint.format.constants import writer_of
from shardopt.checkpoint.hosts.copying import copy_file, damaged_files, fetch_copies, replace_damaged
from shardopt.checkpoint.hosts.finding import find
from shardopt.checkpoint.hosts.hosts import Hosts
from shardopt.checkpoint.hosts.spare import remove_spares
from shardopt.checkpoint.hosts.whole import WholeCheckpoint
from shardopt.checkpoint.reports import CopyReport, emit_report
from shardopt.checkpoint.run.background import Turns
from shardopt.checkpoint.run.branches import CheckpointId, ids_in
from shardopt.checkpoint.run.context import Run
from shardopt.checkpoint.run.destinations import Tier
from shardopt.checkpoint.run.tiers.promotions import Arrival, Promotions
from shardopt.checkpoint.saving.writing.no_space import explain_no_space
from shardopt.checkpoint.storage import wrap_os_errors
from shardopt.checkpoint.storage.retry import run_in_thread
from shardopt.errors import CheckpointError, NoSpaceError
from shardopt.ranks import Ranks
from shardopt.world import Future, world

_LOOK_SECONDS = 1.0  # that a copy may be late for the root, where it is out of reach
_AWAY_SECONDS = 10.0  # after which a root without an answer is
_log = logging.getLogger("shardopt.checkpoint")


@dataclass(slots=True, eq=False)
class Job:
    """The work to do for a committed checkpoint.

    Args:
        ranks, to_root_ranks: of the side channels on which it is done, and on which the root gets it.
        hosts: by the number of the tier.
        tier, onto: numbers of tiers; that which has it (None: the root alone), and the slower ones that are to get it.
        to_root: whether the root is to get it.
        then: called once it has.
        is_restored: whether the run has just been restored from it: then what the hosts have of it is verified.
        given_up: on rank 0, whether it was.
    """

    id: CheckpointId
    ranks: Ranks
    hosts: Sequence[Hosts]
    tier: int | None
    onto: Sequence[int]
    to_root: bool
    then: Callable[[], None]
    is_restored: bool
    to_root_ranks: Ranks
    given_up: bool = False

    @property
    def promotes(self) -> bool:
        return bool(self.onto) or self.to_root


class TierWork(Turns[Job]):
    """Does the jobs of tiers in the order in which they began, each on the ranks of its side channel.

    The order is the same on all ranks. Failures of copies on other hosts alone are logged, and no failures: the next
    save is copied again.

    Args:
        run: whose checkpoints these are.
        tiers: of the run, the fastest first.
    """

    def __init__(self, run: Run, tiers: Sequence[Tier]) -> None:
        super().__init__(self._do_one, self._describe, "shardopt-tiers", low_priority=True)
        self._tiers, self._run, self._root = tiers, run, run.root
        self.promotions = Promotions(run.root)
        self.begin_from(None, [()] * len(tiers))

    def reset(self) -> None:
        super().reset()
        self._look: Future[object] | None = None
        self._looked_at = 0.0

    def supersede(self) -> list[Job]:
        """Drops and returns waiting copies that a newer one makes needless. On rank 0."""
        of_tiers = [job for job in self.jobs[1:] if job.tier is not None][:-1]
        given_up = [job for job in of_tiers if not (job.promotes or job.is_restored or job.given_up)]
        for job in given_up:
            job.given_up = True
        return given_up

    def promoting(self) -> frozenset[str]:
        """Returns the names of checkpoints that come to the root now or later."""
        # In this order: the first begins the second.
        return frozenset(job.id.name for job in self.jobs if job.to_root) | self.promotions.names()

    def is_newest(self, job: Job) -> bool:
        """Whether no newer job of a tier waits, which would be copied next."""
        return [each for each in self.jobs if each.tier is not None][-1] is job

    def _do_one(self, job: Job) -> None:
        try:
            with job.ranks.beating():
                self.do(job)
        except BaseException as error:
            if job.promotes or job.tier is None:
                raise
            _log.error("%s failed in the background: %s", self._describe(job), error)

    def _describe(self, job: Job) -> str:
        return f"what follows the save of step {job.id.step}"

    def begin_from(self, restored: CheckpointId | None, copied: Sequence[Iterable[CheckpointId]]) -> None:
        """Notes from what the run continues, and which checkpoints of each tier have their copies then. Local.

        No task is running then.
        """
        self._restored = restored
        self._copied = {number: set(ids) for number, ids in enumerate(copied)}

    def do(self, job: Job) -> None:
        """Does the work for a checkpoint. Collective, on the job's ranks."""
        if job.tier is None:
            self.promotions.begin(Arrival(job.id, job.to_root_ranks, None, job.then))
            return
        ranks, id, source = job.ranks, job.id, job.hosts[job.tier]
        wanted = ranks.on_rank_0(
            f"copying {id.name} on {source.root}", lambda: job.promotes or job.is_restored or self.is_newest(job)
        )
        if not wanted:  # a newer one is there, and is copied next
            clear_shares(source, id.__eq__)
            return
        if job.is_restored:
            self._mend(ranks, source, id)
        whole = self._copy(ranks, source, job.tier, id)
        for number in job.onto:
            target = job.hosts[number]
            try:
                self._promote(ranks, whole, target, id)
            except NoSpaceError as error:
                if ranks.rank == 0:
                    _log.warning("step %d is not on %s: %s", id.step, target.root, error)
                clear_shares(target, id.__eq__)
            else:
                self._copy(ranks, target, number, id)
        if job.to_root:
            self.promotions.begin(Arrival(id, job.to_root_ranks, whole, job.then))

    def _mend(self, ranks: Ranks, hosts: Hosts, id: CheckpointId) -> None:
        """Makes each host verify its files of a checkpoint, and fetch damaged ones from a host with intact ones."""
        what = f"verifying {id.name} on {hosts.root}"
        whole = find(ranks, hosts, id.name, what)
        _, damaged = ranks.agree(
            what,
            work=lambda: damaged_files(hosts, whole) if hosts.is_leader else [],
            report=lambda names: names,
            decide=lambda reports: [reports[leader] for leader in hosts.leaders],
        )
        ranks.agree(
            what,
            work=lambda: replace_damaged(hosts, whole, damaged) if hosts.is_leader else None,
        )

    def _copy(self, ranks: Ranks, hosts: Hosts, number: int, id: CheckpointId) -> WholeCheckpoint:
        """Makes each host fetch its copies of a tier's checkpoint; removes checkpoints older than those that stay."""
        begin = world().monotonic()
        what = f"copying {id.name} on {hosts.root}"
        whole = find(ranks, hosts, id.name, what)
        tier = self._tiers[number]

        _, (copied, may_remove) = ranks.agree(
            what,
            work=lambda: not hosts.is_leader or fetch_copies(hosts, whole, tier.copies, tier.max_bytes_per_second),
            report=bool,
            decide=lambda reports: [all(reports), self._may_remove()],
        )
        if copied:
            self._copied[number].add(id)
            nbytes = sum(file.nbytes for file in whole.manifest.files)
            copies, seconds = min(tier.copies, hosts.count), world().monotonic() - begin
            report = CopyReport(whole.url, whole.manifest.save_id, copies, nbytes, seconds)
            emit_report("copy", report, for_all=ranks.rank == 0)
        newest = sorted(each for each in self._copied[number] if each.branch == id.branch)[-tier.keep_last :]
        self._copied[number] = set(newest)
        is_full, promoting = len(newest) == tier.keep_last, self.promoting()

        def unwanted(other: CheckpointId) -> bool:
            if other.name in promoting:
                return False
            if is_full and (other.branch < id.branch or (other.branch == id.branch and other.step < newest[0].step)):
                return True
            # Older ones that are not copied never will be; this one is there.
            return other.branch == id.branch and other < id and other not in (*newest, self._restored)

        def has_left(other: CheckpointId) -> bool:
            return (
                other.name not in promoting
                and other.branch < id.branch
                and not self._run.branches.has(other, id.branch)
            )

        if may_remove:
            # With the new ones there are never more than `keep_last`, as a tier may have room for no more.
            clear_shares(hosts, unwanted, has_left, tier.keep_last - len(newest))
        return whole

    def _may_remove(self) -> bool:
        """Whether no other job has taken the run back, as far as the root can be read. On rank 0.

        With its root out of reach a run goes on. So a look at it is waited for a moment, once, and counts when it ends.
        """
        begin = world().monotonic()
        if self._look is None or self._look.done():
            self._look, self._looked_at = run_in_thread(self._root.ids), begin
            with suppress(CheckpointError, TimeoutError):
                self._look.result(_LOOK_SECONDS)
        has_failed = self._look.done() and self._look.exception() is not None
        self.promotions.looks_away = has_failed or (not self._look.done() and begin - self._looked_at > _AWAY_SECONDS)
        return self._run.may_remove()

    def _promote(self, ranks: Ranks, whole: WholeCheckpoint, target: Hosts, id: CheckpointId) -> None:
        """Copies a checkpoint from one tier to another; each host copies the files that its ranks wrote."""
        what = f"promoting {id.name} to {target.root}"
        share = target.share(id.name)
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
                share.clear()  # its files are of another save
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
            ranks.agree(what, work=work)


def clear_shares(
    hosts: Hosts,
    unwanted: Callable[[CheckpointId], bool],
    has_left: Callable[[CheckpointId], bool] = lambda _: False,
    room: int = 0,
) -> None:
    """Removes a host's shares of unwanted checkpoints, on its leader; logs a failure.

    Args:
        has_left: whether a checkpoint has left the run; of those only the newest `room` stay.
    """
    if not hosts.is_leader:
        return
    with _logging_failures(hosts.root):
        newest_first = ids_in(hosts.share(".").names())[::-1]
        too_many = [id for id in newest_first if has_left(id)][room:]
        for id in newest_first:
            if unwanted(id) or id in too_many:
                hosts.share(id.name).clear()


def clear_spares(path: str) -> None:
    """Removes the spare files in a host's directory; logs a failure."""
    with _logging_failures(path):
        remove_spares(path)


@contextmanager
def _logging_failures(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # no reason to end a training
        _log.warning("old checkpoints could not be removed from %s: %s", path, error)
