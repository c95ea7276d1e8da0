"""Train with Accelerate, from the newest committed checkpoint if there is one.

    PYTHONPATH=examples torchrun --standalone --nproc-per-node 4 examples/integrations/fit_accelerate.py out/accelerate

Kill it, or send SIGTERM to any rank, and run it again on as many ranks as are left.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import DataLoaderConfiguration
from common import log_loss
from integrations.task import BATCH, Network, Sums

from shardopt import checkpoint
from shardopt.integrations.accelerate import Accelerator
from shardopt.integrations.loader import ResumableLoader

STEPS = 15


def prepare(set_up: Callable[[Any], None] = lambda accelerator: None, **options: Any) -> tuple[Any, ...]:
    # A batch is the global one, and so a schedule steps once a step on any number of ranks.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True), **options)
    set_up(accelerator)
    model = Network()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    loader = ResumableLoader(Sums(), batch_size=BATCH, seed=0)
    accelerator.register_for_checkpointing(loader)
    return accelerator, model, optimizer, schedule, loader


def train(out: Path, set_up: Callable[[Any], None] = lambda accelerator: None) -> Any:
    accelerator, model, optimizer, schedule, loader = prepare(set_up)
    progress = {"step": 0}
    app = {"progress": progress}
    with checkpoint.Manager(out / "checkpoints", every=2, stop_on=signal.SIGTERM) as manager:
        manager.restore(accelerator.app(app))
        while progress["step"] < STEPS:
            # The rest of an epoch; by epochs: for epoch in range(loader.epoch, epochs). What is done at an epoch's end
            # comes before the save of its last batch: if loader.epoch > epoch.
            for batch in loader:
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                progress["step"] += 1
                log_loss(out, progress["step"], loss.detach().double() / accelerator.num_processes)
                manager.save(progress["step"], accelerator.app(app), force=progress["step"] == STEPS)
    return accelerator


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.mkdir(parents=True, exist_ok=True)
    train(path)
