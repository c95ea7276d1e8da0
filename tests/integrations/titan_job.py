"""A run of torchtitan on the ranks of a test, as its `train.py` makes it; and one in a loop of plain torch."""

import importlib
import os

import torch
import torch.distributed as dist

import shardopt
from shardopt import checkpoint
from tests.integrations.rank_faults import at_step
from tests.integrations.titan_on_cpu import on_cpu


def config_of(folder, steps):
    on_cpu()
    config = importlib.import_module("integrations.torchtitan_windows").small()
    config.dump_folder = folder
    config.training.steps = steps
    config.debug.seed = 0  # else its weights are others each time, and of some a step's rounding grows past a tolerance
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint = None
    config.optimizer.implementation = "for-loop"
    plain_attention = importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention.Config
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = plain_attention()  # flex attention needs a compiler
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def train(folder, steps=12, fault=None, change=None, loaded=None, **parallelism):
    """Trains; returns the loss by step, and the trainer's own state.

    Args:
        loaded: where to save model and optimizer as they were loaded, before the first step.
    """
    config = config_of(folder, steps)
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

    save, load = trainer.checkpointer.save, trainer.checkpointer.load

    def load_then_save(**options):
        found = load(**options)
        optimizer = trainer.optimizers.keyed
        checkpoint.save(loaded, {"model": trainer.checkpointer._app["model"], "optimizer": optimizer})
        return found

    def save_then_strike(step, **options):
        saved = save(step, **options)
        strike(step)
        return saved

    trainer.metrics_processor.log, trainer.checkpointer.save = logged, save_then_strike
    if loaded is not None:
        trainer.checkpointer.load = load_then_save
    try:
        trainer.train()
    finally:
        trainer.close()
    return losses, trainer.state_dict()


def train_in_plain_torch(url, steps, saved):
    """Resumes from torchtitan's checkpoint, of which the model alone is torchtitan's; saves. Returns the losses."""
    config = config_of("", steps)
    windows = importlib.import_module("integrations.torchtitan_windows").Windows(config.training.seq_len)
    settings = config.model_spec.model
    settings.update_from_config(config=config)
    model = settings.build()
    model.init_weights(buffer_device=None)
    optimizer = shardopt.keyed(
        "adamw", model.named_parameters(), weight_decay=0.1, groups=[{"match": "norm", "weight_decay": 0.0}]
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # as torchtitan's has one: it adds an option
    sampler = shardopt.ResumableSampler(len(windows), batch_size=config.training.global_batch_size)
    app = {"model": model, "optimizer": optimizer, "dataloader": sampler}
    checkpoint.load(url, app, init_state=True, strict=checkpoint.Strictness(unexpected="ignore"))
    losses = []
    for batch in sampler.through(torch.utils.data.DataLoader(windows, batch_sampler=sampler)):
        inputs, labels = batch
        logits = model(inputs["input"], positions=inputs["positions"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        losses.append(loss.item())
        if len(losses) > steps:
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(saved, {"model": model, "optimizer": optimizer, "dataloader": sampler})
    return losses
