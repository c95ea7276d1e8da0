"""Embedding modules whose tables are sharded over many ranks, by rows, by columns, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Self, cast, overload
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardopt.algorithms.registry import AlgorithmSpec, algorithms, spec_of
from shardopt.algorithms.row_wise.row_gradients import mark_alike
from shardopt.errors import AlgorithmError, InputError, Problem, StateError
from shardopt.nn.bags import Bags, Given, bags_of
from shardopt.nn.cuts import CutTable, Pieces, cut_tables
from shardopt.nn.directory import Directory
from shardopt.nn.route import find_route
from shardopt.nn.rows import Collector, RowGradients, added_up, fetch
from shardopt.nn.table import Table, refuse_bad_tables
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from shardopt.optim.fused_rows import FusedRows
from shardopt.optim.keyed import keyed
from shardopt.ranks import Ranks, ranks_of
from shardopt.runtime.torch_gradients import gradient_hooks
from shardopt.sharding.view import assemble, device_of, local_tensors


class _ShardedTables(nn.Module, FusedOptimizerModule):
    """The base of both modules: holds the tables, looks up ids in all at once, and updates or stores gradients."""

    def __init__(
        self,
        tables: Sequence[Table] | Table,
        mesh: DeviceMesh,
        *,
        device: torch.device | str | None = None,
        mean_gradients: bool = False,
    ) -> None:
        super().__init__()
        tables = (tables,) if isinstance(tables, Table) else tuple(tables)
        self.tables = tables
        self.mesh = mesh
        self.mean_gradients = mean_gradients
        refuse_bad_tables(tables, mesh, dir(self))
        self._by_name = {table.name: table for table in tables}
        self._collector = Collector(self._take_gradients)
        self._fused: FusedRows | None = None
        self._are_compared = False
        # A module that is made within torch.device("meta") gets its memory later, as torch's do.
        default = "meta" if torch.get_default_device().type == "meta" else mesh.device_type
        where = torch.device(device or default)
        self._place = torch.empty(0, device=where)
        position = mesh.mesh.flatten().tolist().index(dist.get_rank())
        cut = cut_tables(tables, mesh)
        for pieces, on, placements in cut:
            self.add_module(pieces.table.name, CutTable(pieces, position, on, placements, where))
        self._directory = Directory([pieces for pieces, *_ in cut], position)

    def reset_parameters(self) -> None:
        """Draws the rows of all tables again, in place, for example after a module was made on the meta device.

        Call it on every rank, with equal default generators of torch, after `to_empty` of a module made on "meta". On
        "meta" itself it does nothing.
        """
        for table in self.tables:
            cast(CutTable, self.get_submodule(table.name)).draw()

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that `fuse` made; before it, one without parameters. Names are relative to this module."""
        return EmptyFusedOptimizer() if self._fused is None else self._fused

    def fuse(
        self,
        algorithm: type[Optimizer] | str,
        *,
        groups: Collection[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> KeyedOptimizer:
        """Makes backward update the tables from now on. Call once, on every rank, with equal arguments.

        Each `backward` is one step of the optimizer, with the sum of the gradients of all lookups in it. When it
        returns, the rows are updated, and no parameter has a gradient. No other optimizer may be given the tables'
        parameters.

        Args:
            algorithm, groups, options: as for `shardopt.keyed`; an algorithm that takes sparse gradients.

        Returns:
            `fused_optimizer`: to be saved, loaded, scheduled, wrapped and combined with those of other modules.

        Raises:
            StateError: the tables have an optimizer already.
            AlgorithmError: the algorithm is not known, or takes no sparse gradients.
        """
        if self._fused is not None:
            problem = Problem("fuse", "a second call", "one optimizer for the tables", "make a new module")
            raise StateError("the tables have a fused optimizer already", [problem], code="embedding-tables")
        for each in (algorithm, *(group["algorithm"] for group in groups or () if "algorithm" in group)):
            _refuse_dense_only(spec_of(each))
        self._fused = FusedRows(keyed(algorithm, self.named_parameters(), groups=groups, **options))
        return self._fused

    def _weights(self) -> list[Tensor]:
        return [cast(CutTable, self.get_submodule(table.name)).weight for table in self.tables]

    def _device(self) -> torch.device:
        """Returns the device of this rank's pieces; without one, that of the module.

        Of a parameter of which a rank has no piece it says nothing: torch moves that to the CPU.
        """
        cuts = (cast(CutTable, self.get_submodule(table.name)) for table in self.tables)
        return next((device_of(cut.weight) for cut in cuts if cut.piece is not None), self._place.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._place = fn(self._place)
        return cast(Self, super()._apply(fn, recurse))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _look_up(
        self, ids: Tensor | Mapping[str, Given], others: Sequence[Tensor | None], pools: bool, ends: bool
    ) -> Tensor | dict[str, Tensor]:
        """Looks up vectors for the ids of each table. Collective, even if a rank's ids are faulty."""
        ranks = ranks_of(self.mesh)
        weights = self._weights()
        if not self._are_compared:
            self._compare_tables(ranks, weights)
        device = self._device()
        dtypes = {name: weight.dtype for name, weight in zip(self._by_name, weights, strict=True)}
        refused: Exception | None = None
        bags: list[Bags] = []
        try:
            given = _by_table(self.tables, ids, others)
            bags = bags_of(self._by_name, given, pools, ends, dtypes, device)
            faults = [each.faulty() for each in bags]
        except Exception as error:  # whatever it is, the other ranks must raise as well
            refused, faults = error, []
        faulty = torch.full((), refused is not None, dtype=torch.bool, device=device)
        for fault in faults:
            faulty = faulty | fault
        numbers = {name: number for number, name in enumerate(self._by_name)}
        wanted = dict(sorted((numbers[each.table.name], each) for each in bags))
        route = find_route(ranks, self._directory, wanted, faulty)
        if route is None:
            described = self._directory.described
            what = "a lookup in sharded tables"
            ranks.agree(what, lambda: _refuse(refused, bags), lambda _: described, _refuse_different_tables)
            raise AssertionError("a faulty lookup was not refused")
        vectors = fetch(route, self._collector, weights)
        pooled = {}
        for each in bags:
            number = numbers[each.table.name]
            pooled[each.table.name] = each.pooled(route.positions[number], vectors[number])
        return pooled if isinstance(ids, Mapping) else pooled[self.tables[0].name]

    def _compare_tables(self, ranks: Ranks, weights: Sequence[Tensor]) -> None:
        """Raises on every rank if ranks have different tables: with other numbers or dtypes no exchange would end well.

        Raises also if replicas differ, as where ranks drew them with different seeds: each rank would train its own.
        Collective, and of two messages a rank, so it is done once. Later lookups compare a digest, in what they send.
        """
        tables = [f"{each}, of {of.dtype}" for each, of in zip(self._directory.described, weights, strict=True)]
        described = [*tables, f"mean_gradients={self.mean_gradients}"]
        what = "a first lookup in sharded tables"
        pieces = self._directory.tables
        replicated = [number for number, each in enumerate(pieces) if any(piece and piece.replica for piece in each.on)]

        def refuse(of_ranks: Sequence[tuple[Sequence[str], Sequence[int]]]) -> None:
            _refuse_different_tables([own for own, _ in of_ranks])
            prints = zip(*(own for _, own in of_ranks), strict=True)
            _refuse_different_replicas([pieces[number] for number in replicated], prints)

        ranks.agree(what, lambda: [_print_of(weights[i]) for i in replicated], lambda own: (described, own), refuse)
        self._are_compared = True

    def _take_gradients(self, row_gradients: RowGradients) -> None:
        weights = self._weights()
        if self.mean_gradients:
            for _, values in row_gradients.values():
                values /= self.mesh.size()
        # torch's own sum is not coalesced on a GPU, and to coalesce it the host would wait once for each table.
        seen = row_gradients if self._fused is None else ()  # a fused step is of this backward alone
        earlier = {number: _rows_on_accelerator(weights[number].grad) for number in seen}
        added = added_up({number: [own, row_gradients[number]] for number, own in earlier.items() if own is not None})
        gradients = {}
        for number, (rows, values) in {**row_gradients, **added}.items():
            weight = weights[number]
            size = local_tensors(weight)[0].shape
            gradients[weight] = torch.sparse_coo_tensor(
                rows.unsqueeze(0), values, size, check_invariants=False, is_coalesced=True
            )
        if self._fused is not None:
            # A lookup sends the same ids to all ranks with columns of a row. Without `fuse` gradients may be of several
            # backwards, and of hooks.
            for gradient in gradients.values():
                mark_alike(gradient)
            self._fused.update({weight: assemble(weight, [gradient]) for weight, gradient in gradients.items()})
            return
        for (weight, gradient), number in zip(gradients.items(), {**row_gradients, **added}, strict=True):
            if weight.grad is not None and number not in added:
                gradient = local_tensors(weight.grad)[0] + gradient
            weight.grad = assemble(weight, [gradient])
            for hook in gradient_hooks(weight):
                hook(weight)


class ShardedEmbeddingBag(_ShardedTables):
    """nn.EmbeddingBag over one or several tables that are sharded over the ranks of a mesh, each as its `cut` says.

    Every rank looks up a batch of its own. Ids travel to the ranks that hold their rows, and sums of bags travel back;
    or the rows themselves, each once, where they are fewer. That takes three exchanges for all tables together.
    Backward takes one, which brings gradients to the rows, of all replicas. Gradients of all ranks add up, as if one
    process had the batches of all, with the sum of their losses.

    The parameter of a table is `<table>.weight`, a DTensor [N, D]: on [Shard(0)] where rows are cut, on [Shard(1)]
    where columns are, on a mesh of its own as a grid or whole; elsewhere it has no elements. Its gradient is a DTensor
    over a sparse local tensor, coalesced, on ranks that have a piece. It is set at the end of backward; then the
    parameter's post-accumulate-grad hooks run, and with them `in_backward`. No other hooks do, and torch.autograd.grad
    and backward(inputs=...) do not see it. Where `fully_shard` is to shard the rest of a model, pass these parameters
    to its `ignored_params`.

    Replicas are drawn by each rank: with equal default generators of torch on all ranks (`torch.manual_seed`) they are
    equal, as the first lookup requires, unless a load has made them so before.

    Forward, and backward where anybody calls it, are collective over the mesh: a rank without ids passes empty ones.
    A table whose vectors a loss does not use gets gradients of zeros where another table of that lookup gets others.
    Where the mesh is a slice of a larger one, nothing keeps the tables on its other slices equal to these.

    Args:
        tables: one or several, with names of their own; equal on all ranks.
        mesh: of one dimension, over which tables are cut; or of two, over the first of which they are replicated. Its
            ranks are ascending; from `init_device_mesh`.
        include_last_offset: whether offsets have the end of the last bag as well.
        device: of the rows; None is the mesh's. Within `torch.device("meta")`, or with "meta", there are no rows until
            `to_empty` has made memory, and `reset_parameters` drawn them.
        mean_gradients: whether gradients are divided by the number of ranks, as DDP and `fully_shard` divide theirs.

    Raises:
        StateError: a table is not as it has to be.
        LayoutError: the mesh has more than two dimensions, or this rank is not in it.
    """

    include_last_offset: bool = False

    def __init__(
        self,
        tables: Sequence[Table] | Table,
        mesh: DeviceMesh,
        *,
        include_last_offset: bool = False,
        device: torch.device | str | None = None,
        mean_gradients: bool = False,
    ) -> None:
        super().__init__(tables, mesh, device=device, mean_gradients=mean_gradients)
        self.include_last_offset = include_last_offset

    @overload
    def forward(self, ids: Mapping[str, Given]) -> dict[str, Tensor]: ...
    @overload
    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor: ...
    def forward(
        self,
        ids: Tensor | Mapping[str, Given],
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Looks up vectors and pools them. Collective over the mesh.

        Args:
            ids: for each table by name (ids, offsets) or (ids, offsets, per_sample_weights), as nn.EmbeddingBag takes
                them: [L] and [B] int64 or int32, and [L] of the table's dtype, which may require gradients. Or ids [B,
                L] alone, or with None for offsets. For a table with mode "none", ids of any shape. Tables may be left
                out. Where there is one table only, its ids alone, with what else there is in the other arguments.

        Returns:
            For each table that was given ids [B, D], without pooling [*ids.shape, D]; a bag without ids is zeros.

        Raises:
            InputError: an id has no row, or something does not fit: on every rank, with what was wrong on which.
            StateError: ranks have different tables, or replicas differ at the first lookup.
            RankError: a rank is not at its first lookup, or died while others refused one.
        """
        return self._look_up(ids, (offsets, per_sample_weights), pools=True, ends=self.include_last_offset)


class ShardedEmbedding(_ShardedTables):
    """nn.Embedding over one or several tables that are sharded over the ranks of a mesh.

    `ShardedEmbeddingBag` without bags: what it says about ranks, parameters and gradients holds here, too.

    Args:
        tables, mesh, device, mean_gradients: as for ShardedEmbeddingBag; `mode` of tables is not looked at.
    """

    @overload
    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    @overload
    def forward(self, ids: Tensor) -> Tensor: ...
    def forward(self, ids: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Looks up vectors. Collective over the mesh.

        Args:
            ids: for each table by name, int64 or int32 of any shape; for a single table, a tensor alone.

        Returns:
            For each table that was given ids [*ids.shape, D].

        Raises:
            InputError: an id has no row, or something does not fit: on every rank, with what was wrong on which.
            StateError: ranks have different tables, or replicas differ at the first lookup.
            RankError: a rank is not at its first lookup, or died while others refused one.
        """
        return self._look_up(ids, (), pools=False, ends=False)


def _rows_on_accelerator(gradient: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Returns the rows and values of a coalesced gradient of a table on an accelerator; None of any other."""
    local = None if gradient is None else local_tensors(gradient)[0]
    if local is None or local.is_cpu or not (local.is_sparse and local.is_coalesced() and local.sparse_dim() == 1):
        return None
    return local.indices()[0], local.values()


def _by_table(
    tables: Sequence[Table], ids: Tensor | Mapping[str, Given], others: Sequence[Tensor | None]
) -> Mapping[str, Given]:
    """Returns the given ids by table; a single table need not be named.

    Raises:
        InputError: it is not plain which ids are for which table.
    """
    if isinstance(ids, Mapping):
        if any(other is not None for other in others):
            problem = Problem("offsets", "beside a mapping", "in it: {table: (ids, offsets)}", "put them there")
            raise InputError("a lookup cannot be done", [problem])
        return ids
    if len(tables) > 1:
        names = ", ".join(table.name for table in tables)
        problem = Problem("ids", "ids for no table by name", f"a mapping: there are {names}", "name the table")
        raise InputError("a lookup cannot be done", [problem])
    return {tables[0].name: (ids, *others) if others else ids}


def _refuse_dense_only(spec: AlgorithmSpec) -> None:
    if not spec.takes_sparse:
        sparse = ", ".join(each.name for each in algorithms() if each.takes_sparse)
        dense_only = f"{spec.name}, which takes no sparse gradients"
        problem = Problem("algorithm", dense_only, f"one that does: {sparse}", "choose one of them")
        raise AlgorithmError(f"{spec.name} cannot update single rows of tables", [problem], code="embedding-tables")


def _refuse(refused: Exception | None, bags: Sequence[Bags]) -> None:
    """Raises this rank's problems, if any."""
    if refused is not None:
        raise refused
    problems = [problem for each in bags for problem in each.faults()]
    if problems:
        raise InputError("ids cannot be looked up", problems)


def _refuse_different_tables(of_ranks: Sequence[Sequence[str]]) -> None:
    """Raises if ranks have described different tables."""
    first, *others = of_ranks
    problems = [
        Problem(f"tables on rank {rank}", found, f"as on rank 0: {wanted}", "pass the same tables on every rank")
        for rank, own in enumerate(others, start=1)
        for found, wanted in zip_longest(own, first, fillvalue="no more tables")
        if found != wanted
    ]
    if problems:
        raise StateError("ranks have different tables", problems, code="embedding-tables")


def _print_of(weight: Tensor) -> int:
    """Returns a checksum of up to 1,024 elements of this rank's piece; waits for the device."""
    elements = local_tensors(weight)[0].detach().reshape(-1)
    some = elements[:: len(elements) // 1024 + 1].contiguous()
    return crc32(some.view(torch.uint8).cpu().numpy().data)


def _refuse_different_replicas(tables: Sequence[Pieces], prints: Iterable[Sequence[int]]) -> None:
    """Raises if ranks with the same piece of a table have other elements there; of each table, prints by rank."""
    remedy = "make them with the same torch.manual_seed on every rank, or load a checkpoint before the first lookup"
    problems = []
    for pieces, of_ranks in zip(tables, prints, strict=True):
        firsts: dict[tuple[int, int], int] = {}
        for rank, piece in enumerate(pieces.on):
            first = rank if piece is None else firsts.setdefault(piece.part, rank)
            if of_ranks[rank] != of_ranks[first]:
                found, required = f"other rows on rank {rank} than on rank {first}", "the same rows in every replica"
                problems.append(Problem(f"{pieces.table.name}.weight", found, required, remedy))
    if problems:
        raise StateError("replicas of tables differ", problems, code="replicas-differ")
