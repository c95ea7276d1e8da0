"""Algorithms that torch lacks and that treat every element by itself, as plain torch optimizers."""
