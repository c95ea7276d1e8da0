"""Trains a language model on a file of tokens: FSDP2, bf16, accumulation, warm-up and cosine, averages, the best kept.

    torchrun --standalone --nproc-per-node 2 examples/language_model.py configs/language_model.toml
    torchrun --standalone --nproc-per-node 3 examples/language_model.py configs/language_model.toml --resume

The file has uint16 tokens, one after another (tokenise.py). A resumed run begins at the sample that follows.
A comment such as `docs/recipes/fsdp2.md` names the page that explains the lines below it.
"""

import os
from itertools import chain, count

import torch
import torch.distributed as dist
from lm import Transformer
from program import Table, launch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset

import shardopt
from shardopt import checkpoint


class DataConfig(Table):
    tokens: str
    context: PositiveInt
    batch: PositiveInt
    accumulate: PositiveInt
    validate_batches: PositiveInt


class ModelConfig(Table):
    vocabulary: PositiveInt
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt


class OptimizerConfig(Table):
    lr: PositiveFloat
    warmup_steps: PositiveInt


class Config(Table):
    out: str
    seed: int
    steps: PositiveInt
    save_every: PositiveInt
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig


class Samples(Dataset[Tensor]):
    """Pieces of `context` + 1 tokens that follow one another: the inputs, and one later the targets. int64."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, number: int) -> Tensor:
        begin = number * self.context
        return self.tokens[begin : begin + self.context + 1].long()


def loss_of(model: nn.Module, samples: Tensor, device: torch.device) -> Tensor:
    """Returns the sum of the losses of all targets, fp32."""
    logits = model(samples[:, :-1].to(device)).float()
    return cross_entropy(logits.flatten(0, 1), samples[:, 1:].to(device).flatten(), reduction="sum")


@torch.no_grad()
def validate(model: nn.Module, samples: Samples, batch: int, device: torch.device) -> float:
    """Returns the mean loss over all whole batches. Collective: each rank takes its share of each."""
    total, begins = torch.zeros((), device=device), range(0, len(samples) - batch + 1, batch)
    for begin in begins:
        share = range(begin + dist.get_rank(), begin + batch, dist.get_world_size())
        total += loss_of(model, torch.stack([samples[number] for number in share]), device)
    dist.all_reduce(total)
    return float(total) / (len(begins) * batch * samples.context)


def train(config: Config, device: torch.device, resume: bool) -> None:
    """Trains until `config.steps` steps are done. Every rank calls it, in an initialized process group."""
    ranks, context, batch = dist.get_world_size(), config.data.context, config.data.batch
    targets = config.data.accumulate * batch * context  # of a step
    file, lr, warmup_steps = config.data.tokens, config.optimizer.lr, config.optimizer.warmup_steps
    tokens = torch.from_file(file, size=os.path.getsize(file) // 2, dtype=torch.uint16)  # mapped
    cut = len(tokens) - config.data.validate_batches * batch * context - 1  # the last batches validate
    training, validation = Samples(tokens[:cut], context), Samples(tokens[cut:], context)
    # A batch of it is a micro-batch, of all ranks together.
    data = shardopt.ResumableSampler(len(training), batch_size=batch, seed=config.seed)
    loader = DataLoader(training, batch_sampler=data)
    micro_batches = chain.from_iterable(data.through(loader) for _ in count())  # epoch after epoch

    torch.manual_seed(config.seed)  # the same weights on any number of ranks
    model = Transformer(context=context, **config.model.model_dump()).to(device)
    # docs/recipes/bf16.md
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # docs/recipes/fsdp2.md
    mesh = init_device_mesh(device.type, (ranks,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    assert isinstance(model, FSDPModule)
    no_decay = {"match": r"norm|bias", "weight_decay": 0.0}
    keyed = shardopt.keyed("adamw", model.named_parameters(), lr=lr, groups=[no_decay])
    optimizer = shardopt.GradientClippingOptimizer(keyed, "norm", max_gradient=1.0)
    # docs/recipes/ema.md
    averages = shardopt.EMA(model, decay=shardopt.optim.ramped_decay(0.999))
    averages.attach(optimizer)
    # docs/recipes/schedules.md
    warm_up = LinearLR(optimizer, start_factor=0.01, total_iters=warmup_steps)
    cosine = CosineAnnealingLR(optimizer, config.steps - warmup_steps, eta_min=lr / 10)
    schedule = SequentialLR(optimizer, [warm_up, cosine], [warmup_steps])
    app = {"model": model, "optimizer": optimizer, "averages": averages, "schedule": schedule, "data": data, "step": 0}
    keep = checkpoint.Retention(last=2, best=("validation", "min", 1))
    manager = checkpoint.Manager(f"{config.out}/checkpoints", every=config.save_every, keep=keep, stage="lazy")
    if resume:
        manager.restore(app)
    elif manager.latest_step is not None:
        raise SystemExit(f"{config.out}: found checkpoints; required none: add --resume, or choose another --out")
    with manager:
        while app["step"] < config.steps:
            total = torch.zeros((), device=device)
            # docs/recipes/accumulation.md
            for number in range(config.data.accumulate):
                model.set_requires_gradient_sync(number == config.data.accumulate - 1)
                # fully_shard takes the mean over ranks: so this is the mean of the whole batch, on any number of them.
                share = loss_of(model, next(micro_batches), device) / targets
                (share * ranks).backward()
                total += share.detach()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            app["step"] += 1
            metrics = {}
            if manager.should_save(app["step"]):
                dist.all_reduce(total)
                with averages.swap():
                    metrics = {"loss": float(total), "validation": validate(model, validation, batch, device)}
                if dist.get_rank() == 0:
                    print(f"step {app['step']}: loss {metrics['loss']:.4f}, validation {metrics['validation']:.4f}")
            manager.save(app["step"], app, metrics=metrics)


if __name__ == "__main__":
    launch(train, Config, __doc__)
