"""The example of word vectors at its smallest: half of it on three ranks, the rest on two, as if all on two."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import compare_losses, main
from program import override, read_config
from train_embeddings import Config, train

from shardopt import checkpoint
from tests.harness import run_ranks

RANKS_STAY = True

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ("steps=8", "save_every=4", "data.batch=64", "data.min_count=40", "model.width=8")


def train_tiny(out: Path, **settings: Any) -> None:
    changes = override(tomllib.loads("\n".join(TINY)), settings | {"out": str(out)})
    config = read_config(Config, REPOSITORY / "configs" / "embeddings.toml", changes)
    train(config, torch.device("cpu"), resume=True)


def test_it_resumes_on_fewer_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_ranks(2, train_tiny, whole)
    run_ranks(3, train_tiny, resumed, steps=4)
    run_ranks(2, train_tiny, resumed)
    comparison = compare_losses(whole, resumed)
    assert [line.ranks for line in comparison.differences] == [3] * 4 + [2] * 4
    assert comparison.holds(1e-6)
    with checkpoint.open(resumed / "checkpoints" / "step-00000008") as reader:
        state = [reader.info(key) for key in sorted(reader.keys()) if key.endswith(".sum")]
    assert len(state) == 2
    assert all(info.shape[1:] == (1,) and info.dtype == torch.float32 for info in state)
    for tolerance, code in (("1e-6", 0), ("-1", 1)):
        monkeypatch.setattr("sys.argv", ["compare_runs.py", str(whole), str(resumed), f"--tolerance={tolerance}"])
        assert main() == code
    assert "8 losses compared" in capfd.readouterr().out
