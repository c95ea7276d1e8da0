"""One process acting as a rank of a job that does not exist: layouts of many ranks without starting them.

torch's fake process group answers every collective at once with whatever lies in its buffers, so only what needs no
communication may be looked at here.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardopt.sharding.box import cover_faults
from shardopt.sharding.layout import Layout
from shardopt.sharding.view import view_of
from tests.support.placement import at, ends_of, runs, sharded_tensor_of


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """This process as one rank of so many. Collectives return at once and leave in their outputs what was there."""
    # torch remembers placements by meshes, which compare equal for all ranks, and hands out another rank's mesh.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


@contextmanager
def fake_rank(rank: int, ranks: int, shape: Sequence[int] | None = None) -> Iterator[DeviceMesh]:
    """A CPU mesh as this rank of so many sees it; one-dimensional unless a shape is given."""
    with as_rank(rank, ranks):
        yield init_device_mesh("cpu", tuple(shape or (ranks,)))


class KeptRank:
    """A fake rank that stays while the same one is asked for, and with it what torch has worked out for its meshes."""

    def __init__(self) -> None:
        self._stack, self._asked = ExitStack(), (0, 0)

    def first(self, looking: Iterable[int], ranks: int) -> list[int]:
        """Returns the numbers of ranks, that of the one that is here before the others."""
        return sorted(looking, key=lambda rank: (rank, ranks) != self._asked)

    def at(self, rank: int, ranks: int) -> DeviceMesh:
        """Makes this process one rank of so many; returns a CPU mesh of one dimension."""
        if self._asked != (rank, ranks):
            self.close()
            self._stack.enter_context(as_rank(rank, ranks))
            self._asked = rank, ranks
        return init_device_mesh("cpu", (ranks,))

    def close(self) -> None:
        """Makes this process no rank."""
        self._asked = 0, 0
        self._stack.close()


def redistributed(full: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """A tensor that every rank has as torch's own redistribution of replicas lays it; local, with every placement."""
    replicated = distribute_tensor(full, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    try:
        return replicated.redistribute(placements=placements)
    except ValueError:  # some torch has no way from replicas to a _StridedShard that stands for no order of splits
        return distribute_tensor(full, mesh, placements, src_data_rank=None)


_HERE: dict[tuple[object, ...], Tensor] = {}
"""The numbers of the elements that lie on a rank, as torch itself cuts them, by shape, mesh, place and placements."""


def shard(full: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """This rank's shard of a tensor that every rank has, copied: as `distribute_tensor`, without collectives.

    The mesh has this rank in it; the memory order of the whole tensor stays.
    """
    cut = tuple(full.shape), mesh.device_type, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), placements
    if cut not in _HERE:
        _HERE[cut] = redistributed(torch.arange(full.numel()).view(full.shape), mesh, *placements).to_local()
    local = full.flatten()[_HERE[cut]].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def sharded_tensor(
    full: Tensor, rows: Sequence[tuple[int, int]], rank: int, requires_grad: bool = False
) -> ShardedTensor:
    """Makes a ShardedTensor cut into runs of rows.

    Args:
        full: what every rank has.
        rows: for each shard, in order, the number of rows and the rank that holds it.
    """
    boxes = runs(full.shape, 0, ends_of([count for count, _ in rows]))
    return sharded_tensor_of(full, boxes, [holder for _, holder in rows], rank, requires_grad)


def boxes_of(full: Tensor, like: Tensor) -> list[Tensor]:
    """The boxes of a whole tensor that this rank has of `like`, copied."""
    return [full[at(piece.box)].clone() for piece in view_of(like).pieces]


def counting(shape) -> Tensor:
    """A tensor of which every element is its own number, so that no two places are taken for each other."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def check_views(views, world) -> None:
    """Asserts that the views of all ranks (by rank) of one tensor, `world`, have its values, cover it exactly, and name
    for each box exactly the ranks that hold it.
    """
    shape = tuple(world.shape)
    holders = {}
    for rank, view in views.items():
        assert view.shape == shape and view.dtype == world.dtype
        for piece in view.pieces:
            assert tuple(piece.tensor.shape) == piece.box.sizes
            assert torch.equal(piece.tensor, world[at(piece.box)])
            assert not piece.tensor.requires_grad
            holders.setdefault(piece.box, []).append(rank)
    whole_layout = Layout.merge({rank: view.layout for rank, view in views.items()})
    assert cover_faults(shape, whole_layout.boxes) == []
    assert cover_faults(shape, holders) == []
    merged = zip(whole_layout.boxes, whole_layout.holders, strict=True)
    assert dict(merged) == {box: tuple(ranks) for box, ranks in holders.items()}
