"""Any rank of any number of ranks, one after the other in this process, for what needs no communication."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardopt.sharding.box import cover_faults
from shardopt.sharding.layout import Layout


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank. Collectives return at once and leave in their outputs whatever was there."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # torch keeps what operations on DTensors give with its mesh, and equal meshes of two ranks are not the same.
        _clear_sharding_prop_cache()


def counting(shape) -> torch.Tensor:
    """The global tensor of the tests: every element is its own number, so that no two places are taken for each
    other."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def placed(world, mesh, placements) -> DTensor:
    """`world` as a DTensor, as torch's own redistribution of replicas lays it; local, with every placement."""
    whole = distribute_tensor(world, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    try:
        return whole.redistribute(placements=placements)
    except ValueError:  # torch 2.11 has no way from replicas to a _StridedShard that stands for no order of splits
        return distribute_tensor(world, mesh, placements, src_data_rank=None)


def at(box) -> tuple[slice, ...]:
    """The index that takes a box out of a tensor."""
    return tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))


def check_views(views, world) -> None:
    """That the views of all ranks (by rank) say of one tensor, `world`, what each of them holds.

    Values, exact cover, and for each box exactly the ranks that hold it.
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
    told = zip(whole_layout.boxes, whole_layout.holders, strict=True)
    assert dict(told) == {box: tuple(ranks) for box, ranks in holders.items()}
