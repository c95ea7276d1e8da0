"""Optimizers and checkpoints for sharded training, keyed by fully qualified parameter name."""

from shardopt.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper, keyed
from shardopt.optim.wrapper import OptimizerWrapper

__all__ = ["KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper", "keyed"]
