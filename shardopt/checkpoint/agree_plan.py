"""Agrees on the plan of a save: compares what ranks describe, merges what differs on rank 0, and keeps plans.

round   reports of a few hashes          `report_state` → `compare_reports` on rank 0
round   only where they differ, and no   the first rank of each kind sends its description; rank 0 merges kinds,
        plan of an earlier save fits     and each rank gets, and plans, its own component (`planning/merge.py`)
round   with the files written           what only the plan could tell: hashes of replicas on ranks of several
                                         kinds; and the plain values that differ, where no round before had them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import xxhash

from shardopt.checkpoint.format.shared_values import Values
from shardopt.checkpoint.planning.assign import Member, check_covers
from shardopt.checkpoint.planning.describe import Description, geometry_of
from shardopt.checkpoint.planning.drift import refuse_drifted, tell_buffers
from shardopt.checkpoint.planning.merge import merge_geometry, merge_values, read_section, sections_of
from shardopt.checkpoint.planning.replica_check import CheckReplicas, are_buffers, drifted_in
from shardopt.checkpoint.planning.save_plan import RankWrites, SavePlan
from shardopt.checkpoint.planning.tied import refuse_other_ties
from shardopt.errors import Problem, ShardoptError, StateError
from shardopt.param_groups import refuse_unmatched
from shardopt.ranks import Call, Ranks
from shardopt.ranks.kinds import decompress, exchange, kind_by_rank, kinds_of, pack_kinds, unpack_kinds

_MOST_KEPT = 2
_LATER = "later"  # in the place of the name of a plan, by which hashes are grouped: they come with what is written


class KeptPlan(NamedTuple):
    """The plan of a save, this rank's writes by it, and the geometry fingerprint of this rank's description.

    The plan is of the whole job on rank 0, and of this rank's component on others.
    """

    plan: SavePlan
    writes: RankWrites
    described: str


Kept = dict[tuple[str, int], KeptPlan]
"""Plans of the last saves, by the fingerprint of all ranks' descriptions and the rank that this process was."""


class Planned(NamedTuple):
    """The plan of this save, this rank's writes by it, and on rank 0 the job's plain values, once they are known."""

    plan: SavePlan
    writes: RankWrites
    values: Values | None


class _Report(NamedTuple):
    """The report of a rank to rank 0 in the first round.

    Args:
        geometry, values: fingerprints of what the rank describes.
        partial: whether it knows of some tensor only the boxes that it holds itself.
        check_replicas: the argument.
        contents: a summary of the replicas' hashes, in groups by their holders according to the plan `guess`.
        guess: the kept plan that this save most likely uses; "" where there is none, "later" where the hashes come
            with what is written.
        kept: all plans that the rank has.
        unmatched: patterns of groups that match nothing there.
        tied: names that are declared to stand for others.
    """

    geometry: str
    values: str
    partial: bool
    check_replicas: CheckReplicas
    contents: dict[str, str]
    guess: str
    kept: list[str]
    unmatched: list[dict[str, Any]]
    tied: dict[str, str]


def report_state(description: Description, geometry: str, rank: int, plans: Kept) -> _Report:
    """Reports this rank's state to rank 0, as JSON.

    Args:
        geometry: its fingerprint.
        plans: of earlier saves.
    """
    # Of ranks that also have keys of their own only the shared ones can be compared, which only a plan knows.
    guess, members = _members_guessed(geometry, rank, plans)
    contents = description.contents_summary(members)
    if description.contents_come_later:
        guess = _LATER
    values = description.values_fingerprint()
    kept = [job for job, kept_for in plans if kept_for == rank]
    choice, unmatched = description.check_replicas, list(description.unmatched)
    tied = dict(description.declared)
    return _Report(geometry, values, description.is_partial, choice, contents, guess, kept, unmatched, tied)


def _members_guessed(geometry: str, rank: int, plans: Kept) -> tuple[str, Mapping[str, Member]]:
    """Returns the kept plan that a save of this geometry most likely uses, and its tensors; "" where there is none."""
    for (job, kept_for), each in reversed(plans.items()):
        if kept_for == rank and each.described == geometry:
            return job, each.plan.geometry.members
    return "", {}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of the reports of all ranks, made by rank 0.

    Args:
        job: the fingerprint of all ranks' descriptions.
        kept: whether every rank has a plan for them.
        kinds: the ranks of each kind, as `pack_kinds` encodes them; empty where every rank describes all of the job.
        value_ranks: the first rank of each kind of plain values; empty where all have the same.
        compared: whether ranks have grouped their replicas alike, so that all were compared.
        drifted: groups of replicas that differ.
        buffers: groups of buffers that differ, at which nobody has looked yet.
    """

    job: str
    kept: bool
    kinds: list[list[int]]
    value_ranks: list[int]
    compared: bool
    drifted: list[str]
    buffers: list[str]

    def to_json(self) -> dict[str, Any]:
        """Encodes it for all ranks."""
        return asdict(self)

    @staticmethod
    def from_json(wire: Mapping[str, Any]) -> Comparison:
        """Decodes it."""
        return Comparison(**wire)


def compare_reports(reports: Sequence[Any]) -> Comparison:
    """Compares the reports of all ranks, by rank.

    Raises:
        StateError: ranks have different choices of `check_replicas`, by which their plans would differ too; or a
            pattern of groups matches nothing on any rank; or they declare other parameters as tied.
    """
    parsed = [_Report(*report) for report in reports]
    _refuse_different_choices([each.check_replicas for each in parsed])
    refuse_unmatched([each.unmatched for each in parsed])
    refuse_other_ties([each.tied for each in parsed])
    geometries = [each.geometry for each in parsed]
    job = xxhash.xxh3_128_hexdigest("".join([parsed[0].check_replicas, *geometries]).encode())
    kinds = kinds_of(geometries)
    alike = len(kinds) == 1 and not parsed[0].partial
    value_kinds = kinds_of([each.values for each in parsed])
    # Summaries are of the same groups of keys where all have made them by the plan that holds.
    guesses = {each.guess for each in parsed}
    drifted, buffers = _apart([each.contents for each in parsed])
    return Comparison(
        job=job,
        kept=all(job in each.kept for each in parsed),
        kinds=[] if alike else pack_kinds(kinds),
        value_ranks=[ranks[0] for ranks in value_kinds] if len(value_kinds) > 1 else [],
        compared=guesses == {job} or (guesses == {""} and alike),
        drifted=drifted,
        buffers=buffers,
    )


_looked_at: set[str] = set()  # groups of buffers that differ, on rank 0


def _apart(summaries: Iterable[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Returns groups of replicas that differ: those that must not, and those of buffers, each of which once."""
    drifted = drifted_in(summaries)
    buffers = [each for each in drifted if are_buffers(each) and each not in _looked_at]
    _looked_at.update(buffers)
    return [each for each in drifted if not are_buffers(each)], buffers


def _refuse_different_choices(choices: Sequence[str]) -> None:
    other = next((rank for rank, choice in enumerate(choices) if choice != choices[0]), None)
    if other is not None:
        difference = f"{choices[0]!r} on rank 0, {choices[other]!r} on rank {other}"
        problem = Problem("check_replicas", difference, "the same on every rank", "pass the same on every rank")
        raise StateError("ranks ask for different comparisons", [problem])


@dataclass(frozen=True, slots=True)
class Planning:
    """One rank's side of the agreement on a plan.

    Args:
        geometry: the fingerprint of `description`.
    """

    ranks: Ranks
    call: Call
    description: Description
    geometry: str
    comparison: Comparison

    def plan_or_error(self, kept: Kept) -> Planned | BaseException:
        """Returns the plan; or the error of this rank alone, to be raised on all ranks in the next round. Collective.

        Args:
            kept: plans of earlier saves; the plan of this one is added.

        Raises:
            ShardoptError: what ranks describe does not fit together. All ranks raise.
        """
        try:
            return self._plan(kept)
        except ShardoptError:
            raise  # of a round, or derived from the results of one: all ranks raise it
        except BaseException as error:
            return error

    def report(self, planned: Planned | BaseException) -> list[Any]:
        """Reports, beside the files written, what rank 0 must know to judge: plain values, and hashes of replicas."""
        assert isinstance(planned, Planned)  # else nothing was written
        values = self.description.values_json() if self._values_are_late and self._sends_values else None
        # Before, ranks of one kind were compared; which ranks of other kinds have replicas too only the plan knows.
        members = planned.plan.geometry.members
        return [values, {} if self.comparison.compared else self.description.contents_summary(members)]

    def judge(self, reports: Sequence[Any], planned: Planned) -> tuple[Values, list[str], list[str]]:
        """Returns the plain values of the job, and groups of replicas that differ, and those of buffers, to be told of.

        On rank 0, of all ranks' reports.

        Raises:
            StateError: plain values differ.
        """
        drifted, buffers = _apart([contents for _, contents in reports])
        if planned.values is not None:
            return planned.values, drifted, buffers
        values = {rank: values for rank, (values, _) in enumerate(reports) if values is not None}
        return merge_values(values, planned.plan.geometry), drifted, buffers

    def refuse_drifted(self, drifted: Sequence[str], planned: Planned | BaseException) -> None:
        """Raises StateError, which names the replicas that differ. Collective.

        Args:
            drifted: groups of replicas, as `judge` returned them.
        """
        assert isinstance(planned, Planned)  # else there was nothing to judge
        self._refuse_drifted(drifted, planned.plan.geometry.members)

    def tell_buffers(self, buffers: Sequence[str], planned: Planned | BaseException) -> None:
        """Logs once which buffers differ. Collective.

        Args:
            buffers: their groups, as `judge` returned them.
        """
        assert isinstance(planned, Planned)
        self._tell_buffers(buffers, planned.plan.geometry.members)

    def _tell_buffers(self, buffers: Sequence[str], members: Mapping[str, Member]) -> None:
        groups = self.description.contents_in_groups(members)
        tell_buffers(self.ranks, self.call, groups, buffers)

    def _refuse_drifted(self, drifted: Sequence[str], members: Mapping[str, Member]) -> None:
        groups = self.description.contents_in_groups(members)
        refuse_drifted(self.ranks, self.call, groups, drifted)

    @property
    def _sends_values(self) -> bool:
        return self.ranks.rank in self.comparison.value_ranks

    @property
    def _values_are_late(self) -> bool:
        """Whether plain values that differ are merged at the commit: where no round exchanges descriptions before.

        Ranks of several kinds, such as stages, have values of their own in every save, which shall not cost a round.
        """
        return self.comparison.kept or not self.comparison.kinds

    def _plan(self, kept: Kept) -> Planned:
        comparison, rank = self.comparison, self.ranks.rank
        values: Values | None = None if comparison.value_ranks else self.description.values
        plan = kept[comparison.job, rank].plan if comparison.kept else None
        if plan is None and comparison.kinds:
            plan, values = self._exchange_geometry()
        else:
            geometry = geometry_of(self.description, self.ranks.size) if plan is None else plan.geometry
            if plan is None:
                check_covers(geometry.members)
        if comparison.drifted:
            self._refuse_drifted(comparison.drifted, _members_guessed(self.geometry, rank, kept)[1])
        if comparison.buffers:
            self._tell_buffers(comparison.buffers, _members_guessed(self.geometry, rank, kept)[1])
        if not comparison.kept:
            plan = plan or SavePlan(geometry, self.ranks.size, self._cut_plain)
            writes = RankWrites(plan, rank, self.description.views)
            kept[comparison.job, rank] = KeptPlan(plan, writes, self.geometry)
            while len(kept) > _MOST_KEPT:
                del kept[next(iter(kept))]
        plan, writes, _ = kept[comparison.job, rank]
        return Planned(plan, writes, values)

    @property
    def _cut_plain(self) -> bool:
        return self.description.check_replicas == "all"

    def _exchange_geometry(self) -> tuple[SavePlan, Values]:
        """Returns the plan of this rank's component, on rank 0 that of the job; and the values of the job there."""
        kinds = unpack_kinds(self.comparison.kinds)
        kind_of = kind_by_rank(kinds)
        is_first = kinds[kind_of[self.ranks.rank]][0] == self.ranks.rank
        on_rank_0: list[tuple[SavePlan, Values]] = []

        def describe() -> list[Any]:
            description = self.description
            return [
                description.geometry_json() if is_first else None,
                description.values_json() if self._sends_values else None,
            ]

        def merge(sent: Mapping[int, Any]) -> tuple[list[int], list[Any]]:
            merged = merge_geometry(kinds, [sent[ranks[0]][0] for ranks in kinds])
            check_covers(merged.geometry.members)
            values = self.description.values
            if self.comparison.value_ranks:
                values = merge_values({rank: sent[rank][1] for rank in self.comparison.value_ranks}, merged.geometry)
            plan = SavePlan(merged.geometry, self.ranks.size, self._cut_plain)
            on_rank_0.append((plan, values))
            return sections_of(merged, len(kinds), plan.assigned)

        _, section = exchange(
            self.ranks,
            self.call,
            describe if is_first or self._sends_values else None,
            merge,
            lambda sections, rank: sections[kind_of[rank]],
        )
        if on_rank_0:
            return on_rank_0[0]
        geometry, known = read_section(decompress(section))
        return SavePlan(geometry, self.ranks.size, self._cut_plain, known), {}
