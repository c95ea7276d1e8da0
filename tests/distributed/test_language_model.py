"""The program of the language-model recipe, at its smallest: what it trains on, what it keeps, and how it resumes."""

import shutil
from pathlib import Path

import pytest
import torch
from language_model import Config, train
from program import override, read_config
from tokenise import main as tokenise

from shardopt import checkpoint
from tests.harness import run_ranks

RANKS_STAY = True

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "language_model.toml"
SIZES = {
    "save_every": 3,
    "model": {"vocabulary": 256, "layers": 1, "width": 32, "heads": 1},
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
}


def train_here(tokens, out, steps, batch=6, accumulate=2):
    # The same samples are for validation.
    data = {"tokens": tokens, "context": 8, "batch": batch, "accumulate": accumulate, "validate_batches": accumulate}
    config = read_config(Config, CONFIG, override(SIZES, {"out": out, "steps": steps, "data": data}))
    train(config, torch.device("cpu"), resume=True)


def manager_of(out):
    return checkpoint.Manager(f"{out}/checkpoints")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text").write_bytes(bytes(range(32, 127)) * 12)
    tokenise(str(folder / "tokens.bin"), str(folder / "text"))
    return str(folder / "tokens.bin")


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """A run of 6 steps on 2 ranks, and its metrics at the end."""
    out = str(tmp_path_factory.mktemp("whole") / "run")
    run_ranks(2, train_here, tokens, out, 6)
    return out, manager_of(out).metrics(6)


def values(out, step):
    with checkpoint.open(manager_of(out).path(step)) as reader:
        return {key: reader.read(key) for key in sorted(reader.keys())}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_resumes_on_any_number_of_ranks(tokens, whole, tmp_path, ranks):
    """Bit for bit on as many ranks; on others within what bf16 makes of other sums."""
    out = str(tmp_path / "run")
    shutil.copytree(whole[0], out)
    manager_of(out).delete(6)
    run_ranks(ranks, train_here, tokens, out, 6)
    assert manager_of(out).steps() == [3, 6]
    assert manager_of(out).metrics(6) == pytest.approx(whole[1], rel=0 if ranks == 2 else 1e-3, abs=0)
    here, there = values(out, 6), values(whole[0], 6)
    assert here.keys() == there.keys() and here["data"] == there["data"]
    if ranks == 2:
        assert all(torch.equal(here[key], value) for key, value in there.items() if isinstance(value, torch.Tensor))


def test_a_step_is_the_same_in_any_number_of_micro_batches(tokens, whole, tmp_path):
    out = str(tmp_path / "run")
    run_ranks(2, train_here, tokens, out, 6, 12, 1)
    assert manager_of(out).metrics(6)["loss"] == pytest.approx(whole[1]["loss"], rel=1e-3)


def test_it_learns_and_keeps_its_best(whole):
    manager = manager_of(whole[0])
    assert manager.metrics(6)["loss"] < manager.metrics(3)["loss"] < 5.6  # log 256 = 5.55
    assert manager.metrics(6)["validation"] < manager.metrics(3)["validation"]
    assert values(whole[0], 6)["schedule"]["last_epoch"] == 6
