"""Generated runs in one process, a job of one rank."""

import pytest
import torch.distributed as dist

from tests.twins.machine import play
from tests.twins.plain import KINDS

SEQUENCES = 3  # of each kind, and one in the usual run


@pytest.fixture
def job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("number", "sequences"),
    [(0, 1), *(pytest.param(i, SEQUENCES, marks=pytest.mark.exhaustive) for i in range(50))],
)
def test_same_values_throughout(job, tmp_path, number, sequences):
    assert play(str(tmp_path), sequences, 10, number) >= sequences * len(KINDS)
