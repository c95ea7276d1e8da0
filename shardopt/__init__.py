"""Optimizers and checkpoints for sharded training, keyed by fully qualified parameter name."""

from shardopt.optim.clipping import GradientClipping, GradientClippingOptimizer
from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from shardopt.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper, keyed
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
    "keyed",
]
