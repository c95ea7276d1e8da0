"""The specs of the algorithms that are registered on import: torch.optim's, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter, lt
from typing import Any

import torch
from torch.optim import Optimizer

from shardopt.algorithms.adafactor import Adafactor, unsuitable_for_adafactor
from shardopt.algorithms.blocked.optimizer import MOST_DIMENSIONS, unsuitable_for_blocks
from shardopt.algorithms.blocked.shampoo import Shampoo
from shardopt.algorithms.blocked.soap import SOAP
from shardopt.algorithms.communicating import uncovered
from shardopt.algorithms.elementwise.ademamix import AdEMAMix
from shardopt.algorithms.elementwise.lion import Lion
from shardopt.algorithms.elementwise.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from shardopt.algorithms.layer_wise.base import unsuitable_for_norms
from shardopt.algorithms.layer_wise.lamb import LAMB
from shardopt.algorithms.layer_wise.lars import LARS
from shardopt.algorithms.lbfgs.lbfgs import LBFGS
from shardopt.algorithms.muon.muon import Muon, unsuitable_for_muon
from shardopt.algorithms.registry import (
    AlgorithmSpec,
    AtFirstStep,
    Dtype,
    Kind,
    Options,
    StateEntry,
    StepsOn,
    register,
)
from shardopt.algorithms.row_wise.row_wise import RowWiseAdagrad, RowWiseAdam, unsuitable_for_row_wise
from shardopt.algorithms.sparse_adam import SparseAdam
from shardopt.sharding.pieces import View


def _like(name: str, **more: Any) -> StateEntry:
    return StateEntry(name, Kind.PARAMETER, **more)


def _positive(name: str, **more: Any) -> StateEntry:
    return _like(name, signed=False, **more)


def _scalar(name: str, initial: float | AtFirstStep = 0.0) -> StateEntry:
    return StateEntry(name, Kind.SCALAR, Dtype.COUNTER, initial)


def _moments(name: str, **more: Any) -> StateEntry:
    return StateEntry(name, Kind.TABLE_ROWS, Dtype.AT_LEAST_SINGLE, **more)


def _blocks(name: str, **more: Any) -> StateEntry:
    return StateEntry(name, Kind.BLOCKS, Dtype.AT_LEAST_SINGLE, **more)


def _elementwise(optimizer: type[Optimizer], *state: StateEntry, **more: Any) -> AlgorithmSpec:
    """Returns the spec of an elementwise algorithm, named as its class."""
    return AlgorithmSpec(optimizer, optimizer.__name__, elementwise=True, state=state, **more)


def _communicating(
    optimizer: type[Optimizer], unsuitable: Callable[[View], str], *state: StateEntry, **more: Any
) -> AlgorithmSpec:
    """Returns the spec of an algorithm that steps on the parameters themselves, named as its class."""
    more |= {"steps_on": StepsOn.PARAMETERS, "unsuitable": unsuitable}
    return AlgorithmSpec(optimizer, optimizer.__name__, elementwise=False, state=state, **more)


def _factors(*prefixes: str) -> tuple[StateEntry, ...]:
    """The factors of each dimension, as far as a parameter has so many."""
    return tuple(
        _blocks(f"{prefix}_{dim}", suits=partial(lt, dim)) for prefix in prefixes for dim in range(MOST_DIMENSIONS)
    )


def _has_average(options: Options) -> bool:
    return bool(options["betas"][0] != 0)


def _not_centered(options: Options) -> bool:
    return not options["centered"]


def _never(options: Options) -> bool:
    return False


def _is_matrix(dimensions: int) -> bool:
    return dimensions > 1


def _is_vector(dimensions: int) -> bool:
    return dimensions < 2


# float16 is in neither: for-loops overflow in it, and fused implementations do not.
_EXACT = (torch.float64, torch.float32)
_WITH_BF16 = (*_EXACT, torch.bfloat16)
_STEP = _scalar("step")
_MOMENTS = (_STEP, _like("exp_avg"), _positive("exp_avg_sq"))
_ADAM = (*_MOMENTS, _positive("max_exp_avg_sq", exists=itemgetter("amsgrad"), maximum=True))
_MOMENTUM = _like("momentum_buffer", exists=itemgetter("momentum"))
_NORMS = "its rates follow from norms of whole parameters, and a shard has only its own"
_ROWS = "its moments are means over rows, and a shard may have only some elements of a row"
_LR = AtFirstStep.LEARNING_RATE
_AVERAGED = (
    _STEP,
    *(StateEntry(name, Kind.SCALAR, Dtype.WIDE) for name in ("weight_sum", "lr_max")),
)
_BASE = _like("z", initial=AtFirstStep.PARAMETER, narrows=_never)

for _spec in (
    _elementwise(
        torch.optim.Adadelta,
        *(_STEP, _positive("square_avg"), _positive("acc_delta")),
        compounds=True,  # the mean of updates, which are multiples of its own root
    ),
    _elementwise(
        torch.optim.Adagrad,
        *(_STEP, _positive("sum", initial="initial_accumulator_value")),
        state_at_construction=True,
        takes_sparse=True,
        fused_agrees=_WITH_BF16,
    ),
    _elementwise(torch.optim.Adam, *_ADAM, fused_agrees=_WITH_BF16),
    _elementwise(torch.optim.AdamW, *_ADAM, fused_agrees=_WITH_BF16),
    _elementwise(AdEMAMix, *_MOMENTS, _like("exp_avg_slow")),
    _elementwise(torch.optim.Adamax, _STEP, _like("exp_avg"), _positive("exp_inf")),
    _elementwise(torch.optim.ASGD, _STEP, _scalar("eta", _LR), _scalar("mu", 1.0), _like("ax", narrows=_never)),
    _elementwise(torch.optim.NAdam, _STEP, _scalar("mu_product", 1.0), _like("exp_avg"), _positive("exp_avg_sq")),
    _elementwise(torch.optim.RAdam, *_MOMENTS),
    _elementwise(
        torch.optim.RMSprop,
        _STEP,
        _positive("square_avg", narrows=_not_centered),
        _MOMENTUM,
        _like("grad_avg", exists=itemgetter("centered"), narrows=_never),
    ),
    _elementwise(torch.optim.Rprop, _STEP, _like("prev"), _positive("step_size", initial=_LR)),
    _elementwise(
        torch.optim.SGD,
        replace(_MOMENTUM, initial=AtFirstStep.GRADIENT),
        takes_sparse=True,
        fused_agrees=_EXACT,
        fused_astray=(torch.bfloat16, torch.float16),  # it is off by more than the size of a step
    ),
    _communicating(
        Adafactor,
        unsuitable_for_adafactor,
        _STEP,
        StateEntry("row_var", Kind.ROWS, suits=_is_matrix),
        StateEntry("col_var", Kind.COLUMNS, suits=_is_matrix),
        _like("variance", suits=_is_vector),
        why_not="it divides by means over rows, columns and whole parameters, and a shard has only its own",
        stands_for=torch.optim.Adafactor,
    ),
    _communicating(LAMB, unsuitable_for_norms, *_MOMENTS, why_not=_NORMS),
    _communicating(LARS, unsuitable_for_norms, _MOMENTUM, why_not=_NORMS),
    _communicating(
        LBFGS,
        uncovered,
        *(_like("d"), _like("prev_flat_grad")),
        *(StateEntry(name, Kind.HISTORY) for name in ("old_dirs", "old_stps")),
        *(StateEntry(name, Kind.GLOBAL, Dtype.COUNT) for name in ("func_evals", "n_iter", "pairs", "next")),
        *(StateEntry(name, Kind.GLOBAL, Dtype.WIDE) for name in ("t", "H_diag", "prev_loss", "s_dot_y", "y_dot_y")),
        needs_closure=True,
        stands_for=torch.optim.LBFGS,
    ),
    _elementwise(Lion, _like("exp_avg")),
    _communicating(
        Muon,
        unsuitable_for_muon,
        _like("momentum_buffer"),
        stands_for=torch.optim.Muon,
        later_options=frozenset(["split", "ns_dtype"]),  # which torch's has not
    ),
    _communicating(
        RowWiseAdagrad,
        unsuitable_for_row_wise,
        *(_STEP, _moments("sum", initial="initial_accumulator_value")),
        why_not=_ROWS,
        takes_sparse=True,
    ),
    _communicating(
        RowWiseAdam,
        unsuitable_for_row_wise,
        *(_STEP, _like("exp_avg"), _moments("exp_avg_sq")),
        why_not=_ROWS,
        takes_sparse=True,
    ),
    _elementwise(ScheduleFreeAdamW, *_AVERAGED, _positive("exp_avg_sq"), _BASE),
    _elementwise(ScheduleFreeSGD, *_AVERAGED, _BASE),
    _communicating(
        Shampoo,
        unsuitable_for_blocks,
        _STEP,
        _blocks("exp_avg", exists=_has_average),
        _blocks("exp_avg_sq", exists=itemgetter("graft")),
        *_factors("preconditioner", "root"),
    ),
    _communicating(SOAP, unsuitable_for_blocks, _STEP, _blocks("exp_avg"), _blocks("exp_avg_sq"), *_factors("GG", "Q")),
    _elementwise(
        SparseAdam,
        StateEntry("step", Kind.SCALAR, Dtype.PLAIN_COUNT),
        *(_like("exp_avg"), _positive("exp_avg_sq")),
        takes_sparse=True,
        takes_dense=False,
        stands_for=torch.optim.SparseAdam,
    ),
):
    register(_spec)
