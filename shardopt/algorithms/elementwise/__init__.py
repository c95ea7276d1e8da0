"""Algorithms that torch lacks and that update every element by itself, as plain torch optimizers."""
