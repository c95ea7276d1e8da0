"""Which tensors a wrapper of several is stored as, where a mesh cuts it and where it does not."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardopt.errors import LayoutError
from shardopt.sharding.traceable import parts_of
from shardopt.sharding.view import view_of
from tests.support.fake_rank import fake_rank
from tests.support.traceable import Coded, coded


def on_mesh(mesh, placements, local, rows):
    shape = torch.Size((rows, *local.shape[1:]))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(local.shape[1], 1))


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize(
    ("mesh", "placements"), [((1,), [Shard(0)]), ((2, 1), [Replicate(), Shard(0)]), ((2, 1), [Replicate(), Shard(1)])]
)
def test_a_wrapper_that_no_mesh_cuts_is_stored_whole_however_few_rows_it_has(mesh, placements, rows):
    whole = coded(2)
    local = Coded(whole.codes[:rows], whole.scales[:rows], whole.table)
    with fake_rank(0, torch.Size(mesh).numel(), mesh) as here:
        parts = parts_of(on_mesh(here, placements, local, rows))
        for name, (_, part) in parts.items():
            view = view_of(part, name)
            assert view.shape == getattr(local, name).shape
            assert [piece.box.sizes for piece in view.pieces] == [view.shape]


def test_what_is_refused_says_that_it_wants_two_rows_on_each_rank():
    whole = coded(2)
    local = Coded(whole.codes[:1], whole.scales[:1], whole.table)
    with fake_rank(0, 2) as mesh:
        tensor = on_mesh(mesh, [Shard(0)], local, 2)
        assert parts_of(tensor) is None
        with pytest.raises(LayoutError, match=r"Coded of other tensors; .*two rows or more"):
            view_of(tensor, "w")
