"""The tensors that averages are computed of: their names, copies, and order in an update."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardopt.errors import Problem, StateError
from shardopt.optim.state_dict.groups import refuse_flattened
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.sharding.gradients import is_added_up
from shardopt.state.names import before_all, names_alike, plain_name, plain_names_in
from shardopt.state.param_groups import AVERAGING, N_AVERAGED
from shardopt.state.paths import STATE

SCRATCH_BYTES = 64 << 20  # converted weights that an update holds at a time

Pair = tuple[Tensor, Tensor]


def by_plain_name(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns tensors of a model by plain names; skips frozen ones made of codes and scales."""
    by_name = {name: tensor for name, tensor in named if is_added_up(tensor)}
    return {plain: by_name[name] for name, plain in _plain_names(model, by_name).items()}


def by_own_names(state: Any, own: Collection[str]) -> Any:
    """Returns state with own names where its names differ only by wrappers' parts, as in early checkpoints."""
    if not isinstance(state, Mapping) or all(name in state for name in own):
        return state
    alike = names_alike([name for name in state if isinstance(name, str)], own)
    return {alike.get(name, name): each for name, each in state.items()}


def refuse_uncounted(plan: LoadPlan, own: Mapping[str, Any], offered: Any) -> Any:
    """Notes a problem if averages come without a count to those without updates: the next one would overwrite them.

    Args:
        own: the state of the averages.
        offered: that to load. Averages that stay have their own tensors in it, or none; in a description those that
            are loaded are on the meta device.

    Returns:
        What is offered; with the count that is here if there is a problem.
    """
    count = own[AVERAGING][N_AVERAGED]
    if count or not isinstance(offered, Mapping):
        return offered
    counted = offered.get(AVERAGING)
    number = counted.get(N_AVERAGED) if isinstance(counted, Mapping) else counted
    stays = plan.descriptions and number is count
    if number is not None and not stays:
        return offered
    entries = [entry for name, entry in offered.items() if name in own and name != AVERAGING]
    tensors = [tensor for entry in entries if isinstance(entry, Mapping) for tensor in entry.values()]
    if not any(not stays or (isinstance(tensor, Tensor) and tensor.is_meta) for tensor in tensors):
        return offered
    plan.problem(
        plan.seen_as(f"{STATE}.{AVERAGING}.{N_AVERAGED}"),
        "averages without their number of updates",
        "that number, as the first update would overwrite them with the weights",
        f"with select=, choose the key that ends in {STATE}.{AVERAGING}.{N_AVERAGED} too, with them or before; if the "
        "checkpoint has none, call update() once before the load, so that they count as those of one update, and let "
        "the number be "
        'missing: strict=False, or Strictness(missing="ignore") for a checkpoint',
    )
    return {**offered, AVERAGING: own[AVERAGING]}


def names_of_averages(model: nn.Module, names: Iterable[str], averaged: Collection[str]) -> dict[str, str]:
    """Maps names in torch's `AveragedModel` over such a model to plain ones, of what is averaged or not in the model.

    The rest is a copy of the model's: buffers, unless they are averaged, and further names of tied weights.

    Args:
        names: as in its `state_dict()`, "n_averaged" and "module.…".
        averaged: the plain names of what is averaged.
    """
    own = {name: plain_name(name.removeprefix("module.")) for name in names if name != N_AVERAGED}
    in_model = {*_plain_names(model, model.state_dict(keep_vars=True)).values()}
    alike = names_alike(own.values(), in_model)
    own = {name: alike.get(short, short) for name, short in own.items()}
    return {name: short for name, short in own.items() if short in averaged or short not in in_model}


def _plain_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Maps names in a model to those without wrappers' parts, and without a "module." that all begin with."""
    plain = plain_names_in(model, names)
    before = before_all([plain.get(name, name) for name in names])
    return {name: plain.get(name, name).removeprefix(before) for name in names}


def copied(local: Tensor, dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    """Copies a local tensor to `device` and, if it is real and floating-point, to `dtype`."""
    wanted = dtype if dtype is not None and local.is_floating_point() else local.dtype
    return local.detach().to(device=device or local.device, dtype=wanted, copy=True)


def refuse_other_shapes(name: str, tensors: Sequence[Tensor], before: Sequence[Tensor], when: str) -> None:
    """Raises StateError if local tensors have changed their sizes."""
    current, required = [tuple(local.shape) for local in tensors], [tuple(local.shape) for local in before]
    if current != required:
        remedy = "make the averages after the model is complete and sharded, and keep its tensors"
        problem = Problem(name, f"local shapes {current}", f"{required}, as {when}", remedy)
        raise StateError("a tensor has changed under its average", [problem], code="averages")


def refuse_unaveraged(params: Mapping[str, Tensor]) -> None:
    """Raises an error for parameters that are flattened, or of torchrec's this rank's rows: averages would be, too."""
    refuse_flattened(params)
    sliced = next((name for name, each in params.items() if _is_slice(each)), None)
    if sliced is not None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        found = "a table of torchrec's DistributedModelParallel, of which it gives this rank's rows as a parameter"
        remedy = "make averages of the dense modules, each by itself, as EMA(model.over)"
        problem = Problem(sliced, found, "a tensor that says of which rows it is", remedy)
        raise StateError("averages cannot be made", [problem], code="averages")


def _is_slice(tensor: Tensor) -> bool:
    kind = type(tensor)
    return kind.__name__ == "TableBatchedEmbeddingSlice" and kind.__module__.startswith("torchrec.")


def buckets(pairs: Iterable[Pair]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Groups averages and weights by device and dtype, one group per multi-tensor operation.

    Where weights have to be converted a bucket ends at `SCRATCH_BYTES` of them, or with the weight that exceeds it.
    """
    found: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    scratch_bytes = 0
    for average, weight in pairs:
        key = average.device, average.dtype, weight.device, weight.dtype
        averages, weights = found.setdefault(key, ([], []))
        averages.append(average)
        weights.append(weight)
        if (average.device, average.dtype) != (weight.device, weight.dtype):
            scratch_bytes += average.numel() * average.element_size()
            if scratch_bytes > SCRATCH_BYTES:
                yield found.pop(key)
                scratch_bytes = 0
    yield from found.values()
