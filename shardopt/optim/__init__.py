"""Optimizers with state keyed by fully qualified parameter name.

The function that builds one by algorithm and pattern is `shardopt.keyed`; here `keyed` is the module.
"""

from shardopt.optim.clipping import GradientClipping, GradientClippingOptimizer
from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from shardopt.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

__all__ = [
    "CombinedOptimizer",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
]
