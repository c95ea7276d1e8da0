"""The algorithms that are registered from the start: torch.optim's, and ours."""

from __future__ import annotations

from functools import partial
from operator import lt
from typing import Any

import torch

from shardopt.algorithms.adafactor import Adafactor, unsuitable_for_adafactor
from shardopt.algorithms.blocked.optimizer import MOST_DIMENSIONS, unsuitable_for_blocks
from shardopt.algorithms.blocked.shampoo import Shampoo
from shardopt.algorithms.blocked.soap import SOAP
from shardopt.algorithms.elementwise.ademamix import AdEMAMix
from shardopt.algorithms.elementwise.lion import Lion
from shardopt.algorithms.elementwise.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from shardopt.algorithms.layer_wise.base import unsuitable_for_norms
from shardopt.algorithms.layer_wise.lamb import LAMB
from shardopt.algorithms.layer_wise.lars import LARS
from shardopt.algorithms.lbfgs.lbfgs import LBFGS, unsuitable_for_lbfgs
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


def _factors(*prefixes: str) -> tuple[StateEntry, ...]:
    """The factors of each dimension, as far as a parameter has so many."""
    return tuple(
        _blocks(f"{prefix}_{dim}", suits=partial(lt, dim)) for prefix in prefixes for dim in range(MOST_DIMENSIONS)
    )


def _amsgrad(options: Options) -> bool:
    return bool(options["amsgrad"])


def _has_momentum(options: Options) -> bool:
    return bool(options["momentum"] != 0)


def _has_average(options: Options) -> bool:
    return bool(options["betas"][0] != 0)


def _is_grafted(options: Options) -> bool:
    return options["graft"] is not None


def _positive_momentum(options: Options) -> bool:
    return bool(options["momentum"] > 0)


def _centered(options: Options) -> bool:
    return bool(options["centered"])


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
_ADAM = (_STEP, _like("exp_avg"), _positive("exp_avg_sq"), _positive("max_exp_avg_sq", exists=_amsgrad, maximum=True))
_LR = AtFirstStep.LEARNING_RATE
_AVERAGED = (
    _STEP,
    *(StateEntry(name, Kind.SCALAR, Dtype.WIDE) for name in ("weight_sum", "lr_max")),
)
_NORMS = "its rates follow from norms of whole parameters, and a shard has only its own"
_BASE = _like("z", initial=AtFirstStep.PARAMETER, narrows=_never)

for _spec in (
    AlgorithmSpec(
        torch.optim.Adadelta,
        "Adadelta",
        True,
        (_STEP, _positive("square_avg"), _positive("acc_delta")),
        compounds=True,  # the mean of updates, which are multiples of its own root
    ),
    AlgorithmSpec(
        torch.optim.Adagrad,
        "Adagrad",
        True,
        (_STEP, _positive("sum", initial="initial_accumulator_value")),
        state_at_construction=True,
        takes_sparse=True,
        fused_agrees=_WITH_BF16,
    ),
    AlgorithmSpec(torch.optim.Adam, "Adam", True, _ADAM, fused_agrees=_WITH_BF16),
    AlgorithmSpec(torch.optim.AdamW, "AdamW", True, _ADAM, fused_agrees=_WITH_BF16),
    AlgorithmSpec(
        AdEMAMix, "AdEMAMix", True, (_STEP, _like("exp_avg"), _positive("exp_avg_sq"), _like("exp_avg_slow"))
    ),
    AlgorithmSpec(torch.optim.Adamax, "Adamax", True, (_STEP, _like("exp_avg"), _positive("exp_inf"))),
    AlgorithmSpec(
        torch.optim.ASGD, "ASGD", True, (_STEP, _scalar("eta", _LR), _scalar("mu", 1.0), _like("ax", narrows=_never))
    ),
    AlgorithmSpec(
        torch.optim.NAdam, "NAdam", True, (_STEP, _scalar("mu_product", 1.0), _like("exp_avg"), _positive("exp_avg_sq"))
    ),
    AlgorithmSpec(torch.optim.RAdam, "RAdam", True, (_STEP, _like("exp_avg"), _positive("exp_avg_sq"))),
    AlgorithmSpec(
        torch.optim.RMSprop,
        "RMSprop",
        True,
        (
            _STEP,
            _positive("square_avg", narrows=_not_centered),
            _like("momentum_buffer", exists=_positive_momentum),
            _like("grad_avg", exists=_centered, narrows=_never),
        ),
    ),
    AlgorithmSpec(torch.optim.Rprop, "Rprop", True, (_STEP, _like("prev"), _positive("step_size", initial=_LR))),
    AlgorithmSpec(
        torch.optim.SGD,
        "SGD",
        True,
        (_like("momentum_buffer", initial=AtFirstStep.GRADIENT, exists=_has_momentum),),
        takes_sparse=True,
        fused_agrees=_EXACT,
        fused_astray=(torch.bfloat16, torch.float16),  # it is off by more than the size of a step
    ),
    AlgorithmSpec(
        Adafactor,
        "Adafactor",
        False,
        (
            _STEP,
            StateEntry("row_var", Kind.ROWS, suits=_is_matrix),
            StateEntry("col_var", Kind.COLUMNS, suits=_is_matrix),
            _like("variance", suits=_is_vector),
        ),
        why_not="it divides by means over rows, columns and whole parameters, and a shard has only its own",
        steps_on=StepsOn.PARAMETERS,
        stands_for=torch.optim.Adafactor,
        unsuitable=unsuitable_for_adafactor,
    ),
    AlgorithmSpec(
        LAMB,
        "LAMB",
        False,
        (_STEP, _like("exp_avg"), _positive("exp_avg_sq")),
        why_not=_NORMS,
        steps_on=StepsOn.PARAMETERS,
        unsuitable=unsuitable_for_norms,
    ),
    AlgorithmSpec(
        LARS,
        "LARS",
        False,
        (_like("momentum_buffer", exists=_positive_momentum),),
        why_not=_NORMS,
        steps_on=StepsOn.PARAMETERS,
        unsuitable=unsuitable_for_norms,
    ),
    AlgorithmSpec(
        LBFGS,
        "LBFGS",
        False,
        (
            _like("d"),
            _like("prev_flat_grad"),
            *(StateEntry(name, Kind.HISTORY) for name in ("old_dirs", "old_stps")),
            *(StateEntry(name, Kind.GLOBAL, Dtype.COUNT) for name in ("func_evals", "n_iter", "pairs", "next")),
            *(StateEntry(name, Kind.GLOBAL, Dtype.WIDE) for name in ("t", "H_diag", "prev_loss", "s_dot_y", "y_dot_y")),
        ),
        needs_closure=True,
        steps_on=StepsOn.PARAMETERS,
        stands_for=torch.optim.LBFGS,
        unsuitable=unsuitable_for_lbfgs,
    ),
    AlgorithmSpec(Lion, "Lion", True, (_like("exp_avg"),)),
    AlgorithmSpec(
        Muon,
        "Muon",
        False,
        (_like("momentum_buffer"),),
        steps_on=StepsOn.PARAMETERS,
        stands_for=torch.optim.Muon,
        unsuitable=unsuitable_for_muon,
        later_options=frozenset(["split"]),
    ),
    AlgorithmSpec(
        RowWiseAdagrad,
        "RowWiseAdagrad",
        False,
        (_STEP, _moments("sum", initial="initial_accumulator_value")),
        why_not="its moments are means over rows, and a shard may have only some elements of a row",
        steps_on=StepsOn.PARAMETERS,
        unsuitable=unsuitable_for_row_wise,
        takes_sparse=True,
    ),
    AlgorithmSpec(
        RowWiseAdam,
        "RowWiseAdam",
        False,
        (_STEP, _like("exp_avg"), _moments("exp_avg_sq")),
        why_not="its moments are means over rows, and a shard may have only some elements of a row",
        steps_on=StepsOn.PARAMETERS,
        unsuitable=unsuitable_for_row_wise,
        takes_sparse=True,
    ),
    AlgorithmSpec(ScheduleFreeAdamW, "ScheduleFreeAdamW", True, (*_AVERAGED, _positive("exp_avg_sq"), _BASE)),
    AlgorithmSpec(ScheduleFreeSGD, "ScheduleFreeSGD", True, (*_AVERAGED, _BASE)),
    AlgorithmSpec(
        Shampoo,
        "Shampoo",
        False,
        (
            _STEP,
            _blocks("exp_avg", exists=_has_average),
            _blocks("exp_avg_sq", exists=_is_grafted),
            *_factors("preconditioner", "root"),
        ),
        steps_on=StepsOn.PARAMETERS,
        unsuitable=unsuitable_for_blocks,
    ),
    AlgorithmSpec(
        SOAP,
        "SOAP",
        False,
        (_STEP, _blocks("exp_avg"), _blocks("exp_avg_sq"), *_factors("GG", "Q")),
        steps_on=StepsOn.PARAMETERS,
        unsuitable=unsuitable_for_blocks,
    ),
    AlgorithmSpec(
        SparseAdam,
        "SparseAdam",
        True,
        (StateEntry("step", Kind.SCALAR, Dtype.PLAIN_COUNT), _like("exp_avg"), _positive("exp_avg_sq")),
        takes_sparse=True,
        takes_dense=False,
        stands_for=torch.optim.SparseAdam,
    ),
):
    register(_spec)
