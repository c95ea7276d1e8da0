"""Optimizers with state keyed by fully qualified parameter name.

The function that builds one by algorithm and pattern is `shardopt.keyed`; here `keyed` is the module.
"""

from shardopt.algorithms.row_wise.row_wise import RowWiseAdagrad, RowWiseAdam
from shardopt.optim.averaging import EMA, SWA
from shardopt.optim.backward import in_backward
from shardopt.optim.batch_norm import update_bn
from shardopt.optim.clipping import GradientClipping, GradientClippingOptimizer
from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from shardopt.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from shardopt.optim.scaler import GradScaler
from shardopt.optim.schedules import ReduceLROnPlateau
from shardopt.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "EMA",
    "SWA",
    "CombinedOptimizer",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradScaler",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "ReduceLROnPlateau",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "in_backward",
    "update_bn",
]
