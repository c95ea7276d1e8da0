"""Train a language model on a file of tokens: FSDP2, bf16, accumulation, warm-up and cosine, averages, the best kept.

    torchrun --standalone --nproc-per-node 2 examples/language_model.py tokens.bin --vocabulary 256 --steps 200

The file has uint16 tokens, one after another (tokenise.py). Run it again with any number of ranks: it resumes from the
newest committed checkpoint, at the sample that follows.
"""

import argparse
import os
from itertools import chain, count

import torch
import torch.distributed as dist
from common import join_job
from lm import Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset

import shardopt
from shardopt import checkpoint


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


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Trains until `options.steps` are done. Every rank calls it, in an initialized process group."""
    ranks, context, batch = dist.get_world_size(), options.context, options.batch
    tokens = torch.from_file(options.tokens, size=os.path.getsize(options.tokens) // 2, dtype=torch.uint16)  # mapped
    cut = len(tokens) - options.validate * batch * context - 1  # the last batches validate
    training, validation = Samples(tokens[:cut], context), Samples(tokens[cut:], context)
    data = shardopt.ResumableSampler(len(training), batch_size=batch, seed=1)  # a micro-batch of all ranks together
    loader = DataLoader(training, batch_sampler=data)
    micro_batches = chain.from_iterable(data.through(loader) for _ in count())  # epoch after epoch

    torch.manual_seed(1)  # the same weights on any number of ranks
    model = Transformer(options.layers, options.width, options.width // 32, context, options.vocabulary).to(device)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (ranks,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    assert isinstance(model, FSDPModule)
    no_decay = {"match": r"norm|bias", "weight_decay": 0.0}
    keyed = shardopt.keyed("adamw", model.named_parameters(), lr=options.lr, groups=[no_decay])
    optimizer = shardopt.GradientClippingOptimizer(keyed, "norm", max_gradient=1.0)
    averages = shardopt.EMA(model, decay=shardopt.optim.ramped_decay(0.999))
    averages.attach(optimizer)
    warm_up = LinearLR(optimizer, start_factor=0.01, total_iters=options.warm_up)
    cosine = CosineAnnealingLR(optimizer, options.steps - options.warm_up, eta_min=options.lr / 10)
    schedule = SequentialLR(optimizer, [warm_up, cosine], [options.warm_up])
    app = {"model": model, "optimizer": optimizer, "averages": averages, "schedule": schedule, "data": data, "step": 0}
    keep = checkpoint.Retention(last=2, best=("validation", "min", 1))
    with checkpoint.Manager(options.out, every=options.every, keep=keep, stage="lazy") as manager:
        manager.restore(app)
        while app["step"] < options.steps:
            total = torch.zeros((), device=device)
            for number in range(options.accumulate):
                model.set_requires_gradient_sync(number == options.accumulate - 1)
                # fully_shard takes the mean over ranks: so this is the mean of the whole batch, on any number of them.
                share = loss_of(model, next(micro_batches), device) / (options.accumulate * batch * context)
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
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", help="a file of uint16 tokens")
    parser.add_argument("--out", default="out/language-model", help="where checkpoints go; any URL")
    numbers = {"vocabulary": 50304, "steps": 1000, "warm-up": 100, "every": 100, "batch": 16, "accumulate": 4}
    for name, default in (numbers | {"validate": 20, "context": 256, "layers": 6, "width": 384}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate")
    train(parser.parse_args(), join_job())
    dist.barrier()  # a rank that leaves while another still talks to it aborts that one
    dist.destroy_process_group()
