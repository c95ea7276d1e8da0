"""Figures of checkpoints in a TensorBoard file, as TensorBoard reads it."""

import pytest
import torch
from template import train

from shardopt import checkpoint
from shardopt.cli import main
from shardopt.integrations.loggers import log_report_metrics, tensorboard
from tests.harness import run_ranks

pytest.importorskip("tensorboard", reason="tensorboard is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_figures_are_in_the_file(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    app = {"x": torch.ones(1000), "step": 0}
    with SummaryWriter(tmp_path / "logs") as writer:
        remove = log_report_metrics(tensorboard(writer), step=lambda: app["step"])
        with checkpoint.Manager(tmp_path / "run", every=2, stage="now") as manager:
            for step in range(1, 5):
                app["step"] = step
                pending = manager.save(step, app)
                if pending is not None:
                    report = pending.result()
        remove()
    read = EventAccumulator(str(tmp_path / "logs"))
    read.Reload()
    assert [each.step for each in read.Scalars("checkpoint/save/bytes_total")] == [2, 4]
    for name in ("bytes_total", "seconds", "stall_seconds", "gb_per_second"):
        written = read.Scalars(f"checkpoint/save/{name}")[-1].value
        assert written == pytest.approx(checkpoint.report_metrics(report)[name], rel=1e-6)


def train_with_tensorboard(path, resume):
    train.train(train.read_config(path), torch.device("cpu"), resume, use_tensorboard=True)


def test_the_program_of_shardopt_new_writes_each_loss_once_and_saves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["new", str(tmp_path / "run")]) == 0
    path = tmp_path / "run" / "config.toml"
    text = path.read_text().replace('"out/', f'"{tmp_path}/out/').replace("steps = 200", "steps = 20")
    path.write_text(text.replace("every = 50", "every = 10"))
    run_ranks(2, train_with_tensorboard, path, False)
    checkpoint.Manager(tmp_path / "out" / "run" / "checkpoints").delete(20)  # as if the run had been killed before
    run_ranks(2, train_with_tensorboard, path, True)
    logs = tmp_path / "out" / "run" / "logs"
    assert len([*logs.iterdir()]) == 2  # by rank 0 only
    read = EventAccumulator(str(logs))
    read.Reload()
    losses = read.Scalars("loss")
    assert [each.step for each in losses] == list(range(1, 21)) and losses[-1].value < losses[0].value
    assert read.Scalars("checkpoint/save/seconds")[-1].step == 20
