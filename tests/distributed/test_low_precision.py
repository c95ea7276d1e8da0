"""Low-precision state and parameters on real ranks: the bits of one process in every layout, through a checkpoint."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardopt
from shardopt import checkpoint
from shardopt.algorithms import shared_rows
from shardopt.errors import AlgorithmError, GradientError
from shardopt.sharding.view import local_tensors
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.fake_rank import shard
from tests.support.low_precision import CASES, LAYOUTS, OPTIONS, Training
from tests.support.placement import give_gradient

RANKS_STAY = True

MIDDLE, END = 3, 5
CUT = ("columns", "last", "both", "table_columns", "table_grid")  # layouts in which ranks share rows
FEW = [("adamw", "codes, at random"), ("sgd", "codes, master"), ("nadam", "codes"), ("rprop", "bf16, at random")]


@functools.cache
def in_one_process(case):
    """Everything in the middle and at the end."""
    training = Training.of(case)
    training.steps(0, MIDDLE)
    middle = training.whole()
    training.steps(MIDDLE, END)
    return middle, training.whole()


def begin(path, layout, cases, wanted):
    """Trains from the start in a layout, and saves."""
    trainings = [Training.of(case, layout) for case in cases]
    for training in trainings:
        training.steps(0, MIDDLE)
    checkpoint.save(path, {str(number): training.app for number, training in enumerate(trainings)})
    return {case: training.differences(wanted[case][0]) for case, training in zip(cases, trainings, strict=True)}


def resume(path, layout, cases, wanted):
    """Resumes in another layout, from other parameters."""
    trainings = [Training.of(case, layout, seed=1) for case in cases]
    checkpoint.load(path, {str(number): training.app for number, training in enumerate(trainings)}, init_state=True)
    found = {}
    for case, training in zip(cases, trainings, strict=True):
        loaded = training.differences(wanted[case][0])
        training.steps(MIDDLE, END)
        found[case] = loaded + training.differences(wanted[case][1])
    return found


def compare(path, cases, one, other):
    path = path / "saved"
    wanted = {case: in_one_process(case) for case in cases}
    (ranks, layout), (later_ranks, later_layout) = one, other
    for found in run_ranks(ranks, begin, path, layout, cases, wanted, deadline_seconds=1500):
        assert found == {case: [] for case in cases}
    for found in run_ranks(later_ranks, resume, path, later_layout, cases, wanted, deadline_seconds=1500):
        assert found == {case: [] for case in cases}


@pytest.mark.parametrize(
    ("one", "other"),
    [((4, "both"), (3, "table_columns")), ((2, "fsdp_tp"), (2, "columns"))],
    ids=lambda where: f"{where[1]} of {where[0]}",
)
def test_codes_scales_masters_and_random_rounding_have_the_bits_of_one_process(one, other, tmp_path):
    compare(tmp_path, FEW, one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", CUT)
def test_every_algorithm_has_the_bits_of_one_process(layout, ranks, how, tmp_path):
    """From a layout on some ranks to the layout after it on the next number of ranks."""
    following = LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)]
    compare(tmp_path, [case for case in CASES if case[1] == how], (ranks, layout), (ranks % 4 + 1, following))


def count_collectives():
    """Two optimizers, on parameters of which rows are shared and on others; each takes a step."""
    mesh = init_device_mesh("cpu", (2,))
    full = torch.ones(64, 128)
    params = {
        f"{placement.dim}.{i}": torch.nn.Parameter(shard(full, mesh, placement))
        for placement in (Shard(0), Shard(1))
        for i in range(3)
    }
    for dim in "01":
        chosen = {name: parameter for name, parameter in params.items() if name.startswith(dim)}
        optimizer = shardopt.keyed("adamw", chosen, state_dtype="uint8")
        for parameter in chosen.values():
            give_gradient(parameter, full)
        optimizer.step()
        dist.barrier()


def test_a_step_has_one_all_reduce_where_ranks_share_rows_and_none_elsewhere():
    for outcome in run_ranks_outcomes(2, count_collectives, trace=["torch.distributed:all_reduce"]):
        assert outcome.ok, outcome
        assert len(outcome.calls) == 1


def one_bad_gradient():
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(shard(torch.ones(64, 128), mesh, Shard(1)))
    with pytest.raises(AlgorithmError, match="w: found 8-bit state whose blocks lie on several ranks"):
        shardopt.in_backward({"w": weight}, "adamw", state_dtype="uint8")
    optimizer = shardopt.keyed("adamw", {"w": weight}, state_dtype="uint8")
    give_gradient(weight, torch.ones(64, 128).to_sparse(1) if dist.get_rank() else torch.ones(64, 128))
    with pytest.raises(GradientError) as raised:
        optimizer.step()
    assert (local_tensors(weight)[0] == 1).all() and not optimizer.state_dict()["state"]
    return str(raised.value)


def test_a_gradient_that_one_rank_refuses_is_refused_by_all_that_share_its_rows():
    other, own = run_ranks(2, one_bad_gradient, deadline_seconds=60)
    assert "w.grad: found torch.sparse_coo" in own and "w: found a gradient" in other and "another rank" in other


def one_bad_gradient_told_late():
    """As on an accelerator, where to look at what ranks have told each other would be to wait for it."""
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(shard(torch.ones(64, 128), mesh, Shard(1)))
    optimizer = shardopt.keyed("adamw", {"w": weight}, state_dtype="uint8")
    reported = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shared_rows, "is_on_host", lambda numbers: False)
        for step in range(5):
            is_bad = step == 1 and dist.get_rank() == 1
            give_gradient(weight, torch.ones(64, 128).to_sparse(1) if is_bad else torch.ones(64, 128))
            try:
                optimizer.step()
                reported.append("")
            except GradientError as error:
                reported.append(str(error))
    return reported


def test_a_refusal_that_is_told_late_is_raised_in_one_step_of_all():
    """None of them may wait for the others in an exchange that these have left."""
    other, own = run_ranks(2, one_bad_gradient_told_late, deadline_seconds=60)
    assert [bool(each) for each in other] == [False, False, False, True, False]
    assert [bool(each) for each in own] == [False, True, False, True, False]
    assert "w.grad: found torch.sparse_coo" in own[1] and "another rank refuses" in own[3] and own[3] == other[3]
