"""The main job at its smallest: train, lose the later half, resume, compare every step's loss.

Real ranks run the example's own `train`, and once, with --exhaustive, the whole program runs under torchrun.
"""

import copy
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import compare_losses, differing_keys
from program import read_config
from train_lm import Config, train

from shardopt import checkpoint
from tests.harness import run_ranks, run_ranks_outcomes

RANKS_STAY = True

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "lm.toml"
TINY = (
    "steps=8",
    "checkpoints.every=4",
    "data.batch=6",
    "data.context=16",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "schedule.warmup_steps=3",
)
RANKS = 2
TOLERANCE = 1e-5
LAST = "checkpoints/step-00000008"


def tiny_config(out: Path) -> Config:
    return read_config(Config, CONFIG, tomllib.loads("\n".join(TINY)) | {"out": str(out)})


def train_tiny(out: Path, resume: bool = True) -> None:
    train(tiny_config(out), torch.device("cpu"), resume)


def train_without(pieces: dict[str, Path]) -> None:
    """Resumes a run for each piece, which is left out."""
    for piece, out in pieces.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            drop_on_restore(piece, monkeypatch)
            train_tiny(out)


def drop_on_restore(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this rank's `Manager.restore` leaves one piece of the app as if it had never been loaded."""
    restore = checkpoint.Manager.restore

    def restore_without(self: checkpoint.Manager, app: dict[str, Any]) -> int:
        fresh = copy.deepcopy({name: app[name].state_dict() for name in ("schedule", "data")})
        step = restore(self, app)
        if piece in fresh:
            app[piece].load_state_dict(fresh[piece])
        else:
            state = app["optimizer"].state_dict()
            for tensors in state["state"].values():
                tensors[piece].zero_()
            app["optimizer"].load_state_dict(state)
        return step

    monkeypatch.setattr(checkpoint.Manager, "restore", restore_without)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    run_ranks(RANKS, train_tiny, out)
    return out


@pytest.fixture
def interrupted(whole: Path, tmp_path: Path) -> Path:
    """The same run as it lay there when a rank was lost in step 6: five losses, the checkpoint of step 4."""
    out = tmp_path / "interrupted"
    shutil.copytree(whole, out)
    shutil.rmtree(out / LAST)
    losses = (out / "loss.jsonl").read_text().splitlines(keepends=True)
    (out / "loss.jsonl").write_text("".join(losses[:5]))
    return out


def test_resumed_on_as_many_ranks_every_bit_is_the_same(whole: Path, interrupted: Path) -> None:
    run_ranks(RANKS, train_tiny, interrupted)
    comparison = compare_losses(whole, interrupted)
    assert len(comparison.differences) == 5 + 4
    assert comparison.holds(0.0)
    differing, keys = differing_keys(str(whole / LAST), str(interrupted / LAST))
    assert differing == []
    assert keys > 3 * 16  # parameters, two moments and a counter for each, and the plain values


def test_the_number_of_ranks_does_not_change_a_run(whole: Path, tmp_path: Path) -> None:
    run_ranks(4, train_tiny, tmp_path)
    assert compare_losses(whole, tmp_path).holds(TOLERANCE)


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_resumed_on_another_number_of_ranks_every_loss_is_the_same(whole: Path, interrupted: Path, ranks: int) -> None:
    run_ranks(ranks, train_tiny, interrupted)
    comparison = compare_losses(whole, interrupted)
    assert len(comparison.differences) == 5 + 4
    assert comparison.holds(TOLERANCE)


def test_a_run_does_not_begin_where_checkpoints_are(whole: Path) -> None:
    before = {*whole.rglob("*")}
    (outcome,) = run_ranks_outcomes(1, train_tiny, whole, resume=False)
    assert "found checkpoints; required none: add --resume" in str(outcome.error)
    assert {*whole.rglob("*")} == before


def test_the_comparison_fails_where_a_piece_is_not_resumed(whole: Path, interrupted: Path, tmp_path: Path) -> None:
    pieces = {piece: tmp_path / piece for piece in ("exp_avg", "exp_avg_sq", "step", "schedule", "data")}
    for out in pieces.values():
        shutil.copytree(interrupted, out)
    run_ranks(RANKS, train_without, pieces)
    for piece, out in pieces.items():
        comparison = compare_losses(whole, out)
        assert not comparison.missing, piece
        assert not comparison.holds(TOLERANCE), piece
        assert comparison.worst > 100 * TOLERANCE, piece


@pytest.mark.exhaustive
def test_the_program_resumes_under_torchrun(whole: Path, interrupted: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [str(REPOSITORY / "examples" / "train_lm.py"), str(CONFIG), "--resume"]
    command += ["--out", str(interrupted), "--set", *TINY]
    ended = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert compare_losses(whole, interrupted).holds(0.0)
    assert checkpoint.Manager(interrupted / "checkpoints").steps() == [4, 8]


def run_readme_example(folder: Path, steps: int) -> None:
    """One process as torchrun would start it alone. Port 0: the store takes a free one, and nobody else needs it."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.chdir(folder)
    sys.argv[1:] = [str(steps)]
    exec(readme_example())


def readme_example() -> str:
    return (REPOSITORY / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


def test_the_example_of_the_readme_runs_and_resumes(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path / "out" / "checkpoints")
    run_ranks(1, run_readme_example, tmp_path, 150, backend=None)
    assert manager.steps() == [50, 100, 150]
    kept = (Path(manager.path(150)) / "manifest.json").stat().st_mtime_ns
    run_ranks(1, run_readme_example, tmp_path, 200, backend=None)
    assert manager.steps() == [50, 100, 150, 200]
    assert (Path(manager.path(150)) / "manifest.json").stat().st_mtime_ns == kept
