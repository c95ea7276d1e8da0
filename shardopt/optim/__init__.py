"""Optimizers with state keyed by fully qualified parameter name.

The function that builds one by algorithm and pattern is `shardopt.keyed`; here `keyed` is the module.
"""

from shardopt.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper
from shardopt.optim.wrapper import OptimizerWrapper

__all__ = ["KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"]
