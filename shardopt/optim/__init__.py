"""Optimizers with state keyed by fully qualified parameter name.

The function that builds one by algorithm and pattern is `shardopt.keyed`; here `keyed` is the module.
"""

from shardopt.algorithms.blocked.shampoo import Shampoo
from shardopt.algorithms.blocked.soap import SOAP
from shardopt.algorithms.elementwise.ademamix import AdEMAMix
from shardopt.algorithms.elementwise.lion import Lion
from shardopt.algorithms.elementwise.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from shardopt.algorithms.layer_wise.lamb import LAMB
from shardopt.algorithms.layer_wise.lars import LARS
from shardopt.algorithms.row_wise.row_wise import RowWiseAdagrad, RowWiseAdam
from shardopt.optim.averaging import EMA, SWA
from shardopt.optim.backward import in_backward
from shardopt.optim.batch_norm import update_bn
from shardopt.optim.clipping import GradientClipping, GradientClippingOptimizer
from shardopt.optim.decay_ramps import ramped_decay
from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from shardopt.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from shardopt.optim.scaler import GradScaler
from shardopt.optim.schedules import ReduceLROnPlateau
from shardopt.optim.semi_sync.semi_sync import SemiSync
from shardopt.optim.semi_sync.semisync_optimizer import SemisyncOptimizer
from shardopt.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "SOAP",
    "SWA",
    "AdEMAMix",
    "CombinedOptimizer",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradScaler",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "Lion",
    "OptimizerWrapper",
    "ReduceLROnPlateau",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "SemiSync",
    "SemisyncOptimizer",
    "Shampoo",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "in_backward",
    "ramped_decay",
    "update_bn",
]
