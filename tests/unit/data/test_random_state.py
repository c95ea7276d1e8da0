"""Random states and other states of a rank's own, through a checkpoint; on several ranks in tests/distributed."""

import random
import re

import numpy as np
import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.data import PerRankState, random_state
from shardopt.errors import MismatchError, StateError
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


def test_each_rank_gets_its_own(tmp_path, caplog):
    caplog.set_level("INFO", "shardopt.checkpoint")
    drawn = run_ranks(2, save_and_draw, str(tmp_path))
    assert drawn[0] != drawn[1]
    assert run_ranks(2, load_and_draw, str(tmp_path), "raise") == drawn
    with pytest.raises(MismatchError, match="random"):
        load_and_draw(str(tmp_path), "raise")
    seed_all(100)
    seed_all(100)
    wanted = draw()
    assert load_and_draw(str(tmp_path), "keep") == wanted
    assert "random.of_rank: values of 2 ranks, where 1 load: each rank keeps the one that it has" in caplog.text
    caplog.clear()
    for each in (checkpoint.save, checkpoint.load):
        each(tmp_path / "alone", {"random": shardopt.RandomState(on_resize="keep")})
    assert "each rank keeps" not in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_the_gpu_too(tmp_path):
    torch.cuda.manual_seed(0)
    app = {"random": shardopt.RandomState(on_resize="raise")}
    checkpoint.save(tmp_path, app)
    wanted = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(1)
    checkpoint.load(tmp_path, app)
    assert torch.equal(torch.rand(3, device="cuda"), wanted)


class Devices:
    """A module of an accelerator with three devices, on some of which this process has tensors."""

    def __init__(self, current, used, seeds):
        self.current, self.used, self.seeds = current, used, [torch.tensor([seed]) for seed in seeds]

    def is_initialized(self):
        return True

    def current_device(self):
        return self.current

    def device_count(self):
        return len(self.seeds)

    def memory_allocated(self, which):
        return int(which in self.used)

    def get_rng_state(self, which=None):
        return self.seeds[self.current if which is None else which]

    def set_rng_state(self, state, which=None):
        self.seeds[self.current if which is None else which] = state


def test_generators_of_all_devices_in_use_too(tmp_path, monkeypatch):
    app = {"random": shardopt.RandomState(on_resize="raise")}

    def at(devices):
        monkeypatch.setattr(random_state, "module_in_use", lambda: ("cuda", devices))
        return devices

    at(Devices(1, {1, 2}, [10, 11, 12]))
    checkpoint.save(tmp_path, app)
    for current, seeds in [(1, [0, 11, 12]), (0, [11, 12, 0]), (2, [12, 0, 11])]:
        devices = at(Devices(current, set(), [0, 0, 0]))
        checkpoint.load(tmp_path, app)
        assert torch.cat(devices.seeds).tolist() == seeds
    devices = at(Devices(0, {0}, [0]))
    checkpoint.load(tmp_path, app)
    assert devices.seeds[0].item() == 11
    assert app["random"].state_dict()["of_rank"].value.keys() == {"python", "numpy", "torch", "cuda"}


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


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda it: torch.rand(1, generator=it).item()),
        (np.random.default_rng(0), lambda it: it.random()),
        (np.random.RandomState(0), lambda it: it.random_sample()),
        (random.Random(0), lambda it: it.random()),
    ],
    ids=["torch", "numpy", "numpy before", "python"],
)
def test_the_error_of_a_generator_says_what_to_write(tmp_path, generator, draw):
    with pytest.raises(StateError) as raised:
        checkpoint.save(tmp_path / "c", {"own": generator})
    text = str(raised.value)
    get, put = re.search(
        r"state_dict\(\) returns (\{.*\}), and whose load_state_dict\(state\) does (.*); in a", text
    ).groups()

    class Own:
        def state_dict(self):
            return eval(get, {"it": generator})

        def load_state_dict(self, state):
            exec(put, {"it": generator, "state": state})

    assert "shardopt.data.PerRankState" in text
    for number, own in enumerate((Own(), PerRankState(Own(), on_resize="raise"))):
        checkpoint.save(tmp_path / str(number), {"own": own})
        drawn = draw(generator)
        assert draw(generator) != drawn
        checkpoint.load(tmp_path / str(number), {"own": own})
        assert draw(generator) == drawn
