"""Optimizers and checkpoints for sharded training, keyed by fully qualified parameter name."""

from shardopt.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper, keyed

__all__ = ["KeyedOptimizer", "KeyedOptimizerWrapper", "keyed"]
