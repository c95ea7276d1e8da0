"""Low-precision state and parameters on real ranks: the bits of one process in every layout, through a checkpoint."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardopt
from shardopt import checkpoint
from shardopt.errors import AlgorithmError, GradientError
from shardopt.sharding.view import local_tensors
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.fake_rank import shard
from tests.support.low_precision import LAYOUTS, Training
from tests.support.placement import give_gradient

MIDDLE, END = 3, 5
BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS = {
    "codes": (FP32, {"state_dtype": torch.uint8}),
    "codes, at random": (BF16, {"state_dtype": torch.uint8, "rounding": "stochastic"}),
    "codes, master": (BF16, {"state_dtype": torch.uint8, "master_dtype": FP32}),
    "bf16, at random": (BF16, {"state_dtype": BF16, "rounding": "stochastic"}),
    "bf16, master": (BF16, {"state_dtype": BF16, "master_dtype": FP32, "rounding": "stochastic"}),
    "master": (BF16, {"master_dtype": FP32}),
    "at random": (BF16, {"rounding": "stochastic"}),
}
ALGORITHMS = {
    "adadelta": {},
    "adagrad": {"initial_accumulator_value": 0.1},
    "adam": {"amsgrad": True},
    "adamw": {"lr": 1e-2},
    "adamax": {},
    "asgd": {"t0": 1.0},
    "nadam": {},
    "radam": {"betas": (0.5, 0.7)},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "rprop": {},
    "sgd": {"momentum": 0.9, "nesterov": True},
}
FEW = [("adamw", "codes, at random"), ("sgd", "codes, master"), ("nadam", "codes"), ("rprop", "bf16, at random")]
EVERY = list(itertools.product(ALGORITHMS, OPTIONS))


def made(layout, case, seed=0):
    algorithm, how = case
    dtype, options = OPTIONS[how]
    return Training(layout, algorithm, {**ALGORITHMS[algorithm], **options}, dtype, seed)


def in_one_process(case):
    training = made("plain", case)
    training.steps(0, MIDDLE)
    middle = training.whole()
    training.steps(MIDDLE, END)
    return middle, training.whole()


def begin(path, layout, cases, wanted):
    """Trains from the start in a layout, and saves."""
    found = {}
    for number, case in enumerate(cases):
        training = made(layout, case)
        training.steps(0, MIDDLE)
        found[case] = training.differences(wanted[case][0])
        checkpoint.save(path / str(number), training.app)
    return found


def go_on(path, layout, cases, wanted):
    """Goes on in another layout, from other parameters."""
    found = {}
    for number, case in enumerate(cases):
        training = made(layout, case, seed=1)
        checkpoint.load(path / str(number), training.app, init_state=True)
        loaded = training.differences(wanted[case][0])
        training.steps(MIDDLE, END)
        found[case] = loaded + training.differences(wanted[case][1])
    return found


def compare(path, cases, one, other):
    wanted = {case: in_one_process(case) for case in cases}
    (ranks, layout), (later_ranks, later_layout) = one, other
    for found in run_ranks(ranks, begin, path, layout, cases, wanted, deadline_seconds=300):
        assert found == {case: [] for case in cases}
    for found in run_ranks(later_ranks, go_on, path, later_layout, cases, wanted, deadline_seconds=300):
        assert found == {case: [] for case in cases}


@pytest.mark.parametrize(
    ("one", "other"),
    [((4, "both"), (3, "table_columns")), ((2, "fsdp_tp"), (2, "columns"))],
    ids=lambda where: f"{where[1]} of {where[0]}",
)
def test_codes_scales_masters_and_random_rounding_have_the_bits_of_one_process(one, other, tmp_path):
    compare(tmp_path, FEW, one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_algorithm_and_option_has_the_bits_of_one_process(layout, ranks, tmp_path):
    """From a layout on some ranks to the next layout on the next number of ranks."""
    following = LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)]
    compare(tmp_path, EVERY, (ranks, layout), (ranks % 4 + 1, following))
