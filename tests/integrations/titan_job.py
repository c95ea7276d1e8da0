"""A run of torchtitan on the ranks of a test, as its `train.py` makes it."""

import importlib
import os

import torch.distributed as dist

from tests.integrations.rank_faults import at_step
from tests.integrations.titan_on_cpu import on_cpu


def train(folder, steps=12, fault=None, change=None, **parallelism):
    """Trains; returns the loss by step, and the trainer's own state."""
    on_cpu()
    config = importlib.import_module("integrations.torchtitan_windows").small()
    config.dump_folder = folder
    config.training.steps = steps
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint = None
    config.optimizer.implementation = "for-loop"
    plain_attention = importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention.Config
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = plain_attention()  # flex attention needs a compiler
    config.parallelism.spmd_backend = "partial_dtensor"
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    if change is not None:
        change(config)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    trainer = config.build()
    losses = {}
    log, strike = trainer.metrics_processor.log, at_step(*fault) if fault else lambda step: None

    def logged(step, loss, *args, **options):
        losses[step] = loss
        log(step, loss, *args, **options)

    save = trainer.checkpointer.save

    def save_then_strike(step, **options):
        saved = save(step, **options)
        strike(step)
        return saved

    trainer.metrics_processor.log, trainer.checkpointer.save = logged, save_then_strike
    try:
        trainer.train()
    finally:
        trainer.close()
    return losses, trainer.state_dict()
