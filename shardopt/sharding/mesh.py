"""The boxes of a tensor on the ranks of a mesh, split as torch.chunk splits. Has no tensors.

A dimension of size N that is split into n chunks gives ceil(N / n) indices to each chunk until none are left, so the
last chunks may be short or empty. Splits of one dimension follow one another, each applied to what the ones before
left. A split with factor f > 1 first chunks what it is given into f sections and gives each rank its chunk of each:
what a rank holds are then several runs of indices, in ascending order, that lie one behind the other in its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import prod

from shardopt.sharding.box import Box, whole
from shardopt.sharding.layout import Layout

Runs = tuple[tuple[int, int], ...]
"""Ascending, disjoint, non-touching (start, end) pairs of indices along one dimension."""


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a tensor's dimension over a dimension of the mesh.

    Args:
        mesh_dim: the mesh dimension whose ranks share.
        tensor_dim: the tensor dimension that is shared out, not negative.
        factor: number of sections that are each shared out on their own; 1 is plain chunking.
    """

    mesh_dim: int
    tensor_dim: int
    factor: int = 1


@dataclass(frozen=True, eq=False)
class Mesh:
    """Ranks in a grid. Compared by identity, which makes it a cheap cache key.

    Args:
        shape: number of ranks along each mesh dimension.
        ranks: the global ranks in C order.
        cut: whether it has only some of the ranks of the job, or of a larger mesh that it was cut out of. Others, on
            meshes like it, may hold the same tensors, as where FSDP runs over one dimension of a mesh and tensor
            parallelism, for other tensors, over the next.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cut: bool = False


@lru_cache(maxsize=4096)
def descent(mesh: Mesh, dim: int) -> tuple[int, int] | None:
    """Returns two ranks that follow one another along a mesh dimension and descend; None where all ascend."""
    stride = prod(mesh.shape[dim + 1 :])
    firsts = (i for i in range(len(mesh.ranks)) if i // stride % mesh.shape[dim] < mesh.shape[dim] - 1)
    pairs = ((mesh.ranks[i], mesh.ranks[i + stride]) for i in firsts)
    return next((pair for pair in pairs if pair[0] > pair[1]), None)


@lru_cache(maxsize=4096)
def mesh_layout(shape: tuple[int, ...], mesh: Mesh, splits: tuple[Split, ...]) -> Layout:
    """Computes the layout of a tensor of this global shape after `splits`, in that order.

    Mesh dimensions without a split replicate.

    The boxes are always the cells of a grid, since every dimension is split on its own.
    """
    if prod(shape) == 0:
        return Layout(shape, (whole(shape),), (tuple(sorted(mesh.ranks)),), mesh.cut)
    strides = [prod(mesh.shape[dim + 1 :]) for dim in range(len(mesh.shape))]
    dims = [_cells(size, mesh.shape, strides, _of_dim(splits, dim)) for dim, size in enumerate(shape)]
    copies = [
        range(0, count * stride, stride)
        for mesh_dim, (count, stride) in enumerate(zip(mesh.shape, strides, strict=True))
        if all(split.mesh_dim != mesh_dim for split in splits)
    ]
    copy_offsets = [sum(offsets) for offsets in product(*copies)]
    cuts = tuple((*(start for start, _, _ in cells), size) for cells, size in zip(dims, shape, strict=True))
    positions = map(sum, product(*([position for _, _, position in cells] for cells in dims)))
    ranks = mesh.ranks
    holders: tuple[tuple[int, ...], ...]
    if len(copy_offsets) == 1:
        holders = tuple((ranks[base],) for base in positions)
    else:
        holders = tuple(tuple(sorted([ranks[base + offset] for offset in copy_offsets])) for base in positions)
    return Layout.of_grid(shape, cuts, holders, mesh.cut)


@lru_cache(maxsize=4096)
def runs_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], splits: tuple[Split, ...], coordinate: tuple[int, ...]
) -> tuple[Runs, ...]:
    """Computes the runs of indices, for each dimension, of the rank at `coordinate` of the mesh."""
    return tuple(_runs_along(size, mesh_shape, _of_dim(splits, dim), coordinate) for dim, size in enumerate(shape))


def boxes_of(runs: Sequence[Runs]) -> tuple[tuple[Box, Box], ...]:
    """Returns the boxes of a rank with these runs, each with its box in the local tensor."""
    dims = []
    for dim_runs in runs:
        local = 0
        spans = []
        for start, end in dim_runs:
            spans.append((start, local, end - start))
            local += end - start
        dims.append(spans)
    boxes = []
    for cell in product(*dims):
        sizes = tuple(size for _, _, size in cell)
        boxes.append((Box(tuple(s for s, _, _ in cell), sizes), Box(tuple(at for _, at, _ in cell), sizes)))
    return tuple(boxes)


def in_order(splits: Sequence[Split], mesh_shape: Sequence[int]) -> tuple[Split, ...] | None:
    """Converts factors to plain splits, in the order in which they were made; None if they fit no order.

    Read so, a factor is the number of sections that splits over later mesh dimensions made before. From the last mesh
    dimension to the first, each takes its place behind as many of the later ones as multiply to its factor. Where the
    sizes divide evenly this gives every rank what the splits as they stand give it.

    Args:
        splits: at most one for each mesh dimension, in the order of mesh dimensions.
        mesh_shape: number of ranks along each mesh dimension.
    """
    order: dict[int, list[int]] = {}
    for split in reversed(splits):
        later = order.setdefault(split.tensor_dim, [])
        counts = [prod(mesh_shape[mesh_dim] for mesh_dim in later[:count]) for count in range(len(later) + 1)]
        if split.factor not in counts:
            return None
        later.insert(counts.index(split.factor), split.mesh_dim)
    return tuple(Split(mesh_dim, dim) for dim, mesh_dims in order.items() for mesh_dim in mesh_dims)


def differ_unseen(
    shape: Sequence[int], mesh_shape: Sequence[int], one: Sequence[Split], other: Sequence[Split]
) -> bool:
    """Whether two orders of splits differ in some ranks' indices, but not in how many each rank has per dimension.

    Not where no dimension is split more than twice: in both orders the runs of a rank of the first split stand one
    behind the other, and if they are cut to equal lengths, they are cut at the same places.
    """
    if all(len(_of_dim(one, dim)) < 3 for dim in range(len(shape))):
        return False
    differ = False
    for dim, size in enumerate(shape):
        orders = _of_dim(one, dim), _of_dim(other, dim)
        if orders[0] == orders[1] or size % prod(mesh_shape[split.mesh_dim] for split in orders[0]) == 0:
            continue
        ours = {split.mesh_dim for split in orders[0]}
        for coordinate in product(*(range(n if mesh_dim in ours else 1) for mesh_dim, n in enumerate(mesh_shape))):
            first, second = (_runs_along(size, mesh_shape, splits, coordinate) for splits in orders)
            if sum(end - start for start, end in first) != sum(end - start for start, end in second):
                return False
            differ = differ or first != second
    return differ


def _runs_along(size: int, mesh_shape: Sequence[int], splits: Iterable[Split], coordinate: Sequence[int]) -> Runs:
    """Computes the indices of one dimension that splits give the rank at `coordinate`."""
    runs: Runs = ((0, size),) if size else ()
    for split in splits:
        runs = _share(runs, mesh_shape[split.mesh_dim], split.factor, coordinate[split.mesh_dim])
    return runs


def _of_dim(splits: Sequence[Split], tensor_dim: int) -> list[Split]:
    return [split for split in splits if split.tensor_dim == tensor_dim]


def _cells(
    size: int, mesh_shape: Sequence[int], strides: Sequence[int], splits: Sequence[Split]
) -> list[tuple[int, int, int]]:
    """Returns (start, end, position) of every run of one dimension, ascending.

    The position is that of the run's holder in the flat mesh, without mesh dimensions that do not split this one.
    """
    runs_at: list[tuple[Runs, int]] = [(((0, size),), 0)]
    for split in splits:
        count, stride = mesh_shape[split.mesh_dim], strides[split.mesh_dim]
        runs_at = [
            (share, position + index * stride)
            for runs, position in runs_at
            for index, share in enumerate(_shares(runs, count, split.factor))
            if share
        ]
    return sorted((start, end, position) for runs, position in runs_at for start, end in runs)


def _shares(runs: Runs, count: int, factor: int) -> list[Runs]:
    """Divides runs among `count` ranks; may leave out ranks at the end that get nothing."""
    if len(runs) == 1 and factor == 1:  # most splits by far, and a large mesh makes tens of thousands of them
        ((start, end),) = runs
        step = -(-(end - start) // count)
        return [((at, min(at + step, end)),) for at in range(start, end, step)]
    pieces = _cut(runs, _spans(runs, count, factor, range(count)))
    return [_merged(pieces[index::count]) for index in range(count)]


def _share(runs: Runs, count: int, factor: int, index: int) -> Runs:
    """Computes the share of rank `index` of `count` alone."""
    return _merged(_cut(runs, _spans(runs, count, factor, (index,))))


def _spans(runs: Runs, count: int, factor: int, indices: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the elements of each section that the ranks `indices` of `count` get, counted along the runs."""
    total = sum(end - start for start, end in runs)
    section = -(-total // factor)
    spans = []
    for section_start in range(0, total, section or 1):
        section_end = min(section_start + section, total)
        chunk = -(-(section_end - section_start) // count)
        for index in indices:
            start = min(section_start + index * chunk, section_end)
            spans.append((start, min(start + chunk, section_end)))
    return spans


def _cut(runs: Runs, spans: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Converts ascending spans of elements, counted along the runs, to runs of indices."""
    pieces = []
    at = seen = 0  # the run that is being looked at, and the number of elements before it
    for start, end in spans:
        piece = []
        while start < end:
            run_start, run_end = runs[at]
            if start >= seen + run_end - run_start:
                seen += run_end - run_start
                at += 1
                continue
            stop = min(end, seen + run_end - run_start)
            piece.append((run_start + start - seen, run_start + stop - seen))
            start = stop
        pieces.append(piece)
    return pieces


def _merged(pieces: Iterable[list[tuple[int, int]]]) -> Runs:
    """Joins runs into one list, and touching ones into one run."""
    merged: list[tuple[int, int]] = []
    for start, end in chain.from_iterable(pieces):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)
