"""Generated lives of jobs: each resume is what a run that never stopped has, or is refused with a remedy that works."""

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from tests.lives.life import CHANGES, play

EVENTS = {"train", "record", "aside", "export", "back", "refused", *CHANGES}


@pytest.fixture
def job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("begin", range(0, 40, 40))
def test_lives_of_one_process(job, tmp_path, begin):
    seen = play(str(tmp_path), range(begin, begin + 40), starts=2)
    assert seen.keys() >= EVENTS


def test_lives_on_one_to_three_ranks(tmp_path):
    seen, *_ = run_ranks(3, play, str(tmp_path), range(282, 300), starts=2, deadline_seconds=140)
    assert seen.keys() >= EVENTS


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("begin", range(1000, 4800, 200))
def test_many_lives_of_one_process(job, tmp_path, begin):
    play(str(tmp_path), range(begin, begin + 200), starts=4)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("begin", range(4800, 6000, 40))
def test_many_lives_on_one_to_three_ranks(tmp_path, begin):
    run_ranks(3, play, str(tmp_path), range(begin, begin + 40), starts=4, deadline_seconds=550)
