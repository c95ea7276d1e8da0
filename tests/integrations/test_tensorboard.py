"""Figures of checkpoints in a TensorBoard file, as TensorBoard reads it."""

import pytest
import torch

from shardopt import checkpoint
from shardopt.integrations.loggers import log_report_metrics, tensorboard

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
