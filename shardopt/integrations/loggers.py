"""Metrics of checkpoints (bytes, seconds, stall, GB/s) for loggers: TensorBoard, Weights & Biases, or any function.

remove = log_report_metrics(tensorboard(SummaryWriter("out/logs")), step=lambda: app["step"])
remove = log_report_metrics(wandb.log, step=lambda: app["step"])
remove = log_report_metrics(trainer.logger.log_metrics, step=lambda: trainer.global_step)  # Lightning
remove = log_report_metrics(accelerator.log, step=lambda: step)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardopt.checkpoint import add_listener, report_metrics
from shardopt.ranks import ranks_of

__all__ = ["log_report_metrics", "tensorboard"]

Log = Callable[..., object]
"""Called with metrics by name, and `step=`."""


def log_report_metrics(log: Log, *, step: Callable[[], int], all_ranks: bool = False) -> Callable[[], None]:
    """Passes the metrics of every save, load and upload to a logger; returns a function that ends this.

    Metrics have names such as "checkpoint/save/seconds".

    The logger is called by the thread that did the work. What it raises is logged, and does no harm to the work.

    Args:
        log: gets a dict of numbers by name, and the step as the keyword `step`.
        step: gives the step that the metrics are to stand at, when they are there.
        all_ranks: whether every rank logs, or rank 0 alone.

    Returns:
        A function that ends it.
    """

    def listen(event: str, report: Any) -> None:
        if all_ranks or ranks_of(None).rank == 0:
            log({f"checkpoint/{event}/{name}": value for name, value in report_metrics(report).items()}, step=step())

    return add_listener(listen)


def tensorboard(writer: Any) -> Log:
    """Returns a function for `log_report_metrics` that writes and flushes scalars.

    Args:
        writer: a `SummaryWriter` of TensorBoard.
    """

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log
