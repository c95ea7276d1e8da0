"""The state that all parts of a run share: its roots, its ranks, and its checkpoints as all ranks know them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple

from shardopt.checkpoint.reports import LoadReport, announce
from shardopt.checkpoint.run.branches import Branch, Branches, CheckpointId, Newer, branches_of, merge_records, parse_id
from shardopt.checkpoint.run.mirror import MirrorCopier
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.run.root import Root, refuse_seen_by_some
from shardopt.checkpoint.text import plural, seconds_text
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, Problem, ShardoptError
from shardopt.ranks import Call, Halt, Ranks, SharedGroup, as_call
from shardopt.world import utc_text, world

_QUESTION = "whether it is time to save"
_log = logging.getLogger("shardopt.checkpoint")
_KEEP_ALL = Retention()


class Due:
    """Says which steps are saved: at or after multiples of a number, or after each interval of time.

    A step is due of every n if it is a multiple of n, or if one lies between it and the step before it. A program may
    leave steps out, or count samples.

    All ranks ask for the same steps, in the same order. By time it is rank 0's clock that counts. Until it has come
    nothing is sent, and nobody waits: then the step after the foremost that a rank has passed is due on all of them.
    There questions are counted, not steps.

    Args:
        every: of the root: a number of steps, or a time.
        group: of the ranks that ask.
    """

    def __init__(self, every: int | timedelta, group: SharedGroup) -> None:
        self._steps = None if isinstance(every, timedelta) else int(every)
        self._seconds = every.total_seconds() if isinstance(every, timedelta) else 0.0
        self._group = group
        self._passed = 0  # the step that the program has come to
        self._at_root = 0  # the newest step under the root, of those before the restored one
        self._jumps: dict[int, int] = {}  # saved steps, and the steps before them, where some were left out between
        self._halt: tuple[Ranks, Halt] | None = None  # of the ranks that ask; a new one for each time
        self._next = world().monotonic() + self._seconds
        self._asked, self._asked_for = 0, -1  # questions of this time, and the step of the last one
        self._is_at: int | None = None  # the question at which it is due; None until that is known
        self._were: set[int] = set()

    def restored(self, step: int, at_root: Collection[int]) -> None:
        """Continues from a step, 0 where nothing was restored; `at_root` are those under the root. Local."""
        self._passed, self._at_root = step, max((each for each in at_root if each < step), default=0)
        self._jumps.clear()

    def passed(self, step: int, is_saved: bool) -> bool:
        """Notes that the program has come to a step; returns whether it is saved. Local."""
        if is_saved and step > self._passed + 1:
            self._jumps[step] = self._passed
        self._passed = step
        return is_saved

    def of(self, every: int, step: int, before: int | None = None) -> bool:
        """Whether a step is due of every so many: one that is saved, or that the program comes to next. Local.

        Args:
            before: the step before it; None for the one that the program has come from.
        """
        before = self._jumps.get(step, self._passed) if before is None else before
        return step % every == 0 or step // every > before // every

    def at(self, step: int) -> bool:
        """Whether a step is due at the root. By time it is collective at the first, and at those after due ones."""
        if self._steps is not None:
            return self.of(self._steps, step)
        if step != self._asked_for:
            self._ask(step)
        return step in self._were

    def was_at(self, step: int) -> bool:
        """Whether a step that `at` was called for is due. Local."""
        return self.of(self._steps, step) if self._steps is not None else step in self._were

    def may_have_been_at(self, step: int) -> bool:
        """Whether the restored step may have been due, or is the first after one that did not come there. Local."""
        return self._steps is None or self.of(self._steps, step, self._at_root)

    def _ask(self, step: int) -> None:
        ranks = self._group.ranks
        if self._is_at is not None and self._asked >= self._is_at:  # it is past: the next time begins
            self._halt, self._asked, self._is_at = None, 0, None
            self._next = world().monotonic() + self._seconds
        if self._is_at is None:
            if self._halt is None or self._halt[0] is not ranks:
                self._halt, self._asked = (ranks, ranks.halt(_QUESTION)), 0
            is_time = ranks.rank == 0 and world().monotonic() >= self._next
            self._is_at = self._halt[1].at(self._asked + 1, is_time)
        # Not before, as a question that was interrupted is asked again.
        self._asked_for, self._asked = step, self._asked + 1
        if self._asked == self._is_at:
            self._were.add(step)


class Candidate(NamedTuple):
    """A committed checkpoint of the run, in one of its roots or on a tier."""

    id: CheckpointId
    url: str


class Restored(NamedTuple):
    """The checkpoint that a run was restored from.

    Args:
        id, url: as of a `Candidate`.
        report: of its load.
        damaged: the URLs of those that came before it and are damaged.
    """

    id: CheckpointId
    url: str
    report: LoadReport
    damaged: frozenset[str]


def summary_of(restored: Restored, select: str | None) -> str:
    """Returns a log line about a restore, of all keys or of those that `select` matches."""
    report = restored.report
    saved = f"saved by {plural(report.world_size, 'rank')}"
    if report.saved_at is not None:
        seconds = max(round(world().wall_clock() - report.saved_at), 1)  # clocks of hosts differ
        saved += f" on {utc_text(report.saved_at)}, {seconds_text(seconds)} ago"
    alone = "" if select is None else f"; of the app only what select={select!r} finds ({len(report.loaded)} keys)"
    return f"resumed step {restored.id.step} from {report.url}, {saved}{alone}"


@dataclass(eq=False)
class Run:
    """A run: its root and mirror, its ranks, its rules, and its checkpoints by step and branch.

    Ranks have to save to the same directories, so all know the branches that rank 0 has read. A Manager that only
    lists them reads for itself.

    Args:
        root: in which its checkpoints are.
        group: of its ranks.
        mirror: that copies them to a second root; None where there is none.
        every: which steps are saved to the root: the first at or after each multiple, or after every such time.
        rules: which checkpoints stay.

    Attributes:
        branches: as all ranks know them; none before `agree_on_branches`.
        is_agreed: whether all ranks know them.
        at_root: the candidates under the root at the last look.
        roots: the root, and that of the mirror if there is one.
    """

    root: Root
    group: SharedGroup
    mirror: MirrorCopier | None = None
    every: int | timedelta = 1
    rules: Retention = _KEEP_ALL

    def __post_init__(self) -> None:
        self.roots = (self.root,) if self.mirror is None else (self.root, Root(self.mirror.remote))
        self.due = Due(self.every, self.group)
        self.branches, self.is_agreed = Branches(), False
        self.at_root: frozenset[CheckpointId] = frozenset()
        self._told: list[str] = []  # the records of branches that were told of

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run."""
        return self.group.ranks

    def committed_here(self) -> tuple[list[CheckpointId], list[CheckpointId]]:
        """Lists the committed checkpoints that this rank sees: the run's and the others, ascending. Local."""
        ids = self.root.ids()
        committed, unread = self.root.look_at(ids)
        committed = sorted((*committed, *unread))
        branches = self._branches_with(ids)
        return [id for id in committed if branches.has(id)], [id for id in committed if not branches.has(id)]

    def branches_here(self) -> Branches:
        """Returns the branches that all ranks agreed on, or else those that this rank sees. Local."""
        return self.branches if self.is_agreed else self._branches_with(self.root.ids())

    def _branches_with(self, ids: Sequence[CheckpointId]) -> Branches:
        known = {each.file_name: each for each in self.branches.values()}
        return branches_of({**self.root.seen.records, **known}.values(), ids, self.root.url)

    def agree_on_branches(self, needs_copies: bool) -> Branches:
        """Reads the records of branches, and copies missing ones to the other root. Collective.

        Args:
            needs_copies: whether it is an error that the mirror's root cannot be read, as it is for a restore.

        Raises:
            CheckpointError: a root cannot be read, or is a checkpoint itself, or the records contradict each other.
            CorruptionError: a record is damaged or missing.
        """
        wire = self.ranks.on_rank_0(
            f"restoring from {self.root.url}" if needs_copies else f"looking for checkpoints in {self.root.url}",
            lambda: [list(each) for each in self._read_branches(needs_copies)],
        )
        self.branches, self.is_agreed = branches_of(Branch(*each) for each in wire), True
        return self.branches

    def _read_branches(self, needs_copies: bool) -> Collection[Branch]:
        ids, found = list[CheckpointId](), list[Root]()
        for root in self.roots:
            try:
                ids += root.ids()
            except CorruptionError:
                raise
            except CheckpointError as error:
                if needs_copies or root is self.root:
                    raise
                _log.warning("%s", error)
                continue
            root.claim(reads_first=needs_copies)
            found.append(root)
        ids = [] if self.root.is_on_hosts else ids
        branches = merge_records({root.url: root.seen.records for root in found}, ids).values()
        for root in found:
            for record in branches:
                if record.file_name not in root.seen.records:
                    root.add(record)
        return branches

    def candidates(
        self,
        seen_from: int,
        step: int | None = None,
        required: bool = False,
        on_tiers: Sequence[Candidate] = (),
        lacking: Mapping[CheckpointId, ShardoptError] = MappingProxyType({}),
    ) -> list[Candidate]:
        """Lists the checkpoints to restore, newest first; for one step, the run's own before its copy. Collective.

        Args:
            seen_from: the branch.
            step: the only step that is looked for; None for all.
            required: whether it is an error that there is none.
            on_tiers: those that tiers have, of one step before all others.
            lacking: those that tiers do not have completely, for the error.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptionError: tiers have steps of a branch whose record is missing.
            CheckpointError: a root cannot be read, or not all ranks see the same.
        """
        branches_of(self.branches.values(), [*(each.id for each in on_tiers), *lacking], self.root.url)
        candidates = [each for each in (*on_tiers, *self._committed()) if self.branches.has(each.id, seen_from)]
        candidates.sort(key=lambda each: -each.id.step)  # of equal ones the order stays
        self.at_root = frozenset(id for id, url in candidates if url == self.root.checkpoint(id).url)
        wanted = candidates if step is None else [each for each in candidates if each.id.step == step]
        if required and not wanted:
            steps = sorted({each.id.step for each in candidates})
            there, remedy = f"steps {', '.join(map(str, steps))}", "give one of the steps that are there"
            if not steps:
                there = "no committed checkpoint" if self.root.is_there() else "nothing, not even the directory"
                remedy = "mount what is missing, or mend the path"
            if seen_from != self.branches.current:
                there += f" on branch {seen_from}"
            problem = Problem(self.root.url, there, "one" if step is None else f"step {step}", remedy)
            lost = {id: error for id, error in lacking.items() if self.branches.has(id, seen_from)}
            files = [each for id, error in lost.items() if step in (None, id.step) for each in error.problems]
            raise CheckpointNotFoundError("there is nothing to restore", [problem, *files])
        return wanted

    def _committed(self) -> list[Candidate]:
        """Lists all committed checkpoints, on any branch. Collective."""
        if self.mirror is not None:
            named = [(parse_id(name), url) for name, url in self.mirror.committed()]
            return [Candidate(id, url) for id, url in named if id is not None]
        doing = f"restoring from {self.root.url}"
        _, ids = self.ranks.agree(
            Call(doing, f"{as_call(doing).same} the newest"),  # not the round before it, of the branches
            # One listing on each rank, where that is cheap: a disk may be mounted on some hosts only.
            work=lambda: self.root.storage.is_remote or bool(self.root.ids()),
            report=bool,
            decide=self._committed_seen_by,
        )
        return [Candidate(id, self.root.checkpoint(id).url) for id in (CheckpointId(*each) for each in ids)]

    def _committed_seen_by(self, ranks_see_any: list[bool]) -> list[list[int]]:
        """Lists the committed checkpoints, and links that lead nowhere, which a load then names; on rank 0.

        Raises:
            CheckpointError: a branch has begun since this job knows the branches, which would be mixed with these. Or
                some ranks see checkpoints, and others none.
        """
        ids = self.root.ids()
        begun = sorted(set(self.root.seen.records) - {each.file_name for each in self.branches.values()})
        if begun:
            remedy = "end the other job, or this one; then restore again"
            problems = [Problem(f"{self.root.url}/{at}", "begun meanwhile", "no new branch", remedy) for at in begun]
            raise CheckpointError(
                "another job has taken this run back while it was looked at", problems, code="run-root"
            )
        committed = [list(id) for id in self.root.committed_or_unread(ids)]
        if committed or not ranks_see_any[0]:  # not where a save of another process has just made the first directory
            refuse_seen_by_some(self.root.url, ranks_see_any)
        return committed

    def tell_passed_over(self, restored: Restored | None, seen_from: int) -> None:
        """Tells which steps in the root a restore of the newest has passed over. Local; on rank 0.

        A higher step without a manifest is unfinished: of a save that was killed, or of a copy of the root. A lower one
        that was saved after the restored one of the mirror means that the root was put back from a backup: then steps
        do not say which work is newer. One manifest is read if the mirror has the highest step, and none otherwise.

        Args:
            seen_from: the branch.
        """
        at_root = self.at_root
        step = -1 if restored is None else restored.id.step
        for id in self.root.seen.ids:
            is_newer = id not in at_root and id.step > step and self.branches.has(id, seen_from)
            if is_newer and self.root.is_unfinished(id):
                announce(f"passed over step {id.step} in {self.root.url}: it is unfinished, without a manifest")
        if restored is None or restored.id in at_root or restored.url != self.roots[-1].checkpoint(restored.id).url:
            return
        newest = max((id for id in at_root if self.root.checkpoint(id).url not in restored.damaged), default=None)
        taken, left = restored.report.saved_at, None if newest is None else self.root.saved_at(newest)
        if newest is not None and taken is not None and left is not None and left > taken:
            _log.warning(
                "step %d was restored from %s, where it was saved on %s; step %d in %s was saved later, on %s. If the "
                "root was put back from a backup, restore(app, step=%d) resumes from what was saved since, and begins "
                "a branch [run-root]",
                *(step, restored.url, utc_text(taken), newest.step, self.root.url, utc_text(left), newest.step),
            )

    def take_back(
        self, step: int, seen_from: int, newer: Newer, on_tiers: Sequence[Candidate], always: bool = False
    ) -> None:
        """Makes the run continue from a step of a branch, if it does not already. Collective.

        Args:
            newer: what becomes of checkpoints that were saved there after it. A warning names what leaves the run.
            on_tiers: as for `candidates`.
            always: whether it continues on a new branch even if nothing was saved there after it.
        """
        ids = {each.id for each in (*on_tiers, *self._committed())}
        later = {id for id in ids if id.step > step and self.branches.has(id, seen_from)}
        if seen_from == self.branches.current and not later and not always:
            return
        record = Branch(self.branches.current + 1, seen_from, step, newer)
        then, removed = branches_of([*self.branches.values(), record]), later if newer == "remove" else set()
        left = {id for id in ids if self.branches.has(id) and not then.has(id)} - removed

        def add() -> None:
            for root in self.roots:
                root.add(record)
            record.warn_of({id.step for id in left}, {id.step for id in removed})

        self.is_agreed = False  # if writing fails the record may be there all the same
        self.ranks.on_rank_0(f"taking {self.root.url} back to step {step}", add)
        self.branches, self.is_agreed = then, True

    def may_remove(self) -> bool:
        """Whether the branches are those of the roots as last listed; logs once that another job began one. Local.

        If not, what is to stay is not known: another job may resume from a checkpoint that is old for this one.
        """
        records = {name for root in self.roots for name in root.seen.records}
        if not self.is_agreed:  # this job may be about to begin one
            return False
        begun = sorted(records - {each.file_name for each in self.branches.values()})
        if begun and begun != self._told:
            self._told = begun
            _log.warning(
                "another job has taken %s back (%s), and this job goes on as it was: it removes no checkpoints any "
                "more. End one of the two [run-root]",
                *(self.root.url, ", ".join(begun)),
            )
        return not begun

    def newest(self, damaged: Collection[str] = ()) -> CheckpointId | None:
        """Returns the newest checkpoint under the run's root that is not known to be damaged. Collective."""

        def find() -> list[int] | None:
            own = [id for id in reversed(self.root.ids()) if self.branches.has(id)]
            whole = (id for id in own if self.root.checkpoint(id).url not in damaged and self.root.is_committed(id))
            return next((list(id) for id in whole), None)

        found = self.ranks.on_rank_0(f"looking for checkpoints in {self.root.url}", find)
        return None if found is None else CheckpointId(*found)

    def not_found(self, id: CheckpointId) -> CheckpointNotFoundError:
        """Returns the error for a missing checkpoint. Local."""
        steps = [each.step for each in self.committed_here()[0]]
        there = f"steps {', '.join(map(str, steps))}" if steps else "no committed checkpoint"
        problem = Problem(self.root.url, there, f"step {id.step}", "give one of the steps that are there")
        return CheckpointNotFoundError("there is no checkpoint of this step", [problem])
