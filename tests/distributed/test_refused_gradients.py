"""A gradient of a plain parameter that one rank refuses: all ranks refuse the step of what they share."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardopt
from shardopt.errors import GradientError
from tests.harness import run_ranks
from tests.support.fake_rank import shard

RANKS_STAY = True

ALGORITHMS = ("lamb", "adafactor", "muon")


def one_bad_gradient_of_a_plain_parameter():
    mesh, told = init_device_mesh("cpu", (2,)), []
    for algorithm in ALGORITHMS:
        sharded = torch.nn.Parameter(shard(torch.ones(4, 4), mesh, Shard(0)))
        plain = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = shardopt.keyed(algorithm, {"sharded": sharded, "plain": plain})
        sharded.grad = shard(torch.ones(4, 4), mesh, Shard(0))
        plain.grad = torch.ones(4, 4).to_sparse() if dist.get_rank() else torch.ones(4, 4)
        with pytest.raises(GradientError) as raised:
            optimizer.step()
        assert (sharded.to_local() == 1).all() and (plain == 1).all() and not optimizer.state_dict()["state"]
        told.append(str(raised.value))
    return told


def test_a_plain_gradient_that_one_rank_refuses_is_refused_by_all_before_a_change():
    other, own = run_ranks(2, one_bad_gradient_of_a_plain_parameter, deadline_seconds=60)
    assert all("plain.grad: found torch.sparse_coo" in each for each in own)
    assert all("sharded.grad: found no fault in it, but a rank refuses another" in each for each in other)
