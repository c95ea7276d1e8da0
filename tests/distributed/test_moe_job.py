"""The mixture of experts at its smallest: stopped under one split of ranks, resumed under another, as if on one rank.

A split is (ranks, stages of the pipeline, ranks that experts are spread over).
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import train_moe
from compare_runs import compare_losses, read_losses
from kill_and_resume import pid_of_rank
from moe import Block
from program import read_config
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from shardopt import checkpoint
from tests.harness import RanksFailed, run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "moe.toml"
STEPS, EVERY = 4, 2
TINY = {
    "steps": STEPS,
    "checkpoints.every": EVERY,
    "data.batch": 16,
    "data.context": 8,
    "model.layers": 2,
    "model.width": 16,
    "model.heads": 2,
    "model.experts": 4,
    "model.hidden": 16,
    "schedule.warmup_steps": 2,
}
TOLERANCE = 1e-5
Split = tuple[int, int, int]


def settings_of(stages: int, expert_ranks: int, others: dict[str, int] | None = None) -> list[str]:
    """Returns the settings of a job as the command line has them."""
    settings = TINY | {"split.pipeline": stages, "split.experts": expert_ranks} | (others or {})
    return [f"{name}={value}" for name, value in settings.items()]


def train_tiny(out: Path, settings: list[str], dropped: str | None = None) -> None:
    if dropped is not None:
        drop(dropped)
    changes = tomllib.loads("\n".join(settings)) | {"out": str(out)}
    train_moe.train(read_config(train_moe.Config, CONFIG, changes), torch.device("cpu"), resume=True)


def drop(piece: str) -> None:
    """From now on this rank's job lacks a piece of what it does or restores."""
    if piece == "sum of tied gradients":
        train_moe.add_up_tied = lambda model, ends: None
        return
    restore = checkpoint.Manager.restore

    def restore_without(self: checkpoint.Manager, app: dict[str, Any]) -> int:
        fresh = app[piece].state_dict()
        step = restore(self, app)
        app[piece].load_state_dict(fresh)
        return step

    checkpoint.Manager.restore = restore_without


def run(out: Path, split: Split, dropped: str | None = None, others: dict[str, int] | None = None) -> None:
    ranks, *parallel = split
    run_ranks(ranks, train_tiny, out, settings_of(*parallel, others), dropped)


@contextmanager
def torchrun(out: Path, split: Split, others: dict[str, int]) -> Iterator[subprocess.Popen[str]]:
    """The whole program as a user starts it; ended when the block is left."""
    ranks, *parallel = split
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(REPOSITORY / "examples" / "train_moe.py"), str(CONFIG), "--resume", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [*command, "--set", *settings_of(*parallel, others)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.terminate()  # torchrun passes it on to its workers


def interrupt(out: Path, step: int) -> None:
    """Makes a finished run one that was lost in the step after next: without its later checkpoints and losses."""
    for later in range(step + EVERY, STEPS + 1, EVERY):
        shutil.rmtree(out / "checkpoints" / f"step-{later:08}")
    losses = (out / "loss.jsonl").read_text().splitlines(keepends=True)
    (out / "loss.jsonl").write_text("".join(losses[: step + 1]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, which has everything, that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    run(out, (1, 1, 1))
    return out


def described(path: Path) -> dict[str, Any]:
    """Returns shape and dtype of each tensor, and each plain value, by key."""
    with checkpoint.open(path) as reader:
        values = {key: reader.read(key) for key in reader.keys()}  # noqa: SIM118  # no dict
    return {key: (each.shape, each.dtype) if isinstance(each, Tensor) else each for key, each in values.items()}


def mix_beside_a_loop() -> None:
    """Two ranks, with seven tokens and one, and two of four experts each."""
    torch.manual_seed(0)
    block = Block(6, heads=2, experts=4, chosen=2, hidden=5)
    up, down = (weight.detach().clone() for weight in (block.experts.up, block.experts.down))
    block.experts.spread(init_device_mesh("cpu", (2,)))
    assert block.experts.up.to_local().shape == (2, 6, 5)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(7 - 6 * dist.get_rank(), 6, requires_grad=True)
    expected = torch.zeros_like(x)
    for i, token in enumerate(x):
        share = block.gate(token).softmax(dim=0)
        first, second, left_out, _ = share.argsort(descending=True).tolist()
        for expert in (first, second):
            weight = share[expert] - share[left_out]
            expected[i] += weight * (functional.gelu(token @ up[expert]) @ down[expert])
    output, given = block.mix(x), torch.randn_like(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, given)[0] for each in (output, expected)))


def test_experts_on_two_ranks_compute_what_a_loop_over_tokens_does() -> None:
    run_ranks(2, mix_beside_a_loop)


def test_stopped_on_stages_and_resumed_without_them(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, (4, 2, 2))
    saved = described(tmp_path / "checkpoints" / f"step-{EVERY:08}")
    assert saved == described(whole / "checkpoints" / f"step-{EVERY:08}")
    assert not {key for key in saved if key.startswith("optimizer") and "head" in key}
    interrupt(tmp_path, EVERY)
    run(tmp_path, (2, 1, 2))
    comparison = compare_losses(whole, tmp_path)
    assert [line.ranks for line in comparison.differences] == [4] * (EVERY + 1) + [2] * (STEPS - EVERY)
    assert comparison.holds(TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "split",
    [
        (2, 2, 1),
        (2, 1, 2),
        (2, 1, 1),
        (4, 4, 1),
        (4, 1, 4),
        (4, 2, 1),
        (4, 1, 2),
        (4, 1, 1),
        (8, 4, 2),
        (8, 2, 4),
        (8, 2, 2),
    ],
)
def test_the_split_does_not_change_a_run(whole: Path, tmp_path: Path, split: Split) -> None:
    run(tmp_path, split)
    assert compare_losses(whole, tmp_path).holds(TOLERANCE)
    steps = [f"step-{step:08}" for step in (EVERY, STEPS)]
    assert all(described(tmp_path / "checkpoints" / step) == described(whole / "checkpoints" / step) for step in steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dropped", ["schedule", "data"])
def test_the_comparison_fails_where_a_piece_is_not_resumed(whole: Path, tmp_path: Path, dropped: str) -> None:
    run(tmp_path, (4, 2, 2))
    interrupt(tmp_path, EVERY)
    run(tmp_path, (4, 4, 1), dropped)
    comparison = compare_losses(whole, tmp_path)
    assert not comparison.missing and comparison.worst > 100 * TOLERANCE


@pytest.mark.exhaustive
def test_stages_that_take_other_steps_with_a_tied_matrix_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"byte\.weight"):
        run(tmp_path, (4, 4, 1), "sum of tied gradients")
    assert [record.step for record in read_losses(tmp_path)] == list(range(1, EVERY + 1))


@pytest.mark.exhaustive
def test_a_run_resumes_from_eight_ranks_to_one(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    others = {"steps": 16, "checkpoints.every": 50}  # saved when it gets the signal, and not before
    run(whole, (1, 1, 1), others=others)
    splits = [(8, 2, 2), (4, 4, 1), (2, 1, 2), (1, 1, 1)]
    for number, split in enumerate(splits, 1):
        with torchrun(resumed, split, others) as job:
            if split != splits[-1]:
                wait_for_step(job, resumed, 3 * number)
                os.kill(pid_of_rank(split[0] - 1, job.pid), signal.SIGTERM)
            output, _ = job.communicate(timeout=120)
        assert (job.returncode == 0) == (split == splits[-1]), output
    comparison = compare_losses(whole, resumed)
    assert [line.step for line in comparison.differences] == list(range(1, 17))  # none was done twice
    assert {line.ranks for line in comparison.differences} == {8, 4, 2, 1}
    assert comparison.holds(TOLERANCE)


def wait_for_step(job: subprocess.Popen[str], out: Path, step: int) -> None:
    while not any(record.step >= step for record in read_losses(out)):
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
