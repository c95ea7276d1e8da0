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


# Of the series those lives that together have all that it has: each event with each way, each option of a program, each
# remedy, each schedule and algorithm with each kind of optimizer.
FEW_OF_ONE_PROCESS = (1, 2, 5, 6, 7, 8, 10, 11, 15, 17, 28, 30)
FEW_OF_THREE_RANKS = (282, 284, 287, 289, 290, 291, 292, 293, 295, 298)


@pytest.mark.parametrize(
    "seeds", [FEW_OF_ONE_PROCESS, pytest.param(range(80), marks=pytest.mark.exhaustive)], ids=["few", "all"]
)
def test_lives_of_one_process(job, tmp_path, seeds):
    seen = play(str(tmp_path), seeds, starts=2)
    assert seen.keys() >= EVENTS


@pytest.mark.parametrize(
    "seeds", [FEW_OF_THREE_RANKS, pytest.param(range(282, 300), marks=pytest.mark.exhaustive)], ids=["few", "all"]
)
def test_lives_on_one_to_three_ranks(tmp_path, seeds):
    seen, *_ = run_ranks(3, play, str(tmp_path), seeds, starts=2, deadline_seconds=140)
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
