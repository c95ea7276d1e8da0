"""The islands of a job: which ranks of different islands have the same shards, and what all islands agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from shardopt.errors import MismatchError, OptionError, Problem
from shardopt.optim.semi_sync.islands.buckets import BUCKET_BYTES, Buckets
from shardopt.ranks import Group, Ranks, SharedGroup
from shardopt.sharding.gradients import is_frozen
from shardopt.sharding.view import local_tensors, view_of

_MOST_TOLD = 20


class Islands:
    """Groups of ranks that each train a whole model, and meet at intervals.

    The ranks of a job are a grid: an island is a row of it, and the ranks that have the same shards are a column.

    Args:
        across: the ranks of this rank's column; None where there is one island.
        island: the ranks of this rank's row.

    Raises:
        OptionError: this rank is not in one of them.
    """

    def __init__(self, across: Group | None, island: SharedGroup) -> None:
        self._across = None if across is None else SharedGroup(across)
        self._island = island
        self.number = self.column.rank
        self.count = self.column.size

    @property
    def column(self) -> Ranks:
        """The ranks with the same shards, one from each island."""
        return Ranks(None) if self._across is None else self._across.ranks

    @property
    def row(self) -> Ranks:
        """The ranks of this island."""
        return self._island.ranks

    def refuse(self, what: str, problems: Iterable[Problem]) -> None:
        """Raises, on all ranks of all islands, the problems that any of them found. Collective over all.

        Raises:
            MismatchError: there is any problem.
        """
        found = self._merge(what, [asdict(problem) for problem in problems])
        if found:
            raise MismatchError(f"{what}: islands differ", [Problem(**each) for each in found], code="semi-sync")

    def refuse_other_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Compares tensors bit by bit with the first island's, in batches of bounded size. Collective over all.

        Raises:
            MismatchError: any differs.
        """
        problems = []
        for batch in _batches(tensors):
            buckets = Buckets([local for _, local in batch])
            for view, (_, local) in zip(buckets.views, batch, strict=True):
                view.copy_(local)
            unlike = buckets.unlike_first(self.column)
            for name in dict.fromkeys(name for (name, _), differs in zip(batch, unlike, strict=True) if differs):
                found = f"other values on island {self.number} than on island 0"
                remedy = "seed all islands alike, or load one checkpoint on all, before the first step"
                problems.append(Problem(name, found, "the same weights on all islands", remedy))
        self.refuse("the first step of islands", problems)

    def buckets_of(self, tensors: Sequence[Tensor]) -> Buckets:
        """Makes buffers for the local tensors of some parameters, in order.

        Ranks of an island that have replicas of a tensor have it at the same place of equal buffers: in which order a
        backend adds three ranks or more depends on the place, and replicas would drift apart by last bits.
        """
        pairs = [(local, self._replicas_of(tensor)) for tensor in tensors for local in local_tensors(tensor)]
        return Buckets([local for local, _ in pairs], [replicas for _, replicas in pairs])

    def agree_on(self, params: Mapping[str, Tensor], options: Mapping[str, str]) -> dict[str, int]:
        """Finds parameters and options that differ between islands. Collective over all.

        Args:
            params: this rank's, by name.
            options: what else has to be alike, as text.

        Returns:
            The number of elements of each parameter of an island, those of its other ranks too.

        Raises:
            OptionError: an island has several ranks of a column.
            MismatchError: something differs.
        """
        what = "SemiSync"
        self._refuse_overlap()
        described = {name: self._described(name, tensor) for name, tensor in params.items()}
        _, (problems, islands) = self.column.agree(
            what,
            work=lambda: [described, dict(options), self.row.members[0]],
            report=_same,
            decide=lambda reports: [_compared([each[:2] for each in reports]), [each[2] for each in reports]],
        )
        numels = {name: math.prod(view_of(tensor, name).shape) for name, tensor in params.items()}
        _, merged = self.row.agree(
            what,
            work=lambda: None,
            report=lambda _: [problems, numels, islands],
            decide=lambda reports: [
                _distinct([*(each[0] for each in reports), _other_columns([each[2] for each in reports])]),
                _union(each[1] for each in reports),
            ],
        )
        self.refuse(what, [Problem(**each) for each in merged[0]])
        return dict(merged[1])

    def _described(self, name: str, tensor: Tensor) -> str:
        view, replicas = view_of(tensor, name), self._replicas_of(tensor)
        shapes = [tuple(local.shape) for local in local_tensors(tensor)]
        ranks = "" if replicas is None else f", as on ranks {replicas} of the island"
        return f"{view.dtype} {view.shape}, here {shapes}{ranks}{', frozen' if is_frozen(tensor) else ''}"

    def _replicas_of(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Returns the ranks of this island that hold this rank's part of a tensor; None if unknown."""
        view = view_of(tensor)
        if view.layout.holders is None:
            return None
        holders = dict(zip(view.layout.boxes, view.layout.holders, strict=True))
        ranks = {rank for piece in view.pieces for rank in holders.get(piece.box, ())}
        return tuple(place for place, rank in enumerate(self.row.members) if rank in ranks)

    def _merge(self, what: str, problems: list[Any]) -> list[Any]:
        _, of_column = self.column.agree(what, work=lambda: problems, report=_same, decide=_distinct)
        _, of_all = self.row.agree(what, work=lambda: of_column, report=_same, decide=_distinct)
        return list(of_all)

    def _refuse_overlap(self) -> None:
        both = set(self.column.members) & set(self.row.members)
        if len(both) == 1:
            return
        found = f"an inner optimizer of ranks {[*self.row.members]}, and a group of ranks {[*self.column.members]}"
        required = "one rank in both: an island's own ranks train it, and the group has one rank of each island"
        remedy = (
            "make the inner optimizer with keyed(..., process_group=mesh['island']), and SemiSync with "
            "process_group=mesh['across']"
        )
        raise OptionError("islands overlap", [Problem("process_group", found, required, remedy)], code="semi-sync")


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields named local tensors, sorted by name, in batches of about `BUCKET_BYTES`."""
    batch: list[tuple[str, Tensor]] = []
    full = 0
    for name in sorted(tensors):
        for local in local_tensors(tensors[name]):
            size = local.numel() * local.element_size()
            if batch and full + size > BUCKET_BYTES:
                yield batch
                batch, full = [], 0
            batch.append((name, local))
            full += size
    if batch:
        yield batch


def _other_columns(columns: list[list[int]]) -> list[Any]:
    """Returns a problem if the ranks of an island do not all meet the same islands in the same order.

    Args:
        columns: for each rank of an island the first ranks of those islands that it meets, its own too.
    """
    other = next((each for each in columns if each != columns[0]), None)
    if other is None:
        return []
    found = f"islands that begin with ranks {columns[0]} meet by one rank of an island, and {other} by another"
    required = "a grid: each rank of an island meets one of every other island, and islands ascend by their ranks"
    remedy = "take both from one mesh of ascending ranks: init_device_mesh(..., mesh_dim_names=('across', 'island'))"
    return [asdict(Problem("process_group", found, required, remedy))]


def _same(report: Any) -> Any:
    return report


def _distinct(reports: Iterable[list[Any]]) -> list[Any]:
    found: dict[str, Any] = {}
    for problems in reports:
        for problem in problems:
            found.setdefault(problem["key"], problem)
    return list(found.values())[:_MOST_TOLD]


def _union(reports: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {name: numel for each in reports for name, numel in each.items()}


def _compared(reports: list[Any]) -> list[Any]:
    """Returns the problems of islands that differ from the first."""
    problems = []
    for number, report in enumerate(reports[1:], start=1):
        for here, there in zip(reports[0], report, strict=True):
            for key in dict.fromkeys((*here, *there)):
                if here.get(key) != there.get(key):
                    found = f"{there.get(key, 'nothing')} on island {number}"
                    required = f"{here.get(key, 'nothing')}, as on island 0"
                    remedy = "build and shard the same model, with the same options, on every island"
                    problems.append(asdict(Problem(key, found, required, remedy)))
    return _distinct([problems])
