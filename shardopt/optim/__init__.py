"""Optimizers with state keyed by fully qualified parameter name.

The function that builds one by algorithm and pattern is `shardopt.keyed`; here `keyed` is the module.
"""

from shardopt.optim.clipping import GradientClipping, GradientClippingOptimizer
from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from shardopt.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from shardopt.optim.scaler import GradScaler
from shardopt.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
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
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
]
