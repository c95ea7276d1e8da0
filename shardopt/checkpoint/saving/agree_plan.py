"""Agrees on the plan of a save: compares descriptions, merges differing ones on rank 0, and caches plans.

round   reports of a few hashes          `Planning.report_state` → `compare_reports` on rank 0
round   only where they differ, and no   the first rank of each kind sends its description; rank 0 merges kinds,
        plan of an earlier save fits     and each rank gets, and plans, its own component (`planning/merge.py`)
round   with the files written           what only the plan could tell: hashes of replicas on ranks of several
                                         kinds; and the plain values that differ, where no round before had them
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from shardopt.checkpoint.format.assign import Member, check_covers
from shardopt.checkpoint.format.values import Values
from shardopt.checkpoint.saving.planning.describe import Description, geometry_of
from shardopt.checkpoint.saving.planning.drift import Groups, refuse_drifted, tell_buffers
from shardopt.checkpoint.saving.planning.merge import merge_geometry, merge_values, read_section, sections_of
from shardopt.checkpoint.saving.planning.replica_check import (
    CheckReplicas,
    are_buffers,
    drifted_in,
    groups_of,
    summary_of,
)
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan
from shardopt.checkpoint.saving.planning.tied import refuse_other_ties
from shardopt.errors import Problem, ShardoptError, StateError
from shardopt.ranks import Call, Ranks
from shardopt.ranks.kinds import decompress, exchange, kind_by_rank, kinds_of, pack_kinds, unpack_kinds
from shardopt.state.param_groups import refuse_unmatched

_MOST_KEPT = 2
_LATER = "later"  # in the place of the name of a plan, by which hashes are grouped: they come with what is written


class KeptPlan(NamedTuple):
    """The plan of a save, this rank's writes in it, and the geometry fingerprint of this rank's description.

    The plan is of the whole job on rank 0, and of this rank's component on others.
    """

    plan: SavePlan
    writes: RankWrites
    described: str


PlanCache = dict[tuple[str, int], KeptPlan]
"""Plans of the last saves, by the fingerprint of all ranks' descriptions and the rank of this process."""


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


class Comparison(NamedTuple):
    """The comparison of all ranks' reports, made by rank 0 and sent to all as JSON.

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
    kinds: Sequence[Sequence[int]] = ()
    value_ranks: Sequence[int] = ()
    compared: bool = True
    drifted: Sequence[str] = ()
    buffers: Sequence[str] = ()


def compare_reports(reports: Sequence[Any]) -> Comparison:
    """Compares the reports of all ranks, by rank.

    Raises:
        StateError: ranks have different choices of `check_replicas`, by which their plans would differ too; or a
            pattern of groups matches nothing on any rank; or they declare other parameters as tied.
    """
    of = dict[int, _Report]()  # by identity: the reports of many ranks are mostly one object
    parsed = [of.get(id(each)) or of.setdefault(id(each), _Report(*each)) for each in reports]
    first = parsed[0]
    geometries = [each.geometry for each in parsed]
    job = xxhash.xxh3_128_hexdigest("".join([first.check_replicas, *geometries]).encode())
    kept = all(job in each.kept for each in of.values())
    if first.partial or first.unmatched or any(each != first for each in of.values()):
        return _compare_unlike(parsed, job, kept)
    return Comparison(job, kept, compared=first.guess in ("", job))


def _compare_unlike(reports: Sequence[_Report], job: str, kept: bool) -> Comparison:
    choices = [each.check_replicas for each in reports]
    other = next((rank for rank, choice in enumerate(choices) if choice != choices[0]), None)
    if other is not None:
        difference = f"{choices[0]!r} on rank 0, {choices[other]!r} on rank {other}"
        problem = Problem("check_replicas", difference, "the same on every rank", "pass the same on every rank")
        raise StateError("ranks ask for different comparisons", [problem], code="ranks-differ")
    refuse_unmatched([each.unmatched for each in reports])
    refuse_other_ties([each.tied for each in reports])
    kinds, value_kinds = kinds_of([each.geometry for each in reports]), kinds_of([each.values for each in reports])
    alike = len(kinds) == 1 and not reports[0].partial
    # Summaries are of the same groups of keys where all have made them by the plan that holds.
    guesses = {each.guess for each in reports}
    drifted, buffers = _apart([each.contents for each in reports])
    return Comparison(
        job=job,
        kept=kept,
        kinds=[] if alike else pack_kinds(kinds),
        value_ranks=[ranks[0] for ranks in value_kinds] if len(value_kinds) > 1 else [],
        compared=guesses == {job} or (guesses == {""} and alike),
        drifted=drifted,
        buffers=buffers,
    )


_looked_at: set[str] = set()  # groups of buffers that differ, on rank 0


def _apart(summaries: Iterable[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Returns the groups of replicas that differ: those that must not and, once each, those of buffers."""
    drifted = drifted_in(summaries)
    buffers = [each for each in drifted if are_buffers(each) and each not in _looked_at]
    _looked_at.update(buffers)
    return [each for each in drifted if not are_buffers(each)], buffers


class Planning:
    """One rank's side of the agreement on the plan of a save; call the methods in this order.

    Args:
        plans: of earlier saves; the plan of this one is added. Saves of other threads may change it meanwhile.

    Attributes:
        description: this rank's state; replaced where what is written is a copy of it.
        planned: the plan of this save, once there is one.
    """

    description: Description
    comparison: Comparison
    planned: KeptPlan

    def __init__(self, ranks: Ranks, call: Call, plans: PlanCache) -> None:
        self._ranks, self._call, self._cache = ranks, call, plans
        self._plans = dict(plans)  # which stay until this save ends, as they were reported
        self._geometry = ""  # the fingerprint of what this rank describes
        self._values: Values | None = None  # of the job, on rank 0, once they are known

    def report_state(self, description: Description) -> _Report:
        """Reports this rank's state to rank 0, as JSON."""
        rank, plans = self._ranks.rank, self._plans
        self.description, self._geometry = description, description.geometry_fingerprint()
        guess, contents = "", dict[str, str]()
        for (job, of_rank), kept in plans.items():
            if of_rank == rank and kept.described == self._geometry:
                guess = job  # the last of them
        if description.contents:
            # Of ranks that also have keys of their own only the shared ones can be compared, which only a plan knows.
            contents = self._summary(plans[guess, rank].plan.geometry.members if guess else {})
        return _Report(
            geometry=self._geometry,
            values=description.values_fingerprint() if self._ranks.size > 1 else "",
            partial=True in {layout.local for _, _, layout in description.tensors.values()},
            check_replicas=description.check_replicas,
            contents=contents,
            guess=_LATER if description.contents_come_later else guess,
            kept=[job for job, of_rank in plans if of_rank == rank],
            unmatched=list(description.unmatched),
            tied=dict(description.declared),
        )

    def plan(self, comparison: Comparison) -> BaseException | None:
        """Makes the plan; returns an error of only this rank, to be raised on all in the next round. Collective.

        Raises:
            ShardoptError: what ranks describe does not fit together. All ranks raise.
        """
        self.comparison = comparison
        self._values = None if comparison.value_ranks else self.description.values
        try:
            if not comparison.kept or comparison.drifted or comparison.buffers:
                self._make_plan()
        except ShardoptError:
            raise  # of a round, or derived from the results of one: all ranks raise it
        except BaseException as error:
            return error
        self.planned = self._plans[comparison.job, self._ranks.rank]
        return None

    def _make_plan(self) -> None:
        """Adds the plan of this save, after the check for drift."""
        comparison, rank, plans = self.comparison, self._ranks.rank, self._plans
        plan = plans[comparison.job, rank].plan if comparison.kept else None
        if plan is None and comparison.kinds:
            plan, self._values = self._exchange_geometry()
        elif plan is None:
            geometry = geometry_of(self.description, self._ranks.size)
            check_covers(geometry.members)
        guessed = [kept for (_, of_rank), kept in plans.items() if of_rank == rank and kept.described == self._geometry]
        members = guessed[-1].plan.geometry.members if guessed else {}
        if comparison.drifted:
            self.look_into(refuse_drifted, comparison.drifted, members)
        if comparison.buffers:
            self.look_into(tell_buffers, comparison.buffers, members)
        if not comparison.kept:
            plan = plan or SavePlan(geometry, self._ranks.size, self.description.check_replicas == "all")
            writes = RankWrites(plan, rank, self.description.views)
            plans[comparison.job, rank] = self._cache[comparison.job, rank] = KeptPlan(plan, writes, self._geometry)
            for oldest in list(self._cache)[:-_MOST_KEPT]:
                self._cache.pop(oldest, None)

    def report(self) -> tuple[Any, dict[str, str], Sequence[str]] | None:
        """Reports what rank 0 must judge beside the written files; None for nothing.

        That is plain values, hashes of replicas and, by the first rank of each kind, the frozen parameters.
        """
        comparison, rank, contents = self.comparison, self._ranks.rank, dict[str, str]()
        values: dict[str, Any] | None = None
        # Ranks of several kinds, such as stages, have values of their own in every save, which shall not cost a round.
        if rank in comparison.value_ranks and (comparison.kept or not comparison.kinds):
            values = self.description.values_json()
        # Before, ranks of one kind were compared; which ranks of other kinds have replicas too only the plan knows.
        if not comparison.compared:
            contents = self._summary(self.planned.plan.geometry.members)
        frozen = self.description.frozen
        if frozen and rank and rank not in [kind[0] for kind in unpack_kinds(comparison.kinds)]:
            frozen = ()
        return (values, contents, frozen) if values is not None or contents or frozen else None

    def per_rank(self) -> bytes | None:
        """Returns the values that this rank has for itself, encoded; None if no rank has any."""
        return json.dumps(self.description.own_values).encode() if self.planned.plan.geometry.per_rank else None

    def judge(self, reports: Sequence[Any]) -> tuple[Values, tuple[str, ...], list[str], list[str]]:
        """Returns plain values and frozen parameters of the job, and groups of replicas, and of buffers, that differ.

        On rank 0, of all ranks' reports.

        Raises:
            StateError: plain values differ.
        """
        said = {rank: report for rank, report in enumerate(reports) if report is not None}
        drifted, buffers = _apart([contents for _, contents, _ in said.values()]) if said else ([], [])
        frozen = tuple(dict.fromkeys(key for _, _, keys in said.values() for key in keys))
        values = self._values
        if values is None:
            differing = {rank: values for rank, (values, _, _) in said.items() if values is not None}
            values = merge_values(differing, self.planned.plan.geometry)
        return values, frozen, drifted, buffers

    def look_into(
        self,
        look: Callable[[Ranks, Call, Groups, Sequence[str]], None],
        groups: Sequence[str],
        members: Mapping[str, Member] | None = None,
    ) -> None:
        """Refuses or tells of (`look`) the differing replicas of these groups. Collective.

        Args:
            members: by which all ranks have made their groups; None for those of the plan.
        """
        state, members = self.description, self.planned.plan.geometry.members if members is None else members
        look(self._ranks, self._call, groups_of(state.contents, state.views, members, state.buffers), groups)

    def _summary(self, members: Mapping[str, Member]) -> dict[str, str]:
        state = self.description
        return summary_of(state.contents, state.views, members, state.buffers)

    def _exchange_geometry(self) -> tuple[SavePlan, Values]:
        """Returns the plan of this rank's component (on rank 0, of the job); on rank 0 also the job's plain values."""
        kinds, value_ranks = unpack_kinds(self.comparison.kinds), self.comparison.value_ranks
        kind_of = kind_by_rank(kinds)
        rank = self._ranks.rank
        is_first, sends_values = kinds[kind_of[rank]][0] == rank, rank in value_ranks
        cut_plain = self.description.check_replicas == "all"
        on_rank_0: list[tuple[SavePlan, Values]] = []

        def describe() -> list[Any]:
            description = self.description
            return [
                description.geometry_json() if is_first else None,
                description.values_json() if sends_values else None,
            ]

        def merge(sent: Mapping[int, Any]) -> tuple[list[int], list[Any]]:
            merged = merge_geometry(kinds, [sent[ranks[0]][0] for ranks in kinds])
            check_covers(merged.geometry.members)
            values = self.description.values
            if value_ranks:
                values = merge_values({rank: sent[rank][1] for rank in value_ranks}, merged.geometry)
            plan = SavePlan(merged.geometry, self._ranks.size, cut_plain)
            on_rank_0.append((plan, values))
            return sections_of(merged, len(kinds), plan.assigned)

        _, section = exchange(
            self._ranks,
            self._call,
            describe if is_first or sends_values else None,
            merge,
            lambda sections, rank: sections[kind_of[rank]],
        )
        if on_rank_0:
            return on_rank_0[0]
        geometry, known = read_section(decompress(section))
        return SavePlan(geometry, self._ranks.size, cut_plain, known), {}
