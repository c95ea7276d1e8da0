"""Optimizers and checkpoints for sharded training, keyed by fully qualified parameter name."""

from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from shardopt.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper, keyed

__all__ = [
    "CombinedOptimizer",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "keyed",
]
