"""Generated runs in one process, a job of one rank."""

import pytest
import torch.distributed as dist

from tests.twins.machine import play
from tests.twins.plain import KINDS

SEQUENCES = 3  # of each kind


@pytest.fixture
def job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, 50))])
def test_same_values_throughout(job, tmp_path, number):
    assert play(str(tmp_path), SEQUENCES, 10, number) >= SEQUENCES * len(KINDS)
