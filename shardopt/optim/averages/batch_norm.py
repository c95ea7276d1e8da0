"""Computes batch-norm statistics for weights that were not trained with, such as averages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import swa_utils

from shardopt.optim.averages.averaging import Averaging
from shardopt.ranks import ranks_of
from shardopt.runtime.torch_gradients import BatchNorm


def update_bn(
    loader: Iterable[Any],
    model: nn.Module | Averaging,
    device: int | torch.device | None = None,
    process_group: ProcessGroup | None = None,
) -> None:
    """Recomputes the running statistics of all batch-norm layers, over the batches of all ranks. Collective.

    As torch's `update_bn`, whose arguments it has: means over batches of the batches' means and variances. Each rank
    passes its own batches through the model. One all-reduce then gives all ranks the mean of their statistics, weighted
    by numbers of batches; since these are equal, they may be saved. With one rank it is torch's, bit for bit. Where the
    forward is collective (`fully_shard`), ranks must have equal numbers of batches.

    To be called while averages stand in the model (`swap()`); they take the statistics with them when they leave.

    Args:
        loader: this rank's batches; of a tuple or list the first element is used.
        model: in which every rank has the same layers; or averages (`EMA`, `SWA`) that stand in theirs.
        device: to which batches are moved first.
        process_group: the ranks that share the layers; default: all.

    Raises:
        StateError: averages that do not stand in their model: the statistics would be those of its own weights.
    """
    if isinstance(model, Averaging):
        if not model.swapped:
            model.modules()
        model = model.module
    swa_utils.update_bn(loader, model, device)
    ranks = ranks_of(process_group)
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm) and layer.track_running_stats]
    if ranks.size == 1 or not layers:
        return
    there = ranks.device_beside(_batches(layers[0]).device)
    with torch.no_grad():
        # fp64: the sum of equal statistics is then exact, and so is the mean.
        own = [
            torch.cat([statistic.to(there, torch.float64).flatten() for statistic in _statistics(layer)])
            for layer in layers
        ]
        counts = torch.stack([_batches(layer).to(there, torch.float64) for layer in layers])
        weighted = [statistic * count for statistic, count in zip(own, counts, strict=True)]
        total = ranks.all_reduce_sum(torch.cat([counts, *weighted]))
        summed = total[len(layers) :].split_with_sizes([statistic.numel() for statistic in own])
        for layer, of_layer, count in zip(layers, summed, total[: len(layers)], strict=True):
            mean, variance = (of_layer / count.clamp(min=1)).chunk(2)
            for into, value in zip(_statistics(layer), (mean, variance), strict=True):
                into.copy_(value)
            _batches(layer).copy_(count)


def _statistics(layer: BatchNorm) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None and layer.running_var is not None  # it tracks them
    return layer.running_mean, layer.running_var


def _batches(layer: BatchNorm) -> Tensor:
    assert layer.num_batches_tracked is not None  # it tracks them
    return layer.num_batches_tracked
