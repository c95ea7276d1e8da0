"""The checkpoints that a run has, in its root and where they are copied to, as all ranks of the job know them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from shardopt.checkpoint.run.branches import Beyond, Branch, Branches, branches_of, merge_records
from shardopt.checkpoint.run.mirror import Mirror
from shardopt.checkpoint.run.restoring import Candidate
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.steps import Place, place_of
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, Problem
from shardopt.ranks import Call, SharedGroup, as_call

_log = logging.getLogger("shardopt.checkpoint")


class History:
    """The checkpoints of a run, by step and branch.

    Ranks have to save to the same directories, so all know the branches that rank 0 has read. A Manager that only
    lists them reads for itself.

    Args:
        root: of the run.
        copies: the root of the mirror, and the mirror itself; None where there is none.
        group: of the ranks of the run.
    """

    def __init__(
        self,
        root: Root,
        copies: Root | None,
        mirror: Mirror | None,
        group: SharedGroup,
    ) -> None:
        self._group = group
        self._root, self._copies, self._mirror = root, copies, mirror
        self._agreed: Branches | None = None  # as all ranks know them

    @property
    def branches(self) -> Branches:
        """The branches as all ranks know them; none before `agree_on_branches`."""
        return self._agreed or Branches()

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks know the branches."""
        return self._agreed is not None

    def committed_here(self) -> tuple[list[Place], list[Place]]:
        """Lists the committed checkpoints that this rank sees: those of the run, and the others, ascending. Local."""
        contents = self._root.contents()
        branches = self._branches_with(contents.records)
        committed = [place for place in contents.places if self._root.is_committed(place)]
        run = [place for place in committed if branches.has(place)]
        return run, [place for place in committed if not branches.has(place)]

    def place_of_step(self, step: int) -> Place:
        """Returns the place of the checkpoint of a step, whether there is one or not. Local."""
        return self._branches_here().place(step)

    def current_branch(self) -> int:
        """Returns the branch that the run is on. Local."""
        return self._branches_here().current

    def _branches_here(self) -> Branches:
        return self._branches_with(self._root.contents().records) if self._agreed is None else self._agreed

    def _branches_with(self, records: Mapping[str, Branch]) -> Branches:
        known = {each.file_name: each for each in self.branches.values()}
        return branches_of({**records, **known}.values())

    def agree_on_branches(self, needs_copies: bool) -> Branches:
        """Reads the records of branches, and completes those of the other root. Collective.

        Args:
            needs_copies: whether it is an error that the root of the copies cannot be read, as it is for a restore.

        Raises:
            CheckpointError: a root cannot be read, or is a checkpoint itself, or the records contradict each other.
            CorruptionError: a record is damaged or missing.
        """
        wire = self._group.ranks.on_rank_0(
            f"restoring from {self._root.url}" if needs_copies else f"looking for checkpoints in {self._root.url}",
            lambda: [list(each) for each in self._read_branches(needs_copies).values()],
        )
        self._agreed = branches_of(Branch(*each) for each in wire)
        return self._agreed

    def _read_branches(self, needs_copies: bool) -> Branches:
        own = self._root.contents().records
        self._root.refuse_checkpoint()
        copied = self._records_of_copies(needs_copies)
        if copied is None:
            return branches_of(own.values())
        branches = merge_records(
            own, copied, f"{self._root.url} and {self._copies.url}" if self._copies else self._root.url
        )
        for record in branches.values():
            if record.file_name not in own:
                self._root.add(record)
            if self._copies is not None and record.file_name not in copied:
                self._copies.add(record)
        return branches

    def _records_of_copies(self, needed: bool) -> dict[str, Branch] | None:
        """Reads the records in the root of the copies; None where they cannot be read."""
        if self._copies is None:
            return {}
        try:
            records = dict(self._copies.contents().records)
        except CorruptionError:
            raise
        except CheckpointError as error:
            if needed:
                raise
            _log.warning("%s", error)
            return None
        self._copies.refuse_checkpoint()
        return records

    def candidates(
        self,
        seen_from: int,
        step: int | None = None,
        required: bool = False,
        on_tiers: Sequence[Candidate] = (),
    ) -> list[Candidate]:
        """Lists the checkpoints to restore, the newest first; of one step the run's own before its copy. Collective.

        Args:
            seen_from: the branch.
            step: the only step that is looked for; None for all.
            required: whether it is an error that there is none.
            on_tiers: those that tiers have, of one step before all others.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: a root cannot be read, or not all ranks see the same.
        """
        branches = self.branches
        candidates = [each for each in (*on_tiers, *self._committed()) if branches.has(each.place, seen_from)]
        candidates.sort(key=lambda each: -each.place.step)  # of equal ones the order stays
        wanted = [each for each in candidates if step is None or each.place.step == step]
        if required and not wanted:
            steps = sorted({each.place.step for each in candidates})
            there = f"steps {', '.join(map(str, steps))}" if steps else "no committed checkpoint"
            if not steps and not self._root.is_there():
                there = "nothing, not even the directory"
            remedy = "mount what is missing, or mend the path" if not steps else "give one of the steps that are there"
            required_steps = "one" if step is None else f"step {step}"
            if seen_from != branches.current:
                there += f" on branch {seen_from}"
            problem = Problem(self._root.url, there, required_steps, remedy)
            raise CheckpointNotFoundError("there is nothing to restore", [problem])
        return wanted

    def _committed(self) -> list[Candidate]:
        """Lists all committed checkpoints, on any branch. Collective."""
        if self._mirror is not None:
            named = [(place_of(name), url) for name, url in self._mirror.committed()]
            return [Candidate(place, url) for place, url in named if place is not None]
        doing = f"restoring from {self._root.url}"
        _, places = self._group.ranks.agree(
            Call(doing, f"{as_call(doing).same} the newest"),  # not the round before it, of the branches
            # One listing on each rank, where that is cheap: a disk may be mounted on some hosts only.
            work=lambda: not self._root.storage.is_remote and bool(self._root.contents().places),
            report=bool,
            decide=self._committed_here,
        )
        return [Candidate(place, self._root.checkpoint(place).url) for place in (Place(*each) for each in places)]

    def _committed_here(self, ranks_see_any: list[bool]) -> list[list[int]]:
        contents = self._root.contents()
        self._refuse_new_branches(contents.records)
        committed = [place for place in contents.places if self._root.is_committed(place)]
        others = [rank for rank, sees in enumerate(ranks_see_any) if sees]
        if others and not ranks_see_any[0]:
            seen = f"checkpoints on rank {others[0]}, and none on rank 0"
            problem = Problem(self._root.url, seen, "the same on every rank", "check what is mounted there")
            raise CheckpointError("ranks do not see the same root", [problem])
        return [list(place) for place in committed]

    def _refuse_new_branches(self, records: Mapping[str, Branch]) -> None:
        """Raises CheckpointError where a branch has begun since this job knows the branches: it would mix the two."""
        known = {each.file_name for each in (self.branches or {}).values()}
        begun = sorted(set(records) - known)
        if begun:
            remedy = "end the other job, or this one; then restore again"
            paths = [f"{self._root.url}/{name}" for name in begun]
            problems = [Problem(path, "begun meanwhile", "no new branch", remedy) for path in paths]
            raise CheckpointError("another job has taken this run back while it was looked at", problems)

    def take_back(self, step: int, seen_from: int, beyond: Beyond, on_tiers: Sequence[Candidate] = ()) -> None:
        """Makes the run go on from a step of a branch, if it does not already. Collective.

        Args:
            beyond: "set_aside" or "remove": the fate of checkpoints that were saved after it.
            on_tiers: as for `candidates`.
        """
        branches = self.branches
        later = [each for each in self.candidates(seen_from, on_tiers=on_tiers) if each.place.step > step]
        if seen_from == branches.current and not later:
            return
        record = branches.taken_back(step, seen_from, beyond)
        self._group.ranks.on_rank_0(f"taking {self._root.url} back to step {step}", lambda: self._add(record))
        self._agreed = branches_of([*branches.values(), record])

    def _add(self, record: Branch) -> None:
        self._root.add(record)
        if self._copies is not None:
            self._copies.add(record)

    def newest_under_root(self, damaged: Collection[str]) -> Place | None:
        """Returns the newest checkpoint of the run under its root that is not known to be damaged. Collective."""
        branches = self.branches

        def newest() -> list[int] | None:
            committed = [each for each in self._root.committed() if branches.has(each)]
            whole = [each for each in committed if self._root.checkpoint(each).url not in damaged]
            return list(max(whole)) if whole else None

        place = self._group.ranks.on_rank_0(f"looking for checkpoints in {self._root.url}", newest)
        return None if place is None else Place(*place)
