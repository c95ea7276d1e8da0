"""Trains a small mixture of experts with pipeline, expert and data parallelism, each rank holding what no other does.

    torchrun --nproc-per-node 8 examples/train_moe.py configs/moe.toml --set split.pipeline=2 split.experts=2
    torchrun --nproc-per-node 4 examples/train_moe.py configs/moe.toml --resume --set split.pipeline=4

The second goes on where the first was stopped: layers have moved between stages, experts between ranks, and optimizer
state with them. Every loss is that of one rank that does it all.
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from common import Windows, learning_rate_factor, log_loss
from lm import BYTES
from moe import TIED, MixtureOfExperts
from program import Table, launch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from train_lm import OptimizerConfig, ScheduleConfig

import shardopt
from shardopt import checkpoint


class SplitConfig(Table):
    pipeline: PositiveInt
    experts: PositiveInt


class CheckpointConfig(Table):
    every: PositiveInt
    keep: PositiveInt


class DataConfig(Table):
    corpus: str
    batch: PositiveInt
    micro_batches: PositiveInt
    context: PositiveInt


class ModelConfig(Table):
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    experts: PositiveInt
    chosen: PositiveInt
    hidden: PositiveInt


class ExpertsConfig(Table):
    lr: PositiveFloat


class ClippingConfig(Table):
    max_gradient: PositiveFloat


class Config(Table):
    out: str
    seed: int
    steps: PositiveInt
    split: SplitConfig
    checkpoints: CheckpointConfig
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    experts: ExpertsConfig
    clipping: ClippingConfig
    schedule: ScheduleConfig


def make_meshes(device: torch.device, config: Config) -> tuple[DeviceMesh, DeviceMesh]:
    """Returns all ranks as (pipeline, data), and once more as (pipeline, replica, expert), where "data" is cut in two.

    Ranks of one stage have each their part of the batch, and share the layers among all of them. An expert is shared
    by the ranks along "replica" only; those along "expert" have other ones. Collective; ends the program where the
    ranks cannot be split so.
    """
    ranks, stages, expert_ranks = dist.get_world_size(), config.split.pipeline, config.split.experts
    parts = ranks // stages
    for whole, divisor, what in (
        (ranks, stages * expert_ranks, "ranks"),
        (config.data.batch, parts * config.data.micro_batches, "windows of a batch"),
        (config.model.experts, expert_ranks, "experts"),
    ):
        if whole % divisor:
            raise SystemExit(f"{whole} {what} cannot be split: {divisor} has to divide them")
    return (
        init_device_mesh(device.type, (stages, parts), mesh_dim_names=("pipeline", "data")),
        init_device_mesh(
            device.type,
            (stages, parts // expert_ranks, expert_ranks),
            mesh_dim_names=("pipeline", "replica", "expert"),
        ),
    )


def shard(model: MixtureOfExperts, layers: DeviceMesh, experts: DeviceMesh) -> None:
    """Shards a stage in place; its gradients are added up over the batch, and not averaged."""
    for block in model.blocks.values():
        block.experts.spread(experts["expert"])
        fully_shard(block.experts, mesh=experts["replica"], reshard_after_forward=False)
        fully_shard(block, mesh=layers["data"], reshard_after_forward=False)
    fully_shard(model, mesh=layers["data"], reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide within a reduction


def group_of_ends(layers: DeviceMesh) -> ProcessGroup | None:
    """Makes groups of two: those ranks of the first and the last stage that have the same part. None within others."""
    if layers.shape[0] == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(layers.mesh[[0, -1]].T.tolist())
    return group


def add_up_tied(model: MixtureOfExperts, ends: ProcessGroup | None) -> None:
    """Adds the gradients of the head to those of the bytes, so that both stages take the same step."""
    tied = model.byte or model.head
    if ends is not None and tied is not None:
        dist.all_reduce(tied.weight.grad.to_local(), group=ends)


def train(config: Config, device: torch.device, resume: bool) -> None:
    """Trains until `config.steps` steps are done. Every rank calls it, in an initialized process group."""
    steps, batch, micro_batches = config.steps, config.data.batch, config.data.micro_batches
    layers, experts = make_meshes(device, config)
    (stages, parts), (stage, part) = layers.shape, layers.get_coordinate()
    windows = Windows(config.data.corpus, config.data.context)
    # All stages go through the same windows; the order follows from the seed, and not from the number of ranks.
    data = shardopt.ResumableSampler(len(windows), batch_size=batch, seed=config.seed, rank=part, ranks=parts)
    loader = DataLoader(windows, batch_sampler=data)

    torch.manual_seed(config.seed)  # drawn whole, then cut: the same weights on any number of ranks
    model = MixtureOfExperts(context=windows.context, **config.model.model_dump()).to(device)
    model.keep_stage(stage, stages)
    shard(model, layers, experts)
    ends = group_of_ends(layers)

    tokens = torch.empty(batch // parts // micro_batches, windows.context, dtype=torch.int64, device="meta")
    hidden = torch.empty(*tokens.shape, config.model.width, device="meta", requires_grad=True)
    logits = torch.empty(*tokens.shape, BYTES, device="meta", requires_grad=True)
    pipeline_stage = PipelineStage(
        model,
        stage,
        stages,
        device,
        input_args=hidden if stage else tokens,
        output_args=hidden if stage < stages - 1 else logits,
        group=layers["pipeline"].get_group(),
    )

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        """This rank's addend of the mean over the global batch."""
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.sum(dtype=torch.float64) / (batch * windows.context)

    pipeline = Schedule1F1B(pipeline_stage, micro_batches, loss_fn=loss_of, scale_grads=False)

    # Each rank gives the parameters that it has. A pattern may match nothing here: it has to on some rank.
    groups = [{"match": r"norm|bias|gate", "weight_decay": 0.0}, {"match": r"\.experts\.", "lr": config.experts.lr}]
    keyed = shardopt.keyed("adamw", model.named_parameters(), groups=groups, tied=TIED, **config.optimizer.model_dump())
    optimizer = shardopt.GradientClippingOptimizer(keyed, "norm", max_gradient=config.clipping.max_gradient)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, config.schedule.warmup_steps))

    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    app = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data, "step": 0}
    manager = checkpoint.Manager(
        out / "checkpoints",
        stage="lazy",
        stop_on=signal.SIGTERM,
        options=checkpoint.SaveOptions(tied=TIED),
        **config.checkpoints.model_dump(),
    )
    if resume:
        manager.restore(app)
    elif manager.latest_step is not None:
        raise SystemExit(f"{config.out}: found checkpoints; required none: add --resume, or choose another --out")

    while app["step"] < steps:
        for inputs, targets in data.through(loader):
            losses: list[Tensor] = []  # of the micro-batches, on the last stage
            pipeline.step(
                *([inputs.to(device)] if pipeline_stage.is_first else []),
                target=targets.to(device) if pipeline_stage.is_last else None,
                losses=losses,
                return_outputs=False,
            )
            add_up_tied(model, ends)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            app["step"] += 1

            share = sum((loss.detach() for loss in losses), torch.zeros((), dtype=torch.float64, device=device))
            log_loss(out, app["step"], share)
            manager.save(app["step"], app, force=app["step"] == steps)
            if app["step"] == steps:
                break
    manager.close()


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products on GPUs need it for the next line
    torch.use_deterministic_algorithms(True)
    launch(train, Config, __doc__)
