"""Replicas that add up the same numbers in process groups of their own, which a backend may do in another order."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardopt
from shardopt.errors import GradientError
from shardopt.sharding.view import assemble, local_tensors
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.fake_rank import shard

RANKS_STAY = True

STEPS = 3
HYBRID, COLUMNS, ONE_DIMENSION = [Replicate(), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Shard(0)]


def in_another_order(numbers, op=dist.ReduceOp.SUM, group=None, async_op=False, reduce=dist.all_reduce):
    """An all-reduce in which groups whose first rank is not rank 0 add up backwards."""
    if group is None or group.size() == 2 or op != dist.ReduceOp.SUM:
        return reduce(numbers, op=op, group=group, async_op=async_op)
    parts = [torch.empty_like(numbers) for _ in range(group.size())]
    dist.all_gather(parts, numbers, group=group)
    numbers.copy_(sum(parts if dist.get_process_group_ranks(group)[0] == 0 else parts[::-1]))
    return None


def trained(mesh, algorithm, placements, equal, sparse=False):
    """Those entries of two parameters after some steps that replicas have in common; "" is the parameter."""
    draw = torch.Generator().manual_seed(0)

    def placed():
        return shard(torch.randn(24, 12, generator=draw), mesh, *placements)

    params = {name: torch.nn.Parameter(placed()) for name in "ab"}
    optimizer = shardopt.keyed(algorithm, params, lr=0.1)
    reduce, dist.all_reduce = dist.all_reduce, in_another_order
    try:
        for _ in range(STEPS):
            for parameter in params.values():
                parameter.grad = placed()
                if sparse:
                    local = parameter.grad.to_local()
                    local = torch.sparse_coo_tensor(
                        torch.tensor([[1, 5, 7]]), local[[1, 5, 7]], local.shape, check_invariants=False
                    )
                    parameter.grad = assemble(parameter, [local])
            optimizer.step()
    finally:
        dist.all_reduce = reduce
    state = optimizer.state_dict()["state"]
    whole = [{"": parameter, **state[name]} for name, parameter in params.items()]
    return [local_tensors(each[entry])[0].detach() for each in whole for entry in equal]


CASES = [
    ("adafactor", HYBRID, ["", "row_var", "col_var"]),
    ("adafactor", ONE_DIMENSION, ["col_var"]),
    ("lamb", HYBRID, ["", "exp_avg"]),
    ("rowwiseadagrad", COLUMNS, ["", "sum"]),
    ("rowwiseadagrad", COLUMNS, ["", "sum"], True),
]


def all_trained():
    mesh = init_device_mesh("cpu", (2, 3))
    return [trained(mesh, *case) for case in CASES]


def recovered(algorithm, placements, refuses):
    """What this rank raised when one of the second replica failed a step, and its weights once all stepped anew."""
    mesh = init_device_mesh("cpu", (2, 3))
    weight = torch.nn.Parameter(shard(torch.ones(24, 12), mesh, *placements))
    optimizer = shardopt.keyed(algorithm, {"w": weight}, lr=0.1, weight_decay=0.1)
    optimizer.init_state()
    before = copy.deepcopy(optimizer.state_dict())
    whole = torch.randn(24, 12, generator=torch.Generator().manual_seed(0))
    weight.grad = shard(whole, mesh, *placements)
    if dist.get_rank() == 4:
        weight.grad = assemble(weight, [weight.grad.to_local().to_sparse()]) if refuses else None
    with pytest.raises(GradientError) as raised:
        optimizer.step()
    assert torch.equal(weight.to_local(), torch.ones_like(weight.to_local()))
    optimizer.load_state_dict(before)
    weight.grad = shard(whole, mesh, *placements)
    optimizer.step()
    return raised.value.code, weight.to_local().detach()


FAILED = [
    ("lamb", HYBRID, False),
    ("adafactor", HYBRID, False),
    ("adafactor", HYBRID, True),
    ("rowwiseadagrad", COLUMNS, True),
]


def all_recovered():
    return [recovered(*case) for case in FAILED]


def test_replicas_whose_groups_add_up_in_another_order_stay_the_same():
    ranks = run_ranks(6, all_trained)
    for first, second in zip(ranks[:3], ranks[3:], strict=True):
        for case, *pair in zip(CASES, first, second, strict=True):
            assert all(map(torch.equal, *pair)), case


OF_FOUR = [("adafactor", HYBRID), ("adafactor", [Shard(0), Shard(1)]), ("rowwiseadagrad", COLUMNS)]
ALL_REDUCES = 2 + 4 + 2


def of_four():
    mesh = init_device_mesh("cpu", (2, 2))
    for algorithm, placements in OF_FOUR:
        weight = torch.nn.Parameter(shard(torch.ones(24, 12), mesh, *placements))
        optimizer = shardopt.keyed(algorithm, {"w": weight})
        weight.grad = torch.ones_like(weight)
        optimizer.step()


def test_what_one_replica_lacks_or_refuses_all_raise_in_the_same_step():
    ranks = run_ranks(6, all_recovered)
    for number, (*_, refuses) in enumerate(FAILED):
        codes = {rank: ranks[rank][number][0] for rank in range(6)}
        assert {code for rank, code in codes.items() if not (refuses and rank == 4)} == {"missing-gradient"}
        for first, second in zip(ranks[:3], ranks[3:], strict=True):
            assert torch.equal(first[number][1], second[number][1])


def test_sums_of_two_ranks_and_of_no_replicas_are_sent_to_nobody():
    traced = ["torch.distributed:broadcast", "torch.distributed:all_reduce"]
    for outcome in run_ranks_outcomes(4, of_four, trace=traced):
        assert outcome.ok and len(outcome.calls) == ALL_REDUCES, outcome
        assert set(outcome.calls) == {"torch.distributed:all_reduce"}
