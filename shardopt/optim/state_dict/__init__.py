"""The saved form of optimizers, and loading it."""
