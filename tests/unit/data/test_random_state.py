"""Random states and other states of a rank's own, through a checkpoint; on several ranks in tests/distributed."""

import random

import numpy as np
import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks


def draw():
    return (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist())


def seed_all(seed):
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def test_generators_resume_as_if_nothing_had_been():
    seed_all(0)
    draw()  # an odd number of Gaussians: half of a pair is kept by two of the generators
    state = shardopt.RandomState(on_resize="raise")
    saved = state.state_dict()
    wanted = draw()
    seed_all(1)
    state.load_state_dict(saved)
    assert draw() == wanted


def save_and_draw(root):
    rank = torch.distributed.get_rank()
    seed_all(rank)
    checkpoint.save(root, {"random": shardopt.RandomState(on_resize="raise")})
    return draw()


def load_and_draw(root, on_resize):
    seed_all(100)
    checkpoint.load(root, {"random": shardopt.RandomState(on_resize=on_resize)})
    return draw()


def test_each_rank_gets_its_own(tmp_path):
    drawn = run_ranks(2, save_and_draw, str(tmp_path))
    assert drawn[0] != drawn[1]
    assert run_ranks(2, load_and_draw, str(tmp_path), "raise") == drawn
    with pytest.raises(MismatchError, match="random"):
        load_and_draw(str(tmp_path), "raise")
    seed_all(100)
    seed_all(100)
    wanted = draw()
    assert load_and_draw(str(tmp_path), "keep") == wanted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_the_gpu_too(tmp_path):
    torch.cuda.manual_seed(0)
    app = {"random": shardopt.RandomState(on_resize="raise")}
    checkpoint.save(tmp_path, app)
    wanted = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(1)
    checkpoint.load(tmp_path, app)
    assert torch.equal(torch.rand(3, device="cuda"), wanted)


def test_the_choice_on_resize_must_be_made():
    with pytest.raises(TypeError):
        shardopt.RandomState()
    with pytest.raises(ValueError, match="on_resize"):
        shardopt.RandomState(on_resize="reset")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchdata 0.11 calls what torch 2.13 has deprecated
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_resumes(tmp_path, workers):
    reason = "torchdata is not installed (launch/test_integrations.sh)"
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)

    def loader():
        torch.manual_seed(3)
        context = "fork" if workers else None
        return stateful.StatefulDataLoader(
            list(range(40)), batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=context
        )

    first = loader()
    stream = iter(first)
    for _ in range(3):
        next(stream)
    checkpoint.save(tmp_path / "it", {"data": shardopt.data.PerRankState(first, on_resize="raise")})
    wanted = [batch.tolist() for batch in stream]
    second = loader()
    checkpoint.load(tmp_path / "it", {"data": shardopt.data.PerRankState(second, on_resize="raise")})
    assert [batch.tolist() for batch in second] == wanted
    assert len(wanted) == 7
