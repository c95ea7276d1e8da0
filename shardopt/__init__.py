"""Optimizers and checkpoints for sharded training, keyed by fully qualified parameter name."""
