"""Train with a Trainer of transformers, from the newest committed checkpoint if there is one.

    PYTHONPATH=examples torchrun --standalone --nproc-per-node 2 examples/integrations/fit_trainer.py out/trainer

Kill it, or send SIGTERM to any rank, and run it again on as many ranks as are left.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import log_loss
from integrations.task import BATCH, SEED, Network, Sums
from transformers import Trainer, TrainingArguments

from shardopt.integrations.trainer import ShardoptCallback


class LoggingTrainer(Trainer):
    """A Trainer that writes down the loss of each step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        share = loss.detach().double() / self.args.world_size
        log_loss(Path(self.args.output_dir), self.state.global_step + 1, share)
        return loss


def train(out: Path, set_up: Callable[[Any], None] = lambda trainer: None, **options: Any) -> Trainer:
    ranks = int(os.environ["WORLD_SIZE"])
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=BATCH // ranks,  # the global batch stays what it is
        num_train_epochs=3,
        learning_rate=0.01,
        weight_decay=0.1,
        save_strategy="no",
        seed=SEED,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"logging_steps": 4, **options},
    )
    trainer = LoggingTrainer(Network(), arguments, train_dataset=Sums())
    trainer.add_callback(ShardoptCallback(trainer, out / "checkpoints", every=2))
    set_up(trainer)
    trainer.train()
    return trainer


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.mkdir(parents=True, exist_ok=True)
    train(path)
