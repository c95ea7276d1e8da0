"""Generated runs in one process, a job of one rank."""

import pytest
import torch
import torch.distributed as dist

from tests.twins.machine import play
from tests.twins.plain import KINDS

SEQUENCES = 4  # of each kind


@pytest.fixture
def job():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would take longer to meet than tensors this small to be stepped
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, 50))])
def test_same_values_throughout(job, tmp_path, number):
    assert play(str(tmp_path), SEQUENCES, 10, number) >= SEQUENCES * len(KINDS)
